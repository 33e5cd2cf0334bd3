"""Perception of the closed loop by camera: the reference detector's boxes, on the road and over time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.closed_loop import (
    MARKER_ARRAY,
    ODOMETRY,
    Floats,
    SeenObject,
    objects_message,
    pose_of,
)
from torchperf_ros.models.detection_messages import KINDS, Detection, ImageFrame
from torchperf_ros.models.networks import CLASSES
from torchperf_ros.models.options import OptionReader

# m/s: of slower objects the direction is not known well enough to turn their boxes
_TURNED_FROM: Final = 2.0
_SURE_AFTER: Final = 2  # sightings: what one frame alone has seen may be none
_CUT_PX: Final = 2.0  # a box that ends so near to the image's lower edge goes on beyond it
_FORGOTTEN_S: Final = 0.5  # without a detection
_GATE_M, _GATE_SHARE = 2.5, 0.1  # how far from where it is expected: so much, and more with the distance
# m/s^2 that an object may change its velocity with: what brakes hard is to be seen soon
_ACCELERATION: Final = 6.0
_UNKNOWN_SPEED: Final = 10.0  # m/s, one standard deviation of a new object's velocity
_ALONG, _ACROSS, _LEAST_M = (
    0.02,
    0.008,
    0.1,
)  # of a detection: standard deviations as shares of the distance


class GroundCamera:
    """Where what a forward camera sees stands, on a flat road.

    `camera_height_m * focal_px` by pixels below the horizon; ideal pinhole camera, square pixels, the
    horizon level.
    """

    OPTIONS: Final = ("camera_height_m", "horizon")

    def __init__(self, options: dict[str, Any]) -> None:
        """Take those of `OPTIONS`, and `horizontal_fov_deg`, out of options; raises `ConfigError`."""
        names = (*self.OPTIONS, "horizontal_fov_deg")
        reader = OptionReader(
            type(self).__name__, {name: options[name] for name in names if name in options}
        )
        self._height_m = reader.number("camera_height_m", default=1.4, low=0.1, high=10.0)
        self._horizon = reader.number("horizon", default=0.5, low=0.0, high=1.0)
        fov = math.radians(reader.number("horizontal_fov_deg", default=70.0, low=10.0, high=170.0))
        self._focal_per_width = 0.5 / math.tan(fov / 2.0)

    @classmethod
    def rest_of(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Options without those that a camera itself does not know."""
        return {name: value for name, value in options.items() if name not in cls.OPTIONS}

    def place(self, one: Detection, frame: ImageFrame) -> tuple[float, float, float] | None:
        """How far ahead of the camera the near side of a box is, how far left its middle, its width in m.

        None for one that ends above the horizon.
        """
        focal_px = self._focal_per_width * frame.width
        bottom = one.y + one.height / 2.0
        below_px = bottom - self._horizon * frame.height
        if bottom >= frame.height - _CUT_PX:  # it stands nearer than the image shows
            ahead = focal_px * KINDS[CLASSES[one.class_index]].height_m / one.height
        elif below_px > 0.0:
            ahead = focal_px * self._height_m / below_px
        else:
            return None
        return ahead, (frame.width / 2.0 - one.x) * ahead / focal_px, one.width * ahead / focal_px


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
class ObjectTrack:
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
        """State and covariance at a time.

        Constant velocity, white acceleration (Bar-Shalom et al., 2001, 6.3.2).
        """
        dt = at_s - self.seen_s
        move = np.eye(4)
        move[0, 2] = move[1, 3] = dt
        noise = np.zeros((4, 4))
        noise[[0, 1], [0, 1]], noise[[2, 3], [2, 3]] = dt**4 / 4, dt**2
        noise[[0, 1, 2, 3], [2, 3, 0, 1]] = dt**3 / 2
        return move @ self.state, move @ self.covariance @ move.T + _ACCELERATION**2 * noise


class ObjectTracks:
    """Keeps tracks.

    Each sighting goes to the nearest track of its kind, each to one (greedy, the nearest pair first).

    A Kalman filter of constant velocity for each. What a camera sees is far less certain along the line of
    sight than across it, so that a pedestrian's way into the lane is known long before their distance is.
    """

    def __init__(self) -> None:
        self._tracks: list[ObjectTrack] = []
        self._next, self._last_s = 0, -np.inf

    def update(
        self, sightings: Sequence[Sighting], at_s: float, eye: tuple[float, float]
    ) -> list[ObjectTrack]:
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
                track = ObjectTrack(self._next, one, np.array([one.x, one.y, 0.0, 0.0]), covariance, at_s)
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


class CameraDrivingAdapter(CameraAdapter):
    """Objects with velocities in odometry's frame from a forward camera above the vehicle's reference point.

    How far away an object is follows from where its box stands, see `GroundCamera`. Tracks over frames give
    velocities, see `ObjectTracks`; a worker that takes over begins its own.

    Options: those of `CameraAdapter` but for `output`, and
        camera_height_m: above the road, 0.1 to 10; default 1.4.
        horizon: its row as a share of the image's height, 0 to 1; default 0.5.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options; raises `ConfigError` where one is unknown or its value not allowed."""
        super().__init__(GroundCamera.rest_of(options), device)
        self._camera = GroundCamera(options)
        self.inputs = {**self.inputs, "odom": ODOMETRY}
        self.output = MARKER_ARRAY
        self._tracks = ObjectTracks()

    # Its boxes stand on the road, in axes in which the camera's score of an image means nothing.
    score_messages = Adapter.score_messages

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The objects that two frames or more have seen, each with its velocity.

        Raises `BadInput` without odometry.
        """
        if "odom" not in messages:
            raise BadInput("odom has not been received: without it nothing has a place")
        found, frame = self.detections(outputs, messages)
        x, y, yaw, _ = pose_of(messages["odom"].message)
        sightings = [
            sighting for one in found if (sighting := self._place(one, frame, (x, y, yaw))) is not None
        ]
        seen = self._tracks.update(sightings, frame.stamp_ns / NS_PER_S, (x, y))
        objects = [_object(track, yaw) for track in seen if track.sightings >= _SURE_AFTER]
        return objects_message(objects, frame.stamp_ns)

    def _place(
        self, one: Detection, frame: ImageFrame, pose: tuple[float, float, float]
    ) -> Sighting | None:
        if (found := self._camera.place(one, frame)) is None:
            return None
        (ahead, left, width), name = found, CLASSES[one.class_index]
        length = KINDS[name].length_m
        middle = ahead + length / 2.0
        x, y, yaw = pose
        cosine, sine = math.cos(yaw), math.sin(yaw)
        return Sighting(
            name, x + middle * cosine - left * sine, y + middle * sine + left * cosine, length, width
        )


def _object(track: ObjectTrack, yaw: float) -> SeenObject:
    """A track as a message has it: its box lies as it moves, or as the vehicle does."""
    x, y, vx, vy = track.state.tolist()
    turned = math.atan2(vy, vx) if math.hypot(vx, vy) > _TURNED_FROM else yaw
    box = (x, y, turned, vx, vy, track.sighting.length, track.sighting.width)
    return SeenObject(track.sighting.kind, track.number, box)
