import csv
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from torchperf_ros.observe.runs.run_log import run_of, write_run
from torchperf_ros.observe.watch.series_detector import SeriesDetector
from torchperf_ros.stage.frame_table import FRAME
from torchperf_ros.tools.main import app


def run(*arguments):
    return CliRunner().invoke(app, ["anomalies", *map(str, arguments)])


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture
def series(tmp_path):
    """500 rows of noise, one every 5 minutes, the 401st far off."""
    draw = random.Random(1)
    path = tmp_path / "cpu.csv"
    lines = [
        f"2024-05-{1 + i // 288:02d} {i // 12 % 24:02d}:{i % 12 * 5:02d}:00,{50 + draw.gauss(0, 1):.3f}"
        for i in range(500)
    ]
    lines[400] = lines[400].split(",")[0] + ",90.0"
    path.write_text("timestamp,value\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_given_a_series_when_scored_then_each_row_has_its_score_and_the_summary_counts(series):
    done = run(series, "--caution", "1.4")
    header, *rows = read(series.with_name("cpu.anomalies.csv"))

    assert done.exit_code == 0, done.output
    assert header == ["timestamp", "value", "anomaly_score"]
    assert [row[:2] for row in rows] == read(series)[1:]
    scores = [float(row[2]) for row in rows]
    assert max(scores[:400]) < 0.5 < scores[400]
    assert "500 rows; 1 score 0.5 and more" in done.output
    assert sorted(path.name for path in series.parent.iterdir()) == ["cpu.anomalies.csv", "cpu.csv"]


def test_given_options_and_stdout_when_scored_then_rows_alone_go_there_with_the_scores_of_the_detector(
    series,
):
    code = "from torchperf_ros.tools.main import app; app()"
    options = ["-o", "-", "--caution", "4"]
    command = [sys.executable, "-c", code, "anomalies", series, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[3]
    )
    detector = SeriesDetector(caution=4.0)
    expected = [detector.update(300.0 * i, float(row[1])).score for i, row in enumerate(read(series)[1:])]

    assert done.returncode == 0, done.stderr
    scores = [float(row[2]) for row in csv.reader(done.stdout.splitlines()[1:])]
    assert scores == pytest.approx(expected, abs=1e-6)
    assert "500 rows" in done.stderr


def test_given_a_run_when_scored_then_the_latency_of_the_named_stage_is_judged(tmp_path):
    draw = random.Random(2)
    frames = np.zeros(400, FRAME)
    frames["t_ns"] = 1_000_000_000 + 33_000_000 * np.arange(400)
    frames["total_ms"] = [20 + draw.gauss(0, 0.5) + 30 * (number == 350) for number in range(400)]
    path = tmp_path / "run.json"
    write_run(
        run_of({"stages": [{"name": "camera"}, {"name": "plan"}]}, {"camera": frames, "plan": frames[:3]}),
        path,
    )
    done = run(path, "--stage", "camera")
    rows = read(tmp_path / "run.anomalies.csv")[1:]

    assert done.exit_code == 0, done.output
    assert rows[1][:2] == ["1.033000", f"{frames['total_ms'][1]:.3f}"]
    assert [number for number, row in enumerate(rows) if float(row[2]) >= 0.5] == [350]
    assert len(read(tmp_path / "run.anomalies.csv")) == 401
    assert "3 rows" in run(path).output  # the last stage
    assert "its stages: camera, plan" in run(path, "--stage", "other").output


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (None, [], ["is no file"]),
        ("timestamp,value\n", [], ["no rows"]),
        ("timestamp,value\n1,x\n", [], ["bad.csv:2", "'1,x'", "timestamp,value"]),
        ("1,1\n", ["-o", "{file}"], ["--output", "would replace the input"]),
        ("1,1\n", ["-o", "{folder}/none/out.csv"], ["--output", "existing folder"]),
        ("1,1\n", ["--caution", "9"], ["caution"]),
    ],
)
def test_given_bad_input_when_run_then_it_ends_with_2_says_why_and_leaves_nothing(
    tmp_path, text, arguments, words
):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    done = run(path, *(argument.format(file=path, folder=tmp_path) for argument in arguments))

    assert done.exit_code == 2
    assert all(word in done.output for word in words), done.output
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if text is None else ["bad.csv"])


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("timestamp,value\n2014-02-14 14:30:00,0.5\n", ["2014-02-14 14:30:00,0.5"]),
        ("2014-02-14 14:30:00,0.5\n", ["2014-02-14 14:30:00,0.5"]),
        ("2014-02-14T14:30:00Z,1e3\r\n2014-02-14T15:30:00.5+01:00,2\r\n", None),
        ("2014-02-14,3\n2014/02/15,4", None),
        ("0,1\n1,2\n0.5,3\n0.5,3\n", None),
        ("2014-02-14,\n2014-02-15,NaN\n2014-02-16,null\n2014-02-17, \n", None),
        ("time;value\n\n5;2\n", ["5,2"]),
        ("t\tx\n5\t2\n", ["5,2"]),
        ('\ufeff"timestamp","value"\n"5","2"\n', ["5,2"]),
        ("value,timestamp\n7,5\n", ["5,7"]),
        ("host,timestamp,cpu,value\na,5,1,7\n", ["5,7"]),
    ],
)
def test_given_a_way_to_write_a_series_when_scored_then_every_row_is_there_as_it_was_written(
    tmp_path, text, written
):
    path = tmp_path / "series.csv"
    path.write_text(text, encoding="utf-8")
    done = run(path, "-o", tmp_path / "scores.csv")
    assert done.exit_code == 0, done.output
    rows = [",".join(row[:2]) for row in read(tmp_path / "scores.csv")[1:]]
    assert rows == (written or text.splitlines())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["series.csv", "no rows"]),
        ("5\n6\n", [":1:", "'5'"]),
        ("timestamp,value\n1,2\n2\n", [":3:", "'2'"]),
        ("timestamp,value\n1,2\n2,many\n", [":3:", "'2,many'"]),
        ("timestamp,value\n1,2\nyesterday,3\n", [":3:", "'yesterday,3'"]),
        ("a,b\nc,d\n1,2\n", [":2:", "'c,d'"]),
        ("1,2\n,3\n", [":2:", "',3'"]),
        ("1,2\ninf,3\n", [":2:", "'inf,3'"]),
        ("1,2\n\n\nx,3\n", [":4:", "'x,3'"]),
        ("1,2\n2,\udce4\n", [":2:"]),
    ],
)
def test_given_what_cannot_be_read_when_scored_then_one_line_says_where(tmp_path, text, words):
    path = tmp_path / "series.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    done = run(path)
    assert done.exit_code == 2
    assert len(done.output.splitlines()) == 1
    assert all(word in done.output for word in words), done.output
    assert not (tmp_path / "series.anomalies.csv").exists()
