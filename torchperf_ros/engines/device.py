"""Where a model runs, and how long calls take: the one place that times candidates against each other.

Device choice, streams, copies from the host, memory, and errors that end a process. What is timed is warmed
up, synchronised, in turns.
"""

import contextlib
import ctypes
import gc
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import NoReturn

import numpy as np
import psutil
import torch

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, Clock
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.workers.calibration import Calibration, SortedWindow, usual_p99

_MEMORY_STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "peak": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
# Of CUDA; of torch, ONNX Runtime and C++ on the CPU.
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "bad_alloc", "bad allocation")
_LARGE = 1 << 17  # elements that torch shares out among its threads
_libc = ctypes.CDLL(None)
_INDEX = re.compile(r"cuda(?::(\d+))?")


def refused_memory(device: torch.device) -> int:
    """How often the allocator had not enough memory on a CUDA device, also where it got some in the end."""
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def lacks_memory(error: BaseException, *, is_refused: bool) -> bool:
    """Whether an error is for want of memory; `is_refused`: the allocator has refused some meanwhile.

    Libraries and packages raise errors of other kinds then, the latter without a word of it.
    """
    is_named = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return is_refused or is_named or any(word in str(error) for word in _OUT_OF_MEMORY)


class DeviceLost(TorchperfError):
    """The device that the worker before this one had is not there now; it may come back."""


def choose_device(wanted: str, *, before: str = "") -> torch.device:
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`, as the parameter `device` has it.

    Cards are numbered by their place on the bus, as `nvidia-smi` and NVML number them, unless the user has
    chosen another order; CUDA itself would put the fastest first. `before` is what an earlier worker of the
    stage ran on.

    Raises:
        ConfigError: a device that this machine does not have.
        DeviceLost: likewise, but an earlier worker had it.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    wanted = before or wanted
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device(wanted)
    asked, count = _INDEX.fullmatch(wanted), torch.cuda.device_count()
    index = count if asked is None else int(asked[1] or 0)  # torch keeps 8 bits: 300 would be 44
    if torch.cuda.is_available() and index < count:
        return torch.device("cuda", index)
    found = f"torch {torch.__version__} sees {count} CUDA devices"
    if before:
        raise DeviceLost(f"device {before}, which the worker before had, is not there: {found}")
    raise ConfigError(f"parameter device: {wanted!r} is not there; {found}")


def leave(code: int) -> NoReturn:
    """End this process at once, as one with a broken CUDA context has to.

    What it would destroy on its way raises.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _openmp_threads() -> tuple[int, ...]:
    """Threads that share operators with the calling one.

    Those that come to be at its first large operator.
    """
    before = set(os.listdir("/proc/self/task"))
    torch.ones(_LARGE).add_(1)
    return tuple(int(each) for each in set(os.listdir("/proc/self/task")) - before)


class Timed:
    """Times the blocks that it is entered for, one after the other: on CUDA by events, else by the clock.

    At the end of a block it waits for the thread's stream. That wait spins, as the one of every `.cpu()`
    does: to be woken up takes longer than what a worker has left to do.

    Attributes:
        took_ns: time of the block, on CUDA until `stop` where that is called in it.
        waited_ns: on CUDA, what the block took by the clock beyond that; else 0.
    """

    def __init__(self, *, is_cuda: bool) -> None:
        self.took_ns = self.waited_ns = self._entered_ns = 0
        self._is_cuda, self._is_stopped = is_cuda, False
        if is_cuda:
            self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> "Timed":
        self._entered_ns = time.perf_counter_ns()
        if self._is_cuda:
            self._is_stopped = False
            self._begin.record()
        return self

    def stop(self) -> None:
        """What the block enqueues is waited for, and on the CPU alone it is timed."""
        if self._is_cuda:
            self._is_stopped = True
            self._end.record()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        if not self._is_cuda:
            self.took_ns = time.perf_counter_ns() - self._entered_ns
            return
        if not self._is_stopped:
            self.stop()
        torch.cuda.current_stream().synchronize()
        self.took_ns = round(self._begin.elapsed_time(self._end) * NS_PER_MS)
        self.waited_ns = max(0, time.perf_counter_ns() - self._entered_ns - self.took_ns)


class Device:
    """The device of a worker.

    On CUDA a stream of its own, which is the calling thread's current one from then on.

    All work of that thread is in one order: load, upload, preprocess, run, check, postprocess. On two
    streams, one would have to wait for the other at every step, and adapters know of none.

    Attributes:
        device, is_cuda: which, and whether it is a CUDA device.
        timed: times a block: one for all blocks of this device, so that a frame makes no events.
        graph_bytes: memory that captured graphs hold, which the allocator takes for free.
    """

    def __init__(self, device: torch.device, threads: int, *, stream_priority: int = -1) -> None:
        """Take the device; `threads` CPU threads for a model's operators, 0: all cores but one.

        `stream_priority`: on CUDA, lower goes first, as far as the card knows so many.
        """
        self.device, self.is_cuda = device, device.type == "cuda"
        self.graph_bytes = 0
        threads = threads or max(1, torch.get_num_threads() - 1)
        torch.set_num_threads(threads)
        self._cpus = sorted(os.sched_getaffinity(0))
        self._helpers = _openmp_threads() if threads == len(self._cpus) > 1 else ()
        self._own_cpu, self._ooms, self._shares_memory = -1, 0, False
        if self.is_cuda:
            torch.cuda.set_device(device)
            # fp32 means fp32; torch's own default is tf32 in convolutions, which is a precision of its
            # own here
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            _, first = torch.cuda.Stream.priority_range()  # type: ignore[call-arg] # it is static
            torch.cuda.set_stream(torch.cuda.Stream(device, priority=max(first, stream_priority)))
            self._shares_memory = bool(torch.cuda.get_device_properties(device).is_integrated)
        self.timed = Timed(is_cuda=self.is_cuda)

    def part_threads(self) -> None:
        """Where the model has as many threads as there are CPUs, keep the others off the calling one's.

        OpenMP's threads wait in a loop for their share. Two of them on one CPU, where a short wait of the
        node's left them, take turns of milliseconds at that until the kernel moves one.
        """
        if self._helpers and (own := _libc.sched_getcpu()) != self._own_cpu:
            self._own_cpu = own
            for thread, cpu in zip(
                self._helpers, (each for each in self._cpus if each != own), strict=False
            ):
                with contextlib.suppress(OSError):  # it has ended, or the CPU is no longer ours
                    os.sched_setaffinity(thread, {cpu})

    @property
    def card(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.is_cuda else ""

    def to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Inputs on the device, copied in the order of the stream; those there are the same objects.

        The driver brings pageable memory across in pieces, through page-locked memory of its own, faster
        than it can be copied into page-locked memory first (`./run bench cuda --parts copies`). A tensor
        that is page-locked is copied without waiting, and must not be written to before the stream has come
        that far.
        """
        return (
            tuple(each.to(self.device, non_blocking=True) for each in tensors) if self.is_cuda else tensors
        )

    def memory_bytes(self) -> dict[str, int]:
        """Device memory, without waiting for the device.

        Empty on the CPU, where the node reads the process's own.

        In bytes, with `inactive_split` for free parts of blocks in use, which other sizes cannot have; and
        counts: `retries` (the cache was emptied to get memory) and `ooms` (there was none even so).
        """
        if not self.is_cuda:
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        if self._shares_memory:
            # There CUDA leaves out what the kernel would give back at once, its file cache.
            free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
        statistics = torch.cuda.memory_stats(self.device)
        # What a library tried and got over is no frame's error.
        self._ooms = int(statistics.get("num_ooms", 0))
        found = {name: int(statistics.get(key, 0)) for name, key in _MEMORY_STATISTICS.items()}
        return {
            **found,
            "allocated": found["allocated"] + self.graph_bytes,
            "peak": found["peak"] + self.graph_bytes,
            "free": free,
            "total": total,
        }

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether memory did not suffice; asked of every error, as it counts what the allocator refused.

        Inside of a package it arrives as a plain `RuntimeError`, whose text does not mention memory.
        """
        before, self._ooms = self._ooms, refused_memory(self.device) if self.is_cuda else 0
        return isinstance(error, torch.OutOfMemoryError) or self._ooms > before

    def is_lost(self, error: BaseException) -> bool:
        """Whether this error has cost the CUDA context (a sticky error), so that only a new process helps.

        Sticky errors are returned by every later call (CUDA runtime API, "error handling"); running out of
        memory is not one of them.
        """
        if (
            self.is_cuda
            and isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
        ):
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError:
                return True
        return False


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

    def calibration(self, spared: int = 0) -> Calibration:
        """What tiers and engines are chosen by.

        The median, and the p99 without isolated stalls of the machine, and without so many of the longest.
        """
        window = SortedWindow(len(self.times_ms))
        for time_ms in self.times_ms:
            window.add(time_ms)
        return Calibration(self.median_ms, usual_p99(window, spared))


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
def no_garbage_collection(*, collects: bool = True) -> Iterator[None]:
    """Collect now, or only what is youngest, and not again before the end of the block.

    The block of a caller counts for those within it.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect(2 if collects else 0)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
