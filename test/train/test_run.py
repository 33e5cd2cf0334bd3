"""`torchperf train`, from the command line to weights, card and page.

And what it refuses before it begins.
"""

import importlib
import json
import math
import os
import pickle
import queue
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from torchperf_ros.engines import model_transforms
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.networks import DETECTOR_WEIGHTS, LIDAR_WEIGHTS, PLANNER_WEIGHTS
from torchperf_ros.tools.demo.make_log import START_NS, DriveLog, write_drive
from torchperf_ros.tools.main import app
from torchperf_ros.train import run as train_run
from torchperf_ros.train import tier_training
from torchperf_ros.train.detector_task import DetectorTask
from torchperf_ros.train.tier_training import TierPlan, TrainingFailed

FAST = ("--tiers", "fast", "--steps", "0.001", "--judged", "1")  # three steps


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """What a short training leaves that has taken a quarter of the fast detector's channels away."""
    folder = tmp_path_factory.mktemp("pruned")
    asked = ("-o", folder, "--models", "detector", *FAST, "--from", DETECTOR_WEIGHTS, "--prune", "0.25")
    result = run(*asked)
    assert result.exit_code == 0, result.output
    return folder, asked, result.output


def test_given_a_training_when_done_then_weights_card_figures_and_page_are_there_and_the_adapter_runs_them(
    pruned,
):
    folder, _, output = pruned
    assert "detector fast: 3 steps in " in output
    assert {path.name for path in folder.iterdir()} >= {
        "detector.safetensors",
        "detector.md",
        "detector.json",
        "detector_examples.png",
        "training.html",
    }
    figures = json.loads((folder / "detector.json").read_text())
    assert figures["tiers"]["fast"]["width"] == 9
    assert figures["sha256"] in (folder / "detector.md").read_text()
    adapter = CameraAdapter({"weights": str(folder / "detector.safetensors")}, torch.device("cpu"))
    assert adapter.build("fast").head[0].weight.shape == (18, 18, 3, 3)


def test_given_pruned_weights_when_named_again_then_they_are_trained_on_pruned_further_and_teach(
    pruned, tmp_path
):
    weights = pruned[0] / "detector.safetensors"
    plan = TierPlan("detector", "fast", 1, 1, "cpu", 1, tmp_path / "none", start=weights)
    assert tier_training.network_of(DetectorTask(), plan)[1] == 9
    further = TierPlan("detector", "fast", 1, 1, "cpu", 1, tmp_path / "none", start=weights, prune=0.4)
    assert tier_training.network_of(DetectorTask(), further)[1] == 5
    none = TierPlan("detector", "fast", 1, 1, "cpu", 1, tmp_path / "none", start=weights, prune=0.01)
    with pytest.raises(tier_training.ConfigError, match="prune 0.01: takes none of the 9 channels"):
        tier_training.network_of(DetectorTask(), none)
    full = tmp_path / "full.safetensors"
    save_file(
        {name.replace("fast", "full"): value for name, value in load_file(weights).items()},
        full,
        {"widths": json.dumps({"full": 9})},
    )
    plan = TierPlan("detector", "fast", 1, 1, "cpu", 1, tmp_path / "none", teacher=full)
    task = DetectorTask()
    tier_training.network_of(task, plan)
    assert task.teacher.head[0].weight.shape == (18, 18, 3, 3)


def test_given_a_training_that_is_done_when_more_is_to_be_judged_then_it_is_judged_anew_and_not_trained(
    pruned,
):
    folder, asked, _ = pruned
    before, first = (
        load_file(folder / "detector.safetensors"),
        json.loads((folder / "detector.json").read_text()),
    )
    assert "goes on from step 3" in run(*asked, "--judged", "3").output
    figures = json.loads((folder / "detector.json").read_text())["tiers"]["fast"]
    assert (first["tiers"]["fast"]["judged"], figures["judged"]) == (1, 3)
    assert "Judged on 3 images" in (folder / "detector.md").read_text()
    assert [step for step, *_ in figures["curve"]] == [3]
    after = load_file(folder / "detector.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_given_a_checkpoint_of_other_options_when_the_folder_is_named_again_then_it_is_not_overwritten(
    pruned,
):
    _, asked, _ = pruned
    result = run(*asked, "--seed", "2", "--dry-run")
    assert result.exit_code == 2
    assert "checkpoint is of other options, weights or labels: remove it, or name" in " ".join(
        result.output.split()
    )


def test_given_a_training_that_fails_when_its_process_ends_then_the_command_gets_the_error(
    monkeypatch, tmp_path
):
    def fail(*_):
        raise TrainingFailed("the loss is nan at step 3")

    monkeypatch.setattr(train_run, "train", fail)
    monkeypatch.setattr(train_run, "die_with_parent", lambda: None)
    reports, adapter = queue.SimpleQueue(), train_run.ADAPTERS["detector"]
    plan = TierPlan("detector", "fast", 3, 1, "cpu", 1, tmp_path / "none", adapter=adapter)
    train_run.train_tier(0, plan, reports)
    *_, result = pickle.loads(pickle.dumps(reports.get()))
    assert (type(result), str(result)) == (TrainingFailed, "the loss is nan at step 3")


def test_given_other_labels_or_weights_in_the_same_file_when_named_again_then_the_checkpoint_is_of_others(
    tmp_path,
):
    files = start, teacher, labels = [tmp_path / name for name in ("start", "teacher", "labels")]

    def identity():
        data = (tmp_path / "log", "/image", labels)
        plan = TierPlan(
            "detector", "fast", 1, 1, "cpu", 1, tmp_path / "none", start=start, teacher=teacher, data=data
        )
        return plan.identity()

    for path in files:
        path.write_text("before")
    before = identity()
    assert identity() == before
    for path in files:
        path.write_text("after")
        assert identity() != before
        path.write_text("before")


OWN = """
import torch
from torchperf_ros import Adapter
from torchperf_ros.api.adapter import Task

class Own(Adapter):
    def __init__(self, options, device): ...
    def build(self, tier): ...
    def example_inputs(self, tier): ...
    def preprocess(self, messages): ...
    def postprocess(self, outputs, messages): ...

    def training_task(self, log):
        return OwnTask()

class OwnTask(Task):
    name, tiers, steps, rate = "own", {"only": 4}, {"only": 3000}, {"only": 0.01}
    batch_size, gradient, judged = 8, 1.0, 2

    def network(self, tier, width=None):
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
        network.scale = torch.nn.Parameter(torch.tensor([1e6, 1.0]))
        return network

    def batch(self, seed, number, count):
        return torch.randn(count, 3, generator=torch.Generator().manual_seed(number)) + 5.0

    def loss(self, network, batch, device):
        return network(batch).square().mean() + network.scale.sum() * 0

    def judge(self, call, seed, count, device):
        return {"answer": float(sum(call(self.batch(seed, number, 1)).sum() for number in range(count)))}

    def card(self, judged):
        return "Nothing of use."
"""


def test_given_an_own_model_that_normalises_when_trained_then_its_file_gives_the_answers_that_were_judged(
    tmp_path, monkeypatch
):
    (tmp_path / "own_model.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert run("-o", tmp_path / "out", "--adapter", "own_model:Own", "--steps", "0.01").exit_code == 0
    task = importlib.import_module("own_model").OwnTask()
    network = task.network("only").eval()
    network.load_state_dict(
        {
            name.removeprefix("only."): value
            for name, value in load_file(tmp_path / "out" / "own.safetensors").items()
        }
    )
    assert network[1].running_mean.abs().min() > 0  # of what it learned from
    assert network.scale[0] > 900_000  # which fp16 does not hold
    (judged,) = json.loads((tmp_path / "out" / "own.json").read_text())["tiers"].values()
    assert task.judge(network, "", 2, None) == pytest.approx(judged["score"], abs=0.05)


def test_given_a_label_that_cannot_be_when_trained_then_the_command_names_its_line_and_ends_with_2(
    tmp_path,
):
    write_drive(tmp_path / "drive.mcap", DriveLog(seconds=1.0, width=64, height=36))
    stamps = [START_NS + number * 100_000_000 for number in range(10)]
    lines = [
        {"stamp_ns": stamp_ns, "labels": [{"class": "horse", "box": [1, 2, 3, 4]}]} for stamp_ns in stamps
    ]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, lines)))
    log = (
        "--log",
        tmp_path / "drive.mcap",
        "--topic",
        "/camera/image_raw",
        "--labels",
        tmp_path / "labels.jsonl",
    )
    result = run("-o", tmp_path / "out", *log, *FAST)
    assert result.exit_code == 2, result.output
    assert "line 1: class 'horse' is not there" in " ".join(result.output.split())


def test_given_held_out_images_without_objects_when_the_page_is_drawn_then_the_score_has_no_curve():
    tier = {"score": {"map": math.nan}, "curve": [[1, 0.5, math.nan]], "seconds": 1.0}
    assert '"y":[null]' in train_run.training_page({"detector": {"tiers": {"fast": tier}}})


@pytest.mark.parametrize(("flags", "precision"), [("fma avx2", "fp32"), ("fma avx512_bf16", "bf16")])
def test_given_a_processor_with_bf16_instructions_or_without_when_trained_then_it_computes_in_what_is_quick(
    tmp_path, monkeypatch, flags, precision
):
    monkeypatch.setattr(model_transforms, "_CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    asked = ("--dry-run", "-o", tmp_path / "out", "--models", "lidar", "--device", "cpu")
    assert f"lidar fast: 2,000 steps in {precision} on cpu" in run(*asked).output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--models", "robot"), "model 'robot' does not exist; allowed: detector, planner, lidar"),
        (("--tiers", "huge"), "detector: tier 'huge' does not exist; allowed: full, medium, fast"),
        (("--accumulate", "3"), "accumulate is 3; it has to divide detector's batch of 16"),
        (("--prune", "0.5"), "--from is missing"),
        (("--log", "drive.mcap"), "--labels is missing"),
        (
            ("--models", "lidar", "--adapter", "torchperf_ros.models.camera:CameraAdapter"),
            "no effect beside adapter",
        ),
        (("--adapter", "torchperf_ros.models.driving:OracleAdapter"), "it has no training_task"),
        (
            ("--adapter", "torchperf_ros.api.adapter:Adapter"),
            "Adapter: TypeError: Can't instantiate abstract",
        ),
        (("--from", "none.safetensors"), "detector, tier full: weights none.safetensors: No such file"),
        (("--from", "{folder}/cut.safetensors"), "detector, tier full: weights .*cut.safetensors: "),
        (("--from", DETECTOR_WEIGHTS), "planner, tier full: .*they are of another architecture"),
        (
            ("--models", "lidar", "--from", LIDAR_WEIGHTS, "--prune", "0.5"),
            "lidar, tier full: .*cannot be pruned",
        ),
        (
            ("--models", "planner", "--teacher", PLANNER_WEIGHTS),
            "planner, tier full: it learns from no teacher",
        ),
    ],
)
def test_given_what_cannot_be_trained_when_asked_for_then_it_is_refused_before_anything_is(
    tmp_path, arguments, says
):
    (tmp_path / "cut.safetensors").write_bytes(DETECTOR_WEIGHTS.read_bytes()[:5000])
    given = [str(one).format(folder=tmp_path) for one in arguments]
    result = run("--dry-run", "-o", tmp_path / "out", *given)
    assert result.exit_code == 2, result.output
    assert re.search(says, " ".join(result.output.split()))
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["detector", "planner", "lidar"])
def test_given_a_gpu_when_a_tier_is_trained_there_then_its_weights_run_on_the_cpu(model, tmp_path):
    pytest.importorskip("plotly", reason="training draws its curves")
    result = run(*("-o", tmp_path, "--models", model, *FAST, "--device", "cuda", "--loaders", "1"))
    assert result.exit_code == 0, result.output
    assert "on cuda:0" in " ".join(result.output.split())
    (point,) = json.loads((tmp_path / f"{model}.json").read_text())["tiers"]["fast"]["curve"]
    assert all(map(math.isfinite, point))
    weights = load_file(tmp_path / f"{model}.safetensors")
    assert all(tensor.device.type == "cpu" and torch.isfinite(tensor).all() for tensor in weights.values())
    if model == "detector":
        adapter = CameraAdapter({"weights": str(tmp_path / "detector.safetensors")}, torch.device("cpu"))
        with torch.inference_mode():
            outputs = adapter.build("fast")(*adapter.example_inputs("fast"))
        assert torch.isfinite(outputs).all()
