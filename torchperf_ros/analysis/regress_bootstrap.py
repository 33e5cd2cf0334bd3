"""Figures of a run as often as one likes: a circular block bootstrap of quantiles and means, on counts."""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

_CELLS_AT_ONCE: Final = 2_000_000

Values = NDArray[np.float64]


def resampled(
    values: Values,
    shares: tuple[float, ...],
    columns: Values,
    block: int,
    resamples: int,
    random: np.random.Generator,
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Values, Values]:
    """Quantiles of `values` and means of `columns` in resamples of whole blocks.

    Circular block bootstrap (Politis and Romano 1992): blocks of successive frames keep what they have to do with each
    other; the series is closed to a ring, so that each frame is as likely as any. No frame is copied: a resample is
    how often it holds each frame, and the values are sorted once.

    Args:
        values: shape (n,), in order of time.
        shares: of the quantiles, 0 to 1; linear between ranks, as `numpy.quantile`.
        columns: shape (n, k), in the same order.
        block: length of the blocks in frames, 1 to n.
        resamples: how many.
        random: where the blocks come from.
        progress: told how many resamples were added.

    Returns:
        Quantiles, shape (resamples, len(shares)), and means, shape (resamples, k).
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    quantiles, means = np.empty((resamples, len(shares))), np.empty((resamples, columns.shape[1]))
    done = 0
    for counts in _counts(len(values), block, resamples, random):
        rows = slice(done, done + len(counts))
        means[rows] = counts @ columns / len(values)
        quantiles[rows] = _quantiles(np.cumsum(counts[:, order], axis=1, dtype=np.int32), ordered, shares)
        done += len(counts)
        progress(len(counts))
    return quantiles, means


def _counts(n: int, block: int, resamples: int, random: np.random.Generator) -> Iterator[NDArray[np.int32]]:
    """How often each frame is in each resample, shape (some, n); every resample holds n frames."""
    whole, rest = divmod(n, block)
    at_once = max(1, _CELLS_AT_ONCE // n)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        counts = _covered(random.integers(0, n, (rows, whole)), block, n)
        yield counts + _covered(random.integers(0, n, (rows, 1)), rest, n) if rest else counts


def _covered(starts: NDArray[np.int64], length: int, n: int) -> NDArray[np.int32]:
    """How many of the blocks that begin at `starts`, shape (rows, blocks), cover each place of the ring."""
    rows = len(starts)
    places = (starts + np.arange(rows)[:, None] * n).ravel()
    begun = np.cumsum(np.bincount(places, minlength=rows * n).reshape(rows, n), axis=1, dtype=np.int32)
    covered = begun.copy()
    covered[:, length:] -= begun[:, : n - length]
    covered[:, :length] += begun[:, -1:] - begun[:, n - length :]
    return covered


def _quantiles(cumulated: NDArray[np.int32], ordered: Values, shares: tuple[float, ...]) -> Values:
    n = len(ordered)
    places = (n - 1) * np.array(shares)
    below = places.astype(np.int64)
    ranks = np.concatenate([below, np.minimum(below + 1, n - 1)]).astype(np.int32)
    found = ordered[[np.searchsorted(row, ranks, side="right") for row in cumulated]]
    low, high = found[:, : len(shares)], found[:, len(shares) :]
    return np.asarray(low + (high - low) * (places - below))
