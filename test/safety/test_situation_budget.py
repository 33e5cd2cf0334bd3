"""A budget that follows speed and time to collision."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.config.config import stage_config
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.safety.scenes import SceneChooser, situation_budget_ms

MINE = {"adapter": "a:B", "output": "o"}


def config(**values):
    return stage_config("seen", {**MINE, "budget_ms": 50.0, "budget_least_ms": 20.0, **values})


@pytest.mark.parametrize(
    ("speed", "ttc_s", "least_ms", "budget_ms"),
    [
        (None, None, 0.0, 50.0), (0.0, None, 0.0, 50.0), (15.0, None, 0.0, 35.0), (30.0, None, 0.0, 20.0),
        (60.0, None, 0.0, 20.0), (None, 4.0, 0.0, 50.0), (None, 2.0, 0.0, 35.0), (None, 0.0, 0.0, 20.0),
        (None, -1.0, 0.0, 20.0), (15.0, 3.0, 0.0, 35.0), (15.0, 1.0, 0.0, 27.5), (30.0, None, 25.0, 25.0),
        (30.0, None, 80.0, 50.0),
    ],
)  # fmt: skip
def test_given_a_situation_when_asked_then_the_budget_follows_within_its_bounds(speed, ttc_s, least_ms, budget_ms):
    assert situation_budget_ms(config(), 50.0, speed, ttc_s, least_ms) == budget_ms


def test_given_a_budget_that_is_not_to_follow_or_is_shorter_when_asked_then_it_stays():
    assert situation_budget_ms(config(budget_least_ms=0.0), 50.0, 30.0, 0.0, 0.0) == 50.0
    assert situation_budget_ms(config(), 15.0, 30.0, 0.0, 0.0) == 15.0


unknown_or = st.none() | st.floats(0, 100)


@given(speed=unknown_or, ttc_s=unknown_or, faster=st.floats(0, 50), nearer=st.floats(0, 50), least_ms=st.floats(0, 100))
def test_given_more_danger_when_asked_then_the_budget_is_never_longer(speed, ttc_s, faster, nearer, least_ms):
    before = situation_budget_ms(config(), 50.0, speed, ttc_s, least_ms)
    after = situation_budget_ms(
        config(), 50.0, None if speed is None else speed + faster, None if ttc_s is None else ttc_s - nearer, least_ms
    )
    assert min(50.0, max(20.0, least_ms)) <= after <= before <= 50.0


def test_given_a_time_to_collision_when_it_is_none_or_old_then_it_is_unknown():
    scenes = SceneChooser(config())
    assert scenes.ttc_s(0) is None
    for value, known in ((1.5, 1.5), (math.nan, None), (math.inf, None)):
        scenes.near(value, 0)
        assert scenes.ttc_s(1_000_000_000) == known
    scenes.near(1.5, 0)
    assert scenes.ttc_s(1_000_000_001) is None


@pytest.mark.parametrize("least_ms", [0.5, 50.1])
def test_given_a_shortest_budget_that_is_none_when_read_then_it_is_refused(least_ms):
    with pytest.raises(
        ConfigError, match=f"seen.budget_least_ms: {least_ms} is not allowed.*0, or from 1 to budget_ms"
    ):
        config(budget_least_ms=least_ms)


def test_given_a_shortest_budget_when_inputs_are_asked_for_then_odometry_is_one():
    assert [topic for _, topic, _ in config().situation_inputs] == ["odom"]
