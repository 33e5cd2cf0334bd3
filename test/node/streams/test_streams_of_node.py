"""Streams of a stage in a real graph: topics, statuses, rows and metrics of each, and what is refused."""

import math
import urllib.request

import pytest

pytest.importorskip("rclpy")

from geometry_msgs.msg import PointStamped
from sensor_msgs.msg import Image
from typer.testing import CliRunner

from benchmarks.rig.scraper import free_port
from torchperf_ros.tools.main import app

from ..perf_process import DOMAIN_ID

FRONT, REAR, FUSED = range(3)


@pytest.fixture(scope="module")
def node(start_node, obedient, orders):
    """Two cameras of one model, and a stage that takes what the first gives."""
    seen = obedient(
        orders,
        streams=["front", "rear"],
        topics=["image:=image_raw"],
        input_timeout_ms=60_000.0,
        rear={"input_timeout_ms": 500.0},
    )
    fused = obedient(adapter="Follower", output="fused", topics=["point:=front/point"])
    port = free_port()
    node = start_node({"stages": ["seen", "fused"], "seen": seen, "fused": fused, "metrics_port": port})
    node.metrics_port = port
    node.wait_until_ready("seen.front", "seen.rear", "fused")
    return node


@pytest.fixture(scope="module")
def cameras(node):
    return [node.publisher(f"{name}/image_raw", Image) for name in ("front", "rear")]


def test_given_two_cameras_when_each_sends_then_each_is_answered_on_its_own_topic(
    node, cameras, graph, image
):
    heard = [
        graph.listen(f"{node.namespace}/{topic}", PointStamped) for topic in ("front/point", "rear/point")
    ]
    for width, camera, stream in ((8, cameras[0], FRONT), (16, cameras[1], REAR)):
        row = node.answer(camera, image(width=width), stage=stream)
        assert (row["outcome"], row["stream"]) == (0.0, stream)
        node.wait_for(lambda stream=stream: heard[stream], f"an output of stream {stream}")
        assert heard[stream][-1].point.x == width
    node.wait_for(lambda: node.rows_of(FUSED), "a row of the stage behind the first camera")
    assert math.isnan(node.rows_of(FUSED)[-1]["stream"])


def test_given_streams_when_the_status_is_read_then_each_has_its_own_and_the_workers_are_the_same(
    node, cameras, image
):
    node.answer(cameras[0], image(), stage=FRONT)
    node.next_report()
    front, rear = node.values("seen.front"), node.values("seen.rear")
    assert (front["stream"], rear["stream"], "stream" in node.values("fused")) == ("front", "rear", False)
    assert front["worker_0_pid"] == rear["worker_0_pid"]
    assert front["output"] == "front/point"
    assert "dynamic_dims" in front["batch"]


def test_given_a_camera_that_is_unplugged_when_the_other_sends_then_only_the_first_is_waiting(
    node, cameras, image
):
    node.answer(cameras[1], image(), stage=REAR)
    node.wait_for_health("seen.rear", "WAITING")
    node.answer(cameras[0], image(), stage=FRONT)
    assert node.values("seen.front")["health"] != "WAITING"
    node.answer(cameras[1], image(), stage=REAR)
    node.wait_for_health("seen.rear", "NOMINAL", "DEGRADED")


def test_given_streams_when_the_doctor_asks_for_parameters_then_it_gets_those_of_their_stage(
    node, monkeypatch
):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(DOMAIN_ID))
    for _ in range(6):  # others may take the processors for most of such a short look
        found = CliRunner().invoke(app, ["doctor", "--node", node.name, "--seconds", "2"])
        if "seen.front" in found.output:
            break
    assert "seen.front" in found.output
    assert "could not be asked" not in found.output


def test_given_streams_when_scraped_then_metrics_have_the_stage_and_the_stream(node):
    with urllib.request.urlopen(f"http://127.0.0.1:{node.metrics_port}/metrics") as answer:
        text = answer.read().decode()
    assert 'torchperf_frames_total{stage="seen",stream="front"}' in text
    assert 'torchperf_frames_total{stage="fused",stream=""}' in text


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            {"streams": ["a", "b"], "topics": ["image:=/one_camera"]},
            "parameter seen.streams: a and b both take /one_camera; each stream has a topic of its own",
        ),
        (
            {"topics": ["picture:=/camera"]},
            "parameter seen.topics: the adapter has no input picture; it has: image",
        ),
    ],
)
def test_given_topics_that_streams_cannot_have_when_configured_then_the_message_names_what_is_wrong(
    start_node, obedient, own, message
):
    node = start_node({"stages": ["seen"], "seen": obedient(**own), "autostart": False})
    node.acquaint()
    assert not node.change_state("configure")
    node.prints(message)
