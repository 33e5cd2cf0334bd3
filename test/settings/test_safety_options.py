"""The parameters of the guard and of the emergency lane: what belongs together, and what is refused."""

import math

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.params_file import config_of
from torchperf_ros.settings.safety_options import (
    GUARD_CHECKS,
    emergency_options,
    guard_options,
    vehicle_options,
)


def lane(**values):
    return emergency_options({f"emergency.{name}": value for name, value in values.items()})


def vehicle(**values):
    return vehicle_options({f"vehicle.{name}": value for name, value in values.items()})


def guard(**values):
    return guard_options({f"guard.{name}": value for name, value in values.items()}, "planning")


def test_given_nothing_when_checked_then_no_check_acts_and_the_lane_is_off():
    assert guard().act == guard().shadow == frozenset()
    assert guard().obstacles == ("detections",)
    assert lane().sensors == lane(sensors=["", ""]).sensors == ()


def test_given_all_and_single_checks_when_checked_then_one_that_acts_is_no_shadow():
    options = guard(act=["distance", ""], shadow=["all"], obstacles=["a", "", "b"])
    assert options.act == {"distance"}
    assert options.shadow == set(GUARD_CHECKS) - {"distance"}
    assert options.obstacles == ("a", "b")


def test_given_limits_at_each_other_when_checked_then_they_are_allowed():
    assert guard(rss_brake=7.0, rss_lead_brake=7.0, max_deceleration=7).max_deceleration == 7.0


def test_given_lines_of_sensors_when_checked_then_each_sensor_has_its_own():
    found = lane(sensors=["scan", "b Range z 0.5 x 3.5 timeout 100 yaw -1", "c  Bool timeout 0", ""])
    assert (found.sensors, found.types) == (("scan", "b", "c"), ("LaserScan", "Range", "Bool"))
    assert found.mounting == ((0.0,) * 4, (3.5, 0.0, 0.5, -1.0), (0.0,) * 4)
    assert found.timeouts_ms == (300.0, 100.0, 0.0)


@pytest.mark.parametrize(
    ("options", "values", "says"),
    [
        (guard, {"act": ["speeding"]}, r"planning\.guard\.act: \['speeding'\] .* a list of: '', all, "),
        (guard, {"max_speed": -1.0}, r"max_speed: -1\.0 is not allowed; it has to be a number from"),
        (vehicle, {"width_m": math.nan}, "width_m: nan is not allowed"),
        (guard, {"obstacles_frame": "map"}, "obstacles_frame: 'map' .* one of: optical, body, plan"),
        (
            guard,
            {"rss_brake": 9.0},
            r"rss_brake: 9\.0 is above planning\.guard\.rss_lead_brake 8\.0; it has to be at",
        ),
        (
            guard,
            {"max_deceleration": 5.0},
            r"rss_brake: 6\.0 is above planning\.guard\.max_deceleration 5\.0",
        ),
        (lane, {"sensors": ["a", "a Bool"]}, r"emergency\.sensors: a stands in 2 lines; each topic may"),
        (lane, {"sensors": ["a Camera"]}, r"'a Camera': 'Camera' .* LaserScan, PointCloud2, Range, Bool"),
        (lane, {"sensors": ["a x 3"]}, r"'a x 3': 'x' is not allowed; it has to be TOPIC TYPE, then x M"),
        (lane, {"sensors": ["a Range x"]}, r"'a Range x' is not allowed; it has to be TOPIC TYPE"),
        (
            lane,
            {"sensors": ["a Range w 1"]},
            r"'a Range w 1': 'w' is not allowed; .* such as scan LaserScan",
        ),
        (lane, {"sensors": ["a Range x 1 x 2"]}, r"x stands there twice"),
        (lane, {"sensors": ["a Range z nan"]}, r"z nan is not allowed; it has to be from -100 to 100 m"),
        (lane, {"sensors": ["a Range timeout -1"]}, r"timeout -1 is .* from 0 to 60000 ms"),
        (vehicle, {"rear_m": 4.5}, r"vehicle\.rear_m: 4\.5 is not below vehicle\.length_m 4\.5"),
        (lane, {"heights_m": [3.0, 2.5]}, r"heights_m: \[3\.0, 2\.5\] .* two heights, the lower one first"),
        (lane, {"heights_m": [3.0]}, r"heights_m: \[3\.0\] .* two heights"),
        (lane, {"min_points": 2.5}, r"min_points: 2\.5 is a number; it has to be an integer"),
    ],
)
def test_given_values_that_are_not_allowed_when_checked_then_the_error_names_them(options, values, says):
    with pytest.raises(ConfigError, match=f"^parameter .*{says}"):
        options(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"emergency.sensor": ["a"]},
            "emergency.sensor: is unknown; the closest names are emergency.sensors",
        ),
        ({"emergency.budget_ms": 3.0}, "emergency.budget_ms: is unknown; the closest names are emergency."),
        (
            {"stages": ["emergency"]},
            "stages: 'emergency' is not allowed; parameters of the node's own begin so",
        ),
        *(
            ({name: 1.0}, f"{name}: is vehicle.{name.rpartition('.')[2]} now")
            for name in ("planning.guard.length_m", "emergency.rear_m", "perception.guard.max_curvature")
        ),
    ],
)
def test_given_a_name_that_is_not_the_lanes_or_of_the_geometry_as_it_was_when_read_then_it_is_refused(
    values, says
):
    with pytest.raises(ConfigError) as caught:
        config_of(values)
    assert says in str(caught.value)


def test_given_one_vehicle_when_read_then_every_guard_and_the_lane_have_it():
    values = {
        "vehicle.length_m": 3.2,
        "vehicle.rear_m": 0.4,
        "planning.guard.act": ["all"],
        "perception.guard.act": ["all"],
    }
    config = config_of(values)
    guards = [stage.guard.vehicle for stage in config.stages]
    assert guards == [config.vehicle] * 2
    assert config.emergency.vehicle == config.vehicle == vehicle(length_m=3.2, rear_m=0.4)


def test_given_a_lane_when_read_then_it_has_the_last_stages_odometry():
    values = {"emergency.sensors": ["scan"], "planning.odometry": "wheels"}
    assert config_of(values).emergency.odometry == "wheels"
    with pytest.raises(ConfigError, match=r"parameter planning\.odometry: is empty; .* emergency lane"):
        config_of({**values, "planning.odometry": ""})


def test_given_the_lanes_names_when_read_then_they_are_no_stage_that_does_not_run():
    assert config_of({"stages": ["perception"], "emergency.sensors": ["scan"]}).emergency.sensors == (
        "scan",
    )
