"""What may lie where a file is expected: no read waits for it, and no memory is filled."""

import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from torchperf_ros.settings.bounded_file import open_regular, read_bounded

MIB = 1 << 20


def make_fifo(path):
    os.mkfifo(path)


def make_folder(path):
    path.mkdir()


def make_device(path):
    path.symlink_to("/dev/zero")


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(os.path.relpath(path))


def make_loop(path):
    path.symlink_to(path)


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(300 * MIB)


NO_FILES = {
    "is a FIFO and no file": make_fifo,
    "is a folder and no file": make_folder,
    "is a device and no file": make_device,
    "No such device or address": make_socket,
    "Too many levels of symbolic links": make_loop,
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
