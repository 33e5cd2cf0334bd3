import math
import time

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.api.clock import NS_PER_S, VirtualClock
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.figures import StageStatistics
from torchperf_ros.stage.frame import Answer, Frame, Origin

START_NS = 1_000 * NS_PER_S


@pytest.fixture
def statistics():
    made = StageStatistics(stage_config("perception", {"sustained_misses": 3, "recover_frames": 2}))
    made.health.ready()
    return made


def frame(seq=0):
    return Frame(seq, b"", 5, 1.0, time.monotonic_ns(), 0, Origin(0, math.nan))


def answer(statistics, outcome, fallback, *, stale=False):
    one = frame()
    one.stale = stale
    statistics.received(one, stamped=True)
    return statistics.answered(
        Answer(one, outcome, fallback, "", 0, 0.0, 1.0, 50.0, 0.0, time.monotonic_ns())
    )


def state(statistics):
    return statistics.health.state(time.monotonic_ns())


def test_given_answers_when_noted_then_counters_health_and_anomalies_agree(statistics):
    assert answer(statistics, Outcome.ON_TIME, None) is None
    assert state(statistics) is Health.NOMINAL
    assert answer(statistics, Outcome.LATE, Fallback.HOLD_LAST).level is Level.WARN
    assert state(statistics) is Health.DEGRADED
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    assert answer(statistics, Outcome.LATE, Fallback.HOLD_LAST).level is Level.ERROR
    assert state(statistics) is Health.SAFE_STOP
    assert (statistics.counters.frames, statistics.counters.answered) == (4, 4)


def test_given_stale_frames_when_noted_then_they_are_answered_count_as_misses_and_have_an_alert(statistics):
    answer(statistics, Outcome.ON_TIME, None)
    alerts = [
        answer(statistics, Outcome.LATE, fallback, stale=True) for fallback in (Fallback.HOLD_LAST,) * 3
    ]
    assert state(statistics) is Health.SAFE_STOP
    assert (statistics.counters.answered, statistics.counters.stale) == (4, 3)
    assert {alert.name for alert in alerts} == {"perception: stale"}
    assert [alert.level for alert in alerts] == [Level.WARN, Level.WARN, Level.ERROR]
    answer(statistics, Outcome.LATE, Fallback.NONE, stale=True)
    assert (statistics.counters.unanswered, statistics.counters.stale) == (1, 4)


def answers_every(ms, comes_every_ms, seconds, statistics, clock):
    """Frames of a model that takes so long, one after the other, the newest each time.

    What was told of them.
    """
    told, superseded, busy_until_ms, waiting = [], 0, 0.0, False
    for number in range(round(seconds * 1000 / comes_every_ms)):
        now_ms = number * comes_every_ms
        clock.reach(START_NS + round(now_ms * 1e6))
        if waiting and busy_until_ms <= now_ms:
            waiting, busy_until_ms = False, busy_until_ms + ms
            take(statistics, clock, ms)
        superseded += waiting
        waiting = busy_until_ms > now_ms
        if not waiting:
            busy_until_ms = now_ms + ms
            take(statistics, clock, ms)
        told.append((now_ms / 1000, come(statistics, clock, superseded)))
    return [(at_s, alert) for at_s, alert in told if alert is not None]


def come(statistics, clock, superseded):
    return statistics.received(
        Frame(0, b"", 5, 1.0, clock(), 0, Origin(0, math.nan)), superseded, stamped=True
    )


def take(statistics, clock, ms):
    one = Frame(0, b"", 5, 1.0, clock(), 0, Origin(0, math.nan))
    statistics.answered(Answer(one, Outcome.ON_TIME, None, "", 0, 5.0, ms + 5.0, 200.0, -1.0, clock()))


@pytest.fixture
def clocked():
    clock = VirtualClock(START_NS)
    made = StageStatistics(stage_config("perception", {"recover_frames": 2}), clock)
    made.health.ready()
    return made, clock


def test_given_a_model_slower_than_its_sensor_when_ten_seconds_have_passed_then_it_is_degraded_and_told(
    clocked,
):
    statistics, clock = clocked
    told = answers_every(53.0, 1000 / 60, 30, statistics, clock)
    assert [round(at_s) for at_s, _ in told] == list(range(10, 30))
    _, alert = told[0]
    assert (alert.level, alert.name) == (Level.WARN, "perception: drops")
    assert " of 600 frames in 10 s had no answer, as a newer one came first: " in alert.message
    assert "one comes every 16.7 ms and takes 53.0; " in alert.message
    assert float(alert.values["value"]) == pytest.approx(68, abs=2)
    assert statistics.health.state(clock()) is Health.DEGRADED


@pytest.mark.parametrize("takes_ms", [10.0, 33.0, 34.0])
def test_given_a_model_that_keeps_up_or_nearly_so_when_frames_come_then_it_stays_nominal(clocked, takes_ms):
    statistics, clock = clocked
    assert not answers_every(takes_ms, 33.4, 60, statistics, clock)
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_an_input_that_becomes_slower_when_ten_seconds_have_passed_then_it_is_nominal_again(clocked):
    statistics, clock = clocked
    superseded = int(answers_every(53.0, 1000 / 60, 12, statistics, clock)[-1][1].values["superseded"])
    for _ in range(120):
        clock.advance_ms(100)
        alert = come(statistics, clock, superseded)
        take(statistics, clock, 53.0)
    assert alert is None
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_a_pause_of_the_input_when_it_comes_back_then_what_was_superseded_before_says_nothing(
    clocked,
):
    statistics, clock = clocked
    assert answers_every(53.0, 1000 / 60, 12, statistics, clock)
    clock.advance_ms(30_000)
    assert come(statistics, clock, 900) is None
    take(statistics, clock, 53.0)
    assert statistics.health.state(clock()) is Health.NOMINAL


def test_given_frames_in_bunches_when_too_many_are_superseded_then_the_cause_is_not_the_model(clocked):
    statistics, clock = clocked
    told = []
    for number in range(200):
        clock.advance_ms(66.6)
        take(statistics, clock, 10.0)
        told += [come(statistics, clock, number), come(statistics, clock, number + 1)]
    assert any(alert and "takes 10.0, but they come in bunches" in alert.message for alert in told)


def test_given_a_death_when_another_worker_serves_then_health_is_not_lost(statistics):
    answer(statistics, Outcome.ON_TIME, None)
    assert statistics.worker_died("why", 7, 1, lasting=False, alone=False).name == "perception: worker died"
    assert state(statistics) is Health.NOMINAL
    statistics.worker_died("why", 8, 2, lasting=True, alone=False)
    assert state(statistics) is Health.NOMINAL


def test_given_a_death_when_nobody_else_serves_then_the_stage_starts_again_or_stops_safely_if_it_lasts(
    statistics,
):
    answer(statistics, Outcome.ON_TIME, None)
    statistics.worker_died("why", 7, 1, lasting=False, alone=True)
    assert state(statistics) is Health.STARTING
    statistics.worker_died("why", 8, 2, lasting=True, alone=True)
    assert state(statistics) is Health.SAFE_STOP


def test_given_changed_limits_when_reconfigured_then_they_hold_at_once(statistics):
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    statistics.reconfigure(stage_config("perception", {"sustained_misses": 2, "recover_frames": 2}))
    answer(statistics, Outcome.LATE, Fallback.HOLD_LAST)
    assert state(statistics) is Health.SAFE_STOP


def test_given_a_changed_window_when_reconfigured_then_latencies_are_told_of_that_span(statistics):
    answer(statistics, Outcome.ON_TIME, None)
    now_ns = time.monotonic_ns() + 3_000_000_000
    assert statistics.figures.read(now_ns, Health.NOMINAL).latency.window.count == 1
    statistics.reconfigure(stage_config("perception", {"window_s": 2.0}))
    assert statistics.figures.read(now_ns, Health.NOMINAL).latency.window.count == 0
