"""Stages of a closed loop without trained weights.

Perception that is given the truth, and a planner by rules.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.models.closed_loop import (
    AHEAD_S,
    MARKER_ARRAY,
    OBJECT_FIELDS,
    ODOMETRY,
    PATH,
    POSES,
    RANGES_M,
    SCAN,
    Blindness,
    Centreline,
    objects_of,
    path_bytes,
    plan_along,
    pose_of,
    route_of,
    without_distant,
)
from torchperf_ros.models.options import OptionReader

_MOST_OBJECTS: Final = 64
_MOST_POINTS: Final = 10_000
_NS: Final = 1e9


class _RuleAdapter(Adapter):
    """An adapter without weights, whose tiers differ in one number."""

    values: ClassVar[Mapping[str, float]]
    rules: ClassVar[type[nn.Module]]

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options, see the class.

        Raises `ConfigError` where an option is unknown or its value not allowed.
        """
        reader = OptionReader(type(self).__name__, options)
        self._blind = Blindness(reader.number("blind", default=0.0, low=0.0, high=1.0))
        reader.finish()

    def build(self, tier: str) -> nn.Module:
        """The rules of a tier; raises `ConfigError` where there is no such tier."""
        if tier not in self.values:
            raise ConfigError(f"tier {tier!r} does not exist; allowed: {', '.join(self.values)}")
        return self.rules(self.values[tier]).eval()

    def _need(self, messages: Mapping[str, Received]) -> None:
        if missing := [topic for topic in self.inputs if topic not in messages]:
            raise BadInput(f"{missing[0]} has not been received")


class _Constant(nn.Module):
    """Passes its input on, with a number of its own: all that tells one tier of a rule from another."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("value", torch.tensor([value]))
        self.value: Tensor

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return given, self.value


class OracleAdapter(_RuleAdapter):
    """Perception that finds every object in sight.

    It is given the truth, and costs what the clock says that it costs.

    The scan is the trigger, as with a perception of its own; `objects_in_sight` says what is to be seen in
    it. Tiers differ in how far they see, see `RANGES_M`.

    Options:
        blind: share of the seconds in which it finds nothing, 0 to 1, to test what does not rely on it;
            default 0.
    """

    tiers: ClassVar[tuple[str, ...]] = tuple(RANGES_M)
    values: ClassVar[Mapping[str, float]] = RANGES_M
    inputs = {"scan": SCAN, "objects_in_sight": MARKER_ARRAY, "odom": ODOMETRY}
    output = MARKER_ARRAY
    rules = _Constant

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """No object."""
        return (torch.zeros(2, dtype=torch.float64),)

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """Where the vehicle is, x and y [2]; raises `BadInput` where there is no odometry, or no truth."""
        self._need(messages)
        x, y, _, _ = pose_of(messages["odom"].message)
        return (torch.tensor([x, y], dtype=torch.float64),)

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The markers of what is in range."""
        (x, y), range_m = outputs[0].tolist(), float(outputs[1])
        if self._blind.at(messages["scan"].stamp_ns):
            range_m = -1.0
        return without_distant(messages["objects_in_sight"].message, x, y, range_m)


class _Rules(nn.Module):
    """`plan_along` where a network would be."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__()
        self._ahead_s = ahead_s

    def forward(self, ego: Tensor, objects: Tensor, lane: Tensor) -> Tensor:
        x, y, yaw, speed, wanted = ego.tolist()
        plan = plan_along(
            Centreline(lane.numpy()), (x, y, yaw, speed), objects.numpy(), wanted, self._ahead_s
        )
        return torch.from_numpy(plan).view(POSES, 4)


class RulePlannerAdapter(_RuleAdapter):
    """Keeps the lane at a wanted speed, and brakes for what is in it or will be: see `plan_along`.

    Tiers differ in how far ahead they foresee objects, see `AHEAD_S`.

    `route` says along which lane, and how fast at most: points along its middle in odometry's frame, a few
    metres apart where it turns; z of the first is the speed in m/s.

    Options:
        blind: share of the seconds in which the plan takes no object into account, 0 to 1, to test what
            checks plans; default 0. It follows the frame: whoever runs it is blind.
    """

    tiers: ClassVar[tuple[str, ...]] = tuple(AHEAD_S)
    values: ClassVar[Mapping[str, float]] = AHEAD_S
    inputs = {"detections": MARKER_ARRAY, "odom": ODOMETRY, "route": PATH}
    output = PATH
    rules = _Rules

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """15 m/s ahead along a straight lane, and nothing there."""
        ego, lane = [0.0, 0.0, 0.0, 15.0, 15.0], [[0.0, 0.0], [100.0, 0.0]]
        objects = torch.zeros(0, OBJECT_FIELDS, dtype=torch.float64)
        return torch.tensor(ego, dtype=torch.float64), objects, torch.tensor(lane, dtype=torch.float64)

    def dynamic_dims(self) -> dict[int, dict[int, tuple[int, int]]]:
        """Any number of objects, and of points of the lane."""
        return {1: {0: (0, _MOST_OBJECTS)}, 2: {0: (2, _MOST_POINTS)}}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """The vehicle and the wanted speed [5], objects [n, 7] at the odometry's stamp, the lane [m, 2].

        Raises:
            BadInput: there is no odometry or no route, or they cannot be used.
        """
        self._need(messages)
        lane, wanted = route_of(messages["route"].message)
        if not 2 <= len(lane.points) <= _MOST_POINTS or not np.isfinite(lane.points).all():  # noqa: PLR2004
            raise BadInput(
                f"route has {len(lane.points)} points; it has to have 2 to {_MOST_POINTS}, finite ones"
            )
        odom, detections = messages["odom"], messages["detections"]
        ego = pose_of(odom.message)
        if not np.isfinite(ego).all():
            raise BadInput(f"odom is not finite: x, y, yaw and speed are {ego}")
        objects = objects_of(detections.message)[:_MOST_OBJECTS]
        objects[:, :2] += objects[:, 3:5] * (
            (odom.stamp_ns - detections.stamp_ns) / _NS if detections.stamp_ns else 0.0
        )
        if self._blind.at(detections.stamp_ns):
            objects = objects[:0]
        return (
            torch.tensor([*ego, wanted], dtype=torch.float64),
            torch.from_numpy(objects),
            torch.from_numpy(lane.points),
        )

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The path in odometry's frame.

        Its first pose is stamped as the odometry, its header as the detections.
        """
        odom = messages["odom"]
        stamp_ns = messages["detections"].stamp_ns or odom.stamp_ns
        return path_bytes(outputs.numpy(), odom.message.header.frame_id, stamp_ns, odom.stamp_ns)
