"""Fewer points that look the same: of each stretch the first, the last, the lowest and the highest."""

import numpy as np
from numpy.typing import NDArray


def envelope(values: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Indexes of the points to keep, in order, so that no spike is lost (the M4 aggregation, Jugel et al., 2014).

    Args:
        values: a series, NaN where unknown; unknown ones are kept only as first or last.
        most: so many points at most, at least 4; a shorter series is kept as it is.
    """
    count = len(values)
    if count <= most:
        return np.arange(count)
    edges = np.linspace(0, count, max(most // 4, 1) + 1).astype(int)
    kept: set[int] = set()
    low, high = np.where(np.isnan(values), np.inf, values), np.where(np.isnan(values), -np.inf, values)
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        kept |= {begin, end - 1, begin + int(low[begin:end].argmin()), begin + int(high[begin:end].argmax())}
    return np.array(sorted(kept), dtype=np.int64)
