"""Incidents on disk, bounded; and which alerts are worth a capture."""

import errno
import os
import time
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.workers.incident_folder import (
    CaptureRule,
    IncidentError,
    IncidentFolder,
    open_incidents,
)

KIB = 1 << 10
START = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=timezone.utc)


class SteppingClock:
    """One second later each time."""

    def __init__(self, step_s=1.0):
        self.now, self.step = START, timedelta(seconds=step_s)

    def __call__(self):
        self.now += self.step
        return self.now


def writes(size_bytes, name="data"):
    return lambda folder: (folder / name).write_bytes(bytes(size_bytes))


def make(root, max_count=10, max_mib=1, step_s=1.0):
    return IncidentFolder(root, max_count, max_mib, SteppingClock(step_s))


def test_given_an_incident_when_kept_then_its_folder_has_the_time_and_all_that_was_written(tmp_path):
    folder = make(tmp_path / "not" / "there")
    seen = []

    def write(part):
        (part / "inner").mkdir()
        (part / "inner" / "report.txt").write_text("all of it", encoding="utf-8")
        seen.append((part, folder.incidents()))

    kept = folder.keep("Profile: perception/full", write)
    assert kept.name == "20260301T120001.250Z_profile-perception-full"
    assert (kept / "inner" / "report.txt").read_text(encoding="utf-8") == "all of it"
    assert folder.incidents() == [kept]
    ((part, while_written),) = seen
    assert while_written == []  # half of it is never found
    assert not part.exists()
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("max_count", "sizes_kib"), [(2, (1, 1, 1, 1, 1)), (10, (300, 300, 300, 600))])
def test_given_more_incidents_or_bytes_than_allowed_when_one_is_kept_then_the_oldest_go(
    tmp_path, max_count, sizes_kib
):
    folder = make(tmp_path, max_count=max_count)
    kept = [folder.keep("some", writes(size * KIB)) for size in sizes_kib]
    assert folder.incidents() == kept[-2:]


def test_given_a_clock_that_was_set_back_when_an_incident_is_kept_then_it_is_not_the_one_to_go(tmp_path):
    folder = make(tmp_path, max_count=2, step_s=-60.0)
    kept = [folder.keep("some", writes(1)) for _ in range(3)]
    assert kept[2].is_dir()
    assert len(folder.incidents()) == 2


def test_given_an_incident_larger_than_all_may_be_when_kept_then_it_is_refused_and_the_others_stay(
    tmp_path,
):
    folder = make(tmp_path)
    small = folder.keep("small", writes(KIB))
    with pytest.raises(IncidentError, match=r"large: 1\.5 MiB are more than evidence_mib, 1,"):
        folder.keep("large", writes(1536 * KIB))
    assert list(tmp_path.iterdir()) == [small]


def test_given_two_incidents_in_one_millisecond_when_kept_then_both_are_there(tmp_path):
    folder = make(tmp_path, step_s=0.0)
    kept = [folder.keep("same", writes(1)) for _ in range(4)]
    assert len(set(kept)) == 4
    assert folder.incidents() == sorted(kept)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_given_a_full_disk_when_kept_then_the_error_says_so_and_nothing_is_left(tmp_path):
    def write(part):
        (part / "first").write_bytes(b"1")
        with Path("/dev/full").open("wb", buffering=0) as full:
            full.write(b"2")

    with pytest.raises(
        IncidentError, match=f"_broken cannot be kept in {tmp_path}: {os.strerror(errno.ENOSPC)}"
    ):
        make(tmp_path).keep("broken", write)
    assert list(tmp_path.iterdir()) == []


def test_given_a_file_in_the_folders_place_when_kept_then_the_error_names_it(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(IncidentError, match=r"cannot be kept in .*file: .*see evidence_dir"):
        make(tmp_path / "file").keep("some", writes(1))


def test_given_a_writer_that_fails_when_kept_then_its_error_is_the_callers_and_nothing_is_left(tmp_path):
    with pytest.raises(ZeroDivisionError):
        make(tmp_path).keep("some", lambda part: 1 / 0)
    assert list(tmp_path.iterdir()) == []


NO_PROCESS = 1 << 22  # above the largest process id of Linux


def test_given_what_killed_processes_left_when_kept_then_it_goes_soon_and_what_one_may_write_after_a_day(
    tmp_path,
):
    ages_s = {(1, 90_000): False, (1, 3_600): True, (NO_PROCESS, 3_600): False, (NO_PROCESS, 0): True}
    for pid, age_s in ages_s:
        part = tmp_path / f".part-{pid}-{age_s}-x"
        part.mkdir()
        (part / "half").touch()
        os.utime(part, (time.time() - age_s,) * 2)
    make(tmp_path).keep("some", writes(1))
    assert {key: (tmp_path / f".part-{key[0]}-{key[1]}-x").exists() for key in ages_s} == ages_s


def test_given_what_belongs_to_somebody_else_when_kept_then_it_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "20260101T000000.000Z_file").touch()
    folder = make(tmp_path, max_count=1)
    folder.keep("some", writes(1))
    folder.keep("some", writes(1))
    assert (tmp_path / "notes").is_dir()
    assert (tmp_path / "20260101T000000.000Z_file").is_file()
    (tmp_path / "20260101T000000.000Z_link").symlink_to(tmp_path / "notes")
    assert folder.clear()[0] == 1


def keep_some(root):
    for _ in range(20):
        IncidentFolder(root, 5, 1).keep("together", writes(KIB))


def test_given_several_processes_when_all_keep_then_the_bound_holds_and_every_folder_is_complete(tmp_path):
    processes = [get_context("fork").Process(target=keep_some, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    incidents = IncidentFolder(tmp_path, 5, 1).incidents()
    assert 1 <= len(incidents) <= 5
    assert all((incident / "data").stat().st_size == KIB for incident in incidents)


@given(what=st.text(max_size=80))
def test_given_any_words_when_made_a_name_then_it_is_one_folder_inside(tmp_path_factory, what):
    root = tmp_path_factory.mktemp("evidence")
    kept = make(root).keep(what, writes(1))
    assert kept.parent == root
    assert kept.name.isascii()
    assert kept.name.isprintable()


def test_given_the_parameters_when_opened_then_the_folder_is_the_one_named_or_the_users(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert open_incidents("", 1).root == tmp_path / "torchperf_ros"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert open_incidents("", 1).root == Path("/home/me/.local/state/torchperf_ros")
    assert open_incidents("~/mine", 1).root == Path("/home/me/mine")


S = 1_000_000_000
STAGES = ("perception", "planning")


@pytest.mark.parametrize(
    ("level", "name", "wanted"),
    [
        (Level.ERROR, "perception: deadline missed", ("perception", "profile")),
        (Level.ERROR, "planning: latency", ("planning", "profile")),
        (Level.WARN, "perception: deadline missed", None),
        (Level.WARN, "perception: memory grows", ("perception", "memory")),
        (Level.ERROR, "perception: memory grows", ("perception", "memory")),
        (Level.OK, "perception: memory grows", None),
        (Level.STALE, "perception: deadline missed", None),
        (Level.WARN, "node: memory grows", ("perception", "memory")),
        (Level.WARN, "node: load", None),
        (Level.ERROR, "perception: bad input", None),
        (Level.ERROR, "perception: input stopped", None),
        (Level.ERROR, "unknown", None),
    ],
)
def test_given_an_event_when_told_then_it_asks_for_what_helps(level, name, wanted):
    assert CaptureRule().wanted(Alert(level, name, ""), STAGES, 0) == wanted


def test_given_errors_that_keep_coming_when_told_then_each_stage_and_kind_is_asked_for_once_in_a_while():
    rule = CaptureRule()
    error = Alert(Level.ERROR, "perception: deadline missed", "")
    taken = []
    for second in range(0, 1900, 10):
        if wanted := rule.wanted(error, STAGES, second * S):
            rule.taken(*wanted, second * S)
            taken.append(second)
    assert taken == [0, 600, 1200, 1800]
    others = (
        Alert(Level.ERROR, "planning: latency", ""),
        Alert(Level.WARN, "perception: memory grows", ""),
    )
    assert [rule.wanted(other, STAGES, 1859 * S) for other in others] == [None, None]
    kinds = [("planning", "profile"), ("perception", "memory")]
    assert [rule.wanted(other, STAGES, 1860 * S) for other in others] == kinds
    assert not rule.wanted(Alert(Level.ERROR, "perception: model error", ""), STAGES, 1860 * S)


def test_given_evidence_that_could_not_be_taken_when_the_event_is_told_again_then_it_is_wanted_still():
    rule = CaptureRule()
    error = Alert(Level.ERROR, "perception: deadline missed", "")
    assert rule.wanted(error, STAGES, 0)
    assert rule.wanted(error, STAGES, S)
    assert (
        rule.wanted(Alert(Level.WARN, "node: memory grows", ""), (), S) is None
    )  # of a node without stages
