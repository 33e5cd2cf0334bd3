"""Scenes in a real ROS graph: a speed and a word on topics choose what answers the next image."""

import pytest
from nav_msgs.msg import Odometry
from sensor_msgs.msg import Image
from std_msgs.msg import String

pytestmark = pytest.mark.ros
PERCEPTION = 0


def at_speed(speed):
    message = Odometry()
    message.twist.twist.linear.x = speed
    return message


def test_given_scenes_when_speed_and_word_are_published_then_images_are_answered_for_them(
    graph, start_node, image, fast
):
    scenes = {
        "scenes": ["intersection", "highway"], "scene_hold_s": 0.1, "situation_timeout_ms": 600_000.0,
        "scene": {
            "intersection": {"tiers": ["fast"], "budget_ms": 4000, "topic": "scene"},
            "highway": {"tiers": ["full"], "min_speed": 22.0},
        },
    }  # fmt: skip
    node = start_node({"perception": {**fast(), **scenes}, "stages": ["perception"]})
    node.wait_until_ready("perception")
    camera, odometry, word = (node.publisher(*one) for one in (("image", Image), ("odom", Odometry), ("scene", String)))

    def row_until(wanted):
        """The first row with this scene; images go on, as a message on another topic may come later."""
        for stamp_ns in range(1, 1000):
            node.answer(camera, image(stamp_ns * 1_000_000), stage=PERCEPTION)
            row = node.rows_of(PERCEPTION)[-1]
            if row["scene"] == wanted:
                return row
        return pytest.fail(f"no image was answered for scene {wanted}")

    for topic in ("odom", "scene"):  # each message is taken once
        assert graph.node.count_subscribers(f"{node.namespace}/{topic}") == 1
    assert row_until(0)["scene"] == 0
    node.tell(odometry, at_speed(30.0))
    highway = row_until(2)
    node.tell(word, String(data="intersection"))
    intersection = row_until(1)
    assert intersection["budget_ms"] == 4000.0
    assert highway["budget_ms"] != 4000.0
    assert intersection["tier"] != highway["tier"]
    node.next_report()
    values = node.values("perception")
    assert (values["scene"], values["scenes"], values["budget_ms"]) == (
        "intersection", "default,intersection,highway", "4000.000",
    )  # fmt: skip
