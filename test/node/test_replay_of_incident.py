"""What the black box wrote, played to another node: the same inputs give the same outputs, byte by byte."""

import pytest
from rosbags.highlevel import AnyReader

pytest.importorskip("rclpy")

from nav_msgs.msg import Odometry, Path
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image
from std_srvs.srv import Trigger
from visualization_msgs.msg import MarkerArray

pytestmark = pytest.mark.ros

STAGE = {
    "tiers": ["fast"], "engine": "eager", "backup": "none", "budget_ms": 5000.0, "hang_ms": 10_000.0,
    "input_reliability": "reliable",
}  # fmt: skip
STAMP_NS = 1_700_000_000_000_000_000
FRAMES = 4


def start(start_node, folder, **own):
    return start_node({"stages": ["perception", "planning"], "perception": STAGE, "planning": STAGE, **own})


def outputs(graph, node, kind, name):
    """The bytes of what it publishes, as they come."""
    found = []
    topic = f"{node.namespace}/{name}"
    graph.node.create_subscription(kind, topic, lambda data: found.append(bytes(data)), 10, raw=True)
    return found


def test_given_an_incident_when_its_inputs_are_played_to_another_node_then_its_outputs_are_the_same(
    graph, start_node, tmp_path, image
):
    first = start(start_node, tmp_path, recorder=True, evidence_dir=str(tmp_path), black_box_after_s=0.0)
    camera, odometry = first.publisher("image", Image), first.publisher("odom", Odometry)
    first.wait_until_ready("perception", "planning")
    for number in range(FRAMES):
        stamp_ns = STAMP_NS + number * 33_000_000
        speed = Odometry()
        speed.header.stamp.sec, speed.header.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
        speed.twist.twist.linear.x = 5.0 + number
        first.tell(odometry, speed)
        frame = image(stamp_ns, width=640, height=360)
        frame.data = bytes((number * 40 + i) % 256 for i in range(640 * 3)) * 360
        first.answer(camera, frame, stage=1)
    first.next_report()
    assert first.call(Trigger, "record", Trigger.Request()).success
    (incident,) = first.wait_for(lambda: list(tmp_path.glob("2*_recorded")), "the incident")

    second = start(start_node, tmp_path)
    detections = outputs(graph, second, MarkerArray, "detections")
    trajectories = outputs(graph, second, Path, "trajectory")
    players = {"image": second.publisher("image", Image), "odom": second.publisher("odom", Odometry)}
    second.wait_until_ready("perception", "planning")
    recorded = {"detections": [], "trajectory": []}
    with AnyReader([incident / "black_box"]) as reader:
        for connection, _, data in reader.messages():
            name = connection.topic.rpartition("/")[2]
            if name == "image":
                second.answer(players[name], deserialize_message(data, Image), stage=1)
            elif name == "odom":
                second.tell(players[name], deserialize_message(data, Odometry))
            elif name in recorded:
                recorded[name].append(bytes(data) + bytes(-len(data) % 4))  # as DDS pads it
    second.wait_for(lambda: len(trajectories) == FRAMES and len(detections) == FRAMES, "all outputs")
    assert len(recorded["detections"]) == len(recorded["trajectory"]) == FRAMES
    assert detections == recorded["detections"]
    assert trajectories == recorded["trajectory"]
    assert len(set(trajectories)) == FRAMES
