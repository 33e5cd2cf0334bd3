import csv
import math
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from torchperf_ros.observe.runs.run_file import Run, write_run
from torchperf_ros.observe.watch.series_detector import SeriesDetector
from torchperf_ros.stage.frame_table import FRAME
from torchperf_ros.tools.anomalies_command import SeriesError, csv_rows
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


def test_given_a_series_when_scored_then_each_row_has_its_score_and_the_event_is_told(series):
    done = run(series, "--caution", "1.4")
    header, *rows = read(series.with_name("cpu.anomalies.csv"))

    assert done.exit_code == 0, done.output
    assert header == ["timestamp", "value", "anomaly_score"]
    assert [row[:2] for row in rows] == read(series)[1:]
    scores = [float(row[2]) for row in rows]
    assert max(scores[:400]) < 0.5 < scores[400]
    assert all(
        word in done.output for word in ("500 rows", "1 event", "2024-05-02 09:20:00", "value", "90")
    )
    assert sorted(path.name for path in series.parent.iterdir()) == ["cpu.anomalies.csv", "cpu.csv"]


def test_given_options_and_stdout_when_scored_then_rows_alone_go_there_with_the_scores_of_the_detector(
    series,
):
    code = "from torchperf_ros.tools.main import app; app()"
    options = ["-o", "-", "--direction", "up", "--floor", "60", "--caution", "1.5"]
    command = [sys.executable, "-c", code, "anomalies", series, *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[3]
    )
    detector = SeriesDetector("up", 60.0, 1.5)
    expected = [detector.update(300.0 * i, float(row[1])).score for i, row in enumerate(read(series)[1:])]

    assert done.returncode == 0, done.stderr
    scores = [float(row[2]) for row in csv.reader(done.stdout.splitlines()[1:])]
    assert scores == pytest.approx(expected, abs=1e-6)
    assert max(expected) < 0.5
    assert "no event" in done.stderr


def test_given_gaps_and_odd_timestamps_when_scored_then_every_row_is_there_and_the_summary_counts_them(
    tmp_path,
):
    path = tmp_path / "odd.csv"
    path.write_text("5,1\n6,\n6,NaN\n4,2\n\n1000,inf\n1001,3\n", encoding="utf-8")
    done = run(path)
    rows = read(tmp_path / "odd.anomalies.csv")[1:]

    assert done.exit_code == 0, done.output
    assert [",".join(row[:2]) for row in rows] == ["5,1", "6,", "6,NaN", "4,2", "1000,inf", "1001,3"]
    assert all(0 <= float(row[2]) < 0.5 for row in rows)
    told = (
        "6 rows",
        "3 without a value",
        "1 with a repeated timestamp",
        "1 with a timestamp that goes backward",
    )
    assert [words for words in told if words not in done.output] == []


def test_given_a_picture_is_wanted_when_scored_then_it_is_a_png_with_events_in_it(series):
    picture = series.with_name("cpu.png")
    done = run(series, "--plot", picture)

    assert done.exit_code == 0, done.output
    with Image.open(picture) as image:
        assert image.format == "PNG"
        colours = image.convert("RGB").resize((400, 200)).getcolors(100_000)
    reddish = sum(count for count, (red, green, blue) in colours if red > green + 20 and red > blue + 20)
    assert reddish > 5


@pytest.mark.parametrize("text", ["1,nan\n2,nan\n", "3,5\n", "9,1\n1,1\n5,inf\n"])
def test_given_a_series_with_next_to_nothing_in_it_when_drawn_then_there_is_a_picture(tmp_path, text):
    path = tmp_path / "little.csv"
    path.write_text(text, encoding="utf-8")
    done = run(path, "--plot", tmp_path / "little.png")

    assert done.exit_code == 0, done.output
    assert (tmp_path / "little.png").stat().st_size > 1000


def test_given_many_events_when_told_then_the_summary_shows_the_highest_in_order_of_time(tmp_path):
    path = tmp_path / "many.csv"
    values = [0.0 if i % 200 or i < 400 else 10.0 ** (i / 200) for i in range(200 * 60)]
    path.write_text("".join(f"{i},{value}\n" for i, value in enumerate(values)), encoding="utf-8")
    done = run(path)

    assert "the 30 that score most" in done.output
    starts = [
        int(line.split()[0]) for line in done.output.splitlines() if line[:1].isdigit() and "step" in line
    ]
    assert len(starts) == 30
    assert starts == sorted(starts)
    assert not math.isnan(starts[0])


def test_given_a_run_when_scored_then_the_latency_of_the_named_stage_is_judged(tmp_path):
    draw = random.Random(2)
    frames = np.zeros(400, FRAME)
    frames["t_ns"] = 1_000_000_000 + 33_000_000 * np.arange(400)
    frames["total_ms"] = [20 + draw.gauss(0, 0.5) + 30 * (number == 350) for number in range(400)]
    path = tmp_path / "run.json"
    write_run(
        Run({"stages": [{"name": "camera"}, {"name": "plan"}]}, {"camera": frames, "plan": frames[:3]}),
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
        (None, [], ["not there"]),
        ("timestamp,value\n", [], ["no rows"]),
        ("timestamp,value\n1,x\n", [], ["bad.csv:2", "'x'"]),
        ("1,1\n", ["-o", "{file}"], ["--output", "would replace the input"]),
        ("1,1\n", ["-o", "{folder}/none/out.csv"], ["--output", "existing folder"]),
        ("1,1\n", ["--plot", "{folder}"], ["--plot", "existing folder"]),
        ("1,1\n", ["-o", "{folder}/x", "--plot", "{folder}/x"], ["--plot", "is the file of --output"]),
        ("1,1\n", ["--floor", "nan"], ["floor"]),
        ("1,1\n", ["--caution", "9"], ["caution"]),
        ("1,1\n", ["--direction", "left"], ["direction"]),
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


@pytest.fixture
def rows(tmp_path):
    def read(text, encoding="utf-8"):
        path = tmp_path / "series.csv"
        path.write_bytes(text.encode(encoding))
        return csv_rows(path)

    return read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("timestamp,value\n2014-02-14 14:30:00,0.5\n", [(1392388200.0, 0.5)]),
        ("2014-02-14 14:30:00,0.5\n", [(1392388200.0, 0.5)]),
        (
            "2014-02-14T14:30:00Z,1e3\r\n2014-02-14T15:30:00.5+01:00,2\r\n",
            [(1392388200.0, 1e3), (1392388200.5, 2.0)],
        ),
        ("2014-02-14,3\n2014/02/15,4", [(1392336000.0, 3.0), (1392422400.0, 4.0)]),
        ("0,1\n1,2\n0.5,3\n0.5,3\n", [(0.0, 1.0), (1.0, 2.0), (0.5, 3.0), (0.5, 3.0)]),
        ("1392388200000,1\n", [(1392388200.0, 1.0)]),
        ("1392388200000000,1\n", [(1392388200.0, 1.0)]),
        ("1392388200000000000,1\n", [(1392388200.0, 1.0)]),
        ("time;value\n\n5;2\n", [(5.0, 2.0)]),
        ("t\tx\n5\t2\n", [(5.0, 2.0)]),
        ('\ufeff"timestamp","value"\n"5","2"\n', [(5.0, 2.0)]),
        ("value,timestamp\n7,5\n", [(5.0, 7.0)]),
        ("host,timestamp,cpu,value\na,5,1,7\n", [(5.0, 7.0)]),
    ],
)
def test_given_a_way_to_write_a_series_when_read_then_times_and_values_are_right(rows, text, expected):
    assert [(row.time_s, row.value) for row in rows(text)] == expected


@pytest.mark.parametrize("missing", ["", "NaN", "nan", "NA", "null", " "])
def test_given_a_missing_value_when_read_then_it_is_nan_its_text_is_kept_and_no_row_is_a_header(
    rows, missing
):
    row, _ = rows(f"2014-02-14,{missing}\n2014-02-15,1\n")
    assert math.isnan(row.value)
    assert row.text == missing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["series.csv", "empty"]),
        ("5\n6\n", [":1:", "'5'", "timestamp,value"]),
        ("timestamp,value\n1,2\n2\n", [":3:", "'2'", "1 fields", "timestamp,value"]),
        ("timestamp,value\n1,2\n2,many\n", [":3:", "'many'", "no number"]),
        ("timestamp,value\n1,2\nyesterday,3\n", [":3:", "'yesterday'", "ISO"]),
        ("1,2\n,3\n", [":2:", "''", "ISO"]),
        ("1,2\ninf,3\n", [":2:", "'inf'", "ISO"]),
        ("1,2\n\n\nx,3\n", [":4:", "'x'"]),
    ],
)
def test_given_what_cannot_be_read_when_read_then_the_error_says_where_and_what_would_be_right(
    rows, text, words
):
    with pytest.raises(SeriesError) as error:
        rows(text)
    assert all(word in str(error.value) for word in words), error.value


def test_given_no_text_when_read_then_the_error_says_so(rows):
    with pytest.raises(SeriesError, match="UTF-8"):
        rows("1,ä\n", encoding="latin-1")
