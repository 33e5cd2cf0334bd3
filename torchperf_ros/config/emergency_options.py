"""The emergency lane's parameters: what it looks at, where that is mounted, and how the vehicle brakes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.config.parameter import check_all, declared, param, require

SENSOR_TYPES = {
    "LaserScan": "sensor_msgs/msg/LaserScan", "PointCloud2": "sensor_msgs/msg/PointCloud2",
    "Range": "sensor_msgs/msg/Range", "Bool": "std_msgs/msg/Bool",
}  # fmt: skip
_PLACE = 4  # x, y, z and yaw


@dataclass(frozen=True)
class EmergencyOptions:
    """Parameters `emergency.NAME` of the node; per sensor a value of its own, or one for all of them."""

    sensors: tuple[str, ...] = param([""], "Topics that the emergency lane watches; '': none, the lane is off.")
    types: tuple[str, ...] = param(
        ["LaserScan"], "Message type of each of these topics, or one for all.", choices=tuple(SENSOR_TYPES)
    )
    mounting: tuple[float, ...] = param(
        [0.0, 0.0, 0.0, 0.0],
        "Of each sensor, or for all: x forward, y left, z up from the reference point on the ground, in m; yaw in rad.",
        -100.0, 100.0,
    )  # fmt: skip
    timeouts_ms: tuple[float, ...] = param(
        [300.0], "Without a usable message for this long, in ms, a sensor triggers; of each, or one for all; 0: never.",
        0.0, 60_000.0,
    )  # fmt: skip
    start_s: float = param(5.0, "A sensor that has sent nothing this long after activation triggers, in s.", 0.1, 600.0)
    odometry: str = param("odom", "Topic of the vehicle's own motion, nav_msgs/Odometry.")
    odometry_timeout_ms: float = param(300.0, "Without odometry for so long, in ms, the lane triggers.", 1.0, 60_000.0)
    output: str = param("", "Topic of the stop path, nav_msgs/Path; empty: the last stage's output.")
    rate_hz: float = param(20.0, "How often the stop path is published while the lane is latched, in Hz.", 1.0, 1000.0)
    min_points: int = param(3, "Points in the corridor that make an obstacle.", 1, 1_000_000)
    scans: int = param(2, "Successive messages of one sensor that have to show it.", 1, 1000)
    deceleration: float = param(6.0, "Braking of an emergency stop in m/s^2.", 0.1, 20.0)
    reaction_ms: float = param(300.0, "Time from an obstacle's measurement until the brakes act, in ms.", 0.0, 10_000.0)
    margin_m: float = param(0.2, "How much wider than the vehicle the corridor is on each side, in m.", 0.0, 10.0)
    min_length_m: float = param(0.5, "The least length of the corridor in m, at standstill.", 0.0, 100.0)
    lowest_m: float = param(0.2, "Points of a cloud below this height above ground, in m, do not count.", -10.0, 10.0)
    highest_m: float = param(2.5, "Points of a cloud above this height, in m, do not count.", -10.0, 100.0)
    length_m: float = param(4.5, "Length of the vehicle in m.", 0.1, 50.0)
    width_m: float = param(1.9, "Width of the vehicle in m.", 0.1, 10.0)
    rear_m: float = param(1.0, "From the vehicle's reference point, its rear axle, to its rear end, in m.", 0.0, 50.0)
    max_curvature: float = param(0.2, "Sharpest turn of the vehicle in 1/m.", 0.001, 2.0)


_PARAMETERS, _PREFIX = declared(EmergencyOptions), "emergency."


def emergency_options(values: Mapping[str, Any]) -> EmergencyOptions:
    """Check the values `emergency.NAME` together; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = check_all(_PARAMETERS, values, "", _PREFIX)
    sensors = found["sensors"] = [topic for topic in found["sensors"] if topic]
    count = len(sensors)
    for name, holds, allowed in (
        ("sensors", len(set(sensors)) == count, "each topic once"),
        ("odometry", found["odometry"] or not sensors, "a topic"),
        ("rear_m", found["rear_m"] < found["length_m"], f"below length_m {found['length_m']}"),
        ("lowest_m", found["lowest_m"] < found["highest_m"], f"below highest_m {found['highest_m']}"),
    ):
        require(holds, f"{_PREFIX}{name}: {found[name]!r} is not allowed; it has to be {allowed}")
    for name, size in (("types", 1), ("mounting", _PLACE), ("timeouts_ms", 1)):
        given, one = found[name], f"{size} values" if size > 1 else "1 value"
        text = f"{given!r} is not allowed; it has to be {one} for all, or {count * size} for {count} sensors"
        require(len(given) in {size, size * count}, f"{_PREFIX}{name}: {text}")
        found[name] = given if len(given) == size * count else given * count
    plain: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in found.items()}
    return EmergencyOptions(**plain)
