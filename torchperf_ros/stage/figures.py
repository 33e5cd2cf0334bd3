"""What a stage has done so far: counters, and latency, jitter and misses, computed when they are read."""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_rules import answer_alert, death_alert, superseded_alert
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.frame_table import WIRE
from torchperf_ros.stage.health import Flow, HealthTracker

Floats = NDArray[np.float64]
Rows = NDArray[np.void]
# A histogram: cumulative counts by upper bound, and the sum.
Snapshot = tuple[list[tuple[str, float]], float]

PERCENTS = (50.0, 95.0, 99.0, 100.0)
# rows that wait to be taken: eight seconds at 1 kHz; `LatencyFigures` counts what was pushed out
_PENDING = 8192

# A row of `StageCounters.receipts`.
#
# `superseded`, `number`: frames and receipts so far, this one included.
RECEIPT: Final = np.dtype([("received_ns", "i8"), ("age_ms", "f8"), ("superseded", "i8"), ("number", "i8")])

_COUNTED: Final = {
    "tier",
    "outcome",
    "wait_ms",
    "decode_ms",
    "preprocess_ms",
    "inference_ms",
    "postprocess_ms",
    "total_ms",
    "lateness_ms",
}
# A row of `StageCounters.answers`.
#
# What is counted of a frame's row; `number`: frames that ended so far.
ANSWER: Final = np.dtype(
    [("published_ns", "i8"), *((name, kind) for name, kind in WIRE if name in _COUNTED), ("number", "i8")]
)


@dataclass(frozen=True)
class Quantiles:
    """Percentiles of durations in ms; NaN where there are none.

    Attributes:
        count: number of samples.
        p50_ms, p95_ms, p99_ms, max_ms: linear between ranks, as `numpy.percentile`, unless their source
        says otherwise.
    """

    count: int = 0
    p50_ms: float = math.nan
    p95_ms: float = math.nan
    p99_ms: float = math.nan
    max_ms: float = math.nan

    @classmethod
    def of(cls, values_ms: np.ndarray) -> "Quantiles":
        """Exactly, of samples in any order; NaN samples are unknown and do not count."""
        ordered = np.sort(values_ms)  # NaN comes last
        count = len(ordered) - int(np.isnan(ordered).sum())
        # A tenth of what `numpy.percentile` takes, which a report of eight streams would call forty times.
        at = np.multiply(PERCENTS, (count - 1) / 100)
        return cls(count, *np.interp(at, np.arange(count), ordered[:count]).tolist()) if count else cls()

    def items(self) -> list[tuple[str, float]]:
        """Names with their unit, and values in ms."""
        return [(name, value) for name, value in vars(self).items() if name != "count"]


@dataclass
class StageCounters:
    """Counters since configure.

    Every frame that came in is in exactly one of answered, unanswered, superseded (see `Mailbox`), in
    flight.

    Attributes:
        outcomes, fallbacks, checks: by index of `Outcome`, `Fallback` and `GuardVerdict`.
        zero_stamps, future_stamps, backward_stamps, repeated_stamps: stamps that cannot be right.
        receipts, answers: rows of raw numbers, appended here (which is all that a frame waits for) and
            taken away by `LatencyFigures` on another thread; appending to a deque and taking from it need no
            lock.
    """

    frames: int = 0  # frames received, or due from the stage before
    answered: int = 0  # frames for which something was published, with any outcome
    unanswered: int = 0  # frames for which nothing was, as no fallback was to be had
    busy_ms: float = 0.0  # from the beginning of their turns to their ends
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    fallbacks: list[int] = field(default_factory=lambda: [0] * len(Fallback))
    checks: list[int] = field(default_factory=lambda: [0] * len(GuardVerdict))
    shadow_refusals: int = 0  # outputs that a check of the guard in shadow would have refused
    missed_deadline: int = 0  # frames that ended after their deadline
    stale: int = 0  # of these, frames whose deadline had passed when their turn came
    # results that came after their frame had been answered; not published as if fresh
    late_results: int = 0
    rehearsals: int = 0  # runs of the spare worker that no frame waited for, to keep it warm
    probes: int = 0  # runs of a higher tier outside any frame's answer
    batched: int = 0  # frames that ran together with those of other streams
    backups: int = 0  # frames that the second worker ran as well, on the cheapest tier
    # frames that a worker with a full queue did not get, for its histories
    missed_observations: int = 0
    refused_inputs: int = 0  # messages of other inputs than the trigger that were too large
    # errors in the node itself; each cost a frame its answer, or at least its result
    internal_errors: int = 0
    ignored: int = 0  # messages that came while the stage was not active
    zero_stamps: int = 0
    future_stamps: int = 0
    backward_stamps: int = 0
    repeated_stamps: int = 0
    # monotonic time since which the stage takes frames, the last time it was activated; 0: never
    activated_ns: int = 0
    receipts: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_PENDING))
    answers: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_PENDING))
    last_reason: str = ""  # why the last frame that was not on time was not
    last_check: str = ""  # what the guard last refused, in shadow too
    _last_stamp_ns: int = 0

    def received(
        self, received_ns: int, stamp_ns: int, age_ms: float, superseded: int = 0, *, stamped: bool
    ) -> None:
        """Count a frame and what is odd about its stamp (`stamped`.

        Its type has one); `superseded`: were so far.
        """
        self.frames += 1
        self.receipts.append((received_ns, age_ms, superseded, self.frames))
        if not stamped:
            return
        if stamp_ns == 0:
            self.zero_stamps += 1
            return
        self.future_stamps += age_ms < 0
        self.backward_stamps += stamp_ns < self._last_stamp_ns
        self.repeated_stamps += stamp_ns == self._last_stamp_ns
        self._last_stamp_ns = stamp_ns

    def add(self, answer: Answer) -> None:
        """Count a frame that was answered, or for which there was nothing to publish."""
        if answer.fallback is Fallback.NONE and answer.check in {None, GuardVerdict.UNCHECKED}:
            self.unanswered += 1
        else:
            self.answered += 1
        if answer.reason:
            self.last_reason = f"frame {answer.frame.seq}: {answer.reason}"
        self.outcomes[answer.outcome] += 1
        if answer.fallback is not None:
            self.fallbacks[answer.fallback] += 1
        if answer.check is not None:
            self.checks[answer.check] += 1
        self.missed_deadline += answer.lateness_ms > 0
        self.stale += answer.frame.stale
        self.busy_ms += answer.total_ms - answer.wait_ms
        steps = answer.steps
        self.answers.append(
            (
                answer.published_ns,
                answer.wait_ms,
                steps.decode_ms,
                steps.preprocess_ms,
                steps.inference_ms,
                steps.postprocess_ms,
                answer.total_ms,
                answer.tier,
                answer.outcome,
                answer.lateness_ms,
                self.ended,
            )
        )

    @property
    def ended(self) -> int:
        """Frames that were answered, or for which there was nothing to publish."""
        return self.answered + self.unanswered

    def miss_ratio(self, superseded: int) -> float:
        """Share of these and the `superseded` without an own result in time, see `IN_TIME`, 0 to 1."""
        came = self.ended + superseded
        return (came - sum(self.outcomes[outcome] for outcome in IN_TIME)) / came if came else 0.0


class BucketCounts:
    """Counts samples by upper bound (inclusive), and adds them up."""

    def __init__(self, bounds: Floats) -> None:
        """Take rising bounds, in the samples' unit; a last bucket without one holds the rest."""
        self._bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: Floats) -> None:
        """Count samples; NaN ones are unknown and do not count."""
        known = values[~np.isnan(values)]
        np.add.at(self.counts, np.searchsorted(self._bounds, known, side="left"), 1)
        self._sum += float(known.sum())

    def snapshot(self) -> Snapshot:
        """Cumulative counts by bound as text, the last one `+Inf`, and the sum."""
        words = [*(repr(bound) for bound in self._bounds.tolist()), "+Inf"]
        return list(zip(words, np.cumsum(self.counts).tolist(), strict=True)), self._sum


RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOWEST_MS, _HIGHEST_MS = 1e-3, 1e6  # below: counted as the lowest; a budget is at most a minute
_POWERS = np.arange(*(math.ceil(math.log(ms) / math.log(_GAMMA)) for ms in (_LOWEST_MS, _HIGHEST_MS)))
_SKETCH_BOUNDS_MS: Floats = np.power(_GAMMA, _POWERS, dtype=np.float64)


class LatencySketch(BucketCounts):
    """Durations in ms, of which every percentile is known to 1 %; the largest is exact. About 8 KiB.

    Bucket i holds gamma^(i-1) < x <= gamma^i with gamma = (1 + a) / (1 - a), and stands for 2 gamma^i /
    (gamma + 1): no sample is further than the share a from that. Masson, Rim, Lee: DDSketch, PVLDB 12
    (2019), section 2.
    """

    def __init__(self) -> None:
        super().__init__(_SKETCH_BOUNDS_MS)
        self._max_ms = math.nan

    def add(self, values: Floats) -> None:
        """Count samples; none of them NaN."""
        super().add(values)
        if len(values):
            self._max_ms = float(np.fmax(self._max_ms, values.max()))

    def quantiles(self) -> Quantiles:
        """Each percentile is the sample at its rank rounded down, to within `RELATIVE_ERROR`."""
        ends = np.cumsum(self.counts)
        count = int(ends[-1])
        if not count:
            return Quantiles()
        ranks = [math.floor(percent / 100 * (count - 1)) for percent in PERCENTS[:-1]]
        powers = np.searchsorted(ends, ranks, side="right") + float(_POWERS[0])
        p50, p95, p99 = np.minimum(2 * _GAMMA**powers / (_GAMMA + 1), self._max_ms).tolist()
        return Quantiles(count, p50, p95, p99, self._max_ms)


_SHARES_OF_BUDGET = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# Bounds for the time past a deadline: the first bucket holds what was in time.
LATENESS_BOUNDS_S = np.array((0.0, 0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0))


def budget_bounds_s(budget_ms: float) -> Floats:
    """Bounds in s around a budget, which is one of them: finest just before it, where it is decided."""
    return np.array([float(f"{share * budget_ms / 1000:.6g}") for share in _SHARES_OF_BUDGET])


# Where a tier is named: none was started for the frame. No tier can be called so.
NO_TIER = ""
# Of the window that latency and jitter are of.
WINDOW_S = 10.0

# Parts of a frame's time, from the mailbox to the worker's last step.
STEPS = ("wait", "decode", "preprocess", "inference", "postprocess")


@dataclass(frozen=True)
class Spans:
    """Latencies over three spans of time.

    Attributes:
        run, active: since configure, since the last activation; to 1 %, see `LatencySketch`.
    """

    window: Quantiles  # the last seconds; exact
    run: Quantiles
    active: Quantiles
    miss_ratio: float  # share of the window's frames that were not `IN_TIME`, 0 to 1; NaN without answers


@dataclass(frozen=True)
class StageReading:
    """What a stage's frames took, at one moment. Over the window, unless stated otherwise.

    Attributes:
        interval_ms, interval_jitter_ms: between receipts of frames: mean, and standard deviation.
    """

    latency: Spans  # receipt to publish, of every answer, with any outcome
    tiers: dict[str, Spans]  # the same by the tier whose result was used or waited for
    lateness: Quantiles  # past the deadline (positive) or before it
    age: Quantiles  # stamp to receipt, of every frame received
    wait: Quantiles  # in the mailbox
    interval_ms: float
    interval_jitter_ms: float
    # mean absolute difference of the latencies of successive answers (RFC 3393: IPDV)
    latency_jitter_ms: float
    health_s: dict[
        Health, float
    ]  # time in each state since configure, as often as someone looks (once a second)
    unrecorded: int  # rows of receipts and answers that were pushed out before anyone took them


class RecentRows:
    """Rows on their way from a frame's thread, and those of the last seconds, oldest first.

    The first column is when, in monotonic ns; the last one numbers the rows. Memory follows the rate and
    the span and is bounded: where more than `most` rows fall into the span, the window covers less time.

    Attributes:
        unrecorded: rows that were pushed out before anyone took them.
    """

    def __init__(
        self, pending: deque[tuple[float, ...]], row: np.dtype[np.void], most: int = 65_536
    ) -> None:
        """Take rows of this type from `pending`."""
        self.rows = np.empty(0, row)  # of the last seconds
        self.unrecorded = self._taken = 0
        self._pending, self._most, self._when = pending, most, (row.names or ("",))[0]

    def take(self, since_ns: int) -> Rows:
        """Forget what is older; returns what is new. What is appended meanwhile is for the next time."""
        new = np.array([self._pending.popleft() for _ in range(len(self._pending))], self.rows.dtype)
        # As bytes: to concatenate rows numpy looks for a common type of each field, which takes longer.
        kept = np.frombuffer(self.rows.tobytes() + new.tobytes(), new.dtype)
        self.rows = kept[kept[self._when] >= since_ns][-self._most :]
        if len(new):
            self._taken += len(new)
            self.unrecorded = int(new["number"][-1]) - self._taken
        return new


class _Latencies:
    """Latencies over the run and since activation, of a stage or one of its tiers."""

    def __init__(self, bounds_s: Floats) -> None:
        self.run, self.active, self.buckets = LatencySketch(), LatencySketch(), BucketCounts(bounds_s)

    def add(self, total_ms: Floats, is_active: NDArray[np.bool_]) -> None:
        self.run.add(total_ms)
        self.active.add(total_ms[is_active])
        self.buckets.add(total_ms / 1000)

    def spans(self, window_ms: Floats, missed: NDArray[np.bool_], superseded: int = 0) -> Spans:
        came = len(missed) + superseded
        miss_ratio = (int(missed.sum()) + superseded) / came if len(missed) else math.nan
        return Spans(Quantiles.of(window_ms), self.run.quantiles(), self.active.quantiles(), miss_ratio)


class LatencyFigures:
    """Takes the raw numbers that a stage leaves behind, and computes figures from them in bounded memory.

    Frames feel nothing of it: they append a row. The lock is between readers (the report, a scrape) only.
    """

    def __init__(
        self,
        statistics: StageCounters,
        tiers: Sequence[str],
        budget_ms: float,
        window_s: float,
        now_ns: int,
    ) -> None:
        """Read `statistics`; the bounds of histograms are placed around `budget_ms` and stay there."""
        self.window_s = window_s  # length of the window; may change at any time
        self._statistics = statistics
        self._receipts = RecentRows(statistics.receipts, RECEIPT)
        self._answers = RecentRows(statistics.answers, ANSWER)
        bounds_s = budget_bounds_s(budget_ms)
        self._stage = _Latencies(bounds_s)
        self._tiers = {
            name: (index, _Latencies(bounds_s)) for index, name in [*enumerate(tiers), (-1, NO_TIER)]
        }
        self._lateness = BucketCounts(LATENESS_BOUNDS_S)
        self._steps = {step: BucketCounts(bounds_s) for step in STEPS}
        self._activated_ns = 0
        self._health_s = dict.fromkeys(Health, 0.0)
        self._health, self._looked_ns = Health.STARTING, now_ns
        self._readers = threading.Lock()

    def read(self, now_ns: int, health: Health) -> StageReading:
        """Take the new rows, and return the figures.

        `health` is the stage's state now; until now it was the one of the last look.
        """
        with self._readers:
            self._take(now_ns)
            self._health_s[self._health] += (now_ns - self._looked_ns) / NS_PER_S
            self._health, self._looked_ns = health, now_ns
            return self._reading()

    def histograms(self) -> tuple[dict[str, Snapshot], Snapshot, dict[str, Snapshot]]:
        """Latency by tier, lateness (0: in time), and steps by `STEPS`, as of the last `read`."""
        with self._readers:
            tiers = {name: kept.buckets.snapshot() for name, (_, kept) in self._tiers.items()}
            return (
                tiers,
                self._lateness.snapshot(),
                {name: step.snapshot() for name, step in self._steps.items()},
            )

    def _take(self, now_ns: int) -> None:
        since_ns = now_ns - round(self.window_s * NS_PER_S)
        self._receipts.take(since_ns)
        answers = self._answers.take(since_ns)
        if self._activated_ns != self._statistics.activated_ns:
            self._activated_ns = self._statistics.activated_ns
            for kept in (self._stage, *(kept for _, kept in self._tiers.values())):
                kept.active = LatencySketch()
        if len(answers):
            self._count(answers)

    def _count(self, answers: Rows) -> None:
        total_ms, tier = answers["total_ms"], answers["tier"]
        is_active = answers["published_ns"] >= (self._activated_ns or math.inf)
        self._stage.add(total_ms, is_active)
        for index, kept in self._tiers.values():
            if (rows := tier == index).any():
                kept.add(total_ms[rows], is_active[rows])
        self._lateness.add(np.maximum(answers["lateness_ms"], 0.0) / 1000)
        for step, counts in self._steps.items():
            counts.add(answers[f"{step}_ms"] / 1000)

    def _reading(self) -> StageReading:
        receipts, answers = self._receipts.rows, self._answers.rows
        total_ms, tier = answers["total_ms"], answers["tier"]
        intervals_ms = np.diff(receipts["received_ns"]) / NS_PER_MS
        missed = ~np.isin(answers["outcome"], IN_TIME)
        superseded = int(np.ptp(receipts["superseded"])) if len(receipts) else 0
        of_tiers = [(name, tier == index, kept) for name, (index, kept) in self._tiers.items()]
        return StageReading(
            latency=self._stage.spans(total_ms, missed, superseded),
            tiers={name: kept.spans(total_ms[rows], missed[rows]) for name, rows, kept in of_tiers},
            lateness=Quantiles.of(answers["lateness_ms"]),
            age=Quantiles.of(receipts["age_ms"]),
            wait=Quantiles.of(answers["wait_ms"]),
            interval_ms=_mean(intervals_ms),
            interval_jitter_ms=float(intervals_ms.std()) if len(intervals_ms) else math.nan,
            latency_jitter_ms=_mean(np.abs(np.diff(total_ms))),
            health_s=dict(self._health_s),
            unrecorded=self._receipts.unrecorded + self._answers.unrecorded,
        )


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else math.nan


class StageStatistics:
    """Counters and health of one stage; every event passes here once.

    Attributes:
        figures: latency and jitter, computed from them when they are read.
    """

    def __init__(self, config: StageConfig, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        # of frames, answers and runs, and the raw numbers of the last frames
        self.counters = StageCounters()
        now_ns = clock()
        self.figures = LatencyFigures(self.counters, config.tiers, config.budget_ms, WINDOW_S, now_ns)
        self.health = HealthTracker(config, now_ns)  # the state machine
        self._not_stale: Frame | None = None  # the last frame

    def reconfigure(self, config: StageConfig) -> None:
        self.health.limits = config

    def activated(self) -> None:
        self.counters.activated_ns = self._clock()

    def received(self, frame: Frame, superseded: int = 0, *, stamped: bool) -> Alert | None:
        """Count a frame that came in, whose number is how many came before.

        Returns an alert if there is one.

        `superseded`: how many frames were so far; `stamped`: its message type has a stamp.
        """
        counters, received_ns = self.counters, frame.received_ns
        counters.received(received_ns, frame.stamp_ns, frame.age_ms, superseded, stamped=stamped)
        self.health.input_at(received_ns)
        rule = self.health.superseded
        if received_ns < rule.due_ns:
            return None
        rule.look(Flow(received_ns, counters.frames, superseded, counters.ended, counters.busy_ms))
        return None if rule.broken is None else superseded_alert(self.health.limits.name, rule.broken)

    def answered(self, answer: Answer) -> Alert | None:
        """A frame was answered; returns an alert if there is one."""
        self.counters.add(answer)
        limits = self.health.limits
        tiers = limits.scenes[answer.frame.scene].tiers
        place = tiers.index(answer.tier) if answer.tier in tiers else -1  # in the ladder of its scene
        self.health.answered(answer.outcome, answer.fallback, place, answer.check)
        if not answer.frame.stale:
            self._not_stale = answer.frame
        misses = self.health.misses_in_a_row
        return answer_alert(limits.name, answer, misses, limits.sustained_misses, self._not_stale)

    def worker_died(self, reason: str, pid: int, restarts: int, *, lasting: bool, alone: bool) -> Alert:
        """A worker died; `lasting`: its kind keeps dying, `alone`: no other can serve."""
        if alone:
            self.health.lost()
            if lasting:
                self.health.gave_up()
        return death_alert(self.health.limits.name, reason, pid, restarts, lasting=lasting)
