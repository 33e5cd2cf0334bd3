"""Memory that two processes share.

No end of it can be cut off, and workers cannot write where they only read.
"""

import mmap
import os
import subprocess
import sys
import threading
from unittest import mock

import pytest

from torchperf_ros.node.emergency_process import StopArea
from torchperf_ros.workers import frame_ring, memory_file
from torchperf_ros.workers.frame_ring import FrameReader, FrameRing, InputBytes
from torchperf_ros.workers.memory_file import keep_order, make_memory_file, read_only
from torchperf_ros.workers.result_area import make_result_area

SIZE = 1 << 16
HEAD_AT = 8
"""Where a ring says how far its writer has come."""
MAKERS = {
    "ring": lambda: FrameRing(SIZE).fd,
    "ring that grows": lambda: FrameRing(SIZE, 4 * SIZE).fd,
    "result area": lambda: make_result_area(SIZE),
    "stop area": lambda: StopArea().fd,
    "any": lambda: make_memory_file("any", SIZE),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("size", [0, SIZE // 2, 1 << 30])
def test_given_shared_memory_when_its_end_is_moved_then_the_kernel_refuses(name, size):
    fd = MAKERS[name]()
    before = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == before


def test_given_a_worker_that_cuts_its_memory_off_when_the_node_reads_then_the_node_lives():
    code = f"""if True:
        import os
        from torchperf_ros.workers.result_area import ResultArea, make_result_area
        fd = make_result_area({SIZE})
        node = ResultArea(fd, writable=False)
        if os.fork() == 0:  # the worker's side
            try:
                os.ftruncate(fd, 0)
            finally:
                os._exit(0)
        os.wait()
        print(node.handled)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_given_a_descriptor_to_read_by_when_written_to_then_the_kernel_refuses():
    fd = make_memory_file("any", SIZE)
    reader = read_only(fd)
    os.pwrite(fd, b"frame", 100)
    assert os.pread(reader, 5, 100) == b"frame"
    for write in (
        lambda: os.pwrite(reader, b"x", 0),
        lambda: os.ftruncate(reader, 0),
        lambda: mmap.mmap(reader, SIZE),
        lambda: os.posix_fallocate(reader, 0, SIZE),
    ):
        with pytest.raises(
            (PermissionError, OSError), match=r"Bad file|Invalid argument|not permitted|denied"
        ):
            write()
    assert not os.get_inheritable(reader)


def test_given_a_ring_when_closed_then_both_its_descriptors_are():
    before = set(os.listdir("/proc/self/fd"))
    ring = FrameRing(SIZE)
    FrameReader(ring.reader_fd)
    ring.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1  # the reader's mapping holds one


def test_given_a_ring_that_goes_round_when_a_record_is_overwritten_then_that_is_announced_in_order_before():
    ring = FrameRing(1024)
    reader = FrameReader(ring.reader_fd)
    offset, length = ring.write(1, [InputBytes(0, 0, 0.0, b"a" * 400)])
    seen = []

    def look():
        head = int.from_bytes(os.pread(ring.fd, 8, HEAD_AT), "little")
        seen.append((head > offset + 1024, os.pread(ring.fd, length, mmap.PAGESIZE + offset).count(b"b")))

    with mock.patch.object(frame_ring, "keep_order", look):
        for seq in (2, 3):
            ring.write(seq, [InputBytes(0, 0, 0.0, b"b" * 400)])
    assert seen == [(False, 0), (True, 0)]  # the third one goes where the first was
    assert not reader.holds(offset)
    ring.close()


def test_given_a_reader_when_it_asks_for_a_record_again_then_what_it_has_read_comes_before():
    ring = FrameRing(1024)
    offset, _ = ring.write(1, [InputBytes(0, 0, 0.0, b"a" * 400)])
    reader = FrameReader(ring.reader_fd)

    def overwrite():
        os.pwrite(ring.fd, (offset + 2048).to_bytes(8, "little"), HEAD_AT)

    with mock.patch.object(frame_ring, "keep_order", overwrite):
        assert not reader.holds(offset)
    ring.close()


def test_given_a_processor_that_keeps_no_order_when_threads_ask_for_it_then_each_goes_through_a_lock_twice():
    with (
        mock.patch.object(memory_file, "_KEEPS_ORDER", False),
        mock.patch.object(memory_file, "_lock") as lock,
    ):
        keep_order()
    assert lock.__enter__.call_count == lock.__exit__.call_count == 2
    with mock.patch.object(memory_file, "_KEEPS_ORDER", False):
        threads = [threading.Thread(target=keep_order) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
