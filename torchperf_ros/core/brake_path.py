"""Braking along a path: where to be, and when, if the vehicle stops on the path that it was following."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def brake_along(points: Floats, times_s: Floats, start_s: float, deceleration: float) -> tuple[Floats, Floats]:
    """Brake at a constant deceleration along a timed path, from where the vehicle is on it at `start_s`.

    The speed at the start is the path's own there; distance travelled after t seconds is v t - a t^2 / 2 until
    t = v / a, then constant (uniformly decelerated motion). The geometry of the path is kept, only its timing changes;
    where braking is longer than the path, its last segment is extended in a straight line.

    Args:
        points: positions in m, shape [n, 3], n >= 1.
        times_s: time of each point in s, increasing, shape [n].
        start_s: when braking begins, on the same time line; before the path: its first point, after it: its last.
        deceleration: m/s^2, > 0.

    Returns:
        Positions [n, 3] and their times [n]: equally spaced from `start_s` to standstill, but no less than over the
        duration of the path.

    Raises:
        ValueError: the deceleration is not positive, or there is no point.
    """
    if deceleration <= 0 or not len(points):
        msg = f"cannot brake with {deceleration} m/s^2 along {len(points)} points: both must be positive"
        raise ValueError(msg)
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    distance = np.concatenate(([0.0], np.cumsum(steps)))
    travelled = float(np.interp(start_s, times_s, distance))
    speed = _speed_at(times_s, distance, start_s)
    stop_after_s = speed / deceleration
    duration_s = max(stop_after_s, float(times_s[-1] - times_s[0]))
    after_s = np.linspace(0.0, duration_s, len(points))
    braking_s = np.minimum(after_s, stop_after_s)
    wanted = travelled + speed * braking_s - 0.5 * deceleration * braking_s**2
    return _points_at(points, distance, wanted), start_s + after_s


def _speed_at(times_s: Floats, distance: Floats, start_s: float) -> float:
    if len(times_s) == 1 or start_s >= times_s[-1]:
        return 0.0
    index = int(np.clip(np.searchsorted(times_s, start_s, side="right") - 1, 0, len(times_s) - 2))
    seconds = float(times_s[index + 1] - times_s[index])
    return float(distance[index + 1] - distance[index]) / seconds if seconds > 0 else 0.0


def _points_at(points: Floats, distance: Floats, wanted: Floats) -> Floats:
    inside = np.stack([np.interp(wanted, distance, points[:, axis]) for axis in range(points.shape[1])], axis=1)
    beyond = np.maximum(wanted - distance[-1], 0.0)
    moving = np.flatnonzero(np.diff(distance) > 0)
    if not len(moving):
        return inside
    end = moving[-1]
    direction = (points[end + 1] - points[end]) / (distance[end + 1] - distance[end])
    return np.asarray(inside + beyond[:, None] * direction)
