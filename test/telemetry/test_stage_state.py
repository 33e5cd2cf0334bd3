"""What a stage says of itself, read with tolerance."""

import math

import pytest

from torchperf_ros.core.outcome import Outcome
from torchperf_ros.telemetry.stage_state import SeenFrame, StageState


@pytest.mark.parametrize(
    ("values", "tier"),
    [({}, ""), ({"tier": "fast"}, "fast"), ({"tier": "5", "tiers": "full"}, "5"), ({"tier": "0", "tiers": ""}, "0")],
)
def test_given_tiers_told_in_other_ways_when_asked_then_what_there_is_is_shown(
    values: dict[str, str], tier: str
) -> None:
    assert StageState("s", values).tier == tier


@pytest.mark.parametrize(
    ("states", "complete"),
    [([], False), (["idle"], True), (["idle", "busy"], True), (["busy", "loading full (1 of 3)"], False)],
)
def test_given_workers_when_one_still_loads_then_the_stage_is_not_complete(states: list[str], complete: bool) -> None:
    assert StageState("s", {f"worker_{n}_state": state for n, state in enumerate(states)}).complete is complete


def test_given_counters_when_asked_for_the_unanswered_then_dropped_frames_do_not_count() -> None:
    values = {"frames": "100", "superseded": "3", "stale": "1", "answered": "95"}
    assert StageState("s", values).unanswered == 1
    assert StageState("s", values | {"answered": "many"}).unanswered is None
    assert StageState("s").unanswered is None


def test_given_stamps_when_asked_for_the_nearest_then_only_one_within_eight_milliseconds_counts() -> None:
    stage = StageState("s")
    assert stage.nearest(0) is None
    for stamp_ns in (0, 33_000_000, 66_000_000):
        stage.add(SeenFrame(stamp_ns, Outcome.ON_TIME, None, 0, 10.0, 50.0))
    near = stage.nearest(40_000_000)
    assert near is not None
    assert near.stamp_ns == 33_000_000
    assert stage.nearest(49_000_000) is None


def test_given_answers_a_thirtieth_apart_when_asked_for_the_rate_then_it_is_thirty_unless_the_input_stopped() -> None:
    stage = StageState("s")
    assert math.isnan(stage.rate_hz)
    for number in range(1, 100):
        stage.add(SeenFrame(1, Outcome.ON_TIME, None, 0, 10.0, 50.0, published_ns=number * 33_333_333))
    assert stage.rate_hz == pytest.approx(30.0)
    stage.values["health"] = "WAITING"
    assert math.isnan(stage.rate_hz)
