import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from torchperf_ros.cli import app

HERE = Path(__file__).resolve().parent
CAMERA = "torchperf_ros.models.camera:CameraAdapter"
PARAMS = """
/**/perf:
  ros__parameters:
    device: cpu
    worker_threads: 1
    stages: [small, other]
    small: {adapter: "adapter_under_check:Small", output: a, tiers: [big, little], engine: eager, fold_batch_norm: true}
    other: {adapter: "adapter_under_check:Small", output: b, tiers: [big], options: '{"channels": 2}'}
"""


@pytest.fixture(autouse=True)
def _place(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(HERE))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def params(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(PARAMS, encoding="utf-8")
    return path


def run(*arguments):
    return CliRunner().invoke(app, ["check-model", *map(str, arguments)])


def quick(*arguments):
    return run(*arguments, "--no-compile", "--seconds", "0.05", "--device", "cpu")


def test_given_an_adapter_when_checked_then_the_table_and_the_figures_are_there(tmp_path):
    done = quick("--adapter", "adapter_under_check:Small", "--tier", "mine", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    for words in ("adapter_under_check:Small, tier mine", "channels_last", "CUDA only", "1 CPU thread", "--no-compile"):
        assert words in done.output
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (report["stage"], report["tier"], report["running"]["engine"]) == ("model", "mine", "eager")
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["fold_batch_norm"]["with"]["p50_ms"] > 0.0
    assert rows["tf32"]["why_not"] == "CUDA only"


def test_given_a_parameter_file_when_checked_then_what_is_on_now_comes_from_it(tmp_path, params):
    done = quick("--params", params, "--stage", "small", "--tier", "little", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert {row["name"]: row["on_now"] for row in report["rows"]}["fold_batch_norm"]


def test_given_options_when_checked_then_the_adapter_gets_them(tmp_path, params):
    out = tmp_path / "out.json"
    done = quick("--params", params, "--stage", "other", "--options", '{"channels": 6}', "--json", out)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text(encoding="utf-8"))["options"] == {"channels": 6}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--adapter M:C or --params FILE is needed"),
        (["--adapter", CAMERA, "--stage", "perception"], "--stage names a stage of --params FILE"),
        (["--adapter", "camera"], "adapter 'camera' does not have the form module:Class"),
        (["--adapter", "nowhere:Camera"], "importing nowhere failed"),
        (
            ["--adapter", CAMERA, "--tier", "slow"],
            "--tier 'slow' does not exist; it has to be one of full, medium, fast",
        ),
        (["--adapter", CAMERA, "--options", "{"], "is not JSON"),
        (["--adapter", CAMERA, "--options", '{"wide": 1}'], "option 'wide' (value 1) is unknown"),
        (["--adapter", CAMERA, "--device", "gpu"], "it has to be auto, cpu, cuda or cuda:N"),
        (["--adapter", CAMERA, "--device", "cuda:99"], "'cuda:99' is not there"),
        (["--adapter", CAMERA, "--seconds", "0"], "--seconds"),
        (["--adapter", CAMERA, "--json", "/nowhere/out.json"], "cannot be written"),
        (["--params", "/nowhere.yaml"], "cannot be read"),
        (["--adapter", "adapter_under_check:NotBuilt"], "building tier 'full' failed: KeyError: 'full'"),
        (["--adapter", "adapter_under_check:NoModule"], "gave a str, not a torch.nn.Module"),
        (["--adapter", "adapter_under_check:WrongExample"], "raises on its own example inputs"),
    ],
)
def test_given_bad_input_when_checked_then_the_error_says_what_would_be_right_and_the_status_is_2(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("more", "count"), [([], 2), (["--stage", "third"], 0)])
def test_given_a_stage_that_is_not_one_when_checked_then_the_stages_are_named(params, more, count):
    done = run("--params", params, *more)
    assert done.exit_code == 2
    assert f"{count} stages of" in done.output
    assert "it has to be one of small (adapter_under_check:Small), other (adapter_under_check:Small)" in done.output


def test_given_help_when_asked_for_then_it_has_an_example_and_torch_is_not_loaded():
    code = """
import sys
from typer.testing import CliRunner
from torchperf_ros.cli import app
print(CliRunner().invoke(app, ["check-model", "--help"]).output, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Example: torchperf check-model --adapter" in done.stdout
    assert done.stdout.endswith("False\n")
