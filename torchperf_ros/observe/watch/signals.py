"""One signal of the node, a value each second: when it is unusual for long enough to be an alert."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.observe.watch.series_detector import THRESHOLD, Direction, SeriesDetector

# What the last second was, by name, and what is unusual about it.
Judged = tuple[dict[str, float], list[Alert]]
_USUAL_AFTER_S = 300.0  # what has lasted this long is how it is now, and is learnt anew
_CALM_S = 3  # usual seconds after which a departure is over
_REPEATS = 3


def since(seconds: float) -> str:
    """The end of a sentence: for how long it has been so, where that is a second and more."""
    return f", since {seconds:.0f} s" if seconds >= 1 else ""


def number(value: float) -> str:
    """A value as people read it: three digits that mean something, no exponent."""
    size = abs(value)
    if not math.isfinite(value):
        return "unknown"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"  # noqa: PLR2004


def alert(
    level: Level,
    name: str,
    text: str,
    numbers: tuple[str, str, str],
    kind: str,
    since_s: float,
    *,
    score: float = 1.0,
    more: Mapping[str, str] | None = None,
) -> Alert:
    """An alert with the values that all of them have; `more` has its own.

    `numbers` are the value, the baseline and their unit; the score of what a fixed rule decides is 1.
    """
    values = dict(zip(("value", "baseline", "unit"), numbers, strict=True))
    values |= {"score": f"{score:.2f}", "kind": kind, "since": f"{since_s:.0f}", **(more or {})}
    return Alert(level, name, text, values)


@dataclass(frozen=True)
class SignalRule:
    """What a signal is called, and which of its departures are worth an alert."""

    what: str  # as people say it, for example `latency p50`; begins the message
    kind: str  # of the alert, for example `latency`
    unit: str  # of the value, empty for a count
    direction: Direction  # which departures are unusual: `up`, `down` or `both`
    floor: float  # the smallest departure worth an alert, in the unit
    share: float = 0.0  # the same as a share of what is usual; both have to be reached
    confirm_s: int = 3  # seconds that it has to last, 1 or more

    def departure(self, value: float, baseline: float) -> float:
        """How far the value lies on the side that counts, in the unit; 0 on the other side."""
        signed = value - baseline
        if self.direction == "both":
            return abs(signed)
        return max(0.0, signed if self.direction == "up" else -signed)


class Signal:
    """Judges the seconds of one signal.

    A departure begins with a second that the detector finds unusual. It is an alert once `confirm_s`
    seconds since then were half as far out or farther. It is over after three usual seconds, which are no
    alert themselves, or after five minutes, when it is the new usual. The detector knows its first second
    from then on, so what was an alert is compared with that by itself: it is one again when it comes again,
    three times; then all of it is learnt.

    Attributes:
        value: now.
        usual: what the signal usually is, NaN before that is known.
        baseline: what was usual before the departure that is on.
    """

    def __init__(self, rule: SignalRule) -> None:
        self.usual = self.value = self.baseline = math.nan
        self._rule = rule
        self._began_s: float | None = None
        self._time_s = self._least = 0.0  # the departure that counts as one, while one is on
        self._score, self._kind = 0.0, ""  # of the second that the departure began with
        self._far = self._near = 0
        self._unlearnt: deque[tuple[float, float]] = deque(maxlen=64)
        self._end()
        self._learn_anew()

    def _learn_anew(self) -> None:
        self._detector = SeriesDetector(self._rule.direction, self._rule.floor)
        # A departure that was an alert before, and how often it may be one again.
        self._known, self._repeats_left = math.inf, _REPEATS

    def _end(self) -> None:
        self._began_s, self._confirmed = None, False
        self._unlearnt.clear()

    def update(self, time_s: float, value: float) -> bool:
        """Take the value of a second; whether the signal is an alert now.

        Args:
            time_s: on any clock that does not go back.
            value: NaN: there is none in this second. Nothing changes then, however long it lasts.
        """
        if not math.isfinite(value):
            return False
        self._time_s, self.value = time_s, value
        if self._began_s is None:
            self._suspect(time_s, value)
        else:
            self._follow(self._began_s, time_s, value)
        return self._confirmed and not self._near

    def alert(
        self, stage: str, why: str = "", text: str = "", more: Mapping[str, str] | None = None
    ) -> Alert:
        """The departure that is on: `latency p50 31.2 ms, usually 18.4 ms, since 12 s`, and why, if that is known.

        `text` replaces what comes before the time.
        """
        rule, lasted_s = self._rule, self._time_s - (self._began_s or 0.0)
        numbers, unit = (number(self.value), number(self.baseline), rule.unit), f" {rule.unit}".rstrip()
        text = text or f"{rule.what} {numbers[0]}{unit}, usually {numbers[1]}{unit}"
        text += since(lasted_s) + why
        name, score = f"{stage}: {rule.kind}", self._score
        return alert(Level.WARN, name, text, numbers, self._kind, lasted_s, score=score, more=more)

    def _suspect(self, time_s: float, value: float) -> None:
        reading = self._detector.update(time_s, value)
        self.usual = reading.baseline
        least = max(self._rule.floor, self._rule.share * abs(reading.baseline))
        departure = self._rule.departure(value, reading.baseline)
        # Also where the score is halved, soon after something else.
        unusual = reading.kind not in {"", "gap"}
        if departure < least or not (unusual or departure >= self._known):
            return
        self._began_s, self.baseline = time_s, reading.baseline
        self._score, self._kind = max(THRESHOLD, reading.score), reading.kind or "value"
        self._least = max(least, departure / 2)
        self._far, self._near = 1, 0
        self._confirmed = self._rule.confirm_s <= 1

    def _follow(self, began_s: float, time_s: float, value: float) -> None:
        """Whether what has begun goes on, is an alert by now, or is over."""
        is_far = self._rule.departure(value, self.baseline) >= self._least
        self._far += is_far
        self._near = 0 if is_far else self._near + 1
        self._unlearnt.append((time_s, value))
        if not self._confirmed and self._far >= self._rule.confirm_s:
            self._confirmed = True
            self._repeats_left -= self._known < math.inf
            self._known = self._least if self._repeats_left > 0 else math.inf
        if time_s - began_s > _USUAL_AFTER_S:
            self._learn_anew()
            self._end()
        elif self._near >= (_CALM_S if self._confirmed else max(1, self._rule.confirm_s // 2)):
            # Not worth an alert, or no longer: how things are.
            if not self._confirmed or self._repeats_left <= 0:
                for sample in self._unlearnt:
                    self._detector.update(*sample)
            self._end()
