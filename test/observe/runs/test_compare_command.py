"""`torchperf compare` as people use it."""

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from torchperf_ros.observe.runs import comparison
from torchperf_ros.observe.runs.comparison import verdict_page
from torchperf_ros.observe.runs.run_log import StageLog, write_run
from torchperf_ros.tools.main import app

from . import compare_runs as made
from . import report_logs as logs

pytestmark = made.needs_libraries


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: `base`, `same` of the same kind, and `slower`; and files that are none."""
    folder = tmp_path_factory.mktemp("runs")
    values = [made.latencies(1200, seed) for seed in (1, 2, 3)]
    write_run(made.run(values[0]), folder / "base.json")
    write_run(made.run(values[1]), folder / "same.parquet")
    slower = values[2] * 1.2
    slower[::50] = made.BUDGET_MS + 5
    write_run(made.run(slower), folder / "slower.json")
    (folder / "text.json").write_text("hello", encoding="utf-8")
    return folder


def test_given_a_run_of_the_same_kind_when_compared_then_the_status_is_0(runs):
    done = compare(runs / "base.json", runs / "same.parquet", "--margin", "20")
    assert done.exit_code == 0, done.output
    assert re.search(r"p99 latency \[ms\] .* equivalent", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("Nothing is worse; ")


def test_given_a_slower_run_over_its_limit_then_the_status_is_1_and_every_file_says_the_same(
    runs, tmp_path
):
    outputs = [tmp_path / name for name in ("v.md", "v.html", "v.json")]
    done = compare(
        runs / "base.json",
        runs / "slower.json",
        "--max-miss",
        "0",
        "--markdown",
        outputs[0],
        "--html",
        outputs[1],
        "--json",
        outputs[2],
    )
    headline = done.stdout.splitlines()[-1]
    markdown, page, told = (path.read_text(encoding="utf-8") for path in outputs)
    assert done.exit_code == 1, done.output
    assert re.match(
        r"Limit broken: perception miss ratio [\d.]+ % \(limit 0 %\); \d metrics are worse: perception"
        r" p50 latency \+\d\.\d+ ms \(\+\d+\.\d%\)",
        headline,
    )
    assert re.search(r"miss ratio \[%\] .*, BREAKS the limit of 0 %", done.stdout)
    assert markdown.startswith(f"**{headline}**\n")
    assert "BREAKS the limit of 0 %" in markdown.split("<details>")[0]
    assert f'<div class="verdict bad">{headline}' in page
    assert re.search(r'<b class="bad">[^<]* BREAKS the limit of 0 %</b>', page)
    content = json.loads(told)
    assert (content["status"], content["verdict"]) == (1, headline)
    assert content["base"]["commit"] == "0123456789abcdef"
    found = {one["metric"]: one for one in content["findings"]}
    assert (found["miss"]["limit"], found["miss"]["breaks_limit"], found["p50"]["limit"]) == (
        0.0,
        True,
        None,
    )
    assert found["p50"]["verdict"] == "worse"
    assert found["p50"]["low"] < found["p50"]["new"] - found["p50"]["base"] < found["p50"]["high"]
    assert found["max"]["low"] is None


def test_given_few_frames_when_compared_then_the_status_is_one_of_its_own_and_how_many_would_do_is_said(
    runs, tmp_path
):
    write_run(made.run(made.latencies(100, 4)), tmp_path / "short.json")
    done = compare(runs / "base.json", tmp_path / "short.json")
    assert done.exit_code == 0, done.output
    assert re.search(r"p99 latency \[ms\].* not enough data: about [\d,]+ frames would be", done.stdout)
    assert compare(runs / "base.json", tmp_path / "short.json", "--strict").exit_code == 3
    for at in (3, 4):
        run = made.run(made.latencies(3, at))
        run.frames["perception"]["output_hash"] = 0
        run.frames["perception"]["tier"] = -1
        write_run(run, tmp_path / f"shortest{at}.json")
    done = compare(tmp_path / "shortest3.json", tmp_path / "shortest4.json")
    assert (done.exit_code, "not enough data for any of" in done.stdout) == (3, True), done.output


def test_given_records_and_a_recorded_log_when_compared_then_they_are_read_as_runs(tmp_path):
    drive = logs.write_log(tmp_path / "drive")
    done = compare(drive, drive)
    assert done.exit_code == 0, done.output
    assert "planning p99 latency" in done.stdout
    assert "perception: every latency is the same in both runs" in done.stdout
    assert "unknown machine: not every run names its own" in done.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "base.json same.parquet --json none/a.json",
            "-o FILE.json none/a.json: needs a file name in an existing folder",
        ),
        ("base.json none.json", "log none.json: does not exist"),
        ("base.json text.json", "run text.json: is no run that `torchperf replay"),
        ("", "name two runs, `compare BASE NEW`, or several"),
        ("a.json b.json c.json", "name two runs"),
        ("--new a.json b.json", "name two runs"),
        ("branch.json", "name two runs"),
        (
            "base.json same.parquet --limit miss=1%",
            "--limit: there is no such option any more; `--max-miss",
        ),
        (
            "base.json same.parquet --min-effect=p99=5%",
            "--min-effect: there is no such option any more; `--mar",
        ),
        (
            "base.json --save main",
            "--save: there is no such option any more; a baseline is a run's file: keep",
        ),
        (
            "same.parquet --baseline main",
            "--baseline: there is no such option any more; a baseline is a run's",
        ),
        ("base.json same.parquet -o v", "-o v: has to end in .md or .html or .json"),
    ],
)
def test_given_what_cannot_be_compared_when_run_then_one_line_says_so(runs, monkeypatch, line, words):
    monkeypatch.chdir(runs)
    done = compare(*line.split())
    assert done.exit_code == 2
    assert done.output.startswith(f"torchperf: {words}")
    assert len(done.output.splitlines()) == 1
    assert not (runs / "v").exists()


def test_given_a_full_disk_when_the_verdict_is_written_then_the_message_names_the_file(
    runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("v.json").symlink_to("/dev/full")
    done = compare(runs / "base.json", runs / "same.parquet", "-o", "v.json")
    assert done.exit_code == 2
    assert done.stderr == "torchperf: v.json: cannot be written: No space left on device\n"


def test_given_several_runs_a_side_when_compared_then_files_after_one_option_are_all_of_its_side(tmp_path):
    for at in range(3):
        for name, factor, start_up_s in (("base", 1.0, 2.0), ("new", 1.2, 9.0)):
            values = made.latencies(400, 10 * at + len(name)) * factor
            write_run(made.run(values, start_up_s=start_up_s + at / 10), tmp_path / f"{name}{at}.json")
    sides = [["--" + name, *sorted(tmp_path.glob(f"{name}*.json"))] for name in ("base", "new")]
    done = compare(*sides[0], *sides[1], "--markdown", tmp_path / "v.md")
    assert done.exit_code == 1, done.output
    assert re.search(r"start-up time \[s\] .* worse", done.stdout)
    assert "perception: 1,200 and 1,200 frames of 3 and 3 runs" in done.stdout
    assert "`new0.json and 2 more` against `base0.json and 2 more`" in (tmp_path / "v.md").read_text(
        encoding="utf-8"
    )


def test_given_a_library_that_is_missing_when_compared_then_the_message_says_what_to_install(
    runs, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "arch" else find(name))
    done = compare(runs / "base.json", runs / "same.parquet")
    assert (done.exit_code, done.output) == (
        2,
        "torchperf: arch is not installed: `pip install 'torchperf_ros[analysis]'`\n",
    )


# -- the page


def page_of(base, new):
    return verdict_page(comparison.compare([base], [new], resamples=300))


def test_given_a_longer_tail_when_a_page_is_written_then_it_has_table_and_pictures_and_asks_for_nothing():
    values, seconds = made.latencies(1500, 2), np.arange(200.0)
    base = replace(made.run(made.latencies(1500, 1)), name="base.json")
    new = replace(made.run(np.where(values > 24, values * 1.5, values)), name="runs/<script>x")
    memory = {"memory_t_ns": (seconds * 1e9).astype(int), "memory": {"workers_rss_mib": 800 + seconds / 10}}
    page = page_of(replace(base, **memory), replace(new, **memory))
    text, figures = logs.without_plotly(page), logs.figures_of(page)
    assert '<div class="verdict bad">1 metric is worse: perception p99 latency' in text
    assert re.findall(r"<th[^>]*>([^<]*)</th>", text)[:3] == ["metric", "verdict", "base"]
    assert "<td>p99 latency [ms]</td>" in text
    assert "<script>x" not in text
    assert not re.findall(r"(?:src|href)=[\"']?http", text)
    assert len(figures) == 3


@pytest.mark.parametrize(("silent", "total_ms"), [("base", []), ("new", [math.nan] * 40)])
def test_given_a_stage_that_never_answered_when_a_page_is_written_then_its_pictures_show_the_other_run(
    silent, total_ms
):
    planning, runs = made.rows(made.latencies(200, 3)), []
    for name in ("base", "new"):
        run = made.run(made.latencies(200, 1))
        rows = made.rows(total_ms) if name == silent else planning
        runs.append(replace(run, name=name, stages=(*run.stages, StageLog("planning", (), rows))))
    traces = logs.figures_of(page_of(*runs))[2]["data"]  # of planning, after two of perception
    counts = [(word, 0 if word == silent else 200) for word in ("base", "new")]
    assert [(trace["name"], len(trace["x"]) > 0) for trace in traces] == [
        (f"{word} ({count})", count > 0) for word, count in counts
    ]
