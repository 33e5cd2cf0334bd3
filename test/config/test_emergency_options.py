import pytest

from torchperf_ros.config.config import node_config
from torchperf_ros.config.params_file import config_of
from torchperf_ros.frame.errors import ConfigError


def options(**values):
    return node_config({f"emergency.{name}": value for name, value in values.items()}, {}).emergency


def test_given_no_sensors_when_configured_then_the_lane_is_off():
    assert options().sensors == options(sensors=["", ""]).sensors == ()


def test_given_one_value_for_all_sensors_when_configured_then_each_has_it():
    found = options(sensors=["a", "b"], types=["Range"], mounting=[1.0, 2.0, 3.0, 0.5], timeouts_ms=[100.0])
    assert found.types == ("Range", "Range")
    assert found.mounting == (1.0, 2.0, 3.0, 0.5) * 2
    assert found.timeouts_ms == (100.0, 100.0)


def test_given_a_value_for_each_sensor_when_configured_then_they_are_kept():
    found = options(sensors=["a", "b"], types=["Range", "Bool"], mounting=[0.0] * 8, timeouts_ms=[100.0, 0.0])
    assert (found.types, found.timeouts_ms) == (("Range", "Bool"), (100.0, 0.0))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sensors": ["a", "a"]}, r"emergency\.sensors: \['a', 'a'\] .*each topic once"),
        ({"sensors": ["a"], "types": ["Camera"]}, r"emergency\.types: .*LaserScan, PointCloud2, Range, Bool"),
        ({"sensors": ["a", "b", "c"], "types": ["Range", "Bool"]}, r"types: .* 1 value for all, or 3 for 3 sensors"),
        ({"sensors": ["a"], "mounting": [0.0] * 5}, r"mounting: .* 4 values for all, or 4 for 1 sensors"),
        ({"sensors": ["a"], "timeouts_ms": []}, r"timeouts_ms: \[\] .* 1 value for all"),
        ({"sensors": ["a"], "timeouts_ms": [-1.0]}, r"timeouts_ms: .* from 0\.0 to 60000\.0"),
        ({"sensors": ["a"], "odometry": ""}, r"odometry: '' .* a topic"),
        ({"rear_m": 5.0}, r"rear_m: 5\.0 .* below length_m 4\.5"),
        ({"lowest_m": 3.0}, r"lowest_m: 3\.0 .* below highest_m 2\.5"),
        ({"deceleration": 0.0}, r"deceleration: 0\.0 .* from 0\.1 to 20\.0"),
        ({"min_points": 2.5}, r"min_points: 2\.5 is a number; it has to be an integer"),
    ],
)
def test_given_values_that_the_lane_cannot_have_when_configured_then_the_error_names_them(values, says):
    with pytest.raises(ConfigError, match=f"parameter .*{says}"):
        options(**values)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"emergency.sensor": ["a"]}, "emergency.sensor: is unknown; the closest names are emergency.sensors"),
        ({"emergency.budget_ms": 3.0}, "emergency.budget_ms: is unknown; the closest names are emergency."),
        ({"stages": ["emergency"]}, "stages: 'emergency' is not allowed; parameters of the node's own begin so"),
    ],
)
def test_given_a_name_that_is_not_the_lanes_when_read_then_it_is_refused(values, says):
    with pytest.raises(ConfigError) as caught:
        config_of(values)
    assert says in str(caught.value)


def test_given_the_lanes_names_when_read_then_they_are_no_stage_that_does_not_run():
    assert config_of({"stages": ["perception"], "emergency.sensors": ["scan"]}).emergency.sensors == ("scan",)
