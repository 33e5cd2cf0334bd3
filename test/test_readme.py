"""The README's own model is run as it stands there: by a worker, through a stage."""

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from torchperf_ros.api.messages import decode, encode, message_class
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.engines.fingerprint import changing_weights
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_setup import worker_setup

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
SECONDS = 90
IMAGE = "sensor_msgs/msg/Image"


def block(language: str) -> str:
    """The README's first code block in a language."""
    text, *_ = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    return text


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's `my_robot/segmenter.py`, importable by workers."""
    folder = tmp_path / "my_robot"
    folder.mkdir()
    (folder / "segmenter.py").write_text(block("python"), encoding="utf-8")
    paths = [str(tmp_path), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))


@pytest.mark.usefixtures("package")
def test_given_the_readmes_model_and_parameters_when_an_image_comes_then_labels_with_its_stamp_are_published() -> (
    None
):
    values = yaml.safe_load(block("yaml"))["/**/perf"]["ros__parameters"]
    stages = {
        "segmentation": (
            values["segmentation"] | {"budget_ms": 5_000.0, "hang_ms": 10_000.0, "backup": "none"}
        )
    }
    stages["segmentation"]["engine"] = "eager"
    node = node_config({"stages": values["stages"], "device": "cpu", "worker_threads": 1}, stages)
    (config,) = node.stages
    published: list[bytes] = []
    answers = []
    done = threading.Event()
    ports = StagePorts(
        publish=published.append,
        hand_on=lambda payload, frame: None,
        answered=lambda answer: (answers.append(answer), done.set()),
        anomaly=print,
        log=print,
    )
    stamp = message_class("builtin_interfaces/msg/Time")(sec=12, nanosec=34)
    header = message_class("std_msgs/msg/Header")(stamp=stamp, frame_id="camera")
    pixels = np.zeros(120 * 480, dtype=np.uint8)
    image = encode(message_class(IMAGE)(header, 120, 160, "rgb8", 0, 480, pixels), IMAGE)
    stage = Stage(config, worker_setup(config, node), ports, lambda: 13 * 10**9)
    stage.start()
    stage.activate()
    try:
        # frames that come while the worker loads are answered `starting`; offer until one is run
        for _ in range(SECONDS):
            done.clear()
            stage.offer(bytes(image), 12 * 10**9 + 34, stamped=True)
            assert done.wait(SECONDS)
            if answers[-1].outcome is not Outcome.STARTING:
                break
    finally:
        stage.stop()

    assert answers[-1].outcome is Outcome.ON_TIME, answers[-1].reason
    labels = decode(published[-1], IMAGE)
    assert (labels.encoding, labels.height, labels.width) == ("mono8", 120, 160)
    assert (labels.header.stamp.sec, labels.header.stamp.nanosec) == (12, 34)


def test_given_the_readmes_model_when_built_twice_then_its_weights_are_the_same_so_that_packages_fit() -> (
    None
):
    names: dict[str, Any] = {}
    exec(block("python"), names)
    adapter = names["Segmenter"]({}, torch.device("cpu"))
    for tier in ("full", "fast"):
        assert changing_weights(tier, adapter.build(tier), adapter.build(tier)) == ""


def test_given_the_readmes_commands_on_a_robot_when_read_then_the_shell_that_listens_sets_no_transport() -> (
    None
):
    commands = README.partition("## On a robot")[2].strip().partition("\n\n")[0]
    assert "ros2 topic echo" in commands
    assert "export" not in commands
