import itertools
import json
import math
from dataclasses import replace
from datetime import datetime, timezone

import pytest
from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import Reader

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.messages import encode, message_class, typestore
from torchperf_ros.observe.black_box import BlackBox
from torchperf_ros.observe.telemetry.rows import MessageRecord, float64_bytes
from torchperf_ros.workers.frame_ring import FrameReader, FrameRing, InputBytes
from torchperf_ros.workers.incident_folder import IncidentFolder

from .telemetry.frame_records import frame_record

TYPE = "std_msgs/msg/String"
SETUP = {
    "node": "/perf",
    "topics": [("/perf/memory", "std_msgs/msg/Float64")],
    "heard": [("/objects", TYPE)],
    "stages": [
        {"output": ("/boxes", TYPE), "inputs": [("/image", TYPE)]},
        {"output": ("/path", TYPE), "inputs": [None, ("/odom", TYPE)]},
    ],
}


def text(words):
    return bytes(encode(message_class(TYPE)(data=words), TYPE))


def frame(at_s, stage=0, inputs=("image",), output="boxes", answer_ms=math.nan):
    """A frame answered at this second, 10 ms after it was received."""
    return frame_record(
        round(at_s * NS_PER_S),
        stage=stage,
        seq=round(at_s * 10),
        answer_ms=answer_ms,
        inputs=[InputBytes(index, 0, 0.0, text(words)) for index, words in enumerate(inputs)],
        payload=None if output is None else text(output),
    )


class Box(BlackBox):
    """With times in seconds, and what was written."""

    def __init__(self, folder, before_s=10.0, after_s=2.0, part_bytes=1 << 20):
        seconds = itertools.count()
        self.evidence = IncidentFolder(
            folder / "evidence",
            5,
            64,
            lambda: datetime(2026, 1, 1, second=next(seconds), tzinfo=timezone.utc),
        )
        self.now_ns = 0
        own = {
            "black_box_s": before_s,
            "black_box_after_s": after_s,
            "black_box_mib": part_bytes / (1 << 20),
        }
        super().__init__(SETUP | own, self.evidence, lambda: self.now_ns)

    def frame(self, record):
        self.now_ns = max(self.now_ns, record.t_ns)
        super().frame(record)

    def incident(self, at_s, what="test", **files):
        self.record(self.evidence.name(what), at_s, files, lambda t_ns: {"since.txt": str(t_ns)})

    def folder(self):
        """Of the last incident, once it is written."""
        self.finish()
        return self.evidence.incidents()[-1]

    def written(self):
        """(second, topic, text or number) of each message of the last incident, in the log's order."""
        folder = self.folder()
        with AnyReader([folder / "black_box"], default_typestore=typestore([TYPE])) as reader:
            return [
                (
                    t_ns / NS_PER_S,
                    connection.topic,
                    getattr(reader.deserialize(data, connection.msgtype), "data", None),
                )
                for connection, t_ns, data in reader.messages()
                if connection.topic != "/perf/latency_stages"
            ]


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


def test_given_frames_when_recorded_then_inputs_come_when_received_and_outputs_when_published(box):
    box.frame(frame(1, answer_ms=12.5))
    box.message(MessageRecord(2 * NS_PER_S, 0, float64_bytes(80.0)))
    box.incident(2)
    assert box.written() == [
        (0.99, "/image", "image"),
        (1.0, "/boxes", "boxes"),
        (1.0, "/perf/latency", 12.5),
        (2.0, "/perf/memory", 80.0),
    ]


def test_given_stages_in_a_row_when_recorded_then_what_passes_between_is_there_once_and_other_inputs_when_new(
    box,
):
    for second, odom in ((1, "a"), (2, "a"), (3, "b")):
        box.frame(frame(second, stage=1, inputs=("boxes", odom), output="path"))
    box.incident(3)
    written = box.written()
    assert [(round(at, 2), words) for at, topic, words in written if topic == "/odom"] == [
        (0.99, "a"),
        (2.99, "b"),
    ]
    assert {topic for _, topic, _ in written} == {"/odom", "/path"}
    assert [words for _, _, words in written] == ["a", "path", "path", "b", "path"]


def test_given_inputs_from_before_the_seconds_that_are_kept_then_the_log_begins_with_the_latest(tmp_path):
    box = Box(tmp_path, before_s=3.0)
    box.message(MessageRecord(0, 1, text("cars")))
    for second, odom in enumerate("aabbbbbcc"):
        box.frame(frame(second, stage=1, inputs=("boxes", odom), output="path"))
    box.incident(8)
    first, *others = [(round(at), words) for at, topic, words in box.written() if topic != "/path"]
    assert {first, others[0]} == {(5, "b"), (5, "cars")}
    assert others[1:] == [(7, "c")]


def test_given_what_no_frame_carries_when_heard_then_it_stands_at_its_receipt_and_its_time_is_no_jump(box):
    box.message(MessageRecord(2 * NS_PER_S, 0, float64_bytes(1.0)))
    box.message(MessageRecord(1 * NS_PER_S, 1, text("objects")))
    box.message(MessageRecord(3 * NS_PER_S, 0, float64_bytes(2.0)))
    box.incident(3)
    assert box.written() == [(1, "/objects", "objects"), (2, "/perf/memory", 1.0), (3, "/perf/memory", 2.0)]


def test_given_seconds_when_an_incident_happens_then_those_before_and_after_are_written_and_no_others(
    tmp_path,
):
    box = Box(tmp_path, before_s=3.0, after_s=2.0)
    for second in range(20):
        box.frame(frame(second))
        if second == 10:
            box.incident(second)
        box.tick(second)
    assert [at for at, topic, _ in box.written() if topic == "/boxes"] == [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert box.incidents == 1
    assert (box.evidence.incidents()[0] / "since.txt").read_text() == str(round(6.99 * NS_PER_S))


def report(box, ros_s, now_s):
    """What the node says each second."""
    box.now_ns = round(now_s * NS_PER_S)
    box.message(MessageRecord(round(ros_s * NS_PER_S), 0, float64_bytes(now_s)))


def test_given_ros_time_that_stands_still_when_kept_then_what_is_old_goes_all_the_same(tmp_path):
    box = Box(tmp_path, before_s=3.0)
    for second in range(20):
        report(box, 100.0, second)
    box.incident(20)
    assert box.written() == [(100.0, "/perf/memory", value) for value in (16.0, 17.0, 18.0, 19.0)]


@pytest.mark.parametrize(("first_s", "then_s"), [(100.0, 2.0), (0.0, 1.7e9)])
def test_given_ros_time_that_jumps_then_what_came_before_is_not_mixed_with_what_follows(
    box, first_s, then_s
):
    for second in range(3):
        report(box, first_s + second, second)
    box.now_ns = 3 * NS_PER_S
    BlackBox.frame(box, frame(then_s - 0.5))
    for second in range(3):
        report(box, then_s + second, 3 + second)
    box.incident(6)
    times = [(at_s, topic) for at_s, topic, _ in box.written()]
    assert times[0][1] == "/image"
    assert times[0][0] == pytest.approx(then_s - 0.51)
    assert [at_s for at_s, topic in times if topic == "/perf/memory"] == [then_s, then_s + 1, then_s + 2]


def test_given_an_incident_when_ros_time_jumps_then_it_ends_there(box):
    report(box, 100.0, 0)
    box.incident(0)
    report(box, 101.0, 1)
    BlackBox.frame(box, frame(1.5))
    report(box, 2.0, 2)
    assert box.written() == [(100.0, "/perf/memory", 0.0), (101.0, "/perf/memory", 1.0)]
    assert box.incidents == 1


def test_given_a_bound_in_bytes_when_more_comes_then_the_oldest_goes_and_what_follows_is_left_out_and_said(
    tmp_path,
):
    size = len(text("x" * 1000))
    box = Box(tmp_path, part_bytes=5 * size)
    for second in range(10):
        box.message(MessageRecord(second * NS_PER_S, 0, text("x" * 1000)))
    assert box.held_bytes <= 5 * size
    box.incident(10)
    for second in range(10, 20):
        box.message(MessageRecord(second * NS_PER_S, 0, text("x" * 1000)))
    folder = box.folder()
    with Reader(folder / "black_box") as reader:
        assert reader.message_count == 10
    assert json.loads((folder / "left_out.json").read_text())["messages_left_out"] == 5


def test_given_an_incident_when_another_one_happens_meanwhile_then_it_is_part_of_the_first(box):
    box.frame(frame(1))
    box.incident(1, "first", **{"incident.json": "1"})
    box.incident(2, "second", **{"incident.json": "2"})
    folder = box.folder()
    assert folder.name.endswith("_first")
    assert (folder / "incident.json").read_text() == "1"
    assert [path.read_text() for path in folder.glob("*_second_incident.json")] == ["2"]


def test_given_a_disk_that_takes_no_more_when_an_incident_is_written_then_it_is_said_and_the_next_one_is_kept(
    box, tmp_path, limited
):
    box.frame(frame(1))
    with limited("FSIZE", 100):
        box.incident(1, "lost", **{"stacks.txt": "x" * 1000})
        box.finish()
    assert "_lost is lost: " in box.problem
    assert list((tmp_path / "evidence").iterdir()) == []
    box.incident(2, "kept")
    box.finish()
    assert [path.name.partition("_")[2] for path in box.evidence.incidents()] == ["kept"]
    assert (box.problem, box.incidents) == ("", 1)


def test_given_an_incident_when_written_then_definitions_come_along_for_readers_that_know_no_types(box):
    box.frame(frame(1))
    box.incident(1)
    folder = box.folder()
    with Reader(folder / "black_box") as reader:
        definitions = {connection.topic: connection.msgdef.data for connection in reader.connections}
    assert definitions["/image"].strip() == "string data"
    assert "MultiArrayLayout layout" in definitions["/perf/latency_stages"]
    assert (folder / "black_box" / "metadata.yaml").is_file()


def test_given_a_profile_taken_meanwhile_when_an_incident_is_written_then_it_says_where(box):
    box.frame(frame(1))
    box.evidence.keep("before", lambda folder: None)
    box.incident(1)
    profile = box.evidence.keep("profile", lambda folder: None)
    box.finish()
    (incident,) = [path for path in box.evidence.incidents() if path.name.endswith("_test")]
    assert (incident / "see_also.txt").read_text() == f"{profile.name}\n"


def in_ring(ring, reader, second, words):
    """A frame whose image lies in the ring of its stage."""
    record = frame(second, inputs=(), output=None)
    seq, row = int(record.row["seq"]), record.row.copy()
    offset, length = ring.write(seq, [InputBytes(0, 0, 0.0, text(words))])
    row["offset"] = offset
    return replace(record, row=row, ring=reader, inputs=reader.read(offset, length, seq))


class Untouched(bytes):
    """An image that counts how often it is copied."""

    copies = 0

    def __bytes__(self):
        Untouched.copies += 1
        return bytes(memoryview(self))


def test_given_an_incident_that_is_full_when_more_images_come_then_they_are_not_copied(tmp_path):
    image, Untouched.copies = Untouched(text("x" * 1000)), 0
    box = Box(tmp_path, part_bytes=5 * len(image))
    box.incident(0)
    for number in range(20):
        record = frame(number / 20, inputs=(), output=None)
        box.frame(replace(record, inputs=[InputBytes(0, 0, 0.0, image)]))
    written = [topic for _, topic, _ in box.written()]
    assert 0 < written.count("/image") < 5
    assert Untouched.copies == written.count("/image")


def test_given_images_in_a_ring_then_they_are_copied_just_then_and_lost_ones_are_said(tmp_path):
    box, ring = Box(tmp_path), FrameRing(4096)
    reader = FrameReader(ring.fd)
    for second in range(6):  # three and a half of them go into the ring
        box.frame(in_ring(ring, reader, second, f"{second}" * 1000))
    assert box.held_bytes > 6 * 1000
    box.incident(6)
    for second in range(6, 12):
        box.frame(in_ring(ring, reader, second, f"{second}"))
    ring.write(0, [InputBytes(0, 0, 0.0, bytes(3500))])  # whoever looks at it now finds something else
    written = [words for _, topic, words in box.written() if topic == "/image"]
    assert written == [*(f"{second}" * 1000 for second in (3, 4, 5)), "6", "7", "8", "9", "10", "11"]
    said = json.loads((box.folder() / "left_out.json").read_text())
    assert (said["messages_overwritten"], said["messages_left_out"]) == (3, 0)
    ring.close()
