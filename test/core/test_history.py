import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.history import GapRule, StampVerdict

MS = 1_000_000
START = 1_700_000_000_000 * MS


def rule() -> GapRule:
    return GapRule(max_gap_ns=500 * MS, tolerance_ns=200 * MS)


@pytest.mark.parametrize(
    ("step_ns", "verdict"),
    [
        (1, StampVerdict.NEXT),
        (500 * MS, StampVerdict.NEXT),
        (500 * MS + 1, StampVerdict.GAP),
        (0, StampVerdict.REPEATED),
        (-1, StampVerdict.OLDER),
        (-200 * MS, StampVerdict.OLDER),
        (-200 * MS - 1, StampVerdict.JUMPED_BACK),
    ],
)
def test_given_a_last_stamp_when_the_next_comes_then_its_step_decides(step_ns, verdict):
    judged = rule()
    assert judged.judge(START) is StampVerdict.FIRST
    assert judged.judge(START + step_ns) is verdict


@pytest.mark.parametrize("stamp_ns", [0, -1])
def test_given_any_last_stamp_when_a_sample_has_none_then_it_appends_and_moves_nothing(stamp_ns):
    judged = rule()
    assert judged.judge(stamp_ns) is StampVerdict.UNSTAMPED
    judged.judge(START)
    assert judged.judge(stamp_ns) is StampVerdict.UNSTAMPED
    assert judged.judge(START) is StampVerdict.REPEATED


def test_given_an_ignored_stamp_when_the_next_comes_then_the_last_kept_one_still_counts():
    judged = rule()
    judged.judge(START)
    judged.judge(START - 100 * MS)
    assert judged.judge(START - 50 * MS) is StampVerdict.OLDER


def test_given_a_jump_back_when_the_log_goes_on_then_its_stamps_are_next_again():
    judged = rule()
    judged.judge(START + 60_000 * MS)
    assert judged.judge(START) is StampVerdict.JUMPED_BACK
    assert judged.judge(START + 33 * MS) is StampVerdict.NEXT


def test_given_one_stamp_from_the_far_future_when_time_goes_on_then_the_rule_recovers_at_once():
    judged = rule()
    judged.judge(START)
    assert judged.judge(START + 3_600_000 * MS) is StampVerdict.GAP
    assert judged.judge(START + 33 * MS) is StampVerdict.JUMPED_BACK
    assert judged.judge(START + 66 * MS) is StampVerdict.NEXT


def test_given_a_last_stamp_when_forgotten_then_any_stamp_is_first_and_the_counts_stay():
    judged = rule()
    judged.judge(START)
    judged.forget()
    assert judged.judge(START - 10_000 * MS) is StampVerdict.FIRST
    assert judged.counts[StampVerdict.FIRST] == 2


def test_given_verdicts_when_asked_then_only_repeats_are_ignored_and_only_jumps_reset():
    assert {verdict for verdict in StampVerdict if verdict.ignores} == {StampVerdict.REPEATED, StampVerdict.OLDER}
    assert {verdict for verdict in StampVerdict if verdict.resets} == {StampVerdict.GAP, StampVerdict.JUMPED_BACK}


@given(st.lists(st.integers(min_value=-(2**63), max_value=2**63 - 1) | st.integers(START, START + 1000 * MS)))
def test_given_any_stamps_when_judged_then_every_one_is_counted_once(stamps_ns):
    judged = rule()
    verdicts = [judged.judge(stamp_ns) for stamp_ns in stamps_ns]
    assert {verdict: count for verdict, count in judged.counts.items() if count} == {
        verdict: verdicts.count(verdict) for verdict in set(verdicts)
    }


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_given_any_stamps_when_judged_then_kept_ones_rise_except_after_a_jump_back(stamps_ns):
    judged = rule()
    last_ns = 0
    for stamp_ns in stamps_ns:
        verdict = judged.judge(stamp_ns)
        if verdict.ignores:
            assert stamp_ns <= last_ns
            continue
        assert stamp_ns > last_ns or verdict is StampVerdict.JUMPED_BACK
        last_ns = stamp_ns


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_gap_ns": 0, "tolerance_ns": 0}, "max_gap_ns is 0"),
        ({"max_gap_ns": 1, "tolerance_ns": -1}, "tolerance_ns is -1"),
    ],
)
def test_given_a_bad_bound_when_made_then_the_error_names_it(values, named):
    with pytest.raises(ConfigError, match=named):
        GapRule(**values)
