"""How long calls take: the one place that times candidates against each other."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns

import numpy as np
import torch

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, Clock
from torchperf_ros.workers.calibration import Calibration, SortedWindow, usual_p99

# below, the clock and the processor's state after another candidate would show
_SHORTEST_SAMPLE_NS = 200_000
_LONG_SAMPLE_NS = 10_000_000  # from here on, what another candidate left in the caches does not show
_MOST_INNER = 1 << 16
_WARM_UP = 3  # calls of each candidate before the first sample
_LOOKS = 2  # before a candidate's samples are planned
_SEED = 0

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """One candidate's samples.

    Attributes:
        times_ms: ms per call, in the order taken, at least one. A sample of a short call is a mean over
            `inner` calls.
        inner: calls per sample; above 1, a p99 is that of such means.
    """

    times_ms: tuple[float, ...]
    inner: int = 1

    @property
    def median_ms(self) -> float:
        return float(np.median(self.times_ms))

    @property
    def p95_ms(self) -> float:
        return float(np.percentile(self.times_ms, 95))

    @property
    def p99_ms(self) -> float:
        return float(np.percentile(self.times_ms, 99))

    @property
    def max_ms(self) -> float:
        return max(self.times_ms)

    @property
    def calibration(self) -> Calibration:
        """What tiers and engines are chosen by.

        The median, and the p99 without isolated stalls of the machine.
        """
        window = SortedWindow(len(self.times_ms))
        for time_ms in self.times_ms:
            window.add(time_ms)
        return Calibration(self.median_ms, usual_p99(window))


def time_interleaved(
    candidates: Mapping[str, Call],
    device: torch.device,
    *,
    seconds: float = 1.0,
    rounds: tuple[int, int] = (5, 1000),
    inner: int | None = None,
    clock: Clock = perf_counter_ns,
    pause_s: float = 0.0,
) -> dict[str, Timing]:
    """Time candidates in turns, one sample of each per round: the machine's moods meet all of them alike.

    A sample is the time of `inner` calls in a row and one synchronisation, divided by `inner`: what a
    caller waits for, launching included. Each round takes the candidates in another order (shuffled, the
    same in every run). Before a sample of less than 10 ms comes a call that is not timed, so that no
    candidate pays for what the one before it left in the caches. Garbage is collected before and after, not
    meanwhile.

    Args:
        candidates: name -> a call without arguments, called in the caller's mode.
        device: what the calls run on; CUDA is synchronised before and after each sample.
        seconds: how long to go on, on average for each candidate, after warming up.
        rounds: the fewest and most samples of each, which bound the `seconds`.
        inner: calls per sample; None: for each candidate the power of two with which a sample takes 200 us
            or more.
        clock: in ns.
        pause_s: seconds of sleep before each sample, in place of the call that is not timed: what a call
            takes at the pace of a node, with caches and threads as the pause leaves them.
    """
    synchronise = _synchronise(device)
    takes = {
        name: partial(_took_ns, call, clock=clock, synchronise=synchronise)
        for name, call in candidates.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(_SEED).shuffle
    with no_garbage_collection():
        for call in candidates.values():
            for _ in range(_WARM_UP):
                call()
        plans = {name: _plan(took_ns, inner) for name, took_ns in takes.items()}
        stop_at = clock() + seconds * len(candidates) * NS_PER_S
        for done in range(rounds[1]):
            if done >= rounds[0] and clock() >= stop_at:
                break
            shuffle(order)
            for name in order:
                count, settle = plans[name]
                if pause_s:
                    time.sleep(pause_s)
                elif settle:
                    candidates[name]()
                samples[name].append(takes[name](count) / count / NS_PER_MS)
    return {name: Timing(tuple(times_ms), plans[name][0]) for name, times_ms in samples.items()}


def _took_ns(call: Call, inner: int, clock: Clock, synchronise: Call) -> int:
    synchronise()
    turns = range(inner)
    started = clock()
    for _ in turns:
        call()
    synchronise()
    return clock() - started


def _plan(took_ns: Callable[[int], int], inner: int | None) -> tuple[int, bool]:
    """How a candidate's samples are taken.

    Calls in each, and whether one that is not timed comes before.
    """
    count = inner or 1
    while True:
        # The least of a few, as a stall would make a short call look long enough.
        found_ns = min(took_ns(count) for _ in range(_LOOKS))
        if inner is not None or found_ns >= _SHORTEST_SAMPLE_NS or count >= _MOST_INNER:
            return count, found_ns < _LONG_SAMPLE_NS
        count *= 2


def _synchronise(device: torch.device) -> Call:
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not again before the end of the block.

    The block of a caller counts for those within it.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
