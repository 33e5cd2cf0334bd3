"""A fleet that a plan is tried on before it meets a real one.

It shows how many vehicles have the candidate, and for how long, until it is stopped.

Buckets, roles, guards, verdicts and the next move are the code that vehicles and `torchperf rollout
advance` run. What is simulated is what they see: minutes out of recorded runs, drives, deaths, memory. Time
goes in half hours, which each vehicle drives wholly or not at all. The plan's owner looks once a day at
what was brought home, and signs what `advance` says; vehicles read it within half an hour.
"""

import datetime
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import (
    DONE,
    ROLLED_BACK,
    CandidateFigures,
    RolloutPlan,
    RolloutStep,
    broken_guard,
    bucket_percent,
    facts_of,
    is_for,
)
from torchperf_ros.fleet.records import BLOCK_S, SERVING, SHADOW, paired_figures
from torchperf_ros.fleet.status import (
    STRETCH_BLOCKS,
    MoveKind,
    RolloutStanding,
    StepStanding,
    Units,
    Values,
    judge,
    next_move,
    rate_of,
    units_of,
)
from torchperf_ros.fleet.vehicle import Role, role_of

# What can be tried.
CANDIDATES: Final = {
    "same": "no difference",
    "better": "every frame is shorter",
    "worse": "every frame takes longer",
    "worse-tail": "only the slowest twentieth takes longer, so that the p99 does",
    "worse-on-one-gpu": "every frame takes longer, on the rarest GPU only",
    "leaking": "its worker's memory grows by 200 MiB an hour",
    "crashing": "its worker dies once in 10,000 frames",
}
# The share of the vehicles with each.
GPUS: Final = {"orin": 0.7, "xavier": 0.2, "rtx4000": 0.1}
_COLOURS: Final = ("#0072B2", "#D55E00")  # Okabe and Ito's, distinct with every kind of colour vision
# Of a minute, at 30 Hz.
FRAMES: Final = 1800
PERIOD_H: Final = STRETCH_BLOCKS / 60.0
# How often the owner of a plan looks; what vehicles brought home until then counts.
LOOK_EVERY_H: Final = 24.0
_WINDOWS: Final = 600
_BUDGET_MS: Final = 50.0
_MEDIAN_MS, _P99_SIGMAS, _P99_BY_MEDIAN = (
    25.0,
    2.3263,
    1.4,
)  # the reference detector's, as the closed loop has it
_CORRELATION: Final = 0.9  # of successive frames: a scene that is hard stays hard
_SPIKES, _SPIKE_MS, _TAIL_INDEX = 0.005, 5.0, 2.5  # the heavy tail that `bench regress` judges by, too
# of the logarithm: what one drive does to one version's times, temperature for example
_DRIVE_SIGMA: Final = 0.02
_BEGIN, _END = (
    0.1,
    0.2,
)  # chances of a drive's begin and end in half an hour: 2.5 h each, a third of the time
_LEAK_MIB_PER_H, _NOISE_MIB_PER_H = 200.0, 10.0
_CRASH: Final = 1e-4
_MOST_DAYS: Final = 21
_TAIL: Final = 0.95


@dataclass(frozen=True)
class SimulatedCandidate:
    """What is wrong with a candidate: one of `CANDIDATES`, and by which share its times differ."""

    kind: str = "same"
    by: float = 0.05


@dataclass
class SimulatedRollout:
    """What became of a roll-out.

    Attributes:
        stopped: it was rolled back; else it is done, or `hours` is all that was simulated.
        why: it was stopped, or where it hangs.
        step: at which it ended.
        hours: from its begin until it ended.
        reached, served: vehicles on which the candidate ran at all, and on which it published, percent.
        exposure_h: hours of driving with it, and of those serving.
        rolled_back: vehicles that took it back by themselves.
        deaths: of its workers.
        line: hours, percent of the vehicles that had it so far, step: after each half hour.
    """

    stopped: bool = False
    why: str = ""
    step: int = 0
    hours: float = 0.0
    reached: float = 0.0
    served: float = 0.0
    exposure_h: float = 0.0
    serving_h: float = 0.0
    rolled_back: int = 0
    deaths: int = 0
    line: list[tuple[float, float, int]] = field(default_factory=list)


class Minutes:
    """Figures of minutes of both versions, out of which vehicles' minutes are drawn."""

    def __init__(self, windows_ms: Values, budget_ms: float, candidate: SimulatedCandidate) -> None:
        """Take the minutes of the base, shape (minutes, frames).

        Those of the candidate are made of them.
        """
        slower = candidate.by if candidate.kind in {"worse", "worse-on-one-gpu"} else 0.0
        factor = 1.0 - candidate.by if candidate.kind == "better" else 1.0 + slower
        changed = windows_ms * factor
        if candidate.kind == "worse-tail":
            p95, p99 = np.quantile(windows_ms, (_TAIL, 0.99))
            stretch = (p99 * (1.0 + candidate.by) - p95) / (p99 - p95)
            changed = np.where(windows_ms > p95, p95 + (windows_ms - p95) * stretch, windows_ms)
        self.base, self.frames = paired_figures(windows_ms, windows_ms, budget_ms), windows_ms.shape[1]
        self.candidate = paired_figures(changed, changed, budget_ms)
        self._count = len(windows_ms)

    def draw(self, effects: Values, is_base: Values, random: np.random.Generator) -> dict[str, Values]:
        """Minutes of stretches, flat.

        `effects` (stretches, 2) on the logarithm; `is_base`: nothing is wrong there.
        """
        found: dict[str, Values] = {"frames": np.full(len(effects) * STRETCH_BLOCKS, self.frames)}
        for column, arm in enumerate(("base", "candidate")):
            chosen = random.integers(self._count, size=(len(effects), STRETCH_BLOCKS))
            factor = np.exp(effects[:, column])[:, None]
            for name in ("sum_ms", "p99_ms", "misses"):
                values = self.base[f"base_{name}"][chosen]
                if arm == "candidate":
                    values = np.where(is_base[:, None], values, self.candidate[f"candidate_{name}"][chosen])
                found[f"{arm}_{name}"] = (values if name == "misses" else values * factor).ravel()
        return found


def built_in_minutes(random: np.random.Generator) -> tuple[Values, float]:
    """Minutes where no run was recorded, and their budget in ms.

    The reference detector's median and p99 (as in the closed loop), correlated frames, Pareto spikes.
    """
    noise = random.standard_normal((_WINDOWS, FRAMES))
    body = np.empty_like(noise)
    body[:, 0] = noise[:, 0]
    for frame in range(1, FRAMES):  # AR(1), of variance 1
        body[:, frame] = (
            _CORRELATION * body[:, frame - 1] + math.sqrt(1.0 - _CORRELATION**2) * noise[:, frame]
        )
    times = _MEDIAN_MS * np.exp(math.log(_P99_BY_MEDIAN) / _P99_SIGMAS * body)
    spikes = (
        (random.random(times.shape) < _SPIKES) * _SPIKE_MS * (1.0 + random.pareto(_TAIL_INDEX, times.shape))
    )
    return times + spikes, _BUDGET_MS


def recorded_minutes(
    paths: Sequence[Path], stage: str, random: np.random.Generator
) -> tuple[Values, float]:
    """Minutes out of runs of `torchperf replay`, of successive frames wherever they begin, and their budget in ms.

    Raises:
        ConfigError: a run has no such stage, or less than a minute of it.
    """
    from torchperf_ros.observe.runs.run_log import read_run

    windows, budget_ms = [], math.nan
    for path in paths:
        frames = read_run(path).frames
        if stage not in frames:
            raise ConfigError(f"--runs {path}: has no stage {stage!r}; it has: {', '.join(frames)}")
        total_ms = frames[stage]["total_ms"].astype(float)
        total_ms, budget_ms = (
            total_ms[np.isfinite(total_ms)],
            float(np.nanmax(frames[stage]["budget_ms"], initial=0)),
        )
        if len(total_ms) < FRAMES:
            raise ConfigError(
                f"--runs {path}: has {len(total_ms):,} frames of {stage}; a minute, {FRAMES:,}, is needed"
            )
        starts = random.integers(len(total_ms) - FRAMES + 1, size=max(_WINDOWS // len(paths), 1))
        windows.append(np.lib.stride_tricks.sliding_window_view(total_ms, FRAMES)[starts])
    return np.concatenate(windows), budget_ms


class Fleet:
    """Vehicles on which a plan is played; the same seed plays the same."""

    def __init__(
        self, plan: RolloutPlan, vehicles: int, candidate: SimulatedCandidate, minutes: Minutes, seed: int
    ) -> None:
        """Draw GPUs, and work out buckets and targeting.

        Raises:
            PlanError: the plan's rule asks for a fact beyond `vehicle` and `gpu`.
        """
        self._random = random = np.random.default_rng(seed)
        self._plan, self._candidate, self._minutes, self._count = plan, candidate, minutes, vehicles
        self._gpus = random.choice(list(GPUS), size=vehicles, p=list(GPUS.values()))
        ids = [f"vehicle-{seed}-{number:06}" for number in range(vehicles)]
        self._bucket = np.array([bucket_percent(plan.name, name) for name in ids])
        if plan.targeting is not None:
            facts = (
                facts_of({"vehicle": name, "gpu": str(gpu)})
                for name, gpu in zip(ids, self._gpus, strict=True)
            )
            taken = np.array([is_for(plan.name, plan.targeting, one, one["vehicle"]) for one in facts])
            self._bucket[~taken] = math.inf
        self._wrong = np.full(vehicles, True)
        if candidate.kind == "worse-on-one-gpu":
            self._wrong = self._gpus == min(GPUS, key=lambda name: GPUS[name])
        self._driving = random.random(vehicles) < _BEGIN / (_BEGIN + _END)
        self._drive = np.arange(vehicles)
        self._effects = random.normal(0.0, _DRIVE_SIGMA, (vehicles, 2))
        self._shadow_s, self._serving_s = np.zeros(vehicles), np.zeros(vehicles)
        self._before = [CandidateFigures()] * vehicles
        self._back: dict[int, str] = {}

    def play(
        self, look_every_h: float, progress: Callable[[int, int], None] = lambda done, of: None
    ) -> SimulatedRollout:
        plan, outcome = self._plan, SimulatedRollout()
        begin = plan.step_since
        steps = [StepStanding()] * len(plan.steps)
        of_step: list[set[int]] = [set() for _ in plan.steps]
        units: list[Units] = []
        periods = round(24 * _MOST_DAYS / PERIOD_H)
        for period in range(1, periods + 1):
            if not period % 48:  # a simulated day
                progress(period, periods)
            now = begin + datetime.timedelta(hours=period * PERIOD_H)
            found = self._period(plan, now, outcome)
            if found is not None:
                units.append(found[0])
                of_step[plan.step] |= set(found[1].tolist())
                shadow_h, serving_h = found[2]
                before = steps[plan.step]
                steps[plan.step] = StepStanding(
                    len(of_step[plan.step]), before.shadow_h + shadow_h, before.serving_h + serving_h
                )
            had = int(((self._shadow_s > 0) | (self._serving_s > 0)).sum())
            outcome.hours, outcome.step = period * PERIOD_H, plan.step
            outcome.line.append((outcome.hours, 100.0 * had / self._count, plan.step))
            if not units or period % max(round(look_every_h / PERIOD_H), 1):
                continue
            units = [_joined(units)]
            back = {f"vehicle {number}": reason for number, reason in self._back.items()}
            since_h = (now - plan.step_since).total_seconds() / 3600.0
            findings = judge(plan, units[0], self._gpus.tolist())
            standing = RolloutStanding(
                had, tuple(steps), since_h, back, findings, rate_of(plan, units[0], since_h)
            )
            move = next_move(plan, standing)
            outcome.why = "; ".join(move.reasons)
            if move.kind is MoveKind.BACK:
                plan = plan.rolled_back(now)
            elif move.kind is MoveKind.ADVANCE:
                plan = plan.advanced(now)
            if plan.state in {ROLLED_BACK, DONE}:
                break
        outcome.stopped = plan.state == ROLLED_BACK
        outcome.reached, outcome.served = outcome.line[-1][1], 100.0 * float((self._serving_s > 0).mean())
        outcome.exposure_h = sum(step.shadow_h + step.serving_h for step in steps)
        outcome.serving_h = sum(step.serving_h for step in steps)
        outcome.rolled_back = len(self._back)
        return outcome

    def _period(
        self, plan: RolloutPlan, now: datetime.datetime, outcome: SimulatedRollout
    ) -> tuple[Units, Values, tuple[float, float]] | None:
        """Half an hour.

        Which vehicles drive, with which role, and their figures; None where no vehicle had the candidate.
        """
        random = self._random
        starts = ~self._driving & (random.random(self._count) < _BEGIN)
        self._driving = starts | (self._driving & (random.random(self._count) >= _END))
        self._drive[starts] += self._count
        self._effects[starts] = random.normal(0.0, _DRIVE_SIGMA, (int(starts.sum()), 2))
        who, roles = [], []
        for one in np.flatnonzero(self._driving & (self._bucket < plan.share)).tolist():
            if one in self._back:
                continue
            shadow_s, serving_s = self._shadow_s[one], self._serving_s[one]
            role, _ = role_of(
                plan,
                self._bucket[one],
                shadow_s,
                shadow_s + serving_s > 0,
                serving_s >= plan.probation_min * BLOCK_S,
            )
            if role is not Role.NONE:
                who.append(one)
                roles.append(SHADOW if role is Role.SHADOW else SERVING)
        if not who:
            return None
        chosen, serving = np.array(who), np.array(roles) == SERVING
        blocks = self._minutes.draw(self._effects[chosen], ~self._wrong[chosen], random)
        shape = (len(chosen), STRETCH_BLOCKS)
        crash = _CRASH * self._minutes.frames if self._candidate.kind == "crashing" else 0.0
        deaths = random.poisson(crash, shape)
        leak = random.normal(
            _LEAK_MIB_PER_H if self._candidate.kind == "leaking" else 0.0, _NOISE_MIB_PER_H, len(chosen)
        )
        lasted = self._guarded(plan, chosen, deaths, leak, blocks["candidate_misses"].reshape(shape))
        kept = (np.arange(STRETCH_BLOCKS) < lasted[:, None]).ravel()
        blocks = {name: column[kept] for name, column in blocks.items()}
        minute_s = now.timestamp() - BLOCK_S * np.arange(STRETCH_BLOCKS)[::-1]
        blocks |= {
            "vehicle": np.repeat(chosen, lasted),
            "drive": np.repeat(self._drive[chosen], lasted),
            "version": np.zeros(kept.sum(), np.int64),
            "role": np.repeat(serving, lasted),
            "t_s": np.tile(minute_s, len(chosen))[kept],
            "compared": np.zeros(kept.sum(), np.int64),
            "agreed": np.zeros(kept.sum(), np.int64),
        }
        seconds = lasted * BLOCK_S
        self._shadow_s[chosen] += seconds * ~serving
        self._serving_s[chosen] += seconds * serving
        outcome.deaths += int((deaths * kept.reshape(shape)).sum())
        hours = seconds / 3600.0
        return units_of(blocks), chosen, (float(hours[~serving].sum()), float(hours[serving].sum()))

    def _guarded(
        self, plan: RolloutPlan, chosen: Values, deaths: Values, leak: Values, misses: Values
    ) -> Values:
        """How many minutes of the half hour each vehicle keeps the candidate, by its own guards."""
        limits, lasted = plan.limits, np.full(len(chosen), STRETCH_BLOCKS)
        of_all = zip(
            chosen.tolist(),
            deaths.sum(axis=1).tolist(),
            misses.sum(axis=1).tolist(),
            leak.tolist(),
            strict=True,
        )
        for row, (one, died, missed, grown) in enumerate(of_all):
            before = self._before[one]  # of the half hour before: together they are the last hour
            known = grown if before.frames else math.nan  # a trend needs half an hour
            whole = CandidateFigures(self._minutes.frames * STRETCH_BLOCKS, died, 0, 0, missed, known)
            if broken_guard(limits, before + whole):
                for minute in range(1, STRETCH_BLOCKS + 1):
                    part = CandidateFigures(
                        self._minutes.frames * minute,
                        int(deaths[row, :minute].sum()),
                        0,
                        0,
                        int(misses[row, :minute].sum()),
                        known,
                    )
                    if reason := broken_guard(limits, before + part):
                        lasted[row], self._back[one] = minute, reason
                        break
            self._before[one] = whole
        return lasted


def all_at_once(plan: RolloutPlan) -> RolloutPlan:
    """The same candidate on every vehicle from the first minute, with the same guards and verdicts."""
    soak_h = max(step.soak_h for step in plan.steps)
    return replace(plan, steps=(RolloutStep(100.0, soak_h=soak_h),), step=0, shadow_min=0.0)


def simulate(
    plan: RolloutPlan,
    vehicles: int,
    candidate: SimulatedCandidate,
    windows: tuple[Values, float],
    seed: int = 1,
    look_every_h: float = LOOK_EVERY_H,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> SimulatedRollout:
    """Play a plan on a fleet.

    `windows`: minutes and their budget, see `built_in_minutes` and `recorded_minutes`.
    """
    return Fleet(plan, vehicles, candidate, Minutes(*windows, candidate), seed).play(look_every_h, progress)


def _joined(units: Sequence[Units]) -> Units:
    vehicle, end_s, frames = (
        np.concatenate([getattr(one, name) for one in units]) for name in ("vehicle", "end_s", "frames")
    )
    values = {name: np.concatenate([one.values[name] for one in units]) for name in units[0].values}
    return Units(vehicle, end_s, frames, values)


def outcome_rows(outcomes: Mapping[str, SimulatedRollout]) -> Iterator[tuple[str, ...]]:
    yield ("", *outcomes)
    rows: dict[str, Callable[[SimulatedRollout], str]] = {
        "ended": lambda one: f"{'stopped' if one.stopped else 'not stopped'}, step {one.step}",
        "after, h": lambda one: f"{one.hours:.1f}",
        "vehicles that had it, %": lambda one: f"{one.reached:.2f}",
        "of those serving, % of the fleet": lambda one: f"{one.served:.2f}",
        "driven with it, h": lambda one: f"{one.exposure_h:,.1f}",
        "of those serving, h": lambda one: f"{one.serving_h:,.1f}",
        "vehicles that rolled it back": lambda one: f"{one.rolled_back:,}",
        "deaths of its workers": lambda one: f"{one.deaths:,}",
        "why": lambda one: one.why,
    }
    for name, text in rows.items():
        yield (name, *(text(one) for one in outcomes.values()))


def draw_outcomes(outcomes: Mapping[str, SimulatedRollout], title: str, path: Path) -> None:
    """Draw the candidate's share of the fleet over time, in each way, as SVG or PNG by the file's name."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "torchperf"  # the same outcome, the same file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9.0, 4.2), layout="constrained")
    for colour, (name, one) in zip(_COLOURS, outcomes.items(), strict=False):
        hours, reached, steps = zip(*one.line, strict=True)
        axes.plot(
            hours,
            reached,
            color=colour,
            linewidth=2,
            label=f"{name}: {one.exposure_h:,.0f} h driven with it",
        )
        for before, after in pairwise(range(len(steps))):
            if steps[before] != steps[after]:
                axes.axvline(hours[before], color=colour, linewidth=0.8, linestyle=":")
                axes.annotate(
                    f"step {steps[after]}", (hours[before], 0.12), (3, 0), textcoords="offset points"
                )
        if one.stopped:
            axes.plot(hours[-1], reached[-1], marker="X", markersize=12, color=colour)
            text = f"stopped at step {one.step}, {one.reached:.1f} % had it"
            axes.annotate(
                text, (hours[-1], reached[-1]), (10, -16), textcoords="offset points", color=colour
            )
    longest = max(one.hours for one in outcomes.values())
    axes.set(
        xlabel="hours since the roll-out began",
        ylabel="% of the vehicles that had the candidate",
        title=title,
        yscale="log",
        xlim=(0, longest * 1.3),
        ylim=(0.1, 130),
    )
    axes.set_yticks([0.1, 1, 5, 20, 50, 100], ["0.1", "1", "5", "20", "50", "100"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(outcomes), frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
