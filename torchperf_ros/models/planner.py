"""The reference planning stage: detections and odometry in, a path of the next three seconds out."""

import cmath
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchperf_ros.api.adapter import Adapter, Received, open_task
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.histories import HistoryBuffer
from torchperf_ros.api.messages import stamp_ns_of
from torchperf_ros.models import networks
from torchperf_ros.models.networks import (
    FRAME_FEATURES,
    HISTORY_FRAMES,
    NEAREST,
    OBJECT_FIELDS,
    PLANNER_WEIGHTS,
    PLANNER_WIDTHS,
    PlannerNet,
)
from torchperf_ros.models.options import OptionReader
from torchperf_ros.safety.stop_output import PATH, TimedPath

_SOLIDS: Final = (1, 2, 3)  # Marker.CUBE, SPHERE, CYLINDER; lines and texts are no objects
_ADD: Final = 0  # Marker.ADD
_MS: Final = 1_000_000  # ns
_POSES_NS: Final = np.arange(networks.WAYPOINTS + 1) * round(
    networks.WAYPOINT_STEP_S * 1e9
)  # from the first on
_MAX_SPEED: Final = 100.0  # m/s; more is a broken odometry, not a road vehicle
_MAX_YAW_RATE: Final = 10.0  # rad/s


class Ego(NamedTuple):
    """How the vehicle moves, and where it is.

    Attributes:
        frame_id: frame of the position.
        position: x, y, z in m.
        yaw: heading in rad, counterclockwise from x.
        speed: m/s along the vehicle's x axis, negative in reverse.
        yaw_rate: rad/s, left positive.
    """

    frame_id: str
    position: tuple[float, float, float]
    yaw: float
    speed: float
    yaw_rate: float


class PlannerObject(NamedTuple):
    """An object as the planner sees it: its centre ahead and to the left, its size in m, its score 0..1."""

    forward: float
    left: float
    length: float
    width: float
    height: float
    score: float


def seen_by_camera(
    x: float, y: float, z: float, width: float, height: float, length: float, score: float
) -> PlannerObject:
    """A box whose centre and size are along a camera's axes (x right, y down, z forward)."""
    return PlannerObject(z, -x, length, width, height, score)


def frame_features(boxes: Iterable[PlannerObject], speed: float, yaw_rate: float) -> list[float]:
    """What the network reads of one frame, scaled to about 1; see `FRAME_FEATURES`."""
    nearest = heapq.nsmallest(NEAREST, map(_scaled, boxes))
    features = [value for _, *values in nearest for value in values]
    return [*features, *([0.0] * (NEAREST * OBJECT_FIELDS - len(features))), speed / 10.0, yaw_rate]


def _scaled(box: PlannerObject) -> tuple[float, ...]:
    """Squared distance in m^2, and features."""
    forward, left, length, width, height, score = box
    # Far or huge ones look alike: bounded features keep one odd marker from outweighing the others.
    scaled = (forward / 50.0, left / 20.0, length / 5.0, width / 5.0, height / 5.0, score)
    return (forward * forward + left * left, *(min(max(value, -5.0), 5.0) for value in scaled))


class PlannerAdapter(Adapter):
    """Plans over the last 10 frames of detections.

    The weights that ship imitate `plan_along`, see `PlannerNet`.

    The path starts at the odometry's pose, in its frame; without odometry the vehicle counts as standing at
    the origin of `base_frame`, and so does the path. It is flat: z stays, roll and pitch are zero.

    Options:
        base_frame: frame of the path while there is no odometry; default "base_link".
        detections_frame: axes of the detections' frame: "optical" (x right, y down, z forward) or "body"
            (x forward, y left, z up), both REP 103; default "optical", as `CameraAdapter` publishes them.
        max_gap_ms: a longer gap between frames empties the history, 1 to 60000; default 1000.
        max_odom_lag_ms: odometry whose stamp is further from the detections' stamp is refused, 1 to 60000;
            default 500. Frames or odometry without a stamp are not checked.
        anytime: whether it plans from coarse to fine, in eager, see `PlannerNet.steps`; default false.
        weights: file that `torchperf train` has written; default the one that ships.
    """

    tiers: ClassVar[tuple[str, ...]] = tuple(PLANNER_WIDTHS)

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options, see the class; the network runs on this device.

        Raises:
            ConfigError: an option is unknown or its value not allowed.
        """
        reader = OptionReader(type(self).__name__, options)
        self._base_frame = reader.text("base_frame", default="base_link")
        self._optical = (
            reader.choice("detections_frame", default="optical", allowed=("optical", "body")) == "optical"
        )
        max_gap_ms = reader.integer("max_gap_ms", default=1000, low=1, high=60_000)
        self._max_odom_lag_ms = reader.integer("max_odom_lag_ms", default=500, low=1, high=60_000)
        self.anytime = reader.flag("anytime", default=False)
        self._weights = Path(reader.text("weights", default=str(PLANNER_WEIGHTS)))
        reader.finish()
        self.inputs = {"detections": "visualization_msgs/msg/MarkerArray", "odom": "nav_msgs/msg/Odometry"}
        self.output = PATH
        self._device = device
        gap_ns = max_gap_ms * _MS
        self._history = HistoryBuffer(
            HISTORY_FRAMES, (FRAME_FEATURES,), max_gap_ns=gap_ns, tolerance_ns=gap_ns
        )

    @property
    def history(self) -> HistoryBuffer:
        """The last frames' features, for statistics."""
        return self._history

    def build(self, tier: str) -> torch.nn.Module:
        """The planner of a tier, `full`, `medium` or `fast`.

        A `ConfigError` where it or its weights are not there.
        """
        width = networks.tier_width(tier, PLANNER_WIDTHS)
        return networks.build_trained(lambda: PlannerNet(width), tier, self._weights).to(self._device)

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """A full history of zeros at 10 m/s straight ahead, for every tier.

        Shapes as from `preprocess`.
        """
        history = torch.zeros((1, HISTORY_FRAMES, FRAME_FEATURES), device=self._device)
        mask = torch.ones((1, HISTORY_FRAMES), dtype=torch.bool, device=self._device)
        return history, mask, torch.tensor([[10.0, 0.0]], device=self._device)

    def observe(self, messages: Mapping[str, Received]) -> None:
        """Take the frame into the history, unless its stamp is a repeat or out of order.

        Raises:
            BadInput: a value is NaN or Inf, or the odometry cannot be used; the history is as before.
        """
        ego = self._ego(messages)
        features = frame_features(self._objects(messages["detections"].message), ego.speed, ego.yaw_rate)
        self._history.append(
            torch.tensor(features, dtype=torch.float32), _frame_stamp_ns(messages["detections"])
        )

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """The history as `observe` left it, and the vehicle's motion now.

        Returns:
            history [1, 10, 50] float, mask [1, 10] bool, ego [1, 2] float (m/s, rad/s).

        Raises:
            BadInput: the odometry cannot be used; the message says which field is wrong, and its value.
        """
        ego = self._ego(messages)
        rows, mask = self._history.window()
        # Copies, also on the CPU: the window is written again for the next frame.
        history, present = (part.unsqueeze(0).to(self._device, copy=True) for part in (rows, mask))
        return history, present, torch.tensor([[ego.speed, ego.yaw_rate]], device=self._device)

    def training_task(self, log: Any) -> Any:  # noqa: ANN401 - both are of `train`, which lies above this
        """`PlannerTask`; a `ConfigError` where there is a log."""
        if log is not None:
            raise ConfigError(
                "planner: it learns from drives, not from a log; with one, train --models detector"
            )
        return open_task("torchperf_ros.train.planner_task:PlannerTask")

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The path: where the vehicle is now, then a pose every 0.1 s up to 3.0 s, each with its own stamp.

        `outputs` are [1, 30, 4], see `PlannerNet.forward`; `messages` those that were given to
        `preprocess`.
        """
        return _path(
            outputs[0].double().cpu().numpy(), self._ego(messages), _frame_stamp_ns(messages["detections"])
        )

    def _ego(self, messages: Mapping[str, Received]) -> Ego:
        odom = messages.get("odom")
        if odom is None:
            return Ego(self._base_frame, (0.0, 0.0, 0.0), 0.0, 0.0, 0.0)
        frame_ns = _frame_stamp_ns(messages["detections"])
        lag_ms = (frame_ns - odom.stamp_ns) / _MS
        if frame_ns > 0 and odom.stamp_ns > 0 and abs(lag_ms) > self._max_odom_lag_ms:
            way = "older" if lag_ms > 0 else "newer"
            raise BadInput(
                f"odom is {abs(lag_ms):.0f} ms {way} than the detections; max_odom_lag_ms is"
                f" {self._max_odom_lag_ms}"
            )
        return read_ego(odom.message)

    def _objects(self, array: Any) -> Iterator[PlannerObject]:  # noqa: ANN401 - rosbags builds the class at run time
        for index, marker in enumerate(array.markers):
            if marker.action != _ADD or marker.type not in _SOLIDS:
                continue
            at, size = marker.pose.position, marker.scale
            values = (at.x, at.y, at.z, size.x, size.y, size.z, marker.color.a)
            if not all(map(math.isfinite, values)):
                raise BadInput(
                    f"detections.markers[{index}] is not finite: position, scale and alpha are {values}"
                )
            yield (
                seen_by_camera(*values)
                if self._optical
                else PlannerObject(at.x, at.y, size.x, size.y, size.z, values[-1])
            )


def read_ego(odom: Any) -> Ego:  # noqa: ANN401
    """What the planner needs of a `nav_msgs/msg/Odometry`.

    Raises:
        BadInput: a value is NaN or Inf, the orientation is no rotation, or the vehicle is impossibly fast.
    """
    position, turn = odom.pose.pose.position, odom.pose.pose.orientation
    linear, angular = odom.twist.twist.linear, odom.twist.twist.angular
    fields = (
        *((f"pose.pose.position.{axis}", getattr(position, axis), math.inf) for axis in "xyz"),
        *((f"pose.pose.orientation.{axis}", getattr(turn, axis), math.inf) for axis in "xyzw"),
        ("twist.twist.linear.x", linear.x, _MAX_SPEED),
        ("twist.twist.angular.z", angular.z, _MAX_YAW_RATE),
    )
    for name, value, limit in fields:
        if not math.isfinite(value) or abs(value) > limit:
            allowed = f"; allowed: -{limit:g} to {limit:g}" if math.isfinite(value) else ""
            raise BadInput(f"odom.{name} is {value}{allowed}")
    if turn.x == turn.y == turn.z == turn.w == 0.0:
        raise BadInput(
            "odom.pose.pose.orientation is all zeros, which is no rotation; unset orientations have w = 1"
        )
    # Yaw of a quaternion of any length:
    # https://en.wikipedia.org/wiki/Conversion_between_quaternions_and_Euler_angles
    sine = 2.0 * (turn.w * turn.z + turn.x * turn.y)
    cosine = turn.w**2 + turn.x**2 - turn.y**2 - turn.z**2
    yaw = math.atan2(sine, cosine)
    return Ego(odom.header.frame_id, (position.x, position.y, position.z), yaw, linear.x, angular.z)


def _frame_stamp_ns(detections: Received) -> int:
    """The stamp that came with the frame; a `MarkerArray` from elsewhere only has its markers' stamps."""
    markers = detections.message.markers
    if detections.stamp_ns > 0 or not markers:
        return detections.stamp_ns
    return stamp_ns_of(markers[0].header)


def _path(waypoints: NDArray[np.float64], ego: Ego, stamp_ns: int) -> bytes:
    """A `nav_msgs/msg/Path` in the frame of the vehicle's position.

    As messages its poses take four times as long.
    """
    points, yaws = np.empty((len(_POSES_NS), 3)), np.empty(len(_POSES_NS))
    points[0], yaws[0] = ego.position, ego.yaw
    x, y, points[1:, 2] = ego.position
    places = np.ascontiguousarray(waypoints).view(np.complex128)[:, 0] * cmath.rect(1.0, ego.yaw)
    places += complex(x, y)
    points[1:, 0], points[1:, 1] = places.real, places.imag
    np.add(waypoints[:, 2], ego.yaw, out=yaws[1:])
    return TimedPath.made(stamp_ns + _POSES_NS, points, yaws, ego.frame_id.encode()).bytes()
