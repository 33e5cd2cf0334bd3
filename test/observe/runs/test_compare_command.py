"""`torchperf compare` as people use it."""

import importlib.util
import json
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("arch", reason="arch is not installed")

from torchperf_ros.observe.runs.compare import comparison
from torchperf_ros.observe.runs.compare.verdict import Rules
from torchperf_ros.observe.runs.compare.verdict_page import verdict_page
from torchperf_ros.observe.runs.run_file import write_run
from torchperf_ros.observe.runs.run_log_source import of_run
from torchperf_ros.tools.main import app

from . import compare_runs as made
from . import report_logs as logs


def compare(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments), "--resamples", "300"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: `base`, `same` of the same kind, and `slower`; and files that are none."""
    folder = tmp_path_factory.mktemp("runs")
    values = [made.latencies(1200, seed) for seed in (1, 2, 3)]
    write_run(made.run(values[0]), folder / "base.json")
    write_run(made.run(values[1]), folder / "same.parquet")
    write_run(made.run(values[2] * 1.2), folder / "slower.json")
    (folder / "text.json").write_text("hello", encoding="utf-8")
    return folder


def test_given_a_run_of_the_same_kind_when_compared_then_the_status_is_0(runs):
    done = compare(
        runs / "base.json", runs / "same.parquet", "--min-effect", "p99=20%", "--min-effect", "jitter=30%"
    )
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
        "--skip",
        "fallback",
        "--limit",
        "p99=10ms",
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
        r"Limit broken: perception p99 latency [\d.]+ ms \(limit 10 ms\); \d metrics are worse: perception"
        r" p50 latency "
        r"\+\d\.\d+ ms \(\+\d+\.\d%\)",
        headline,
    )
    assert re.search(r"p99 latency \[ms\] .* worse, BREAKS the limit of 10 ms", done.stdout)
    assert markdown.startswith(f"**{headline}**\n")
    assert "BREAKS the limit of 10 ms" in markdown.split("<details>")[0]
    assert f'<div class="verdict bad">{headline}' in page
    assert re.search(r'<b class="bad">[^<]* BREAKS the limit of 10 ms</b>', page)
    content = json.loads(told)
    assert (content["status"], content["verdict"]) == (1, headline)
    assert content["base"]["commit"] == "0123456789abcdef"
    found = {one["metric"]: one for one in content["findings"]}
    assert "fallback" not in found
    assert (found["p99"]["limit"], found["p99"]["breaks_limit"], found["p50"]["limit"]) == (
        10.0,
        True,
        None,
    )
    assert found["p50"]["verdict"] == "worse"
    assert found["p50"]["low"] < found["p50"]["new"] - found["p50"]["base"] < found["p50"]["high"]
    assert found["max"]["low"] is None


def test_given_a_limit_on_what_nobody_measured_when_compared_then_it_is_broken(runs):
    done = compare(runs / "base.json", runs / "same.parquet", "--limit", "compile=60s")
    assert (done.exit_code, done.stdout.splitlines()[-1][:53]) == (
        1,
        "Limit broken: compile time not measured (limit 60 s);",
    )
    assert "- compile time: neither run says" in done.stdout


def test_given_few_frames_when_compared_then_the_status_is_one_of_its_own_and_how_many_would_do_is_said(
    runs, tmp_path
):
    write_run(made.run(made.latencies(100, 4)), tmp_path / "short.json")
    done = compare(runs / "base.json", tmp_path / "short.json")
    assert done.exit_code == 0, done.output
    assert re.search(r"p99 latency \[ms\].* not enough data: about [\d,]+ frames would be", done.stdout)
    assert compare(runs / "base.json", tmp_path / "short.json", "--strict").exit_code == 3
    write_run(made.run(made.latencies(3, 4)), tmp_path / "shortest.json")
    sides = (tmp_path / "shortest.json", tmp_path / "short.json")
    skipped = [
        word for key in ("miss", "fallback", "dropped", "lower_tier", "outputs") for word in ("--skip", key)
    ]
    done = compare(*sides, *skipped)
    assert (done.exit_code, "not enough data for any of" in done.stdout) == (3, True), done.output
    assert compare(*sides, *skipped, "--limit", "p50=0.001ms").exit_code == 1


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
            "base.json same.parquet --min-effect p98=3%",
            "--min-effect 'p98=3%': no metric 'p98'; there are: p50",
        ),
        ("base.json same.parquet --skip p98", "--skip 'p98': no such metric"),
        (
            "base.json same.parquet --json none/a.json",
            "--json none/a.json: needs a file name in an existing folder",
        ),
        (
            "base.json same.parquet --limit p99=3ms --skip p99",
            "--limit p99: cannot be kept with --skip p99",
        ),
        (
            "base.json same.parquet --limit lanes.miss=1%",
            "--limit lanes.miss: no stage 'lanes'; there are: perception",
        ),
        ("base.json none.json", "log none.json: does not exist"),
        ("base.json text.json", "run text.json: is no run that `torchperf replay"),
        ("", "name two runs, one to be compared with its baseline, or several"),
        ("a.json b.json c.json", "name two runs"),
        ("--new a.json b.json", "name both sides"),
        ("a.json --new b.json --baseline main", "name the runs that are compared with the baseline"),
        ("--save main", "--save: name a run"),
        ("none.json --save main --dir kept", "run none.json: has to be"),
        ("none.json --baseline main --dir kept", "no baseline 'main' in"),
        ("base.json same.parquet --html v --json ./v", "--json v: is the file of --html, too"),
    ],
)
def test_given_what_cannot_be_compared_when_run_then_one_line_says_so(runs, monkeypatch, line, words):
    monkeypatch.chdir(runs)
    done = compare(*line.split())
    assert done.exit_code == 2
    assert done.output.startswith(f"torchperf: {words}")
    assert len(done.output.splitlines()) == 1
    assert not (runs / "v").exists()


def test_given_a_full_disk_when_the_verdict_is_written_then_the_message_names_the_file(runs):
    done = compare(runs / "base.json", runs / "same.parquet", "--json", "/dev/full")
    assert done.exit_code == 2
    assert done.stderr == "torchperf: --json /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--markdown", "run.parquet"),
        ("--html", "link.json"),
        ("--json", "hard.json"),
        ("--json", "folder/run.parquet"),
    ],
)
def test_given_an_output_that_is_an_input_then_it_is_refused_and_the_input_is_kept(
    runs, tmp_path, flag, name
):
    shutil.copy(runs / "same.parquet", tmp_path / "run.parquet")
    (tmp_path / "folder").mkdir()
    shutil.copy(runs / "same.parquet", tmp_path / "folder" / "run.parquet")
    (tmp_path / "link.json").symlink_to(tmp_path / "run.parquet")
    (tmp_path / "hard.json").hardlink_to(tmp_path / "run.parquet")
    before = (tmp_path / name).read_bytes()
    new = tmp_path / "folder" if "/" in name else tmp_path / "run.parquet"
    done = compare(runs / "base.json", new, flag, tmp_path / name)
    assert (done.exit_code, (tmp_path / name).read_bytes()) == (2, before)
    assert f"{flag} {tmp_path / name}: would replace the input" in done.stderr


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


def test_given_baselines_when_used_in_turn_then_a_slower_run_is_found(runs, tmp_path):
    folder = ["--dir", tmp_path / "kept"]
    assert compare("--list", *folder).stdout.strip() == f"no baselines in {tmp_path / 'kept'}"
    saved = compare(runs / "base.json", "--save", "main", "--commit", "abc123", *folder)
    assert (saved.exit_code, saved.stdout) == (
        0,
        f"saved main in {tmp_path / 'kept' / 'main'}\n",
    ), saved.output
    listed = compare("--list", *folder).stdout
    assert all(word in listed for word in ("main", "abc123", "drive.mcap", "Cortex-X9", "perception 1,200"))
    for named in ((), ("--baseline", "main")):
        found = compare(runs / "slower.json", *named, "--json", tmp_path / "v.json", *folder)
        assert found.exit_code == 1, found.output
        assert "baseline: main, saved " in found.stderr
        assert (
            json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["base"]["name"] == "baseline main"
        )
    again = [runs / "same.parquet", "--baseline", "main", *folder]
    assert compare(*again).exit_code == 0
    assert compare(*again, "--limit", "p50=19ms").exit_code == 1


# -- the page


def page_of(base, new):
    return verdict_page(comparison.compare([base], [new], Rules(resamples=300)))


def test_given_a_longer_tail_when_a_page_is_written_then_it_has_table_and_pictures_and_asks_for_nothing():
    values, seconds = made.latencies(1500, 2), np.arange(200.0)
    base = of_run(made.run(made.latencies(1500, 1)), "base.json")
    new = of_run(made.run(np.where(values > 24, values * 1.5, values)), "runs/<script>x")
    memory = {"memory_t_ns": (seconds * 1e9).astype(int), "memory": {"workers_rss_mib": 800 + seconds / 10}}
    page = page_of(replace(base, **memory), replace(new, **memory))
    text, figures = logs.without_plotly(page), logs.figures_of(page)
    assert '<div class="verdict bad">2 metrics are worse: perception p99 latency' in text
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
        told = made.run(made.latencies(200, 1))
        told.frames["planning"] = made.rows(total_ms) if name == silent else planning
        runs.append(of_run(told, name))
    traces = logs.figures_of(page_of(*runs))[2]["data"]  # of planning, after two of perception
    counts = [(word, 0 if word == silent else 200) for word in ("base", "new")]
    assert [(trace["name"], len(trace["x"]) > 0) for trace in traces] == [
        (f"{word} ({count})", count > 0) for word, count in counts
    ]
