"""The signals of one stage, second by second: what is unusual about its input, answers and counters."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import IN_TIME, Fallback, Outcome
from torchperf_ros.observe.telemetry.rows import SENT
from torchperf_ros.observe.watch.series_detector import Judged, Signal, SignalRule, alert, number, since
from torchperf_ros.workers.calibration import SortedWindow

_Rows = NDArray[np.void]
_STOPPED_S, _STOPPED_INTERVALS = 3.0, 5.0
_STOPPED_AFTER: Final = 10  # frames that make an input one that comes regularly
_FEWEST_INTERVALS: Final = 3
_MISSES, _FEW_MISSES = 0.1, 0.02  # an alert from this share of the frames on, until this one,
_MISSES_S, _FEWEST_MISSES = 10, 3  # over so many seconds, with so many misses in them at least
_MOSTLY: Final = 0.5
_KNOWN_FRAMES: Final = 600  # after which it is known how many misses are usual
# What is judged of a second's latencies: which share of the usual is unusual, for how many seconds, the
# least in ms, and as a share of the budget. The first that is found is the alert.
_LATENCIES: Final = {
    "p50": (0.15, 3, 1.0, 0.05),
    "maximum": (1.0, 5, 5.0, 0.25),
    "jitter": (1.0, 5, 1.0, 0.03),
}
_MOST_FRAMES: Final = 0.75  # within the jitter around the median: single stalls are no jitter
_STEPS: Final = ("wait", "decode", "preprocess", "inference", "postprocess")
_STEP_WINDOW: Final = 300  # seconds


class StageSignals:
    """One stage's frames: how they come in, and how they are answered.

    Attributes:
        missed: deadlines missed in the last second, but for bad input, which no load explains.
        harmed: whether the last second had misses, or an unusual latency.
        superseded: frames of this second that will never be answered; the watch counts them here.
    """

    def __init__(
        self,
        stage: str,
        tiers: Sequence[str],
        budget_ms: float,
        trigger: str = "",
        scenes: Sequence[Sequence[int]] = (),
    ) -> None:
        """Name the stage, its tiers, and the topic of its trigger; empty where another stage gives it out.

        `scenes` have the tiers of each scene; none: there is one, which has all.
        """
        self.missed, self.harmed, self.superseded = 0, False, 0
        self._scenes = scenes or [range(len(tiers))]
        self._stage, self._tiers, self._budget_ms, self._trigger = stage, tiers, budget_ms, trigger
        least_age_ms = max(5.0, 0.1 * budget_ms)
        self._input = {
            "rate_hz": Signal(SignalRule("input rate", "input rate", "Hz", "both", 0.5, 0.2)),
            "jitter_ms": Signal(SignalRule("jitter of the input", "jitter", "ms", "up", 2.0, 2.0, 6)),
            "age_ms": Signal(SignalRule("age at receipt", "age", "ms", "up", least_age_ms, 0.3)),
        }
        self._latency: dict[int, dict[str, Signal]] = {}
        self._usual_steps: dict[int, dict[str, SortedWindow]] = {}
        self._tier = Signal(SignalRule("tier", "tier", "", "up", 0.5, confirm_s=5))
        self._missing_since_s: float | None = None
        self._counted = Counter[str]()
        self._recent: deque[Counter[str]] = deque(maxlen=_MISSES_S)
        self._rows: list[np.void] = []
        self._answered_before = self._received = 0
        self._last: list[tuple[int, int]] = []  # number and receipt of the newest frame, once there was one

    def answered(self, row: np.void) -> None:
        self._rows.append(row)

    def second(self, now_ns: int, others: str = "", *, active: bool = True) -> Judged:
        """Judge the second that ends at this monotonic time.

        Other processes took so many percent (`others`) of the processor; the node takes frames at all if
        `active`.
        """
        # By bytes: numpy takes three times as long to make an array of rows.
        rows = np.frombuffer(b"".join([row.tobytes() for row in self._rows]), SENT)
        self._rows.clear()
        values, alerts = self._judge_input(now_ns, rows, active=active)
        rows = rows[rows["outcome"] != Outcome.STARTING]
        time_s, count = now_ns / NS_PER_S, len(rows)
        dropped, self.superseded = self.superseded, 0
        # The watch hears of superseded frames up to a second later.
        received = dropped + max(count, self._answered_before)
        self._answered_before = count
        missed = rows[[outcome not in IN_TIME for outcome in rows["outcome"].tolist()]]
        values |= dict.fromkeys(("latency_p50_ms", "latency_max_ms", "tier"), math.nan)
        values |= {"frames": float(count), "superseded": float(dropped), "misses": float(len(missed))}
        values["stale"] = float(np.sum(rows["stale"]))
        values["drops_share"] = dropped / received if received else math.nan
        alerts += self._judge_misses(time_s, count, missed, others)
        rows = rows[rows["tier"] >= 0]  # no worker ran the others
        if len(rows):
            alerts += self._judge_tier(time_s, rows, values)
            alerts += self._judge_latency(time_s, rows, values)
        self.harmed = self.missed > 0 or any(found.name.endswith(": latency") for found in alerts)
        return values, alerts

    def _judge_tier(self, time_s: float, rows: _Rows, values: dict[str, float]) -> list[Alert]:
        """By the place in the ladder of its scene: another scene's best tier is no lower one."""
        ladders = [self._scenes[scene] for scene in rows["scene"].tolist()]
        pairs = zip(ladders, rows["tier"].tolist(), strict=True)
        values["tier"] = fmean(ladder.index(tier) if tier in ladder else 0 for ladder, tier in pairs)
        if not self._tier.update(time_s, values["tier"]):
            return []
        last = ladders[-1]
        places = (min(round(place), len(last) - 1) for place in (self._tier.value, self._tier.baseline))
        now, usual = (self._tiers[last[place]] for place in places)
        return [self._tier.alert(self._stage, text=f"tier {now}, usually {usual}")]

    def _judge_input(self, now_ns: int, rows: _Rows, *, active: bool) -> Judged:
        """The receipt of the trigger; dropped frames count, too: they leave gaps in the numbers."""
        if not self._trigger:
            return {}, []
        frames = [*self._last, *zip(rows["seq"].tolist(), rows["received_ns"].tolist(), strict=True)]
        steps = list(pairwise(frames))
        # A stage that was configured again counts from 0.
        begin = max((place for place, (one, other) in enumerate(steps, 1) if other[0] <= one[0]), default=0)
        self._last = frames[-1:]
        self._received += len(rows)
        rate_hz = jitter_ms = math.nan
        if frames[begin + 1 :] and (passed_ns := frames[-1][1] - frames[begin][1]) > 0:
            rate_hz = (frames[-1][0] - frames[begin][0]) * NS_PER_S / passed_ns
        intervals_ms = [
            (other[1] - one[1]) / NS_PER_MS for one, other in steps[begin:] if other[0] == one[0] + 1
        ]
        if len(intervals_ms) >= _FEWEST_INTERVALS:
            middle_ms = median(intervals_ms)
            jitter_ms = fmean(abs(interval_ms - middle_ms) for interval_ms in intervals_ms)
        values = {"rate_hz": rate_hz, "jitter_ms": jitter_ms, "age_ms": _middle(rows["age_ms"])}
        if not active:
            self._last, self._received = [], 0
            return values, []
        alerts = self._stopped(now_ns)
        for name, signal in self._input.items():
            if signal.update(now_ns / NS_PER_S, values[name]):
                alerts.append(signal.alert(self._stage, f" ({self._trigger})"))
        return values, alerts

    def _stopped(self, now_ns: int) -> list[Alert]:
        usual_hz = self._input["rate_hz"].usual
        if not self._last or self._received < _STOPPED_AFTER or not usual_hz > 0:
            return []
        silent_s = (now_ns - self._last[0][1]) / NS_PER_S
        if silent_s < max(_STOPPED_S, _STOPPED_INTERVALS / usual_hz):
            return []
        name, usual = f"{self._stage}: input stopped", number(usual_hz)
        text = f"nothing on {self._trigger} for {silent_s:.0f} s, usually {usual} Hz"
        return [alert(Level.ERROR, name, text, ("0", usual, "Hz"), "level", silent_s)]

    def _judge_latency(self, time_s: float, rows: _Rows, values: dict[str, float]) -> list[Alert]:
        """By what is usual for the tier that most frames ran on: each tier's latency is a signal."""
        ((tier, _),) = Counter(rows["tier"].tolist()).most_common(1)
        rows = rows[rows["tier"] == tier]
        totals: list[float] = rows["total_ms"].tolist()
        values["latency_p50_ms"], values["latency_max_ms"] = median(totals), max(totals)
        if tier not in self._latency:
            self._latency[tier] = self._signals_of(tier)
            self._usual_steps[tier] = defaultdict(lambda: SortedWindow(_STEP_WINDOW))
        signals, usual_steps = self._latency[tier], self._usual_steps[tier]
        steps = {step: value for step in _STEPS if math.isfinite(value := _middle(rows[f"{step}_ms"]))}
        now_ms = {"p50": values["latency_p50_ms"], "maximum": values["latency_max_ms"], "jitter": math.nan}
        if len(totals) >= _FEWEST_INTERVALS:
            apart_ms = sorted(abs(total - now_ms["p50"]) for total in totals)
            now_ms["jitter"] = apart_ms[int(_MOST_FRAMES * len(totals))]
        unusual = [which for which, value in now_ms.items() if signals[which].update(time_s, value)]
        if "p50" not in unusual:
            for step, value in steps.items():
                values[f"{step}_ms"] = value
                usual_steps[step].add(value)
        if not unusual:
            return []
        signal, more = signals[unusual[0]], {"signal": unusual[0], "tier": self._tiers[tier]}
        # The step that grew most, if that is most of what the whole grew by.
        usual = {step: window.median() for step, window in usual_steps.items() if len(window)}
        grown = {step: value - usual[step] for step, value in steps.items() if step in usual}
        step, why = max(grown, key=grown.__getitem__, default=""), ""
        if step and grown[step] >= _MOSTLY * (signal.value - signal.baseline):
            why = f"; most of it in {step}, {number(steps[step])} ms, usually {number(usual[step])} ms"
        return [signal.alert(self._stage, why, more=more)]

    def _signals_of(self, tier: int) -> dict[str, Signal]:
        on = f" on tier {self._tiers[tier]}" if len(self._tiers) > 1 else ""
        signals = {}
        for which, (share, confirm_s, least_ms, least_share) in _LATENCIES.items():
            floor_ms = max(least_ms, least_share * self._budget_ms)
            rule = SignalRule(f"latency {which}{on}", "latency", "ms", "up", floor_ms, share, confirm_s)
            signals[which] = Signal(rule)
        return signals

    def _judge_misses(self, time_s: float, count: int, missed: _Rows, others: str) -> list[Alert]:
        outcomes = Counter(Outcome(outcome).word for outcome in missed["outcome"].tolist())
        unanswered = sum(fallback != Fallback.BACKUP for fallback in missed["fallback"].tolist())
        self.missed = outcomes.total() - outcomes[Outcome.BAD_INPUT.word]
        self._recent.append(outcomes + Counter({"frames": count, "unanswered": unanswered}))
        recent = sum(self._recent, Counter[str]())
        total, stale = recent.pop("frames", 0), recent.pop("unanswered", 0)
        share = recent.total() / max(1, total)
        if share <= _FEW_MISSES:
            self._missing_since_s = None
        elif self._missing_since_s is None and share >= _MISSES and recent.total() >= _FEWEST_MISSES:
            self._missing_since_s = time_s
        if self._missing_since_s is None:
            self._counted += Counter({"frames": count, "misses": outcomes.total()})
            return []
        counted = self._counted["frames"]
        usual = self._counted["misses"] / counted if counted >= _KNOWN_FRAMES else math.nan
        since_s = time_s - self._missing_since_s
        outcomes_text = ", ".join(f"{count} {word}" for word, count in recent.most_common())
        text = f"{share:.0%} of the last {total} frames had no own result in time ({outcomes_text})"
        text += (f", usually {usual:.1%}" if math.isfinite(usual) else "") + since(since_s)
        text += f"; other processes took {others} % of the CPU" if others else ""
        level = Level.ERROR if stale >= _MOSTLY * total else Level.WARN
        more = {"misses": str(recent.total()), "others_cpu_percent": others}
        numbers = (number(100 * share), number(100 * usual), "%")
        return [alert(level, f"{self._stage}: misses", text, numbers, "level", since_s, more=more)]


def _middle(values: NDArray[np.float64]) -> float:
    """The median of those that are finite, NaN where none is."""
    known = values[np.isfinite(values)].tolist()
    return median(known) if known else math.nan


class _CounterRule(NamedTuple):
    """At least so many in so many seconds are an alert of a kind, with a text."""

    kind: str
    least: int
    within_s: float
    text: str


# By what the values are called, or end with, in a stage's status: of the stage, and of each tier.
_COUNTERS: Final = {
    "restarts": _CounterRule("restarts", 3, 300.0, "workers were restarted"),
    "recompiles": _CounterRule(
        "recompilation", 1, 10.0, "frames would have been compiled for again, eager answered"
    ),
    "misses": _CounterRule(
        "recompilation", 10, 60.0, "frames had sizes that nothing was prepared for, eager answered"
    ),
    "engine_errors": _CounterRule("model error", 3, 60.0, "calls failed in the engine, eager answered"),
}
COUNTED: Final = tuple(_COUNTERS)


class CounterSignals:
    """Counters of one stage that should stand still: restarts, recompilations, new sizes."""

    def __init__(self, stage: str, tiers: Sequence[str]) -> None:
        self._stage = stage
        self._names = {key: [key, *(f"tier_{tier}_{key}" for tier in tiers)] for key in _COUNTERS}
        self._totals: dict[str, int] = {}
        self._rises: dict[str, deque[tuple[float, int]]] = {key: deque() for key in _COUNTERS}

    def status(self, time_s: float, values: Mapping[str, str]) -> None:
        """Take the stage's values on `/diagnostics`, of which there are none before a worker is ready."""
        for key, names in self._names.items():
            for name in names:
                if not values.get(name, "").isdecimal():
                    continue
                total = int(values[name])
                rise = total - self._totals.get(name, total)
                self._totals[name] = total
                if rise > 0:
                    self._rises[key].append((time_s, rise))

    def second(self, now_ns: int) -> Judged:
        time_s = now_ns / NS_PER_S
        values, alerts = {}, []
        for key, rule in _COUNTERS.items():
            rises = self._rises[key]
            while rises and rises[0][0] <= time_s - rule.within_s:
                rises.popleft()
            count = sum(rise for _, rise in rises)
            values[key] = float(count)
            if count >= rule.least:
                name, since_s = f"{self._stage}: {rule.kind}", time_s - rises[0][0]
                text = f"{count} {rule.text}, in the last {rule.within_s:.0f} s"
                alerts.append(alert(Level.WARN, name, text, (str(count), "0", ""), "level", since_s))
        return values, alerts
