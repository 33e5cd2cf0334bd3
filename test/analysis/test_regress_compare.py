import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.analysis.regress_compare import answering_tiers, compare, other_machine
from torchperf_ros.analysis.regress_effect import MinEffects
from torchperf_ros.analysis.regress_limit import Limits
from torchperf_ros.analysis.regress_run import RegressError, RunFrames, of_run, stage_frames
from torchperf_ros.analysis.regress_stage import Resampling
from torchperf_ros.analysis.regress_text import headline
from torchperf_ros.analysis.regress_verdict import Rules, Verdict
from torchperf_ros.core.outcome import Outcome

sys.path.insert(0, str(Path(__file__).parent))
import regress_runs as made

QUICK = Resampling(resamples=1000)


def view(total_ms, name="run", **changes):
    return of_run(made.run(total_ms, **changes), name)


def verdicts(base, new, rules=None, resampling=QUICK):
    found = compare(base, new, rules or Rules(), resampling)
    return {finding.estimate.metric.key: finding for finding in found.findings}


@pytest.fixture(scope="module")
def base():
    return view(made.latencies(3000, 1))


@pytest.fixture(scope="module")
def slower():
    """The slowest 5 % of the frames take longer by a third of what they are over the p95."""
    values = made.latencies(3000, 2)
    p95 = np.quantile(values, 0.95)
    return view(np.where(values > p95, p95 + 3 * (values - p95), values))


def test_given_a_longer_tail_when_compared_then_the_p99_is_worse_and_the_p50_is_not(base, slower):
    found = verdicts(base, slower)

    assert found["p99"].verdict is Verdict.WORSE
    assert found["p99"].estimate.base == pytest.approx(np.quantile(made.latencies(3000, 1), 0.99))
    assert found["p50"].verdict is Verdict.EQUIVALENT
    assert found["max"].verdict is Verdict.INFORMATIVE
    assert "no interval" in found["max"].notes[0]
    assert verdicts(slower, base)["p99"].verdict is Verdict.BETTER


def test_given_the_same_seed_when_compared_again_then_everything_is_the_same_and_with_another_it_is_not(base, slower):
    first, again = (compare(base, slower, resampling=QUICK).findings for _ in range(2))
    other = compare(base, slower, resampling=replace(QUICK, seed=1)).findings

    assert [one.estimate.interval for one in first] == [one.estimate.interval for one in again]
    assert [one.estimate.interval for one in first] != [one.estimate.interval for one in other]


def test_given_wide_margins_when_compared_then_nothing_is_worse(base, slower):
    found = verdicts(
        base, slower, Rules(MinEffects(["p99=90%", "p95=90%", "jitter=90%", "miss=20pp", "fallback=20pp"]))
    )

    assert Verdict.WORSE not in {one.verdict for one in found.values()}


def test_given_every_latency_is_the_same_when_compared_then_all_is_equivalent_and_said(base):
    found = compare(base, base, resampling=QUICK)

    assert {one.verdict for one in found.findings} == {Verdict.EQUIVALENT, Verdict.INFORMATIVE}
    assert "perception: every latency is the same in both runs" in found.notes
    assert found.status(strict=True) == 0


@pytest.mark.parametrize(
    ("new_ms", "expected"), [(20.0, Verdict.EQUIVALENT), (22.0, Verdict.WORSE), (9.0, Verdict.BETTER)]
)
def test_given_constant_latencies_when_compared_then_there_is_a_verdict(new_ms, expected):
    found = verdicts(view(np.full(900, 20.0)), view(np.full(800, new_ms)))

    assert found["p50"].verdict is found["p99"].verdict is expected
    assert found["jitter"].verdict is Verdict.EQUIVALENT


def test_given_ties_of_a_coarse_clock_when_compared_then_there_is_a_verdict():
    found = verdicts(view(np.round(made.latencies(3000, 1))), view(np.round(made.latencies(2000, 2) * 1.2)))

    assert found["p50"].verdict is Verdict.WORSE


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_given_few_frames_when_compared_then_it_says_how_many_would_do(count):
    found = verdicts(view(made.latencies(3000, 1)), view(made.latencies(count, 2)))

    for key in ("p50", "p95", "p99", "jitter", "miss"):
        assert found[key].verdict is Verdict.NOT_ENOUGH
        assert found[key].needed > count
        assert found[key].notes
    assert found["p99"].needed >= 500


def test_given_few_frames_beyond_a_quantile_when_compared_then_its_interval_is_shown_and_not_believed():
    found = verdicts(view(made.latencies(300, 1, phi=0.0)), view(made.latencies(300, 2, phi=0.0) * 1.5))

    assert found["p50"].verdict is found["p95"].verdict is Verdict.WORSE
    assert found["p99"].verdict is Verdict.NOT_ENOUGH
    assert found["p99"].estimate.interval.low > 0
    assert found["p99"].needed >= 500


def test_given_strong_autocorrelation_when_compared_then_more_frames_are_asked_for():
    steady, wandering = ([view(made.latencies(1500, seed, phi)) for seed in (1, 2)] for phi in (0.0, 0.9))

    few, many = (verdicts(*runs)["p50"].estimate.interval for runs in (wandering, steady))

    assert few.high - few.low > 2 * (many.high - many.low)
    assert verdicts(*wandering)["p50"].verdict is Verdict.NOT_ENOUGH
    assert verdicts(*steady)["p50"].verdict is Verdict.EQUIVALENT


def test_given_unknown_latencies_when_compared_then_they_do_not_count():
    values = made.latencies(2000, 1)
    holed = values.copy()
    holed[::10] = math.nan
    found = verdicts(view(values), view(holed))

    assert found["p50"].verdict is Verdict.EQUIVALENT
    assert found["p50"].estimate.samples == 1800
    none = verdicts(view(values), view(np.full(2000, math.nan)))
    assert none["p99"].verdict is Verdict.NOT_ENOUGH


def test_given_more_misses_when_compared_then_misses_and_fallbacks_are_worse():
    values = made.latencies(3000, 2, phi=0.0)
    values[np.random.default_rng(0).permutation(3000)[:90]] = made.BUDGET_MS + 1
    found = verdicts(view(made.latencies(3000, 1, phi=0.0)), view(values))

    assert found["miss"].verdict is found["fallback"].verdict is Verdict.WORSE
    assert found["miss"].estimate.new == pytest.approx(3.0)
    assert found["dropped"].verdict is Verdict.EQUIVALENT


def test_given_gaps_in_the_numbers_when_compared_then_they_are_dropped_frames():
    rows = made.rows(made.latencies(4000, 2, phi=0.0))
    kept = np.delete(rows, np.random.default_rng(0).permutation(3998)[:200] + 1)
    new = RunFrames("new", {"perception": stage_frames("perception", kept)})
    found = verdicts(view(made.latencies(4000, 1, phi=0.0)), new)

    assert found["dropped"].estimate.new == pytest.approx(5.0)
    assert found["dropped"].verdict is Verdict.WORSE


def test_given_frames_of_the_start_when_viewed_then_they_do_not_count():
    rows = made.rows(np.r_[np.full(5, 500.0), made.latencies(50, 1)])
    rows["outcome"][:5] = Outcome.STARTING
    frames = stage_frames("perception", rows)

    assert len(frames) == 50
    assert frames.total_ms.max() < 100
    assert not frames.missed.any()
    assert not frames.dropped.any()


def test_given_a_node_that_was_restarted_when_viewed_then_its_order_is_kept_and_nothing_is_dropped():
    rows = made.rows(np.arange(6.0))
    rows["seq"] = [0, 1, 2, 0, 1, 2]

    assert stage_frames("perception", rows).total_ms.tolist() == [0, 1, 2, 3, 4, 5]
    assert not stage_frames("perception", rows).dropped.any()


def test_given_another_machine_when_compared_then_it_is_refused_unless_asked_for():
    there = {**made.summary()["machine"], "cpu": "Cortex-A1", "fingerprint": "0000"}
    values = made.latencies(200, 1)
    here, other = view(values), view(values, machine=there)

    with pytest.raises(RegressError, match=r"cpu Cortex-X9 and Cortex-A1; --across-machines"):
        compare(here, other, resampling=QUICK)
    assert "the machines differ: cpu Cortex-X9 and Cortex-A1" in compare(here, other, None, QUICK, True).notes
    assert other_machine(here, view(values, machine={})) == ""


def test_given_other_logs_models_and_parameters_when_compared_then_the_verdict_says_so():
    values = made.latencies(200, 1)
    new = view(values, "new", log={"sha256": "99" * 32}, params_sha256="88" * 32, model={"perception": "77" * 32},
               complete=False)  # fmt: skip
    notes = " | ".join(compare(view(values), new, resampling=QUICK).notes)

    for words in ("log: aaaaaaaaaaaa and 999999999999", "parameters: bbbbbbbbbbbb", "model of perception: cccccccccccc",
                  "new was interrupted"):  # fmt: skip
        assert words in notes


def answered_by(tiers, *named, name="run"):
    run = made.run(made.latencies(len(tiers), 1), stages=[{"name": "perception", "tiers": list(named)}])
    run.frames["perception"]["tier"] = tiers
    return of_run(run, name)


def test_given_other_tiers_that_answered_when_compared_then_the_verdict_says_so():
    medium, full = (answered_by([tier] * 200, "full", "medium") for tier in (1, 0))
    mixed = answered_by([0] * 150 + [1] * 50 + [-1, -1], "full", "medium")  # nobody answered the last two
    unnamed = answered_by([0] * 200)

    assert "perception: base answered by medium 100%; new by full 100%" in compare(medium, full, resampling=QUICK).notes
    assert answering_tiers(mixed, full, "perception").startswith("perception: base answered by full 75%, medium 25%; ")
    assert answering_tiers(medium, unnamed, "perception").endswith("by tier 1 100%; new by tier 0 100%")
    renamed = answered_by([1] * 200, "huge", "full")
    assert [answering_tiers(full, other, "perception") for other in (full, unnamed, renamed)] == ["", "", ""]
    assert answering_tiers(full, answered_by([0] * 199 + [1], "full", "medium"), "perception") == ""


@pytest.mark.parametrize(("budget_ms", "said"), [(30.0, True), (made.BUDGET_MS, False), (math.nan, False)])
def test_given_other_deadlines_when_compared_then_it_is_said(base, budget_ms, said):
    rows = made.rows(made.latencies(200, 1), budget_ms)
    new = RunFrames("new", {"perception": stage_frames("perception", rows)})
    note = "perception: the budget is 40 ms in the base, 30 ms in the new run"

    assert (note in compare(base, new, resampling=QUICK).notes) is said


def test_given_no_stage_in_common_when_compared_then_it_is_refused_with_their_names():
    values = made.latencies(20, 1)
    with pytest.raises(RegressError, match=r"perception.*lanes"):
        compare(view(values), view(values, stage="lanes"), resampling=QUICK)


def test_given_a_stage_of_one_run_only_when_strict_then_it_fails(base):
    more = replace(base, stages={**base.stages, "planning": base.stages["perception"]})
    found = compare(more, base, resampling=QUICK)

    assert "stage planning: only in run" in found.notes
    assert (found.status(), found.status(strict=True)) == (0, 1)


def test_given_stages_of_one_run_only_when_compared_then_what_is_known_is_shown_and_a_silent_one_is_warned_of(base):
    planning = replace(base.stages["perception"], name="planning")
    more = replace(base, stages={**base.stages, "planning": planning})
    gone, come = compare(more, base, resampling=QUICK), compare(base, more, resampling=QUICK)

    known = float(np.quantile(made.latencies(3000, 1), 0.99))
    for found, expected in ((gone, (known, math.nan)), (come, (math.nan, known))):
        p99 = next(
            one for one in found.findings if (one.estimate.stage, one.estimate.metric.key) == ("planning", "p99")
        )
        assert p99.verdict is Verdict.NOT_ENOUGH
        assert (p99.estimate.base, p99.estimate.new) == pytest.approx(expected, nan_ok=True)
    assert (gone.silent, come.silent) == (["planning"], [])
    assert headline(gone).startswith("WARNING, not judged: planning has no answered frame in the new run; nothing is")
    assert headline(come).startswith("Nothing is worse")
    limited = Rules(limits=Limits(["planning.p99=90ms"]))
    assert [compare(*pair, limited, QUICK).status() for pair in ((more, base), (base, more))] == [1, 0]


def test_given_one_frame_when_compared_then_its_latency_is_shown():
    found = verdicts(view(made.latencies(3000, 1)), view(np.array([50.0])))

    assert {found[key].estimate.new for key in ("p50", "p95", "p99", "max")} == {50.0}
    assert math.isnan(found["jitter"].estimate.new)


def test_given_latencies_that_are_unknown_in_both_runs_alike_when_compared_then_the_rest_is_the_same(base):
    values = made.latencies(2000, 1)
    values[::10] = math.nan

    assert "perception: every latency is the same in both runs" in compare(view(values), view(values)).notes
    nothing = view(np.full(50, math.nan))
    assert not any("every latency" in note for note in compare(nothing, nothing, resampling=QUICK).notes)


def test_given_nothing_but_few_frames_when_compared_then_the_status_is_that_it_cannot():
    values = made.latencies(5, 1)
    runs = [RunFrames("run", {"s": stage_frames("s", made.rows(values * factor))}) for factor in (1.0, 1.1)]
    rules = Rules(skip=frozenset({"outputs"}))

    assert compare(*runs, rules, QUICK).status() == 2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(math.nan)), min_size=1, max_size=40),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=80),
)
def test_given_any_latencies_when_compared_then_every_metric_has_a_verdict(first, second):
    found = compare(view(np.array(first)), view(np.array(second)), resampling=Resampling(200))

    assert {one.estimate.metric.key for one in found.findings} >= {"p50", "p95", "p99", "max", "jitter", "miss"}
    assert found.status() in {0, 1, 2}


def test_given_many_stages_when_compared_then_resamples_are_enough_for_the_correction():
    values = made.latencies(400, 1)
    runs = [view(values), view(values * 1.5, name="new")]
    many = [replace(run, stages={f"s{at}": replace(run.stages["perception"], name=f"s{at}") for at in range(12)})
            for run in runs]  # fmt: skip
    found = compare(*many, resampling=Resampling(200))

    assert {one.verdict for one in found.findings if one.estimate.metric.key == "p50"} == {Verdict.WORSE}
