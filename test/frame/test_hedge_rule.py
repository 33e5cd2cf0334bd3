from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.waiting import HedgeRule


def proven(rule, times):
    for _ in range(times):
        assert rule.wants_retrial()
        rule.retried(in_time=True)


def test_given_no_proof_when_asked_then_the_standby_is_kept_for_the_next_frame():
    rule = HedgeRule()
    assert not rule.allowed
    assert rule.words.startswith("not yet: the standby is kept for the next frame; 0 of 3")


def test_given_three_late_frames_that_were_quick_again_when_asked_then_hedges_are_allowed():
    rule = HedgeRule()
    proven(rule, 2)
    assert not rule.allowed
    proven(rule, 1)
    assert rule.allowed
    assert not rule.wants_retrial()


def test_given_hedges_that_pay_when_many_are_given_then_they_stay_allowed():
    rule = HedgeRule()
    proven(rule, 3)
    for _ in range(100):
        rule.hedged(in_time=True)
    assert (rule.allowed, rule.hedges, rule.lost_hedges) == (True, 100, 0)


def test_given_a_frame_that_is_late_on_both_when_hedged_then_it_takes_twice_the_proofs_and_a_frame_goes_by_before():
    rule = HedgeRule()
    proven(rule, 3)
    rule.hedged(in_time=False)
    assert not rule.allowed
    assert rule.words.startswith("suspended: frames were late on both workers (1 times); 0 of 6")
    assert not rule.wants_retrial()
    proven(rule, 5)
    assert not rule.allowed
    proven(rule, 1)
    assert rule.allowed


@given(st.lists(st.booleans(), max_size=300))
def test_given_any_late_frames_when_retried_then_three_in_a_row_precede_a_hedge_and_patience_is_bounded(in_time):
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
