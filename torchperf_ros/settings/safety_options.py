"""The parameters of what keeps the vehicle safe.

Its geometry, the guard of a stage's plans, and the emergency lane.

Guard and lane share one geometry; each has limits of its own, with their sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.settings.parameter import check_all, declared, param, require

# In the order in which they are judged; what `act` and `shadow` name.
GUARD_CHECKS = (
    "finite",
    "stamps",
    "start",
    "speed",
    "acceleration",
    "lateral",
    "jerk",
    "curvature",
    "steering",
    "jump",
    "distance",
)

_VEHICLE = "vehicle."
_GUARD = "guard."
_ALL = "all"
_MODES = ("", _ALL, *GUARD_CHECKS)


@dataclass(frozen=True)
class VehicleOptions:
    """Parameters `vehicle.NAME` of the node: the one geometry that guard and emergency lane reckon with."""

    length_m: float = param(4.5, "Length of the vehicle in m.", 0.1, 50.0)
    width_m: float = param(1.9, "Width of the vehicle in m, mirrors included.", 0.1, 10.0)
    rear_m: float = param(
        1.0, "From the reference point (of odometry and plans) to the rear bumper, in m.", 0.0, 50.0
    )
    wheelbase_m: float = param(2.7, "Wheelbase in m.", 0.1, 20.0)
    max_curvature: float = param(
        0.2,
        "Sharpest turn in 1/m, of the vehicle and of plans; 0.2 is a turning circle of 10 m.",
        0.001,
        10.0,
    )


VEHICLE_NAMES = frozenset(parameter.name for parameter in declared(VehicleOptions))


def vehicle_options(values: Mapping[str, Any]) -> VehicleOptions:
    """Check the values `vehicle.NAME` together; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = VehicleOptions(**check_all(declared(VehicleOptions), values, "", _VEHICLE))
    above = (
        f"{found.rear_m} is not below {_VEHICLE}length_m {found.length_m}; the reference point lies in the"
        " vehicle"
    )
    require(found.rear_m < found.length_m, f"{_VEHICLE}rear_m: {above}")
    return found


@dataclass(frozen=True)
class GuardOptions:
    """Parameters `STAGE.guard.NAME`, checked, and the vehicle that plans are made for."""

    vehicle: VehicleOptions

    act: frozenset[str] = param(
        [""], "Checks that replace a plan that fails; all: each of them.", choices=_MODES
    )
    shadow: frozenset[str] = param([""], "Checks that only say what they would have found.", choices=_MODES)
    odometry_timeout_ms: float = param(
        200.0, "Age in ms from which odometry does not count.", 1.0, 10_000.0
    )
    obstacles: tuple[str, ...] = param(
        ["detections"], "Topics of visualization_msgs/MarkerArray; each must be fresh."
    )
    obstacles_timeout_ms: float = param(
        300.0, "Age in ms from which obstacles do not count.", 1.0, 10_000.0
    )
    obstacles_frame: str = param(
        "optical",
        "Axes of markers that are not in the odometry's frame; plan: such markers are refused.",
        choices=("optical", "body", "plan"),
    )
    sensor_forward_m: float = param(
        0.0, "How far ahead of the reference point those axes begin, in m.", -20.0, 20.0
    )
    actuation_delay_ms: float = param(
        150.0, "From a published plan to the brakes' effect, in ms.", 0.0, 2000.0
    )
    max_speed: float = param(40.0, "Largest speed of a plan, either way, in m/s.", 0.1, 100.0)
    max_acceleration: float = param(3.0, "Largest acceleration of a plan in m/s^2.", 0.1, 20.0)
    max_deceleration: float = param(
        8.0, "Hardest braking that a plan, or the guard itself, asks for, in m/s^2; dry asphalt.", 0.1, 20.0
    )
    max_lateral: float = param(3.0, "Largest lateral acceleration in m/s^2; ISO 11270.", 0.1, 20.0)
    max_jerk: float = param(
        20.0,
        "Largest jerk, forward or lateral, mean over 0.5 s, in m/s^3; 16 is full braking at once.",
        0.1,
        1000.0,
    )
    max_steering_rate: float = param(
        0.7, "Fastest turn of the front wheels in rad/s; a car's driver: 0.7.", 0.01, 10.0
    )
    max_jump_m: float = param(
        1.0, "Largest sideways step in m from the last published plan, within its next second.", 0.01, 100.0
    )
    start_tolerance_m: float = param(
        1.0, "How far in m a plan may be from the vehicle, now and start_tolerance_s later.", 0.01, 100.0
    )
    start_tolerance_s: float = param(
        0.2, "How far in s ahead a plan may begin, and how long it has to last from now on.", 0.01, 5.0
    )
    rss_accel: float = param(
        2.0, "Acceleration in m/s^2 until a vehicle has responded; RSS a_max_accel.", 0.0, 10.0
    )
    rss_brake: float = param(6.0, "Braking in m/s^2 that we certainly reach; RSS b_min.", 0.1, 20.0)
    rss_lead_brake: float = param(8.0, "Hardest braking in m/s^2 of a vehicle ahead; RSS b_max.", 0.1, 20.0)
    margin_m: float = param(0.3, "Distance in m kept to every obstacle, on all sides; RSS mu.", 0.0, 5.0)


def guard_options(
    values: Mapping[str, Any], stage: str = "", vehicle: VehicleOptions | None = None
) -> GuardOptions:
    """Check the values `guard.NAME` of a stage, whose name is for messages.

    Missing ones take their default.

    Without a `vehicle`, it is read from `vehicle.NAME` among the values.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    prefix = f"{stage}." if stage else ""
    checked = check_all(declared(GuardOptions), values, prefix, _GUARD)
    for mode in ("act", "shadow"):
        named = frozenset(filter(None, checked[mode]))
        checked[mode] = frozenset(GUARD_CHECKS) if _ALL in named else named
    checked["shadow"] -= checked["act"]
    checked["obstacles"] = tuple(filter(None, checked["obstacles"]))
    for low, high in (
        (
            "rss_brake",
            "rss_lead_brake",
        ),  # with weaker brakes ahead the RSS distance is not the smallest safe one
        ("rss_brake", "max_deceleration"),
    ):
        above = f"{checked[low]} is above {prefix}{_GUARD}{high} {checked[high]}"
        require(checked[low] <= checked[high], f"{prefix}{_GUARD}{low}: {above}; it has to be at most that")
    return GuardOptions(vehicle=vehicle or vehicle_options(values), **checked)


SENSOR_TYPES = {
    "LaserScan": "sensor_msgs/msg/LaserScan",
    "PointCloud2": "sensor_msgs/msg/PointCloud2",
    "Range": "sensor_msgs/msg/Range",
    "Bool": "std_msgs/msg/Bool",
}
_LANE = "emergency."
_PLACE = 4  # x, y, z and yaw


@dataclass(frozen=True)
class EmergencyOptions:
    """Parameters `emergency.NAME` of the node; per sensor a value of its own, or one for all of them."""

    vehicle: VehicleOptions
    sensors: tuple[str, ...] = param(
        [""], "Topics that the emergency lane watches; '': none, the lane is off."
    )
    types: tuple[str, ...] = param(
        ["LaserScan"], "Message type of each of these topics, or one for all.", choices=tuple(SENSOR_TYPES)
    )
    mounting: tuple[float, ...] = param(
        [0.0, 0.0, 0.0, 0.0],
        "Of each sensor, or for all: x forward, y left, z up from the reference point on the ground, in m;"
        " yaw in rad.",
        -100.0,
        100.0,
    )
    timeouts_ms: tuple[float, ...] = param(
        [300.0],
        "Without a usable message for this long, in ms, a sensor triggers; of each, or one for all; 0:"
        " never.",
        0.0,
        60_000.0,
    )
    start_s: float = param(
        5.0, "A sensor that has sent nothing this long after activation triggers, in s.", 0.1, 600.0
    )
    odometry: str = param("odom", "Topic of the vehicle's own motion, nav_msgs/Odometry.")
    odometry_timeout_ms: float = param(
        300.0, "Without odometry for so long, in ms, the lane triggers.", 1.0, 60_000.0
    )
    output: str = param("", "Topic of the stop path, nav_msgs/Path; empty: the last stage's output.")
    rate_hz: float = param(
        20.0, "How often the stop path is published while the lane is latched, in Hz.", 1.0, 1000.0
    )
    min_points: int = param(3, "Points in the corridor that make an obstacle.", 1, 1_000_000)
    scans: int = param(2, "Successive messages of one sensor that have to show it.", 1, 1000)
    deceleration: float = param(6.0, "Braking of an emergency stop in m/s^2.", 0.1, 20.0)
    reaction_ms: float = param(
        300.0, "Time from an obstacle's measurement until the brakes act, in ms.", 0.0, 10_000.0
    )
    margin_m: float = param(
        0.2, "How much wider than the vehicle the corridor is on each side, in m.", 0.0, 10.0
    )
    min_length_m: float = param(0.5, "The least length of the corridor in m, at standstill.", 0.0, 100.0)
    lowest_m: float = param(
        0.2, "Points of a cloud below this height above ground, in m, do not count.", -10.0, 10.0
    )
    highest_m: float = param(2.5, "Points of a cloud above this height, in m, do not count.", -10.0, 100.0)


def emergency_options(values: Mapping[str, Any], vehicle: VehicleOptions | None = None) -> EmergencyOptions:
    """Check the values `emergency.NAME` together; missing ones take their default.

    Without a `vehicle`, it is read from `vehicle.NAME` among the values.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = check_all(declared(EmergencyOptions), values, "", _LANE)
    sensors = found["sensors"] = [topic for topic in found["sensors"] if topic]
    count = len(sensors)
    for name, holds, allowed in (
        ("sensors", len(set(sensors)) == count, "each topic once"),
        ("odometry", found["odometry"] or not sensors, "a topic"),
        ("lowest_m", found["lowest_m"] < found["highest_m"], f"below highest_m {found['highest_m']}"),
    ):
        require(holds, f"{_LANE}{name}: {found[name]!r} is not allowed; it has to be {allowed}")
    for name, size in (("types", 1), ("mounting", _PLACE), ("timeouts_ms", 1)):
        given, one = found[name], f"{size} values" if size > 1 else "1 value"
        text = (
            f"{given!r} is not allowed; it has to be {one} for all, or {count * size} for {count} sensors"
        )
        require(len(given) in {size, size * count}, f"{_LANE}{name}: {text}")
        found[name] = given if len(given) == size * count else given * count
    plain: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one for key, one in found.items()
    }
    return EmergencyOptions(vehicle=vehicle or vehicle_options(values), **plain)
