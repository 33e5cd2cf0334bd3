"""`torchperf top` as a process, beside a node that is real to DDS."""

import contextlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("rclpy", reason="rclpy is not installed")

from diagnostic_msgs.msg import DiagnosticArray

from torchperf_ros.frame.alert_rules import Alert, Level
from torchperf_ros.telemetry.diagnostics import diagnostic_bytes

from .perf_process import DOMAIN_ID

pytestmark = pytest.mark.ros
ERROR = "KeyError: 0 (b_dict.py:36)"


def top(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "torchperf_ros.cli", "top", *arguments],
        env=os.environ | {"ROS_DOMAIN_ID": str(DOMAIN_ID)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def test_given_a_node_that_reports_when_looked_at_once_then_it_shows_its_stage_alert_and_last_error(tmp_path, stranger):
    publisher = stranger.create_publisher(DiagnosticArray, "/diagnostics", 10)
    stage = Alert(Level.OK, "perf: perception", "", {"health": "NOMINAL", "tier": "full", "last_error": ERROR})
    told = {"alert perception: model error": f"ERROR {ERROR}"}
    own = Alert(Level.OK, "perf: node", "", {"health": "NOMINAL", "pid": "7", "lifecycle": "active", **told})
    process = top("--once", "--seconds", "60", "--svg", str(tmp_path / "top.svg"))
    while process.poll() is None:  # it reports as a node of this name does, faster
        publisher.publish(diagnostic_bytes([stage, own], "/perf", 1))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    output = process.stdout.read()
    assert process.returncode == 0, output
    assert "/perf ● NOMINAL active" in output
    assert "perception ● NOMINAL tier full" in output
    assert f"perception model error: {ERROR}" in output
    assert f"last error {ERROR}" in output
    assert "perception" in (tmp_path / "top.svg").read_text(encoding="utf-8")


def test_given_no_node_when_looked_for_then_it_says_what_it_waits_for_and_the_status_is_1():
    process = top("--node", "robot9/perf", "--seconds", "0.5")
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "waiting for /robot9/perf" in output
