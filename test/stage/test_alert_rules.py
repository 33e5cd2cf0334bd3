import random

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.alert_rules import answer_alert, change_alert, death_alert
from torchperf_ros.stage.limits import DriftWatch

SUSTAINED = 10


@pytest.fixture
def tell(make_answer):
    def answered(outcome=Outcome.LATE, misses=1, fallback=Fallback.HOLD_LAST, **values):
        return answer_alert("perception", make_answer(outcome, fallback, **values), misses, SUSTAINED, None)

    return answered


def test_given_a_miss_when_told_then_it_is_a_warning_with_what_one_asks_next(tell):
    anomaly = tell(seq=42, reason="tier full was not done after 49.0 ms", total_ms=49.5)
    assert anomaly.level is Level.WARN
    assert anomaly.name == "perception: result too slow"
    assert anomaly.message == "tier full was not done after 49.0 ms"
    assert anomaly.values == {
        "seq": "42",
        "outcome": "late",
        "fallback": "hold_last",
        "total_ms": "49.500",
        "budget_ms": "50.000",
        "misses_in_a_row": "1",
        "value": "49.500",
        "baseline": "50.000",
    }


@pytest.mark.parametrize("outcome", [Outcome.ON_TIME, Outcome.STARTING])
def test_given_a_frame_that_is_no_anomaly_when_answered_then_nothing_is_told(tell, outcome):
    assert tell(outcome, misses=100) is None


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (Outcome.LATE, "result too slow"),
        (Outcome.HUNG, "worker failed"),
        (Outcome.CRASHED, "worker failed"),
        (Outcome.ERROR, "model error"),
        (Outcome.INVALID, "invalid output"),
        (Outcome.BAD_INPUT, "bad input"),
        (Outcome.PARTIAL, "partial result"),
    ],
)
def test_given_an_outcome_when_told_then_its_kind_is_named(tell, outcome, name):
    anomaly = tell(outcome)
    assert anomaly.name == f"perception: {name}"
    assert anomaly.values["outcome"] == outcome.word


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.HUNG, Outcome.CRASHED])
def test_given_an_answer_when_it_left_before_its_deadline_then_none_is_said_to_be_missed(tell, outcome):
    assert "deadline missed" not in tell(outcome, lateness_ms=0.0).name
    assert tell(outcome, lateness_ms=0.1).name == "perception: deadline missed"
    assert tell(outcome, lateness_ms=-1.0, fallback=Fallback.NONE).name == "perception: deadline missed"


def test_given_misses_when_they_become_sustained_then_they_are_an_error(tell):
    assert tell(misses=SUSTAINED - 1).level is Level.WARN
    assert tell(misses=SUSTAINED).level is Level.ERROR


def test_given_a_death_when_told_then_a_lasting_one_is_an_error():
    first = death_alert("planning", "exit status 1\nTraceback", pid=7, restarts=1, lasting=False)
    assert (first.level, first.name, first.message) == (
        Level.WARN,
        "planning: worker died",
        "exit status 1",
    )
    assert first.values == {"pid": "7", "restarts": "1", "detail": "Traceback"}
    assert death_alert("planning", "and again", 9, 3, lasting=True).level is Level.ERROR


def test_given_something_about_a_model_when_told_then_it_is_never_held_back():
    anomaly = change_alert("planning", "model", "tier full: refused")
    assert (anomaly.name, anomaly.level, anomaly.once) == ("planning: model", Level.WARN, True)


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
