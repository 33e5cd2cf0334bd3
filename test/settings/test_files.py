"""What may lie where a file is expected: no read waits for it, and no memory is filled."""

import os
import socket
import stat
import tracemalloc
from pathlib import Path

import pytest

from torchperf_ros.settings.files import exposed, make_private, open_regular, read_bounded


@pytest.fixture
def generous_umask():
    """As many distributions have it for users with a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_given_missing_folders_then_each_is_the_users_alone_and_what_was_there_stays(
    tmp_path, generous_umask
):
    tmp_path.chmod(0o755)
    make_private(tmp_path / "a" / "b")
    make_private(tmp_path / "a" / "b")
    assert (mode(tmp_path), mode(tmp_path / "a"), mode(tmp_path / "a" / "b")) == (0o755, 0o700, 0o700)


def test_given_a_file_in_the_way_or_a_file_system_that_takes_no_folder_when_made_then_it_is_an_error(
    tmp_path,
):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/no file/below")):
        with pytest.raises(OSError, match="file"):
            make_private(path)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    make_private(path.parent)
    path.touch(mode=0o644)
    return path


@pytest.mark.parametrize(("part", "bits"), [("a", 0o1777), ("a/b", 0o755)])
def test_given_a_sticky_folder_or_what_only_the_user_can_write_on_the_way_when_asked_then_it_is_not_exposed(
    file, tmp_path, part, bits
):
    (tmp_path / part).chmod(bits)
    assert exposed(file) == exposed(file.parent / "not" / "there") == ""


@pytest.mark.parametrize(
    ("part", "bits", "said"),
    [
        ("a/b/file", 0o664, "others can write {} (mode 0664); if its content is yours: `chmod go-w {}`"),
        ("a/b", 0o702, "others can write {} (mode 0702); if its content is yours: `chmod go-w {}`"),
        ("a", 0o770, "others can write {} (mode 0770); if its content is yours: `chmod go-w {}`"),
        ("a/b", 0o1777, "everybody can write {} (mode 1777); choose a folder of your own"),
    ],
)
def test_given_a_part_of_the_way_that_others_can_write_when_asked_then_it_is_named(
    file, tmp_path, part, bits, said
):
    (tmp_path / part).chmod(bits)
    assert exposed(file) == said.format(tmp_path / part, tmp_path / part)


def test_given_a_folder_that_others_can_write_when_asked_then_it_is_to_be_made_private(tmp_path):
    tmp_path.chmod(0o775)
    assert exposed(tmp_path).endswith(f"`chmod 700 {tmp_path}`")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_given_somebody_elses_folder_when_asked_then_both_are_named(file):
    os.chown(file.parent, 12_345, -1)
    assert exposed(file) == f"{file.parent} belongs to user 12345; it has to belong to root or root"


MIB = 1 << 20


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(os.path.relpath(path))


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(300 * MIB)


NO_FILES = {
    "is a FIFO and no file": os.mkfifo,
    "is a folder and no file": Path.mkdir,
    "is a device and no file": lambda path: path.symlink_to("/dev/zero"),
    "No such device or address": make_socket,
    "Too many levels of symbolic links": lambda path: path.symlink_to(path),
    "has more than 1,048,576 bytes": make_huge,
}
"""What the error says, and what makes such a thing at a path."""


@pytest.mark.parametrize("said", NO_FILES)
def test_given_what_is_no_file_or_too_large_when_read_then_it_is_an_error_at_once_that_says_so(
    tmp_path, monkeypatch, said
):
    monkeypatch.chdir(tmp_path)
    NO_FILES[said](tmp_path / "plan")
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="Errno") as error:
            read_bounded(tmp_path / "plan")
        assert error.value.strerror == said
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB
    finally:
        tracemalloc.stop()


def test_given_a_file_when_read_then_all_of_it_is_there_up_to_the_bound(tmp_path):
    path = tmp_path / "plan"
    path.write_bytes(bytes(10))
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_bounded(link, 10) == bytes(10)
    with pytest.raises(OSError, match="has more than 9 bytes"):
        read_bounded(path, 9)
    with open_regular(path) as file:
        assert file.read() == bytes(10)
    held = {
        Path(f"/proc/self/fd/{number}").resolve()
        for number in os.listdir("/proc/self/fd")
        if number.isdigit()
    }
    assert path not in held
