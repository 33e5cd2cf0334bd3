"""Clouds of drawn scenes with what is in them.

The closed loop's lidar over boxes that stand and drive anywhere.
"""

import math
import random
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchperf_ros.models.driving_rules import Floats
from torchperf_ros.models.networks import CLASSES
from torchperf_ros.models.pillars import AHEAD_M, BESIDE_M
from torchperf_ros.models.point_cloud import Points, at_stamp
from torchperf_ros.world.lidar import HEIGHTS_M, Pose, Sweep, sweep

# On an object that is labelled; fewer do not show what it is.
LEAST_POINTS: Final = 5

_EMPTY: Final = 0.08  # share of the scenes without anybody
_TRIES: Final = 20  # to find a place that is free
_OWN_M: Final = 4.0  # around the vehicle, free of objects
_SIZES_M: Final = {  # least and most length, least and most width
    "car": (4.0, 5.0, 1.7, 2.0),
    "truck": (7.0, 9.0, 2.4, 2.6),
    "cyclist": (1.6, 1.9, 0.5, 0.7),
    "pedestrian": (0.4, 0.6, 0.4, 0.6),
    "wall": (2.0, 12.0, 0.3, 0.6),
}
_MOST: Final = {"car": 9, "truck": 3, "cyclist": 4, "pedestrian": 5, "wall": 4}
_FASTEST: Final = {"car": 15.0, "truck": 15.0, "cyclist": 6.0, "pedestrian": 1.5, "wall": 0.0}  # m/s
_ALONG: Final = {
    "car": 0.8,
    "truck": 0.8,
    "cyclist": 0.6,
    "pedestrian": 0.0,
    "wall": 0.5,
}  # share, along the road


class LabelledCloud(NamedTuple):
    """One cloud, and its objects.

    Attributes:
        points: [n, 4] float32, as `PillarNet` takes them.
        boxes: [k, 6] float32: x, y, length, width, yaw, index into `CLASSES`, in the vehicle's axes at the
            stamp.
        counts: [k] int64, points on each of them.
        kinds: of everything that was drawn, walls and hidden objects included.
        table: [n, 7] of it: x, y, yaw, vx, vy, length, width.
    """

    points: Tensor
    boxes: Tensor
    counts: Tensor
    kinds: list[str]
    table: Floats


def draw_cloud(seed: int | str, number: int, *, empty: bool = False) -> LabelledCloud:
    """The cloud of this number; `empty`: with walls only."""
    drawn = random.Random(f"{seed}/{number}")
    is_empty = drawn.random() < _EMPTY or empty
    kinds, boxes = _scene(drawn, ("wall",) if is_empty else tuple(_MOST))
    heights_m = np.array([HEIGHTS_M[kind] * drawn.uniform(0.95, 1.1) for kind in kinds])
    reflects = np.array([drawn.uniform(0.05, 0.95) for _ in kinds])
    pose = Pose(0.0, 0.0, 0.0, drawn.uniform(0.0, 20.0), drawn.uniform(-0.3, 0.3))
    table = np.array(boxes).reshape(-1, 7)
    found = sweep(table, heights_m, reflects, pose, np.random.default_rng(drawn.getrandbits(64)))
    counts = np.bincount(found.hit[found.hit >= 0], minlength=len(kinds))
    classes = np.array([CLASSES.index(kind) if kind in CLASSES else -1 for kind in kinds], dtype=np.int64)
    inside = (table[:, 0] >= 0) & (table[:, 0] < AHEAD_M) & (np.abs(table[:, 1]) < BESIDE_M)
    labelled = np.flatnonzero(inside & (counts >= LEAST_POINTS) & (classes >= 0))
    labels = np.column_stack((table[:, [0, 1, 5, 6, 2]], classes))[labelled]
    points = torch.from_numpy(_compensated(found, pose))
    boxes_in_reach = torch.from_numpy(labels.astype(np.float32))
    return LabelledCloud(points, boxes_in_reach, torch.from_numpy(counts[labelled]), kinds, table)


def _compensated(found: Sweep, pose: Pose) -> Points:
    points = np.column_stack([found.points[name] for name in ("x", "y", "z", "intensity")])
    points[:, 3] *= 1.0 / 255.0
    return at_stamp(points, found.points["time"], pose.speed, pose.yaw_rate)


def _scene(drawn: random.Random, who: tuple[str, ...]) -> tuple[list[str], list[tuple[float, ...]]]:
    """Kinds, and x, y, yaw, vx, vy, length, width: no two of them overlap."""
    kinds, boxes = [], list[tuple[float, ...]]()
    taken = [(0.0, 0.0, _OWN_M)]
    road = drawn.choice((0.0, drawn.uniform(-0.3, 0.3)))
    for kind in who:
        for _ in range(drawn.randint(0, _MOST[kind])):
            least_l, most_l, least_w, most_w = _SIZES_M[kind]
            length, width = drawn.uniform(least_l, most_l), drawn.uniform(least_w, most_w)
            along, anyhow = drawn.choice((0.0, math.pi)), drawn.uniform(0.0, math.pi)
            yaw = road + (along if drawn.random() < _ALONG[kind] else anyhow)
            speed = drawn.choice((0.0, drawn.uniform(0.0, _FASTEST[kind])))
            radius = 0.5 * math.hypot(length, width) + 0.2
            for _ in range(_TRIES):
                x, y = (
                    drawn.uniform(-5.0, AHEAD_M),
                    drawn.choice((BESIDE_M, 12.0)) * drawn.uniform(-1.0, 1.0),
                )
                if all(
                    math.hypot(x - other_x, y - other_y) > radius + other
                    for other_x, other_y, other in taken
                ):
                    taken.append((x, y, radius))
                    kinds.append(kind)
                    boxes.append((x, y, yaw, speed * math.cos(yaw), speed * math.sin(yaw), length, width))
                    break
    return kinds, boxes
