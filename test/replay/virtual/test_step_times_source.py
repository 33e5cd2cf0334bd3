import json

import pytest

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.params_file import config_of
from torchperf_ros.replay.virtual.step_times_source import read_step_times

CONFIG = config_of({"stages": ["perception"], "perception.tiers": ["full", "medium", "fast"]})


def read(path, config=CONFIG):
    said = []
    return read_step_times(str(path), path, config, 3, said.append), said


def table(folder, text):
    path = folder / "times.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def records(folder, *frames):
    start = {
        "v": 1,
        "kind": "start",
        "t_ns": 1,
        "stages": [{"name": "perception", "tiers": ["full", "medium", "fast"]}],
    }
    steps = {"age_ms": 1, "wait_ms": 0, "decode_ms": 1, "preprocess_ms": 2, "inference_ms": 20, "postprocess_ms": 3}
    own = {"total_ms": 26.5, "budget_ms": 50, "tier": "full", "outcome": "on_time", "fallback": None}
    lines = [
        {
            "v": 1,
            "kind": "frame",
            "stage": "perception",
            "seq": n,
            "t_ns": n + 1,
            "stamp_ns": 1000 + n,
            **steps,
            **own,
            **f,
        }
        for n, f in enumerate(frames)
    ]
    path = folder / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, [start, *lines])) + "\n", encoding="utf-8")
    return path


def test_given_a_table_when_read_then_numbers_lists_and_distributions_are_times(tmp_path):
    (times,), said = read(
        table(
            tmp_path,
            "perception: {full: {inference_ms: {median: 20, p99: 40}, decode_ms: 0.5},"
            " medium: {inference_ms: [8, 9]}, fast: {inference_ms: 3}}\nrestart_ms: 500",
        )
    )
    assert said == []
    assert [(c.median_ms, c.p99_ms) for c in times.calibrations()] == [
        (20.0, pytest.approx(40.0)),
        (8.0, 9.0),
        (3.0, 3.0),
    ]
    assert times.run(0, 0, 0, 0).steps.decode_ms == 0.5
    assert times.restart_ms == 500
    assert times.seed == 3


def test_given_a_tier_that_is_not_told_when_read_then_it_is_as_slow_as_the_next_better_one_and_that_is_said(tmp_path):
    (times,), said = read(table(tmp_path, "perception: {full: {inference_ms: 20}, fast: {inference_ms: 3}}"))
    assert [c.median_ms for c in times.calibrations()] == [20.0, 20.0, 3.0]
    assert len(said) == 1
    assert "no times of tier medium; taken to be those of full" in said[0]


def test_given_no_tier_as_good_that_is_told_when_read_then_it_is_too_slow_to_be_used_and_that_is_said(tmp_path):
    (times,), said = read(table(tmp_path, "perception: {medium: {inference_ms: 8}}"))
    assert [c.median_ms for c in times.calibrations()] == [10 * CONFIG.stages[0].budget_ms, 8.0, 8.0]
    assert len(said) == 2
    assert "no times of tier full; taken to be too slow" in said[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "has to be a table"),
        ("planning: {full: {inference_ms: 1}}", "no stage planning"),
        ("restart_ms: 3", "perception is not there"),
        ("perception: {tiny: {inference_ms: 1}}", "has no tier tiny; it has full, medium, fast"),
        ("perception: {full: {decode_ms: 1}}", r"perception\.full: .* has to hold inference_ms"),
        ("perception: {full: {inference_ms: 1, wait_ms: 2}}", "may hold decode_ms, preprocess_ms, postprocess"),
        ("perception: {full: {inference_ms: -1}}", "0 or more"),
        ("perception: {full: {inference_ms: .nan}}", "0 or more"),
        ("perception: {full: {inference_ms: soon}}", r"perception\.full\.inference_ms: 'soon'"),
        ("perception: {full: {inference_ms: {median: 9, p99: 3}}}", "median <= p99"),
        ("perception: {full: {inference_ms: []}}", "a list of ms"),
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


def test_given_records_of_a_crash_when_read_then_the_frame_crashes_again(tmp_path):
    crash = {
        "outcome": "crashed",
        "inference_ms": None,
        "decode_ms": None,
        "preprocess_ms": None,
        "postprocess_ms": None,
    }
    (times,), _ = read(records(tmp_path, {}, crash))
    assert times.run(1001, 1, 0, 0).ending.word == "crashed"


@pytest.mark.parametrize("frames", [[], [{"outcome": "late", "inference_ms": None}], [{"stage": "other"}]])
def test_given_records_without_a_good_frame_of_the_stage_when_read_then_the_error_says_what_to_give(tmp_path, frames):
    with pytest.raises(ConfigError, match="give --times a table"):
        read(records(tmp_path, *frames))


def test_given_a_log_without_records_when_read_then_the_error_says_what_to_give(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; give --times a table, for example"):
        read(tmp_path / "absent.mcap")
