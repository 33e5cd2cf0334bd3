"""How the reference planner learns.

To plan, from what a camera finds, what the closed loop's rules would plan.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from torchperf_ros.api.training_task import HELD_OUT, Task
from torchperf_ros.models.networks import (
    EGO_FIELDS,
    HISTORY_FRAMES,
    NEAREST,
    OBJECT_FIELDS,
    PLANNER_WIDTHS,
    WAYPOINTS,
    PlannerNet,
    build_seeded,
    roll_out,
    tier_width,
)
from torchperf_ros.train.imitated_drives import Examples, examples_of

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
