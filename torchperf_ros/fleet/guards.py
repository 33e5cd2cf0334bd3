"""Hard guards.

Limits that a candidate breaks or keeps on one vehicle, independent of the statistics of the fleet.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from torchperf_ros.api.errors import TorchperfError

# Shares are judged from so many frames on.
#
# Half a minute at 30 Hz. One miss of the first ten is no tenth of them.
LEAST_FRAMES: Final = 1000
# Figures are of the candidate's last hour at most, so that rare single events do not add up over
# weeks.
WINDOW_S: Final = 3600.0


class PlanError(TorchperfError):
    """A roll-out plan cannot be used.

    The message names the file or the field, the value, and what would be right.
    """


@dataclass(frozen=True)
class Guards:
    """The most that each figure of a vehicle may be within `WINDOW_S`.

    One above it rolls that vehicle back.

    Attributes:
        worker_deaths: crashes, hangs and kills of the candidate's worker. One may be the machine's, two are
            not.
        refused_plans: of the candidate; beside the base those that the guard of plans would replace where
            it accepts the base's, in service those that it replaced by a stop.
        safe_stops: times that the stage went into SAFE_STOP.
        miss_ratio: share of frames without an own result in time, 0 to 1.
        memory_mib_per_h: growth of the candidate's worker in MiB per hour.
        disagreement: share of compared outputs that differ beyond the rules of golden tests, 0 to 1.
    """

    worker_deaths: int = 1
    refused_plans: int = 3
    safe_stops: int = 0
    miss_ratio: float = 0.02
    memory_mib_per_h: float = 60.0
    disagreement: float = 0.05

    def changed(self, values: object, where: str) -> "Guards":
        """The same with other limits.

        Raises:
            PlanError: an unknown name, or a limit that is none.
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"{where}: {values!r} has to be limits by name, for example {{worker_deaths: 1}}"
            )
        known: dict[str, float] = asdict(self)
        for name, value in values.items():
            if name not in known:
                raise PlanError(f"{where}: no guard is called {name!r}; there are: {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise PlanError(f"{where}.{name}: {value!r} has to be a number from 0 on")
            if name in _SHARES and value > 1:
                raise PlanError(f"{where}.{name}: {value!r} is a share; it has to be a number from 0 to 1")
        return replace(self, **values)


_SHARES: Final = ("miss_ratio", "disagreement")


@dataclass(frozen=True)
class CandidateFigures:
    """What a candidate did on one vehicle, within `WINDOW_S`.

    Attributes:
        frames: that it was given.
        deaths, refused, safe_stops, misses: counts, see `Guards`.
        memory_mib_per_h: trend of its worker's memory; NaN while it is not known.
        disagreements: outputs that differ, of those `compared`.
    """

    frames: int = 0
    deaths: int = 0
    refused: int = 0
    safe_stops: int = 0
    misses: int = 0
    memory_mib_per_h: float = math.nan
    disagreements: int = 0
    compared: int = 0

    def __add__(self, other: "CandidateFigures") -> "CandidateFigures":
        """Counts of both; the trend of the later one."""
        return CandidateFigures(
            self.frames + other.frames,
            self.deaths + other.deaths,
            self.refused + other.refused,
            self.safe_stops + other.safe_stops,
            self.misses + other.misses,
            other.memory_mib_per_h,
            self.disagreements + other.disagreements,
            self.compared + other.compared,
        )


def broken_guard(guards: Guards, figures: CandidateFigures) -> str:
    """The figure that is over its limit and that limit, in words; "" where every guard holds.

    Pure and quick, so that a vehicle can ask after every frame.
    """
    figure: tuple[tuple[str, Any, float], ...] = (
        ("worker_deaths", figures.deaths, guards.worker_deaths),
        ("safe_stops", figures.safe_stops, guards.safe_stops),
        ("refused_plans", figures.refused, guards.refused_plans),
        ("memory_mib_per_h", figures.memory_mib_per_h, guards.memory_mib_per_h),
        ("miss_ratio", _share(figures.misses, figures.frames), guards.miss_ratio),
        ("disagreement", _share(figures.disagreements, figures.compared), guards.disagreement),
    )
    for name, value, limit in figure:
        if value > limit:  # false for NaN: what is not known breaks nothing
            return f"{name} {value:.4g} is over its limit {limit:g}"
    return ""


# Frames that both versions had before a candidate serves, and those among them with a known time of
# the candidate.
#
# Where none of 50 fails at most 6 % do (the rule of three, at 95 %). A time is known where no other
# frame came meanwhile: of a candidate that takes longer than frames are apart none is, and on a
# full machine few are.
LEAST_PAIRS, LEAST_TIMED = 50, 5


def why_not_to_serve(pairs: int, timed: int, late: int, base_share: float, limits: Guards) -> str:
    """Why a candidate that stands beside may not serve yet, by the frames that both versions had.

    "" if it may.

    Args:
        pairs: frames that both had.
        timed: of them, those with a known time of the candidate.
        late: frames in which the candidate would have missed the deadline, or had no result.
        base_share: share of its frames in which the base missed it.
        limits: a candidate that is over the budget more often than `miss_ratio`, and than the base, does
            not serve.
    """
    most = max(limits.miss_ratio, base_share)
    if pairs < LEAST_PAIRS:
        return f"{pairs} of the {LEAST_PAIRS} frames beside the base that it has to have first"
    if late > most * timed:
        return (
            f"{late} of {timed} frames would be over the budget or without a result; at most {most:.2%} may"
        )
    if timed < LEAST_TIMED:
        return (
            f"{timed} of {pairs} frames have a known time, {LEAST_TIMED} are needed: it gives way to other"
            " frames"
        )
    return ""


def _share(part: int, whole: int) -> float:
    return part / whole if whole >= LEAST_FRAMES else math.nan
