import csv
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from torchperf_ros.cli import app
from torchperf_ros.core.anomaly.series_detector import SeriesDetector


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
    lines = [f"2024-05-{1 + i // 288:02d} {i // 12 % 24:02d}:{i % 12 * 5:02d}:00,{50 + draw.gauss(0, 1):.3f}"
             for i in range(500)]  # fmt: skip
    lines[400] = lines[400].split(",")[0] + ",90.0"
    path.write_text("timestamp,value\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_given_a_series_when_scored_then_each_row_has_its_score_and_the_event_is_told(series):
    done = run(series)
    header, *rows = read(series.with_name("cpu.anomalies.csv"))

    assert done.exit_code == 0, done.output
    assert header == ["timestamp", "value", "anomaly_score"]
    assert [row[:2] for row in rows] == read(series)[1:]
    scores = [float(row[2]) for row in rows]
    assert max(scores[:400]) < 0.5 < scores[400]
    assert all(word in done.output for word in ("500 rows", "1 event", "2024-05-02 09:20:00", "spike", "90"))
    assert sorted(path.name for path in series.parent.iterdir()) == ["cpu.anomalies.csv", "cpu.csv"]


def test_given_what_the_command_writes_when_compared_with_the_detector_then_it_is_its_score(series):
    run(series, "-o", series.with_name("out.csv"), "--direction", "up", "--floor", "60", "--caution", "1.5")
    detector = SeriesDetector("up", 60.0, 1.5)
    expected = [detector.update(300.0 * i, float(row[1])).score for i, row in enumerate(read(series)[1:])]

    assert [float(row[2]) for row in read(series.with_name("out.csv"))[1:]] == pytest.approx(expected, abs=1e-6)
    assert max(expected) < 0.5


def test_given_stdout_as_output_when_scored_then_only_rows_go_there(series):
    code = "import sys; from torchperf_ros.cli import app; app()"
    done = subprocess.run([sys.executable, "-c", code, "anomalies", series, "-o", "-"], capture_output=True, text=True,
                          check=False, cwd=Path(__file__).resolve().parents[2])  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 501
    assert "1 event" in done.stderr


def test_given_gaps_and_odd_timestamps_when_scored_then_every_row_is_there_and_the_summary_counts_them(tmp_path):
    path = tmp_path / "odd.csv"
    path.write_text("5,1\n6,\n6,NaN\n4,2\n\n1000,inf\n1001,3\n", encoding="utf-8")
    done = run(path)
    rows = read(tmp_path / "odd.anomalies.csv")[1:]

    assert done.exit_code == 0, done.output
    assert [row[:2] for row in rows] == [
        ["5", "1"],
        ["6", ""],
        ["6", "NaN"],
        ["4", "2"],
        ["1000", "inf"],
        ["1001", "3"],
    ]
    assert all(0 <= float(row[2]) < 0.5 for row in rows)
    for words in (
        "6 rows",
        "3 without a value",
        "1 with a repeated timestamp",
        "1 with a timestamp that goes backward",
    ):
        assert words in done.output


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
    values = [0.0 if i % 150 or i < 300 else 10.0 ** (i / 150) for i in range(150 * 60)]
    path.write_text("".join(f"{i},{value}\n" for i, value in enumerate(values)), encoding="utf-8")
    done = run(path)

    assert "the 30 that score most" in done.output
    starts = [int(line.split()[0]) for line in done.output.splitlines() if line[:1].isdigit() and "spike" in line]
    assert len(starts) == 30
    assert starts == sorted(starts)
    assert not math.isnan(starts[0])


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (None, [], ["not there"]),
        ("", [], ["empty"]),
        ("timestamp,value\n", [], ["no rows"]),
        ("timestamp,value\n1,x\n", [], ["bad.csv:2", "'x'"]),
        ("1,1\n", ["-o", "{file}"], ["--output", "is the input"]),
        ("1,1\n", ["-o", "{folder}/none/out.csv"], ["--output", "existing folder"]),
        ("1,1\n", ["--plot", "{folder}"], ["--plot", "existing folder"]),
        ("1,1\n", ["-o", "{folder}/x", "--plot", "{folder}/x"], ["two files"]),
        ("1,1\n", ["--floor", "nan"], ["floor"]),
        ("1,1\n", ["--caution", "9"], ["caution"]),
        ("1,1\n", ["--direction", "left"], ["direction"]),
    ],
)
def test_given_bad_input_when_run_then_it_ends_with_2_says_why_and_leaves_nothing(tmp_path, text, arguments, words):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    done = run(path, *(argument.format(file=path, folder=tmp_path) for argument in arguments))

    assert done.exit_code == 2
    assert all(word in done.output for word in words), done.output
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if text is None else ["bad.csv"])
