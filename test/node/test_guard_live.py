"""The guard in a real ROS graph: what it takes from topics, what it publishes, and where its verdict is seen."""

import pytest

pytest.importorskip("rclpy")

from nav_msgs.msg import Odometry, Path
from sensor_msgs.msg import Image

from torchperf_ros.frame.outcome import GuardVerdict

pytestmark = pytest.mark.ros

GUARD = {"act": ["finite", "stamps"], "obstacles": [""], "odometry_timeout_ms": 10_000.0}
SPEED = 8.0


def odometry():
    message = Odometry(child_frame_id="base_link")
    message.header.frame_id = "odom"
    message.pose.pose.position.x, message.pose.pose.orientation.w = 100.0, 1.0
    message.twist.twist.linear.x = SPEED
    return message


@pytest.fixture(scope="module")
def node(graph, start_node, obedient, orders):
    stage = obedient(orders, adapter="ObedientPlanner", output="plan", fallback=["none"])
    stage |= {f"guard.{name}": value for name, value in GUARD.items()}
    node = start_node({"stages": ["camera"], "camera": stage})
    node.plans = graph.listen(f"{node.namespace}/plan", Path)
    node.wait_until_ready("camera")
    node.odom, node.image = node.publisher("odom", Odometry), node.publisher("image", Image)
    return node


def answered(node, image):
    """The row of a frame that follows on odometry, and what was published for it."""
    node.plans.clear()
    node.tell(node.odom, odometry())
    row = node.answer(node.image, image())
    node.wait_for(lambda: node.plans, "a path")
    return row, node.plans[0]


def test_given_a_plan_whose_stamps_stand_still_when_answered_then_the_vehicle_stops_along_its_own_way(node, image):
    row, plan = answered(node, image)
    assert row["check"] == GuardVerdict.STOP
    xs = [pose.pose.position.x for pose in plan.poses]
    assert plan.header.frame_id == "odom"
    assert xs == sorted(xs)
    assert xs[0] >= 100.0
    assert xs[-1] - xs[0] == pytest.approx(SPEED**2 / (2 * 8.0), abs=0.1)
    told = node.wait_for(
        lambda: [s for array in node.anomalies for s in array.status if s.name == "camera: plan refused"], "the alert"
    )
    assert told[0].message.startswith("stamps: the plan ")
    assert int(node.counted("camera", check_stop=1)["check_stop"]) >= 1


def test_given_a_model_that_raises_when_there_is_no_fallback_then_the_guard_still_stops_the_vehicle(
    node, image, orders
):
    (orders / "raise-4").touch()
    row, plan = answered(node, lambda: image(width=4))
    assert row["check"] == GuardVerdict.STOP
    assert plan.header.frame_id == "odom"


def test_given_a_guard_on_a_stage_that_publishes_points_when_configured_then_it_is_refused(start_node, obedient):
    node = start_node({"stages": ["camera"], "camera": {**obedient(), "guard.act": ["all"]}})
    node.wait_for(lambda: "camera.guard.act: the stage publishes" in node.errors, "the refusal")
