"""How the lidar's network is trained, and what it scores.

Clouds of drawn scenes with what is in them (the closed loop's lidar over boxes that stand and drive
anywhere), targets, loss, and average precision seen from above.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from torchperf_ros.api.adapter import Task
from torchperf_ros.models.closed_loop import Floats
from torchperf_ros.models.networks import (
    AHEAD_M,
    BESIDE_M,
    CELL_M,
    CLASSES,
    GRID_COLUMNS,
    GRID_ROWS,
    PILLAR_WIDTHS,
    CloudBox,
    PillarNet,
    build_seeded,
    spare,
    strongest,
    tier_width,
)
from torchperf_ros.models.point_cloud import Points, at_stamp
from torchperf_ros.train.labelled_scenes import area_under_precision
from torchperf_ros.world.sensors import HEIGHTS_M, Pose, Sweep, sweep

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


_SPREAD, _LEAST_SPREAD = 0.25, 0.5  # of a target's peak by the size of its box; in cells
_WEIGHTS: Final = {"offset": 1.0, "size": 1.0, "yaw": 1.0, "kind": 0.5}
_BEGIN: Final = {"second.weight": 0.0, "2.weight": 0.1}  # the last of a residual block, and of the head
_LEAST_SCORE, _MOST_BOXES = 0.05, 100  # of what is judged
_PUBLISHED_SCORE: Final = 0.5  # from which on a vehicle would get a box
_CARD: Final = """\
# The reference lidar's detector

Finds objects ({classes}) in the clouds of the closed loop's lidar: boxes on flat
ground (`torchperf_ros/world/sensors.py`). It has never seen a real cloud: on a real road what it finds means nothing.

Judged on {judged} clouds of a seed that it was not trained with. `map` is the mean average precision (PASCAL VOC) of
boxes whose centres are within 1 m of those of objects of their class, as in nuScenes, `map_2m` within 2 m, `ap_...`
that of a class within 1 m; objects count from {least} points on. `false_boxes` are those with a score of 0.5 and more,
for each cloud without anybody.
"""


class Batch(NamedTuple):
    """Clouds with their targets.

    Attributes:
        points: [n, 4] of all clouds together; `cloud`: [n], which one each is of.
        heat: [clouds, 96, 96], 1 where a box has its centre, falling off around it.
        cells: [k, 3]: cloud, row and column of each box's centre.
        values: [k, 6]: what `PillarNet.maps` has to say there, offset, log size, sine and cosine of twice
            the yaw.
        kinds: [k], index into `CLASSES`.
    """

    points: Tensor
    cloud: Tensor
    heat: Tensor
    cells: Tensor
    values: Tensor
    kinds: Tensor


class LidarTask(Task):
    name = "lidar"
    tiers: Mapping[str, int] = PILLAR_WIDTHS
    steps: Mapping[str, int] = {"full": 1200, "medium": 1500, "fast": 2000}
    batch_size = 4  # twice as many steps with half of the clouds learn more in the same time
    rate: Mapping[str, float] = {"full": 5e-3, "medium": 8e-3, "fast": 1.2e-2}
    judged = 200
    gradient = 10.0

    def network(self, tier: str, width: int | None = None) -> PillarNet:
        """An untrained network: each residual block begins as its shortcut, and nowhere is a box."""
        network = build_seeded(lambda: PillarNet(width or tier_width(tier, PILLAR_WIDTHS)))
        for name, parameter in network.named_parameters():
            parameter.mul_(_BEGIN.get(".".join(name.split(".")[-2:]), 1.0))
        return network.requires_grad_(requires_grad=True).train()

    def batch(self, seed: int | str, number: int, count: int) -> Batch:
        return batch_of([draw_cloud(seed, number * count + index) for index in range(count)])

    def loss(self, network: Any, batch: Batch, device: torch.device) -> Tensor:  # noqa: ANN401
        """Focal loss of centres, L1 of offset, size and yaw, cross entropy of the class at the centres."""
        points, cloud, heat, cells, values, kinds = (part.to(device) for part in batch)
        maps: Tensor = network.maps(points, cloud, len(heat)).float()
        here = maps[cells[:, 0], :, cells[:, 1], cells[:, 2]]
        many = max(len(cells), 1)
        error = (here[:, 1:7] - values).abs().sum(dim=0) / many
        return (
            focal(maps[:, 0], heat)
            + _WEIGHTS["offset"] * error[:2].sum()
            + _WEIGHTS["size"] * error[2:4].sum()
            + _WEIGHTS["yaw"] * error[4:].sum()
            + _WEIGHTS["kind"] * functional.cross_entropy(here[:, 7:], kinds, reduction="sum") / many
        )

    def judge(
        self, call: Callable[..., Any], seed: int | str, count: int, device: torch.device
    ) -> dict[str, float]:
        """Figures of so many clouds by what a network, or an engine of it, gives for the points of one each.

        `map` is the mean average precision over the classes, of centres within 1 m; `map_2m` within 2 m;
        `ap_...` that of a class within 1 m; `false_boxes` are those with a score of 0.5 and more, for each
        cloud without anybody.
        """

        def found(cloud: LabelledCloud, least: float) -> list[CloudBox]:
            return strongest(
                call(spare(cloud.points.numpy()).to(device))[0].detach().float().cpu().numpy(),
                least,
                _MOST_BOXES,
            )

        clouds = [draw_cloud(seed, number) for number in range(count)]
        boxes, truth = (
            [found(cloud, _LEAST_SCORE) for cloud in clouds],
            [cloud.boxes.numpy() for cloud in clouds],
        )
        empty = [
            draw_cloud(seed, number, empty=True) for number in range(count, count + max(1, count // 4))
        ]
        false = [len(found(cloud, _PUBLISHED_SCORE)) for cloud in empty]
        near, far = (
            [average_precision(boxes, truth, index, most_m) for index in range(len(CLASSES))]
            for most_m in (1.0, 2.0)
        )
        # the mean of the classes that are there
        figures = {
            "map": torch.tensor(near, dtype=torch.float64).nanmean().item(),
            "map_2m": torch.tensor(far, dtype=torch.float64).nanmean().item(),
            "false_boxes": sum(false) / len(false),
        }
        return figures | {f"ap_{name}": value for name, value in zip(CLASSES, near, strict=True)}

    def card(self, judged: int) -> str:
        return _CARD.format(classes=", ".join(CLASSES), judged=judged, least=LEAST_POINTS)


def batch_of(clouds: list[LabelledCloud]) -> Batch:
    lengths = torch.tensor([len(cloud.points) for cloud in clouds])
    numbers = torch.tensor([len(cloud.boxes) for cloud in clouds])
    which = torch.arange(len(clouds))
    x, y, length, width, yaw, kinds = torch.cat([cloud.boxes for cloud in clouds]).unbind(1)
    across, along = (y + BESIDE_M) / CELL_M, x / CELL_M
    row, column, owner = across.floor().long(), along.floor().long(), which.repeat_interleave(numbers)
    spread = (_SPREAD * (length * width).sqrt() / CELL_M).clamp(min=_LEAST_SPREAD)[:, None, None]
    rows, columns = torch.arange(GRID_ROWS)[:, None], torch.arange(GRID_COLUMNS)
    squared = (rows - row[:, None, None]) ** 2 + (columns - column[:, None, None]) ** 2
    peaks = torch.exp(-squared / (2.0 * spread**2))
    heat = torch.zeros(len(clouds), GRID_ROWS, GRID_COLUMNS)
    heat = heat.scatter_reduce(0, owner[:, None, None].expand_as(peaks), peaks, "amax")
    values = torch.stack(
        (along - column, across - row, length.log(), width.log(), (2.0 * yaw).sin(), (2.0 * yaw).cos()),
        dim=1,
    )
    cells = torch.stack((owner, row, column), dim=1)
    points = torch.cat([cloud.points for cloud in clouds])
    return Batch(points, which.repeat_interleave(lengths), heat, cells, values, kinds.long())


def focal(logits: Tensor, heat: Tensor) -> Tensor:
    """CornerNet's focal loss (Law and Deng, 2018), alpha 2, beta 4, per box, of logits [n, rows, columns]."""
    score = torch.sigmoid(logits)
    centres = heat == 1.0
    hit = functional.logsigmoid(logits) * (1.0 - score) ** 2 * centres
    missed = functional.logsigmoid(-logits) * score**2 * (1.0 - heat) ** 4
    return -(hit + missed).sum() / centres.sum().clamp(min=1)


def average_precision(
    found: list[list[CloudBox]], truth: list[NDArray[np.float32]], kind: int, near_m: float
) -> float:
    """See `area_under_precision`, of one class; NaN where no object is of it.

    As in nuScenes (Caesar et al., 2020) a box belongs to the nearest one of its class that no box with a
    higher score has taken, if their centres are so near to each other.

    Args:
        found: boxes of each cloud.
        truth: [k, 6] of each, see `LabelledCloud.boxes`.
        kind: index into `CLASSES`.
        near_m: the most between two centres.
    """
    own = [boxes[boxes[:, 5] == kind] for boxes in truth]
    ranked = sorted(
        (
            (box.score, number, box.x, box.y)
            for number, boxes in enumerate(found)
            for box in boxes
            if box.class_index == kind
        ),
        key=lambda one: -one[0],
    )
    taken, right = [np.zeros(len(boxes), dtype=bool) for boxes in own], []
    for _, number, x, y in ranked:
        away = np.hypot(own[number][:, 0] - x, own[number][:, 1] - y)
        away[taken[number]] = np.inf
        nearest = int(away.argmin()) if len(away) else 0
        is_right = bool(len(away)) and bool(away[nearest] <= near_m)
        if is_right:
            taken[number][nearest] = True
        right.append(is_right)
    return area_under_precision(right, sum(map(len, own)))
