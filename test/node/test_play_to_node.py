"""A node with the log's time.

What it makes of a log that is played to it, and of a clock that is not there.
"""

import json
import math
import signal

import numpy as np
import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

pytest.importorskip("rclpy")

from diagnostic_msgs.msg import DiagnosticArray
from nav_msgs.msg import Path
from sensor_msgs.msg import Image
from visualization_msgs.msg import MarkerArray

from benchmarks.rig.messages import odometry_bytes
from torchperf_ros.api.messages import empty_message, encode, header
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.stage.frame import USABLE_AGE_MS

STORE = get_typestore(Stores.ROS2_JAZZY)
IMAGE, ODOMETRY = "sensor_msgs/msg/Image", "nav_msgs/msg/Odometry"
MS, S = 1_000_000, 1_000_000_000
START_NS = 1_600_000_000 * S
AGE_MS = 40


def image(t_ns, number, width, height):
    """Received at this time, `AGE_MS` after its stamp."""
    row = np.fromiter(((number * 40 + i) % 256 for i in range(3 * width)), np.uint8)
    message = empty_message(
        IMAGE,
        header=header(t_ns - AGE_MS * MS, "camera"),
        height=height,
        width=width,
        encoding="rgb8",
        step=3 * width,
        data=np.tile(row, height),
    )
    return bytes(encode(message, IMAGE))


def odometry(t_ns, speed_mps):
    return odometry_bytes(speed=speed_mps, stamp_ns=t_ns - AGE_MS * MS, frame="camera")


def write_drive(folder, frames, every_ms, width, height, *, after=0.5):
    """Images, each with an odometry message that part of a period before it.

    A loop does not end with an image.
    """
    with Writer(folder, version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        camera = writer.add_connection("/camera", IMAGE, typestore=STORE)
        wheels = writer.add_connection("/wheels", ODOMETRY, typestore=STORE)
        for number in range(frames):
            t_ns = START_NS + number * every_ms * MS
            writer.write(wheels, t_ns, odometry(t_ns, 5.0 + number))
            t_ns += round(after * every_ms * MS)
            writer.write(camera, t_ns, image(t_ns, number, width, height))
        end_ns = START_NS + frames * every_ms * MS
        writer.write(wheels, end_ns, odometry(end_ns, 5.0 + frames))
    return folder


def inputs_of(node):
    """Where the node takes the log's topics from, as options of the player."""
    return ["--remap", f"/camera:={node.namespace}/image", "--remap", f"/wheels:={node.namespace}/odom"]


def rows_of_play(graph, node, play, log, frames):
    """The rows of a log that is played, once each of its images is answered, or was superseded by another."""
    seen, before = len(node.rows), int(node.values("camera")["frames"])
    process, printed = play(log, *inputs_of(node), "--clock", "--wait-for-node", node.name)
    ended(graph, process, printed)

    def all_over():
        count = {
            name: int(node.values("camera")[name])
            for name in ("frames", "answered", "unanswered", "superseded", "dropped")
        }
        rows = count["answered"] + count["unanswered"]
        is_over = count["frames"] == rows + count["superseded"] + count["dropped"] >= before + frames
        return is_over and rows == len(node.rows)

    node.wait_for(all_over, lambda: f"the end of each frame; the player printed {printed()}")
    assert "is not ready" not in printed()
    return node.rows[seen:]


def ended(graph, process, printed):
    graph.wait_for(
        lambda: process.poll() is not None, lambda: f"the end of the player; it printed {printed()}"
    )
    assert process.returncode == 0, printed()


@pytest.fixture(scope="module")
def node(start_node, obedient, orders):
    """With the log's time, which budgets count from; orders make it misbehave."""
    stage = obedient(orders, budget_ms=1500.0, budget_from="stamp", hang_ms=2000.0)
    node = start_node({"stages": ["camera"], "camera": stage, "use_sim_time": True})
    node.wait_until_ready("camera")
    return node


def test_given_no_clock_yet_then_the_frame_is_answered_and_the_worker_replaced(graph, node, orders, image):
    camera = node.publisher("image", Image)
    first = node.answer(camera, image(START_NS, width=16))
    assert math.isnan(first["age_ms"])
    (orders / "hang-24").touch()
    late = node.answer(camera, image(START_NS + 1, width=24))
    assert late["outcome"] == Outcome.LATE
    node.counted("camera", restarts=1)
    node.wait_until_ready("camera")
    assert node.answer(camera, image(START_NS + 2, width=32))["outcome"] == Outcome.ON_TIME


def test_given_a_log_of_years_ago_when_played_with_its_clock_then_ages_are_those_of_the_log(
    graph, node, play, tmp_path
):
    log = write_drive(tmp_path / "log", 5, 200, 16, 4)
    reported, rows, tries = graph.listen("/diagnostics", DiagnosticArray), [], 5
    while len(rows) != 5 and tries:  # the node may have had no processor for as long as two images take
        rows, tries = rows_of_play(graph, node, play, log, 5), tries - 1
    assert len(rows) == 5
    assert {row["outcome"] for row in rows} == {Outcome.ON_TIME}
    assert all(0 < row["age_ms"] < USABLE_AGE_MS for row in rows)
    node.next_report()  # although the clock stands still
    assert START_NS // S <= reported[-1].header.stamp.sec < START_NS // S + 5


def test_given_a_log_in_a_loop_when_its_time_goes_back_then_the_frames_of_each_round_are_answered_on_time(
    graph, node, play, tmp_path
):
    log = write_drive(tmp_path / "log", 4, 200, 16, 4)
    seen, before = len(node.rows), node.values("camera")
    process, printed = play(log, *inputs_of(node), "--clock", "--loop", "--wait-for-node", node.name)
    node.wait_for(
        lambda: len(node.rows) >= seen + 10, lambda: f"a third round; the player printed {printed()}"
    )
    process.send_signal(signal.SIGINT)
    ended(graph, process, printed)
    node.next_report()
    rows, after = node.rows[seen:], node.values("camera")
    assert {row["outcome"] for row in rows} == {Outcome.ON_TIME}
    assert all(
        abs(row["age_ms"]) < USABLE_AGE_MS for row in rows
    )  # the clock may go back before a frame is taken
    assert (
        int(after["backward_stamps"]) >= int(before["backward_stamps"]) + 2
    )  # it is seen that time goes back
    assert (after["stale"], after["health_safe_stop_s"]) == (before["stale"], before["health_safe_stop_s"])


def test_given_the_same_log_when_played_live_and_replayed_at_real_pace_then_the_outputs_are_the_same(
    graph, start_node, fast, play, tmp_path
):
    frames, stage = 4, fast(engine="eager")
    # What comes of an image depends on the last odometry by then: both stages have 450 ms until the next one.
    log = write_drive(tmp_path / "log", frames, 600, 320, 180, after=0.25)
    parameters = {"stages": ["perception", "planning"], "perception": stage, "planning": stage}
    node = start_node({**parameters, "use_sim_time": True})
    live = {
        name: graph.listen(f"{node.namespace}/{name}", kind, raw=True)
        for name, kind in (("detections", MarkerArray), ("trajectory", Path))
    }
    node.wait_until_ready("perception", "planning")
    node.acquaint()
    process, printed = play(log, *inputs_of(node), "--clock", "--wait-for-node", node.name)
    ended(graph, process, printed)
    node.wait_for(
        lambda: len(live["trajectory"]) == frames, lambda: f"all outputs; the player printed {printed()}"
    )

    params = tmp_path / "params.yaml"
    params.write_text(
        json.dumps(
            {"/**": {"ros__parameters": {"worker_threads": 1, "compile_missing": False, **parameters}}}
        )
    )
    options = ReplayOptions(
        params, {"image": "/camera", "odom": "/wheels"}, "real", output=tmp_path / "out.mcap"
    )
    result = replay(log, options)
    for stage, name in (("perception", "detections"), ("planning", "trajectory")):
        # as DDS pads
        replayed = [output.data + bytes(-len(output.data) % 4) for output in result.stage(stage).messages]
        assert live[name] == replayed
    assert len(set(live["trajectory"])) == frames
