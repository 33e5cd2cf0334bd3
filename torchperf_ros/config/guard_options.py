"""The parameters of a stage's guard, `STAGE.guard.NAME`: what it checks, the vehicle, and the limits with sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.config.parameter import check_all, declared, param, require

GUARD_CHECKS = (
    "finite", "stamps", "start", "speed", "acceleration", "lateral", "jerk", "curvature", "steering", "jump",
    "distance",
)  # fmt: skip
"""In the order in which they are judged; what `act` and `shadow` name."""

_PREFIX = "guard."
_ALL = "all"
_MODES = ("", _ALL, *GUARD_CHECKS)


@dataclass(frozen=True)
class GuardOptions:
    """Parameters of a guard, checked."""

    act: frozenset[str] = param([""], "Checks that replace a plan that fails; all: each of them.", choices=_MODES)
    shadow: frozenset[str] = param([""], "Checks that only say what they would have found.", choices=_MODES)
    odometry_timeout_ms: float = param(200.0, "Age in ms from which odometry does not count.", 1.0, 10_000.0)
    obstacles: tuple[str, ...] = param(["detections"], "Topics of visualization_msgs/MarkerArray; each must be fresh.")
    obstacles_timeout_ms: float = param(300.0, "Age in ms from which obstacles do not count.", 1.0, 10_000.0)
    obstacles_frame: str = param(
        "optical", "Axes of markers that are not in the odometry's frame; plan: such markers are refused.",
        choices=("optical", "body", "plan"),
    )  # fmt: skip
    sensor_forward_m: float = param(0.0, "How far ahead of the reference point those axes begin, in m.", -20.0, 20.0)
    length_m: float = param(4.5, "Length of the vehicle in m.", 0.1, 30.0)
    width_m: float = param(1.9, "Width of the vehicle in m, mirrors included.", 0.1, 5.0)
    rear_m: float = param(1.0, "From the reference point (of odometry and plans) to the rear bumper, in m.", 0.0, 30.0)
    wheelbase_m: float = param(2.7, "Wheelbase in m.", 0.1, 20.0)
    actuation_delay_ms: float = param(150.0, "From a published plan to the brakes' effect, in ms.", 0.0, 2000.0)
    max_speed: float = param(40.0, "Largest speed of a plan, either way, in m/s.", 0.1, 100.0)
    max_acceleration: float = param(3.0, "Largest acceleration of a plan in m/s^2.", 0.1, 20.0)
    max_deceleration: float = param(
        8.0, "Hardest braking that a plan, or the guard itself, asks for, in m/s^2; dry asphalt.", 0.1, 20.0
    )
    max_lateral: float = param(3.0, "Largest lateral acceleration in m/s^2; ISO 11270.", 0.1, 20.0)
    max_jerk: float = param(
        20.0, "Largest jerk, forward or lateral, mean over 0.5 s, in m/s^3; 16 is full braking at once.", 0.1, 1000.0
    )
    max_curvature: float = param(0.2, "Largest curvature in 1/m; 0.2 is a turning circle of 10 m.", 0.001, 10.0)
    max_steering_rate: float = param(0.7, "Fastest turn of the front wheels in rad/s; a car's driver: 0.7.", 0.01, 10.0)
    max_jump_m: float = param(
        1.0, "Largest sideways step in m from the last published plan, within its next second.", 0.01, 100.0
    )
    start_tolerance_m: float = param(
        1.0, "How far in m a plan may be from the vehicle, now and start_tolerance_s later.", 0.01, 100.0
    )
    start_tolerance_s: float = param(
        0.2, "How far in s ahead a plan may begin, and how long it has to last from now on.", 0.01, 5.0
    )
    rss_accel: float = param(2.0, "Acceleration in m/s^2 until a vehicle has responded; RSS a_max_accel.", 0.0, 10.0)
    rss_brake: float = param(6.0, "Braking in m/s^2 that we certainly reach; RSS b_min.", 0.1, 20.0)
    rss_lead_brake: float = param(8.0, "Hardest braking in m/s^2 of a vehicle ahead; RSS b_max.", 0.1, 20.0)
    margin_m: float = param(0.3, "Distance in m kept to every obstacle, on all sides; RSS mu.", 0.0, 5.0)


_PARAMETERS = declared(GuardOptions)


def guard_options(values: Mapping[str, Any], stage: str = "") -> GuardOptions:
    """Check a guard's values; missing ones take their default.

    Args:
        values: by their names below a stage, `guard.act` and so on; others are ignored.
        stage: for messages.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    prefix = f"{stage}." if stage else ""
    checked = check_all(_PARAMETERS, values, prefix, _PREFIX)
    for mode in ("act", "shadow"):
        named = frozenset(filter(None, checked[mode]))
        checked[mode] = frozenset(GUARD_CHECKS) if _ALL in named else named
    checked["shadow"] -= checked["act"]
    checked["obstacles"] = tuple(filter(None, checked["obstacles"]))
    for low, high in (
        ("rss_brake", "rss_lead_brake"),  # with weaker brakes ahead the RSS distance is not the smallest safe one
        ("rss_brake", "max_deceleration"),
        ("rear_m", "length_m"),
    ):
        above = f"{checked[low]} is above {prefix}{_PREFIX}{high} {checked[high]}"
        require(checked[low] <= checked[high], f"{prefix}{_PREFIX}{low}: {above}; it has to be at most that")
    return GuardOptions(**checked)
