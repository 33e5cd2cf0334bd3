"""One signal of the node, a value each second: when it is unusual for long enough to be told, and when that is over."""

import math
from collections import deque
from dataclasses import dataclass

from torchperf_ros.core.anomaly.series_detector import THRESHOLD, Direction, SeriesDetector
from torchperf_ros.core.anomaly_rules import Anomaly, Level

_CAUTION = 1.0  # what is told has to last, too: one unusual second is nothing yet
_USUAL_AFTER_S = 300.0  # what has lasted this long is how it is now, and is learnt anew
_CALM_S = 3  # seconds within the usual after which a departure is over
_FAR = 2.0  # times what 2 % of the departures exceed
_REPEATS = 3
_LEARN_S = 60  # seconds before anything is told: a start is like no other time


@dataclass(frozen=True)
class SignalRule:
    """What a signal is called, and which of its departures are worth telling.

    Attributes:
        what: as people say it, for example `latency p50`; begins the message.
        kind: of the finding, for example `latency`.
        unit: of the value, empty for a count.
        direction: which departures are unusual: `up`, `down` or `both`.
        floor: the smallest departure worth telling, in the unit.
        share: the same as a share of what is usual; both have to be reached.
        confirm_s: seconds that it has to last, 1 or more.
        level: how bad it is.
    """

    what: str
    kind: str
    unit: str
    direction: Direction
    floor: float
    share: float = 0.0
    confirm_s: int = 3
    level: Level = Level.WARN

    def departure(self, value: float, baseline: float) -> float:
        """How far the value lies on the side that counts, in the unit; 0 on the other side."""
        signed = value - baseline
        if self.direction == "both":
            return abs(signed)
        return max(0.0, signed if self.direction == "up" else -signed)


@dataclass(frozen=True)
class Departure:
    """A signal that is unusual at present.

    Attributes:
        value: now.
        baseline: what was usual before it began.
        score: how unusual it was when it began, 0 to 1.
        kind: of departure, see `Reading.kind`.
        began_s: when it began, on the clock of the samples.
        lasted_s: seconds since then.
    """

    rule: SignalRule
    value: float
    baseline: float
    score: float
    kind: str
    began_s: float
    lasted_s: float

    def finding(self, stage: str, why: str = "", **values: str) -> Anomaly:
        """The sentence for people: `latency p50 31.2 ms, usually 18.4 ms, since 12 s`, and why, if that is known."""
        rule, unit = self.rule, f" {self.rule.unit}".rstrip()
        text = f"{rule.what} {number(self.value)}{unit}, usually {number(self.baseline)}{unit}"
        text += since(self.lasted_s)
        return Anomaly(
            rule.level, f"{stage}: {rule.kind}", f"{text}{why}",
            {
                "value": number(self.value), "baseline": number(self.baseline), "unit": rule.unit,
                "score": f"{self.score:.2f}", "kind": self.kind, "since": f"{self.lasted_s:.0f}", **values,
            },
        )  # fmt: skip


class Signal:
    """Judges the seconds of one signal.

    A departure begins with a second that the detector finds unusual, or that is twice as far out as all but 2 % were;
    it is told once most of the seconds since then lie half as far out or farther. It is over after three usual seconds,
    or after five minutes, when it is the new usual. The detector learns its first second, and would find the next such
    event less unusual: what was told is told again when it comes again, three times; then it is learnt.

    Attributes:
        usual: what the signal usually is, NaN before that is known.
    """

    def __init__(self, rule: SignalRule) -> None:
        """Know nothing yet."""
        self.rule = rule
        self.usual = math.nan
        self._detector = SeriesDetector(rule.direction, rule.floor, _CAUTION)
        self._seen = 0
        self._began: Departure | None = None
        self._told = False
        self._least = 0.0  # the departure that counts as one, while one is on
        self._far = self._near = 0
        self._known = math.inf  # a departure that was told before
        self._repeats_left = _REPEATS
        self._unlearnt: deque[tuple[float, float]] = deque(maxlen=64)

    def update(self, time_s: float, value: float) -> Departure | None:
        """Take the value of a second; the departure that is to be told, if there is one.

        Args:
            time_s: on any clock that does not go back.
            value: NaN: there is none in this second. Nothing changes then, however long it lasts.
        """
        if not math.isfinite(value):
            return None
        self._seen += 1
        if self._began is None:
            self._suspect(time_s, value)
        else:
            self._follow(self._began, time_s, value)
        began = self._began
        if began is None or not self._told:
            return None
        return Departure(
            self.rule, value, began.baseline, began.score, began.kind, began.began_s, time_s - began.began_s
        )

    def _suspect(self, time_s: float, value: float) -> None:
        far = _FAR * self._detector.usual_departure or math.inf
        reading = self._detector.update(time_s, value)
        self.usual = reading.baseline
        least = max(self.rule.floor, self.rule.share * abs(reading.baseline))
        departure = self.rule.departure(value, reading.baseline)
        unusual = reading.score >= THRESHOLD or departure >= min(far, self._known)
        if not unusual or departure < least or self._seen <= _LEARN_S:
            return
        self._began = Departure(self.rule, value, reading.baseline, reading.score, reading.kind, time_s, 0.0)
        self._least = max(least, departure / 2)
        self._far, self._near = 1, 0
        self._told = self.rule.confirm_s <= 1

    def _follow(self, began: Departure, time_s: float, value: float) -> None:
        """Whether what has begun goes on, is to be told, or is over."""
        if self.rule.departure(value, began.baseline) >= self._least:
            self._far += 1
            self._near = 0
        else:
            self._near += 1
        self._unlearnt.append((time_s, value))
        if not self._told and self._far >= self.rule.confirm_s:
            self._told = True
            self._repeats_left -= self._known < math.inf
            self._known = self._least if self._repeats_left > 0 else math.inf
        if time_s - began.began_s > _USUAL_AFTER_S:
            self._detector = SeriesDetector(self.rule.direction, self.rule.floor, _CAUTION)
            self._seen, self._known, self._repeats_left = 0, math.inf, _REPEATS
            self._end()
        elif self._near >= (_CALM_S if self._told else max(1, self.rule.confirm_s // 2)):
            if not self._told or self._repeats_left <= 0:  # not worth telling, or no longer: how things are
                for sample in self._unlearnt:
                    self._detector.update(*sample)
            self._end()

    def _end(self) -> None:
        self._began, self._told = None, False
        self._unlearnt.clear()


def since(seconds: float) -> str:
    """The end of a sentence: for how long it has been so, where that is a second and more."""
    return f", since {seconds:.0f} s" if seconds >= 1 else ""


def number(value: float) -> str:
    """A value as people read it: three digits that mean something, no exponent."""
    size = abs(value)
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"  # noqa: PLR2004
