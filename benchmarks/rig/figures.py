"""Figures from samples: percentiles, shares, slopes."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

PERCENTS = (50.0, 90.0, 99.0, 99.9)


def distribution(samples: ArrayLike) -> dict[str, float]:
    """Count, percentiles (linear between ranks, as `numpy.percentile`) and maximum.

    NaN samples are left out.
    """
    values = np.asarray(samples, dtype=float)
    values = values[~np.isnan(values)]
    names = [f"p{percent:g}".replace(".", "_") for percent in PERCENTS]
    if not len(values):
        return {"count": 0, **dict.fromkeys([*names, "max"], math.nan)}
    found = np.percentile(values, PERCENTS).tolist()
    return {"count": len(values), **dict(zip(names, found, strict=True)), "max": float(values.max())}


def share(part: float, whole: float) -> float:
    """`part` of `whole`, 0 to 1; NaN of nothing."""
    return part / whole if whole else math.nan


def slope(x: Sequence[float], y: Sequence[float], last_share: float = 1.0) -> tuple[float, float]:
    """Least-squares slope of y over x and its standard error, over the last part of the samples.

    Args:
        x: at least three different values are needed after the first part is left out; else NaN, NaN.
        y: as many.
        last_share: how much of the samples counts, from the end; 0.8 leaves out the first fifth.

    """
    first = round(len(x) * (1.0 - last_share))
    if len(set(x[first:])) < 3:
        return math.nan, math.nan
    # not scipy's linregress, whose import takes longer than most benchmarks' smoke runs compute
    across, up = (np.asarray(each[first:], dtype=float) - np.mean(each[first:]) for each in (x, y))
    spread = float(across @ across)
    rise = float(across @ up) / spread
    left = up - rise * across
    return rise, math.sqrt(float(left @ left) / (len(left) - 2) / spread)


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """A series as one line of blocks, each the mean of its part, from the lowest to the highest."""
    if not len(values):
        return ""
    blocks = "▁▂▃▄▅▆▇█"
    means = [
        float(np.mean(part))
        for part in np.array_split(np.asarray(values, dtype=float), min(width, len(values)))
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(blocks[min(len(blocks) - 1, int((mean - low) / span * len(blocks)))] for mean in means)
