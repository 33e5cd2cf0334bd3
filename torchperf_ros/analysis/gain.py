"""What one way to run a model gains over another, and how sure that is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.worker.stopwatch import Timing

_RESAMPLES = 1000
_SEED = 0
_PERCENTILES = (2.5, 50.0, 97.5)


@dataclass(frozen=True)
class Gain:
    """Share of the median time that is saved; negative: it got slower.

    Attributes:
        saved: best estimate, 0.2 for 10 ms instead of 12.5.
        low, high: 95 % confidence interval.
    """

    saved: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        """How far from zero this is at most: the noise, where both sides ran the same."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        """In percent with sign and interval; where it takes twice as long and more, as a multiple of the time."""
        if self.saved <= -1.0:
            return f"x{1.0 - self.saved:.1f} (x{1.0 - self.high:.1f}..x{1.0 - self.low:.1f})"
        return f"{_percent(self.saved)} % ({_percent(self.low)}..{_percent(self.high)})"


def gain(before: Timing, after: Timing) -> Gain:
    """Compare two candidates of one interleaved measurement.

    The interval is a moving-block bootstrap of the ratio of medians (Künsch, "The jackknife and the bootstrap for
    general stationary observations", 1989): whole blocks of n^(1/3) rounds are drawn, as neighbouring rounds share
    the machine's mood, and both candidates get the same rounds, as they met the same moods.

    Args:
        before: what is compared with.
        after: measured in the same rounds.

    Raises:
        ValueError: not the same number of samples.
    """
    a, b = np.asarray(before.times_ms), np.asarray(after.times_ms)
    if a.size != b.size:
        msg = f"{a.size} and {b.size} samples: only candidates of one measurement can be compared"
        raise ValueError(msg)
    rounds = _blocks(a.size)
    ratios = np.median(b[rounds], axis=1) / np.median(a[rounds], axis=1)
    high, _, low = (1.0 - float(np.percentile(ratios, p)) for p in _PERCENTILES)
    return Gain(1.0 - after.median_ms / before.median_ms, low, high)


def _blocks(size: int) -> NDArray[np.int64]:
    """[resamples, size] indices made of blocks in a row."""
    length = max(1, round(size ** (1 / 3)))
    count = -(-size // length)
    starts = np.random.default_rng(_SEED).integers(0, size - length + 1, (_RESAMPLES, count, 1))
    return (starts + np.arange(length)).reshape(_RESAMPLES, -1)[:, :size]


def slower(saved: float) -> str:
    """How much slower a negative gain is, in words."""
    return f"{-100 * saved:.0f} % slower" if saved > -1.0 else f"takes {1.0 - saved:.1f} times as long"


def _percent(share: float) -> str:
    return f"{100 * share:+.0f}" if abs(share) >= 0.1 else f"{100 * share:+.1f}"  # noqa: PLR2004 - three digits
