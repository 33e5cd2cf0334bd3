"""What the black box wrote, played to new workers: the same inputs give the same outputs, byte by byte."""

import pytest
from rosbags.highlevel import AnyReader

pytest.importorskip("rclpy")

from nav_msgs.msg import Odometry, Path
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image
from std_srvs.srv import Trigger
from visualization_msgs.msg import MarkerArray

pytestmark = pytest.mark.ros

STAMP_NS = 1_700_000_000_000_000_000
FRAMES = 4


def test_given_an_incident_when_its_inputs_are_played_to_new_workers_then_their_outputs_are_the_same(
    graph, start_node, fast, tmp_path, image
):
    own = {"recorder": True, "evidence_dir": str(tmp_path), "black_box_after_s": 0.0}
    stage = fast(engine="eager")
    node = start_node({"stages": ["perception", "planning"], "perception": stage, "planning": stage, **own})
    camera, odometry = node.publisher("image", Image), node.publisher("odom", Odometry)
    node.wait_until_ready("perception", "planning")
    for number in range(FRAMES):
        stamp_ns = STAMP_NS + number * 33_000_000
        speed = Odometry()
        speed.header.stamp.sec, speed.header.stamp.nanosec = divmod(stamp_ns, 1_000_000_000)
        speed.twist.twist.linear.x = 5.0 + number
        node.tell(odometry, speed)
        frame = image(stamp_ns, width=640, height=360)
        frame.data = bytes((number * 40 + i) % 256 for i in range(640 * 3)) * 360
        node.answer(camera, frame, stage=1)
    node.next_report()
    assert node.call(Trigger, "record", Trigger.Request()).success
    (incident,) = node.wait_for(lambda: list(tmp_path.glob("2*_recorded")), "the incident")

    for transition in ("deactivate", "cleanup", "configure", "activate"):
        assert node.change_state(transition)
    detections = graph.listen(f"{node.namespace}/detections", MarkerArray, raw=True)
    trajectories = graph.listen(f"{node.namespace}/trajectory", Path, raw=True)
    players = {"image": node.publisher("image", Image), "odom": node.publisher("odom", Odometry)}
    node.next_report()  # what was said so far is of the workers before
    node.wait_until_ready("perception", "planning")
    recorded = {"detections": [], "trajectory": []}
    with AnyReader([incident / "black_box"]) as reader:
        for connection, _, data in reader.messages():
            name = connection.topic.rpartition("/")[2]
            if name == "image":
                node.answer(players[name], deserialize_message(data, Image), stage=1)
            elif name == "odom":
                node.tell(players[name], deserialize_message(data, Odometry))
            elif name in recorded:
                recorded[name].append(bytes(data) + bytes(-len(data) % 4))  # as DDS pads it
    node.wait_for(lambda: len(trajectories) == FRAMES and len(detections) == FRAMES, "all outputs")
    assert len(recorded["detections"]) == len(recorded["trajectory"]) == FRAMES
    assert detections == recorded["detections"]
    assert trajectories == recorded["trajectory"]
    assert len(set(trajectories)) == FRAMES
