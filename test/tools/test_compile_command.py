"""`torchperf compile` and `torchperf cache`.

Messages, files and exit status. The compile process is played.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import psutil
import pytest
from typer.testing import CliRunner

from torchperf_ros.settings.build_options import BuildOptions
from torchperf_ros.tools import main as cli
from torchperf_ros.workers.incident_folder import IncidentFolder
from torchperf_ros.workers.package_cache import PackageCache
from torchperf_ros.workers.package_manifest import Identity, Manifest, manifest_path

from ..stage.conftest import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUNNER = CliRunner()
TIMING = {"p50_ms": 2.0, "p99_ms": 3.0, "eager_p50_ms": 4.0, "eager_p99_ms": 6.0}


def manifest(**changes):
    options = {**BuildOptions("aoti", precision="bf16", channels_last=True).as_dict()}
    identity = Identity("2.9", "cpu", "AVX2", options, ["float32 1"], [], "w", changes.pop("code", "c"))
    values = {
        "adapter": "robot:Seen",
        "tier": "full",
        "package_sha256": "",
        "package_bytes": 3 << 20,
        "graph": "",
        "parity": {"relative_l2": 1e-6},
        "timings": {"small": TIMING, "example": {**TIMING, "p50_ms": 1.0}},
        "peak_memory_bytes": 1,
        "compile_s": 12.5,
        "built": "2026-01-02T03:04:05+00:00",
        "variants_ms": {"frozen channels_last": 5.7, "frozen": 6.05},
        **changes,
    }
    return Manifest(identity, **values)


def tier(name, number=1, step="compiling"):
    return {"kind": "tier", "tier": name, "number": number, "step": step}


def built(name, *, new=True, **changes):
    return {
        "kind": "built",
        "tier": name,
        "package": f"/cache/{name}0123456789.pt2",
        "new": new,
        "manifest": asdict(manifest(tier=name, **changes)),
    }


def failed(name, text="no such operator", **more):
    return {"kind": "failed", "tier": name, "text": text, **more}


class Played:
    """In the place of a compile process: says what the test wants."""

    def __init__(self):
        self.jobs, self.says, self.reason, self.closed, self.dies = [], [], "", 0, False

    def __call__(self, job, *, background):
        assert not background
        self.jobs.append(job)
        return self

    def messages(self):
        return iter(self.says)

    def death_reason(self):
        return self.reason

    def died_capturing(self):
        return bool(self.jobs) and self.dies and len(self.jobs) == 1

    def close(self):
        self.closed += 1


@pytest.fixture
def process(monkeypatch):
    played = Played()
    monkeypatch.setattr("torchperf_ros.workers.compile_process.CompileProcess", played)
    return played


def run(*words):
    return RUNNER.invoke(cli.app, [*map(str, words)])


def compiled(*words):
    return run("compile", "robot:Seen", *words)


def test_given_an_adapter_when_compiled_then_progress_and_a_row_for_each_tier_are_shown(process):
    process.says = [
        tier("full"),
        built("full"),
        tier("fast", 2),
        built("fast", new=False),
        built("least") | {"package": "", "manifest": None, "engine": "graph"},
        {"kind": "done"},
    ]
    result = compiled("--tiers", "full,fast,least")
    assert result.exit_code == 0, result.output
    assert "adapter: compiling full (1 of 3)" in result.stdout
    assert "adapter: compiling fast (2 of 3)" in result.stdout
    assert "adapter least graph " in " ".join(result.stdout.split())
    row, again = (line for line in result.stdout.splitlines() if "12.5 s" in line)
    assert "full01234567" in row
    assert "1.00 / 3.00" in row  # the example's shape, not the first
    assert "4.00x" in row
    assert "earlier" not in row
    assert "earlier" in result.stdout.partition("fast01234567")[2]
    assert again
    assert "adapter full: kept frozen channels_last 5.70 ms; frozen 6.05 ms" in result.stdout
    assert process.closed == 1


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"parity": {"relative_l2": 0.08, "score": 0.998}}, ["by score", "0.998"]),
        (
            {
                "int8": {"convolutions": {"there": 3, "quantised": 2, "int8": 1}},
                "parity": {"relative_l2": 0.1, "loss": 0.0015},
            },
            ["adapter full: in int8 1 of 3 convolutions (2 quantised)", "loses 0.0015;"],
        ),
    ],
)
def test_given_what_was_found_out_of_a_package_when_compiled_then_it_is_shown(process, found, words):
    process.says = [tier("full"), built("full", **found), {"kind": "done"}]
    shown = " ".join(compiled("--tiers", "full").stdout.split())
    assert [word for word in words if word not in shown] == []


def test_given_no_tiers_when_compiled_then_those_that_the_adapter_has_are_and_no_other_is_missed(process):
    process.says = [
        {"kind": "tiers", "tiers": ["full", "fast"]},
        built("full"),
        built("fast"),
        {"kind": "done"},
    ]
    assert compiled().exit_code == 0
    assert process.jobs[0]["guessed"]


def test_given_options_when_compiled_then_the_process_gets_them(process):
    process.says = [built("full")]
    compiled(
        "--tiers",
        "full",
        "--options",
        '{"a": 1}',
        "--device",
        "cpu",
        "--engine",
        "openvino",
        "-o",
        "out",
        "--force",
        "--dry-run",
    )
    (job,) = process.jobs
    assert (job["adapter"], job["options"], job["device"], job["tiers"]) == (
        "robot:Seen",
        {"a": 1},
        "cpu",
        ["full"],
    )
    assert (job["out"], job["force"], job["dry_run"], job["packages"]) == ("out", True, True, [""])
    (build,) = job["build"]
    assert (build["engine"], build["precision"]) == ("openvino", "fp32")


@pytest.fixture
def parameters(tmp_path):
    path = tmp_path / "node.yaml"
    path.write_text(
        "perf:\n  ros__parameters:\n    stages: [seeing, planning]\n    cache_dir: /my/cache\n"
        "    seeing: {adapter: 'r:S', output: a, tiers: [full, fast], precision: [fp32, bf16],"
        " packages: ['', mine.pt2]}\n"
        "    planning: {adapter: 'r:P', output: b, tiers: [full]}\n",
        encoding="utf-8",
    )
    return path


def test_given_a_parameter_file_when_compiled_then_every_stage_is_as_the_node_will_want_it(
    process, parameters
):
    process.says = [built("full"), built("fast")]
    assert run("compile", "--params", parameters).exit_code == 0
    assert run("compile", "--params", parameters, "--tier", "fast").exit_code == 0
    seeing, planning, one = process.jobs
    assert (seeing["adapter"], seeing["tiers"], seeing["cache_dir"]) == (
        "r:S",
        ["full", "fast"],
        "/my/cache",
    )
    assert [build["precision"] for build in seeing["build"]] == ["fp32", "bf16"]
    assert seeing["packages"] == ["", "mine.pt2"]
    assert planning["adapter"] == "r:P"
    assert (one["tiers"], one["packages"], one["build"][0]["precision"]) == (["fast"], ["mine.pt2"], "bf16")
    assert (
        "--tiers 'none' is not there; there are fast, full"
        in run("compile", "--params", parameters, "--tier", "none").stderr
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give what to compile: either an adapter, module:Class, or --params FILE"),
        (
            ["a:B", "--params", "x.yaml"],
            "give what to compile: either an adapter, module:Class, or --params FILE",
        ),
        (["--params", "x.yaml", "--engine", "aoti"], "--engine: with --params, set it in the file"),
        (["--params", "none.yaml"], "parameter file none.yaml: cannot be read"),
        (["a:B", "--engine", "jit"], "adapter.engine"),
        (["a:B", "--options", "{"], "adapter.options: '{' is not JSON"),
        (["a:B", "--device", "tpu"], "parameter device: 'tpu' is not allowed"),
        (["a:B", "-o", "x.pt2"], "-o x.pt2: needs a folder, in which each tier's package has its own name"),
        (["a:B", "-o", __file__], "test_compile_command.py: needs a folder"),
    ],
)
def test_given_input_that_cannot_be_used_when_compiled_then_one_line_says_so(process, words, said):
    result = run("compile", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.startswith("torchperf: ")
    assert len(result.stderr.strip().splitlines()) == 1
    assert process.jobs == []


def test_given_a_tier_that_fails_then_the_others_are_shown_the_status_is_1_and_json_has_all(
    process, tmp_path
):
    process.says = [failed("full", detail="Traceback: where"), built("fast"), {"kind": "done"}]
    process.reason = "the compile process ended by exit status 1"
    result = compiled("--tiers", "full,fast", "--json", tmp_path / "report.json")
    assert result.exit_code == 1
    assert "torchperf: adapter full: no such operator\nTraceback: where" in result.stderr
    assert "exit status" not in result.stderr
    assert "fast01234567" in result.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(each["stage"], each["tier"], each["kind"]) for each in report] == [
        ("adapter", "full", "failed"),
        ("adapter", "fast", "built"),
    ]
    assert (
        Manifest(Identity(**report[1]["manifest"].pop("identity")), **report[1]["manifest"]).tier == "fast"
    )


@pytest.mark.parametrize("dies", [True, False])
def test_given_a_process_that_ends_for_what_it_found_out_when_compiled_then_the_next_does_what_is_left(
    process, tmp_path, dies
):
    first = [tier("full"), built("full"), tier("fast", 2)]
    process.dies = dies
    if not dies:
        first.append({"kind": "again", "text": "it cannot be captured", "lacked": {"key": "why"}})
    turns = iter([first, [tier("full"), built("full", new=False), tier("fast", 2), built("fast")]])
    process.messages = lambda: iter(next(turns))
    result = compiled("--tiers", "full,fast", "--force", "--json", tmp_path / "built.json")
    assert result.exit_code == 0, result.output
    assert [job["force"] for job in process.jobs] == [True, False]
    assert dies or process.jobs[1]["lacked"] == {"key": "why"}
    assert dies or "it cannot be captured; it goes on without that" in " ".join(result.output.split())
    found = json.loads((tmp_path / "built.json").read_text())
    assert [(each["tier"], each["new"]) for each in found] == [("full", True), ("fast", True)]
    assert process.closed == 2


@pytest.mark.parametrize("how", ["", "signal SIGKILL"])
def test_given_a_process_that_dies_when_compiled_then_the_tiers_without_a_result_failed_for_that(
    process, how
):
    reason = how and f"the compile process ended by {how}"
    process.says, process.reason = [built("full"), tier("fast", 2)], reason
    result = compiled("--tiers", "full,fast")
    assert result.exit_code == 1
    assert f"torchperf: adapter fast: {reason or 'its process printed nothing'}" in result.stderr
    assert "adapter full:" not in result.stderr


def test_given_a_dry_run_when_asked_then_each_tier_is_one_line(process):
    process.says = [
        {"kind": "planned", "tier": "full", "text": "would be built: /x/[bold].pt2 is not there"}
    ]
    result = compiled("--tiers", "full", "--dry-run")
    assert result.exit_code == 0
    assert "adapter full: would be built: /x/[bold].pt2 is not there" in result.stdout


@pytest.fixture
def cache(tmp_path):
    """Two good packages and a damaged one."""
    made = PackageCache(tmp_path / "cache", 1 << 30)
    made.folder.mkdir()
    for number, code in enumerate(("one", "two", "three")):
        values = manifest(code=code, tier=code)
        path = made.path(values.identity)
        path.write_bytes(bytes(1 << 20))
        manifest_path(path).write_text(values.to_json() if code != "three" else "{}", encoding="utf-8")
        os.utime(path, (number, number))
    return made


def listed(cache, *words):
    return run("cache", "--cache-dir", cache.folder, *words)


def test_given_packages_when_listed_then_each_is_shown_and_the_damaged_one_with_what_is_wrong(cache):
    result = listed(cache)
    assert result.exit_code == 0
    assert "3 packages, 3.0 MiB, in " in result.stdout
    assert "; 0.0 MiB that compilers, tuning and interrupted builds left" in result.stdout
    damaged, two, one = (entry.path.stem for entry in cache.entries())
    problem = f"manifest {cache.folder / damaged}.json cannot be read (KeyError: 'identity')"
    assert f"{damaged[:12]}: {problem}" in result.stdout
    for key, name in ((one, "one"), (two, "two")):
        line = next(line for line in result.stdout.splitlines() if key[:12] in line)
        words = line.split()
        assert all(
            word in words
            for word in (name, "Seen", "bf16", "channels_last", "cpu", "AVX2", "2.9", "1.00", "4.00")
        )


def test_given_packages_when_cleared_or_one_removed_by_the_beginning_of_its_key_then_the_others_stay(cache):
    first, *others = (entry.path for entry in cache.entries())
    result = listed(cache, "--remove", first.stem[:10])
    assert (result.exit_code, [entry.path for entry in cache.entries()]) == (0, others)
    assert "removed 1 packages" in result.stdout
    for key in ("zzz", ""):
        result = listed(cache, "--remove", key)
        assert (result.exit_code, len(cache.entries())) == (2, 2)
        assert f"has a key that begins with {key!r}" in result.stderr
    (cache.folder / "ab0.1.part.pt2").write_bytes(bytes(1 << 20))
    assert "; 1.0 MiB that compilers, tuning and interrupted builds left" in listed(cache).stdout
    result = listed(cache, "--remove", "all")
    assert (result.exit_code, list(cache.folder.glob("*[!.lock]"))) == (0, [])
    assert "removed 2 packages, 3.0 MiB" in result.stdout


def test_given_incidents_when_listed_and_cleared_then_the_folder_is_named_and_what_else_it_holds_stays(
    tmp_path,
):
    folder = IncidentFolder(tmp_path, 10, 100)
    names = [
        folder.keep(what, lambda part: (part / "data").write_bytes(bytes(1 << 20))).name
        for what in ("one", "two")
    ]
    latch = tmp_path / "emergency" / "latch.json"
    latch.parent.mkdir()
    latch.touch()
    result = run("evidence", "--evidence-dir", tmp_path)
    assert result.stdout.split() == [
        *("1.0", "MiB", names[0], "1.0", "MiB", names[1]),
        *("2", "incidents,", "2.0", "MiB,", "in", str(tmp_path)),
    ]
    result = run("evidence", "--clear", "--evidence-dir", tmp_path)
    assert "removed 2 incidents, 2.0 MiB, from" in result.stdout
    assert list(tmp_path.rglob("*")) == [latch.parent, latch]
    assert run("evidence", "--evidence-dir", tmp_path / "none").stdout.startswith(
        "0 incidents, 0.0 MiB, in "
    )


def test_given_a_cache_of_somebody_else_when_cleared_then_the_parameter_is_named(cache, monkeypatch):
    monkeypatch.setattr(Path, "unlink", mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    result = listed(cache, "--remove", "all")
    assert result.exit_code == 2
    assert "parameter cache_dir: " in result.stderr
    assert "Traceback" not in result.stderr


def test_given_a_real_compile_process_when_its_adapter_is_not_there_then_the_status_is_2(tmp_path):
    result = RUNNER.invoke(
        cli.app, ["compile", "no.such:Adapter", "--tiers", "full"], env={"XDG_CACHE_HOME": str(tmp_path)}
    )
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith("torchperf: adapter 'no.such:Adapter': importing no.such failed")


_SLOW = """
import time
from torchperf_ros import Adapter
class Slow(Adapter):
    inputs, output = {"x": "std_msgs/msg/Float64"}, "std_msgs/msg/Float64"
    __init__ = preprocess = postprocess = lambda *_: None
    example_inputs = lambda *_: ()
    def build(self, tier):
        open("begun", "x")
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["check", "compile"])
def test_given_a_command_that_is_stopped_then_one_line_says_so_and_no_process_is_left(
    tmp_path, command, number
):
    (tmp_path / "slow.py").write_text(_SLOW)
    words = [sys.executable, "-m", "torchperf_ros.tools", command, "slow:Slow", "--tiers", "full"]
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    with subprocess.Popen(
        words, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: (tmp_path / "begun").exists() or process.poll(), lambda: "its begin")
        children = psutil.Process(process.pid).children(recursive=True)
        assert bool(children) == (command == "compile")
        process.send_signal(number)
        (line,) = process.communicate()[1].splitlines()
    assert line.startswith(f"torchperf: stopped by {number.name}; ")
    assert process.returncode == 128 + number
    assert psutil.wait_procs(children, timeout=5.0)[1] == []
    assert not list(tmp_path.glob("torchperf_*"))
