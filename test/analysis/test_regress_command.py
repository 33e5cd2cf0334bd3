"""`torchperf regress` as people use it."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from torchperf_ros.cli import app
from torchperf_ros.core.run_file import write_run

sys.path.insert(0, str(Path(__file__).parent))
import regress_runs as made
import report_logs as logs


def regress(*arguments):
    return CliRunner().invoke(app, ["regress", *map(str, arguments), "--resamples", "500"])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: `base`, `same` of the same kind, and `slower`."""
    folder = tmp_path_factory.mktemp("runs")
    values = [made.latencies(2500, seed) for seed in (1, 2, 3)]
    write_run(made.run(values[0]), folder / "base.json")
    write_run(made.run(values[1]), folder / "same.parquet")
    write_run(made.run(values[2] * 1.2), folder / "slower.json")
    return folder


def test_given_a_run_of_the_same_kind_when_compared_then_the_status_is_0(runs):
    done = regress(runs / "base.json", runs / "same.parquet", "--min-effect", "p99=20%", "--min-effect", "jitter=30%")

    assert done.exit_code == 0, done.output
    assert re.search(r"p99 latency \[ms\] .* equivalent", done.stdout)
    assert done.stdout.splitlines()[-1].startswith("Nothing is worse; ")


def test_given_a_slower_run_when_compared_then_the_status_is_1_and_every_file_says_the_same(runs, tmp_path):
    outputs = [tmp_path / name for name in ("v.md", "v.html", "v.json")]
    done = regress(runs / "base.json", runs / "slower.json", "--markdown", outputs[0], "--html", outputs[1], "--json",
                   outputs[2])  # fmt: skip
    headline = done.stdout.splitlines()[-1]
    told = json.loads(outputs[2].read_text(encoding="utf-8"))

    assert done.exit_code == 1, done.output
    assert re.match(r"\d metrics are worse: perception p50 latency \+\d\.\d+ ms \(\+\d+\.\d%\)", headline)
    assert outputs[0].read_text(encoding="utf-8").startswith(f"**{headline}**\n")
    assert headline in outputs[1].read_text(encoding="utf-8")
    assert (told["status"], told["verdict"]) == (1, headline)
    assert told["base"]["commit"] == "0123456789abcdef"
    found = {one["metric"]: one for one in told["findings"]}
    assert found["p50"]["verdict"] == "worse"
    assert found["p50"]["low"] < found["p50"]["new"] - found["p50"]["base"] < found["p50"]["high"]
    assert found["max"]["low"] is None


def burst(count=3000, seed=4):
    """60 % of the frames miss their deadline, all in a row."""
    values = made.latencies(count, seed)
    values[count // 5 : count * 4 // 5] = made.BUDGET_MS + 1
    return made.run(values)


ONLY_MISSES = [word for key in ("p50", "p95", "p99", "max", "jitter", "fallback") for word in ("--skip", key)]


def test_given_one_burst_of_misses_when_compared_then_the_last_line_warns_and_a_limit_fails(runs, tmp_path):
    write_run(burst(), tmp_path / "burst.json")
    pair = runs / "base.json", tmp_path / "burst.json"
    bare = regress(*pair, *ONLY_MISSES)

    assert bare.exit_code == 0, bare.output
    warning = "WARNING, not judged: perception miss ratio +60.00 pp is 600 times its margin; nothing is worse; "
    assert bare.stdout.splitlines()[-1].startswith(warning)
    outputs = [tmp_path / name for name in ("v.md", "v.html", "v.json")]
    done = regress(*pair, *ONLY_MISSES, "--limit", "miss=1%", "--markdown", outputs[0], "--html", outputs[1], "--json",
                   outputs[2])  # fmt: skip
    broken = "Limit broken: perception miss ratio 60.00 % (limit 1 %); nothing is worse; "
    assert (done.exit_code, done.stdout.splitlines()[-1][: len(broken)]) == (1, broken)
    assert re.search(r"miss ratio \[%\] .* not enough data: about [\d,]+ frames would be, BREAKS the limit of 1 %",
                     done.stdout)  # fmt: skip
    markdown, page = (path.read_text(encoding="utf-8") for path in outputs[:2])
    assert markdown.startswith(f"**{broken}")
    assert "BREAKS the limit of 1 %" in markdown.split("<details>")[0]
    assert f'<b class="bad">{broken}' in page
    assert re.search(r'<b class="bad">[^<]* BREAKS the limit of 1 %</b>', page)
    told = json.loads(outputs[2].read_text(encoding="utf-8"))
    found = {one["metric"]: (one["limit"], one["breaks_limit"]) for one in told["findings"]}
    assert (told["status"], found["miss"], found["dropped"]) == (1, (1.0, True), (None, False))


def test_given_limits_that_are_kept_when_compared_then_the_status_is_0_and_the_table_says_so(runs, tmp_path):
    (tmp_path / "gate.yaml").write_text("{miss: 1%, perception: {p99: 40ms}, start_up: 3s}", encoding="utf-8")
    done = regress(runs / "base.json", runs / "same.parquet", "--limits", tmp_path / "gate.yaml", "--min-effect",
                   "p99=20%", "--min-effect", "jitter=30%")  # fmt: skip

    assert done.exit_code == 0, done.output
    assert re.findall(r"within the limit of (.*?) *$", done.stdout, re.MULTILINE) == ["40 ms", "1 %", "3 s"]
    assert "BREAKS" not in done.stdout


def test_given_a_limit_on_what_nobody_measured_when_compared_then_it_is_broken(runs):
    done = regress(runs / "base.json", runs / "same.parquet", "--limit", "compile=60s")

    assert (done.exit_code, done.stdout.splitlines()[-1][:53]) == (
        1, "Limit broken: compile time not measured (limit 60 s);"
    )  # fmt: skip
    assert "- compile time: neither run tells" in done.stdout


def test_given_markdown_when_read_then_the_verdict_comes_first_and_the_rest_is_folded_away(runs, tmp_path):
    path = tmp_path / "v.md"
    regress(runs / "base.json", runs / "slower.json", "--markdown", path)
    shown, folded = path.read_text(encoding="utf-8").split("<details>")

    assert "`slower.json` against `base.json`" in shown
    assert "| perception p50 latency [ms] |" in shown
    assert "equivalent" not in shown
    assert "equivalent" in folded
    assert folded.rstrip().endswith("</details>")


def test_given_few_frames_when_compared_then_only_strict_fails_and_says_how_many_would_do(runs, tmp_path):
    write_run(made.run(made.latencies(100, 4)), tmp_path / "short.json")

    done = regress(runs / "base.json", tmp_path / "short.json")
    assert done.exit_code == 0, done.output
    assert re.search(r"p99 latency \[ms\].* not enough data: about [\d,]+ frames would be", done.stdout)
    assert regress(runs / "base.json", tmp_path / "short.json", "--strict").exit_code == 1


def test_given_records_and_a_recorded_log_when_compared_then_they_are_read_as_runs(tmp_path):
    drive = logs.write_log(tmp_path / "drive")
    done = regress(drive, drive)

    assert done.exit_code == 0, done.output
    assert "planning p99 latency" in done.stdout
    assert "perception: every latency is the same in both runs" in done.stdout
    assert "machine: not told by both runs" in done.stdout


def test_given_a_metric_to_skip_when_compared_then_it_is_not_there(runs):
    done = regress(runs / "base.json", runs / "slower.json", "--skip", "p50", "--skip", "max")

    assert "p50 latency" not in done.stdout.split("- perception")[0]
    assert "longest" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--min-effect", "p98=3%"], "--min-effect 'p98=3%': no metric 'p98'; there are: p50"),
        (["--skip", "p98"], "--skip 'p98': no such metric"),
        (["--correction", "bonferroni"], "--correction 'bonferroni': has to be one of holm, bh, none"),
        (["--json", "none/there.json"], "--json none/there.json: needs a file name in an existing folder"),
        (["--limit", "p99=3%"], "--limit p99=3%: has to be like 2ms"),
        (["--limit", "p99=3ms", "--skip", "p99"], "--limit p99: cannot be kept with --skip p99"),
        (["--limit", "lanes.miss=1%"], "--limit lanes.miss: no stage 'lanes'; there are: perception"),
        (["--limits", "none.yaml"], "--limits none.yaml: cannot be read (No such file or directory)"),
        (["--min-effects", "none.yaml"], "--min-effects none.yaml: cannot be read (No such file or directory)"),
    ],
)
def test_given_an_option_that_is_not_allowed_when_run_then_one_line_says_so(runs, arguments, words):
    done = regress(runs / "base.json", runs / "same.parquet", *arguments)

    assert done.exit_code == 2
    assert done.output.startswith(f"torchperf: {words}")
    assert len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.json", None, "none.json: does not exist"),
        ("text.json", "hello", "text.json: is no run that `torchperf replay"),
        ("text.parquet", "hello", "text.parquet: is no Parquet file"),
        ("text.txt", "hello", "text.txt: is no rosbag2 folder"),
        ("text.jsonl", "hello", "text.jsonl: none of its 1 lines is a record"),
    ],
)
def test_given_a_file_that_is_no_run_when_compared_then_one_line_names_it(runs, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    done = regress(runs / "base.json", tmp_path / name)

    assert done.exit_code == 2
    assert words in done.output
    assert "Traceback" not in done.output


def test_given_a_run_without_frames_when_compared_then_it_says_so(runs, tmp_path):
    write_run(made.run(np.empty(0)), tmp_path / "empty.json")
    done = regress(runs / "base.json", tmp_path / "empty.json")

    assert done.exit_code == 2
    assert "empty.json: holds no frame that was answered" in done.output


def test_given_another_machine_when_compared_then_it_is_refused_unless_asked_for(runs, tmp_path):
    there = {**made.summary()["machine"], "cpu": "Cortex-A1", "fingerprint": "0000"}
    write_run(made.run(made.latencies(300, 5), machine=there), tmp_path / "there.json")

    refused = regress(runs / "base.json", tmp_path / "there.json")
    assert refused.exit_code == 2
    assert "ran on another machine" in refused.output
    assert regress(runs / "base.json", tmp_path / "there.json", "--across-machines").exit_code in {0, 1}


@pytest.mark.parametrize("setting", ["perceptoin.p99=3%", "perceptoin.miss=1pp", ".p50=3%"])
def test_given_a_margin_for_a_stage_that_is_not_there_when_compared_then_it_is_refused(runs, setting):
    done = regress(runs / "base.json", runs / "same.parquet", "--min-effect", setting)
    stage, _, _ = setting.partition(".")

    assert done.exit_code == 2
    assert re.search(rf"torchperf: --min-effect \S+: no stage '{stage}'; there are: perception\n", done.output)


@pytest.mark.parametrize("flag", ["--markdown", "--html", "--json"])
def test_given_a_full_disk_when_the_verdict_is_written_then_the_message_names_the_file(runs, flag):
    done = regress(runs / "base.json", runs / "same.parquet", flag, "/dev/full")

    assert done.exit_code == 2
    assert done.stderr == f"torchperf: {flag} /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize("flag", ["--markdown", "--html", "--json"])
@pytest.mark.parametrize(
    "name", ["run.parquet", "link.json", "hard.json", "folder/run.parquet", "effects.yaml", "limits.yaml"]
)
def test_given_an_output_that_is_an_input_when_compared_then_it_is_refused_and_the_input_is_kept(
    runs, tmp_path, flag, name
):
    shutil.copy(runs / "same.parquet", tmp_path / "run.parquet")
    (tmp_path / "folder").mkdir()
    shutil.copy(runs / "same.parquet", tmp_path / "folder" / "run.parquet")
    (tmp_path / "link.json").symlink_to(tmp_path / "run.parquet")
    (tmp_path / "hard.json").hardlink_to(tmp_path / "run.parquet")
    (tmp_path / "effects.yaml").write_text("p99: 3%\n", encoding="utf-8")
    (tmp_path / "limits.yaml").write_text("p99: 90ms\n", encoding="utf-8")
    before = (tmp_path / name).read_bytes()
    new = tmp_path / "folder" if "/" in name else tmp_path / "run.parquet"
    done = regress(runs / "base.json", new, "--min-effects", tmp_path / "effects.yaml", "--limits",
                   tmp_path / "limits.yaml", flag, tmp_path / name)  # fmt: skip

    assert (done.exit_code, (tmp_path / name).read_bytes()) == (2, before)
    assert f"{flag} {tmp_path / name}: would replace the input" in done.stderr


def test_given_one_file_for_two_outputs_when_compared_then_it_is_refused(runs, tmp_path):
    done = regress(runs / "base.json", runs / "same.parquet", "--html", tmp_path / "v", "--json",
                   tmp_path / "." / "v")  # fmt: skip

    assert (done.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert "is the file of --html, too" in done.stderr


def test_given_a_baseline_when_compared_then_no_output_replaces_the_run(runs, tmp_path):
    shutil.copy(runs / "base.json", tmp_path / "run.json")
    before = (tmp_path / "run.json").read_bytes()
    store, app_run = ["--dir", str(tmp_path / "store")], str(tmp_path / "run.json")
    assert CliRunner().invoke(app, ["baseline", "save", app_run, "--name", "main", *store]).exit_code == 0
    done = CliRunner().invoke(app, ["baseline", "compare", app_run, "--to", "main", "--html", app_run, *store])

    assert (done.exit_code, (tmp_path / "run.json").read_bytes()) == (2, before)
    assert "would replace the input" in done.stderr
