"""The parameters of what keeps the vehicle safe.

Its geometry, the guard of a stage's plans, and the emergency lane.

Guard and lane share one geometry; each has limits of its own, with their sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.settings.parameter import check_all, declared, numbers_by_word, param, require

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
        ["detections"],
        "Topics of visualization_msgs/MarkerArray; each must be fresh. Without ARROWs, places may have 0.05 m"
        " of noise.",
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
_PLACE = ("x", "y", "z", "yaw")
_TIMEOUT_MS = 300.0
# What a line says of its sensor after topic and type, in any order, and what each may be.
_WORDS = {
    **dict.fromkeys(_PLACE, (-100.0, 100.0, "m")),
    "yaw": (-100.0, 100.0, "rad"),
    "timeout": (0.0, 60_000.0, "ms"),
}
_FORM = (
    "it has to be TOPIC TYPE, then x M y M z M yaw RAD (from the reference point on the ground) and"
    " timeout MS (0: never) where wanted, such as scan LaserScan x 3.5 z 0.5 timeout 150; a type is one of: "
    + ", ".join(SENSOR_TYPES)
)


@dataclass(frozen=True)
class EmergencyOptions:
    """Parameters `emergency.NAME` of the node, and what the lines of `sensors` say."""

    vehicle: VehicleOptions
    sensors: tuple[str, ...] = param(
        [""],
        "Topics that the emergency lane watches, lines TOPIC TYPE x M y M z M yaw RAD timeout MS; '': none,"
        " the lane is off.",
    )
    start_s: float = param(
        5.0, "A sensor that has sent nothing this long after activation triggers, in s.", 0.1, 600.0
    )
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
    heights_m: tuple[float, float] = param(
        [0.2, 2.5],
        "Points of a cloud count from the first to the second height above ground, in m.",
        -10.0,
        100.0,
    )
    # Of the last stage: the topic of the vehicle's own motion.
    odometry: str = "odom"
    # Of each sensor: its type; x, y, z and yaw from the reference point on the ground; the longest silence.
    types: tuple[str, ...] = ()
    mounting: tuple[tuple[float, float, float, float], ...] = ()
    timeouts_ms: tuple[float, ...] = ()


def emergency_options(values: Mapping[str, Any], vehicle: VehicleOptions | None = None) -> EmergencyOptions:
    """Check the values `emergency.NAME` together; missing ones take their default.

    Without a `vehicle`, it is read from `vehicle.NAME` among the values.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = check_all(declared(EmergencyOptions), values, "", _LANE)
    lines = [line.split() for line in found["sensors"] if line.strip()]
    topics, types = [line[0] for line in lines], [(*line, "LaserScan")[1] for line in lines]
    for topic in topics:
        where = f"{_LANE}sensors: {topic} stands in {topics.count(topic)} lines"
        require(topics.count(topic) == 1, f"{where}; each topic may have one")
    numbers = []
    for line, kind in zip(lines, types, strict=True):
        where = f"{_LANE}sensors: {' '.join(line)!r}"
        require(kind in SENSOR_TYPES, f"{where}: {kind!r} is not allowed; {_FORM}")
        numbers.append(numbers_by_word(where, line[2:], _WORDS, _FORM))
    heights_m = found["heights_m"]
    require(
        len(heights_m) == 2 and heights_m[0] < heights_m[1],  # noqa: PLR2004 - from, to
        f"{_LANE}heights_m: {heights_m} is not allowed; it has to be two heights, the lower one first",
    )
    return EmergencyOptions(
        vehicle=vehicle or vehicle_options(values),
        types=tuple(types),
        mounting=tuple(tuple(one.get(word, 0.0) for word in _PLACE) for one in numbers),  # type: ignore[misc]
        timeouts_ms=tuple(one.get("timeout", _TIMEOUT_MS) for one in numbers),
        **found | {"sensors": tuple(topics), "heights_m": tuple(heights_m)},
    )
