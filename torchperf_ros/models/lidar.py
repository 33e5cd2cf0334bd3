"""The reference perception stage for a lidar: a point cloud in, boxes around objects out."""

import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from torchperf_ros.api.adapter import Adapter, Received, open_task
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import empty_message
from torchperf_ros.models.closed_loop import ODOMETRY
from torchperf_ros.models.detection_messages import KINDS, MARKER_ARRAY, Cube, CubeMarkers
from torchperf_ros.models.networks import (
    AHEAD_M,
    BESIDE_M,
    CLASSES,
    LIDAR_WEIGHTS,
    MOST_POINTS,
    PILLAR_WIDTHS,
    SPARE_POINTS,
    CloudBox,
    PillarNet,
    build_trained,
    spare,
    strongest,
    tier_width,
)
from torchperf_ros.models.options import OptionReader
from torchperf_ros.models.planner import read_ego
from torchperf_ros.models.point_cloud import CLOUD, Cloud, Points, at_stamp, cloud_message, read_cloud

# around the grid: points come so far in as the vehicle moves and turns during a sweep
_MARGIN_M: Final = 8.0
_BOUNDS: Final = (-_MARGIN_M, AHEAD_M + _MARGIN_M, -BESIDE_M - _MARGIN_M, BESIDE_M + _MARGIN_M)
_TELL_EVERY_S: Final = 10.0
_MS: Final = 1_000_000  # ns


class LidarAdapter(Adapter):
    """Detects objects in the points of one lidar, see `PillarNet`; z is up, and x ahead.

    Where points have times (`read_cloud` says which are understood) and there is odometry, they are moved
    to where they would be had all been measured at the cloud's stamp. What is lost on the way is a line in
    the node's log, at most every 10 s for each reason: points beyond the most that the network takes, times
    of another clock, a cloud without any return, times without a recent odometry.

    Options:
        max_detections: 0 to 448; default 50, the strongest.
        score_threshold: 0 to 1; default 0.5.
        height_m: of the cloud's origin above the ground, -10 to 10; default 0, as in `base_link`.
        intensity_max: the intensity that counts as 1, 0.001 to 1000000; default 255.
        max_odom_lag_ms: odometry whose stamp is further from the cloud's moves no points, 1 to 60000;
            default 500.
        weights: file that `torchperf train` has written; default the one that ships.
    """

    tiers: ClassVar[tuple[str, ...]] = tuple(PILLAR_WIDTHS)
    inputs = {"cloud": CLOUD, "odom": ODOMETRY}
    output = MARKER_ARRAY

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options, see the class.

        Raises `ConfigError` where one is unknown or its value not allowed.
        """
        reader = OptionReader(type(self).__name__, options)
        self._max_detections = reader.integer("max_detections", default=50, low=0, high=448)
        self._score_threshold = reader.number("score_threshold", default=0.5, low=0.0, high=1.0)
        self._height_m = reader.number("height_m", default=0.0, low=-10.0, high=10.0)
        self._intensity_max = reader.number("intensity_max", default=255.0, low=0.001, high=1e6)
        self._max_odom_lag_ms = reader.integer("max_odom_lag_ms", default=500, low=1, high=60_000)
        self._weights = Path(reader.text("weights", default=str(LIDAR_WEIGHTS)))
        reader.finish()
        self._device, self._markers = device, CubeMarkers()
        self._told_s: dict[str, float] = {}
        # Points that were left out so far because a cloud had too many.
        self.clipped = 0

    def build(self, tier: str) -> torch.nn.Module:
        """The network of a tier, `full`, `medium` or `fast`; a `ConfigError` where there is no such one."""
        width = tier_width(tier, PILLAR_WIDTHS)
        return build_trained(lambda: PillarNet(width), tier, self._weights).to(self._device)

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """The points of `example_messages`, for every tier."""
        return self.preprocess(self.example_messages())

    def example_messages(self) -> Mapping[str, Received]:
        """Flat ground and a wall as 32 rings see them, and odometry at 10 m/s."""
        points = _example_points()
        record = np.dtype([(name, "<f4") for name in ("x", "y", "z", "intensity", "time")])
        table = np.zeros(len(points), record)
        for column, name in enumerate(("x", "y", "z", "intensity")):
            table[name] = points[:, column]
        odometry = empty_message(ODOMETRY)
        odometry.twist.twist.linear.x = 10.0
        cloud = cloud_message(table, 0, "base_link")
        return {"cloud": Received(cloud, 0, math.nan), "odom": Received(odometry, 0, math.nan)}

    def dynamic_dims(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Any number of points."""
        return {0: {0: (SPARE_POINTS, MOST_POINTS + SPARE_POINTS)}}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """The points ahead, [n + 2, 4] float, see `PillarNet.forward`; the first two stand for none.

        Raises:
            BadInput: cloud or odometry cannot be used; the message says which field is wrong, and its
                value.
        """
        cloud = read_cloud(messages["cloud"].message, MOST_POINTS, self._intensity_max, _BOUNDS)
        self._tell_losses(cloud)
        points = self._compensated(cloud, messages)
        points[:, 2] += self._height_m
        return (spare(points).to(self._device),)

    def training_task(self, log: Any) -> Any:  # noqa: ANN401 - both are of `train`, which lies above this
        """`LidarTask`; a `ConfigError` where there is a log, whose labels are boxes in images."""
        if log is not None:
            raise ConfigError("lidar: it learns from drawn clouds, not from a labelled log")
        return open_task("torchperf_ros.train.lidar_task:LidarTask")

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The strongest boxes above the threshold, standing on the ground, with the cloud's stamp and frame.

        `outputs` are [1, 9216, 11], see `PillarNet.forward`; `messages` those that were given to
        `preprocess`.
        """
        cloud = messages["cloud"]
        return self._markers.build(self.cubes(outputs), cloud.stamp_ns, cloud.message.header.frame_id)

    def cubes(self, outputs: Tensor) -> list[Cube]:
        """The strongest boxes above the threshold."""
        boxes = strongest(outputs[0].float().cpu().numpy(), self._score_threshold, self._max_detections)
        return list(map(self._cube, boxes))

    def _cube(self, box: CloudBox) -> Cube:
        height_m = KINDS[CLASSES[box.class_index]].height_m  # seen from above nothing says how tall it is
        centre = box.x, box.y, 0.5 * height_m - self._height_m
        return Cube(box.class_index, box.score, centre, (box.length, box.width, height_m), box.yaw)

    def _compensated(self, cloud: Cloud, messages: Mapping[str, Received]) -> Points:
        odom, stamp_ns = messages.get("odom"), messages["cloud"].stamp_ns
        if cloud.times_s is None:
            return cloud.points
        lag_ms = 0.0
        if odom is not None and stamp_ns > 0 and odom.stamp_ns > 0:
            lag_ms = abs(stamp_ns - odom.stamp_ns) / _MS
        if odom is None or lag_ms > self._max_odom_lag_ms:
            why = "there is no odometry" if odom is None else f"odometry is {lag_ms:.0f} ms away"
            self._tell("odom", f"points are not moved to the cloud's stamp: {why}")
            return cloud.points
        ego = read_ego(odom.message)
        return at_stamp(cloud.points, cloud.times_s, ego.speed, ego.yaw_rate)

    def _tell_losses(self, cloud: Cloud) -> None:
        if cloud.clipped:
            self.clipped += cloud.clipped
            found = len(cloud.points) + cloud.clipped
            text = (
                f"of {found} points ahead {cloud.clipped} were left out, evenly: the network takes"
                f" {MOST_POINTS}"
            )
            self._tell("clipped", f"{text}; {self.clipped} so far")
        if cloud.other_clock_s:
            text = f"the times of the points are up to {cloud.other_clock_s:.4g} s from the cloud's stamp"
            self._tell("clock", f"{text}: they are of another clock, and points stay where they are")
        if cloud.empty and not len(cloud.points) and not cloud.beyond:
            self._tell(
                "blind", f"none of the cloud's {cloud.empty} points is a return: the lidar sees nothing"
            )

    def _tell(self, reason: str, text: str) -> None:
        """A line on stderr, which the node logs with the worker's number, unless one came lately."""
        now_s = time.monotonic()
        if now_s - self._told_s.get(reason, -math.inf) >= _TELL_EVERY_S:
            self._told_s[reason] = now_s
            print(f"cloud: {text}", file=sys.stderr, flush=True)


def _example_points() -> Points:
    slopes = np.tan(np.radians(np.linspace(-16.0, 6.0, 32)))
    angles = np.radians(np.linspace(-100.0, 100.0, 801))
    away = np.where(slopes < 0.0, np.minimum(-1.9 / np.minimum(slopes, -1e-3), 100.0), 30.0)
    x, y = away[:, None] * np.cos(angles), away[:, None] * np.sin(angles)
    z = np.broadcast_to((1.9 + away * slopes)[:, None], x.shape)
    return np.stack((x, y, z, np.full_like(x, 0.2)), axis=-1).reshape(-1, 4).astype(np.float32)
