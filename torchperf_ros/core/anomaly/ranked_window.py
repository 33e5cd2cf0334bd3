"""A sorted window that also tells medians, ranks and its largest samples."""

import bisect

from torchperf_ros.core.sorted_window import SortedWindow


class RankedWindow(SortedWindow):
    """The last `size` finite samples, in order."""

    def median(self) -> float:
        """The middle sample, or the mean of the middle two.

        Raises:
            IndexError: there is no sample.
        """
        half, odd = divmod(len(self._ordered), 2)
        return self._ordered[half] if odd else 0.5 * self._ordered[half - 1] + 0.5 * self._ordered[half]

    def position(self, value: float) -> float:
        """Where `value` lies among the samples: -1 below all, 0 in the middle, 1 above all; ties count half."""
        ordered = self._ordered
        return (bisect.bisect_left(ordered, value) + bisect.bisect_right(ordered, value)) / len(ordered) - 1.0

    def count_from(self, value: float) -> int:
        """How many samples are at least `value`."""
        return len(self._ordered) - bisect.bisect_left(self._ordered, value)

    def largest(self, count: int) -> list[float]:
        """The `count` >= 1 largest samples, in rising order."""
        return self._ordered[-count:]
