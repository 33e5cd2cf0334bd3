import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.stage.alert_rules import answer_alert, change_alert, death_alert

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
