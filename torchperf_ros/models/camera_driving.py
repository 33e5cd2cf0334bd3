"""Perception of the closed loop by camera: the reference detector's boxes, on the road and over time."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import BadInput
from torchperf_ros.model.adapter import Adapter, Received
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.detection_messages import KINDS, Detection, ImageFrame
from torchperf_ros.models.driving_messages import MARKER_ARRAY, ODOMETRY, SeenObject, objects_message, pose_of
from torchperf_ros.models.networks import CLASSES
from torchperf_ros.models.object_tracks import ObjectTracks, Sighting, Track
from torchperf_ros.models.options import OptionReader

_TURNED_FROM: Final = 2.0  # m/s: of slower objects the direction is not known well enough to turn their boxes
_SURE_AFTER: Final = 2  # sightings: what one frame alone has seen may be none
_CUT_PX: Final = 2.0  # a box that ends so near to the image's lower edge goes on beyond it


class GroundCamera:
    """Where what a forward camera sees stands, on a flat road.

    `camera_height_m * focal_px` by pixels below the horizon; ideal pinhole camera, square pixels, the horizon level.
    """

    OPTIONS: Final = ("camera_height_m", "horizon")

    def __init__(self, options: dict[str, Any]) -> None:
        """Take those of `OPTIONS`, and `horizontal_fov_deg`, out of options; raises `ConfigError`."""
        names = (*self.OPTIONS, "horizontal_fov_deg")
        reader = OptionReader(type(self).__name__, {name: options[name] for name in names if name in options})
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


class CameraDrivingAdapter(CameraAdapter):
    """Objects with velocities in odometry's frame from a forward camera above the vehicle's reference point.

    How far away an object is follows from where its box stands, see `GroundCamera`. Tracks over frames give velocities,
    see `ObjectTracks`; a worker that takes over begins its own.

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
        """The objects that two frames or more have seen, each with its velocity; raises `BadInput` without odometry."""
        if "odom" not in messages:
            raise BadInput("odom has not been received: without it nothing has a place")
        found, frame = self.detections(outputs, messages)
        x, y, yaw, _ = pose_of(messages["odom"].message)
        sightings = [sighting for one in found if (sighting := self._place(one, frame, (x, y, yaw))) is not None]
        seen = self._tracks.update(sightings, frame.stamp_ns / NS_PER_S, (x, y))
        objects = [_object(track, yaw) for track in seen if track.sightings >= _SURE_AFTER]
        return objects_message(objects, frame.stamp_ns)

    def _place(self, one: Detection, frame: ImageFrame, pose: tuple[float, float, float]) -> Sighting | None:
        """Where a box stands on the road, in odometry's frame."""
        if (found := self._camera.place(one, frame)) is None:
            return None
        (ahead, left, width), name = found, CLASSES[one.class_index]
        length = KINDS[name].length_m
        middle = ahead + length / 2.0
        x, y, yaw = pose
        cosine, sine = math.cos(yaw), math.sin(yaw)
        return Sighting(name, x + middle * cosine - left * sine, y + middle * sine + left * cosine, length, width)


def _object(track: Track, yaw: float) -> SeenObject:
    """A track as a message has it: its box lies as it moves, or as the vehicle does."""
    x, y, vx, vy = track.state.tolist()
    turned = math.atan2(vy, vx) if math.hypot(vx, vy) > _TURNED_FROM else yaw
    box = (x, y, turned, vx, vy, track.sighting.length, track.sighting.width)
    return SeenObject(track.sighting.kind, track.number, box)
