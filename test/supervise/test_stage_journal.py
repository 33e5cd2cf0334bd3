import math
import time

import pytest

from torchperf_ros.core.anomaly_rules import Level
from torchperf_ros.core.config import stage_config
from torchperf_ros.core.frame import Answer, Frame, Origin
from torchperf_ros.core.outcome import Fallback, Health, Outcome
from torchperf_ros.supervise.stage_journal import StageJournal


@pytest.fixture
def journal():
    made = StageJournal(stage_config("perception", {"sustained_misses": 3, "recover_frames": 2}))
    made.health.ready()
    return made


def frame(seq=0):
    return Frame(seq, b"", 5, 1.0, time.monotonic_ns(), 0, Origin(0, math.nan))


def answer(journal, outcome, fallback):
    one = frame()
    journal.received(one, stamped=True)
    return journal.answered(Answer(one, outcome, fallback, "", 0, 0.0, 1.0, 50.0, 0.0, time.monotonic_ns()))


def state(journal):
    return journal.health.state(time.monotonic_ns())


def test_given_answers_when_noted_then_counters_health_and_anomalies_agree(journal):
    assert answer(journal, Outcome.ON_TIME, None) is None
    assert state(journal) is Health.NOMINAL
    assert answer(journal, Outcome.LATE, Fallback.HOLD_LAST).level is Level.WARN
    assert state(journal) is Health.DEGRADED
    answer(journal, Outcome.LATE, Fallback.HOLD_LAST)
    assert answer(journal, Outcome.LATE, Fallback.HOLD_LAST).level is Level.ERROR
    assert state(journal) is Health.SAFE_STOP
    assert (journal.statistics.frames, journal.statistics.answered) == (4, 4)


def test_given_stale_frames_when_noted_then_they_count_as_misses_that_nobody_answered(journal):
    answer(journal, Outcome.ON_TIME, None)
    for _ in range(3):
        journal.stale()
    assert state(journal) is Health.SAFE_STOP
    assert journal.statistics.answered == 1


def test_given_a_death_when_another_worker_serves_then_health_is_not_lost(journal):
    answer(journal, Outcome.ON_TIME, None)
    assert journal.worker_died("why", 7, 1, lasting=False, alone=False).name == "perception: worker died"
    assert state(journal) is Health.NOMINAL
    journal.worker_died("why", 8, 2, lasting=True, alone=False)
    assert state(journal) is Health.NOMINAL


def test_given_a_death_when_nobody_else_serves_then_the_stage_starts_again_or_stops_safely_if_it_lasts(journal):
    answer(journal, Outcome.ON_TIME, None)
    journal.worker_died("why", 7, 1, lasting=False, alone=True)
    assert state(journal) is Health.STARTING
    journal.worker_died("why", 8, 2, lasting=True, alone=True)
    assert state(journal) is Health.SAFE_STOP


def test_given_changed_limits_when_reconfigured_then_they_hold_at_once(journal):
    answer(journal, Outcome.LATE, Fallback.HOLD_LAST)
    journal.reconfigure(stage_config("perception", {"sustained_misses": 2, "recover_frames": 2}))
    answer(journal, Outcome.LATE, Fallback.HOLD_LAST)
    assert state(journal) is Health.SAFE_STOP


def test_given_a_changed_window_when_reconfigured_then_latencies_are_told_of_that_span(journal):
    answer(journal, Outcome.ON_TIME, None)
    now_ns = time.monotonic_ns() + 3_000_000_000
    assert journal.figures.read(now_ns, Health.NOMINAL).latency.window.count == 1
    journal.reconfigure(stage_config("perception", {"window_s": 2.0}))
    assert journal.figures.read(now_ns, Health.NOMINAL).latency.window.count == 0
