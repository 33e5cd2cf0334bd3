"""How a roll-out stands, out of what vehicles brought home, and what has to be done next.

That is the next step, a hold, or back. And it is shown to people: the table in a terminal, the page, and the
picture of a simulated one.

Whether the candidate is better or worse, intervals say that hold at all times at once: one may look as often
as one likes.

A minute of a vehicle is a block, and blocks of one drive are alike. So the unit is a stretch of up to half
an hour of one drive, counted once it is over; and where vehicles differ more from each other than their
stretches do, the variance is that between vehicles. A unit's value is a logarithm of a ratio (times), or a
difference (misses): both are as likely positive as negative where the versions are the same.

The interval is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas,
"Time-uniform central limit theory and asymptotic confidence sequences" (Annals of Statistics 52, 2024,
theorem 2.2), which is Robbins' normal mixture (Howard, Ramdas, McAuliffe, Sekhon, Annals of Statistics 49,
2021, eq. 14) with the variance estimated:

    mean +- s / n * sqrt((n + h) * log((n + h) / (h * alpha^2)))

`h` is where it is narrowest; alpha is shared by the metrics and groups that are looked at (Bonferroni).
"""

import datetime
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros import __version__
from torchperf_ros.api.text import console_table
from torchperf_ros.fleet.plan import DONE, ROLLED_BACK, Margins, RolloutPlan
from torchperf_ros.fleet.records import SERVING, Brought
from torchperf_ros.observe.runs.changes import STYLES, TAGS, Judgement

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.table import Table


Values = NDArray[Any]

# The chance of a false decision in a whole roll-out, however often it is looked at.
ALPHA: Final = 0.05
# A unit is half an hour of driving at most.
#
# Longer ones would take longer to be counted, see `bench rollout`.
STRETCH_BLOCKS: Final = 30
# A shorter stretch than this is left out: it would count as much as one of half an hour.
LEAST_BLOCKS: Final = 5
LEAST_UNITS: Final = 60
# The interval is asymptotic: before so many units, of so many vehicles, there is none.
LEAST_VEHICLES: Final = 10
_OVER_S: Final = 600.0
# Units: a step's worth. It is some 10 % wider than need be at a quarter and at four times of that.
_NARROWEST_AT: Final = 400.0
# Events that may have been missed by chance where none was seen.
#
# The rule of three (Hanley, Lippman-Hand, 1983).
_UNSEEN: Final = 3.0

LATENCY, P99, MISSES, DISAGREEMENT = "latency", "p99", "misses", "disagreement"
# What is compared by differences; the disagreement of outputs is one figure with a limit.
METRICS: Final = (LATENCY, P99, MISSES)


@dataclass(frozen=True)
class ConfidenceInterval:
    """A mean with its confidence sequence; NaN and infinite where there are too few units.

    Attributes:
        mean, low, high: of the units' values.
        units, vehicles: how many there are.
    """

    mean: float = math.nan
    low: float = -math.inf
    high: float = math.inf
    units: int = 0
    vehicles: int = 0
    alpha: float = ALPHA

    def units_for(self, half: float) -> float:
        """About how many units there have to be until it is as narrow as `half` on each side of its mean.

        As many or more: where vehicles differ for good, only more vehicles make it narrower.
        """
        if math.isnan(self.mean):
            return float(LEAST_UNITS)
        if half <= 0:
            return math.inf
        one = (self.high - self.low) / 2.0 / _width(self.units, self.alpha)  # the deviation of one unit
        count = float(self.units)
        while one * _width(count, self.alpha) > half:
            count *= 1.1
        return count

    def verdict(self, margin: float) -> Judgement:
        """More is worse.

        The interval excludes 0 and the mean is beyond the margin, or all of it is within.
        """
        if self.low > 0 and self.mean >= margin:
            return Judgement.WORSE
        if self.high < 0 and self.mean <= -margin:
            return Judgement.BETTER
        return Judgement.EQUIVALENT if -margin < self.low and self.high < margin else Judgement.NOT_ENOUGH

    def limited(self, limit: float) -> Judgement:
        """Of a share: worse where it is over the limit, equivalent where it is below."""
        return (
            Judgement.WORSE
            if self.low > limit
            else Judgement.EQUIVALENT
            if self.high < limit
            else Judgement.NOT_ENOUGH
        )


@dataclass(frozen=True)
class Units:
    """Stretches that are over.

    Attributes:
        vehicle: index of each one's vehicle, shape (n,).
        end_s: when each was over, UTC in s.
        frames: of each, shape (n,).
        values: by metric, each of shape (n,); NaN where it is not known. Logarithms of ratios of candidate
            to base (`latency`, `p99`), difference of shares (`misses`), share (`disagreement`).
    """

    vehicle: Values
    end_s: Values
    frames: Values
    values: Mapping[str, Values]

    def chosen(self, mask: Values) -> "Units":
        return Units(
            self.vehicle[mask],
            self.end_s[mask],
            self.frames[mask],
            {name: one[mask] for name, one in self.values.items()},
        )

    def interval(self, metric: str, alpha: float = ALPHA) -> ConfidenceInterval:
        known = np.isfinite(self.values[metric])
        least = (
            1.0 / float(self.frames[known].mean()) if known.any() and metric not in {LATENCY, P99} else 0.0
        )
        return interval(self.values[metric][known], self.vehicle[known], alpha, least)


def interval(values: Values, vehicles: Values, alpha: float, least: float = 0.0) -> ConfidenceInterval:
    """The confidence sequence of a mean at this moment.

    Args:
        values: of the units so far, shape (n,).
        vehicles: whose each is, indices from 0 on.
        alpha: the chance that it ever leaves out the truth.
        least: what one rare event adds to a unit's value; the variance is never less than that of three
            such events.
    """
    count = len(values)
    per_vehicle = np.bincount(vehicles)
    driven = per_vehicle[per_vehicle > 0]
    if count < LEAST_UNITS or len(driven) < LEAST_VEHICLES:
        return ConfidenceInterval(units=count, vehicles=len(driven), alpha=alpha)
    mean = float(values.mean())
    between = np.bincount(vehicles, values - mean)[per_vehicle > 0]
    # Of sums over all units: from the units, and from vehicles, whose units may have something in common.
    of_units = float(((values - mean) ** 2).sum()) * count / (count - 1)
    of_vehicles = float((between**2).sum()) * len(driven) / (len(driven) - 1)
    # Few vehicles: as much wider as Student's t is than the normal distribution.
    wider = (len(driven) - 1) / (len(driven) - 3)
    deviation = math.sqrt(wider * max(of_units, of_vehicles, _UNSEEN * least**2) / count)
    half = deviation * _width(count, alpha)
    return ConfidenceInterval(mean, mean - half, mean + half, count, len(driven), alpha)


def _width(count: float, alpha: float) -> float:
    """Half of the interval of so many units whose deviation is 1.

    Units over `h` at which it is narrowest: Waudby-Smith et al., below theorem 2.2.
    """
    base = -2.0 * math.log(alpha)
    flat = _NARROWEST_AT / (base + math.log(base + 1.0))
    return math.sqrt((count + flat) * math.log((count + flat) / (flat * alpha**2))) / count


def units_of(blocks: Mapping[str, Values], now_s: float = math.inf) -> Units:
    """Stretches out of minutes, the columns of `records.Brought.blocks`, ordered by vehicle, drive and time.

    A stretch is over when it has `STRETCH_BLOCKS`, when its drive began another one, or when nothing was
    added for `_OVER_S`. Only then it counts, and once: a value that changes after it was looked at would be
    looked at twice.
    """
    count = len(blocks["vehicle"])
    if not count:
        empty = np.empty(0)
        return Units(np.empty(0, np.int64), empty, empty, dict.fromkeys((*METRICS, DISAGREEMENT), empty))
    parts = [blocks[name] for name in ("vehicle", "drive", "version", "role")]
    new = np.concatenate([[True], np.any([one[1:] != one[:-1] for one in parts], axis=0)])
    first = np.maximum.accumulate(np.where(new, np.arange(count), 0))
    new |= (np.arange(count) - first) % STRETCH_BLOCKS == 0
    starts = np.flatnonzero(new)

    def total(name: str) -> Values:
        return np.add.reduceat(blocks[name].astype(float), starts)

    sizes = np.diff(np.append(starts, count))
    frames, compared = total("frames"), total("compared")
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {
            LATENCY: np.log(total("candidate_sum_ms") / total("base_sum_ms")),
            P99: np.log(total("candidate_p99_ms") / total("base_p99_ms")),
            MISSES: (total("candidate_misses") - total("base_misses")) / frames,
            DISAGREEMENT: (compared - total("agreed")) / compared,
        }
    vehicle, end_s = blocks["vehicle"][starts], blocks["t_s"][starts + sizes - 1]
    over = (
        np.append(np.all([one[starts][1:] == one[starts][:-1] for one in parts[:2]], axis=0), [False])
        | (sizes == STRETCH_BLOCKS)
        | (end_s < now_s - _OVER_S)
    )
    return Units(vehicle, end_s, frames, values).chosen(over & (sizes >= LEAST_BLOCKS) & (frames > 0))


def margin_of(metric: str, margins: Margins) -> float:
    """The smallest difference of a metric that matters, in its unit."""
    if metric == MISSES:
        return margins.miss_points / 100.0
    return math.log1p((margins.latency_percent if metric == LATENCY else margins.p99_percent) / 100.0)


# Of the vehicles that had the candidate.
#
# One alone may be broken itself, more than this and at least two are not.
MOST_ROLLED_BACK: Final = 0.01
_LEAST_ROLLED_BACK: Final = 2
_REVOKED: Final = "revoked"
_ANOTHER_TRY: Final = (
    "another try of this version needs a plan of another `name`, with the version under `again`"
)
_S_PER_H: Final = 3600.0
_BLOCKS_PER_H: Final = 60.0
_PERCENT: Final = 100.0


class MoveKind(enum.Enum):
    ADVANCE = "advance"
    HOLD = "hold"
    BACK = "rollback"


@dataclass(frozen=True)
class Move:
    """What has to be done, and why. `hard`: a guard is broken, and `--force` does not overrule it."""

    kind: MoveKind
    reasons: tuple[str, ...]
    hard: bool = False


@dataclass(frozen=True)
class MetricVerdict:
    """A verdict: of a metric, on all vehicles (`group` is "") or on those of one GPU.

    `margin` in the metric's unit.
    """

    group: str
    metric: str
    interval: ConfidenceInterval
    margin: float
    verdict: Judgement

    def lacks(self, per_h: float, share: float) -> str:
        """What is missing for a verdict, and how long it takes.

        The same for all metrics where there is no interval.

        Args:
            per_h: units that came in an hour since the step began.
            share: of the vehicles that the step exposes, percent.
        """
        own = self.interval
        if own.vehicles < LEAST_VEHICLES:
            found = (
                f"not enough data: a verdict needs {LEAST_VEHICLES} vehicles, {own.vehicles} brought some"
                " home"
            )
            if own.vehicles and (wide := math.ceil(share * LEAST_VEHICLES / own.vehicles)) <= _PERCENT:
                found += (
                    f"; if {share:g} % of the fleet are no more, a step of {wide} % is needed, or --force"
                )
            return found
        inside = self.margin - abs(own.mean)
        half = abs(inside) if self.metric == DISAGREEMENT else inside if inside > 0 else abs(own.mean)
        missing, found = own.units_for(half) - own.units, "not enough data"
        if math.isfinite(own.low):
            found = f"{self.metric}: {found}, {self.text}, margin {self.margin_text}"
        if math.isinf(missing):
            return f"{found}: the difference is the margin itself"
        found += f": it needs some {max(missing, 1):,.0f} more units of half an hour"
        return found + (
            f", {missing / per_h:,.1f} h at least at {per_h:.1f} an hour as now" if per_h else ""
        )

    @property
    def text(self) -> str:
        low, mean, high = (
            self._percent(one) for one in (self.interval.low, self.interval.mean, self.interval.high)
        )
        if self.interval.low == -math.inf:
            return f"{self.interval.units} units of {self.interval.vehicles} vehicles"
        return f"{mean:+.2f} {self._unit} ({low:+.2f} to {high:+.2f})"

    @property
    def margin_text(self) -> str:
        return f"{self._percent(self.margin):.3g} {self._unit}"

    @property
    def _unit(self) -> str:
        return "points" if self.metric not in METRICS[:2] else "%"

    def _percent(self, value: float) -> float:
        return _PERCENT * (math.expm1(value) if self.metric in METRICS[:2] else value)


@dataclass(frozen=True)
class StepStanding:
    """What happened in a step.

    Attributes:
        vehicles: that had the candidate.
        shadow_h, serving_h: hours of driving with it.
        refused: of its plans, by the guard; beside the base those that it accepts of the base.
        deaths: of its workers.
        score: mean of the adapter's own score, of the minutes that have one; NaN without one.
    """

    vehicles: int = 0
    shadow_h: float = 0.0
    serving_h: float = 0.0
    refused: int = 0
    deaths: int = 0
    score: float = math.nan


@dataclass(frozen=True)
class RolloutStanding:
    """What is known of a plan's candidate.

    Attributes:
        vehicles: that had it, as a shadow or serving.
        steps: of each step of the plan.
        since_step_h: time since the step began.
        units_per_h: units of the step, see `sequence.Units`, by that time.
        rolled_back: vehicles that took it back by themselves, with the reason.
        refused: vehicles that do not follow the plan, with the reason.
        findings: on all vehicles, then on each GPU where there are several.
    """

    vehicles: int
    steps: tuple[StepStanding, ...]
    since_step_h: float
    rolled_back: Mapping[str, str]
    findings: tuple[MetricVerdict, ...]
    units_per_h: float = 0.0
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        findings = [
            {
                "group": one.group or "all",
                "metric": one.metric,
                "verdict": one.verdict.value,
                "margin": one.margin,
                **_finite(one.interval),
            }
            for one in self.findings
        ]
        return {
            "vehicles": self.vehicles,
            "units_per_h": self.units_per_h,
            "steps": [*map(_finite, self.steps)],
            "since_step_h": self.since_step_h,
            "rolled_back": dict(self.rolled_back),
            "refused": dict(self.refused),
            "findings": findings,
        }


def standing_of(plan: RolloutPlan, brought: Brought, now: datetime.datetime) -> RolloutStanding:
    own = brought.blocks["version"] == plan.version
    blocks = {name: column[own] for name, column in brought.blocks.items()}
    steps = []
    for step in range(len(plan.steps)):
        here = blocks["step"] == step
        serving, driven = blocks["role"] == SERVING, here & (blocks["frames"] > 0)
        scores = blocks["score"][here]
        scores = scores[np.isfinite(scores)]
        steps.append(
            StepStanding(
                len(set(blocks["vehicle"][here].tolist())),
                int((driven & ~serving).sum()) / _BLOCKS_PER_H,
                int((driven & serving).sum()) / _BLOCKS_PER_H,
                int(blocks["refused"][here].sum()),
                int(blocks["deaths"][here].sum()),
                float(scores.mean()) if len(scores) else math.nan,
            )
        )
    back = {
        str(event["vehicle"]): str(event["reason"])
        for event in brought.events
        if event["what"] == "rolled_back"
        and event["version"] == plan.version
        and not str(event["reason"]).startswith(_REVOKED)
    }
    gpus = [str(facts.get("gpu", "")) for facts in brought.facts.values()]
    refused = {
        str(event["vehicle"]): str(event["reason"])
        for event in brought.events
        if event["what"] == "refused"
        # A clock that is behind dates its refusal before the plan, and the reason names the plan's time.
        and (
            event["t_s"] >= plan.issued.timestamp()
            or f"{plan.issued:issued %Y-%m-%d %H:%M}" in str(event["reason"])
        )
    }
    ids = list(brought.facts)
    exposed = len({ids[index] for index in blocks["vehicle"].tolist()} | set(back))
    since_h = (now - plan.step_since).total_seconds() / _S_PER_H
    units = units_of(blocks, now.timestamp())
    return RolloutStanding(
        exposed,
        tuple(steps),
        since_h,
        back,
        judge(plan, units, gpus),
        rate_of(plan, units, since_h),
        refused,
    )


def rate_of(plan: RolloutPlan, units: Units, since_step_h: float) -> float:
    return int((units.end_s >= plan.step_since.timestamp()).sum()) / max(since_step_h, 1.0 / _BLOCKS_PER_H)


def judge(plan: RolloutPlan, units: Units, gpus: Sequence[str]) -> tuple[MetricVerdict, ...]:
    """The verdicts on all vehicles, and on those of each kind of GPU.

    `gpus` is by the index of the vehicle.

    A candidate that is worse on one kind only is no better for the vehicles with that kind. All verdicts share one
    chance of a false decision.
    """
    kinds = sorted({gpu for gpu in gpus if gpu})
    groups: dict[str, NDArray[Any]] = {"": np.ones(len(units.vehicle), bool)}
    if len(kinds) > 1:
        of_units = np.array(gpus)[units.vehicle] if len(units.vehicle) else np.empty(0, dtype="<U1")
        groups |= {kind: of_units == kind for kind in kinds}
    alpha = ALPHA / (len(groups) * (len(METRICS) + 1))
    findings = []
    for group, mask in groups.items():
        mine = units.chosen(mask)
        for metric in METRICS:
            found, margin = mine.interval(metric, alpha), margin_of(metric, plan.margins)
            findings.append(MetricVerdict(group, metric, found, margin, found.verdict(margin)))
        if np.isfinite(mine.values[DISAGREEMENT]).any():
            found, limit = mine.interval(DISAGREEMENT, alpha), plan.limits.disagreement
            findings.append(MetricVerdict(group, DISAGREEMENT, found, limit, found.limited(limit)))
    return tuple(findings)


def next_move(plan: RolloutPlan, standing: RolloutStanding) -> Move:
    """What the roll-out needs now; people's `advance` and the simulation ask the same."""
    back, most = len(standing.rolled_back), max(MOST_ROLLED_BACK * standing.vehicles, _LEAST_ROLLED_BACK)
    goes_on = plan.state != ROLLED_BACK  # also where it is done: what shows only then leads back, too
    if goes_on and back >= most:
        name, reason = next(iter(standing.rolled_back.items()))
        return Move(
            MoveKind.BACK,
            (
                f"{back} of {standing.vehicles} vehicles rolled it back, as {name}: {reason}; {_ANOTHER_TRY}",
            ),
            True,
        )
    worse = [one for one in standing.findings if one.verdict is Judgement.WORSE]
    if goes_on and worse:
        on = {one.group: f" on {one.group}" if one.group else "" for one in worse}
        return Move(
            MoveKind.BACK, tuple(f"{one.metric} is worse{on[one.group]}: {one.text}" for one in worse)
        )
    if plan.state in {ROLLED_BACK, DONE}:
        why = f"the roll-out is {plan.state.replace('_', ' ')}"
        return Move(MoveKind.HOLD, (why if plan.state == DONE else f"{why}; {_ANOTHER_TRY}",), hard=True)
    here, step = standing.steps[plan.step], plan.now_at
    reasons = []
    if standing.since_step_h < step.soak_h:
        reasons.append(
            f"step {plan.step} has lasted {standing.since_step_h:.1f} h; it has to last {step.soak_h:g} h"
        )
    exposure_h = here.shadow_h + here.serving_h
    if exposure_h < step.least_exposure_h:
        reasons.append(
            f"step {plan.step} has {exposure_h:.1f} h of driving with the candidate; it needs "
            f"{step.least_exposure_h:g} h"
        )
    lacking = [one for one in standing.findings if not one.group and one.verdict is Judgement.NOT_ENOUGH]
    lacks = tuple(dict.fromkeys(one.lacks(standing.units_per_h, step.share) for one in lacking))
    is_last = plan.step == len(plan.steps) - 1
    if not standing.vehicles:
        reasons.append(f"no vehicle brought anything home of version {plan.version}: no data is no verdict")
    if (
        step.soak_h or step.least_exposure_h or is_last
    ):  # another one that asks for nothing is a stop on the way
        reasons += lacks
    if reasons:
        return Move(MoveKind.HOLD, tuple(reasons))
    if lacks:
        return Move(
            MoveKind.ADVANCE,
            (f"step {plan.step} asks for no time and no exposure; there is no verdict", *lacks),
        )
    return Move(MoveKind.ADVANCE, ("every figure is within its margin",))


def _finite(figures: ConfidenceInterval | StepStanding) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(figures).items()}


_HEADS: Final = (
    "step",
    "share %",
    "candidate",
    "vehicles",
    "h as a shadow",
    "h serving",
    "plans refused",
    "deaths",
    "score",
)
_FINDING_HEADS: Final = ("metric", "vehicles", "difference, candidate less base", "units", "verdict")
_MOST_REASONS: Final = 50


def step_rows(plan: RolloutPlan, standing: RolloutStanding) -> list[list[str]]:
    return [
        [
            f"{'> ' if number == plan.step else ''}{number}",
            f"{step.share:g}",
            "shadow" if step.shadow else "serves",
            f"{found.vehicles:,}",
            f"{found.shadow_h:,.1f}",
            f"{found.serving_h:,.1f}",
            f"{found.refused:,}",
            f"{found.deaths:,}",
            f"{found.score:.3f}" if math.isfinite(found.score) else "-",
        ]
        for number, (step, found) in enumerate(zip(plan.steps, standing.steps, strict=True))
    ]


def finding_rows(standing: RolloutStanding) -> list[list[str]]:
    return [
        [one.metric, one.group or "all", one.text, f"{one.interval.units:,}", one.verdict.value]
        for one in standing.findings
    ]


def tables(plan: RolloutPlan, standing: RolloutStanding) -> "list[Table]":
    reached = ["bold" if number == plan.step else "" for number in range(len(plan.steps))]
    styles = [STYLES.get(one.verdict, "") for one in standing.findings]
    return [
        console_table(_HEADS, step_rows(plan, standing), reached),
        console_table(_FINDING_HEADS, finding_rows(standing), styles),
    ]


def headline(plan: RolloutPlan) -> str:
    state, last = plan.state.replace("_", " "), len(plan.steps) - 1
    return (
        f"{plan.name}: {plan.stage} {plan.version}, serial {plan.serial}, {state} at step {plan.step} of"
        f" {last}"
    )


def status_page(plan: RolloutPlan, standing: RolloutStanding, move: Move, left_out: Sequence[str]) -> str:
    from torchperf_ros.observe.runs.report import Cell, Page, table

    page = Page()
    look = {"advance": "good", "hold": "fair", "rollback": "bad"}[move.kind.value]
    lines = [(look, f"{move.kind.value}: {reason}") for reason in move.reasons]
    page.top.append({"kind": "verdict", "lines": lines})
    page.section(
        "Steps",
        [
            table(_HEADS, step_rows(plan, standing), css="soft"),
            (
                {"kind": "note", "title": "What could not be read", "items": list(left_out)}
                if left_out
                else None
            ),
        ],
    )
    rows: list[list[Cell]] = [list(row) for row in finding_rows(standing)]
    for row, one in zip(rows, standing.findings, strict=True):
        row[-1] = {"text": row[-1], "tag": TAGS[one.verdict]} if one.verdict in TAGS else row[-1]
    page.section(
        "Verdicts",
        [table(_FINDING_HEADS, rows), page.plots(("Differences and margins", _forest(standing)))],
        subtitle="Intervals hold however often they are looked at.",
    )
    for found, what in ((standing.rolled_back, "rolled it back"), (standing.refused, "refused the plan")):
        if found:
            rows = [list(one) for one in list(found.items())[:_MOST_REASONS]]
            page.section(f"{len(found)} vehicles {what}", [table(("vehicle", "why"), rows)])
    vehicles = f"{standing.vehicles:,} vehicles had it; the step has lasted {standing.since_step_h:,.1f} h."
    return page.render(headline(plan), vehicles, f"torchperf rollout status {__version__}")


def _forest(standing: RolloutStanding) -> "go.Figure | str":
    """Each difference with its interval and margin, in margins: 1 is where it matters."""
    import plotly.graph_objects as go

    shown = [one for one in standing.findings if math.isfinite(one.interval.low) and one.margin]
    if not shown:
        return "not enough data for an interval yet"
    figure = go.Figure()
    figure.add_scatter(
        x=[one.interval.mean / one.margin for one in shown],
        mode="markers",
        showlegend=False,
        y=[f"{one.metric} {one.group}".strip() for one in shown],
        error_x={
            "type": "data",
            "array": [(one.interval.high - one.interval.mean) / one.margin for one in shown],
        },
        text=[one.text for one in shown],
        hovertemplate="%{y}: %{text}",
    )
    for edge in (-1, 1):
        figure.add_vline(x=edge, line={"color": "#D55E00", "dash": "dot", "width": 1})
    figure.update_layout(
        xaxis_title_text="in margins; dotted: where it begins to matter",
        yaxis_automargin=True,  # for the names of metrics and GPUs
        height=120 + 34 * len(shown),
    )
    return figure
