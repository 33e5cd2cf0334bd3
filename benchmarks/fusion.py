"""What camera and lidar find together, and what each alone.

Average precision seen from above, on drawn scenes.

Each scene is drawn for both: an image of 640x360, and a sweep of the closed loop's lidar. Judged is what a
vehicle would be told, through `FusionAdapter` and its trained networks: with both, without the image,
without the cloud. Objects in the camera's view count that the lidar has hit once or more; centres within 2
m are found. A cloud of 120,000 points with intensities and times is decoded beside that.
"""

import math
import random
import sys
from typing import Any

import numpy as np
import torch

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.adapter import HELD_OUT, Received
from torchperf_ros.api.messages import decode, empty_message, encode
from torchperf_ros.engines.device import time_interleaved
from torchperf_ros.models.closed_loop import ODOMETRY
from torchperf_ros.models.fusion import FusionAdapter
from torchperf_ros.models.networks import AHEAD_M, CLASSES, MOST_POINTS, CloudBox
from torchperf_ros.models.point_cloud import CLOUD, cloud_message, read_cloud
from torchperf_ros.models.road_scene import (
    CAMERA_HEIGHT_M,
    HORIZON,
    HORIZONTAL_FOV_DEG,
    IMAGE_TYPE,
    RoadScene,
    SceneObject,
)
from torchperf_ros.train.lidar_task import LabelledCloud, average_precision, draw_cloud

_CPU = torch.device("cpu")
_SIZE = 640, 360
_NEAR_M = 2.0
_CASES = {"both": ("image", "cloud"), "camera lost": ("cloud",), "lidar lost": ("image",)}
_STAMP_NS = 1_000_000_000
_TIMES, _DECODE_MS = 60, 3.0
_EPILOG = """\
targets: both find at least as much as the better one alone; 120,000 points are decoded in 3 ms

examples:
  ./run bench fusion
  ./run bench fusion --tier fast --scenes 500 --json fusion.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--tier", default="full", choices=FusionAdapter.tiers, help="default full")
    parser.add_argument("--scenes", type=int, default=200, help="default 200")
    arguments = parser.parse_args()
    report = Report("fusion", arguments)
    view = {
        "horizontal_fov_deg": HORIZONTAL_FOV_DEG,
        "horizon": HORIZON,
        "camera_height_m": CAMERA_HEIGHT_M,
    }
    adapter = FusionAdapter({"camera": view, "score_threshold": 0.05}, _CPU)
    model, scene = adapter.build(arguments.tier), RoadScene(*_SIZE)
    found: dict[str, list[list[CloudBox]]] = {name: [] for name in _CASES}
    truth = []
    for number in range(arguments.scenes):
        cloud = draw_cloud(HELD_OUT, number)
        messages = _messages(scene, cloud, number)
        truth.append(_seen(cloud))
        for name, topics in _CASES.items():
            given = {topic: messages[topic] for topic in ("odom", *topics)}
            with torch.inference_mode():
                array: Any = adapter.postprocess(model(*adapter.preprocess(given)), given)
            found[name].append([box for box in _boxes(array) if _in_view(box.x - box.length / 2, box.y)])
        if number % 50 == 49:
            say(f"{number + 1} of {arguments.scenes} scenes")
    figures = {}
    for name, boxes in found.items():
        each = {kind: average_precision(boxes, truth, index, _NEAR_M) for index, kind in enumerate(CLASSES)}
        figures[name] = {"map": float(np.nanmean(list(each.values()))), **each}
    report.table(
        f"{arguments.scenes} scenes, tier {arguments.tier}, centres within {_NEAR_M:g} m",
        ("sensors", "mAP", *CLASSES),
        [[name, *own.values()] for name, own in figures.items()],
    )
    alone = max(figures[name]["map"] for name in ("camera lost", "lidar lost"))
    decode_ms = _decode_ms()
    report.finish(
        figures | {"decode_ms": decode_ms},
        [
            Target("mAP of both less that of the better one", figures["both"]["map"] - alone, ">=", 0),
            Target("120,000 points decoded, ms (p50)", decode_ms["p50"], "<=", _DECODE_MS),
        ],
    )
    return 0


def _decode_ms() -> dict[str, float]:
    """How long a message of as many points as the network takes is on its way to an array."""
    drawn = np.random.default_rng(1)
    fields = [*((name, "<f4") for name in ("x", "y", "z", "intensity")), ("ring", "<u2"), ("t", "<u4")]
    table = np.zeros(MOST_POINTS, fields)
    for name, low, high in (
        ("x", 1, 76),
        ("y", -38, 38),
        ("z", -1, 2),
        ("intensity", 0, 255),
        ("t", 0, 1e8),
    ):
        table[name] = drawn.uniform(low, high, MOST_POINTS)
    data = bytes(encode(cloud_message(table, _STAMP_NS, "base_link"), CLOUD))
    calls = {"read": lambda: read_cloud(decode(data, CLOUD), MOST_POINTS)}
    return distribution(
        time_interleaved(calls, _CPU, seconds=0.0, rounds=(_TIMES, _TIMES), inner=1)["read"].times_ms
    )


def _seen(cloud: LabelledCloud) -> Any:
    """Those whose near side the camera sees, and a point of the lidar; rows as of `LabelledCloud.boxes`."""
    points = cloud.points.numpy()[:, :2]
    rows = []
    for kind, (x, y, yaw, _, _, length, width) in zip(cloud.kinds, cloud.table.tolist(), strict=True):
        if kind not in CLASSES or not _in_view(x - length / 2, y) or x >= AHEAD_M:
            continue
        away = (points - (x, y)) @ np.array(
            [[math.cos(yaw), -math.sin(yaw)], [math.sin(yaw), math.cos(yaw)]]
        )
        inside = (np.abs(away[:, 0]) < length / 2 + 0.1) & (np.abs(away[:, 1]) < width / 2 + 0.1)
        if (inside & (cloud.points.numpy()[:, 2] > 0.1)).any():  # the ground beneath it is none of it
            rows.append((x, y, length, width, yaw, CLASSES.index(kind)))
    return np.array(rows).reshape(-1, 6)


def _in_view(ahead: float, left: float) -> bool:
    """Whether a camera sees it; what is found beside its view is neither right nor wrong."""
    return ahead > 1.0 and abs(left) < ahead * math.tan(math.radians(HORIZONTAL_FOV_DEG) / 2)


def _messages(scene: RoadScene, cloud: LabelledCloud, number: int) -> dict[str, Received]:
    paint, objects = random.Random(number), []
    for kind, (x, y, _, _, _, length, _) in zip(cloud.kinds, cloud.table.tolist(), strict=True):
        rgb = paint.randint(10, 245), paint.randint(10, 245), paint.randint(10, 245)
        if x - length / 2 > 1.0:
            objects.append(SceneObject(x - length / 2, -y, rgb, kind))
    pixels = scene.draw_objects(paint.uniform(0.0, 100.0), sorted(objects, key=lambda one: -one.ahead_m))
    points = cloud.points.numpy()
    table = np.zeros(len(points), [(name, "<f4") for name in ("x", "y", "z", "intensity")])
    for column, name in enumerate(("x", "y", "z", "intensity")):
        table[name] = points[:, column] * (255.0 if name == "intensity" else 1.0)
    found = {
        "image": decode(scene.pixels_cdr(pixels), IMAGE_TYPE),
        "cloud": cloud_message(table, _STAMP_NS, "base_link"),
        "odom": empty_message(ODOMETRY),
    }
    return {topic: Received(message, _STAMP_NS, 0.0) for topic, message in found.items()}


def _boxes(array: Any) -> list[CloudBox]:
    return [
        CloudBox(
            CLASSES.index(m.ns), m.color.a, m.pose.position.x, m.pose.position.y, m.scale.x, m.scale.y, 0.0
        )
        for m in array.markers[1:]
    ]


if __name__ == "__main__":
    sys.exit(main())
