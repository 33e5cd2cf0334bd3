"""The trend of a series, which a few odd samples do not bend."""

import functools

import numpy as np
from numpy.typing import NDArray


@functools.lru_cache(maxsize=16)
def pairs_of(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Places of the first and of the second point of every pair of `n` points.

    Bounded: each caller has a few sizes, and those of every size there ever was would be a leak.
    """
    first, second = np.triu_indices(n, 1)
    return first, second


def theil_sen_slope(
    times: NDArray[np.float64], values: NDArray[np.float64], most_points: int = 60
) -> float:
    """Median of the slopes of all pairs (Theil 1950, Sen 1968): a third of the points may lie anywhere.

    Both have the shape (n,), n >= 2; times rise. Of more than `most_points`, medians of as many stretches
    are taken, since the pairs grow with the square of the points.
    """
    if len(times) > most_points:
        stretches = np.array_split(np.arange(len(times)), most_points)
        times, values = (np.array([np.median(of[one]) for one in stretches]) for of in (times, values))
    first, second = pairs_of(len(times))
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))
