"""Objects over time: detections of single frames become tracks with velocities."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_FORGOTTEN_S: Final = 0.5  # without a detection
_GATE_M, _GATE_SHARE = 2.5, 0.1  # how far from where it is expected: so much, and more with the distance
_ACCELERATION: Final = 6.0  # m/s^2 that an object may change its velocity with: what brakes hard is to be seen soon
_UNKNOWN_SPEED: Final = 10.0  # m/s, one standard deviation of a new object's velocity
_ALONG, _ACROSS, _LEAST_M = 0.02, 0.008, 0.1  # of a detection: standard deviations as shares of the distance


class Sighting(NamedTuple):
    """An object in one frame.

    Attributes:
        kind: its class.
        x, y: its middle in m, in a frame that does not move.
        length, width: m.
    """

    kind: str
    x: float
    y: float
    length: float
    width: float


@dataclass
class Track:
    """An object over time.

    Attributes:
        number: its own, never used again.
        sighting: the last one.
        state: x, y in m and vx, vy in m/s, at `seen_s`.
        covariance: of the state, [4, 4].
        seen_s: when it was seen last.
        sightings: so many so far.
    """

    number: int
    sighting: Sighting
    state: Floats
    covariance: Floats
    seen_s: float
    sightings: int = 1

    def predicted(self, at_s: float) -> tuple[Floats, Floats]:
        """State and covariance at a time: constant velocity, white acceleration (Bar-Shalom et al., 2001, 6.3.2)."""
        dt = at_s - self.seen_s
        move = np.eye(4)
        move[0, 2] = move[1, 3] = dt
        noise = np.zeros((4, 4))
        noise[[0, 1], [0, 1]], noise[[2, 3], [2, 3]] = dt**4 / 4, dt**2
        noise[[0, 1, 2, 3], [2, 3, 0, 1]] = dt**3 / 2
        return move @ self.state, move @ self.covariance @ move.T + _ACCELERATION**2 * noise


class ObjectTracks:
    """Keeps tracks: each sighting goes to the nearest track of its kind, each to one (greedy, the nearest pair first).

    A Kalman filter of constant velocity for each. What a camera sees is far less certain along the line of sight than
    across it, so that a pedestrian's way into the lane is known long before their distance is.
    """

    def __init__(self) -> None:
        self._tracks: list[Track] = []
        self._next, self._last_s = 0, -np.inf

    def update(self, sightings: Sequence[Sighting], at_s: float, eye: tuple[float, float]) -> list[Track]:
        """Take the sightings of a frame, seen from a place; the tracks that were seen now.

        A frame that is not newer than the last one begins anew: the log, or the clock, has jumped back.
        """
        if at_s <= self._last_s:
            self._tracks.clear()
        self._last_s = at_s
        self._tracks = [track for track in self._tracks if at_s - track.seen_s <= _FORGOTTEN_S]
        expected = [track.predicted(at_s) for track in self._tracks]
        pairs = []
        for number, one in enumerate(sightings):
            away = float(np.hypot(one.x - eye[0], one.y - eye[1]))
            for place, (track, (state, _)) in enumerate(zip(self._tracks, expected, strict=True)):
                apart = float(np.hypot(one.x - state[0], one.y - state[1]))
                if track.sighting.kind == one.kind and apart <= _GATE_M + _GATE_SHARE * away:
                    pairs.append((apart, number, place))
        taken: dict[int, int] = {}
        for _, number, place in sorted(pairs):
            if number not in taken and place not in taken.values():
                taken[number] = place
        seen = []
        for number, one in enumerate(sightings):
            noise = _noise(one, eye)
            if number in taken:
                track = self._tracks[taken[number]]
                track.state, track.covariance = _corrected(*expected[taken[number]], one, noise)
                track.sighting, track.seen_s, track.sightings = one, at_s, track.sightings + 1
            else:
                covariance = np.zeros((4, 4))
                covariance[:2, :2], covariance[2:, 2:] = noise, _UNKNOWN_SPEED**2 * np.eye(2)
                track = Track(self._next, one, np.array([one.x, one.y, 0.0, 0.0]), covariance, at_s)
                self._next += 1
                self._tracks.append(track)
            seen.append(track)
        return seen


def _noise(one: Sighting, eye: tuple[float, float]) -> Floats:
    """Covariance [2, 2] of where a sighting is."""
    line = np.array([one.x - eye[0], one.y - eye[1]])
    away = max(float(np.hypot(*line)), 1.0)
    along, across = line / away, np.array([-line[1], line[0]]) / away
    spreads = max(_ALONG * away, _LEAST_M), max(_ACROSS * away, _LEAST_M)
    noise: Floats = spreads[0] ** 2 * np.outer(along, along) + spreads[1] ** 2 * np.outer(across, across)
    return noise


def _corrected(state: Floats, covariance: Floats, one: Sighting, noise: Floats) -> tuple[Floats, Floats]:
    """State and covariance once an object has been seen (Kalman, 1960)."""
    gain = covariance[:, :2] @ np.linalg.inv(covariance[:2, :2] + noise)
    return state + gain @ (np.array([one.x, one.y]) - state[:2]), covariance - gain @ covariance[:2]
