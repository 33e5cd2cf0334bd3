"""Trials in order.

The smallest p99 within the limits first, what is over the budget after it, the refused last.
"""

import enum
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchperf_ros.settings.build_options import MOST_LOSS
from torchperf_ros.tools.tune.trial import Accuracy, TrialFigures, TrialOutcome, TuneTrial

_FEW = 4
_NOISE_OF_FEW = 0.10
_LEAST_NOISE = 0.02
_TIE = 0.05


@dataclass(frozen=True)
class Limits:
    """What a candidate has to keep.

    Attributes:
        budget_ms: p99 of the model, at most.
        max_error: relative L2 distance from eager fp32, at most; the precision's own limits hold besides.
        max_loss: of accuracy against eager fp32 of the same tier, at most.
    """

    budget_ms: float
    max_error: float = math.inf
    max_loss: float = MOST_LOSS

    def refusal(self, figures: TrialFigures) -> str:
        """Why these figures must not be used at any speed, "" if they may."""
        if figures.relative_l2 > self.max_error:
            return f"parity: relative L2 {figures.relative_l2:.2g}; --max-error allows {self.max_error:g}"
        accuracy = figures.accuracy
        if accuracy and math.isfinite(accuracy.eager) and not accuracy.loss <= self.max_loss:
            return (
                f"accuracy: {accuracy.name} {accuracy.value:.3f}; eager fp32 has {accuracy.eager:.3f}; at"
                f" most {self.max_loss:g} {'less' if accuracy.higher_is_better else 'more'}, as --max-loss"
                " says"
            )
        return ""


class Group(enum.IntEnum):
    """Where in the table a trial stands."""

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


class Ranking:
    """Ranks the trials of one tier; `docs/training.md`, "How it is measured", describes how.

    Each trial's times count relative to those of the same reference, eager fp32, in the same process:

        p99_ms = p99 of the candidate * (median over all trials of the reference's p50) / the reference's p50 here

    Attributes:
        standings: best first.
        best: the first, if it was measured and is not refused; it may be over the budget.
        eager_ms: median over the trials of the reference's p50; NaN before the first.
        noise: share by which two measurements of the same p99 differ; 10 % is assumed of less than 4
            trials.
    """

    def __init__(self, trials: Iterable[TuneTrial], limits: Limits, least_noise: float = 0.0) -> None:
        """Rank trials of one tier.

        `least_noise` is what more trials of another one have shown on this machine.
        """
        trials = tuple(trials)
        measured = [
            t.figures for t in trials if t.figures is not None and t.outcome == TrialOutcome.MEASURED
        ]
        self.eager_ms = statistics.median(f.eager_p50_ms for f in measured) if measured else math.nan
        noise, relative = _NOISE_OF_FEW, [f.eager_p99_ms / f.eager_p50_ms for f in measured]
        if len(relative) >= _FEW:
            low, middle, high = statistics.quantiles(relative, n=4)
            noise = max(_LEAST_NOISE, (high - low) / middle)
        self.noise = max(least_noise, noise)
        self._limits = limits
        found = sorted(
            map(self._standing, trials), key=lambda s: (s.group, s.p99_ms, s.trial.candidate.changes)
        )
        self.standings = tuple(found)
        self.best = self.best_of()
        if self.best:
            self.standings = (self.best, *(standing for standing in found if standing is not self.best))

    def is_faster(self, one: RankedTrial, other: RankedTrial) -> bool:
        """Whether one's p99 is smaller beyond the noise, or equal within it and its p50 smaller by more than 5 %."""
        first, second = sorted((one.p99_ms, other.p99_ms))
        if first * (1 + self.noise) < second:
            return one.p99_ms == first
        return one.p50_ms * (1 + _TIE) < other.p50_ms

    def best_of(self, *, compiled: bool | None = None) -> RankedTrial | None:
        """The best of all, of those in a compiled engine, or of those in eager.

        None where none can be used.
        """
        usable = [s for s in self.standings if compiled in {None, not s.trial.candidate.is_eager}]
        group = min((s.group for s in usable), default=Group.REFUSED)
        if group > Group.OVER_BUDGET:
            return None
        usable = [s for s in usable if s.group == group]
        first_ms = min(s.p99_ms for s in usable)
        tied = [s for s in usable if s.p99_ms <= first_ms * (1 + self.noise)]
        quickest_ms = min(s.p50_ms for s in tied)
        tied = [s for s in tied if s.p50_ms <= quickest_ms * (1 + _TIE)]
        return min(tied, key=lambda s: (s.trial.candidate.changes, s.p50_ms))

    def _standing(self, trial: TuneTrial) -> RankedTrial:
        figures = trial.figures
        if figures is None:
            return RankedTrial(trial, Group.REFUSED, math.inf, math.inf, f"{trial.outcome}: {trial.reason}")
        eager_ms = figures.eager_p50_ms if math.isnan(self.eager_ms) else self.eager_ms
        correction = eager_ms / figures.eager_p50_ms
        p50_ms, p99_ms = figures.p50_ms * correction, figures.p99_ms * correction
        group, why = Group.FITS, ""
        if refusal := self._limits.refusal(figures):
            group, why = Group.REFUSED, refusal
        elif p99_ms > self._limits.budget_ms:
            group, why = Group.OVER_BUDGET, f"over the budget of {self._limits.budget_ms:g} ms"
        return RankedTrial(trial, group, p50_ms, p99_ms, why)


class Point(NamedTuple):
    """A judged trial of a tier."""

    tier: str
    standing: RankedTrial
    accuracy: Accuracy


class TierChoice:
    """Compares the tiers of a stage, each in its best way, where both were judged.

    One is not worth keeping if it is neither faster than another, beyond the noise, nor more accurate, by
    more than `Limits.max_loss`.

    Attributes:
        kept: tiers that are worth keeping, in the stage's order.
        left_out: tier -> why it is not; tiers that were not judged are in neither.
        first: the most accurate tier that is worth keeping and fits the budget; "" where none does.
    """

    def __init__(self, rankings: Mapping[str, Ranking], limits: Limits) -> None:
        """Compare the trials of each tier, which come in the stage's order."""
        self._limits, self._rankings = limits, rankings
        self.kept = {
            tier: point for tier, one in rankings.items() if one.best and (point := _point(tier, one.best))
        }
        self.left_out: dict[str, str] = {}
        for tier in list(self.kept)[::-1]:  # of two that are alike the first is kept
            own = self.kept.pop(tier)
            better = next((other for other in self.kept.values() if not self._is_worth(own, other)), None)
            if better is None:
                self.kept[tier] = own
            else:
                self.left_out[tier] = (
                    f"neither faster (p99 {own.standing.p99_ms:.2f} ms) nor more accurate ({_figure(own)})"
                    f" than {better.tier} ({better.standing.p99_ms:.2f} ms, {_figure(better)}): leave"
                    " it out"
                )
        self.kept = {tier: self.kept[tier] for tier in rankings if tier in self.kept}
        fitting = [point for point in self.kept.values() if point.standing.group is Group.FITS]
        self.first = max(fitting, key=lambda point: point.accuracy.merit).tier if fitting else ""

    def words(self) -> list[str]:
        """The proposal, in lines; none where nothing was judged."""
        if not self.kept:
            return []
        named = ", ".join(
            f"{tier} (p99 {one.standing.p99_ms:.2f} ms, {_figure(one)})" for tier, one in self.kept.items()
        )
        budget = f"the budget of {self._limits.budget_ms:g} ms"
        first = (
            f"begin with {self.first}, the most accurate that fits {budget}"
            if self.first
            else f"none fits {budget}"
        )
        unknown = [tier for tier in self._rankings if tier not in self.kept and tier not in self.left_out]
        return [
            f"tiers worth keeping on this machine: {named}; {first}",
            *(f"{tier}: {why}" for tier, why in self.left_out.items()),
            *(f"{tier}: nothing that may be used was judged" for tier in unknown),
        ]

    def _is_worth(self, one: Point, other: Point) -> bool:
        faster = self._rankings[one.tier].is_faster(one.standing, other.standing)
        return faster or one.accuracy.merit > other.accuracy.merit + self._limits.max_loss


def _point(tier: str, standing: RankedTrial) -> Point | None:
    """The trial, if it was judged and its figure is a number."""
    accuracy = standing.trial.figures and standing.trial.figures.accuracy
    if not accuracy or not math.isfinite(accuracy.value) or not math.isfinite(standing.p99_ms):
        return None
    return Point(tier, standing, accuracy)


def _figure(point: Point) -> str:
    return f"{point.accuracy.name} {point.accuracy.value:.3f}"
