"""What runs take on the virtual clock.

Read from tables and records, known for a frame, or drawn for its tier.
"""

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.step_times import RunTimes, Spread, StageTimes, TierTimes, read_step_times
from torchperf_ros.settings.params_file import config_of
from torchperf_ros.stage.frame import StepTimes

STAMP_NS = 1_700_000_000_000_000_000
FULL, FAST = TierTimes(Spread((20.0,))), TierTimes(Spread((5.0,)))
STEPS = StepTimes(0.5, 1.0, 33.0, 0.25)


def times(**own):
    return StageTimes([FULL, FAST], **own)


def known(**own):
    return times(known={STAMP_NS: RunTimes(**{"tier": 0, "steps": STEPS, **own})})


def test_given_median_and_p99_when_drawn_often_then_the_draws_have_them():
    spread = Spread((20.0,), math.log(35 / 20) / 2.3263478740408408)
    rng = random.Random(1)
    drawn = sorted(spread.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(20.0, rel=0.01)
    assert drawn[19_800] == pytest.approx(35.0, rel=0.03)
    assert spread.calibration.median_ms == 20.0
    assert spread.calibration.p99_ms == pytest.approx(35.0, abs=0.001)


@given(st.permutations([(0, 0, 0), (1, 0, 0), (2, 1, 0), (2, 1, 1), (3, 0, 1)]))
def test_given_runs_in_any_order_when_drawn_then_each_takes_the_same(order):
    stage = StageTimes([TierTimes(Spread((20.0,), 0.3)), TierTimes(Spread((5.0,), 0.3))], seed=7)
    assert {run: stage.run(0, *run) for run in order} == {run: stage.run(0, *run) for run in sorted(order)}


@pytest.mark.parametrize("off_ns", [0, 4_000_000, -4_000_000])
def test_given_a_frame_of_the_log_when_run_on_its_tier_then_it_takes_what_it_took(off_ns):
    assert known().run(STAMP_NS + off_ns, 3, 0, 0).steps == STEPS


@pytest.mark.parametrize(
    ("stamp_ns", "tier", "attempt"),
    [(STAMP_NS + 6_000_000, 0, 0), (0, 0, 0), (STAMP_NS, 1, 0), (STAMP_NS, 0, 1)],
)
def test_given_another_frame_tier_or_attempt_when_run_then_its_time_is_drawn(stamp_ns, tier, attempt):
    assert (
        known().run(stamp_ns, 3, tier, attempt).steps.inference_ms
        == (FULL, FAST)[tier].inference.samples[0]
    )


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.HUNG, Outcome.CRASHED, Outcome.PARTIAL])
def test_given_a_frame_that_ended_badly_when_run_first_then_it_ends_so_and_its_backup_does_not(outcome):
    stage = known(ending=outcome, steps=StepTimes())
    assert stage.run(STAMP_NS, 3, 0, 0).ending is outcome
    assert stage.run(STAMP_NS, 3, 1, 1).ending is Outcome.ON_TIME


def test_given_a_frame_that_its_backup_answered_when_the_backup_runs_then_it_takes_what_it_took():
    stage = known(tier=1, ending=Outcome.LATE, backup=True)
    assert stage.run(STAMP_NS, 3, 1, 1).steps == STEPS


CONFIG = config_of({"stages": ["perception"], "perception.tiers": ["full", "medium", "fast"]})


def read(path, config=CONFIG):
    said = []
    return read_step_times(str(path), path, config, 3, said.append), said


def table(folder, text):
    path = folder / "times.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def records(folder, *frames):
    tiers = ["full", "medium", "fast"]
    start = {"v": 1, "kind": "start", "t_ns": 1, "stages": [{"name": "perception", "tiers": tiers}]}
    frame = {
        "v": 1,
        "kind": "frame",
        "stage": "perception",
        "age_ms": 1,
        "wait_ms": 0,
        "decode_ms": 1,
        "preprocess_ms": 2,
        "inference_ms": 20,
        "postprocess_ms": 3,
        "total_ms": 26.5,
        "budget_ms": 50,
        "tier": "full",
        "outcome": "on_time",
        "fallback": None,
    }
    lines = [
        {**frame, "seq": n, "t_ns": n + 1, "stamp_ns": 1000 + n, **own} for n, own in enumerate(frames)
    ]
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, [start, *lines])) + "\n", encoding="utf-8")
    return path


def test_given_a_table_when_read_then_numbers_lists_and_distributions_are_times(tmp_path):
    text = """
        perception:
          full: {inference_ms: {median: 20, p99: 40}, decode_ms: 0.5}
          medium: {inference_ms: [8, 9]}
          fast: {inference_ms: 3}
        restart_ms: 500"""
    (times,), said = read(table(tmp_path, text))
    assert said == []
    assert [c.median_ms for c in times.calibrations()] == [20.0, 8.0, 3.0]
    assert [c.p99_ms for c in times.calibrations()] == [pytest.approx(40.0), 9.0, 3.0]
    assert times.run(0, 0, 0, 0).steps.decode_ms == 0.5
    assert (times.restart_ms, times.seed) == (500, 3)


def test_given_a_tier_that_is_not_told_when_read_then_it_is_as_slow_as_the_next_better_one_and_that_is_said(
    tmp_path,
):
    (times,), said = read(
        table(tmp_path, "perception: {full: {inference_ms: 20}, fast: {inference_ms: 3}}")
    )
    assert [c.median_ms for c in times.calibrations()] == [20.0, 20.0, 3.0]
    assert len(said) == 1
    assert "no times of tier medium; taken to be those of full" in said[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "has to be a table"),
        ("planning: {full: {inference_ms: 1}}", "no stage planning"),
        ("perception: {tiny: {inference_ms: 1}}", "has no tier tiny; it has full, medium, fast"),
        ("perception: {full: {decode_ms: 1}}", r"perception\.full: .* has to hold inference_ms"),
        (
            "perception: {full: {inference_ms: 1, wait_ms: 2}}",
            "may hold decode_ms, preprocess_ms, postprocess",
        ),
        ("perception: {full: {inference_ms: -1}}", "0 or more"),
        ("perception: {full: {inference_ms: {median: 9, p99: 3}}}", "median <= p99"),
        ("perception: {full: {inference_ms: 1}}\nrestart_ms: x", "restart_ms"),
        ("a: [", "not YAML"),
    ],
)
def test_given_a_table_that_is_none_when_read_then_the_error_names_what_is_wrong(tmp_path, text, words):
    with pytest.raises(ConfigError, match=words):
        read(table(tmp_path, text))


def test_given_records_when_read_then_each_frame_takes_what_it_took_and_the_rest_is_overhead(tmp_path):
    (times,), _ = read(records(tmp_path, {}, {"tier": "fast", "inference_ms": 4, "total_ms": 10}))
    run = times.run(1000, 0, 0, 0)
    assert (run.steps.inference_ms, run.overhead_ms) == (20.0, 0.5)
    assert times.run(1001, 1, 2, 0).steps.inference_ms == 4.0
    assert [c.median_ms for c in times.calibrations()] == [20.0, 20.0, 4.0]


@pytest.mark.parametrize("frames", [[], [{"outcome": "late", "inference_ms": None}], [{"stage": "other"}]])
def test_given_records_without_a_good_frame_of_the_stage_when_read_then_the_error_says_what_to_give(
    tmp_path, frames
):
    with pytest.raises(ConfigError, match="give --times a table"):
        read(records(tmp_path, *frames))
