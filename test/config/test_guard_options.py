import pytest

from torchperf_ros.config.guard_options import GUARD_CHECKS, guard_options
from torchperf_ros.frame.errors import ConfigError


def test_given_no_values_when_checked_then_nothing_acts_and_each_default_is_allowed():
    options = guard_options({})
    assert options.act == options.shadow == frozenset()
    assert options.obstacles == ("detections",)
    assert (options.length_m, options.margin_m, options.rss_brake) == (4.5, 0.3, 6.0)
    assert options.obstacles_timeout_ms == 300.0


def test_given_all_and_single_checks_when_checked_then_one_that_acts_is_no_shadow():
    options = guard_options({"guard.act": ["distance", ""], "guard.shadow": ["all"], "guard.obstacles": ["a", "", "b"]})
    assert options.act == {"distance"}
    assert options.shadow == set(GUARD_CHECKS) - {"distance"}
    assert options.obstacles == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("act", ["speeding"], "act: ['speeding'] is not allowed; it has to be a list of: '', all, "),
        ("max_speed", -1.0, "max_speed: -1.0 is not allowed; it has to be a number from"),
        ("width_m", float("nan"), "width_m: nan is not allowed"),
        ("obstacles_frame", "map", "obstacles_frame: 'map' is not allowed; it has to be one of: optical, body, plan"),
        ("rss_brake", 9.0, "rss_brake: 9.0 is above planning.guard.rss_lead_brake 8.0; it has to be at most"),
        ("max_deceleration", 5.0, "rss_brake: 6.0 is above planning.guard.max_deceleration 5.0"),
        ("rear_m", 5.0, "rear_m: 5.0 is above planning.guard.length_m 4.5"),
    ],
)
def test_given_a_bad_value_when_checked_then_the_message_says_which_and_what_is_allowed(name, value, text):
    with pytest.raises(ConfigError) as raised:
        guard_options({f"guard.{name}": value}, "planning")
    assert str(raised.value).startswith(f"parameter planning.guard.{text}")


def test_given_limits_at_each_other_when_checked_then_they_are_allowed():
    equal = {"guard.rss_brake": 7.0, "guard.rss_lead_brake": 7.0, "guard.max_deceleration": 7, "guard.rear_m": 4.5}
    assert guard_options(equal).max_deceleration == 7.0
