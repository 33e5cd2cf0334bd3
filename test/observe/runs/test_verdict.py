"""Margins, limits, and the verdict on an estimate."""

import math
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.observe.runs.compare.verdict import (
    COMPILE,
    MAX,
    MEMORY_SLOPE,
    METRICS,
    MISS,
    OUTPUTS,
    P50,
    P99,
    START_UP,
    Finding,
    Interval,
    Rules,
    Verdict,
    holm,
    judge,
    read_limits,
    read_margins,
)

RULES = Rules(read_margins(["p99=1ms", "start_up=1s"]))


def rules(*margins, limits=(), **changes):
    return Rules(read_margins(margins), read_limits(limits), **changes)


def test_given_margins_and_limits_when_asked_then_a_stages_own_wins_and_the_rest_has_the_metrics_own():
    assert Rules().margin("perception", P99, 100.0) == pytest.approx(3.0)
    assert Rules().margin("perception", P99, 1.0) == 0.2
    assert Rules().margin("", MEMORY_SLOPE, math.nan) == 60.0
    assert all(Rules().margin("", metric, 1.0) >= 0 for metric in METRICS.values())
    assert math.isnan(Rules().limit("perception", P99))
    limits = ["perception.p99=40 ms", "p99=50ms", "miss=.5%", "compile=60s"]
    found = rules("p50=2%,0.2ms", "p99=0.5ms", "planning.p99=10%", "miss=1pp", "miss = 2 pp", limits=limits)
    margins = [
        found.margin(stage, metric, base)
        for stage, metric, base in (
            ("planning", P50, 5.0),
            ("planning", P50, 50.0),
            ("perception", P99, 50.0),
            ("planning", P99, 50.0),
            ("planning", MISS, 50.0),
        )
    ]
    assert margins == pytest.approx([0.2, 1.0, 0.5, 5.0, 2.0])
    assert [found.limit(stage, P99) for stage in ("perception", "planning")] == [40.0, 50.0]
    assert found.limit("planning", MISS) == 0.5
    assert found.limited(["lanes"]) == {("perception", P99), ("lanes", P99), ("lanes", MISS), ("", COMPILE)}


@pytest.mark.parametrize(
    ("read", "setting", "words"),
    [
        (read_margins, "p98=3%", ("'p98'", "p95, p99")),
        (read_margins, "p99", ("p99=", "3%,2ms")),
        (read_margins, "p99=-3%", ("-3%",)),
        (read_margins, "p99=3s", ("3s",)),
        (read_margins, "=3%", ("''",)),
        (read_margins, "miss=3%", ("miss=3%", "0.5pp")),
        (read_margins, "memory_slope=1MiB", ("2MiB/h",)),
        (read_margins, "perception.compile=2s", ("compile is of the whole run", "has to be compile=2s")),
        *(
            (read_limits, setting, ("--limit", f"like {'2%' if 'miss' in setting else '2ms'}"))
            for setting in ("miss=1pp", "miss=1", "p99=3%", "p99=-1ms", "p99=1ms,2ms", "p99")
        ),
    ],
)
def test_given_a_margin_or_limit_that_is_none_when_read_then_the_message_says_what_would_do(
    read, setting, words
):
    with pytest.raises(ConfigError) as error:
        read([setting])
    assert all(word in str(error.value) for word in words)


def p99(new, low, high, p, **changes):
    return Finding("perception", P99, 20.0, new, Interval(low, high, p), **{"samples": 1000, **changes})


def certain(new):
    return Finding("perception", OUTPUTS, 0.0, new, Interval(new, new, math.nan))


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
        (Finding("perception", P99, math.nan, 20.0), Verdict.NOT_ENOUGH),
        (Finding("perception", MAX, 20.0, 90.0, decides=False), Verdict.INFORMATIVE),
        (certain(0.0), Verdict.EQUIVALENT),
        (certain(0.01), Verdict.WORSE),
    ],
)
def test_given_an_estimate_when_judged_then_the_verdict_is(one, expected):
    assert judge([one], RULES)[0].verdict is expected


def test_given_many_comparisons_when_judged_then_what_chance_explains_is_no_alarm():
    one = p99(22.0, 0.2, 3.8, 0.03)
    others = [p99(20.0, -0.5, 0.5, 0.9) for _ in range(5)]
    silent = [
        p99(20.0, -9.0, 9.0, 0.9, decides=False),
        p99(20.0, -9.0, 9.0, 0.9, enough=5000.0),
        certain(0.0),
    ]
    found = judge([one, *others], RULES)[0]
    assert (found.verdict, found.p) == (Verdict.NOT_ENOUGH, pytest.approx(0.18))
    assert found.needed > 1000
    assert judge([one], RULES)[0].verdict is Verdict.WORSE
    assert judge([one, *silent], RULES)[0].verdict is Verdict.WORSE  # these are no comparisons


def test_given_a_wide_interval_when_judged_then_four_times_the_frames_would_do_for_half_of_it():
    assert judge([p99(20.0, -2.0, 2.0, 1.0)], RULES)[0].needed == 4000
    assert judge([p99(20.0, -1.1, 1.1, 1.0, enough=4321.0)], RULES)[0].needed == 4400
    assert judge([Finding("perception", P99, math.nan, math.nan, enough=500.0)], RULES)[0].needed == 500


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_given_p_values_when_corrected_then_they_are_those_of_statsmodels(p_values):
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    with mock.patch("gc.collect"):  # which it calls each time
        expected = multitest.multipletests(p_values, 0.05, "holm")[1]
    assert holm(np.array(p_values)).tolist() == pytest.approx(expected.tolist())


@given(st.floats(-5, 5), st.floats(0.01, 10), st.floats(0, 1))
@example(1.0, 1.0, 0.9999999999999999)
def test_given_any_interval_when_judged_then_only_what_moved_by_the_margin_is_worse_or_better(
    moved, reach, p
):
    found = judge([p99(20.0 + moved, moved - reach, moved + reach, p)], RULES)[0]
    if found.verdict in {Verdict.WORSE, Verdict.BETTER}:
        assert abs(moved) >= 1.0 - 1e-9
        assert (found.verdict is Verdict.WORSE) == (moved > 0)
    if found.verdict is Verdict.NOT_ENOUGH:
        assert found.needed >= 1000


@pytest.mark.parametrize(("new", "breaks"), [(1.0, False), (1.01, True), (math.nan, True)])
def test_given_a_limit_when_judged_then_it_is_on_what_was_measured_whatever_the_verdict(new, breaks):
    missed = [Finding(stage, MISS, 0.0, new) for stage in ("perception", "planning")]
    limited = rules(limits=["miss=50%", "perception.miss=1%"])
    found = judge([*missed, Finding("perception", P99, 20.0, 1e9)], limited)
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
        (Finding("perception", P99, 20.0, math.nan), True),
        (Finding("perception", P99, math.nan, 20.0), False),
        (Finding("", START_UP, 2.0, 13.0, decides=False), True),  # one run a side: shown, not judged
        (Finding("perception", MAX, 2.0, 90.0, decides=False), False),
    ],
)
def test_given_no_verdict_when_far_more_than_the_margin_or_gone_then_it_is_conspicuous(one, expected):
    assert judge([one], RULES)[0].conspicuous is expected
