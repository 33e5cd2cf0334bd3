"""Shares as people read them."""

import math

_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


def percent(share: float, decimals: int = 1) -> str:
    """A share (0 to 1) in percent, rounded down: 100 % is said only of all."""
    scale = 10.0**decimals
    return f"{math.floor(share * 100 * scale + _ROUNDING) / scale:.{decimals}f}%"
