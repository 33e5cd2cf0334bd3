"""Times that grow: seen by their trend, on a virtual clock."""

import random

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.stage.drift import DriftWatch

S = 1_000_000_000
FRESH_MS = 49.0


def watched(took_ms, *, seconds=60, seed=0, noise=0.03, tier=lambda second: 0, hz=30):
    """The seconds in which there was an alert.

    `took_ms` is what a frame takes in a second, without noise.
    """
    watch, draw, found = DriftWatch("camera"), random.Random(seed), {}
    for second in range(1, seconds + 1):
        for frame in range(hz):
            at_s = second - 1 + frame / hz
            watch.add(tier(second), took_ms(at_s) * draw.lognormvariate(0.0, noise))
        if (alert := watch.step(second * S, FRESH_MS)) is not None:
            found[second] = alert
    return found


@pytest.mark.parametrize("ramp_s", [10, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_given_a_ramp_when_it_leads_past_the_deadline_then_it_is_found_before_that(ramp_s, seed):
    found = watched(lambda s: 34.0 * (1 + 0.5 * min(max(0.0, s - 20) / ramp_s, 1.0)), seconds=90, seed=seed)
    reached_s = 20 + ramp_s * (FRESH_MS / 34.0 / 1.08 - 1) / 0.5  # by one frame in 200, with the noise
    first = min(found)
    assert 20 < first <= reached_s
    alert = found[first]
    assert (alert.level, alert.name) == (Level.WARN, "camera: drift")
    assert "grows by" in alert.message


@pytest.mark.parametrize(
    "took_ms",
    [
        lambda s: 44.0,  # near the deadline, but steady
        lambda s: 20.0 * (1 + 0.5 * min(s / 20, 1.0)),  # grows, and has room
        lambda s: 44.0 * (1 - 0.3 * min(s / 20, 1.0)),  # shrinks
        lambda s: 0.0,
    ],
)
def test_given_times_that_do_not_lead_past_the_deadline_when_judged_then_there_is_no_alert(took_ms):
    assert watched(took_ms) == {}


def test_given_single_stalls_when_judged_then_they_are_no_drift():
    assert watched(lambda s: 80.0 if round(s * 30) % 200 == 7 else 40.0, noise=0.01) == {}


def test_given_a_change_of_the_tier_when_judged_then_times_of_two_tiers_make_no_trend():
    assert (
        watched(lambda s: 20.0 if s < 30 else 44.0, tier=lambda second: int(second > 30), noise=0.01) == {}
    )


def test_given_few_frames_when_judged_then_they_wait_until_they_are_enough():
    watch = DriftWatch("camera")
    for second in range(1, 5):
        watch.add(0, 10.0)
        assert watch.step(second * S, FRESH_MS) is None
    assert len(watch.frames) == 4


def test_given_frames_of_many_tiers_when_none_has_enough_then_there_is_no_alert_but_they_count_as_judged():
    watch = DriftWatch("camera")
    for frame in range(30):
        watch.add(frame % 10, 100.0)
    assert watch.step(S, FRESH_MS) is None
    assert not watch.frames
