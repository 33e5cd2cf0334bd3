"""Latency, jitter and misses of a stage, computed from its raw numbers on whatever thread asks."""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchperf_ros.core.bucket_counts import LATENESS_BOUNDS_S, BucketCounts, budget_bounds_s
from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.core.latency_sketch import LatencySketch
from torchperf_ros.core.outcome import Health, Outcome
from torchperf_ros.core.quantiles import Quantiles
from torchperf_ros.core.stage_statistics import AnswerColumn, ReceiptColumn, StageStatistics
from torchperf_ros.core.time_window import TimeWindow

NO_TIER = ""
"""Where a tier is named: none was started for the frame. No tier can be called so."""

STEPS = {
    "wait": AnswerColumn.WAIT_MS,
    "decode": AnswerColumn.DECODE_MS,
    "preprocess": AnswerColumn.PREPROCESS_MS,
    "inference": AnswerColumn.INFERENCE_MS,
    "postprocess": AnswerColumn.POSTPROCESS_MS,
}
"""Parts of a frame's time, from the mailbox to the worker's last step."""


@dataclass(frozen=True)
class Spans:
    """Latencies over three spans of time.

    Attributes:
        window: the last seconds; exact.
        run, active: since configure, since the last activation; to 1 %, see `LatencySketch`.
        miss_ratio: share of the window's answers that were not on time, 0 to 1; NaN without answers.
    """

    window: Quantiles
    run: Quantiles
    active: Quantiles
    miss_ratio: float


@dataclass(frozen=True)
class StageReading:
    """What a stage's frames took, at one moment. Where nothing is said, over the window.

    Attributes:
        latency: receipt to publish, of every answer, whatever its outcome.
        tiers: the same by the tier whose result was used or waited for.
        lateness: past the deadline (positive) or before it.
        age: stamp to receipt, of every frame received.
        wait: in the mailbox.
        interval_ms, interval_jitter_ms: between receipts of frames: mean, and standard deviation.
        latency_jitter_ms: mean absolute difference of the latencies of successive answers (RFC 3393: IPDV).
        health_s: time in each state since configure, as often as someone looks (once a second).
        unrecorded: rows of receipts and answers that were pushed out before anyone took them.
    """

    latency: Spans
    tiers: dict[str, Spans]
    lateness: Quantiles
    age: Quantiles
    wait: Quantiles
    interval_ms: float
    interval_jitter_ms: float
    latency_jitter_ms: float
    health_s: dict[Health, float]
    unrecorded: int


Snapshot = tuple[list[tuple[str, float]], float]
"""A histogram: cumulative counts by upper bound in s, and the sum in s."""


class _Log:
    """Rows on their way from a frame's thread, and those of the last seconds; the last column numbers them."""

    def __init__(self, pending: deque[tuple[float, ...]], columns: int) -> None:
        self.unrecorded = 0
        self._pending, self._columns, self._taken = pending, columns, 0
        self._window = TimeWindow(columns)
        self.column = self._window.column

    def take(self, since_ns: int) -> np.ndarray:
        """Rows that are new; what is appended meanwhile is for the next time."""
        taken = [self._pending.popleft() for _ in range(len(self._pending))]
        rows = np.array(taken, dtype=float).reshape(len(taken), self._columns)
        self._window.add(rows, since_ns)
        if taken:
            self._taken += len(taken)
            self.unrecorded = round(taken[-1][-1]) - self._taken
        return rows


class _Latencies:
    """Latencies over the run and since activation, of a stage or one of its tiers."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self.run, self.active, self.buckets = LatencySketch(), LatencySketch(), BucketCounts(bounds_s)

    def add(self, total_ms: np.ndarray, is_active: np.ndarray) -> None:
        self.run.add(total_ms)
        self.active.add(total_ms[is_active])
        self.buckets.add(total_ms / 1000)

    def spans(self, window_ms: np.ndarray, missed: np.ndarray) -> Spans:
        return Spans(Quantiles.of(window_ms), self.run.quantiles(), self.active.quantiles(), _mean(missed))


class StageFigures:
    """Takes the raw numbers that a stage leaves behind and keeps what is computed from them, in bounded memory.

    Frames feel nothing of it: they append a row. The lock is between readers (the report, a scrape) only.

    Attributes:
        window_s: length of the window; may change at any time.
    """

    def __init__(
        self, statistics: StageStatistics, tiers: Sequence[str], budget_ms: float, window_s: float, now_ns: int
    ) -> None:
        """Read `statistics`; the bounds of histograms are placed around `budget_ms` and stay there."""
        self.window_s = window_s
        self._statistics = statistics
        self._receipts = _Log(statistics.receipts, len(ReceiptColumn))
        self._answers = _Log(statistics.answers, len(AnswerColumn))
        bounds_s = budget_bounds_s(budget_ms)
        self._stage = _Latencies(bounds_s)
        self._tiers = {name: _Latencies(bounds_s) for name in (*tiers, NO_TIER)}
        self._lateness = BucketCounts(LATENESS_BOUNDS_S)
        self._steps = {step: BucketCounts(bounds_s) for step in STEPS}
        self._activated_ns = 0
        self._health_s = dict.fromkeys(Health, 0.0)
        self._health, self._looked_ns = Health.STARTING, now_ns
        self._readers = threading.Lock()

    def read(self, now_ns: int, health: Health) -> StageReading:
        """Take what is new and say how things stand.

        Args:
            now_ns: monotonic time.
            health: the stage's state now; until now it was the one of the last look.
        """
        with self._readers:
            self._take(now_ns)
            self._health_s[self._health] += (now_ns - self._looked_ns) / NS_PER_S
            self._health, self._looked_ns = health, now_ns
            return self._reading()

    def histograms(self) -> tuple[dict[str, Snapshot], Snapshot, dict[str, Snapshot]]:
        """Latency by tier, lateness (0: in time), and steps by `STEPS`, as of the last `read`."""
        with self._readers:
            tiers = {name: tier.buckets.snapshot() for name, tier in self._tiers.items()}
            return tiers, self._lateness.snapshot(), {name: step.snapshot() for name, step in self._steps.items()}

    def _take(self, now_ns: int) -> None:
        since_ns = now_ns - round(self.window_s * NS_PER_S)
        self._receipts.take(since_ns)
        answers = self._answers.take(since_ns)
        if self._activated_ns != self._statistics.activated_ns:
            self._activated_ns = self._statistics.activated_ns
            for kept in (self._stage, *self._tiers.values()):
                kept.active.clear()
        if len(answers):
            self._count(answers)

    def _count(self, answers: np.ndarray) -> None:
        total_ms, tier = answers[:, AnswerColumn.TOTAL_MS], answers[:, AnswerColumn.TIER]
        is_active = answers[:, AnswerColumn.PUBLISHED_NS] >= (self._activated_ns or math.inf)
        self._stage.add(total_ms, is_active)
        for index, kept in zip(_tier_indices(len(self._tiers)), self._tiers.values(), strict=True):
            kept.add(total_ms[tier == index], is_active[tier == index])
        self._lateness.add(np.maximum(answers[:, AnswerColumn.LATENESS_MS], 0.0) / 1000)
        for step, column in STEPS.items():
            self._steps[step].add(answers[:, column] / 1000)

    def _reading(self) -> StageReading:
        total_ms, tier = self._answers.column(AnswerColumn.TOTAL_MS), self._answers.column(AnswerColumn.TIER)
        intervals_ms = np.diff(self._receipts.column(ReceiptColumn.RECEIVED_NS)) / NS_PER_MS
        missed = self._answers.column(AnswerColumn.OUTCOME) != Outcome.ON_TIME
        return StageReading(
            latency=self._stage.spans(total_ms, missed),
            tiers={
                name: kept.spans(total_ms[tier == index], missed[tier == index])
                for index, (name, kept) in zip(_tier_indices(len(self._tiers)), self._tiers.items(), strict=True)
            },
            lateness=Quantiles.of(self._answers.column(AnswerColumn.LATENESS_MS)),
            age=Quantiles.of(self._receipts.column(ReceiptColumn.AGE_MS)),
            wait=Quantiles.of(self._answers.column(AnswerColumn.WAIT_MS)),
            interval_ms=_mean(intervals_ms),
            interval_jitter_ms=float(intervals_ms.std()) if len(intervals_ms) else math.nan,
            latency_jitter_ms=_mean(np.abs(np.diff(total_ms))),
            health_s=dict(self._health_s),
            unrecorded=sum(log.unrecorded for log in (self._receipts, self._answers)),
        )


def _tier_indices(count: int) -> list[int]:
    """Indices of the tiers as answers have them, and -1 for none at the end."""
    return [*range(count - 1), -1]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
