"""Memory in use by the node and its workers, and which part of it grows for good.

In use is the proportional set size, with pages that several share divided. What grows has a rate, and a
time that it can last. A leak is separated from noise, steps, warm-up and the sawtooth of a garbage
collector; `docs/watching.md` says how and the reason of each.
"""

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist, median
from typing import Final

import numpy as np
import psutil
from numpy.typing import NDArray

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.trend import pairs_of, theil_sen_slope

_KIB, _MIB = 1 << 10, 1 << 20
_EVERY_S = 10.0
LABELS = (
    "node_rss_mib",
    "workers_rss_mib",
    "cuda_allocated_mib",
    "cuda_reserved_mib",
    "cuda_free_mib",
    "history_mib",
    "shared_memory_mib",
    "node_pss_mib",
    "workers_pss_mib",
    "cuda_peak_mib",
    "cuda_inactive_split_mib",
    "cuda_alloc_retries",
    "cuda_out_of_memory",
    "workers_kept_mib",
)


class ProportionalMemory:
    """PSS by process id, read seldom: the kernel walks every page for it (5 ms for a process with torch).

    One process is read at a time, at most once in ten seconds each; in between the last value holds.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._read: dict[int, tuple[float, int]] = {}

    def sample(self, pids: Iterable[int], now_s: float) -> Mapping[int, int]:
        """Bytes by process id, of those that could be read so far; `now_s` is monotonic.

        Reads at most one, the one due for longest. Processes that are not among `pids` are forgotten.
        """
        wanted = list(pids)
        self._read = {pid: self._read[pid] for pid in wanted if pid in self._read}
        due = min(wanted, key=lambda pid: self._read.get(pid, (-1.0, 0))[0], default=None)
        if due is not None and (due not in self._read or now_s - self._read[due][0] >= _EVERY_S):
            self._read[due] = (now_s, self._pss_bytes(due))
        return {pid: size for pid, (_, size) in self._read.items() if size}

    def _pss_bytes(self, pid: int) -> int:
        """Of one process; 0 where the kernel does not let this process read it."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_bytes().splitlines()
        except OSError:  # it has ended, belongs to another user, or the kernel is older than 4.14
            return 0
        return next((int(line.split()[1]) * _KIB for line in lines if line.startswith(b"Pss:")), 0)


@dataclass(frozen=True)
class MemoryUse:
    """One sample in bytes.

    Attributes:
        by_workers: what the workers report themselves, summed: `history`, `kept` (freed, and not given back); on
            CUDA `allocated`, `reserved`, `peak`, `inactive_split`, the counts `retries` and `ooms`, and of
            the device the least `free` and `total`.
        pss_by_pid: proportional memory of the node and the workers, as far as it was read.
    """

    # resident memory of the node process, without shared memory: each process would count it anew
    node_rss: int
    rss_by_pid: dict[int, int]  # the same of each worker
    by_workers: dict[str, int]
    shared: int  # shared memory that the stages' rings have touched
    pss_by_pid: Mapping[int, int] = field(default_factory=dict)

    @property
    def workers_mib(self) -> float:
        """The headline figure: device memory on CUDA, resident memory on the CPU, in MiB."""
        return self.by_workers.get("allocated", sum(self.rss_by_pid.values())) / _MIB

    def used_share(self, limit_mib: int) -> float:
        """The part of the limit for all workers that is in use; above 1 beyond it.

        A limit of 0 is the CUDA device with all its users, or this machine's memory.
        """
        if limit_mib:
            return self.workers_mib / limit_mib
        if "total" in self.by_workers:
            kept = self.by_workers.get("reserved", 0) - self.by_workers.get(
                "allocated", 0
            )  # torch's, for its next tensors
            return 1.0 - (self.by_workers["free"] + kept) / self.by_workers["total"]
        return sum(self.rss_by_pid.values()) / float(psutil.virtual_memory().total)

    def row(self) -> list[float]:
        """Values for `LABELS`, in MiB but for the counts; NaN where not measured."""
        nan = float("nan")
        by_workers = [self.by_workers.get(key, nan) for key in ("allocated", "reserved", "free", "history")]
        pss = [self.pss_by_pid.get(pid, nan) for pid in self.rss_by_pid]
        values = [
            self.node_rss,
            sum(self.rss_by_pid.values()),
            *by_workers,
            self.shared,
            self.pss_by_pid.get(os.getpid(), nan),
            sum(pss),
            self.by_workers.get("peak", nan),
            self.by_workers.get("inactive_split", nan),
        ]
        counts = [self.by_workers.get("retries", nan), self.by_workers.get("ooms", nan)]
        return [*(value / _MIB for value in values), *counts, self.by_workers.get("kept", nan) / _MIB]


def sample_memory(stages: Iterable[Stage], proportional: ProportionalMemory | None = None) -> MemoryUse:
    """Read the memory of this process and of every worker that lives.

    `proportional` reads PSS now and then; without it, nothing does.
    """
    workers = [worker for stage in stages for worker in stage.everyone]
    by_workers: dict[str, int] = {}
    for worker in workers:
        for key, value in worker.reported.memory_bytes.items():
            if key in {"free", "total"}:
                by_workers[key] = min(by_workers.get(key, value), value)
            else:
                by_workers[key] = by_workers.get(key, 0) + value
    rss = {worker.pid: rss for worker in workers if (rss := _own_rss_bytes(worker.pid)) is not None}
    pss = proportional.sample([os.getpid(), *rss], time.monotonic()) if proportional is not None else {}
    shared = sum(stage.ring.used_bytes for stage in stages)
    return MemoryUse(_own_rss_bytes(os.getpid()) or 0, rss, by_workers, shared, pss)


def _own_rss_bytes(pid: int) -> int | None:
    """Resident memory but for shared memory; None: the process died between the look and the read."""
    try:
        lines = Path(f"/proc/{pid}/status").read_bytes().splitlines()
    except OSError:  # its death is counted elsewhere
        return None
    kib = {line[:8]: int(line.split()[1]) for line in lines if line.startswith((b"RssAnon:", b"RssFile:"))}
    return sum(kib.values()) * _KIB


NODE: Final = "node"
_S_PER_H: Final = 3600.0
_ERROR_S: Final = 600.0  # memory that is used up within these is an error
_SERIES: Final = {
    "resident": "resident memory",
    "history": "histories",
    "allocated": "CUDA memory in use",
    "reserved": "CUDA memory reserved",
}
# Of one point at each scale; the windows are 2 min, 16 min, 2.1 h and 17 h.
_BUCKETS_S: Final = (2.0, 16.0, 128.0, 1024.0)
_POINTS, _LEAST_POINTS = 60, 40  # of a window, and those that a verdict needs
_SETTLE_S: Final = 60.0  # what comes first is not looked at: caches fill
_P_VALUE: Final = 0.01  # of the Mann-Kendall test, one-sided
_LEAST_MIB: Final = 8.0  # growth over the window that is worth a word
_OVER_NOISE: Final = 4.0  # growth over the window in standard deviations of what is left without the trend
# Each third grows by this part of the slope: not so a step, or what has stopped.
_THIRDS, _THIRD_SHARE = 3, 0.25
# The last third lies above all before the window by this part of its range: not so what comes back.
_OVER_BEFORE: Final = 0.5
# A shorter window counts only if memory would be used up within so long, or if the growth in it is
# large and even: what fills up slows down.
_BRIEF_S, _URGENT_S = 300.0, 1800.0
# Verdicts, where what came before the growth is known: with the window that is under 3 min.
_EVEN_IN_A_ROW: Final = 24
_EVEN_POINTS, _EVEN_MIB, _EVEN_OVER_NOISE, _EVEN_SHARE = 55, 60.0, 10.0, 0.8
_IN_A_ROW: Final = 2  # verdicts that raise or clear a suspicion
_MAD_TO_SIGMA: Final = 1.4826  # of a normal distribution
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    mib_per_hour: float  # Theil-Sen slope
    confidence: float  # one less the p-value of the Mann-Kendall test, 0 to 1
    window_s: float  # how long the window is that it was seen in

    def lasts_s(self, room_mib: float) -> float:
        """Seconds until `room_mib` more are used up if it goes on; infinite if it does not grow."""
        return max(0.0, room_mib) / self.mib_per_hour * _S_PER_H if self.mib_per_hour > 0 else math.inf


@dataclass
class _Scale:
    """One window of bucket medians, and how its last verdicts went."""

    bucket_s: float
    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_POINTS))
    pending: list[tuple[float, float]] = field(default_factory=list)
    growth: Growth | None = None
    suspicious: bool = False
    against: int = 0
    evens: int = 0  # verdicts in a row that it grows evenly
    is_even: bool = False

    def take(self, time_s: float, mib: float) -> tuple[float, float] | None:
        """Add to the bucket; the bucket's point once it is over."""
        closed = None
        if self.pending and time_s - self.pending[0][0] >= self.bucket_s * 0.999:
            closed = (self.pending[0][0], median(value for _, value in self.pending))
            self.points.append(closed)
            self.pending.clear()
        self.pending.append((time_s, mib))
        return closed


class MemoryTrend:
    """One series of memory samples, kept as bucket medians at several time scales.

    Bounded, however long it runs.
    """

    def __init__(self) -> None:
        self._scales = [_Scale(bucket_s) for bucket_s in _BUCKETS_S]
        self._began_s: float | None = None

    def add(self, time_s: float, mib: float) -> None:
        """Take a sample; NaN is passed over. Times rise, about one second apart."""
        if math.isnan(mib):
            return
        self._began_s = time_s if self._began_s is None else self._began_s
        if time_s - self._began_s < _SETTLE_S:
            return
        point: tuple[float, float] | None = (time_s, mib)
        for scale in self._scales:
            if point is None:
                return
            point = scale.take(*point)
            if point is not None and len(scale.points) >= _LEAST_POINTS:
                self._judge(scale)

    def suspicion(self, room_mib: float = math.inf) -> Growth | None:
        """The growth that is suspected, by the longest window that shows it; None if none is.

        With less room for more (`room_mib`), or where the growth is even, shorter windows are believed.
        """
        found = [(scale.growth, scale.is_even) for scale in self._scales if scale.suspicious]
        growth, is_even = found[-1] if found else (None, False)
        if growth is None or (
            growth.window_s < _BRIEF_S and not is_even and growth.lasts_s(room_mib) > _URGENT_S
        ):
            return None
        return growth

    @property
    def growth(self) -> Growth | None:
        """What the longest window with a verdict shows, suspicious or not; None while there is none."""
        found = [scale.growth for scale in self._scales if scale.growth is not None]
        return found[-1] if found else None

    def _judge(self, scale: _Scale) -> None:
        """Look at the window anew; a suspicion is raised and cleared by several verdicts in a row."""
        times, values = np.array(scale.points, dtype=np.float64).T
        slope = theil_sen_slope(times, values)
        p_value = mann_kendall_p(values)
        window_s = float(times[-1] - times[0]) + scale.bucket_s
        scale.growth = Growth(slope * _S_PER_H, 1.0 - p_value, window_s)
        residuals = values - slope * times
        noise = _MAD_TO_SIGMA * float(np.median(np.abs(residuals - np.median(residuals))))
        growth = slope * float(times[-1] - times[0])
        thirds = zip(np.array_split(times, _THIRDS), np.array_split(values, _THIRDS), strict=True)
        least = min(_end_slope(*third) for third in thirds)
        grows = (
            p_value < _P_VALUE
            and growth >= max(_LEAST_MIB, _OVER_NOISE * noise)
            and least >= _THIRD_SHARE * slope
            and (scale.suspicious or self._is_new(times, values))
        )
        scale.against = 0 if grows is scale.suspicious else scale.against + 1
        if scale.against >= _IN_A_ROW:
            scale.suspicious, scale.against = grows, 0
        scale.evens = (
            scale.evens + 1 if growth >= _EVEN_OVER_NOISE * noise and _grows_evenly(times, values) else 0
        )
        enough = scale.evens >= (_EVEN_IN_A_ROW if len(values) == _POINTS else _IN_A_ROW)
        scale.is_even = scale.suspicious and (scale.is_even or enough)

    def _is_new(self, times: _Array, values: _Array) -> bool:
        """Whether there is more in use than ever before the window, and not what comes and goes."""
        before = [
            mib
            for scale in self._scales
            for began_s, mib in scale.points
            if began_s + scale.bucket_s <= float(times[0])
        ]
        last = float(np.median(np.array_split(values, _THIRDS)[-1]))
        return not before or last > max(before) + _OVER_BEFORE * (max(before) - min(before))


@dataclass
class _MemorySeries:
    """One series of an owner (a stage, or the node): its newest sample, and what came before it."""

    owner: str
    key: str  # of the process and what it takes: the same as long as both are
    what: str  # in words, with the worker and what it runs
    mib: float
    room_mib: float  # how much more memory there is for it
    worker: Mapping[str, str]  # number, process and tier; empty for the node
    grown_mib: float = 0.0  # since the first sample
    trend: MemoryTrend = field(default_factory=MemoryTrend)

    def goes_on(self, before: "_MemorySeries") -> None:
        self.trend, self.grown_mib = before.trend, before.grown_mib + self.mib - before.mib


class MemoryWatch:
    """One trend for each series; a replaced worker begins new ones. Called once a second, by one thread."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _MemorySeries] = {}

    def step(
        self, use: "MemoryUse", stages: "Sequence[Stage]", limit_mib: int, now_s: float
    ) -> list[Alert]:
        """Take a sample, at a monotonic time.

        Returns what is suspected, one alert per owner, as long as it is.
        """
        known = self._series
        self._series = {(one.owner, one.key): one for one in _samples(use, stages, limit_mib)}
        for key, series in self._series.items():
            if key in known:
                series.goes_on(known[key])
            series.trend.add(now_s, series.mib)
        owners = dict.fromkeys(series.owner for series in self._series.values())
        return [_alert(*worst) for owner in owners if (worst := self._worst(owner)) is not None]

    def suspect(self) -> tuple[str, Mapping[str, str]]:
        """The worker that has taken the most memory since it was ready, in words and as values.

        Both are empty if none took much. A fast leak fills the memory before its trend is certain: what is
        reported of that names the worker as well.
        """
        taken = [one for one in self._series.values() if one.worker and one.grown_mib >= _LEAST_MIB]
        most = max(taken, key=lambda one: one.grown_mib, default=None)
        if most is None:
            return "", {}
        grown = f"{most.grown_mib:.0f} MiB more since it was ready"
        values = {"stage": most.owner, **most.worker, "grown_mib": f"{most.grown_mib:.1f}"}
        return f"the most is {most.owner}'s {most.what}: {grown}", values

    def values(self, owner: str) -> Mapping[str, str]:
        """The owner's values on `/diagnostics`: MiB/h, and seconds to exhaustion; nan while unknown."""
        if (worst := self._worst(owner)) is not None:
            return _values(*worst)
        known = [one.trend.growth for one in self._series.values() if one.owner == owner]
        most = max((growth.mib_per_hour for growth in known if growth is not None), default=math.nan)
        return {"memory_growth_mib_per_hour": f"{most:.3f}", "memory_exhausted_in_s": "nan"}

    def _worst(self, owner: str) -> tuple[_MemorySeries, Growth] | None:
        """The owner's series whose memory is used up first."""
        own = [one for one in self._series.values() if one.owner == owner]
        found = [(one, growth) for one in own if (growth := one.trend.suspicion(one.room_mib)) is not None]
        return min(found, key=lambda each: each[1].lasts_s(each[0].room_mib), default=None)


def _alert(series: _MemorySeries, growth: Growth) -> Alert:
    left_s, window_s = growth.lasts_s(series.room_mib), growth.window_s
    left = f"{left_s / 3600:.1f} h" if left_s >= 3600 else f"{left_s / 60:.0f} min"  # noqa: PLR2004
    return Alert(
        Level.ERROR if left_s < _ERROR_S else Level.WARN,
        f"{series.owner}: memory grows",
        f"{series.what} grows by {growth.mib_per_hour:.1f} MiB/h, as seen over {window_s / 60:.0f} min;"
        f" the {series.room_mib:.0f} MiB that are left last {left}",
        {
            "series": series.what,
            "confidence": f"{growth.confidence:.4f}",
            "window_s": f"{window_s:.0f}",
            **series.worker,
            **_values(series, growth),
        },
    )


def _values(series: _MemorySeries, growth: Growth) -> dict[str, str]:
    lasts = f"{growth.lasts_s(series.room_mib):.0f}"
    return {"memory_growth_mib_per_hour": f"{growth.mib_per_hour:.3f}", "memory_exhausted_in_s": lasts}


def _samples(use: "MemoryUse", stages: "Sequence[Stage]", limit_mib: int) -> Iterator[_MemorySeries]:
    """Every series; of workers only those that are ready, as loading is growth, too."""
    available = psutil.virtual_memory().available / _MIB
    room = max(0.0, limit_mib - use.workers_mib) if limit_mib else math.inf
    rss_room = available if "allocated" in use.by_workers else min(room, available)
    yield _MemorySeries(NODE, "", "resident memory of the node", use.node_rss / _MIB, available, {})
    for stage in stages:
        if stage.place:  # the streams of a stage share its workers
            continue
        name, shadow = stage.config.whole_stage.name, stage.shadow
        pools = {name: stage.pool}
        if shadow is not None:
            pools[f"{name}/{shadow.version}"] = shadow.pool
        for owner, worker in ((owner, worker) for owner, pool in pools.items() for worker in pool.everyone):
            if worker.ready_at_ns is None:
                continue
            tier = "" if worker.tier is None else stage.config.tiers[worker.tier]
            of = f"of worker {worker.number} (pid {worker.pid}{', tier ' if tier else ''}{tier})"
            named = {"worker": str(worker.number), "pid": str(worker.pid), "tier": tier}
            used = {"resident": use.rss_by_pid.get(worker.pid), **worker.reported.memory_bytes}
            for kind, words in _SERIES.items():
                if (size := used.get(kind)) is not None:
                    on_device = kind in {"allocated", "reserved"}
                    left = min(room, use.by_workers["free"] / _MIB) if on_device else rss_room
                    key = f"{worker.pid} {kind}"
                    yield _MemorySeries(owner, key, f"{words} {of}", size / _MIB, left, named)


def mann_kendall_p(values: _Array) -> float:
    """One-sided p-value of the Mann-Kendall test against "no growth".

    `values`: shape (n,), in order of time.
    """
    n = len(values)
    first, second = pairs_of(n)
    score = float(np.sum(np.sign(values[second] - values[first])))
    return 1.0 - NormalDist().cdf(score / math.sqrt(n * (n - 1) * (2 * n + 5) / 18))


def _grows_evenly(times: _Array, values: _Array) -> bool:
    """Whether the growth over a window is large, and as fast in its first half as in its second."""
    if len(times) < _EVEN_POINTS:
        return False
    halves = zip(np.array_split(times, 2), np.array_split(values, 2), strict=True)
    slower, faster = sorted(theil_sen_slope(*half) for half in halves)
    return slower >= max(_EVEN_SHARE * faster, _EVEN_MIB / float(times[-1] - times[0]))


def _end_slope(times: _Array, values: _Array) -> float:
    """Slope of a third from the median of its first to that of its last third.

    Sees a stair wherever it lies.
    """
    size = max(1, len(times) // _THIRDS)
    rise = float(np.median(values[-size:]) - np.median(values[:size]))
    return rise / float(np.median(times[-size:]) - np.median(times[:size]))
