"""The signals of one stage, second by second: latency, misses, drops, tier; and what is unusual about them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from torchperf_ros.core.anomaly.ranked_window import RankedWindow
from torchperf_ros.core.anomaly.rate_rule import RateRule
from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.telemetry.record_stream import FrameRecord
from torchperf_ros.telemetry.signal_series import Departure, Signal, SignalRule, number, since

_MISSES = (0.1, 0.02, 10.0)  # told from this share of the frames on, until this one, over so many seconds
_FEWEST_MISSES = 3
_MOSTLY = 0.5
_KNOWN_FRAMES = 600  # after which it is known how many misses are usual
_STEPS = ("wait", "decode", "preprocess", "inference", "postprocess")
_STEP_WINDOW = 300  # seconds


@dataclass(frozen=True)
class StageFacts:
    """What the node says of a stage at its start.

    Attributes:
        trigger: topic of its first input; empty where another stage gives it out.
    """

    name: str
    tiers: tuple[str, ...]
    budget_ms: float
    trigger: str


class StageSignals:
    """One stage's answers.

    Attributes:
        missed: deadlines that were missed in the last second.
        harmed: whether the last second had misses, or an unusual latency.
        superseded, stale: frames of this second that will never be answered; set by whoever hears of them.
    """

    def __init__(self, facts: StageFacts) -> None:
        """Know nothing yet."""
        self.missed = 0
        self.harmed = False
        self.superseded = self.stale = 0
        self._facts = facts
        self._latency: dict[int, tuple[Signal, Signal]] = {}
        self._usual_steps: dict[int, dict[str, RankedWindow]] = {}
        self._tier = Signal(SignalRule("tier", "tier", "", "up", 0.5, confirm_s=5))
        self._drops = Signal(SignalRule("share of dropped frames", "drops", "%", "up", 10.0, 0.5))
        self._misses = RateRule(*_MISSES)
        self._counted = Counter[str]()
        self._recent: list[Counter[str]] = []
        self._frames_before = 0
        self._frames: list[FrameRecord] = []

    def frame(self, record: FrameRecord) -> None:
        """Take an answered frame."""
        self._frames.append(record)

    def second(self, now_ns: int, others: str) -> tuple[dict[str, float], list[Anomaly]]:
        """What the last second was, and what is unusual about it.

        Args:
            now_ns: monotonic time.
            others: percent of the processor that other processes took meanwhile; empty if unknown.
        """
        frames, self._frames = [f for f in self._frames if f.outcome is not Outcome.STARTING], []
        time_s = now_ns / NS_PER_S
        values = dict.fromkeys(("latency_p50_ms", "latency_max_ms", "tier", "drops_share"), math.nan)
        dropped = self.superseded + self.stale
        received = dropped + max(len(frames), self._frames_before)  # drops are heard of up to a second later
        self._frames_before = len(frames)
        values |= {"frames": float(len(frames)), "superseded": float(self.superseded), "stale": float(self.stale)}
        self.superseded = self.stale = 0
        findings = self._judge_misses(time_s, frames, others)
        values["misses"] = float(self.missed)
        if received:
            values["drops_share"] = dropped / received
            if (departure := self._drops.update(time_s, 100 * values["drops_share"])) is not None:
                findings.append(departure.finding(self._facts.name))
        if frames:
            values["tier"] = fmean(max(0, frame.tier) for frame in frames)
            findings += self._judge_tier(self._tier.update(time_s, values["tier"]))
            findings += self._judge_latency(time_s, frames, values)
        self.harmed = self.missed > 0 or any(finding.name.endswith(": latency") for finding in findings)
        return values, findings

    def _judge_tier(self, departure: Departure | None) -> list[Anomaly]:
        if departure is None:
            return []
        now, usual = (self._facts.tiers[round(tier)] for tier in (departure.value, departure.baseline))
        found = departure.finding(self._facts.name)
        text = f"tier {now}, usually {usual}{since(departure.lasted_s)}"
        return [Anomaly(found.level, found.name, text, found.values)]

    def _judge_latency(self, time_s: float, frames: list[FrameRecord], values: dict[str, float]) -> list[Anomaly]:
        """By what is usual for the tier that most frames ran on: another tier's latency is another signal."""
        ((tier, _),) = Counter(frame.tier for frame in frames).most_common(1)
        frames = [frame for frame in frames if frame.tier == tier]
        totals = [frame.total_ms for frame in frames]
        values["latency_p50_ms"], values["latency_max_ms"] = median(totals), max(totals)
        budget_ms = self._facts.budget_ms
        if tier not in self._latency:
            on = f" on tier {self._facts.tiers[tier]}" if tier >= 0 and len(self._facts.tiers) > 1 else ""
            self._latency[tier] = (
                Signal(SignalRule(f"latency p50{on}", "latency", "ms", "up", max(1.0, 0.05 * budget_ms), 0.15)),
                Signal(SignalRule(f"latency maximum{on}", "latency", "ms", "up", max(5.0, 0.25 * budget_ms), 1.0, 5)),
            )
            self._usual_steps[tier] = {step: RankedWindow(_STEP_WINDOW) for step in _STEPS}
        steps = {step: value for step in _STEPS if math.isfinite(value := _middle(frames, step))}
        usual, highest = self._latency[tier]
        departure = usual.update(time_s, values["latency_p50_ms"])
        often = highest.update(time_s, values["latency_max_ms"])
        if departure is None:
            for step, value in steps.items():
                values[f"{step}_ms"] = value
                self._usual_steps[tier][step].add(value)
        departure = departure or often
        if departure is None:
            return []
        why = self._most_of_it(tier, steps, departure.value - departure.baseline)
        return [departure.finding(self._facts.name, why)]

    def _most_of_it(self, tier: int, steps: dict[str, float], grown_ms: float) -> str:
        """The step that grew most, if that is most of what the whole grew by."""
        usual = {step: window.median() for step, window in self._usual_steps[tier].items() if len(window)}
        grown = {step: value - usual[step] for step, value in steps.items() if step in usual}
        step = max(grown, key=grown.__getitem__, default="")
        if not step or grown[step] < _MOSTLY * grown_ms:
            return ""
        return f"; most of it in {step}, {number(steps[step])} ms, usually {number(usual[step])} ms"

    def _judge_misses(self, time_s: float, frames: list[FrameRecord], others: str) -> list[Anomaly]:
        outcomes = Counter(f.outcome.word for f in frames if f.outcome is not Outcome.ON_TIME)
        unanswered = sum(f.outcome is not Outcome.ON_TIME and f.fallback is not Fallback.BACKUP for f in frames)
        self.missed = outcomes.total()
        self._recent = [*self._recent, outcomes + Counter({"frames": len(frames), "unanswered": unanswered})]
        self._recent = self._recent[-round(_MISSES[2]) :]
        recent = sum(self._recent, Counter[str]())
        total, stale = recent.pop("frames", 0), recent.pop("unanswered", 0)
        too_many = self._misses.update(time_s, self.missed, len(frames))
        if not too_many:
            self._counted += Counter({"frames": len(frames), "misses": self.missed})
        if not too_many or recent.total() < _FEWEST_MISSES:
            return []
        counted = self._counted["frames"]
        usual = self._counted["misses"] / counted if counted >= _KNOWN_FRAMES else math.nan
        since_s = time_s - (self._misses.since_s or time_s)
        share = recent.total() / max(1, total)
        said = ", ".join(f"{count} {word}" for word, count in recent.most_common())
        text = f"{share:.0%} of the last {total} frames missed ({said})"
        text += f", usually {usual:.1%}" if math.isfinite(usual) else ""
        text += since(since_s)
        if others:
            text += f"; other processes took {others} % of the CPU"
        values = {
            "value": number(100 * share), "baseline": number(100 * usual), "unit": "%", "score": "1.00",
            "kind": "level", "since": f"{since_s:.0f}", "misses": str(recent.total()), "others_cpu_percent": others,
        }  # fmt: skip
        level = Level.ERROR if stale >= _MOSTLY * total else Level.WARN
        return [Anomaly(level, f"{self._facts.name}: misses", text, values)]


def _middle(frames: Sequence[FrameRecord], step: str) -> float:
    """Median of one step's time in ms, NaN where no frame has it."""
    times = [f.wait_ms if step == "wait" else float(getattr(f.steps, f"{step}_ms")) for f in frames]
    known = [time for time in times if math.isfinite(time)]
    return median(known) if known else math.nan
