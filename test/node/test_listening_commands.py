"""`torchperf report` and `torchperf top` as a user calls them.

With logs, beside a node, and with unusable input.
"""

import contextlib
import os
import threading

import psutil
import pytest
from typer.testing import CliRunner

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.observe.telemetry.diagnostics import diagnostic_bytes
from torchperf_ros.tools.main import app

pytest.importorskip("plotly", reason="plotly is not installed")
from ..observe.runs import report_logs as logs
from .perf_process import DOMAIN_ID

RUNNER = CliRunner()
ERROR = "KeyError: 0 (b_dict.py:36)"


def report(*arguments):
    return RUNNER.invoke(app, ["report", *map(str, arguments)])


def test_given_a_log_when_reported_then_the_page_is_where_it_was_wanted(tmp_path):
    result = report(logs.write_log(tmp_path / "drive"), "-o", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert f"wrote {tmp_path / 'page.html'}" in result.output
    assert "perception: 99.00% on time: 1 late" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "name a log, or --live SECONDS"),
        (["none.mcap"], "log none.mcap: does not exist"),
        (
            ["none.mcap", "-o", "no/folder.html"],
            "--output no/folder.html: needs a file name in an existing folder",
        ),
        (["none.mcap", "--node", "my perf"], "my perf"),
    ],
)
def test_given_what_cannot_be_used_when_reported_then_it_is_named_and_the_status_is_2(arguments, words):
    result = report(*arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.ros
def test_given_a_node_that_publishes_when_listened_to_then_the_page_tells_of_its_frames(
    tmp_path, monkeypatch, request
):
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    from diagnostic_msgs.msg import DiagnosticArray
    from std_msgs.msg import Float64MultiArray

    monkeypatch.setenv("ROS_DOMAIN_ID", str(DOMAIN_ID))
    node, ending = request.getfixturevalue("stranger"), threading.Event()
    types = {logs.ARRAY: Float64MultiArray, logs.DIAGNOSTICS: DiagnosticArray}
    told = [message for message in logs.messages(images=False) if message[1] in types]
    publishers = {topic: node.create_publisher(types[kind], topic, 200) for topic, kind, _, _ in told}

    def speak():
        while not ending.wait(0.1):
            for topic, _, _, cdr in told[:40]:
                publishers[topic].publish(cdr)

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        for _ in range(10):  # until the other one is discovered, which takes longer on a busy machine
            result = report("--live", 1.5, "-o", tmp_path / "page.html")
            if result.exit_code == 0 and "100.00% on time" in (tmp_path / "page.html").read_text(
                encoding="utf-8"
            ):
                break
    finally:
        ending.set()
        speaker.join()
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "/perf, live" in page
    assert "100.00% on time" in page


@pytest.mark.ros
def test_given_no_node_when_listened_to_then_the_status_is_2(tmp_path, monkeypatch):
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    monkeypatch.setenv("ROS_DOMAIN_ID", str(DOMAIN_ID))
    result = report("--live", "0.3", "--node", "/nobody", "-o", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "node /nobody: nothing heard in 0.3 s" in result.output


@pytest.fixture
def top(warm_process, tmp_path):
    """Start `torchperf top`; gives the process, and the file that it prints to."""

    def start(*arguments):
        with (tmp_path / "printed").open("w") as prints:
            environment = os.environ | {"ROS_DOMAIN_ID": str(DOMAIN_ID)}
            return (
                warm_process.start("torchperf", ["top", *arguments], environment, prints.fileno()),
                tmp_path / "printed",
            )

    return start


@pytest.mark.ros
def test_given_a_node_that_reports_when_looked_at_once_then_it_shows_its_stage_alert_and_last_error(
    tmp_path, request, top
):
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    from diagnostic_msgs.msg import DiagnosticArray

    stranger = request.getfixturevalue("stranger")
    publisher = stranger.create_publisher(DiagnosticArray, "/diagnostics", 10)
    stage = Alert(
        Level.OK, "perf: perception", "", {"health": "NOMINAL", "tier": "full", "last_error": ERROR}
    )
    told = {"alert perception: model error": f"ERROR {ERROR}"}
    own = Alert(
        Level.OK, "perf: node", "", {"health": "NOMINAL", "pid": "7", "lifecycle": "active", **told}
    )
    process, printed = top("--once", "--seconds", "60", "--svg", str(tmp_path / "top.svg"))
    while process.poll() is None:  # it reports as a node of this name does, faster
        publisher.publish(diagnostic_bytes([stage, own], "/perf", 1))
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(0.1)
    output = printed.read_text()
    assert process.returncode == 0, output
    assert "/perf ● NOMINAL active" in output
    assert "perception ● NOMINAL tier full" in output
    assert f"perception model error: {ERROR}" in output
    assert f"last error {ERROR}" in output
    assert "perception" in (tmp_path / "top.svg").read_text(encoding="utf-8")


@pytest.mark.ros
def test_given_no_node_when_looked_for_then_it_says_what_it_waits_for_and_the_status_is_1(top):
    pytest.importorskip("rclpy", reason="rclpy is not installed")
    process, printed = top("--node", "robot9/perf", "--seconds", "0.5")
    status, output = process.wait(200), printed.read_text()
    assert status == 1, output
    assert "waiting for /robot9/perf" in output
