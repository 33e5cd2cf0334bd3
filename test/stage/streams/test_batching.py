"""Several frames in one run: as many as are in time together, and only where that is faster than one by one."""

import math

from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.stage.batching import BatchTimes
from torchperf_ros.stage.waiter import Alarm, PublishMargin
from torchperf_ros.workers.calibration import Batching

TIER = 0
MS = st.floats(0.1, 500.0)


@given(
    most=st.integers(1, 8),
    whole_ms=st.lists(MS, min_size=4, max_size=4),
    lefts_ms=st.lists(st.floats(-5.0, 1000.0), min_size=1, max_size=10),
    alone_ms=MS,
    overhead_ms=st.floats(0.0, 5.0),
    slowdown=st.floats(0.5, 4.0),
    runs=st.lists(st.tuples(st.integers(2, 8), MS), max_size=20),
)
def test_given_any_times_when_frames_run_together_then_all_are_in_time_and_it_is_faster_than_one_by_one(
    most, whole_ms, lefts_ms, alone_ms, overhead_ms, slowdown, runs
):
    times = BatchTimes()
    times.measured(Batching(most, "", (tuple(zip((1, 2, 4, 8), whole_ms, strict=True)),)))
    for size, ms in runs:
        times.add(TIER, size, ms)
    size = times.largest(TIER, lefts_ms, alone_ms, overhead_ms, slowdown)
    assert 1 <= size <= max(1, min(most, len(lefts_ms)))
    if size > 1:
        together_ms = times.predicted_ms(TIER, size, slowdown)
        assert together_ms < size * alone_ms
        assert together_ms + size * overhead_ms <= min(lefts_ms[:size])


def test_given_a_model_that_is_not_to_be_batched_when_asked_then_each_frame_runs_alone():
    times = BatchTimes()
    assert times.largest(TIER, [1000.0] * 4, 10.0, 0.0, 1.0) == 1
    times.measured(Batching(1, "it mixes the frames"))
    assert times.largest(TIER, [1000.0] * 4, 10.0, 0.0, 1.0) == 1
    assert math.isinf(times.predicted_ms(TIER, 2, 1.0))


def test_given_a_size_that_was_slow_for_a_while_when_the_machine_is_well_again_then_it_is_tried_again():
    times = BatchTimes()
    times.measured(Batching(2, "", (((1, 10.0), (2, 12.0)),)))
    for _ in range(3):
        times.add(TIER, 2, 100.0)
    asked = 0
    while times.largest(TIER, [50.0, 50.0], 10.0, 0.0, 1.0) == 1:
        asked += 1
        assert asked < 10_000
    assert asked > 100


class Timer:
    at_ns = 0

    def set(self, at_ns):
        self.at_ns = at_ns

    def wake(self):
        self.at_ns = 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000)), max_size=30))
def test_given_several_streams_when_each_sets_its_alarm_then_the_timer_rings_for_the_earliest(sets):
    timer, alarms = Timer(), []
    for _ in range(4):
        Alarm(timer, alarms)
    wanted = [0] * 4
    for stream, at_ns in sets:
        if at_ns == 1000:
            alarms[stream].wake()
            wanted[stream] = 1
        else:
            alarms[stream].set(at_ns)
            wanted[stream] = at_ns
        assert timer.at_ns == min((at for at in wanted if at), default=0)


def test_given_two_sizes_that_were_slow_when_the_machine_is_well_again_then_both_are_tried_at_once():
    times = BatchTimes()
    times.measured(Batching(4, "", (((1, 10.0), (2, 12.0), (4, 14.0)),)))
    for size in (2, 3, 4) * 3:
        times.add(TIER, size, 100.0)
    found = [times.largest(TIER, [50.0] * 4, 10.0, 0.0, 1.0) for _ in range(200)]
    assert (found[0], found[-1]) == (1, 4)


@given(st.integers(1, 8), st.lists(st.floats(0.0, 50.0), min_size=1, max_size=5))
def test_given_streams_with_one_deadline_when_their_answers_take_long_then_the_margin_may_cover_all_of_them(
    streams, late_ms
):
    margin = PublishMargin(streams=streams)
    for ms in late_ms:
        margin.woke(ms)
    assert margin.ms == min(max(0.1, *late_ms) + 0.1, 4.0 * streams)
