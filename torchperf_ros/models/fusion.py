"""The reference perception stage for camera and lidar together.

Either may be missing, and it says which.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.camera_driving import GroundCamera
from torchperf_ros.models.closed_loop import ODOMETRY
from torchperf_ros.models.detection_messages import (
    KINDS,
    MARKER_ARRAY,
    Cube,
    CubeMarkers,
    Detection,
    ImageFrame,
)
from torchperf_ros.models.lidar import LidarAdapter
from torchperf_ros.models.networks import CLASSES, IMAGE_HEIGHT, IMAGE_WIDTH, OUTSIDE, SPARE_POINTS
from torchperf_ros.models.options import OptionReader

_BEARING: Final = 0.04  # rad between the two sensors' views of an object, beside its own half width
_NEARER, _FARTHER = 0.5, 2.0  # how far off a camera's distance may be
_DOUBTED: Final = 0.5  # of the score of what the camera alone has seen while the lidar was there
# of the camera's score, for or against what the lidar says; best on scenes of a seed of their own
_HEARD: Final = 0.6
_LEAST_SCORE: Final = 0.25  # of a box that the other sensor may confirm


class FusionNet(nn.Module):
    """Both networks side by side in one program; what is missing is an image of zeros, or no points."""

    def __init__(self, camera: nn.Module, lidar: nn.Module) -> None:
        super().__init__()
        self.camera, self.lidar = camera, lidar

    def forward(self, image: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """What `DetectorNet.forward` gives for the image, and `PillarNet.forward` for the points."""
        return self.camera(image), self.lidar(points)


class FusionAdapter(Adapter):
    """Detects objects by camera and lidar.

    The lidar says where and what, the camera makes it surer or less sure.

    Odometry is the trigger, so that each sensor may be lost: synchronise the others with it, for example
    `sync: ["image slop 30 wait 15", "cloud slop 30 wait 15"]`. With neither the frame is `bad_input`. What
    is published where both see something, see `fused`; what the camera alone sees lies where it stands on
    the road, see `GroundCamera`.

    The camera looks ahead from above the origin of the cloud, from `camera_ahead_m` before it.

    Options:
        camera, lidar: options of `CameraAdapter` and `LidarAdapter`; the camera's also `camera_height_m`, `horizon`.
        camera_ahead_m: -10 to 10; default 0.
        score_threshold: 0 to 1; default 0.5.
        max_detections: 0 to 448; default 50, the strongest.
    """

    tiers: ClassVar[tuple[str, ...]] = CameraAdapter.tiers
    output = MARKER_ARRAY

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options; raises `ConfigError` where one is unknown or its value not allowed."""
        reader = OptionReader(
            type(self).__name__, {k: v for k, v in options.items() if k not in {"camera", "lidar"}}
        )
        self._score_threshold = reader.number("score_threshold", default=0.5, low=0.0, high=1.0)
        self._max_detections = reader.integer("max_detections", default=50, low=0, high=448)
        self._ahead_m = reader.number("camera_ahead_m", default=0.0, low=-10.0, high=10.0)
        reader.finish()
        camera, lidar = (_nested(options, name) for name in ("camera", "lidar"))
        self._view = GroundCamera(camera)
        least = {"score_threshold": min(_LEAST_SCORE, self._score_threshold)}
        self._camera, self._lidar = (
            CameraAdapter({**GroundCamera.rest_of(camera), **least}, device),
            LidarAdapter({**lidar, **least}, device),
        )
        self.inputs = {"odom": ODOMETRY, **self._camera.inputs, "cloud": self._lidar.inputs["cloud"]}
        self._device, self._markers = device, CubeMarkers()

    def build(self, tier: str) -> nn.Module:
        """Both networks of a tier; raises `ConfigError` where there is no such one."""
        return FusionNet(self._camera.build(tier), self._lidar.build(tier)).eval()

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """Those of both."""
        return *self._camera.example_inputs(tier), *self._lidar.example_inputs(tier)

    def example_messages(self) -> Mapping[str, Received]:
        """Those of both; none where the camera has none."""
        seen = self._camera.example_messages()
        return {**self._lidar.example_messages(), **seen} if seen else {}

    def dynamic_dims(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Any number of points."""
        return {1: self._lidar.dynamic_dims()[0]}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """Image and points as their own adapters make them; zeros and no points for what is missing.

        Raises:
            BadInput: both are missing, or one cannot be used.
        """
        if "image" not in messages and "cloud" not in messages:
            raise BadInput("neither image nor cloud is there that fits the odometry's stamp")
        image, points = (
            torch.zeros(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH),
            torch.tensor([OUTSIDE] * SPARE_POINTS),
        )
        if "image" in messages:
            (image,) = self._camera.preprocess(messages)
        if "cloud" in messages:
            (points,) = self._lidar.preprocess(messages)
        return image.to(self._device), points.to(self._device)

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The objects as cubes in the cloud's frame, or in `base_link`, with the trigger's stamp."""
        seen: list[tuple[Detection, tuple[float, float, float]]] = []
        if "image" in messages:
            found, frame = self._camera.detections(outputs[0], messages)
            seen = [(one, place) for one in found if (place := self._place(one, frame)) is not None]
        cubes = self._lidar.cubes(outputs[1]) if "cloud" in messages else None
        best = sorted(fused(seen, cubes), key=lambda cube: -cube.score)[: self._max_detections]
        frame_id = messages["cloud"].message.header.frame_id if "cloud" in messages else "base_link"
        published = [cube for cube in best if cube.score >= self._score_threshold]
        return self._markers.build(published, messages["odom"].stamp_ns, frame_id)

    def _place(self, one: Detection, frame: ImageFrame) -> tuple[float, float, float] | None:
        if (found := self._view.place(one, frame)) is None:
            return None
        ahead, left, width = found
        return ahead + self._ahead_m, left, width


def fused(
    seen: Sequence[tuple[Detection, tuple[float, float, float]]], cubes: Sequence[Cube] | None
) -> list[Cube]:
    """Objects of a camera, with how far ahead their near sides are, how far left, and their widths.

    And of a lidar.

    Each of the camera's, the strongest first, goes to one of the lidar's in that direction and about as far
    away: to one of its own class if there is any, else to the nearest in bearing. The same class makes that
    surer, another one less sure. A lidar that is there (not None) and has not seen it leaves a doubt.
    """
    merged = list(cubes or ())
    left, alone = set(range(len(merged))), 1.0 if cubes is None else _DOUBTED
    for one, (ahead, beside, width) in sorted(seen, key=lambda each: -each[0].score):
        bearing, away = math.atan2(beside, ahead), math.hypot(ahead, beside)
        apart = {
            place: abs(math.atan2(cube.centre[1], cube.centre[0]) - bearing)
            for place in left
            if _may_be(cube := merged[place], bearing, away, width)
        }
        if not apart:
            kind = KINDS[CLASSES[one.class_index]]
            centre = ahead + kind.length_m / 2.0, beside, 0.5 * kind.height_m
            merged.append(
                Cube(one.class_index, alone * one.score, centre, (kind.length_m, width, kind.height_m))
            )
            continue
        best = min(apart, key=lambda place: (merged[place].class_index != one.class_index, apart[place]))
        left.remove(best)
        cube, heard = merged[best], _HEARD * one.score
        agrees = cube.class_index == one.class_index
        merged[best] = cube._replace(
            score=cube.score + heard * (1.0 - cube.score if agrees else -cube.score)
        )
    return merged


def _may_be(cube: Cube, bearing: float, away: float, width: float) -> bool:
    x, y, _ = cube.centre
    far = math.hypot(x, y)
    spread = _BEARING + 0.5 * max(cube.size[1], width) / max(far, 1.0)
    near_m = max(far - 0.5 * cube.size[0], 0.1)
    return abs(math.atan2(y, x) - bearing) < spread and _NEARER * away < near_m < _FARTHER * away


def _nested(options: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = options.get(name, {})
    if not isinstance(found, dict):
        raise ConfigError(
            f"FusionAdapter: option {name!r} is {found!r}; it has to be an object with options"
        )
    if taken := [option for option in ("score_threshold", "output") if option in found]:
        raise ConfigError(
            f"FusionAdapter: option {taken[0]!r} of {name!r} has no effect; it is the fusion's own"
        )
    return found
