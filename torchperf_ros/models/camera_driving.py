"""Perception of the closed loop by camera: the reference detector's boxes, on the road and over time."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import BadInput
from torchperf_ros.model.adapter import Received
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.detection_messages import KINDS, Detection, ImageFrame
from torchperf_ros.models.driving_messages import MARKER_ARRAY, ODOMETRY, SeenObject, objects_message, pose_of
from torchperf_ros.models.networks import CLASSES
from torchperf_ros.models.object_tracks import ObjectTracks, Sighting, Track
from torchperf_ros.models.options import OptionReader

_TURNED_FROM: Final = 2.0  # m/s: of slower objects the direction is not known well enough to turn their boxes
_SURE_AFTER: Final = 2  # sightings: what one frame alone has seen may be none
_CUT_PX: Final = 2.0  # a box that ends so near to the image's lower edge goes on beyond it


class CameraDrivingAdapter(CameraAdapter):
    """Objects with velocities in odometry's frame from a forward camera above the vehicle's reference point.

    How far away an object is follows from where its box stands on a flat road: `camera_height_m * focal_px` by pixels
    below the horizon. Tracks over frames give velocities, see `ObjectTracks`; a worker that takes over begins its own.

    Options: those of `CameraAdapter` but for `output`, and
        camera_height_m: above the road, 0.1 to 10; default 1.4.
        horizon: its row as a share of the image's height, 0 to 1; default 0.5.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options; raises `ConfigError` where one is unknown or its value not allowed."""
        own = {name: value for name, value in options.items() if name in {"camera_height_m", "horizon"}}
        super().__init__({name: value for name, value in options.items() if name not in own}, device)
        reader = OptionReader(type(self).__name__, own)
        self._height_m = reader.number("camera_height_m", default=1.4, low=0.1, high=10.0)
        self._horizon = reader.number("horizon", default=0.5, low=0.0, high=1.0)
        reader.finish()
        self._focal_per_width = 0.5 / math.tan(math.radians(float(options.get("horizontal_fov_deg", 70.0))) / 2.0)
        self.inputs = {**self.inputs, "odom": ODOMETRY}
        self.output = MARKER_ARRAY
        self._tracks = ObjectTracks()

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
        """Where a box stands on the road; None above the horizon."""
        focal_px = self._focal_per_width * frame.width
        name = CLASSES[one.class_index]
        bottom = one.y + one.height / 2.0
        below_px = bottom - self._horizon * frame.height
        if bottom >= frame.height - _CUT_PX:  # it stands nearer than the image shows
            ahead = focal_px * KINDS[name].height_m / one.height
        elif below_px > 0.0:
            ahead = focal_px * self._height_m / below_px
        else:
            return None
        x, y, yaw = pose
        right, width = (one.x - frame.width / 2.0) * ahead / focal_px, one.width * ahead / focal_px
        length = KINDS[name].length_m
        middle = ahead + length / 2.0
        cosine, sine = math.cos(yaw), math.sin(yaw)
        place = x + middle * cosine + right * sine, y + middle * sine - right * cosine
        return Sighting(name, *place, length, width)


def _object(track: Track, yaw: float) -> SeenObject:
    """A track as a message has it: its box lies as it moves, or as the vehicle does."""
    x, y, vx, vy = track.state.tolist()
    turned = math.atan2(vy, vx) if math.hypot(vx, vy) > _TURNED_FROM else yaw
    box = (x, y, turned, vx, vy, track.sighting.length, track.sighting.width)
    return SeenObject(track.sighting.kind, track.number, box)
