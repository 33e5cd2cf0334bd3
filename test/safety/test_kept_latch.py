"""The emergency lane's latch on disk.

It is there after a restart, and a file that cannot be read counts as one.
"""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.safety.emergency import KINDS, OBSTACLE, SILENT, TRIGGER, Latch
from torchperf_ros.safety.kept_latch import LatchKeeper, latch_file, read_latch, warning_without_lane


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "latch.json"


def keep(file, *latches, before=None):
    keeper = LatchKeeper(file, before, lambda: None)
    for latch in latches:
        keeper.keep(latch)
    keeper.close()
    return keeper


@pytest.mark.parametrize("kind", KINDS)
def test_given_a_latch_that_was_kept_when_it_is_read_then_it_is_the_same_and_says_since_when(file, kind):
    keep(file, Latch(kind, "scan shows a wall", 1))
    latch = read_latch(file, 7)
    assert (latch.kind, latch.at_ns) == (kind, 7)
    assert latch.reason.startswith("scan shows a wall (since 20")
    assert file.stat().st_mode & 0o077 == 0
    assert [path.name for path in file.parent.iterdir()] == ["latch.json"]


def test_given_no_file_or_one_that_was_cleared_then_nothing_is_latched(file):
    assert read_latch(file, 0) is None
    keep(file, Latch(TRIGGER, "button is true", 1))
    keep(file, None, before=read_latch(file, 0))
    assert read_latch(file, 0) is None
    assert list(file.parent.iterdir()) == []


def test_given_a_latch_that_was_read_when_the_same_is_kept_then_the_file_stays_as_it_is(file):
    keep(file, Latch(OBSTACLE, "scan shows a wall", 1))
    before = file.read_bytes()
    latch = read_latch(file, 0)
    keep(file, latch, before=latch)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: data.replace(b"wall", b"ball"),
        lambda data: b"[1]",
        lambda data: b'{"v": 1}',
        lambda data: data.replace(b'"v": 1', b'"v": 2'),
        lambda data: b"\xff" * 40,
        lambda data: data + b" " * 100_000,
        lambda data: b"[" * 60_000,
        lambda data: b"null",
    ],
)
def test_given_a_file_that_is_damaged_when_it_is_read_then_it_is_a_latch_that_says_so(file, damage):
    keep(file, Latch(OBSTACLE, "scan shows a wall", 1))
    file.write_bytes(damage(file.read_bytes()))
    latch = read_latch(file, 0)
    assert latch.kind == SILENT
    assert latch.reason.startswith(f"whether it was latched before the node's start is not known: {file} ")


@given(st.binary(max_size=300))
def test_given_any_bytes_when_they_are_read_then_they_are_a_latch(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "any.json"
    file.write_bytes(data)
    assert read_latch(file, 0) is not None


@pytest.mark.parametrize("kind", ["json", "unknown kind"])
def test_given_a_latch_of_a_kind_that_is_none_when_it_is_read_then_it_is_damaged(file, kind):
    keep(file, Latch(kind, "scan shows a wall", 1))
    assert "is damaged (kind " in read_latch(file, 0).reason


def test_given_something_else_in_the_files_place_when_it_is_read_then_it_is_a_latch_and_nobody_waits(file):
    file.parent.mkdir()
    os.mkfifo(file)
    assert "is a FIFO and no file" in read_latch(file, 0).reason
    file.unlink()
    file.mkdir()
    assert "cannot be read (" in read_latch(file, 0).reason
    file.rmdir()
    file.symlink_to(file)
    assert "cannot be read (" in read_latch(file, 0).reason


def test_given_a_link_to_what_is_not_there_when_it_is_read_then_whether_it_was_latched_is_not_known(
    file, tmp_path
):
    file.parent.mkdir()
    file.symlink_to(tmp_path / "gone")
    assert f"cannot be read ({file} is a link to what is not there)" in read_latch(file, 0).reason
    file.unlink()
    file.parent.rmdir()
    file.parent.symlink_to(tmp_path / "unmounted" / "state")
    latch = read_latch(file, 0)
    assert latch.kind == SILENT
    assert f"cannot be read ({file.parent} is a link to what is not there)" in latch.reason


@pytest.mark.parametrize(("cleared", "how"), [(False, {}), (True, {"again_s": 0.01})])
def test_given_a_folder_that_cannot_be_written_when_a_latch_is_kept_or_cleared_then_that_is_tried_again(
    file, cleared, how
):
    file.parent.write_text("in the way")
    keeper = LatchKeeper(file, None, lambda: None, **how)
    keeper.keep(Latch(OBSTACLE, "scan shows a wall", 1))
    while not keeper.problem:
        pass
    assert keeper.problem.startswith(f"{file} does not hold that it is latched: scan shows a wall: ")
    if cleared:
        keeper.keep(None)
    file.parent.unlink()
    while keeper.problem:
        pass
    if cleared:
        keeper.close()
        assert read_latch(file, 0) is None
    else:
        assert read_latch(file, 0).reason.startswith("scan shows a wall")
        keeper.close()


def test_given_a_full_disk_when_a_latch_is_kept_then_an_empty_file_says_so_until_it_is_cleared(file):
    part = file.with_name(".latch.json.part")
    part.mkdir(parents=True)  # nothing can be written
    keeper = keep(file, Latch(OBSTACLE, "scan shows a wall", 1))
    assert keeper.problem
    latch = read_latch(file, 0)
    assert "is damaged" in latch.reason
    part.rmdir()
    keep(file, None, before=latch)
    assert read_latch(file, 0) is None


def test_given_two_nodes_when_each_keeps_its_latch_then_they_have_files_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    files = {latch_file(name) for name in ("/perf", "/front/perf", "/rear/perf", "/front_perf")}
    assert len(files) == 4
    assert all(tmp_path in file.parents for file in files)


def test_given_a_latch_when_its_file_is_looked_at_then_a_person_can_read_it(file):
    keep(file, Latch(TRIGGER, "button is true", 1))
    assert {"kind", "reason", "since"} == json.loads(file.read_text())["latch"].keys()


def test_given_a_process_that_ended_when_it_wrote_then_whether_it_was_latched_is_not_known_until_it_is_cleared(
    file,
):
    file.parent.mkdir()
    part = file.with_name(".latch.json.part")
    part.write_bytes(b'{"v": 1, ')
    latch = read_latch(file, 0)
    assert latch.kind == SILENT
    assert f"{file} was being written when that ended, as {part} is there; look whether" in latch.reason
    keep(file, None, before=latch)
    assert list(file.parent.iterdir()) == []


def test_given_a_latch_when_the_node_is_to_run_without_its_lane_then_a_warning_says_so(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert not warning_without_lane("/perf")
    file = latch_file("/perf")
    keep(file, Latch(TRIGGER, "button is true", 1))
    warning = warning_without_lane("/perf")
    assert "is latched: button is true (since 20" in warning
    assert "nothing holds the plans back" in warning
    assert str(file) in warning
    file.unlink()
    assert not warning_without_lane("/perf")
    file.with_name(f".{file.name}.part").touch()  # a process was killed while it wrote its latch
    assert "is latched: whether it was latched" in warning_without_lane("/perf")
