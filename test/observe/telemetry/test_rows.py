import math
import socket
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.errors import ProtocolError
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.telemetry.rows import (
    LABELS,
    MAX_PACKET_BYTES,
    EventRecord,
    LabelledArray,
    LatencyRecord,
    MessageRecord,
    StreamReader,
    StreamWriter,
    float64_bytes,
    sent_row,
)
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.workers.frame_ring import FrameRing, InputBytes

from ...stage.conftest import STORE

RING = 1 << 16
LARGE = 20_000
times = st.floats(0, 1e6) | st.just(math.nan)


class Stream:
    """A sender, a stage's ring, and the recorder's end, over a real socket."""

    def __init__(self, ring_bytes=RING):
        self.stage = FrameRing(RING)
        self.writer = StreamWriter(ring_bytes)
        own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own.setblocking(False)
        theirs.setblocking(False)
        self.writer.connect(own)
        self.reader = StreamReader(theirs, self.writer.ring.fd, [self.stage.fd])

    def close(self):
        self.writer.close()
        self.reader.socket.close()
        self.stage.close()


@pytest.fixture
def stream():
    stream = Stream()
    yield stream
    stream.close()


def answer(stage=None, inputs=(), **changed):
    offset, length = stage.write(changed.get("seq", 7), inputs) if stage is not None else (0, 0)
    frame = Frame(changed.pop("seq", 7), b"", 12, changed.pop("age_ms", 1.5), 1000, 2000, Origin(1000, 1.5))
    frame.scene, frame.budget_ms = changed.pop("scene", 3), changed.get("budget_ms", 50.0)
    values = {
        "outcome": Outcome.ON_TIME,
        "fallback": None,
        "reason": "",
        "tier": 1,
        "wait_ms": 0.5,
        "total_ms": 20.0,
        "budget_ms": 50.0,
        "lateness_ms": -30.0,
        "published_ns": 3000,
        "steps": StepTimes(1.0, 2.0, 3.0, 4.0),
        "profiled": True,
        "shapes": b"1x3x480x640 1x6",
    }
    return Answer(frame, **{**values, **changed}, offset=offset, length=length)


def test_given_a_frame_when_told_then_everything_about_it_arrives(stream):
    inputs = [InputBytes(0, 12, 1.5, b"image"), InputBytes(1, 11, 2.5, b"odometry")]
    told = answer(
        stream.stage,
        inputs,
        payload=b"out",
        outcome=Outcome.LATE,
        fallback=Fallback.HOLD_LAST,
        reason="why é",
        step=3,
        missing_inputs=6,
    )
    stream.writer.frame(0, 99, told, 21.5)
    record = stream.reader.read()
    assert (record.t_ns, record.stage, record.row["answer_ms"]) == (99, 0, 21.5)
    assert record.row.tobytes() == sent_row(told, 99, 21.5)
    assert (record.payload, record.reason) == (b"out", "why é")
    assert record.published_ns == 1000 + 20 * 1_000_000
    more = (told.offset, told.length, True, 3, b"1x3x480x640 1x6")
    assert tuple(record.row[["offset", "length", "profiled", "step", "shapes"]]) == more
    assert [(item.index, item.stamp_ns, item.age_ms, item.data) for item in record.inputs] == [
        (0, 12, 1.5, b"image"),
        (1, 11, 2.5, b"odometry"),
    ]
    with pytest.raises(BlockingIOError):
        stream.reader.read()


@given(
    st.integers(0, 2**40),
    st.sampled_from(list(Outcome)),
    st.sampled_from([None, *Fallback]),
    st.integers(-1, 300),
    st.lists(times, min_size=8, max_size=8),
)
def test_given_any_answer_when_told_then_its_row_is_what_the_node_publishes(
    seq, outcome, fallback, tier, values
):
    stream = Stream()
    try:
        told = answer(
            seq=seq,
            outcome=outcome,
            fallback=fallback,
            tier=tier,
            age_ms=values[0],
            wait_ms=values[1],
            steps=StepTimes(*values[2:6]),
            total_ms=values[6],
            budget_ms=values[7],
        )
        stream.writer.frame(0, 1, told, math.nan)
        record = stream.reader.read()
        assert LatencyRecord(0).of_row(record.row) == LatencyRecord(0).encode(told)
    finally:
        stream.close()


def test_given_a_small_message_when_it_is_read_then_no_room_is_made_for_a_large_one(stream):
    stream.writer.message(3, 10, b"cdr")
    tracemalloc.start()
    stream.reader.read()
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < MAX_PACKET_BYTES // 2


def test_given_messages_and_events_when_told_then_they_arrive_in_order(stream):
    stream.writer.message(3, 10, b"cdr")
    stream.writer.event(11, {"kind": "log", "text": "x"})
    assert stream.reader.read() == MessageRecord(10, 3, b"cdr")
    assert stream.reader.read() == EventRecord(11, {"kind": "log", "text": "x"})


def test_given_a_reader_that_is_late_when_bytes_were_overwritten_then_the_record_comes_without(stream):
    told = answer(stream.stage, [InputBytes(0, 1, 0.0, b"first")], payload=bytes(LARGE))
    stream.writer.frame(0, 1, told, math.nan)
    for _ in range(4):  # both rings go round
        stream.stage.write(8, [InputBytes(0, 1, 0.0, bytes(RING // 3))])
        stream.writer.ring.write(0, [InputBytes(0, 0, 0.0, bytes(RING // 3))])
    record = stream.reader.read()
    assert (record.inputs, record.payload, record.row["total_ms"]) == ([], None, 20.0)
    assert stream.reader.overwritten == 2


def test_given_a_full_socket_when_told_more_then_nobody_waits_and_the_loss_is_told_with_the_next(stream):
    sent = 0
    while not stream.writer.lost:
        stream.writer.message(0, sent, b"x")
        sent += 1
    lost = 3
    for _ in range(lost - 1):
        stream.writer.message(0, 0, b"x")
    assert stream.writer.lost == lost
    for _ in range(sent - 1):
        stream.reader.read()
    stream.writer.message(0, 77, b"y")
    assert stream.reader.read().t_ns == 77
    assert (stream.reader.lost, stream.writer.lost) == (lost, 0)


def test_given_an_output_larger_than_the_ring_when_told_then_the_frame_comes_without_it_and_it_is_counted(
    stream,
):
    stream.writer.frame(0, 1, answer(payload=bytes(2 * RING)), math.nan)
    record = stream.reader.read()
    assert record.payload is None
    assert stream.reader.lost == 1


def test_given_another_version_when_read_then_it_is_refused(stream):
    other, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other, theirs:
        other.send(struct.pack("<B40x", 200))
        reader = StreamReader(theirs, stream.writer.ring.fd, [stream.stage.fd])
        with pytest.raises(ProtocolError, match="version 200"):
            reader.read()
        other.send(b"x")
        with pytest.raises(ProtocolError, match="1 bytes"):
            reader.read()


# -- rows under labels, as another reader of CDR finds them


def row(record, answer):
    message = STORE.deserialize_cdr(record.encode(answer), "std_msgs/msg/Float64MultiArray")
    return dict(zip([dim.label for dim in message.layout.dim], message.data.tolist(), strict=True))


def test_given_answers_when_recorded_then_every_value_is_under_its_label_and_the_unknown_is_nan(
    make_answer,
):
    answer = make_answer(seq=7, tier=2, total_ms=12.5)
    answer.check, answer.missing_inputs = GuardVerdict.REBASED, 0b110
    found = row(LatencyRecord(1, stream=3), answer)
    values = [1, 7, 4.0, 0.5, 1.0, 2.0, 3.0, 4.0, 12.5, 50.0, 2, 0, math.nan, 2, 0, 6, 13.5, -1.0, 0, 3]
    assert found == pytest.approx(dict(zip(LABELS, values, strict=True)), nan_ok=True)
    answer = make_answer(Outcome.STARTING, Fallback.STOP, tier=-1, steps=StepTimes(), age_ms=math.nan)
    found = row(LatencyRecord(0), answer)
    unknown = {"age_ms", "decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms", "tier", "check"}
    assert {label for label, value in found.items() if math.isnan(value)} == unknown | {"stream"}
    assert (found["outcome"], found["fallback"]) == (7, 2)


labels_and_values = st.lists(
    st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), st.floats()),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(labels_and_values)
def test_given_any_labels_and_values_when_encoded_then_another_reader_finds_them(pairs):
    labels, values = zip(*pairs, strict=True)
    message = STORE.deserialize_cdr(LabelledArray(labels).encode(values), "std_msgs/msg/Float64MultiArray")
    assert [dim.label for dim in message.layout.dim] == list(labels)
    assert {(dim.size, dim.stride) for dim in message.layout.dim} == {(1, 1)}
    assert [struct.pack("<d", x) for x in message.data] == [struct.pack("<d", x) for x in values]
    with pytest.raises(struct.error):
        LabelledArray(labels).encode([*values, 1.0])


@given(st.floats())
def test_given_any_number_when_encoded_then_another_reader_finds_it(value):
    message = STORE.deserialize_cdr(float64_bytes(value), "std_msgs/msg/Float64")
    assert message.data == pytest.approx(value, rel=0, abs=0, nan_ok=True)
