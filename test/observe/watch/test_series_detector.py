import csv
import math
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.rig.anomaly_series import drive
from torchperf_ros.observe.runs.run_log import run_of, write_run
from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, SeriesDetector
from torchperf_ros.stage.frame_table import FRAME
from torchperf_ros.tools.main import app

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)
DIRECTION = st.sampled_from(["both", "up", "down"])


def scores(values, interval_s=1.0, **options):
    detector = SeriesDetector(**options)
    return [detector.update(number * interval_s, value).score for number, value in enumerate(values)]


def noise(count, seed=1, mean=100.0, deviation=2.0):
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(count)]


def readings(values, **options):
    detector = SeriesDetector(**options)
    return [detector.update(float(number), value) for number, value in enumerate(values)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=150), DIRECTION, st.floats(0, 1e300), st.floats(1, 4)
)
def test_given_any_floats_when_updated_then_every_score_is_from_0_to_1(samples, direction, floor, caution):
    detector = SeriesDetector(direction, floor, caution)
    for _ in range(60):  # past the warm-up
        detector.update(0.0, 1.0)
    for time_s, value in samples:
        reading = detector.update(time_s, value)
        assert 0.0 <= reading.score <= 1.0
        assert detector.active == (reading.since_s is not None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(-60, 60), st.integers(-100_000, 100_000))
def test_given_a_series_when_scaled_and_shifted_then_scores_stay(seed, exponent, shift):
    draw = random.Random(seed)
    values = [round(draw.gauss(0, 30) ** 3 / 500) for _ in range(400)]
    scale = 2.0**exponent  # exact, so that ties stay ties

    assert scores([(value + shift) * scale for value in values]) == pytest.approx(scores(values), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=80, max_size=200), st.lists(ANY_FLOAT, max_size=30))
def test_given_a_prefix_when_more_follows_then_its_scores_stay(values, more):
    assert scores(values) == scores(values + more)[: len(values)]


def test_given_the_first_samples_when_they_are_wild_then_they_score_nothing():
    assert max(scores([1.0, 1e9, -1e9, 0.0] * 12)) == 0.0


def test_given_zeros_for_long_when_one_jumps_then_it_is_told_at_once_as_certain():
    *before, jump = readings([0.0] * 5000 + [0.001])

    assert max(reading.score for reading in before) == 0.0
    assert jump.score > 0.9
    assert jump.since_s == 5000.0
    assert jump.kind == "step"
    assert jump.baseline == 0.0


@pytest.mark.parametrize(
    ("change", "kinds", "within"),
    [
        (lambda values: values + [130.0] + noise(20, 2), {"value", "step"}, 1),
        (lambda values: values + noise(60, 2, mean=112.0), {"value"}, 25),
        (lambda values: values + noise(100, 2, deviation=14.0), {"value", "step"}, 20),
        (lambda values: values + [values[-1]] * 40, {"flat"}, 12),
        (lambda values: values + [v + 0.03 * i for i, v in enumerate(noise(1000, 2))], {"value"}, 600),
    ],
    ids=["spike", "level", "variance", "flat", "ramp"],
)
def test_given_noise_when_it_changes_then_the_change_is_told_with_its_kind(change, kinds, within):
    found = readings(change(noise(3000)))
    told = [number for number, reading in enumerate(found) if reading.score >= 0.5 and number >= 3000]

    assert told[0] < 3000 + within
    assert found[told[0]].kind in kinds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_given_latency_at_30_hz_when_it_rises_by_20_percent_then_that_is_told_within_3_s_and_little_else(
    seed,
):
    found = scores(drive(seed, 18_000, "levels"), interval_s=1 / 30, caution=FRAME_CAUTION)
    before = [number for number in range(9000) if found[number] >= 0.5]

    assert any(score >= 0.5 for score in found[9000:9090])
    assert len(before) <= 5


def test_given_a_new_level_when_it_stays_then_it_is_told_once_and_becomes_the_baseline():
    found = readings(noise(3000) + noise(1500, 2, mean=130.0))
    told = [number for number, reading in enumerate(found) if reading.score >= 0.5 and number >= 3000]

    assert told[0] == 3000
    assert max(told) <= 3020  # once more when the level follows
    assert found[3000].baseline == pytest.approx(100, abs=1)
    assert found[3200].baseline == pytest.approx(130, abs=2)
    assert found[3100].since_s == 3000.0
    assert found[-1].since_s is None


def test_given_an_anomaly_when_something_lesser_follows_within_150_samples_then_it_is_halved():
    values = noise(3000)
    values[2000] = 160.0
    values[2100], values[2400] = 125.0, 80.0
    found = readings(values)

    assert found[2100].kind == "value"
    assert found[2100].score < 0.5 < min(found[2000].score, found[2400].score)


def test_given_a_value_seen_when_it_comes_back_then_it_is_known_and_after_8192_samples_it_is_new_again():
    soon, late = (readings([*noise(3000), 130.0, *noise(pause, 2), 130.0])[-1] for pause in (4000, 9500))

    assert soon.kind in {"", "step"}
    assert soon.score < late.score
    assert late.kind == "value"


def test_given_one_direction_when_the_other_happens_then_it_is_not_told():
    down = noise(2000) + [40.0] * 5
    up = noise(2000) + [160.0] * 5

    assert max(scores(down, direction="up", caution=1.4)) < 0.5
    assert max(scores(up, direction="down", caution=1.4)) < 0.5
    assert scores(up, direction="up", caution=1.4)[2000] > 0.5
    assert scores(down, direction="down", caution=1.4)[2000] > 0.5


def test_given_a_floor_when_a_departure_is_smaller_then_it_stays_below_the_threshold_in_proportion():
    values = [5.0] * 500 + [5.4]

    assert scores(values)[-1] > 0.9
    assert scores(values, floor=0.5)[-1] == pytest.approx(0.4)
    assert scores(values, floor=0.3)[-1] > 0.9


def test_given_missing_values_when_they_come_then_they_are_gaps_below_the_threshold_and_nothing_is_learnt():
    detector = SeriesDetector()
    for number, value in enumerate(noise(200)):
        expected = detector.update(float(number), value)
    gaps = [
        detector.update(200.0 + number, value)
        for number, value in enumerate([math.nan, math.inf, -math.inf])
    ]
    after = detector.update(203.0, 100.0)

    assert {gap.kind for gap in gaps} == {"gap"}
    assert all(0 < gap.score < 0.5 for gap in gaps)
    assert after.baseline == pytest.approx(expected.baseline, abs=0.5)
    assert after.score < 0.5


def test_given_a_long_series_when_it_goes_on_then_memory_stays():
    detector = SeriesDetector()
    draw = random.Random(1)
    sizes = []
    for number in range(12_000):
        detector.update(number * 60.0, draw.gauss(0, 1) / draw.gauss(0, 1))
        if number % 3000 == 2999:
            sizes.append(len(pickle.dumps(detector)))

    assert max(sizes) < 400_000
    assert sizes[-1] <= 1.5 * sizes[0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"direction": "left"}, "direction"),
        ({"floor": -1.0}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"caution": 0.5}, "caution"),
    ],
)
def test_given_a_bad_option_when_made_then_the_error_names_it(options, name):
    with pytest.raises(ValueError, match=name):
        SeriesDetector(**options)


def test_given_zeros_when_one_sample_is_not_then_the_zeros_after_it_are_no_flat_line():
    found = readings([0.0] * 1000 + [1.0] + [0.0] * 900)

    assert {reading.kind for reading in found[1020:]} == {""}


# -- the command


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
