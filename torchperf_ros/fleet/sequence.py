"""Is the candidate better or worse? Intervals that hold at all times at once.

One may look as often as one likes.

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

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.fleet.plan import Margins

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


class CandidateVerdict(enum.Enum):
    BETTER = "better"
    WORSE = "worse"
    EQUIVALENT = "equivalent"
    NOT_ENOUGH = "not enough data"


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

    def verdict(self, margin: float) -> CandidateVerdict:
        """More is worse.

        The interval excludes 0 and the mean is beyond the margin, or all of it is within.
        """
        if self.low > 0 and self.mean >= margin:
            return CandidateVerdict.WORSE
        if self.high < 0 and self.mean <= -margin:
            return CandidateVerdict.BETTER
        return (
            CandidateVerdict.EQUIVALENT
            if -margin < self.low and self.high < margin
            else CandidateVerdict.NOT_ENOUGH
        )

    def limited(self, limit: float) -> CandidateVerdict:
        """Of a share: worse where it is over the limit, equivalent where it is below."""
        return (
            CandidateVerdict.WORSE
            if self.low > limit
            else CandidateVerdict.EQUIVALENT
            if self.high < limit
            else CandidateVerdict.NOT_ENOUGH
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
    """Stretches out of minutes, the columns of `records.Brought.blocks`, ordered by vehicle and time.

    A stretch is over when it has `STRETCH_BLOCKS`, when its vehicle began another one, or when nothing was
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
        np.append(vehicle[1:] == vehicle[:-1], [False])
        | (sizes == STRETCH_BLOCKS)
        | (end_s < now_s - _OVER_S)
    )
    return Units(vehicle, end_s, frames, values).chosen(over & (sizes >= LEAST_BLOCKS) & (frames > 0))


def margin_of(metric: str, margins: Margins) -> float:
    """The smallest difference of a metric that matters, in its unit."""
    if metric == MISSES:
        return margins.miss_points / 100.0
    return math.log1p((margins.latency_percent if metric == LATENCY else margins.p99_percent) / 100.0)
