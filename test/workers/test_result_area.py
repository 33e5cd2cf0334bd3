"""The area that results lie in.

Whole results only, whenever the node looks and wherever the worker dies.
"""

import os
import signal
import zlib
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.workers import result_area
from torchperf_ros.workers.protocol import Response
from torchperf_ros.workers.result_area import ResultArea, make_result_area

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
