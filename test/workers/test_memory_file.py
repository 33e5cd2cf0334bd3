"""Memory that two processes share.

No end of it can be cut off, and workers cannot write where they only read.
"""

import mmap
import os
import signal
import threading
import zlib
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.node.emergency_process import StopArea
from torchperf_ros.workers import frame_ring, memory_file, result_area
from torchperf_ros.workers.frame_ring import FrameReader, FrameRing, InputBytes
from torchperf_ros.workers.memory_file import keep_order, make_memory_file, read_only
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.result_area import ResultArea, make_result_area

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


def test_given_a_worker_that_cuts_its_memory_off_when_the_node_reads_then_the_node_lives(
    python,
):
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
    assert python(code) == "0\n"


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


# -- results in shared memory


ROOM = 1001
READS, DIFFERENT = int(os.environ.get("TORCHPERF_RESULT_READS", "100_000")), 100


def partial(seq, step):
    return Response(0, 1, seq, 0, 1, 2, 3, 4, step)


class Sides:
    def __init__(self, room=ROOM, places=1):
        self.fd = make_result_area(room, places)
        self.worker, self.node = ResultArea(self.fd, writable=True), ResultArea(self.fd, writable=False)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.worker.close()
        self.node.close()
        os.close(self.fd)


@given(st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=ROOM + 1)), max_size=8), st.integers(0, 2))
def test_given_partial_results_when_asked_for_a_frame_then_the_newest_is_whole_and_its_own(puts, asked):
    with Sides() as sides:
        kept = [
            (seq, step, data)
            for step, (seq, data) in enumerate(puts, 1)
            if sides.worker.put(partial(seq, step), data)
        ]
        assert len(kept) == sum(len(data) <= ROOM for _, data in puts)
        found = sides.node.newest(asked)
        if not kept or kept[-1][0] != asked:
            assert found is None
        else:
            response, payload = found
            assert (response.seq, response.step, payload, response.length) == (*kept[-1], len(kept[-1][2]))


@pytest.mark.parametrize("puts", [0, 1, 2])
@pytest.mark.parametrize("dies_in", ["head", "checksum"])
def test_given_a_worker_that_dies_while_it_writes_when_asked_then_the_result_before_it_is_there(
    puts, dies_in
):
    with Sides() as sides:
        for step in range(1, puts + 1):
            sides.worker.put(partial(7, step), b"%d" % step * 9)
        what = (Response, "pack") if dies_in == "head" else (result_area.zlib, "crc32")
        with mock.patch.object(*what, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            sides.worker.put(partial(7, 9), b"x" * ROOM)
        found = sides.node.newest(7)
        assert (found and (found[0].step, found[1])) == ((puts, b"%d" % puts * 9) if puts else None)


def test_given_a_reader_that_is_overtaken_when_it_looks_then_it_looks_again_and_gives_up_at_last():
    with Sides() as sides:
        sides.worker.put(partial(7, 1), b"first")
        left = 3

        def overtaken(*arguments):
            nonlocal left
            found = zlib.crc32(*arguments)
            if left > 0:
                left -= 1
                with mock.patch.object(result_area, "zlib", zlib):
                    for step in (2, 3):
                        sides.worker.put(partial(7, step), b"newer")
                return found + 1  # as of bytes of which some are newer
            return found

        with mock.patch.object(result_area, "zlib", mock.Mock(crc32=overtaken)):
            assert sides.node.newest(7)[1] == b"newer"
            left = 1_000
            assert sides.node.newest(7) is None


def test_given_results_when_written_then_they_are_read_and_one_too_long_is_refused():
    with Sides() as sides:
        sides.worker.write(b"result")
        sides.worker.put(partial(7, 1), b"x" * ROOM)
        sides.worker.count_handled()
        assert (sides.node.read(6), sides.node.handled, sides.node.room) == (b"result", 1, ROOM)
        with pytest.raises(ProtocolError, match="response of 1002 bytes in a result area of 1001"):
            sides.node.read(ROOM + 1)


def test_given_a_process_that_writes_as_fast_as_it_can_when_read_and_killed_then_no_result_is_ever_torn():
    with Sides(room=4096) as sides:
        pid = os.fork()
        if not pid:
            step = 0
            while True:  # until it is killed: lengths and bytes follow from the step
                step = step % 60_000 + 1
                sides.worker.put(partial(7, step), bytes([step % 251]) * (64 * (step % 61) + 1))
        try:
            seen, reads = set(), 0
            while len(seen) < DIFFERENT or reads < READS:
                reads += 1
                if (found := sides.node.newest(7)) is not None:
                    seen.add(check(*found))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        check(*sides.node.newest(7))
        print(f"{reads:,} reads gave {len(seen):,} different results, none of them torn")


def check(response, payload):
    step = response.step
    assert payload == bytes([step % 251]) * (64 * (step % 61) + 1)
    return step


@given(st.data(), st.integers(1, 5))
def test_given_results_in_places_of_their_own_when_read_late_then_each_is_as_it_was_written(data, places):
    results = data.draw(st.lists(st.binary(max_size=ROOM), min_size=places, max_size=places))
    with Sides(places=places) as sides:
        for place in data.draw(st.permutations(range(places))):
            sides.worker.write(results[place], place)
        assert sides.worker.put(partial(7, 1), bytes(ROOM))
        assert [sides.node.read(len(each), place) for place, each in enumerate(results)] == results
        with pytest.raises(ProtocolError, match=f"place {places} of a result area that has fewer"):
            sides.node.read(1, places)
