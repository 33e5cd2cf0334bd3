"""Runs against runs: verdicts on made-up replays, refusals, and what is said beside the verdict."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchperf_ros.observe.runs.changes import Judgement, stage_frames
from torchperf_ros.observe.runs.comparison import agreement, compare, headline
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError, StageLog

from . import compare_runs as made

pytestmark = made.needs_libraries


def view(total_ms, name="run", **changes):
    return replace(made.run(total_ms, **changes), name=name)


def bare(rows, name="run"):
    return RunLog(name, (StageLog("perception", (), rows),))


def named(run, *names):
    """A run whose stages are its first one under these names."""
    return replace(run, stages=tuple(replace(run.stages[0], name=name) for name in names))


def against(base, new, **options):
    base, new = ([side] if isinstance(side, RunLog) else side for side in (base, new))
    return compare(base, new, resamples=300, **options)


def verdicts(base, new, **more):
    return {one.metric.key: one for one in against(base, new, **more).changes}


@pytest.fixture(scope="module")
def base():
    return view(made.latencies(2000, 1))


@pytest.fixture(scope="module")
def slower():
    """The slowest 5 % of the frames take longer by a third of what they are over the p95."""
    values = made.latencies(2000, 2)
    p95 = np.quantile(values, 0.95)
    return view(np.where(values > p95, p95 + 3 * (values - p95), values))


def test_given_a_longer_tail_when_compared_then_the_p99_is_worse_every_time_and_the_p50_is_not(
    base, slower
):
    found = verdicts(base, slower)
    assert found["p99"].verdict is Judgement.WORSE
    assert found["p99"].base == pytest.approx(np.quantile(made.latencies(2000, 1), 0.99))
    assert found["p50"].verdict is Judgement.EQUIVALENT
    assert found["max"].verdict is Judgement.INFORMATIVE
    assert "no interval" in found["max"].why
    assert verdicts(slower, base)["p99"].verdict is Judgement.BETTER
    assert repr(verdicts(base, slower)) == repr(found)


@pytest.mark.parametrize("count", [1, 20])
def test_given_few_frames_when_compared_then_it_says_how_many_would_do(base, count):
    values = made.latencies(count, 2)
    found = verdicts(base, view(values))
    for key in ("p50", "p99", "miss"):
        assert found[key].verdict is Judgement.NOT_ENOUGH
        assert found[key].needed > count
        assert found[key].why
    assert found["p50"].new == pytest.approx(np.median(values))
    assert found["p99"].needed >= 500


def test_given_unknown_latencies_when_compared_then_they_do_not_count():
    values = made.latencies(2000, 1)
    holed = np.where(np.arange(2000) % 10, values, math.nan)
    nothing = view(np.full(2000, math.nan))
    found = verdicts(view(values), view(holed))
    assert found["p50"].verdict is Judgement.EQUIVALENT
    assert found["p50"].samples == 1800
    assert verdicts(view(values), nothing)["p99"].verdict is Judgement.NOT_ENOUGH
    for run, same in ((view(holed), True), (view(values[:50]), True), (nothing, False)):
        alike = against(run, run)
        assert ("perception: every latency is the same in both runs" in alike.notes) is same
        if same:
            assert {one.verdict for one in alike.changes} == {Judgement.EQUIVALENT, Judgement.INFORMATIVE}
            assert alike.status(strict=True) == 0


def test_given_frames_under_a_profiler_when_compared_then_they_do_not_count(base):
    (stage,) = base.stages
    frames = stage.frames.copy()
    slow = np.arange(len(frames)) % 10 == 3
    frames["total_ms"][slow] *= 3
    profiled = set(frames["t_ns"][slow].tolist())
    found = verdicts(base, replace(base, stages=(replace(stage, frames=frames, profiled=profiled),)))
    assert all(found[key].verdict is Judgement.EQUIVALENT for key in ("p50", "p99"))
    unknown = verdicts(base, replace(base, stages=(replace(stage, frames=frames),)))
    assert unknown["p99"].verdict is not Judgement.EQUIVALENT


def test_given_runs_without_deadlines_when_compared_then_their_latencies_are_and_no_budget_is_named(base):
    fast = replace(
        base, stages=(replace(base.stages[0], frames=made.rows(made.latencies(2000, 1), math.nan)),)
    )
    found = against(fast, fast)
    assert {one.metric.key: one.verdict for one in found.changes}["p99"] is Judgement.EQUIVALENT
    assert not any("budget" in note for note in found.notes)


def test_given_a_log_of_which_half_is_missed_when_compared_then_it_is_worse_wherever_the_misses_lie():
    some = np.random.default_rng(0).permutation(900)
    values = made.latencies(900, 1)
    values[some[:54]] = made.BUDGET_MS + 1
    for places in (some[:504], slice(200, 704)):
        new = made.latencies(900, 2)
        new[places] = made.BUDGET_MS + 1
        found = verdicts(view(values), view(new))
        assert (found["miss"].base, found["miss"].new) == (6.0, pytest.approx(56, abs=3))
        assert found["miss"].verdict is Judgement.WORSE
        assert (found["fallback"].new, found["fallback"].conspicuous) == (pytest.approx(56, abs=3), True)


def of_tiers(tiers, *names, count=400):
    run = made.run(made.latencies(count, 1), stages=[{"name": "perception", "tiers": list(names)}])
    run.frames["perception"]["tier"] = tiers
    return replace(run, name="run")


def test_given_lower_tiers_that_answered_when_compared_then_it_is_worse_and_the_tiers_are_named():
    full, medium = (of_tiers(tier, "full", "medium") for tier in (0, 1))
    assert verdicts(full, medium)["lower_tier"].verdict is Judgement.WORSE
    assert verdicts(medium, full)["lower_tier"].verdict is Judgement.BETTER
    assert verdicts(full, of_tiers(0, "medium"))["lower_tier"].verdict is Judgement.WORSE
    assert verdicts(full, of_tiers(1, "huge", "full"))["lower_tier"].verdict is Judgement.EQUIVALENT
    note = "perception: base answered by full 100%; new by medium 100%"
    assert note in against(full, medium).notes
    assert not any("answered by" in note for note in against(full, of_tiers(0, "full")).notes)
    unnamed = of_tiers([0] * 300 + [1] * 100)
    assert (
        "perception: base answered by tier 1 100%; new by tier 0 75%, tier 1 25%"
        in against(medium, unnamed).notes
    )


def test_given_frames_without_a_synchronised_input_when_compared_then_a_note_has_both_counts():
    whole, lacking = made.run(made.latencies(400, 1)), made.run(made.latencies(400, 1))
    lacking.frames["perception"]["missing_inputs"][:7] = 2
    note = (
        "perception: 0 of 400 frames in the base, 7 of 400 in the new run had a synchronised input missing"
    )
    assert note in against(replace(whole, name="base"), replace(lacking, name="new")).notes
    assert not any(
        "synchronised" in text for text in against(replace(whole, name="a"), replace(whole, name="b")).notes
    )


def runs_of(*factors, start_up_s=2.0, mib=800.0, seed=0, **changes):
    return [
        view(
            made.latencies(600, seed + at) * factor,
            f"run{at}",
            start_up_s=start_up_s + 0.1 * at,
            memory={"t_ns": [0, 10**9], "rss_mib": [mib, mib + at]},
            compile_s=30.0 + at,
            **changes,
        )
        for at, factor in enumerate(factors)
    ]


def test_given_three_runs_a_side_when_compared_then_start_up_memory_and_compile_time_have_a_verdict():
    base = runs_of(1.0, 1.005, 0.995)
    found = verdicts(base, runs_of(1.2, 1.205, 1.195, start_up_s=9.0, mib=1000.0, seed=10))
    assert {found[key].verdict for key in ("p50", "start_up", "memory_peak")} == {Judgement.WORSE}
    assert found["compile"].verdict is found["miss"].verdict is Judgement.EQUIVALENT
    assert found["p50"].kind == "runs"
    again = against(base, runs_of(1.0, 1.005, 0.995, seed=10))
    assert not again.with_verdict(Judgement.WORSE)
    assert [stage.block for stage in again.stages] == [0]
    gone = against([named(run, "perception", "planning") for run in base], base)
    assert (gone.silent, gone.status(), gone.status(strict=True)) == (["planning"], 0, 1)


def test_given_one_or_two_runs_a_side_when_compared_then_what_a_run_has_once_is_shown_and_not_judged():
    found = verdicts(runs_of(1.0, 1.0), runs_of(1.2, 1.2, start_up_s=9.0, mib=1000.0, seed=10))
    assert {found[key].verdict for key in ("start_up", "memory_peak", "compile")} == {Judgement.INFORMATIVE}
    assert found["memory_peak"].why == "shown, not judged; 3 runs a side are judged by it"
    assert found["p50"].verdict is Judgement.WORSE
    assert found["p50"].samples == 1200
    one = against(runs_of(1.0), runs_of(1.0, start_up_s=40.0, seed=10))
    assert "WARNING, not judged: start-up time +38.00 s (+1900.0%) is 19 times its margin" in headline(one)
    values = made.latencies(50, 1)
    found = verdicts(view(values), view(values, compile_s=30.0))
    assert found["compile"].why == "the base run does not say"
    assert not {"memory_peak", "memory_slope"} & set(found)


def test_given_runs_of_different_paces_or_stages_when_compared_then_they_are_refused_by_name():
    values = made.latencies(200, 1)
    real, virtual, unknown = (view(values, f"run-{pace}", pace=pace) for pace in ("real", "virtual", None))
    with pytest.raises(
        RunLogError, match="different paces cannot be compared: run-real at real, run-virtual at"
    ):
        against(real, virtual)
    assert against(real, unknown).changes
    with pytest.raises(RunLogError, match=r"perception.*lanes"):
        against(real, named(real, "lanes"))


def test_given_another_machine_when_compared_then_it_is_refused_unless_asked_for():
    there = {**made.summary()["machine"], "cpu": "Cortex-A1", "fingerprint": "0000"}
    values = made.latencies(200, 1)
    here, other = view(values), view(values, "other", machine=there)
    with pytest.raises(
        RunLogError, match=r"other ran on another .*cpu Cortex-X9 and Cortex-A1; --across-machines"
    ):
        against(here, [here, other])
    assert "machine: cpu Cortex-X9 and Cortex-A1" in against(here, other, across_machines=True).notes
    assert (
        against(here, view(values, machine={}))
        .notes[0]
        .startswith("unknown machine: not every run names its own")
    )


def test_given_other_logs_models_and_parameters_when_compared_then_the_verdict_says_so():
    values = made.latencies(200, 1)
    new = view(
        values,
        "new",
        log={"sha256": "99" * 32},
        params_sha256="88" * 32,
        model={"perception": "77" * 32},
        complete=False,
    )
    notes = " | ".join(against(view(values), new).notes)
    for words in (
        "log: aaaaaaaaaaaa and 999999999999",
        "parameters: bbbbbbbbbbbb",
        "model of perception: cccccccccccc",
        "new was interrupted",
    ):
        assert words in notes


def test_given_stages_of_one_run_only_when_compared_then_what_is_known_is_shown_and_a_silent_one_is_warned_of(
    base,
):
    more = named(base, "perception", "planning")
    gone, come = against(more, base), against(base, more)
    known = float(np.quantile(made.latencies(2000, 1), 0.99))
    for found, expected in ((gone, (known, math.nan)), (come, (math.nan, known))):
        p99 = next(one for one in found.changes if (one.stage, one.metric.key) == ("planning", "p99"))
        assert p99.verdict is Judgement.NOT_ENOUGH
        assert (p99.base, p99.new) == pytest.approx(expected, nan_ok=True)
    assert (gone.silent, come.silent) == (["planning"], [])
    assert (gone.status(), gone.status(strict=True)) == (0, 1)
    assert headline(gone).startswith(
        "WARNING, not judged: planning has no answered frame in the new run; nothing is"
    )
    assert headline(come).startswith("Nothing is worse")
    # Of a stage that is gone no share of misses is known: it keeps no limit.
    assert [against(*pair, max_miss=5.0).status() for pair in ((more, base), (base, more))] == [1, 0]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.one_of(st.floats(0, 1e6), st.just(math.nan)), min_size=1, max_size=40),
    st.lists(st.floats(0, 1e6), min_size=1, max_size=80),
    st.sampled_from([1, 3]),
)
@example([0.0], [0.0], 3)
def test_given_any_latencies_when_compared_then_every_metric_has_a_verdict(first, second, runs):
    sides = ([view(np.array(values))] * runs for values in (first, second))
    found = against(*sides)
    assert {one.metric.key for one in found.changes} >= {"p50", "p95", "p99", "max", "jitter", "miss"}
    assert found.status() in {0, 1, 3}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Judgement.WORSE),
        ({"commit": "ffff"}, Judgement.WORSE),
        ({"model": {"perception": "dd"}}, Judgement.INFORMATIVE),
        ({"log": {"sha256": "other"}}, Judgement.INFORMATIVE),
        ({"machine": {**made.summary()["machine"], "torch": "2.14.0"}}, Judgement.INFORMATIVE),
    ],
)
def test_given_another_output_when_compared_then_it_is_worse_only_where_nothing_explains_it(
    changes, expected
):
    values = made.latencies(100, 1)
    new = made.run(values, **changes)
    new.frames["perception"]["output_hash"][7] += 1
    found = verdicts(view(values), replace(new, name="new"))["outputs"]
    assert found.verdict is expected
    assert found.new == pytest.approx(1.0)
    assert "99 of 100 outputs are the same, matched by stamp" in found.why


@pytest.mark.parametrize("stamped", [True, False])
def test_given_frames_of_one_run_only_when_matched_then_they_are_counted(stamped):
    rows, others = made.rows(made.latencies(100, 1)), made.rows(made.latencies(100, 2))
    for each in (rows, others):
        each["stamp_ns"] *= stamped
    found = agreement(*(stage_frames(StageLog("s", (), each)) for each in (rows[:90], others[5:])))
    assert [found[key] for key in ("matched", "equal", "base_only", "new_only", "by_stamp")] == [
        85,
        85,
        5,
        10,
        stamped,
    ]
