import math
import time

import pytest

from torchperf_ros.config.config import stage_config
from torchperf_ros.frame.alert_rules import Level
from torchperf_ros.frame.frame import Answer, Frame, Origin
from torchperf_ros.frame.outcome import Fallback, Health, Outcome
from torchperf_ros.stage.stage_statistics import StageStatistics


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
    return statistics.answered(Answer(one, outcome, fallback, "", 0, 0.0, 1.0, 50.0, 0.0, time.monotonic_ns()))


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
    alerts = [answer(statistics, Outcome.LATE, fallback, stale=True) for fallback in (Fallback.HOLD_LAST,) * 3]
    assert state(statistics) is Health.SAFE_STOP
    assert (statistics.counters.answered, statistics.counters.stale) == (4, 3)
    assert {alert.name for alert in alerts} == {"perception: stale"}
    assert [alert.level for alert in alerts] == [Level.WARN, Level.WARN, Level.ERROR]
    answer(statistics, Outcome.LATE, Fallback.NONE, stale=True)
    assert (statistics.counters.unanswered, statistics.counters.stale) == (1, 4)


def test_given_a_death_when_another_worker_serves_then_health_is_not_lost(statistics):
    answer(statistics, Outcome.ON_TIME, None)
    assert statistics.worker_died("why", 7, 1, lasting=False, alone=False).name == "perception: worker died"
    assert state(statistics) is Health.NOMINAL
    statistics.worker_died("why", 8, 2, lasting=True, alone=False)
    assert state(statistics) is Health.NOMINAL


def test_given_a_death_when_nobody_else_serves_then_the_stage_starts_again_or_stops_safely_if_it_lasts(statistics):
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
