"""A guard in a real ROS graph.

What it takes from topics, and what becomes of the frames that follow.
"""

import os
from pathlib import Path

import pytest
from rosbags.highlevel import AnyReader

pytest.importorskip("rclpy")

from nav_msgs.msg import Odometry
from nav_msgs.msg import Path as PathMessage
from sensor_msgs.msg import Image, LaserScan
from std_srvs.srv import Trigger

from torchperf_ros.api.outcome import GuardVerdict
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions

from .perf_process import odometry

GUARD = {"act": ["finite", "stamps"], "obstacles": [""], "odometry_timeout_ms": 10_000.0}
SPEED = 8.0


@pytest.fixture(scope="module")
def refused(start_node, obedient):
    """A node with a guard on a stage that publishes points; it starts beside the other one."""
    return start_node({"stages": ["camera"], "camera": {**obedient(), "guard.act": ["all"]}})


@pytest.fixture(scope="module")
def node(refused, graph, start_node, obedient, orders, evidence):
    stage = obedient(orders, adapter="ObedientPlanner", output="plan", fallback=["none"])
    stage |= {f"guard.{name}": value for name, value in GUARD.items()}
    lane = {
        "emergency.sensors": ["scan LaserScan timeout 0"],
        "emergency.start_s": 600.0,
        "emergency.odometry_timeout_ms": 60_000.0,
    }
    recorded = {
        "recorder": True,
        "evidence_dir": str(evidence),
        "black_box_s": 12.0,
    }
    node = start_node({"stages": ["camera"], "camera": stage, **lane, **recorded})
    node.plans = graph.listen(f"{node.namespace}/plan", PathMessage)
    node.wait_until_ready("camera")
    node.odom, node.image = node.publisher("odom", Odometry), node.publisher("image", Image)
    node.scan = node.publisher("scan", LaserScan)
    graph.acquaint(
        Trigger, f"{node.name}/clear_emergency", Trigger.Request()
    )  # the lane's process hears the scan
    return node


def answered(node, image):
    """The row of a frame that follows on odometry, and what was published for it."""
    node.plans.clear()
    node.tell(node.odom, odometry(SPEED))
    row = node.answer(node.image, image())
    node.wait_for(lambda: node.plans, "a path")
    return row, node.plans[0]


def test_given_a_plan_whose_stamps_stand_still_when_answered_then_the_vehicle_stops_along_its_own_way(
    node, image
):
    row, plan = answered(node, image)
    assert row["check"] == GuardVerdict.STOP
    xs = [pose.pose.position.x for pose in plan.poses]
    assert plan.header.frame_id == "odom"
    assert xs == sorted(xs)
    assert xs[0] >= 100.0
    assert xs[-1] - xs[0] == pytest.approx(SPEED**2 / (2 * 8.0), abs=0.1)
    told = node.wait_for(
        lambda: [s for array in node.anomalies for s in array.status if s.name == "camera: plan refused"],
        "the alert",
    )
    assert told[0].message.startswith("stamps: the plan ")
    assert int(node.counted("camera", check_stop=1)["check_stop"]) >= 1


def test_given_an_incident_when_replayed_then_the_guard_has_what_it_had_and_what_is_left_out_is_said(
    node, image, evidence, monkeypatch
):
    node.tell(node.scan, LaserScan())
    node.wait_for(lambda: node.values("emergency").get("scan messages") == "1", "the scan")
    answered(node, image)
    assert node.call(Trigger, "record", Trigger.Request()).success
    (incident,) = node.wait_for(lambda: list(evidence.glob("2*_recorded")), "the incident")
    with AnyReader([incident / "black_box"]) as reader:
        counts = {topic.rpartition("/")[2]: found.msgcount for topic, found in reader.topics.items()}
    assert (counts["odom"], counts["scan"]) == (counts["image"], 1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    result = replay(incident, ReplayOptions())
    assert result.stages["camera"].checks == {"stop": counts["image"]}
    assert any("the emergency lane is left out" in trouble for trouble in result.summary["troubles"])


def test_given_a_model_that_raises_when_there_is_no_fallback_then_the_guard_still_stops_the_vehicle(
    node, image, orders
):
    (orders / "raise-4").touch()
    row, plan = answered(node, lambda: image(width=4))
    assert row["check"] == GuardVerdict.STOP
    assert plan.header.frame_id == "odom"


def test_given_a_guard_on_a_stage_that_publishes_points_when_configured_then_it_is_refused(refused):
    refused.wait_for(lambda: "camera.guard.act: the stage publishes" in refused.errors, "the refusal")
