"""A node that is recorded.

Incidents by service, by errors and by its own death, what is in them, and records.
"""

import json
import signal

import jsonschema
import psutil
import pytest
from rosbags.highlevel import AnyReader

pytest.importorskip("rclpy")

from geometry_msgs.msg import PointStamped
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import Image
from std_srvs.srv import Trigger

from torchperf_ros.observe.recorder import schema


class Recorded:
    """A node with one stage and a recorder."""

    def __init__(self, graph, start_node, obedient, folder, **changed):
        self.evidence, self.orders = folder / "evidence", folder / "orders"
        self.orders.mkdir()
        stage = obedient(self.orders, sustained_misses=3)
        own = {"recorder": True, "evidence_dir": str(self.evidence)}
        given = {"stages": ["camera"], "camera": stage, **own, "black_box_s": 2.0, **changed}
        self.node = start_node(given)
        self.camera = self.node.publisher("image", Image)
        self.node.wait_until_ready("camera")

    def incident(self, what):
        """The folder of the incident of this name, once it is complete."""
        return self.node.wait_for(
            lambda: next(self.evidence.glob(f"2*_{what}"), None), f"an incident {what}"
        )

    def lines(self):
        """What its records say; a line that is being written is left out."""
        files = sorted(self.evidence.glob("records/**/records*.jsonl"), reverse=True)
        lines = [line for file in files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def recorder(self):
        """The recorder's process."""
        return next(
            child for child in self.node.workers() if "observe.recorder import" in str(child.cmdline())
        )


@pytest.fixture(scope="module")
def recorded(graph, start_node, obedient, tmp_path_factory):
    return Recorded(graph, start_node, obedient, tmp_path_factory.mktemp("recorded"))


def log_of(incident):
    """What an incident's log holds: topic -> list of CDR bytes."""
    with AnyReader([incident / "black_box"]) as reader:
        found = {}
        for connection, _, data in reader.messages():
            found.setdefault(connection.topic, []).append(bytes(data))
        return found


def test_given_frames_when_asked_to_record_then_inputs_outputs_and_topics_are_written(recorded, image):
    points = recorded.node.graph.listen(f"{recorded.node.namespace}/point", PointStamped, raw=True)
    recorded.node.acquaint()
    images = [image(width=width) for width in (8, 16, 24)]
    for message in images:
        recorded.node.answer(recorded.camera, message)
    recorded.node.next_report()
    response = recorded.node.call(Trigger, "record", Trigger.Request())
    assert response.success
    incident = recorded.incident("recorded")
    assert response.message == str(incident)
    log, space = log_of(incident), recorded.node.namespace
    assert [deserialize_message(data, Image) for data in log[f"{space}/image"]] == images
    recorded.node.wait_for(lambda: len(points) == 3, "the points")
    assert [data + bytes(-len(data) % 4) for data in log[f"{space}/point"]] == points  # as DDS pads
    assert (
        len(log[f"{recorded.node.name}/latency_stages"]) == len(log[f"{recorded.node.name}/latency"]) == 3
    )
    assert {"/diagnostics", f"{recorded.node.name}/memory", f"{recorded.node.name}/memory_stats"} <= set(
        log
    )
    parameters = json.loads((incident / "parameters.json").read_text())
    assert parameters["camera.adapter"] == "adapters_for_graph:Obedient"
    about = json.loads((incident / "incident.json").read_text())
    assert {stage["name"]: stage["inputs"][0] for stage in about["stages"]}["camera"] == f"{space}/image"
    assert f"{space}/point" in {stage["output"] for stage in about["stages"]}
    assert about["why"] == "asked for by service"
    assert about["versions"]["torch"]
    stacks = (incident / "stacks.txt").read_text()
    assert "thread stage-camera" in stacks
    assert "session.py" in stacks.partition("camera worker 0")[2]


def test_given_errors_that_last_when_told_then_the_event_names_its_evidence(recorded, image):
    for width in (33, 34, 35):
        (recorded.orders / f"raise-{width}").touch()
        recorded.node.answer(recorded.camera, image(width=width))

    def error():
        statuses = [status for array in recorded.node.anomalies for status in array.status]
        return next((s for s in statuses if s.name == "camera: model error" and s.level == b"\x02"), None)

    status = recorded.node.wait_for(error, "an error")
    values = {pair.key: pair.value for pair in status.values}
    incident = recorded.incident("camera-model-error")
    assert values["evidence"] == str(incident)
    assert int(values["count"]) >= 3
    assert "told to raise" in status.message


def test_given_records_when_read_then_each_line_fits_the_schema_and_every_frame_is_there(recorded):
    def lines():
        """All of them, once there is one for each frame."""
        found = recorded.lines()
        return sum(line["kind"] == "frame" for line in found) >= len(recorded.node.rows) and found

    recorded.node.next_report()
    lines = recorded.node.wait_for(lines, "every frame's record")
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    for line in lines:
        validator.validate(line)
    frames = [line for line in lines if line["kind"] == "frame"]
    assert [frame["seq"] for frame in frames] == list(range(len(recorded.node.rows)))
    assert {"start", "frame", "memory", "health", "anomaly"} <= {line["kind"] for line in lines}
    reasons = [frame["reason"] for frame in frames if frame["outcome"] == "error"]
    assert all("RuntimeError: told to raise" in reason for reason in reasons)
    assert lines[0]["kind"] == "start"


def test_given_a_recorder_that_is_killed_when_frames_come_then_all_are_answered_and_another_starts(
    recorded, image
):
    recorded.recorder().kill()
    row = recorded.node.answer(recorded.camera, image(width=40))
    assert row["outcome"] == 0
    recorded.node.wait_for(
        lambda: "the recorder is gone" in recorded.node.values("node").get("recorder_warning", ""),
        "the warning",
    )
    recorded.node.wait_for(
        lambda: recorded.node.values("node").get("recorder_restarts") == "1", "another recorder"
    )
    recorded.node.wait_for(
        lambda: "recorder_warning" not in recorded.node.values("node"), "no warning any more"
    )
    recorded.node.answer(recorded.camera, image(width=41))
    seq = len(recorded.node.rows) - 1
    recorded.node.wait_for(
        lambda: any(line.get("seq") == seq for line in recorded.lines()), "the frame's record"
    )


def test_given_a_recorder_that_is_stopped_when_asked_to_record_then_it_says_so_until_it_goes_on(
    recorded, image
):
    """That one which does not go on is replaced, `test/observe/test_recording.py` sees."""
    stopped = recorded.recorder()
    stopped.suspend()
    recorded.node.wait_for(
        lambda: stopped.status() == psutil.STATUS_STOPPED, "its stop, once it has the processor"
    )
    response = recorded.node.call(Trigger, "record", Trigger.Request())
    assert (response.success, response.message) == (False, "nothing is recorded: the recorder is stopped")
    assert recorded.node.answer(recorded.camera, image(width=42))["outcome"] == 0
    stopped.resume()
    recorded.node.wait_for(
        lambda: recorded.node.call(Trigger, "record", Trigger.Request()).success, "its going on"
    )


def test_given_a_node_that_is_killed_when_gone_then_its_last_seconds_are_written_all_the_same(
    graph, start_node, obedient, tmp_path, image
):
    recorded = Recorded(graph, start_node, obedient, tmp_path)
    recorded.node.answer(recorded.camera, image(width=48))
    recorded.node.next_report()  # the last moment is not reported yet
    recorder = recorded.recorder()
    recorded.node.process.send_signal(signal.SIGKILL)
    recorded.node.process.wait()
    incident = graph.wait_for(
        lambda: next(tmp_path.glob("evidence/2*_node-died"), None), lambda: "the last incident"
    )
    assert len(log_of(incident)[f"{recorded.node.namespace}/point"]) == 1
    assert "gone without a word" in json.loads((incident / "incident.json").read_text())["why"]
    graph.wait_for_end(recorder)
