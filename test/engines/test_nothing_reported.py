"""Nothing is reported: an adapter imports libraries that do so by default, and HOME shows what they did."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..ros_domain import own_domain

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 240.0
ADAPTER = """
import os
import sys
from pathlib import Path

import torch
from onnxruntime import InferenceSession

from torchperf_ros.api.messages import message_class
from torchperf_ros.api.adapter import Adapter

Path(__file__).with_name(f"imported_by_{os.environ['COMMAND']}").touch()
assert sys.modules["openvino_telemetry"] is None


class Net(Adapter):
    inputs = {"image": "sensor_msgs/msg/Image"}
    output = "std_msgs/msg/Float64"

    def __init__(self, options, device):
        pass

    def build(self, tier):
        return torch.nn.Linear(2, 2).eval()

    def example_inputs(self, tier):
        return (torch.zeros(1, 2),)

    def preprocess(self, messages):
        return (torch.zeros(1, 2),)

    def postprocess(self, outputs, messages):
        return message_class(self.output)(float(outputs[0, 0]))
"""
PARAMS = """
/**/perf:
  ros__parameters:
    {stages: [net], metrics_port: 0, compile_missing: false, net: {adapter: "net:Net", output: answer, tiers: [full],
     budget_ms: 1000.0, engine: eager, backup: none}}
"""
COMMANDS = {
    "compile": [
        "torchperf_ros.tools",
        "compile",
        "net:Net",
        "--tiers",
        "full",
        "--engine",
        "onnxruntime",
        "--dry-run",
    ],
    "tune": [
        "torchperf_ros.tools",
        "tune",
        "net:Net",
        "--tiers",
        "full",
        "--minutes",
        "0.001",
        "-o",
        "tuned.yaml",
    ],
    "replay": ["torchperf_ros.tools", "replay", "drive.mcap", "--params", "net.yaml"],
    "node": ["torchperf_ros.node.main", "--params-file", "net.yaml"],
}


@pytest.fixture(scope="module")
def robot(tmp_path_factory):
    """A folder with an adapter, its parameters and a short drive."""
    folder = tmp_path_factory.mktemp("robot")
    (folder / "net.py").write_text(ADAPTER)
    (folder / "net.yaml").write_text(PARAMS)
    make = ["torchperf_ros.tools", "make-log", "drive.mcap", "--seconds", "1", "--size", "64x48"]
    subprocess.run(
        [sys.executable, "-m", *make], cwd=folder, check=True, timeout=WITHIN_S, capture_output=True
    )
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_given_an_adapter_that_imports_a_library_that_reports_when_run_then_that_leaves_nothing_in_home(
    command, robot, tmp_path
):
    if command == "node":
        pytest.importorskip("rclpy")
    own = {
        "HOME": str(tmp_path),
        "COMMAND": command,
        "PYTHONPATH": str(ROOT),
        "ROS_DOMAIN_ID": str(own_domain()),
    }
    unset = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | own
    marker = robot / f"imported_by_{command}"
    with (tmp_path / "says").open("w") as says:
        words = [sys.executable, "-m", *COMMANDS[command]]
        process = subprocess.Popen(words, cwd=robot, env=environment, stdout=says, stderr=says)
        try:
            until = time.monotonic() + WITHIN_S
            while not marker.exists() and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            if command == "node":
                process.send_signal(signal.SIGINT)
            process.wait(WITHIN_S)
        finally:
            process.kill()
    assert marker.exists(), (tmp_path / "says").read_text()
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert [
        path for path in left if "microsoft" in path.lower() or "onnxruntime" in path or "intel" in path
    ] == []
