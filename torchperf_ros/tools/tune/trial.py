"""Trials: ways to run a tier's model, what was measured of each, and their ranking. Nothing here needs torch.

The smallest p99 within the limits comes first, what is over the budget after it, the refused last.
"""

import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchperf_ros.settings.build_options import GRAPH, MOST_LOSS, BuildOptions

EAGER, BUCKET = "eager", "bucket"
# The step of a trial during which nothing else of tuning may run.
MEASURING = "measuring"
_MS_PER_S = 1e3
_FEW = 4
_NOISE_OF_FEW = 0.10
_LEAST_NOISE = 0.02
_TIE = 0.05
# Where eager's p99 is more times its p50, stalls of the machine are in it.
_STALLED = 2.0
# Between replays of a graph a GPU's medians differ by less than those of a CPU that others use, too.
_TIE_ON_CUDA = 0.02
# How much slower than the best a short look may find a candidate that is then measured at length.
_NEAR = 1.1


@dataclass(frozen=True)
class Facts:
    """What decides which candidates make sense, from a process that has loaded the adapter on the device.

    Attributes:
        tiers: those that were named, else those that the adapter builds.
        identity: hash of weights, code, inputs and what they run on, of every tier; results under another
            say nothing.
        threads: CPU threads that the node uses by default, the reference's.
        left_out: engine, precision or layout -> why it cannot be here, or does nothing good for this model.
        precisions: engine that builds packages -> those that it has here.
        ranges: smallest and largest value of each size that varies.
        has_task: whether the adapter has a training task, which judges how accurate a candidate is.
        start_s: seconds that such a process took to start and open the device, and to load the first tier's model and
            call it.
    """

    identity: str
    cuda: bool
    machine: str
    threads: int
    cores: int
    tiers: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    precisions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ranges: tuple[tuple[int, int], ...] = ()
    has_task: bool = False
    start_s: float = 0.0


@dataclass(frozen=True)
class TuneCandidate:
    """One way to run a tier.

    Attributes:
        shapes: policy for sizes that vary, see `ShapeOptions`; without such sizes it means nothing.
    """

    options: BuildOptions = field(default_factory=BuildOptions)
    threads: int = 1
    shapes: str = "dynamic"
    bucket_width: int = 32

    @property
    def label(self) -> str:
        """For tables: what is not the default, and the threads."""
        bucket = f" {BUCKET} {self.bucket_width}" if self.shapes == BUCKET else ""
        return f"{self.options.label}{bucket}, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def changes(self) -> int:
        """How many options are not the default: the fewer, the simpler."""
        defaults = BuildOptions().as_dict()
        changed = [name for name, value in self.options.as_dict().items() if value != defaults[name]]
        return len(changed) + (self.shapes == BUCKET)

    @property
    def in_process(self) -> bool:
        """Whether it runs the model itself, so that nothing of it is left in the process that tries it."""
        return self.options.engine in {EAGER, GRAPH}


@dataclass(frozen=True)
class Accuracy:
    """The figures of the adapter's training task for a candidate and for eager fp32, on the same held-out examples.

    Attributes:
        name: of the figure, the first of `Task.judge`.
        value, eager: of the candidate, and of eager fp32 of the same tier.
        judged: how many examples were asked for.
    """

    name: str
    value: float
    eager: float
    judged: int
    higher_is_better: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.value:.3f}"

    @property
    def merit(self) -> float:
        """The figure, or less it where lower is better: of two the higher is better."""
        return self.value if self.higher_is_better else -self.value

    @property
    def loss(self) -> float:
        """By how much it is worse than eager fp32, below 0 if it is better."""
        return self.eager - self.value if self.higher_is_better else self.value - self.eager


@dataclass(frozen=True)
class TrialFigures:
    """What was measured of a candidate, next to eager fp32 on the reference number of threads in the same process.

    Attributes:
        p50_ms, p95_ms, p99_ms: of one call of the model on inputs that lie on the device; p99 without isolated stalls
            of the machine, as the node's tiers are chosen by (`tier_ladder.usual_p99`).
        max_ms: the longest call, stalls included.
        eager_p50_ms, eager_p99_ms: of the reference, on the adapter's own example inputs, sampled in turns
        with it. least_share, most_share: p50 over the reference's, in the best and in the worst fifth of
        the measurement.
        samples: how many of each; below 100, p99 lies between the two longest.
        cold_start_s: from the start of a process to the first answer: `Facts.start_s`, and from there on.
        compile_s: of that, compiling; 0 where nothing is compiled.
        memory_mb: most memory (10^6 bytes) that the process held from the candidate's build on: resident on the
            CPU, on CUDA what torch's allocator had of the device.
        relative_l2, max_error: worst distance of its outputs from the reference's, see `Parity`.
        score: of its answers, where that is why they are good enough.
        accuracy: None where nothing judges it.
    """

    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    eager_p50_ms: float
    eager_p99_ms: float
    least_share: float
    most_share: float
    samples: int
    cold_start_s: float
    compile_s: float
    memory_mb: float
    relative_l2: float
    max_error: float
    score: float | None = None
    accuracy: Accuracy | None = None

    @property
    def judged(self) -> int:
        """How many examples its accuracy is of, 0 where it has none."""
        return self.accuracy.judged if self.accuracy else 0

    @property
    def shares(self) -> tuple[float, float]:
        """p50 and p99 over the reference's p50."""
        return self.p50_ms / self.eager_p50_ms, self.p99_ms / self.eager_p50_ms

    def is_near(self, to_beat: Sequence[float]) -> bool:
        """Whether one of its `shares` is about as small as these, or smaller; of no other, it is."""
        pairs = zip(self.shares, to_beat, strict=True) if to_beat else [(0.0, 0.0)]
        return any(own <= _NEAR * other for own, other in pairs)

    @property
    def break_even_frames(self) -> float:
        """Frames after which compiling has paid: compile seconds over seconds saved per frame, by medians.

        0 where nothing was compiled, infinite where it was and nothing is saved.
        """
        saved_s = (self.eager_p50_ms - self.p50_ms) / _MS_PER_S
        if not self.compile_s:
            return 0.0
        return self.compile_s / saved_s if saved_s > 0 else math.inf


class TrialOutcome:
    MEASURED, REFUSED, CRASHED, HUNG = "measured", "refused", "crashed", "hung"


@dataclass(frozen=True)
class TuneTrial:
    """What became of a candidate.

    Attributes:
        outcome: measured; refused (parity, or it cannot be made); crashed; hung.
        reason: why it is not `measured`, in one line or more.
        figures: of `measured`; None otherwise.
        took_s, timeout_s: seconds that trying it took, and how many it was allowed to take.
    """

    tier: str
    candidate: TuneCandidate
    outcome: str
    reason: str = ""
    figures: TrialFigures | None = None
    took_s: float = 0.0
    timeout_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What a candidate has to keep.

    Attributes:
        budget_ms: p99 of the model, at most.
        max_loss: of accuracy against eager fp32 of the same tier, at most.
    """

    budget_ms: float
    max_loss: float = MOST_LOSS

    def refusal(self, figures: TrialFigures) -> str:
        """Why these figures must not be used at any speed, "" if they may."""
        accuracy = figures.accuracy
        if accuracy and math.isfinite(accuracy.eager) and not accuracy.loss <= self.max_loss:
            return (
                f"accuracy: {accuracy}; eager fp32 has {accuracy.eager:.3f}; at"
                f" most {self.max_loss:g} {'less' if accuracy.higher_is_better else 'more'}, as --max-loss"
                " says"
            )
        return ""


class Group(enum.IntEnum):
    FITS = 0
    OVER_BUDGET = 1
    REFUSED = 2


@dataclass(frozen=True)
class RankedTrial:
    """A trial in the ranking.

    Attributes:
        p50_ms, p99_ms: corrected for the machine's mood, see `Ranking`; infinite where nothing was measured.
        why: why it is over the budget or refused; "" where it fits.
    """

    trial: TuneTrial
    group: Group
    p50_ms: float
    p99_ms: float
    why: str = ""

    @property
    def accuracy(self) -> Accuracy | None:
        return self.trial.figures.accuracy if self.trial.figures else None

    @property
    def is_judged(self) -> bool:
        return self.accuracy is not None and math.isfinite(self.merit) and math.isfinite(self.p99_ms)

    @property
    def merit(self) -> float:
        return self.accuracy.merit if self.accuracy else math.nan


class Ranking:
    """Ranks the trials of one tier; `docs/training.md`, "How it is measured", describes how.

    Each trial's times count relative to those of the same reference, eager fp32, in the same process:

        p99_ms = p99 of the candidate * (median over all trials of the reference's p50) / the reference's p50 here

    On CUDA they count as they are: what bounds eager there is the CPU that launches its kernels, of which graphs
    and compiled code need little.

    Attributes:
        standings: best first.
        best: the first, if it was measured and is not refused; it may be over the budget.
        eager_ms: median over the trials of the reference's p50; NaN before the first.
        noise: share by which two measurements of the same p99 differ: of eager's p99 over its p50 the
            interquartile range over the median; of less than 4 trials how far apart the ends are, 10 % at least.
    """

    def __init__(
        self, trials: Iterable[TuneTrial], limits: Limits, least_noise: float = 0.0, *, cuda: bool = False
    ) -> None:
        """Rank trials of one tier.

        `least_noise` is what more trials of another one have shown on this machine.
        """
        trials = tuple(trials)
        measured = [
            t.figures for t in trials if t.figures is not None and t.outcome == TrialOutcome.MEASURED
        ]
        self.eager_ms = statistics.median(f.eager_p50_ms for f in measured) if measured else math.nan
        relative = sorted(f.eager_p99_ms / f.eager_p50_ms for f in measured) or [1.0]
        are_few = len(relative) < _FEW
        # Of few, one that met stalls, as its eager did, must not lose to one that met none.
        ends = (relative[0], relative[0], relative[-1])
        low, middle, high = ends if are_few else statistics.quantiles(relative, n=4)
        self.noise = max(least_noise, _NOISE_OF_FEW if are_few else _LEAST_NOISE, (high - low) / middle)
        # A stall of the machine takes as long of a call of 0.1 ms as of one of 10 ms.
        self._stall_ms = max(high - low, middle - _STALLED) * self.eager_ms
        self._limits, self._cuda, self._tie = limits, cuda, _TIE_ON_CUDA if cuda else _TIE
        found = sorted(
            map(self._standing, trials), key=lambda s: (s.group, s.p99_ms, s.trial.candidate.changes)
        )
        self.standings = tuple(found)
        self.best = self.best_of()
        if self.best:
            self.standings = (self.best, *(standing for standing in found if standing is not self.best))

    def is_faster(self, one: RankedTrial, other: RankedTrial) -> bool:
        """Whether one's p99 is smaller beyond the noise, or equal and its p50 smaller by more than a tie."""
        first, second = sorted((one.p99_ms, other.p99_ms))
        if self._as_good_ms(first) < second:
            return one.p99_ms == first
        return one.p50_ms * (1 + self._tie) < other.p50_ms

    def _as_good_ms(self, p99_ms: float) -> float:
        """Up to where another p99 is no larger beyond the noise."""
        return p99_ms + max(self.noise * p99_ms, self._stall_ms)

    def best_of(self, *, compiled: bool | None = None) -> RankedTrial | None:
        """The best of all, of those in a compiled engine, or of those that run the model itself.

        None where none can be used.
        """
        usable = [s for s in self.standings if compiled in {None, not s.trial.candidate.in_process}]
        group = min((s.group for s in usable), default=Group.REFUSED)
        if group > Group.OVER_BUDGET:
            return None
        usable = [s for s in usable if s.group == group]
        # Where the adapter's task judges, a precision that it has not judged is not chosen, however fast.
        sure = [s for s in usable if s.is_judged or s.trial.candidate.options.precision == "fp32"]
        if sure and any(s.is_judged for s in self.standings):
            usable = sure
        first_ms = min(s.p99_ms for s in usable)
        tied = [s for s in usable if s.p99_ms <= self._as_good_ms(first_ms)]
        quickest_ms = min(s.p50_ms for s in tied)
        tied = [s for s in tied if s.p50_ms <= quickest_ms * (1 + self._tie)]
        return min(tied, key=lambda s: (s.trial.candidate.changes, s.p50_ms))

    def _standing(self, trial: TuneTrial) -> RankedTrial:
        figures = trial.figures
        if figures is None:
            return RankedTrial(trial, Group.REFUSED, math.inf, math.inf, f"{trial.outcome}: {trial.reason}")
        known = not (self._cuda or math.isnan(self.eager_ms))
        correction = self.eager_ms / figures.eager_p50_ms if known else 1.0
        p50_ms, p99_ms = figures.p50_ms * correction, figures.p99_ms * correction
        group, why = Group.FITS, ""
        if refusal := self._limits.refusal(figures):
            group, why = Group.REFUSED, refusal
        elif p99_ms > self._limits.budget_ms:
            group, why = Group.OVER_BUDGET, f"over the budget of {self._limits.budget_ms:g} ms"
        return RankedTrial(trial, group, p50_ms, p99_ms, why)


class TierChoice:
    """Compares the tiers of a stage, each in its best way, where both were judged.

    One is not worth keeping if it is neither faster than another, beyond the noise, nor more accurate, by
    more than `Limits.max_loss`.

    Attributes:
        kept: tiers that are worth keeping, with their best trials, in the stage's order.
        left_out: tier -> why it is not; tiers that were not judged are in neither.
        first: the most accurate tier that is worth keeping and fits the budget; "" where none does.
    """

    def __init__(self, rankings: Mapping[str, Ranking], limits: Limits) -> None:
        self._limits, self._rankings = limits, rankings
        judged = {tier: one.best for tier, one in rankings.items() if one.best and one.best.is_judged}
        self.kept, self.left_out = dict(judged), dict[str, str]()
        for tier, own in reversed(judged.items()):  # of two that are alike the first is kept
            others = {name: one for name, one in self.kept.items() if name != tier}
            if better := next((n for n, one in others.items() if not self._is_worth(tier, own, one)), ""):
                del self.kept[tier]
                self.left_out[tier] = (
                    f"neither faster (p99 {own.p99_ms:.2f} ms) nor more accurate ({own.accuracy})"
                    f" than {better} ({others[better].p99_ms:.2f} ms, {others[better].accuracy}): leave"
                    " it out"
                )
        fitting = [tier for tier, one in self.kept.items() if one.group is Group.FITS]
        self.first = max(fitting, key=lambda tier: self.kept[tier].merit, default="")

    def words(self) -> list[str]:
        """The proposal, in lines; none where nothing was judged."""
        if not self.kept:
            return []
        named = ", ".join(
            f"{tier} (p99 {one.p99_ms:.2f} ms, {one.accuracy})" for tier, one in self.kept.items()
        )
        budget = f"the budget of {self._limits.budget_ms:g} ms"
        most = f"begin with {self.first}, the most accurate that fits {budget}"
        unknown = [tier for tier in self._rankings if tier not in {*self.kept, *self.left_out}]
        return [
            f"tiers worth keeping on this machine: {named}; {most if self.first else f'none fits {budget}'}",
            *(f"{tier}: {why}" for tier, why in self.left_out.items()),
            *(f"{tier}: nothing that may be used was judged" for tier in unknown),
        ]

    def _is_worth(self, tier: str, one: RankedTrial, other: RankedTrial) -> bool:
        return self._rankings[tier].is_faster(one, other) or one.merit > other.merit + self._limits.max_loss
