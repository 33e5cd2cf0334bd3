import gc

import pytest
import torch

from torchperf_ros.api.clock import VirtualClock
from torchperf_ros.engines import device
from torchperf_ros.engines.device import Timing, time_interleaved

CPU = torch.device("cpu")


class Bench:
    """Candidates that take virtual time, and what was called, in order."""

    def __init__(self):
        self.clock = VirtualClock()
        self.calls = []

    def takes(self, name, *times_ms):
        times = iter(times_ms)

        def call():
            self.calls.append(name)
            self.clock.advance_ms(next(times, times_ms[-1]))

        return call

    def synchronise(self):
        self.calls.append("sync")

    def time(self, candidates, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "_synchronise", lambda device: self.synchronise)
            return time_interleaved(candidates, CPU, clock=self.clock, **options)


@pytest.fixture
def bench():
    return Bench()


def test_given_isolated_stalls_when_calibrated_then_the_p99_leaves_them_out_and_the_maximum_does_not():
    assert Timing(tuple(float(value) for value in range(1, 102))).p95_ms == 96.0
    timing = Timing((1.0,) * 95 + (80.0,) * 5)
    assert timing.calibration().p99_ms == 1.0
    assert timing.calibration().median_ms == 1.0
    assert timing.max_ms == timing.p99_ms == 80.0


def test_given_two_candidates_when_timed_then_each_gets_its_own_times_and_warm_up_does_not_count(bench):
    slow, fast = bench.takes("slow", 500.0, 500.0, 8.0), bench.takes("fast", 900.0, 900.0, 3.0)
    found = bench.time({"slow": slow, "fast": fast}, inner=1, rounds=(4, 4))
    assert [(name, one.times_ms) for name, one in found.items()] == [
        ("slow", (8.0,) * 4),
        ("fast", (3.0,) * 4),
    ]


def test_given_three_candidates_when_timed_then_they_take_turns_and_none_always_follows_the_same_one(bench):
    names = ["a", "b", "c"]
    bench.time({name: bench.takes(name, 10.0) for name in names}, inner=1, rounds=(40, 40))
    order = [name for name in bench.calls if name != "sync"][
        5 * len(names) :
    ]  # without the warm-up and the looks before
    turns = [order[start : start + 3] for start in range(0, len(order), 3)]
    assert all(sorted(turn) == names for turn in turns)
    assert len(set(zip(order, order[1:], strict=False))) >= 6
    assert {turn[0] for turn in turns} == set(names)


def test_given_a_device_when_timed_then_it_is_idle_before_each_sample_and_done_within_it(bench):
    clock = bench.clock

    def synchronise():
        bench.calls.append("sync")
        if bench.calls[-2:-1] == ["call"]:
            clock.advance_ms(9.0)  # what the call had only launched

    bench.synchronise = synchronise
    found = bench.time({"call": bench.takes("call", 1.0)}, inner=1, rounds=(2, 2))
    assert found["call"].times_ms == (10.0, 10.0)
    assert bench.calls == [*["call"] * 3, *["sync", "call", "sync"] * 4]  # warm-up, two looks, two samples


def test_given_a_call_of_microseconds_when_timed_then_a_sample_is_long_enough_whatever_stalls(bench):
    found = bench.time(
        {"tiny": bench.takes("tiny", 0.009), "long": bench.takes("long", 0.2)}, rounds=(2, 2)
    )
    assert found["tiny"].inner == 32  # 16 would be 144 us
    assert found["long"].inner == 1
    assert found["tiny"].times_ms == pytest.approx((0.009, 0.009))
    stalled = bench.time({"tiny": bench.takes("tiny", 0.01, 0.01, 0.01, 4.0, 0.01)}, rounds=(1, 1))
    assert stalled["tiny"].inner == 32


@pytest.mark.parametrize(("inner", "warm_ms"), [(4, 0.01), (1, 0.01), (1, 9.9)])
def test_given_another_candidate_before_when_a_short_call_is_timed_then_it_does_not_pay_for_cold_caches(
    bench, inner, warm_ms
):
    def last_call():
        return next((name for name in reversed(bench.calls) if name != "sync"), None)

    def cold_after_another(name):
        def call():
            bench.clock.advance_ms(warm_ms if last_call() == name else 15.0)
            bench.calls.append(name)

        return call

    found = bench.time({name: cold_after_another(name) for name in "ab"}, inner=inner, rounds=(3, 3))
    assert found["a"].times_ms == found["b"].times_ms == pytest.approx((warm_ms,) * 3)


@pytest.mark.parametrize(
    ("call_ms", "seconds", "expected"),
    [(10.0, 1.0, 100), (900.0, 1.0, 5), (0.5, 1.0, 1000), (10.0, 0.0, 5)],
)
def test_given_a_time_when_timed_then_samples_are_as_many_as_fit_within_bounds(
    bench, call_ms, seconds, expected
):
    found = bench.time({name: bench.takes(name, call_ms) for name in "ab"}, seconds=seconds, inner=1)
    assert [len(timing.times_ms) for timing in found.values()] == [expected, expected]


def test_given_garbage_collection_when_timed_then_it_pauses_and_goes_on_even_after_an_error(bench):
    seen = []

    def fails():
        seen.append(gc.isenabled())
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        bench.time({"fails": fails})
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.gpu
def test_given_cuda_when_timed_then_a_launched_kernel_is_waited_for():
    device = torch.device("cuda", 0)
    big, small = (torch.rand(size, size, device=device) for size in (8192, 8))
    found = time_interleaved({"big": lambda: big @ big, "small": lambda: small @ small}, device, inner=1)
    assert found["big"].median_ms > 10 * found["small"].median_ms
