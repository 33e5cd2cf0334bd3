import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.practice import HedgeRule, Job, Practice, Purpose
from torchperf_ros.stage.waiter import PublishMargin


def proven(rule, times):
    for _ in range(times):
        assert rule.wants_retrial()
        rule.retried(in_time=True)


def test_given_no_proof_when_asked_then_the_standby_is_kept_for_the_next_frame():
    rule = HedgeRule()
    assert not rule.allowed
    assert rule.words.startswith("not yet: the standby is kept for the next frame; 0 of 3")


def test_given_a_frame_that_is_late_on_both_when_hedged_then_it_takes_twice_the_proofs_and_a_frame_goes_by_before():
    rule = HedgeRule()
    proven(rule, 2)
    assert not rule.allowed
    proven(rule, 1)
    assert rule.allowed
    rule.hedged(in_time=False)
    assert not rule.allowed
    assert rule.words.startswith("suspended: frames were late on both workers (1 times); 0 of 6")
    assert not rule.wants_retrial()
    proven(rule, 5)
    assert not rule.allowed
    proven(rule, 1)
    assert rule.allowed


@given(st.lists(st.booleans(), max_size=300))
def test_given_any_late_frames_when_retried_then_three_in_a_row_precede_a_hedge_and_patience_is_bounded(
    in_time,
):
    rule, quick = HedgeRule(), 0
    for good in in_time:
        waited = 0
        while not rule.allowed and not rule.wants_retrial():
            waited += 1
            assert waited <= 16
        if rule.allowed:
            assert quick >= 3
            rule.hedged(in_time=good)
        else:
            rule.retried(in_time=good)
        quick = quick + 1 if good else 0
    for _ in range(16 + 96):
        if not rule.allowed and rule.wants_retrial():
            rule.retried(in_time=True)
    assert rule.allowed


WINDOW = 128


def margin_of(*history):
    """Of waits that ended so late, and (in a list) publications that took so long, in ms."""
    margin = PublishMargin()
    for each in history:
        margin.published(each[0]) if isinstance(each, list) else margin.woke(each)
    return pytest.approx(margin.ms)


def test_given_what_waits_and_publications_took_when_asked_then_the_worst_of_each_add_up_within_bounds():
    assert margin_of() == 0.2  # both parts are at the minimum
    assert margin_of(0.3, 0.7, 0.2, [0.05], [0.4]) == 0.7 + 0.4
    assert margin_of(1000.0, [1000.0]) == 4.0
    assert margin_of(*[-5.0] * WINDOW, [0.5]) == 0.5  # a wake-up before its time does not shorten it
    assert margin_of(1.5, *[0.0] * (WINDOW - 1)) == 1.6
    assert margin_of(1.5, *[0.0] * WINDOW) == 0.1
    assert PublishMargin(first_wake_ms=2.0).ms == pytest.approx(2.1)


@given(st.lists(st.tuples(st.booleans(), st.floats(-10, 1e5)), max_size=50))
def test_given_any_history_when_learned_then_the_margin_is_bounded_and_covers_the_recent_worst(history):
    margin = PublishMargin()
    worst_ms = {True: 0.0, False: 0.0}
    for is_wake, took_ms in history:
        margin.woke(took_ms) if is_wake else margin.published(abs(took_ms))
        worst_ms[is_wake] = max(worst_ms[is_wake], took_ms if is_wake else abs(took_ms))
        assert 0.1 <= margin.ms <= 4.0
        assert margin.ms >= min(sum(worst_ms.values()), 4.0)


# -- practice


def spare(idle_since_s=99.0, *, has_run=True):
    return SimpleNamespace(busy_since_ns=round((100.0 - idle_since_s) * NS_PER_S), has_run=has_run)


def next_job(practice, worker, *, turn="answered", ladder=None, room_ms=1e9):
    return practice.next(
        turn,
        worker,
        ladder or TierLadder(2),
        fresh_ms=50.0,
        room_ms=room_ms,
        way_ms=math.inf,
        hang_ms=1000.0,
        now_ns=100 * NS_PER_S,
    )


def test_given_a_spare_worker_that_has_rested_when_asked_then_it_rehearses_on_the_cheapest_tier():
    assert next_job(Practice(), spare(5.1)) == Job(Purpose.REHEARSAL, 1, "answered")
    assert next_job(Practice(), spare(4.9)) is None
    assert next_job(Practice(), None) is None


def test_given_a_late_frame_when_a_spare_worker_is_warm_then_it_runs_that_frame_once_more_and_only_once():
    practice = Practice()
    practice.was_late("late")
    assert next_job(practice, None) is None
    assert next_job(practice, spare(1.0, has_run=False)) is None
    assert next_job(practice, spare(1.0)) == Job(Purpose.RETRIAL, 1, "late")
    assert next_job(practice, spare(1.0)) is None


@pytest.mark.parametrize("lost", [False, True])
def test_given_jobs_of_each_kind_when_they_end_then_only_retrials_and_probes_are_learned_from(lost):
    ladder, practice, probed = TierLadder(2), Practice(), []
    ladder.probed = lambda tier, inference_ms, whole_ms, fresh_ms: probed.append((tier, whole_ms))
    for purpose in Purpose:
        if lost:
            practice.lost(Job(purpose, 0), ladder)
        else:
            practice.done(Job(purpose, 0), ladder, good=True, inference_ms=8.0, took_ms=9.0, fresh_ms=50.0)
    rule = practice.hedge_rule
    assert (rule.retrials, rule.slow_retrials) == (1, int(lost))
    assert probed == [(0, math.inf if lost else 9.0)]


def test_given_a_retrial_without_a_result_when_it_ends_then_it_proves_nothing():
    practice = Practice()
    job = Job(Purpose.RETRIAL, 1)
    practice.done(job, TierLadder(2), good=False, inference_ms=math.nan, took_ms=9.0, fresh_ms=50.0)
    assert practice.hedge_rule.retrials == 0


def test_given_a_late_frame_of_a_version_that_has_changed_its_place_when_asked_then_it_is_not_run_again():
    practice = Practice()
    practice.was_late("late")
    practice.forget()
    assert next_job(practice, spare(1.0)) is None
