"""What happened in the last seconds: rows of numbers, each with its time."""

import numpy as np


class TimeWindow:
    """Rows from a span of time, oldest first; the first column is when, in monotonic ns.

    Memory follows the rate and the span and is bounded: where more than `most` rows fall into the span, the oldest of
    them are forgotten, and the window covers less time.
    """

    def __init__(self, columns: int, most: int = 65_536) -> None:
        """Start empty, for rows of `columns` numbers."""
        self._rows = np.empty((0, columns))
        self._most = most

    def __len__(self) -> int:
        """Number of rows held."""
        return len(self._rows)

    def add(self, rows: np.ndarray, since_ns: int) -> None:
        """Append rows, and forget those before `since_ns`."""
        kept = np.concatenate([self._rows, rows])
        self._rows = kept[kept[:, 0] >= since_ns][-self._most :]

    def column(self, index: int) -> np.ndarray:
        """One number of every row, oldest first."""
        return self._rows[:, index]
