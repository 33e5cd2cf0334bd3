import pytest

from torchperf_ros.core.anomaly_rules import AnomalyRules, Level
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.outcome import Fallback, Outcome

SUSTAINED = 10


@pytest.fixture
def tell(make_answer):
    rules = AnomalyRules("perception", cooldown_s=5.0)

    def answered(at_s, outcome=Outcome.LATE, misses=1, **values):
        answer = make_answer(outcome, Fallback.HOLD_LAST, now_ns=round(at_s * NS_PER_S), **values)
        return rules.answered(answer, misses, SUSTAINED)

    answered.rules = rules
    return answered


def test_given_a_miss_when_told_then_it_is_a_warning_with_what_one_asks_next(tell):
    anomaly = tell(0, seq=42, reason="tier full was not done after 49.0 ms", total_ms=49.5)
    assert anomaly.level is Level.WARN
    assert anomaly.name == "perception: deadline missed"
    assert anomaly.message == "tier full was not done after 49.0 ms"
    assert anomaly.values == {
        "seq": "42", "outcome": "late", "fallback": "hold_last", "total_ms": "49.500", "budget_ms": "50.000",
        "misses_in_a_row": "1", "held_back": "0",
    }  # fmt: skip


@pytest.mark.parametrize("outcome", [Outcome.ON_TIME, Outcome.STARTING])
def test_given_a_frame_that_is_no_anomaly_when_answered_then_nothing_is_told(tell, outcome):
    assert tell(0, outcome, misses=100) is None


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (Outcome.LATE, "deadline missed"),
        (Outcome.HUNG, "deadline missed"),
        (Outcome.CRASHED, "deadline missed"),
        (Outcome.ERROR, "model error"),
        (Outcome.INVALID, "invalid output"),
        (Outcome.BAD_INPUT, "bad input"),
    ],
)
def test_given_an_outcome_when_told_then_its_kind_is_named(tell, outcome, name):
    anomaly = tell(0, outcome)
    assert anomaly.name == f"perception: {name}"
    assert anomaly.values["outcome"] == outcome.word


def test_given_a_cooldown_when_the_kind_repeats_then_it_is_held_back_counted_and_told_after(tell):
    assert tell(0) is not None
    assert [tell(at_s) for at_s in (1, 2, 4.999)] == [None, None, None]
    assert tell(5).values["held_back"] == "3"
    assert tell(10).values["held_back"] == "0"


def test_given_a_cooldown_when_another_kind_comes_then_it_is_told(tell):
    assert tell(0, Outcome.LATE) is not None
    assert tell(0.1, Outcome.INVALID) is not None
    assert tell(0.2, Outcome.INVALID) is None


def test_given_a_cooldown_when_misses_become_sustained_then_the_error_is_told_at_once(tell):
    assert tell(0, misses=SUSTAINED - 2).level is Level.WARN
    assert tell(0.1, misses=SUSTAINED - 1) is None
    anomaly = tell(0.2, misses=SUSTAINED)
    assert anomaly.level is Level.ERROR
    assert anomaly.values["held_back"] == "1"
    assert tell(0.3, misses=SUSTAINED + 1) is None
    assert tell(0.4, misses=1) is None


def test_given_a_death_when_told_then_a_lasting_one_is_an_error_even_within_the_cooldown():
    rules = AnomalyRules("planning", cooldown_s=5.0)
    first = rules.worker_died("exit status 1", pid=7, restarts=1, lasting=False, now_ns=0)
    assert (first.level, first.name, first.message) == (Level.WARN, "planning: worker died", "exit status 1")
    assert (first.values["pid"], first.values["restarts"]) == ("7", "1")
    assert rules.worker_died("again", 8, 2, lasting=False, now_ns=NS_PER_S) is None
    lasting = rules.worker_died("and again", 9, 3, lasting=True, now_ns=2 * NS_PER_S)
    assert lasting.level is Level.ERROR
    assert lasting.values["held_back"] == "1"


def test_given_values_when_told_then_every_one_is_text(tell):
    assert all(isinstance(value, str) for value in tell(0).values.values())
