"""`torchperf replay` as a user runs it."""

import json
import signal

import numpy as np
import pytest
from typer.testing import CliRunner

from torchperf_ros.observe.runs.report import verdict
from torchperf_ros.observe.runs.run_log import read_run
from torchperf_ros.replay.run_reading import read_runs
from torchperf_ros.tools.main import app

from .conftest import drive, one_stage, write_points


def torchperf(*arguments):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def sets(**own):
    """`--set` options for one stage that counts."""
    values = one_stage(**own).items()
    return [word for name, value in values for word in ("--set", f"{name}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_points(tmp_path_factory.mktemp("log") / "drive", drive(30, words={1: "print", 4: "raise"}))


def test_given_a_log_when_replayed_then_table_reasons_and_files_are_there(log, tmp_path):
    run, table, output = tmp_path / "run.json", tmp_path / "run.parquet", tmp_path / "out.mcap"
    done = torchperf(log, *sets(), "--json", run, "--parquet", table, "-o", output)
    assert done.exit_code == 0, done.output
    assert "first" in done.output
    assert "first frame 4: RuntimeError: as ordered" in done.output
    assert "wrote " in done.output
    assert (
        "[/INST]" in done.output
    )  # what a model prints is shown as it is, also where it looks like markup
    assert len(read_run(run).frames["first"]) == len(read_run(table).frames["first"]) == 30
    (found,) = read_runs(output, lambda _done, _total: None)
    assert not [text for text in found.troubles if "older node" in text]
    for frames in (found.frames["first"], read_run(run).frames["first"]):  # at `fast` there is no deadline
        assert (
            len(frames)
            == np.isnan(frames["budget_ms"]).sum()
            == np.isnan(frames["lateness_ms"]).sum()
            == 30
        )


def test_given_a_model_that_fails_at_every_frame_when_replayed_then_the_status_is_1_and_the_line_is_named(
    tmp_path,
):
    failing = write_points(tmp_path / "drive", drive(5, words=dict.fromkeys(range(5), "raise")))
    done = torchperf(failing, *sets())
    assert done.exit_code == 1, done.output
    assert "first frame 0 and 4 more: RuntimeError: as ordered (replay_adapters.py:" in done.output
    assert "first: no frame was answered by the model" in done.output
    assert "all the time that it needed" not in done.output


def test_given_a_model_slower_than_its_sensor_when_replayed_then_nothing_says_that_all_is_well(tmp_path):
    log = write_points(tmp_path / "drive", drive(120, period_ms=16))
    run, times = tmp_path / "run.json", tmp_path / "times.yaml"
    times.write_text(
        json.dumps({"first": {"full": {"inference_ms": 53}, "fast": {"inference_ms": 53}}}), "utf-8"
    )
    done = torchperf(log, *sets(budget_ms=200.0), "--pace", "virtual", "--times", times, "--json", run)
    assert done.exit_code == 1, done.output
    assert "first: more than a tenth of the frames had no answer" in done.output
    read = read_run(run)
    answered = len(read.frames["first"])
    assert 30 < answered < 45
    assert f"{120 - answered} of 120 frames in 2 s had no answer, as a newer one came first" in done.output
    assert read.facts["stages"][0]["miss_ratio"] == pytest.approx(1 - answered / 120)
    (found,) = read_runs(run, lambda _done, _total: None)
    kind, text = verdict(found.stage("first"))
    assert (kind, text.partition(":")[0]) == ("bad", "first")
    assert "one comes every 1" in text
    compared = CliRunner().invoke(app, ["compare", str(run), str(run), "--max-miss", "1"])
    assert compared.exit_code == 1, compared.output
    assert "BREAKS the limit of 1 %" in compared.output


def test_given_a_dry_run_when_asked_then_it_says_what_goes_where(log):
    done = torchperf(log, *sets(), "--dry-run")
    assert done.exit_code == 0
    assert "  /point (geometry_msgs/msg/PointStamped), 30 messages, goes to first" in done.output
    assert "stage first: full, fast; engine eager, no deadline; gives /counted" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere.mcap"], "/nowhere.mcap"),
        *(
            (["LOG", "--map", text], f"--map '{text}': has to be LOG_TOPIC:=STAGE_TOPIC")
            for text in ("image", ":=image", "/camera:=")
        ),
        (["LOG", "--map", "/a:=image", "--map", "/b:=image"], "--map '/b:=image': image is /a already"),
        (["LOG", "--set", "budget"], "--set 'budget': has to be NAME=VALUE"),
        (
            ["LOG", "--set", "first.bugdet_ms=3"],
            "parameter first.bugdet_ms: is unknown; the closest names are first.budget_ms",
        ),
        (["LOG", "--set", "third.budget_ms=3"], "parameter third.budget_ms: is not there"),
        (["LOG", "--pace", "slow"], "pace 'slow'"),
        (["LOG", "--params", "/nowhere.yaml"], "/nowhere.yaml: cannot be read"),
        (["LOG", "--json", "run.txt"], "out.mcap: run.txt is of the same kind already"),
        (["LOG", "--inputs", "/absent"], "has no topic /absent"),
        (
            ["LOG", "--pace", "virtual", "--times", "/nowhere.yaml"],
            "step times /nowhere.yaml: cannot be read",
        ),
        (["LOG", "--pace", "virtual"], "give --times a table"),
        (["LOG", "-o", "out.txt"], "output out.txt: has to be a file that ends in .mcap"),
        (
            ["LOG", "--json", "run.json", "--parquet", "other.json"],
            "-o other.json: run.json is of the same kind already; leave one of the two out",
        ),
        (["LOG", "--times", "run.json"], "step times run.json: are for pace virtual"),
        (["LOG", "--scheduler", "tcp://127.0.0.1:1"], "--parallel: an address is for several logs"),
        (["LOG", "-o", "LOG/out.mcap"], "is in the log that is replayed; choose another place"),
    ],
)
def test_given_bad_input_when_replayed_then_one_line_says_what_and_the_status_is_2(
    log, tmp_path, arguments, words
):
    command = [word.replace("LOG", str(log)) if word.startswith("LOG") else word for word in arguments]
    output = [] if "-o" in arguments else ["-o", tmp_path / "out.mcap"]
    done = torchperf(*command, *sets(), *output)
    assert done.exit_code == 2, done.output
    told = [line for line in done.output.splitlines() if line.startswith("torchperf: ")]
    assert len(told) == 1, done.output
    assert words in told[0]
    assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ctrl_c_at_the_16th")
@pytest.mark.parametrize("ctrl_c_at_the_16th", [signal.SIGINT, signal.SIGTERM], indirect=True)
def test_given_ctrl_c_or_sigterm_when_replaying_then_what_was_done_is_written_and_the_status_is_1(
    log, tmp_path
):
    run = tmp_path / "run.json"
    done = torchperf(log, *sets(), "--json", run)
    assert done.exit_code == 1, done.output
    assert "interrupted: the results reach up to there" in done.output
    assert f"wrote {run}" in done.output.replace("\n", "")
    assert not read_run(run).facts["complete"]


def test_given_a_folder_of_evidence_when_replayed_then_its_recording_parameters_and_step_times_are_taken(
    tmp_path,
):
    evidence = tmp_path / "incident"
    write_points(evidence / "black_box", drive(20))
    (evidence / "parameters.json").write_text(json.dumps(one_stage(budget_ms=61.0)), encoding="utf-8")
    start = {"v": 1, "kind": "start", "t_ns": 1, "stages": [{"name": "first", "tiers": ["full", "fast"]}]}
    frame = {
        "v": 1,
        "kind": "frame",
        "stage": "first",
        "seq": 0,
        "t_ns": 2,
        "stamp_ns": 5,
        "total_ms": 17.0,
        "tier": "full",
        "inference_ms": 17.0,
        "decode_ms": 0,
        "preprocess_ms": 0,
        "postprocess_ms": 0,
        "outcome": "on_time",
    }
    (evidence / "records.jsonl").write_text(f"{json.dumps(start)}\n{json.dumps(frame)}\n", encoding="utf-8")
    done = torchperf(evidence, "--pace", "virtual", "--json", tmp_path / "run.json")
    assert done.exit_code == 0, done.output
    assert " 17.0 61 " in " ".join(done.output.split())  # the longest, and the budget
    (rows,) = read_run(tmp_path / "run.json").frames.values()
    assert set(rows["total_ms"]) == {17.0}
    assert set(rows["budget_ms"]) == {61.0}
