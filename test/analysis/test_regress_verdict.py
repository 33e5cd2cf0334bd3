import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.analysis.regress_effect import MinEffects
from torchperf_ros.analysis.regress_interval import Interval
from torchperf_ros.analysis.regress_limit import Limits
from torchperf_ros.analysis.regress_metric import MAX, MISS, OUTPUTS, P99, START_UP
from torchperf_ros.analysis.regress_verdict import Estimate, Rules, Verdict, judge

RULES = Rules(MinEffects(["p99=1ms", "start_up=1s", "outputs=0pp"]))


def p99(new, low, high, p, **changes):
    return Estimate("perception", P99, 20.0, new, Interval(low, high, p), **{"samples": 1000, **changes})


def verdict(one, rules=RULES):
    return judge([one], rules)[0].verdict


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(22.0, 1.0, 3.0, 0.001), Verdict.WORSE),
        (p99(18.0, -3.0, -1.0, 0.001), Verdict.BETTER),
        (p99(20.1, -0.5, 0.7, 0.5), Verdict.EQUIVALENT),
        (p99(20.5, 0.1, 0.9, 0.01), Verdict.EQUIVALENT),  # there is a change, and it does not matter
        (p99(20.5, 0.1, 1.4, 0.01), Verdict.NOT_ENOUGH),  # whether it matters is not known
        (p99(22.0, -1.0, 5.0, 0.2), Verdict.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, enough=2000.0, why="too few"), Verdict.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, decides=False), Verdict.INFORMATIVE),
        (Estimate("perception", P99, math.nan, 20.0), Verdict.NOT_ENOUGH),
        (Estimate("perception", MAX, 20.0, 90.0, decides=False), Verdict.INFORMATIVE),
        (Estimate("", START_UP, 2.0, 2.9, single=True), Verdict.EQUIVALENT),
        (Estimate("", START_UP, 2.0, 3.1, single=True), Verdict.WORSE),
        (Estimate("", START_UP, 5.0, 2.0, single=True), Verdict.BETTER),
        (Estimate("", START_UP, 2.0, math.nan, single=True), Verdict.NOT_ENOUGH),
        (Estimate("perception", OUTPUTS, 0.0, 0.0, single=True), Verdict.EQUIVALENT),
        (Estimate("perception", OUTPUTS, 0.0, 0.01, single=True), Verdict.WORSE),
    ],
)
def test_given_an_estimate_when_judged_then_the_verdict_is(one, expected):
    assert verdict(one) is expected


def test_given_many_comparisons_when_judged_then_what_chance_explains_is_no_alarm_unless_asked_for():
    one = p99(22.0, 0.2, 3.8, 0.03)
    others = [p99(20.0, -0.5, 0.5, 0.9) for _ in range(5)]

    assert judge([one, *others], RULES)[0].verdict is Verdict.NOT_ENOUGH
    assert judge([one, *others], RULES)[0].p == pytest.approx(0.18)
    assert judge([one, *others], Rules(RULES.effects, correction="none"))[0].verdict is Verdict.WORSE


def test_given_estimates_that_do_not_decide_when_judged_then_they_are_no_comparisons():
    silent = [p99(20.0, -9.0, 9.0, 0.9, decides=False), p99(20.0, -9.0, 9.0, 0.9, enough=5000.0)]

    assert judge([p99(22.0, 0.2, 3.8, 0.03), *silent], RULES)[0].verdict is Verdict.WORSE


def test_given_a_wide_interval_when_judged_then_four_times_the_frames_would_do_for_half_of_it():
    found = judge([p99(20.0, -2.0, 2.0, 1.0)], RULES)[0]

    assert found.verdict is Verdict.NOT_ENOUGH
    assert found.needed == 4000
    assert judge([p99(20.0, -2.0, 2.0, 1.0, narrows=1.0)], RULES)[0].needed == 2000


def test_given_less_than_an_interval_takes_when_judged_then_that_many_are_asked_for_at_least():
    assert judge([p99(20.0, -1.1, 1.1, 1.0, enough=4321.0)], RULES)[0].needed == 4400
    assert judge([Estimate("perception", P99, math.nan, math.nan, enough=500.0)], RULES)[0].needed == 500


@given(st.floats(-5, 5), st.floats(0.01, 10), st.floats(0, 1))
def test_given_any_interval_when_judged_then_only_what_moved_by_the_margin_is_worse_or_better(moved, reach, p):
    found = judge([p99(20.0 + moved, moved - reach, moved + reach, p)], RULES)[0]

    if found.verdict in {Verdict.WORSE, Verdict.BETTER}:
        assert abs(moved) >= 1.0 - 1e-9
        assert (found.verdict is Verdict.WORSE) == (moved > 0)
    if found.verdict is Verdict.NOT_ENOUGH:
        assert found.needed >= 1000


@pytest.mark.parametrize(
    ("new", "breaks"), [(1.0, False), (1.01, True), (math.nan, True)], ids=["at the limit", "over it", "not measured"]
)
def test_given_a_limit_when_judged_then_it_is_on_what_was_measured_whatever_the_verdict(new, breaks):
    rules = Rules(MinEffects(), limits=Limits(["miss=50%", "perception.miss=1%"]))
    missed = [Estimate(stage, MISS, 0.0, new) for stage in ("perception", "planning")]
    found = judge([*missed, Estimate("perception", P99, 20.0, 1e9)], rules)

    assert [one.limit for one in found[:2]] == [1.0, 50.0]
    assert found[0].breaks_limit is breaks
    assert found[1].breaks_limit is math.isnan(new)
    assert not found[2].breaks_limit


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(30.0, -1.0, 21.0, 0.2), True),  # ten margins more, and chance may explain it
        (p99(29.9, -1.0, 21.0, 0.2), False),
        (p99(10.0, -21.0, 1.0, 0.2), False),  # less is no harm
        (p99(30.0, 9.0, 11.0, 0.001), False),  # it has a verdict
        (Estimate("perception", P99, 20.0, math.nan), True),
        (Estimate("perception", P99, math.nan, 20.0), False),
        (Estimate("", START_UP, 2.0, math.nan, single=True), False),  # another kind of file does not tell it
    ],
)
def test_given_no_verdict_when_far_more_than_the_margin_or_gone_then_it_is_conspicuous(one, expected):
    assert judge([one], RULES)[0].conspicuous is expected
