"""Measured times of a tier: a bounded window of samples, and what a worker measured before its frames."""

import bisect
import math
from collections import deque
from dataclasses import dataclass

_OUTLIER_RATIO = 4.0
_OUTLIER_SHARE = 0.10


class SortedWindow:
    """The last `size` samples.

    The oldest makes room for the newest. Adding one costs about a microsecond.
    """

    def __init__(self, size: int) -> None:
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []
        self._size = size

    def add(self, value: float) -> None:
        if len(self._arrived) == self._size:
            del self._ordered[bisect.bisect_left(self._ordered, self._arrived.popleft())]
        self._arrived.append(value)
        bisect.insort(self._ordered, value)

    def __len__(self) -> int:
        return len(self._ordered)

    def clear(self) -> None:
        self._arrived.clear()
        self._ordered.clear()

    def quantile(self, share: float, of: int | None = None) -> float:
        """Quantile (0 to 1), linear between ranks as `numpy.percentile`, of the `of` smallest (default: all).

        Raises:
            IndexError: there is no sample.
        """
        rank = share * ((len(self._ordered) if of is None else of) - 1)
        low = int(rank)
        value = self._ordered[low]
        part = rank - low
        return value + part * (self._ordered[low + 1] - value) if part else value

    def median(self) -> float:
        """The middle sample, or the mean of the middle two; NaN where there is none."""
        return self.quantile(0.5) if self._ordered else math.nan

    def count_up_to(self, value: float) -> int:
        return bisect.bisect_right(self._ordered, value)


def usual_p99(window: SortedWindow, spared: int = 0) -> float:
    """99th percentile of the samples without isolated stalls.

    Stalls (over 4 times the median, at most 10 % of the samples or one) are left out: they are faults that
    no tier avoids and that the backup answers. More of them count, as then the tier itself is slow.

    Args:
        window: the samples, at least one.
        spared: how many of the largest samples are left out, stalls or not; one sample at least counts.
    """
    count = len(window)
    usual = window.count_up_to(_OUTLIER_RATIO * window.quantile(0.5))
    if count - usual > max(1.0, _OUTLIER_SHARE * count):
        usual = count
    return window.quantile(0.99, max(1, min(usual, count - spared)))


@dataclass(frozen=True)
class Calibration:
    """Inference time of a tier, measured by a worker before its first frame."""

    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Batching:
    """How many frames one run may take, and how long runs take, found by a worker before its first frame.

    Attributes:
        most: frames in one run; 1: each runs alone.
        refusal: why that is fewer than were asked for, "" where it is not.
        times_ms: of each tier pairs of a number of frames (1, 2, 4 and so on, and the most) and the median
            inference time of a run; empty for a tier that is not loaded.
    """

    most: int = 1
    refusal: str = ""
    times_ms: tuple[tuple[tuple[int, float], ...], ...] = ()
