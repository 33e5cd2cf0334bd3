"""How well a drive went, and how sure one can be that one arm drives better than another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchperf_ros.world.world import World

TTC_BOUND_S: Final = 0.95
"""The least time to collision that nuPlan and NAVSIM accept."""
_RESAMPLES: Final = 4000
# nuPlan's bounds of comfort, which NAVSIM uses: braking, acceleration, lateral acceleration m/s^2, jerk m/s^3
_BRAKING, _ACCELERATION, _LATERAL, _JERK = 4.05, 2.40, 4.89, 4.13


@dataclass(frozen=True)
class Score:
    """Figures of one drive.

    Attributes:
        collision: the vehicle hit something, and is to blame for it.
        impact_ms: relative speed then in m/s; 0 without a collision.
        min_ttc_s: the least time to collision in s, at most 3.
        progress_m: along the lane, up to the end or the collision.
        comfortable: within nuPlan's bounds.
        hardest: braking in m/s^2; `jerk`: m/s^3.
        left_road: it left the road.
        end_speed: speed in m/s at the end.
    """

    collision: bool
    impact_ms: float
    min_ttc_s: float
    progress_m: float
    comfortable: bool
    hardest: float
    jerk: float
    left_road: bool
    end_speed: float

    def pdms(self, possible_m: float) -> float:
        """The score of NAVSIM, from 0 to 1: NC * DAC * (5 TTC + 5 EP + 2 C) / 12.

        Dauner et al., "NAVSIM", NeurIPS 2024. No collision, on the road, time to collision above 0.95 s, progress as a
        share of what was possible, comfort.

        Args:
            possible_m: progress of the arm without latency and faults on the same scenario and seed.
        """
        if self.collision or self.left_road:
            return 0.0
        progress = min(1.0, max(0.0, self.progress_m) / possible_m) if possible_m > 0 else 1.0
        return (5.0 * (self.min_ttc_s > TTC_BOUND_S) + 5.0 * progress + 2.0 * self.comfortable) / 12.0


def score_of(world: World) -> Score:
    """The figures of a world that is over."""
    seen = world.seen
    comfortable = (
        seen.hardest <= _BRAKING and seen.quickest <= _ACCELERATION and seen.lateral <= _LATERAL and seen.jerk <= _JERK
    )
    return Score(
        bool(seen.hit), round(seen.impact_ms, 3), min(round(seen.min_ttc_s, 2), 3.0) if not seen.hit else 0.0,
        round(world.progress_m, 2), comfortable, round(seen.hardest, 2), round(seen.jerk, 2), seen.left_road,
        round(world.vehicle.speed, 3),
    )  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A mean difference between two arms on the same seeds, and the interval that holds it with 95 %."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the arms differ."""
        return self.low > 0 or self.high < 0


def paired_difference(first: Sequence[float], second: Sequence[float], groups: Sequence[str]) -> Difference:
    """First less second, by a paired bootstrap of the drives within each group (scenario), seeded.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993: the 2.5 and 97.5 % quantiles of the mean of pairs
    that are drawn with replacement.

    Raises:
        ValueError: there are no pairs, or not as many of each.
    """
    if not first or not len(first) == len(second) == len(groups):
        raise ValueError(f"pairs are needed: {len(first)}, {len(second)} and {len(groups)} were given")
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    rng, names, sums = np.random.default_rng(0), np.asarray(groups), np.zeros(_RESAMPLES)
    for name in sorted(set(groups)):
        own = differences[names == name]
        sums += own[rng.integers(len(own), size=(_RESAMPLES, len(own)))].sum(axis=1)
    low, high = np.quantile(sums / len(differences), (0.025, 0.975))
    return Difference(float(differences.mean()), float(low), float(high))


def fewer(first: Sequence[bool], second: Sequence[bool]) -> float:
    """By which share the first arm has fewer collisions than the second; NaN where the second has none."""
    return 1.0 - sum(first) / sum(second) if sum(second) else math.nan
