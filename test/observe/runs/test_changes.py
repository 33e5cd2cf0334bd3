"""The verdict on a change."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchperf_ros.observe.runs.changes import (
    MAX,
    MEMORY_SLOPE,
    METRICS,
    MISS,
    OUTPUTS,
    P99,
    START_UP,
    Judgement,
    MetricChange,
    judge,
)

MARGIN = 0.05  # of a p99 of 20 ms: 1 ms


def judged(one):
    return judge([one], MARGIN)[0]


def test_given_a_base_when_its_margin_is_asked_for_then_it_is_the_larger_of_share_and_least():
    assert P99.margin(100.0) == pytest.approx(3.0)
    assert P99.margin(100.0, 0.1) == pytest.approx(10.0)
    assert P99.margin(1.0) == 0.2
    assert MEMORY_SLOPE.margin(math.nan) == 60.0
    assert len({metric.key for metric in METRICS}) == len(METRICS)


def p99(new, low, high, p, **changes):
    return MetricChange("perception", P99, 20.0, new, low, high, p, **{"samples": 1000, **changes})


def certain(new):
    return MetricChange("perception", OUTPUTS, 0.0, new, new, new)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(22.0, 1.0, 3.0, 0.001), Judgement.WORSE),
        (p99(18.0, -3.0, -1.0, 0.001), Judgement.BETTER),
        (p99(20.1, -0.5, 0.7, 0.5), Judgement.EQUIVALENT),
        (p99(20.5, 0.1, 0.9, 0.01), Judgement.EQUIVALENT),  # there is a change, and it does not matter
        (p99(20.5, 0.1, 1.4, 0.01), Judgement.NOT_ENOUGH),  # whether it matters is not known
        (p99(22.0, -1.0, 5.0, 0.2), Judgement.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, enough=2000.0, why="too few"), Judgement.NOT_ENOUGH),
        (p99(22.0, 1.0, 3.0, 0.001, decides=False), Judgement.INFORMATIVE),
        (MetricChange("perception", P99, math.nan, 20.0), Judgement.NOT_ENOUGH),
        (MetricChange("perception", MAX, 20.0, 90.0, decides=False), Judgement.INFORMATIVE),
        (certain(0.0), Judgement.EQUIVALENT),
        (certain(0.01), Judgement.WORSE),
    ],
)
def test_given_an_estimate_when_judged_then_the_verdict_is(one, expected):
    assert judged(one).verdict is expected


def test_given_many_comparisons_when_judged_then_what_chance_explains_is_no_alarm():
    one = p99(22.0, 0.2, 3.8, 0.03)
    others = [p99(20.0, -0.5, 0.5, 0.9) for _ in range(5)]
    silent = [
        p99(20.0, -9.0, 9.0, 0.9, decides=False),
        p99(20.0, -9.0, 9.0, 0.9, enough=5000.0),
        certain(0.0),
    ]
    found = judge([one, *others], MARGIN)[0]
    assert (found.verdict, found.p) == (Judgement.NOT_ENOUGH, pytest.approx(0.18))
    assert found.needed > 1000
    assert judged(one).verdict is Judgement.WORSE
    assert judge([one, *silent], MARGIN)[0].verdict is Judgement.WORSE  # these are no comparisons


@pytest.mark.parametrize(
    ("one", "needed"),
    [
        (p99(20.0, -2.0, 2.0, 1.0), 4000),
        (p99(20.0, -1.1, 1.1, 1.0, enough=4321.0), 4400),
        (MetricChange("perception", P99, math.nan, math.nan, enough=500.0), 500),
    ],
)
def test_given_a_wide_interval_when_judged_then_four_times_the_frames_would_do_for_half_of_it(one, needed):
    assert judge([one], MARGIN)[0].needed == needed


@given(st.floats(-5, 5), st.floats(0.01, 10), st.floats(0, 1))
@example(1.0, 1.0, 0.9999999999999999)
def test_given_any_interval_when_judged_then_only_what_moved_by_the_margin_is_worse_or_better(
    moved, reach, p
):
    found = judge([p99(20.0 + moved, moved - reach, moved + reach, p)], MARGIN)[0]
    if found.verdict in {Judgement.WORSE, Judgement.BETTER}:
        assert abs(moved) >= 1.0 - 1e-9
        assert (found.verdict is Judgement.WORSE) == (moved > 0)
    if found.verdict is Judgement.NOT_ENOUGH:
        assert found.needed >= 1000


@pytest.mark.parametrize(("new", "breaks"), [(1.0, False), (1.01, True), (math.nan, True)])
def test_given_a_limit_when_asked_then_it_is_on_what_was_measured(new, breaks):
    assert MetricChange("perception", MISS, 0.0, new, limit=1.0).breaks_limit is breaks
    assert not MetricChange("perception", MISS, 0.0, new).breaks_limit


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (p99(30.0, -1.0, 21.0, 0.2), True),  # ten margins more, and chance may explain it
        (p99(29.9, -1.0, 21.0, 0.2), False),
        (p99(10.0, -21.0, 1.0, 0.2), False),  # less is no harm
        (p99(30.0, 9.0, 11.0, 0.001), False),  # it has a verdict
        (MetricChange("perception", P99, 20.0, math.nan), True),
        (MetricChange("perception", P99, math.nan, 20.0), False),
        (MetricChange("", START_UP, 2.0, 23.0, decides=False), True),  # one run a side: shown, not judged
        (MetricChange("perception", MAX, 2.0, 90.0, decides=False), False),
    ],
)
def test_given_no_verdict_when_far_more_than_the_margin_or_gone_then_it_is_conspicuous(one, expected):
    assert judged(one).conspicuous is expected
