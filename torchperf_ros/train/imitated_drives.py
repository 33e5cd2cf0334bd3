"""Drives of the closed loop's scenarios by its rule planner, as a camera saw them.

What the planner learns from.

The rules drive with the truth and without latency. The planner is to learn what they plan, from what a
camera finds: boxes that are a little too large or too small, and are missing now and then.
"""

import math
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.models.detection_messages import Detection, MarkerArrays
from torchperf_ros.models.driving_rules import AHEAD_S, POSES, RANGES_M, STEP_S, Floats, plan_along
from torchperf_ros.models.networks import CLASSES, IMAGE_HEIGHT
from torchperf_ros.models.planner import frame_features, seen_by_camera
from torchperf_ros.models.road_scene import EXTENTS, HEIGHT, WIDTH, point_px
from torchperf_ros.world.scenarios import SCENARIOS, draw_scenario
from torchperf_ros.world.sensors import scan
from torchperf_ros.world.vehicles import Vehicle
from torchperf_ros.world.world import World

# Between two frames.
PERIOD_NS: Final = 50 * NS_PER_MS
_TIMES_S: Final[Floats] = np.arange(POSES, dtype=np.float64) * STEP_S
_TIER: Final = "full"  # of the rules
_STANDS, _STANDING_FRAMES = 0.1, 20  # m/s; a drive ends when it has stood for so many frames
_PUSHED_AT_START, _PUSHED = 0.5, 0.01  # share of the drives, and of the frames
_BLIND, _BLIND_FRAMES = 0.015, 20  # share of the frames in which the driver goes blind, and for how many
_ASIDE_M, _TURNED, _SPEEDS = 0.4, 0.02, (0.75, 1.1)
_FOV_DEG: Final = (63.0, 72.0)  # the drawn camera has 65.2, and `CameraAdapter` takes it for 70 by default
_NEAREST_M: Final = 1.0
_LEAST_PX, _SURE_PX = (
    5.0,
    10.0,
)  # height of a box in the detector's image: nothing is found below, everything above
_LEAST_SHARE: Final = 0.3  # of its width that is in the image
_MISSED: Final = 0.02
_RELATIVE, _PX = (
    0.015,
    0.2,
)  # standard deviation of a box's height: a share of it, and pixels of the detector's image
_BY_FRAME, _SCORES = 0.7, (0.55, 0.95)


class Tick(NamedTuple):
    """One frame of a drive.

    Attributes:
        at_ns: since the drive began.
        seen: what the camera finds.
        fov_deg: the width of view that it is taken to have.
        vehicle: x, y, yaw, speed and yaw rate, m, rad, s.
        plan: of the rules, [31, 4], see `plan_along`, for what can be seen in the image.
        since: frames since the vehicle was pushed aside, this one included: as many are known.
    """

    at_ns: int
    seen: list[Detection]
    fov_deg: float
    vehicle: tuple[float, float, float, float, float]
    plan: Floats
    since: int


class Examples(NamedTuple):
    """Those of one drive, a row for each frame.

    Features [n, 50], motion [n, 2], plans [n, 30, 4], `Tick.since`.
    """

    features: Tensor
    ego: Tensor
    plans: Tensor
    since: list[int]


def examples_of(seed: int | str, number: int) -> Examples:
    """What is to be learned from a drive.

    For each frame what `PlannerAdapter` makes of it, and the plan.
    """
    ticks = [tick for tick in drive(seed, number) if tick.vehicle[3] > _STANDS]
    features, camera = [], MarkerArrays(ticks[0].fov_deg)
    for tick in ticks:
        boxes = (seen_by_camera(*camera.box_m(one, WIDTH, HEIGHT), one.score) for one in tick.seen)
        features.append(frame_features(boxes, *tick.vehicle[3:]))
    return Examples(
        torch.tensor(features, dtype=torch.float32),
        torch.tensor([tick.vehicle[3:] for tick in ticks], dtype=torch.float32),
        torch.tensor(np.array([relative(tick.plan, tick.vehicle) for tick in ticks]), dtype=torch.float32),
        [tick.since for tick in ticks],
    )


def relative(plan: Floats, vehicle: Sequence[float]) -> Floats:
    """The poses of a plan after its first, [30, 4], as seen from the vehicle, as in `PlannerNet`."""
    x, y, yaw = vehicle[:3]
    cosine, sine = math.cos(yaw), math.sin(yaw)
    east, north = plan[1:, 0] - x, plan[1:, 1] - y
    turned = (plan[1:, 2] - yaw + math.pi) % (2.0 * math.pi) - math.pi
    return np.stack(
        (east * cosine + north * sine, north * cosine - east * sine, turned, plan[1:, 3]), axis=1
    )


def drive(seed: int | str, number: int) -> Iterator[Tick]:
    """A drive by the rules through a scenario, pushed now and then, so that it has to recover.

    And blind now and then: it then drives on where the plan to be learned brakes. Otherwise how it drove
    just before would say what the plan is, and a planner that copies its own motion learns nothing of what
    is ahead (de Haan et al., "Causal Confusion in Imitation Learning", 2019).
    """
    draw = random.Random(f"{seed}/drive {number}")
    scenario = draw_scenario(SCENARIOS[number % len(SCENARIOS)], draw.getrandbits(24))
    world, camera, fov_deg = World(scenario), ImitatedCamera(draw), draw.uniform(*_FOV_DEG)
    stamp_ns, since, stood, blind = world.start_ns, 0, 0, 0
    while not world.over and stood < _STANDING_FRAMES:
        world.advance(stamp_ns)
        if draw.random() < (_PUSHED if stamp_ns > world.start_ns else _PUSHED_AT_START):
            _push(world.vehicle, draw)
            since = 0
        since, vehicle, boxes = since + 1, world.vehicle, world.boxes
        ego = vehicle.x, vehicle.y, vehicle.yaw, vehicle.speed
        _, hit = scan(boxes, vehicle.x, vehicle.y, vehicle.yaw)
        in_sight = [
            index for index in sorted(set(hit.tolist()) - {-1}) if world.bodies[index].kind in CLASSES
        ]
        near = [index for index in in_sight if math.dist(boxes[index, :2], ego[:2]) <= RANGES_M[_TIER]]
        visible, seen = camera.look(world, in_sight)
        blind = _BLIND_FRAMES if draw.random() < _BLIND else max(0, blind - 1)
        heeded = [] if blind else near
        driven = plan_along(scenario.lane, ego, boxes[heeded], scenario.speed, AHEAD_S[_TIER])
        plan = driven
        if visible != heeded:
            plan = plan_along(scenario.lane, ego, boxes[visible], scenario.speed, AHEAD_S[_TIER])
        yield Tick(stamp_ns - world.start_ns, seen, fov_deg, (*ego, vehicle.yaw_rate), plan, since)
        vehicle.follow(driven[:, :2], world.now_s + _TIMES_S)
        stood = stood + 1 if vehicle.speed < _STANDS else 0
        stamp_ns += PERIOD_NS


def _push(vehicle: Vehicle, draw: random.Random) -> None:
    aside_m = draw.gauss(0.0, _ASIDE_M)
    vehicle.x -= aside_m * math.sin(vehicle.yaw)
    vehicle.y += aside_m * math.cos(vehicle.yaw)
    vehicle.yaw += draw.gauss(0.0, _TURNED)
    vehicle.speed *= draw.uniform(*_SPEEDS)


class ImitatedCamera:
    """What the reference detector would find in images of the drawn road.

    Each object has an error of its own, too.
    """

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._errors = draw, dict[int, float]()

    def look(self, world: World, in_sight: Sequence[int]) -> tuple[list[int], list[Detection]]:
        """Which bodies can be seen in the image, and what is found of them."""
        visible, found, draw = [], [], self._draw
        for index in in_sight:
            kind = world.bodies[index].kind
            sides = self._sides_px(world.vehicle, world.boxes[index], kind)
            if sides is None:
                continue
            left, top, right, bottom = sides
            small_px = (bottom - top) * (IMAGE_HEIGHT / HEIGHT)
            shown = min(right, WIDTH) - max(left, 0.0)
            if small_px < _LEAST_PX or shown < _LEAST_SHARE * (right - left):
                continue
            visible.append(index)
            sure = min(1.0, (small_px - _LEAST_PX) / (_SURE_PX - _LEAST_PX))
            own = self._errors.setdefault(index, draw.gauss(0.0, 1.0))
            error = (own + _BY_FRAME * draw.gauss(0.0, 1.0)) * (_RELATIVE + _PX / small_px)
            score = draw.uniform(_SCORES[0], _SCORES[0] + sure * (_SCORES[1] - _SCORES[0]))
            if draw.random() < (1.0 - _MISSED) * (0.5 + 0.5 * sure):
                tall, low = max(1.0, (min(bottom, HEIGHT) - top) * (1.0 + error)), min(bottom, HEIGHT)
                middle = 0.5 * (max(left, 0.0) + min(right, WIDTH)) + draw.gauss(0.0, 1.0)
                wide = shown * (1.0 + error)
                found.append(Detection(CLASSES.index(kind), score, middle, low - 0.5 * tall, wide, tall))
        return visible, found

    @staticmethod
    def _sides_px(vehicle: Vehicle, box: Floats, kind: str) -> tuple[float, float, float, float] | None:
        """Left, top, right and bottom in the image, None of what is not before the camera."""
        x, y, yaw, _, _, length, width = box.tolist()
        away = complex(x - vehicle.x, y - vehicle.y) * complex(
            math.cos(vehicle.yaw), -math.sin(vehicle.yaw)
        )
        turn = complex(math.cos(yaw - vehicle.yaw), math.sin(yaw - vehicle.yaw))
        corners = [away + complex(a * length, b * width) * turn for a in (-0.5, 0.5) for b in (-0.5, 0.5)]
        nearest = min(corner.real for corner in corners)
        if nearest < _NEAREST_M:
            return None
        *_, low, high = EXTENTS[kind]
        columns = [point_px(corner.real, -corner.imag, 0.0)[0] for corner in corners]
        return min(columns), point_px(nearest, 0.0, high)[1], max(columns), point_px(nearest, 0.0, low)[1]
