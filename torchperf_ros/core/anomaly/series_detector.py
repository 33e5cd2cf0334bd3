"""The detector for any one time series: how unusual is each sample, of what kind, and since when."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

from torchperf_ros.core.anomaly.cycle import Cycle
from torchperf_ros.core.anomaly.precedents import Precedents
from torchperf_ros.core.anomaly.ranked_window import RankedWindow
from torchperf_ros.core.anomaly.tail import MOST_SURPRISING, Tail

Direction = Literal["both", "up", "down"]

THRESHOLD = 0.5
"""A score from here on is an anomaly."""

_AT_THRESHOLD = 2.5  # mean surprise: every judge sees what happens once in 300 samples, or two of nine once in 200,000
_MOST_CAUTION = 4.0
_FEWEST_JUDGES = 9  # the mean is over so many at least: one direction has fewer, and is no more easily alarmed
_SHAPE_NAMES = 0.5  # shape names the kind where it is twice as surprising as what has a plainer name
_KINDS = {"above": "spike", "below": "spike", "step": "spike", "value": "spike", "season so far": "season"}
_NO_PRECEDENT = 3  # samples of an anomaly that are no precedent: a spike hides no other, what lasts is learnt
_OFF = 0.3  # the state ends when the evidence, not the trail, falls below
_BASELINE = 384  # samples: the level is their median, so a new level is the baseline after 192
_RECENT = 17  # samples whose median is compared with the baseline: a new level shows after 9, stalls do not
_FIRST = _RECENT - 1  # samples before departures mean anything
_VARIATION = 32  # steps from sample to sample that are summed up
_SEASON_RECENT = 8  # residuals to the season that are summed up
_DRIFT_SLACK = 0.5  # of the position from -1 to 1: half of a steady series' samples lie within
_LATELY, _LATELY_POWER = 16, 4.0  # samples of the recent surprise, whose mean is near its largest
_TRAIL_SAMPLES = 300.0  # the aftermath of an event fades by 1/e in so many samples,
_TRAIL_MOST = 0.49  # and is no anomaly of its own
_RESOLUTION = 1e-9  # of the values: departures below are rounding
_LARGEST = 1e150  # values are cut off here: sums of a few stay finite
_STILL_FACTOR, _STILL_LEAST = 3, 8  # a flat line is 3 times as long as any before, and 8 samples
_GAP_FACTOR = 5.0  # intervals from so many times the usual one on
_GAP_MOST = 0.3  # a gap says more about the recorder than about the value: told, far below the threshold


@dataclass(frozen=True, slots=True)
class Reading:
    """What the detector makes of one sample.

    Attributes:
        score: 0 (usual) to 1 (never seen the like); 0.5 and more is an anomaly. Fades after an event, below 0.5.
        kind: `spike`, `level`, `drift`, `variance`, `season`, `shape`, `flat` or `gap`: what gives most of the score;
            empty where nothing does, and while an event fades.
        baseline: what was expected, in the unit of the value; NaN before the first sample.
        since_s: when the anomaly that is on began, on the clock of `time_s`; None if none is on.
    """

    score: float
    kind: str
    baseline: float
    since_s: float | None


class SeriesDetector:
    """Judges samples one by one, each by what came before it.

    Several judges look at different departures: of the value from the baseline, from the value before and from the
    nearest earlier value (`spike`), of the median of the last 17 from the baseline (`level`), of the variation
    (`variance`), of a rank-based cumulative sum (`drift`), from what is usual at this time of the day or of a
    shorter cycle (`season`), and of the last samples together from the nearest earlier ones (`shape`). Each
    compares its departure with those that it has seen (see `Tail`); none needs a scale, a unit or a distribution.
    The evidence is the root mean square of their surprises, on a scale from 0 to 1.

    Evidence of 0.5 and more is the score. Below, the score grades: by the mean of the evidence now and lately, and it
    fades after an event.

    A new level is the baseline once it is half of the last 384 samples. The evidence falls earlier, within some
    dozens, as each judge learns.
    """

    def __init__(self, direction: Direction = "both", floor: float = 0.0, caution: float = 1.0) -> None:
        """Watch for departures in `direction`.

        Args:
            direction: `up` or `down`: only values above or below the baseline; no `variance` and no `flat` then.
            floor: the smallest departure from the baseline worth telling, in the unit of the value. Smaller ones
                score in proportion below the threshold.
            caution: how much more surprising than usual an anomaly has to be, from 1 (about 3 samples in 10,000
                of noise with heavy tails are one) to 4; 1.6 makes a tenth of the false alarms.

        Raises:
            ValueError: `direction` is another word, `floor` negative or not finite, or `caution` not from 1 to 4.
        """
        if direction not in {"both", "up", "down"}:
            msg = f"direction {direction!r}: has to be both, up or down"
            raise ValueError(msg)
        if not 0 <= floor < math.inf:
            msg = f"floor {floor!r}: has to be a number >= 0, in the unit of the value"
            raise ValueError(msg)
        if not 1 <= caution <= _MOST_CAUTION:
            msg = f"caution {caution!r}: has to be a number from 1 to {_MOST_CAUTION:g}"
            raise ValueError(msg)
        self._at_threshold = _AT_THRESHOLD * caution
        self._up = direction != "down"
        self._down = direction != "up"
        self._floor = floor
        self._count = 0
        self._time_s = math.nan
        self._last = math.nan
        self._baseline = RankedWindow(_BASELINE)
        self._recent: deque[float] = deque(maxlen=_RECENT - 1)
        self._steps: deque[float] = deque(maxlen=_VARIATION - 1)
        self._intervals = RankedWindow(64)
        self._cycle = Cycle()
        self._cycle_residuals: deque[float] = deque(maxlen=_SEASON_RECENT)
        self._precedents = Precedents()
        self._tails: dict[str, Tail] = {}
        self._rise = self._fall = 0.0
        self._still = self._longest_still = 0
        self._seasonal = False
        self._lately = self._trail = 0.0
        self._alarming = 0
        self._since_s: float | None = None

    @property
    def active(self) -> bool:
        """Whether an anomaly is on: from a score of 0.5 until the evidence falls below 0.3."""
        return self._since_s is not None

    @property
    def usual_departure(self) -> float:
        """What 2 % of the departures from the baseline exceed, in the unit of the value; 0 while nothing is known.

        Of the departures to the side that goes farther, where both count.
        """
        names = ("season",) if self._seasonal else ("above", "below")
        return max((self._tails[name].begins for name in names if name in self._tails), default=0.0)

    def update(self, time_s: float, value: float) -> Reading:
        """Judge one sample, then learn it. Never raises for any floats.

        Args:
            time_s: when the value was measured, in seconds on any clock (for the season of the day: Unix time).
                Repeated and backward times are taken as they come.
            value: NaN and infinities are gaps: nothing is learnt from them.
        """
        gap = self._gap(time_s)
        if not math.isfinite(value):
            self._trail *= 1.0 - 1.0 / _TRAIL_SAMPLES
            score = max(self._trail, _GAP_MOST if self._count >= _FIRST else 0.0)
            return Reading(score, "gap", self._expected(time_s), self._since_s)
        value = min(_LARGEST, max(-_LARGEST, value))
        expected = self._expected(time_s)
        departures = self._departures(time_s, value)
        surprise, kind = self._judge(departures)
        self._lately += (surprise**_LATELY_POWER - self._lately) / _LATELY
        evidence = self._worth(surprise, departures)
        lately = self._worth(self._lately ** (1 / _LATELY_POWER), departures)
        self._trail = max(min(_TRAIL_MOST, 0.5 * (evidence + lately)), self._trail * (1.0 - 1.0 / _TRAIL_SAMPLES))
        self._learn(time_s, value)
        self._alarming = self._alarming + 1 if evidence >= THRESHOLD else 0
        self._precedents.learn(expected if 0 < self._alarming <= _NO_PRECEDENT else value)
        self._switch(time_s, evidence)
        score = evidence if evidence >= THRESHOLD else self._trail
        if gap > score:
            score, kind = gap, "gap"
        elif evidence < _OFF:
            kind = ""
        return Reading(score, kind, expected, self._since_s)

    def _expected(self, time_s: float) -> float:
        if self._count == 0:
            return math.nan
        usual = self._cycle.usual(time_s) if math.isfinite(time_s) else None
        return self._baseline.median() if usual is None else usual

    def _departures(self, time_s: float, value: float) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._count < _FIRST:
            return found
        level = self._baseline.median()
        rounding = _RESOLUTION * (abs(value) + abs(level))

        def side(signed: float) -> float:
            size = abs(signed)
            return size if size > rounding and (self._up if signed > 0 else self._down) else 0.0

        if self._up and (value >= level or not self._down):
            found["above"] = side(value - level)
        if self._down and (value <= level or not self._up):
            found["below"] = side(value - level)
        found["step"] = side(value - self._last)
        found["level"] = side(sorted([*self._recent, value])[_RECENT // 2] - level)
        if self._up and self._down:
            found["variance"] = sum(self._steps) + abs(value - self._last)
        position = self._baseline.position(value)
        self._rise = max(0.0, self._rise + position - _DRIFT_SLACK)
        self._fall = max(0.0, self._fall - position - _DRIFT_SLACK)
        found["drift"] = max(self._rise if self._up else 0.0, self._fall if self._down else 0.0)
        usual = self._cycle.usual(time_s) if math.isfinite(time_s) else None
        self._seasonal = usual is not None
        if usual is not None:
            residual = value - usual
            self._cycle_residuals.append(residual)
            found["season"] = side(residual)
            found["season so far"] = side(sum(self._cycle_residuals))
        found |= self._without_precedent(value, side(value - (level if usual is None else usual)) > 0, rounding)
        return found

    def _without_precedent(self, value: float, counts: bool, rounding: float) -> dict[str, float]:
        distances = self._precedents.compare(value)
        if distances is None:
            return {}
        counts = counts or (self._up and self._down)
        names = ("value", "shape")
        return {name: d if counts and d > rounding else 0.0 for name, d in zip(names, distances, strict=True)}

    def _judge(self, departures: dict[str, float]) -> tuple[float, str]:
        total, largest, kind = 0.0, 0.0, ""
        for name, departure in departures.items():
            tail = self._tails.get(name)
            if tail is None:
                tail = self._tails[name] = Tail()
            surprise = tail.judge(departure)
            total += surprise * surprise
            if name == "shape":
                surprise *= _SHAPE_NAMES
            if surprise > largest:
                largest, kind = surprise, name
        mean = math.sqrt(total / max(_FEWEST_JUDGES, len(departures)))
        still = self._stillness()
        if still > mean:
            return still, "flat"
        return min(mean, MOST_SURPRISING), _KINDS.get(kind, kind)

    def _stillness(self) -> float:
        """Surprise of a flat line: 2.5 at three times the longest one before and 8 samples; at most 3.75."""
        if not (self._up and self._down) or self._still >= self._count - 2 or self._floor:
            return 0.0
        return self._at_threshold * min(1.5, self._still / (_STILL_FACTOR * self._longest_still + _STILL_LEAST))

    def _still_learnt(self) -> int:
        """The line that ended, or so much of it as was no anomaly: one does not hide the next."""
        if self._still >= self._count - 1:  # nothing but this line so far
            return self._still
        return min(self._still, _STILL_FACTOR * self._longest_still + _STILL_LEAST)

    def _worth(self, surprise: float, departures: dict[str, float]) -> float:
        evidence = 1.0 - math.pow(2.0, -surprise / self._at_threshold)
        if not self._floor or not departures:
            return evidence
        departure = max(departures.get(name, 0.0) for name in ("above", "below", "level"))
        return evidence if departure >= self._floor else min(evidence, THRESHOLD) * (departure / self._floor)

    def _gap(self, time_s: float) -> float:
        interval_s = time_s - self._time_s
        if math.isfinite(time_s):
            self._time_s = time_s
        if not 0 < interval_s < math.inf:
            return 0.0
        usual_s = self._intervals.median() if len(self._intervals) >= _FIRST else math.inf
        self._intervals.add(interval_s)
        if interval_s <= _GAP_FACTOR * usual_s:
            return 0.0
        return _GAP_MOST * (1.0 - _GAP_FACTOR * usual_s / interval_s)

    def _learn(self, time_s: float, value: float) -> None:
        if self._count:
            self._steps.append(abs(value - self._last))
            if value == self._last:
                self._still += 1
            else:
                self._longest_still = max(self._longest_still, self._still_learnt())
                self._still = 0
        self._baseline.add(value)
        self._recent.append(value)
        self._last = value
        self._count += 1
        if math.isfinite(time_s):
            self._cycle.learn(time_s, value)

    def _switch(self, time_s: float, evidence: float) -> None:
        if self._since_s is None and evidence >= THRESHOLD:
            self._since_s = time_s
        elif evidence < _OFF:
            self._since_s = None
