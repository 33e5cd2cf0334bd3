"""What is unusual in one series.

A detector for any values, with a rule each for flat lines and for gaps; and a signal of the node, a value
each second, with when it is unusual for long enough to be an alert.
"""

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.workers.calibration import SortedWindow

Direction = Literal["both", "up", "down"]

# A score from here on is an anomaly.
THRESHOLD = 0.5

# The caution for a value in each frame or second, of which there are too many for four false alarms
# in 10,000.
FRAME_CAUTION = 1.4

_AT_THRESHOLD = 2.0  # surprise, a power of ten, that scores 0.5 with caution 1
_MOST_CAUTION = 4.0
_WARM_UP = 64  # samples before anything can be unusual
_LEVEL = 33  # samples whose median is the level: a new one shows after 17, isolated spikes never
_BASELINE = 255  # samples whose median is what was expected
_INTERVALS = 63  # between samples, whose median is the usual one
_STEP_WEIGHT = 0.6  # of a rare step, which no second question confirms
_REST = 150  # samples after an anomaly in which only a more surprising one is another
_AT_REST = 0.5  # factor of the others' scores
_ROUNDING = 1e-9  # of the value: smaller differences are none
_LARGEST = 1e150  # values are cut off here: differences stay finite
_STILL_FACTOR, _STILL_LEAST = 3, 8  # a flat line is 3 times as long as any before, and 8 samples
_GAP_FACTOR = 5.0  # intervals from so many times the usual one on
_GAP_SCORE = 0.3  # a gap says more about the recorder than about the value
_BINS_A_DECADE = 10


@dataclass(frozen=True, slots=True)
class Reading:
    """What the detector makes of one sample.

    Attributes:
        score: 0 (usual) to 1 (never seen the like); 0.5 and more is an anomaly. In the 150 samples after a
            higher score it is halved, so that an anomaly is reported once.
        kind: `value` (where the series has never been), `step` (a movement as there is none), `flat` or
            `gap`; empty where nothing is unusual.
    """

    score: float
    kind: str
    # the median of the 255 samples before, in the unit of the value; NaN before the first sample
    baseline: float
    since_s: float | None  # when the anomaly that is on began, on the clock of `time_s`; None if none is on


class _Novelty:
    """How far a value lies from every value seen so far, and how rarely one lies so far."""

    _DECADES = 4.0  # distances from a thousandth of the span of all values to ten times the span
    _RESOLUTION = 1024  # parts of the span that differ
    _FORGET_AFTER = 8192  # samples without a visit: a value that comes back then is new again
    _TIDY_EVERY = 512

    def __init__(self) -> None:
        self._values: list[float] = []  # in rising order
        self._visits = array("q")  # the sample that last came to each of them
        self._distances = [0] * (round(self._DECADES) * _BINS_A_DECADE + 1)
        self._count = 0

    def judge(self, value: float) -> float:
        """Surprise of a finite value, from 0 on; learns it."""
        self._count += 1
        if self._count == 1:
            self._insert(0, value)
            return 0.0
        values = self._values
        place = bisect_left(values, value)
        nearest = min(place, len(values) - 1)
        if place and value - values[place - 1] < abs(values[nearest] - value):
            nearest = place - 1
        distance, span = abs(value - values[nearest]), values[-1] - values[0]
        if distance <= span / self._RESOLUTION:
            self._visits[nearest] = self._count
        else:
            self._insert(place, value)
        if self._count % self._TIDY_EVERY == 0:
            self._tidy(span / self._RESOLUTION)
        size = self._size(distance, span)
        bin_ = int(_BINS_A_DECADE * size)
        as_far = 1 + sum(self._distances[bin_:])
        self._distances[bin_] += 1
        return size + math.log10(self._count / as_far) if size > 0 and self._count > _WARM_UP else 0.0

    def _size(self, distance: float, span: float) -> float:
        """The distance in decades above a thousandth of the span, 0 to 4."""
        if distance == 0 or span == 0:
            return self._DECADES if distance else 0.0
        ratio = distance / span  # before the logarithm: it stays the same to the last bit in any unit
        return min(self._DECADES, max(0.0, 3.0 + math.log10(ratio))) if ratio else 0.0

    def _insert(self, place: int, value: float) -> None:
        self._values.insert(place, value)
        self._visits.insert(place, self._count)

    def _tidy(self, least: float) -> None:
        """Forget values without a visit, and those closer than `least` since the span has grown."""
        keep, last = [], -math.inf
        for value, visit in zip(self._values, self._visits, strict=True):
            keep.append(self._count - visit <= self._FORGET_AFTER and value - last >= least)
            last = value if keep[-1] else last
        self._values = list(compress(self._values, keep))
        self._visits = array("q", compress(self._visits, keep))


class _Rarity:
    """How rare a step as large is among all steps so far; the past fades."""

    _BINS = 161
    _HALF_LIFE = 4096  # samples
    _TAIL_INDEX = 2.0  # of a Pareto tail beyond the largest step: a heavy one
    _LEARN_UP_TO = 3.0  # a more surprising step is learnt as one
    _LEARN_BEYOND = 2  # bins past the largest at most: an anomaly does not hide the next one

    def __init__(self) -> None:
        self._bins = [0.0] * self._BINS
        self._count = 0
        self._top = 0
        self._first = math.nan  # the first step, which is in the middle bin

    def judge(self, size: float) -> float:
        """Surprise of a step >= 0; learns it."""
        bin_ = self._bin(size)
        surprise = 0.0
        if self._count >= _WARM_UP and bin_:
            surprise = math.log10((sum(self._bins) + 1) / (sum(self._bins[bin_:]) + 1))
            surprise += self._TAIL_INDEX * max(0, bin_ - self._top) / _BINS_A_DECADE
        if surprise > self._LEARN_UP_TO:
            bin_ = min(bin_, self._top + self._LEARN_BEYOND)
        self._top = max(self._top, bin_)
        self._bins[bin_] += 1
        self._count += 1
        if self._count % self._HALF_LIFE == 0:
            self._bins = [weight / 2 for weight in self._bins]
        return surprise

    def _bin(self, size: float) -> int:
        """The first for no step, the others for ten sizes a decade."""
        if size == 0:
            return 0
        if math.isnan(self._first):
            self._first = size
        ratio = min(1e300, max(1e-300, size / self._first))  # a ratio of subnormals may be 0 or infinite
        bin_ = self._BINS // 2 + round(_BINS_A_DECADE * math.log10(ratio))
        return min(self._BINS - 1, max(1, bin_))


class SeriesDetector:
    """Judges samples one by one, each by what came before it.

    It asks two questions. Has the series ever been here, with its value and with the median of its last 33?
    Does it move as it never does? It answers both by counting the samples that were as far out, so it needs
    no scale, no unit and no distribution. Flat lines and gaps have a rule each.

    A value that was seen is known: what comes back is usual, unless it has stayed away for 8192 samples.
    """

    def __init__(self, direction: Direction = "both", floor: float = 0.0, caution: float = 1.0) -> None:
        """Watch for departures in `direction`.

        Args:
            direction: `up` or `down`: only values above or below the baseline; no `flat` then.
            floor: the smallest departure from the baseline worth reporting, in the unit of the value.
                Smaller ones score in proportion below the threshold.
            caution: how much more surprising than usual an anomaly has to be, from 1 (some in 10,000 usual
                samples) to 4; 1.4 makes a tenth of the false alarms.

        Raises:
            ValueError: `direction` is another word, `floor` negative or not finite, or `caution` not from 1
                to 4.
        """
        if direction not in {"both", "up", "down"}:
            raise ValueError(f"direction {direction!r}: has to be both, up or down")
        if not 0 <= floor < math.inf:
            raise ValueError(f"floor {floor!r}: has to be a number >= 0, in the unit of the value")
        if not 1 <= caution <= _MOST_CAUTION:
            raise ValueError(f"caution {caution!r}: has to be a number from 1 to {_MOST_CAUTION:g}")
        self._direction, self._floor, self._at_threshold = direction, floor, _AT_THRESHOLD * caution
        self._count = 0
        self._time_s = self._last = math.nan
        self._level, self._baseline, self._intervals = map(SortedWindow, (_LEVEL, _BASELINE, _INTERVALS))
        self._values, self._levels, self._steps = _Novelty(), _Novelty(), _Rarity()
        self._still = self._longest_still = 0
        self._highest: deque[tuple[int, float]] = deque()  # surprises that nothing after them has exceeded
        self._unusual = 0  # the last sample that was
        self._since_s: float | None = None

    @property
    def active(self) -> bool:
        """Whether an anomaly is on: until 150 samples have passed without anything unusual."""
        return self._since_s is not None

    def update(self, time_s: float, value: float) -> Reading:
        """Judge one sample, then learn it. Never raises for any floats.

        Args:
            time_s: when the value was measured, in seconds on any clock. Repeated and backward times are
                taken as they come.
            value: NaN and infinities are gaps: nothing is learnt from them.
        """
        gap = self._gap(time_s)
        expected = self._baseline.median()
        if not math.isfinite(value):
            return Reading(_GAP_SCORE if self._count >= _WARM_UP else 0.0, "gap", expected, self._since_s)
        value = min(_LARGEST, max(-_LARGEST, value))
        if abs(value - self._last) <= _ROUNDING * abs(value):
            value = self._last
        self._count += 1
        surprise, kind = self._judge(value, expected)
        score = 1.0 - math.pow(2.0, -surprise / self._at_threshold)
        if self._floor and abs(value - expected) < self._floor:
            score = min(score, THRESHOLD) * abs(value - expected) / self._floor
        self._last = value
        self._baseline.add(value)
        begins_flat = kind == "flat" and self._still == self._limit
        # a flat line is another kind of event than what froze in it
        first = self._is_highest(surprise) or begins_flat
        if score >= THRESHOLD:
            self._unusual = self._count
            self._since_s = time_s if self._since_s is None else self._since_s
        elif self._count > self._unusual + _REST:
            self._since_s = None
        kind = kind if score >= THRESHOLD else "gap" if gap else ""
        return Reading(max(gap, score if first else _AT_REST * score), kind, expected, self._since_s)

    def _judge(self, value: float, expected: float) -> tuple[float, str]:
        """Surprise and kind; every judge learns the value, whether its direction counts or not."""
        step = value - self._last if self._count > 1 else 0.0
        self._level.add(value)
        here = 0.5 * (self._values.judge(value) + self._levels.judge(self._level.median()))
        moves = _STEP_WEIGHT * self._steps.judge(abs(step))
        if self._direction == "both":
            found = {"flat": self._flat(step), "value": here, "step": moves}
        else:
            sign = 1.0 if self._direction == "up" else -1.0
            beyond = sign * (value - expected) > 0
            found = {"value": here if beyond else 0.0, "step": moves if beyond and sign * step > 0 else 0.0}
        kind = max(found, key=found.__getitem__)
        return found[kind], kind

    def _flat(self, step: float) -> float:
        """What scores 0.5, for a line three times as long as any before, and 8 samples."""
        flat_so_far = self._still >= self._count - 2
        if step == 0:
            self._still += 1
        else:  # of a line that was reported only the usual part is learnt: one does not hide the next
            usual = self._still if flat_so_far else min(self._still, self._limit)
            self._longest_still = max(self._longest_still, usual)
            self._still = 0
        return (
            self._at_threshold
            if self._still >= self._limit and not flat_so_far and not self._floor
            else 0.0
        )

    @property
    def _limit(self) -> int:
        return _STILL_FACTOR * self._longest_still + _STILL_LEAST

    def _is_highest(self, surprise: float) -> bool:
        """Whether it exceeds all of the last 150 samples."""
        highest = self._highest
        if highest and highest[0][0] < self._count - _REST:
            highest.popleft()
        while highest and highest[-1][1] < surprise:
            highest.pop()
        highest.append((self._count, surprise))
        return len(highest) == 1

    def _gap(self, time_s: float) -> float:
        interval_s = time_s - self._time_s
        if math.isfinite(time_s):
            self._time_s = time_s
        if not 0 < interval_s < math.inf:
            return 0.0
        usual_s = self._intervals.median() if len(self._intervals) >= _LEVEL else math.inf
        self._intervals.add(interval_s)
        return _GAP_SCORE if interval_s > _GAP_FACTOR * usual_s else 0.0


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
        """The departure that is on, as `latency p50 31.2 ms, usually 18.4 ms, since 12 s`, and why.

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
