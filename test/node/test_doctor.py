"""`torchperf doctor` beside a real node, with a camera and a receiver whose faults are known."""

import json
import threading
import time

import pytest
from typer.testing import CliRunner

pytest.importorskip("rclpy", reason="rclpy is not installed")

from sensor_msgs.msg import Image

from torchperf_ros.tools.main import app

from .perf_process import DOMAIN_ID


@pytest.fixture(scope="module")
def node(start_node):
    """A node with a stage whose model takes 20 ms."""
    stage = {
        "adapter": "adapters_for_graph:Slow",
        "options": json.dumps({"ms": 20.0}),
        "output": "point",
        "tiers": ["fast"],
        "backup": "none",
        "budget_ms": 80.0,
        "input_reliability": "best_effort",
    }
    node = start_node({"stages": ["slow"], "slow": stage})
    node.wait_until_ready("slow")
    return node


@pytest.fixture
def doctor(monkeypatch, tmp_path):
    """Runs the command; gives its exit status, what it printed, and its figures."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(DOMAIN_ID))

    def ask(*arguments, seconds=2.0, until=lambda found: True):
        """Ask again while the answer is another.

        Others may take the processors for most of such a short look.
        """
        file = tmp_path / "found.json"
        for _ in range(6):
            result = CliRunner().invoke(
                app, ["doctor", *arguments, "--seconds", str(seconds), "--json", str(file)]
            )
            found = json.loads(file.read_text())[0] if file.exists() else {}
            if until(found):
                break
        return result.exit_code, result.output, found

    return ask


def largest(part):
    return lambda found: found.get("largest") == {"slow": part}


@pytest.fixture
def camera(stranger, node, image):
    """Publishes images at a rate, stamped so many ms ago, until the test ends."""
    ending, threads = threading.Event(), []

    def start(hz, *, age_ms=0.0):
        publisher = stranger.create_publisher(Image, f"{node.namespace}/image", 10)

        def speak():
            while not ending.wait(1.0 / hz):
                publisher.publish(image(time.time_ns() - round(age_ms * 1e6)))

        threads.append(threading.Thread(target=speak))
        threads[-1].start()

    yield start
    ending.set()
    for thread in threads:
        thread.join()


def advised(found):
    return {one["part"]: one["command"] for one in found["advice"]}


def test_given_stamps_of_65_ms_ago_when_asked_then_the_camera_is_the_largest_part(node, camera, doctor):
    camera(20, age_ms=65.0)
    status, output, found = doctor(
        "--node", node.name, until=lambda found: largest("camera")(found) and "camera" in advised(found)
    )
    assert (status, found["largest"]) == (1, {"slow": "camera"}), output
    assert advised(found)["camera"] == "ros2 param dump /stranger"
    assert "slow.budget_from: stamp" in output  # 80 ms, and outputs are older
    assert "slow: the largest part is camera" in output


def test_given_no_triggers_when_asked_then_it_says_who_publishes_none_and_the_status_is_1(node, doctor):
    status, output, _ = doctor("--node", node.name, until=bool)
    assert status == 1, output
    assert f"no message on {node.namespace}/image: no node publishes it" in output


def test_given_no_node_when_asked_then_the_status_is_2(doctor):
    status, output, _ = doctor("--node", "/nobody", seconds=1.0)
    assert status == 2
    assert "node /nobody: nothing heard in 1 s" in output
