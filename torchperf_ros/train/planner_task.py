"""How the reference planner learns to plan what the closed loop's rules would plan.

It learns from drives of the closed loop's scenarios by its rule planner. The rules drive with the truth and
without latency. The planner sees what a camera finds: boxes that are a little too large or too small, and
are missing now and then.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchperf_ros.api.adapter import HELD_OUT, Task
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.models.closed_loop import AHEAD_S, POSES, RANGES_M, STEP_S, Floats, plan_along
from torchperf_ros.models.detection_messages import Detection, MarkerArrays
from torchperf_ros.models.networks import (
    CLASSES,
    EGO_FIELDS,
    HISTORY_FRAMES,
    IMAGE_HEIGHT,
    NEAREST,
    OBJECT_FIELDS,
    PLANNER_WIDTHS,
    WAYPOINTS,
    PlannerNet,
    build_seeded,
    roll_out,
    tier_width,
)
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


# From the plan's last pose to where it should be: farther is a miss, as in Argoverse and nuScenes.
MISS_M: Final = 2.0
_DRIVES, _DRIVES_HELD_OUT = 128, 48  # driven once in each process: 16 and 6 of each scenario
_SHORTENED, _GAP = 0.15, 0.1  # share of the histories that begin later, and that lack a frame
_MIRRORED, _UNMOVED = 0.5, 0.5  # share of them; and of those whose past motion is made that of now
_EARLY_EXIT_WEIGHT: Final = 0.3
_LAST_WEIGHT, _SPEED_WEIGHT, _TURN_WEIGHT = 0.5, 0.3, 3.0  # m; m per m/s; m per rad
_JUDGED_AT_ONCE: Final = 250
_UNTRAINED_HEAD: Final = 0.05
_LEFT: Final = 1  # of an object's fields: what a mirror turns round
_CARD: Final = """\
# The reference planner

Plans three seconds ahead from what the reference detector finds in ten frames at 20 Hz, and from speed and yaw rate.
It has learned by imitation: from drives through the closed loop's scenarios (`torchperf_ros/world/scenarios.py`) by the
rule planner (`plan_along`), which knows the truth and the lane. It knows neither lane nor wanted speed: a bend that is
not yet driven, a lane to return to and a speed to go back to are not in what it sees.

Judged on {judged} frames of {drives} drives of a seed that it was not trained with. `fde` is the mean distance in m
from where the rules would be after 3 s, `ade` that over all poses of the plan, `miss` the share of plans that are more
than {miss:g} m off after 3 s. `fde_1` and `fde_2` are those of the first two steps of an anytime planner. Constant
speed and yaw rate, which is what it corrects: fde {fde:.3f}, ade {ade:.3f}, miss {miss_share:.3f}.
"""

# History [n, 10, 50], mask [n, 10] and ego [n, 2] as `PlannerNet.forward` takes them, and plans [n,
# 30, 4].
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


class PlannerTask(Task):
    name = "planner"
    tiers: Mapping[str, int] = PLANNER_WIDTHS
    steps: Mapping[str, int] = {"full": 1800, "medium": 1700, "fast": 1500}
    batch_size = 64
    rate: Mapping[str, float] = {tier: 0.3 / width for tier, width in PLANNER_WIDTHS.items()}
    judged = 2000
    gradient = 5.0
    higher_is_better = False

    def __init__(self) -> None:
        self._drives: dict[tuple[int | str, int], Examples] = {}

    def network(self, tier: str, width: int | None = None) -> PlannerNet:
        """A network that goes on at nearly constant speed and yaw rate."""
        net = build_seeded(lambda: PlannerNet(width or tier_width(tier, PLANNER_WIDTHS)))
        with torch.no_grad():
            net.head.weight.mul_(_UNTRAINED_HEAD)
        return net.requires_grad_(requires_grad=True).train()

    def batch(self, seed: int | str, number: int, count: int) -> Batch:
        """Frames of any of the seed's drives, some mirrored, with short histories or with gaps in them."""
        draw, drives = random.Random(f"{seed}/{number}"), _DRIVES_HELD_OUT if seed == HELD_OUT else _DRIVES
        drawn = [self._one(draw, self._driven(seed, draw.randrange(drives))) for _ in range(count)]
        history, mask, ego, plans = (torch.stack(part) for part in zip(*drawn, strict=True))
        return history, mask, ego, plans

    def _driven(self, seed: int | str, number: int) -> Examples:
        if (seed, number) not in self._drives:
            self._drives[seed, number] = examples_of(seed, number)
        return self._drives[seed, number]

    @staticmethod
    def _one(draw: random.Random, drive: Examples) -> Batch:
        last = draw.randrange(len(drive.since))
        frames = draw.randint(1, HISTORY_FRAMES) if draw.random() < _SHORTENED else HISTORY_FRAMES
        frames = min(frames, drive.since[last], last + 1)
        history, mask = (
            torch.zeros(HISTORY_FRAMES, drive.features.shape[1]),
            torch.zeros(HISTORY_FRAMES).bool(),
        )
        history[HISTORY_FRAMES - frames :] = drive.features[last + 1 - frames : last + 1]
        mask[HISTORY_FRAMES - frames :] = True
        if draw.random() < _GAP:
            gap = draw.randrange(HISTORY_FRAMES - 1)
            history[gap], mask[gap] = 0.0, False
        ego, plan = drive.ego[last], drive.plans[last]
        if draw.random() < _UNMOVED:  # what it did says too much of what it was going to do, see `drive`
            history[mask, NEAREST * OBJECT_FIELDS :] = drive.features[last, NEAREST * OBJECT_FIELDS :]
        if draw.random() < _MIRRORED:
            ego, plan = ego * torch.tensor([1.0, -1.0]), plan * torch.tensor([1.0, -1.0, -1.0, 1.0])
            history[:, _LEFT : NEAREST * OBJECT_FIELDS : OBJECT_FIELDS] *= -1.0
            history[:, -1] *= -1.0
        return history, mask, ego, plan

    # as `Task` has them
    def loss(self, network: Any, batch: Any, device: torch.device) -> Tensor:  # noqa: ANN401
        """How far off the plan is.

        That of the early exits counts less (deep supervision, Lee et al., 2015).
        """
        *inputs, plans = (part.to(device) for part in batch)
        *early, last = [plan_error(outputs.float(), plans) for outputs in network.steps(*inputs)]
        total: Tensor = last + _EARLY_EXIT_WEIGHT * sum(early)
        return total

    def judge(
        self, call: Callable[..., Any], seed: int | str, count: int, device: torch.device
    ) -> dict[str, float]:
        """Distances in m to where the rules would be, see the card.

        Those of early exits where `call` has `steps`.
        """
        found = []
        for begin in range(0, count, _JUDGED_AT_ONCE):
            *inputs, plans = self.batch(seed, begin, min(_JUDGED_AT_ONCE, count - begin))
            given = [part.to(device) for part in inputs]
            in_steps: Any = getattr(call, "steps", None)
            if in_steps is not None:
                steps = list(in_steps(*given))
            else:  # an engine takes one frame
                frames = (tuple(part[place : place + 1] for part in given) for place in range(len(plans)))
                steps = [torch.cat([call(*frame).clone() for frame in frames])]
            found.append(torch.stack([_distances(outputs.float().cpu(), plans) for outputs in steps]))
        away = torch.cat(found, dim=1)  # [steps, n, 30]
        last = away[-1, :, -1]
        return {
            "fde": last.mean().item(),
            "ade": away[-1].mean().item(),
            "miss": (last > MISS_M).float().mean().item(),
            **{f"fde_{step}": one[:, -1].mean().item() for step, one in enumerate(away[:-1], start=1)},
        }

    def card(self, judged: int) -> str:
        kept = self.judge(_constant, HELD_OUT, judged, torch.device("cpu"))
        return _CARD.format(
            judged=f"{judged:,}",
            drives=_DRIVES_HELD_OUT,
            miss=MISS_M,
            fde=kept["fde"],
            ade=kept["ade"],
            miss_share=kept["miss"],
        )


def _constant(_history: Tensor, _mask: Tensor, ego: Tensor) -> Tensor:
    return roll_out(ego, torch.zeros(len(ego), WAYPOINTS, EGO_FIELDS))


def _distances(outputs: Tensor, plans: Tensor) -> Tensor:
    away: Tensor = torch.linalg.vector_norm(outputs[:, :, :2] - plans[:, :, :2], dim=2)
    return away


def plan_error(outputs: Tensor, plans: Tensor) -> Tensor:
    """Mean distance of the poses, of the last one, and of speeds and headings."""
    squared = (outputs[:, :, :2] - plans[:, :, :2]).square().sum(dim=2)
    away = (squared + 1e-4).sqrt()  # whose slope is finite where there is no distance
    other: Tensor = (outputs[:, :, 2:] - plans[:, :, 2:]).abs().mean(dim=(0, 1))
    total: Tensor = (
        away.mean() + _LAST_WEIGHT * away[:, -1].mean() + _TURN_WEIGHT * other[0] + _SPEED_WEIGHT * other[1]
    )
    return total
