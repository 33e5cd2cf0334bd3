"""The example workflow's own commands, run in an empty checkout as a runner runs them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from torchperf_ros.tools.demo.make_log import DriveLog, write_drive

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / "docs" / "examples" / "replay-gate.yaml"
ADAPTER = """
import time

import torch

from torchperf_ros.api.messages import message_class
from torchperf_ros.api.adapter import Adapter


class Brightness(Adapter):
    inputs = {"image": "sensor_msgs/msg/Image"}
    output = "std_msgs/msg/Float64"

    def __init__(self, options, device):
        pass

    def build(self, tier):
        return torch.nn.Identity()

    def example_inputs(self, tier):
        return (torch.zeros(1),)

    def preprocess(self, messages):
        return (torch.tensor([float(messages["image"].message.data.mean())]),)

    def postprocess(self, outputs, messages):
        return message_class(self.output)(float(outputs))
"""
DRIVE = """
import json
import sys
from pathlib import Path

import typer.main

from torchperf_ros.tools.main import app

asked = typer.main.get_command(app).commands["drive"].make_context("drive", sys.argv[2:]).params
asked["output"].mkdir(parents=True)
row = {"scenario": asked["scenario"], "seed": asked["seed"], "collision": False}
(asked["output"] / "drive.json").write_text(json.dumps(row))
"""
"""Reads the arguments as `torchperf drive` does, and leaves its verdict: test/world/test_loop.py drives."""
PARAMETERS = """
/**/perf:
  ros__parameters:
    stages: [perception]
    device: cpu
    perception: {adapter: "brightness:Brightness", output: bright, tiers: [full], engine: eager, backup: none}
"""


@pytest.fixture
def checkout(tmp_path):
    """A repository with a model, its parameters and a drive of a second, and nothing else."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "torchperf"
    drive = tmp_path / "drive.py"
    drive.write_text(DRIVE)
    program.write_text(
        f'#!/bin/sh\n[ "$1" = drive ] && exec {sys.executable} {drive} "$@"\n'
        f'exec {sys.executable} -m torchperf_ros.tools "$@"\n'
    )
    program.chmod(0o755)
    checkout = tmp_path / "checkout"
    for folder in ("logs", "config"):
        (checkout / folder).mkdir(parents=True)
    write_drive(checkout / "logs" / "drive.mcap", DriveLog(seconds=1.2, width=32, height=16))
    (checkout / "brightness.py").write_text(ADAPTER)
    (checkout / "config" / "perception.yaml").write_text(PARAMETERS)
    return checkout


def job(checkout, event, name="gate", changes=(), **variables):
    """Run the workflow's own commands as a runner does, but for `changes`.

    Statuses by step, and the job's log.
    """
    place = str(checkout.parent)
    paths = os.pathsep.join([f"{place}/bin", os.environ["PATH"]])
    environment = {
        **os.environ,
        "PATH": paths,
        "HOME": place,
        "XDG_STATE_HOME": place,
        "GITHUB_SHA": "1" * 40,
        "GITHUB_STEP_SUMMARY": f"{place}/summary.md",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": place,
        **variables,
    }
    statuses, text = {}, ""
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads `on` so
    found = workflow["jobs"][name]
    assert found["if"] == f"github.event_name {'==' if name == 'candidate' else '!='} 'workflow_dispatch'"
    for step in found["steps"]:
        condition = step.get("if", "")
        files = re.findall(r"hashFiles\('(.*?)'\)", condition)
        of_event = re.findall(r"event_name == '(.*?)'", condition) in ([], [event])
        goes_on = not any(statuses.values()) or "always()" in condition
        there = all((checkout / file).exists() for file in files)
        if "run" not in step or step["name"] == "Install" or not (of_event and goes_on and there):
            continue
        commands = step["run"]
        for words, others in changes:
            assert step["name"] != "Replay base and candidate" or words in commands
            commands = commands.replace(words, others)
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", commands]
        done = subprocess.run(
            shell,
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        statuses[step["name"]] = done.returncode
        text += done.stdout
    return statuses, text


def test_given_an_empty_checkout_then_main_leaves_a_baseline_and_a_slower_model_is_named_in_the_log(
    checkout,
):
    statuses, text = job(checkout, "push")
    assert statuses == {"Replay": 0, "Keep as the baseline": 0}, text

    model = checkout / "brightness.py"
    model.write_text(ADAPTER.replace("return (torch.tensor", "time.sleep(0.1); return (torch.tensor"))
    statuses, text = job(checkout, "pull_request")
    assert statuses == {"Replay": 0, "Compare with main": 1, "Show the verdict": 0}, text
    assert re.search(r"perception miss ratio \[%\].*BREAKS the limit of 1 %", text), text


def test_given_a_candidate_when_judged_by_hand_then_its_plan_is_signed_only_if_it_is_as_good_as_the_base(
    checkout,
):
    from typer.testing import CliRunner

    from torchperf_ros.fleet.signature import read_public_key, read_signed
    from torchperf_ros.tools.main import app

    config = checkout / "config"
    for words in (
        ["keygen", str(checkout.parent / "fleet.key")],
        [
            "new",
            "-o",
            str(config / "plan.yaml"),
            "--stage",
            "perception",
            "--version",
            "b",
            "--set",
            "adapter=candidate:Brightness",
        ],
    ):
        assert CliRunner().invoke(app, ["rollout", *words]).exit_code == 0
    key = (checkout.parent / "fleet.key").read_text()
    (config / "candidate.yaml").write_text(
        PARAMETERS.replace("brightness:Brightness", "candidate:Brightness")
    )
    (checkout / "times.yaml").write_text("perception: {full: {inference_ms: {median: 20, p99: 35}}}")
    candidate = checkout / "candidate.py"
    candidate.write_text(ADAPTER)

    def judged():  # on a virtual clock, so that no neighbour on this machine has a say
        changes = (("--pace real", "--pace virtual --times times.yaml"), ("in 1 2 3", "in 1"))
        return job(checkout, "workflow_dispatch", "candidate", changes, ROLLOUT_KEY=key)

    statuses, text = judged()
    assert not any(statuses.values()), text
    assert list(statuses)[-2:] == ["Sign the roll-out", "Remove the key"]
    signed, public = (
        (checkout / "plan.json").read_bytes(),
        read_public_key(checkout.parent / "fleet.key.pub"),
    )
    assert read_signed(signed, public, "plan").version == "b"
    assert not (checkout.parent / "rollout.key").exists()

    (checkout / "plan.json").unlink()
    candidate.write_text(ADAPTER.replace('messages["image"]', 'messages["img"]'))
    statuses, text = judged()
    assert statuses["Replay base and candidate"] == 1, text
    line = ADAPTER[: ADAPTER.index('messages["image"]')].count("\n") + 1
    assert re.search(
        rf"^perception frame \d+ and \d+ more: KeyError: 'img' \(candidate.py:{line}\)$", text, re.M
    )
    assert "perception: no frame was answered by the model; the first reasons are above\n" in text
    assert "Sign the roll-out" not in statuses
    assert not (checkout / "plan.json").exists()
