"""Damaged, incomplete and mixed-up logs: what can be read is read, what is lost is noted and counted."""

import os
import re
import sqlite3
import struct
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.reader import make_reader
from rosbags.rosbag2 import CompressionMode, StoragePlugin
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.api import messages as message_types
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.errors import UnknownMessageType
from torchperf_ros.replay.logs.log_reader import LogError, LogReader

from . import small_logs as logs


def read(path):
    """Messages, the notes, and the findings."""
    notes = []
    with LogReader(path, notes.append) as log:
        return list(log.messages()), notes, log.findings


def sql(path, *commands):
    with sqlite3.connect(path if path.is_file() else logs.storage_file(path)) as db:
        for command in commands:
            db.execute(command)


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def chunk_offsets(path):
    with path.open("rb") as file:
        return [index.chunk_start_offset for index in make_reader(file).get_summary().chunk_indexes]


# -- MCAP


@pytest.mark.parametrize(
    "kind", ["mcap", "mcap zstd", "mcap lz4", "mcap without chunks", "bag", "bag bz2", "bag lz4"]
)
def test_given_a_file_that_breaks_off_when_read_then_what_comes_before_is_there_and_it_says_so(
    tmp_path, kind
):
    path = logs.KINDS[kind](tmp_path)
    os.truncate(path, path.stat().st_size * 3 // 5)
    notes = []
    with LogReader(path, notes.append) as log:
        messages = list(log.messages())
        assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()[: len(messages)]]
        assert 10 <= len(messages) == log.count < 40
        assert {t.name: t.type_name for t in log.topics.values()} == {
            "/text": logs.TEXT,
            "/numbers": logs.NUMBERS,
        }
        assert (log.start_ns, log.end_ns) == (messages[0].t_ns, messages[-1].t_ns)
        assert log.findings.unindexed == 1
    assert any(str(path) in text and "no usable index" in text for text in notes)
    assert any("offset" in text for text in notes)


@pytest.mark.parametrize(("kind", "tool"), [("mcap", "mcap recover"), ("bag", "rosbag reindex")])
def test_given_no_index_and_a_damaged_record_then_what_comes_before_is_there_and_a_tool_is_named(
    tmp_path, kind, tool
):
    path = logs.KINDS[kind](tmp_path)
    content = path.read_bytes()
    at = (
        chunk_offsets(path)[2]
        if kind == "mcap"
        else [m.start() for m in re.finditer(rb"op=\x05", content)][2] - 30
    )
    os.truncate(path, len(content) - 20)
    overwrite(path, at, b"\xff" * 60)
    messages, notes, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()[: len(messages)]]
    assert 10 <= len(messages) < 30
    assert findings.bytes_skipped > 0
    assert notes[-1].endswith(f"; `{tool}` may find more")
    assert "are left out: " in notes[-1]


@pytest.mark.parametrize("kind", ["mcap", "mcap zstd", "bag bz2"])
def test_given_a_chunk_that_is_damaged_when_read_then_it_alone_is_left_out_and_nobody_looks_at_it_for_other_messages(
    tmp_path, kind
):
    path = logs.KINDS[kind](tmp_path)
    offset = 8413 if kind == "bag bz2" else chunk_offsets(path)[1]
    overwrite(path, offset + 400, b"\x55\xaa" * 4)
    with LogReader(path) as log:
        assert list(log.messages({"/other"})) == []
        assert len(list(log.messages(start_ns=logs.START_NS + 15 * logs.STEP_NS))) == 10
        assert log.findings.chunks_lost == 0
    messages, notes, findings = read(path)
    lost = 40 - len(messages)
    assert 0 < lost < 20
    written = [entry[2] for entry in logs.cdr()]
    before = next(number for number, m in enumerate(messages) if m.data != written[number])
    assert [m.data for m in messages] == written[:before] + written[before + lost :]
    assert findings.chunks_lost == 1
    text, count = notes
    assert text.startswith(f"log {path}: the chunk at offset {offset:,} is damaged")
    assert count.startswith(f"log {path}: of the messages that it says it has, lost are: ")
    assert findings.messages_lost == lost


def test_given_many_damaged_chunks_when_read_twice_then_a_few_are_said_and_each_is_counted_once(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap", chunk_bytes=500)
    offsets = chunk_offsets(path)
    for offset in offsets[2:]:
        overwrite(path, offset + 100, b"\x55\xaa" * 4)
    notes = []
    with LogReader(path, notes.append) as log:
        assert len(list(log.messages())) == len(list(log.messages())) < 10
        assert (log.findings.chunks_lost, len(notes)) == (len(offsets) - 2, 7)
        assert log.findings.messages_lost > 30
    assert "only counted" in notes[-2]


@pytest.mark.parametrize("claim", [64 << 20, 4000])
def test_given_a_chunk_that_unpacks_to_zeros_when_read_then_no_more_than_it_claims_is_unpacked(
    tmp_path, claim
):
    packed = zstandard.compress(bytes(64 << 20))
    fields = struct.pack("<QQQII", logs.START_NS, logs.START_NS, claim, 0, 4) + b"zstd"
    content = fields + struct.pack("<Q", len(packed)) + packed
    path = logs.mcap(tmp_path / "log.mcap")
    head = path.read_bytes()[: chunk_offsets(path)[-1]]
    path.write_bytes(head + struct.pack("<BQ", 6, len(content)) + content)
    tracemalloc.start()
    try:
        messages, notes, findings = read(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(messages) >= 30, findings.chunks_lost) == (True, 1)
    assert notes[-1].endswith("is damaged: one of its records is not sound; it is left out")
    assert peak_bytes < claim + (8 << 20)


def unindexed(writer, drop):
    """An MCAP writer's chunk that goes without its index: `all` of it, or that of `one` channel."""
    index = writer._Writer__chunk_indices[1]
    numbers = list(index.message_index_offsets)
    for number in numbers if drop == "all" else numbers[:1]:
        del index.message_index_offsets[number]
    if drop == "all":
        index.message_index_length = 0
    elif drop == "one, with its length":
        index.message_index_length -= 16 * 4 + 15


def loose(writer, number):
    """Messages 10 to 19 stand beside the chunks."""
    if number == 10:
        writer._Writer__finalize_chunk()
        writer.kept, writer._Writer__chunk_builder = writer._Writer__chunk_builder, None
    elif number == 20:
        writer._Writer__chunk_builder = writer.kept


@pytest.mark.parametrize("topics", [None, {"/text"}, {"/numbers"}])
@pytest.mark.parametrize("how", ["all", "one", "one, with its length", "loose"])
def test_given_an_index_without_some_messages_when_read_then_every_message_is_there(tmp_path, how, topics):
    path, entries = tmp_path / "log.mcap", logs.cdr()
    before_each = loose if how == "loose" else lambda writer, number: None
    at_end = (lambda writer: None) if how == "loose" else lambda writer: unindexed(writer, how)
    logs.mcap(path, entries, chunk_bytes=2000, before_each=before_each, at_end=at_end)
    notes = []
    with LogReader(path, notes.append) as log:
        wanted = [entry[2] for entry in entries if topics is None or entry[0] in topics]
        assert [message.data for message in log.messages(topics)] == wanted
        assert (log.count, log.findings.messages_lost) == (len(entries), 0)
    assert notes == [f"log {path}: has no usable index, so it was searched from begin to end"]


def test_given_statistics_of_more_messages_than_there_are_when_opened_then_the_difference_is_said_and_counted(
    tmp_path,
):
    path = tmp_path / "log.mcap"

    def at_end(writer):
        writer._Writer__statistics.message_count += 7
        writer._Writer__statistics.channel_message_counts[1] += 7

    messages, notes, findings = read(logs.mcap(path, at_end=at_end))
    assert (len(messages), findings.messages_lost) == (40, 7)
    assert f"log {path}: of the messages that it says it has, lost are: 7 of 27 on /text" in notes


def test_given_metadata_of_more_messages_than_there_are_when_opened_then_it_says_so(tmp_path):
    folder = logs.rosbag2(tmp_path / "log")
    metadata = folder / "metadata.yaml"
    metadata.write_text(
        metadata.read_text("utf-8").replace("message_count: 20", "message_count: 25"), "utf-8"
    )
    _, notes, _ = read(folder)
    (text,) = notes
    assert text.endswith(
        "its metadata says that it has messages on /text 25 instead of 20, /numbers 25 instead of 20"
    )


@pytest.mark.parametrize(
    "odd_ns", [0, 1, 2**63 - 1, 2**63 + 5, 2**64 - 1, logs.START_NS - 2 * 86_400 * 10**9]
)
@pytest.mark.parametrize("kind", ["mcap", "mcap without chunks", "db3", "bag"])
def test_given_one_receipt_time_far_off_when_read_then_it_is_named_and_set_aside(tmp_path, kind, odd_ns):
    if (kind == "db3" and odd_ns >= 2**63) or (kind == "bag" and odd_ns >= 2**32 * 10**9):
        pytest.skip("the format has no such time")
    entries = logs.cdr()
    entries[12] = (*entries[12][:3], odd_ns)
    path = tmp_path / "log"
    if kind == "bag":
        logs.ros1_bag(path, odd_ns={12: odd_ns})
    elif kind == "db3":
        path = logs.storage_file(logs.rosbag2(path, StoragePlugin.SQLITE3, entries=entries))
    else:
        logs.mcap(path, entries, chunking=kind == "mcap")
    messages, notes, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in entries if entry[3] != odd_ns]
    assert (findings.set_aside, findings.messages_lost) == (1, 0)
    (text,) = [text for text in notes if "index" not in text]
    assert text.endswith(
        f": 1 message on /text, received at {odd_ns} ns, more than a day from all others: set aside"
    )
    with LogReader(path) as log:
        assert (log.start_ns, log.end_ns) == (entries[0][3], entries[-1][3])
        assert log.count == 39
        assert len(list(log.messages({"/text"}))) == 19


def test_given_a_clock_that_was_set_during_the_log_when_read_then_all_of_it_is_there(tmp_path):
    entries = [(*entry[:3], entry[3] - logs.START_NS) for entry in logs.cdr()] + logs.cdr()
    messages, notes, findings = read(logs.mcap(tmp_path / "log.mcap", entries))
    assert (len(messages), findings.set_aside) == (80, 0)
    assert ["no message is read for 1,699,999,999.805 s" in text for text in notes] == [True]


@pytest.mark.parametrize("kind", ["mcap", "mcap of one chunk", "db3", "bag"])
@pytest.mark.parametrize(
    ("by_s", "says"),
    [
        (-3600, "messages are written after later ones, by about 3,600.0 s"),
        (-0.5, "messages are written after later ones, by about 0.5 s"),
        (3600, "no message is read for 3,600.005 s, until that of 1700003600100000000 ns on /text"),
    ],
)
def test_given_a_step_of_the_clock_when_read_then_all_messages_come_in_order_and_it_says_by_how_much(
    tmp_path, kind, by_s, says
):
    moved = [at + round(by_s * 1e9) * (number >= 20) for number, (*_, at) in enumerate(logs.cdr())]
    entries = [(*of, at) for (*of, _), at in zip(logs.cdr(), moved, strict=True)]
    path, notes = tmp_path / "log", []
    {
        "bag": lambda: logs.ros1_bag(path, odd_ns=dict(enumerate(moved))),
        "db3": lambda: logs.rosbag2(path, StoragePlugin.SQLITE3, entries=entries),
        "mcap": lambda: logs.mcap(path, entries),
        "mcap of one chunk": lambda: logs.mcap(path, entries, chunk_bytes=100_000),
    }[kind]()
    with LogReader(path, notes.append) as log:
        assert [message.t_ns for message in log.messages()] == sorted(moved)
    assert len([text for text in notes if says in text]) == 1


def test_given_odd_stamps_when_read_then_topic_value_and_count_are_said_and_the_messages_come_as_they_are(
    tmp_path,
):
    kind, at_ns = "geometry_msgs/msg/PointStamped", logs.START_NS
    stamps = [at_ns, at_ns, 0, at_ns - 2_000_000_000, at_ns + 1, at_ns + 3_600_000_000_000]
    message, notes = message_types.empty_message(kind), []
    data = [restamped(bytes(message_types.encode(message, kind)), stamp_ns) for stamp_ns in stamps]
    entries = [("/point", kind, each, at_ns + number) for number, each in enumerate(data)]
    with LogReader(logs.mcap(tmp_path / "log.mcap", entries), notes.append) as log:
        assert [message.data for message in log.messages()] == data
    assert [text.partition(": ")[2] for text in notes] == [
        "topic /point: odd among 6 stamps: 1 zero; 1 repeated; 1 going back by up to 2.000 s; 1 more than 10 s"
        " off, up to 3,600.000 s ahead of their receipt"
    ]


def test_given_no_receipt_time_that_ros_can_count_when_opened_then_it_is_an_error(tmp_path):
    entries = [(*entry[:3], entry[3] + 2**63) for entry in logs.cdr()]
    with pytest.raises(LogError, match="no message has a receipt time below"):
        read(logs.mcap(tmp_path / "log.mcap", entries))


def test_given_a_chunk_that_says_a_later_begin_when_read_then_disorder_is_named_once_and_counted(tmp_path):
    def at_end(writer):
        writer._Writer__chunk_indices[0].message_start_time += 25 * logs.STEP_NS

    messages, notes, findings = read(logs.mcap(tmp_path / "log.mcap", chunk_bytes=500, at_end=at_end))
    assert len(messages) == 40
    assert findings.out_of_order > 0
    assert sum("not in the order of time" in text for text in notes) == 1


# -- SQLite


def test_given_a_db3_that_breaks_off_when_read_then_what_comes_before_is_there_and_a_tool_is_named(
    tmp_path,
):
    path = logs.storage_file(logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3, entries=logs.cdr(200)))
    os.truncate(path, path.stat().st_size * 3 // 5 // 4096 * 4096)
    with LogReader(path) as log:
        assert log.count == -1
    messages, notes, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr(200)[: len(messages)]]
    assert len(messages) >= 80
    assert findings.messages_lost > 0
    assert all(
        "the database is damaged" in text and "`sqlite3 .recover` may find more" in text for text in notes
    )


def killed_recorder(folder):
    """A `.db3` of which the last message is in the journal beside it."""
    path = logs.KINDS["db3"](folder)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    late = logs.START_NS + 10**9, logs.cdr()[0][2]
    db.execute("INSERT INTO messages(topic_id, timestamp, data) VALUES (1, ?, ?)", late)
    db.commit()
    copy = folder / "killed.db3"
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    db.close()
    return copy


def test_given_a_recorder_that_was_killed_with_messages_in_its_journal_when_read_then_they_come(tmp_path):
    copy = killed_recorder(tmp_path)
    inside = set(tmp_path.iterdir())
    messages, _, _ = read(copy)
    assert (len(messages), messages[-1].t_ns) == (41, logs.START_NS + 10**9)
    assert set(tmp_path.iterdir()) == inside  # reading leaves a log as it was


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_given_a_journal_that_nobody_may_write_beside_when_read_then_the_others_come_and_it_says_so():
    with tempfile.TemporaryDirectory() as folder:
        path = killed_recorder(Path(folder))
        Path(folder).chmod(0o555)
        os.seteuid(65534)  # nobody
        try:
            messages, notes, _ = read(path)
        finally:
            os.seteuid(0)
    assert len(messages) == 40
    assert notes == [
        f"log {path}: its last messages, in killed.db3-wal, cannot be read: unable to open database file"
    ]


def test_given_a_database_that_breaks_off_within_a_page_when_read_then_it_says_what_may_be_wrong(tmp_path):
    path = logs.KINDS["db3"](tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    messages, notes, findings = read(path)
    assert len({*(entry[2] for entry in logs.cdr())} - {message.data for message in messages}) == 1
    assert (len(notes), findings.chunks_lost) == (1, 1)
    assert "breaks off within a page: a message may hold up to 100 wrong bytes" in notes[0]


# -- folders


def split(folder):
    metadata = folder / "metadata.yaml"
    metadata.write_text(
        metadata.read_text().replace("- log.mcap", "- log.mcap\n  - gone.mcap\n  - bad.mcap", 1)
    )
    for name in ("bad.mcap", "more.mcap"):
        (folder / name).write_bytes(b"not an mcap")


def metadata(text):
    return lambda folder: (folder / "metadata.yaml").write_text(text, encoding="latin-1")


def unpacked(folder):
    (folder / "metadata.yaml").unlink()
    (folder / "log.db3.zstd").write_bytes(zstandard.compress((folder / "log.db3").read_bytes()))


WRONG_HASH = "RIHS01_" + "0" * 64
LESS_THAN_WHOLE = {
    "no metadata": ("rosbag2 mcap", lambda folder: (folder / "metadata.yaml").unlink(), 40,
                    ["has no metadata.yaml; the files in the folder are read: log.mcap$"]),
    **{f"metadata {text!r}": (kind, metadata(text), 40, ["its metadata.yaml .*; the files in the folder are read: log"])
       for text, kind in (("a: [", "rosbag2 sqlite3"), ("- 1", "rosbag2 mcap, messages compressed"),
                          ("rosbag2_bagfile_information: {}", "rosbag2 mcap"), ("\xff", "rosbag2 mcap"))},
    "a file that is named twice, and the folder": ("rosbag2 mcap", metadata(
        "rosbag2_bagfile_information: {relative_file_paths: [log.mcap, '', log.mcap]}"), 40,
        ["files that are not there: log$"]),
    "no metadata, and a file beside what it was unpacked to": ("rosbag2 sqlite3", unpacked, 40,
        ["has no metadata.yaml; the files in the folder are read: log.db3$"]),
    "missing, damaged and more files": ("rosbag2 mcap", split, 40, [
        "files that are not there: gone.mcap", "left out: more.mcap", "bad.mcap.*the other files are read"]),
    "recorder of ROS 1 killed": ("bag", lambda path: overwrite(
        path, path.read_bytes().index(b"index_pos=") + len(b"index_pos="), bytes(8)), 40, ["has no usable index"]),
    "another encoding": ("db3", lambda path: sql(
        path, "UPDATE topics SET serialization_format = 'json' WHERE name = '/text'"), 20,
        ["topic /text: serialized as 'json'; it has to be 'cdr'; left out"]),
    "another hash, no definition": ("db3", lambda path: sql(
        path, f"UPDATE topics SET type_description_hash = '{WRONG_HASH}' WHERE name = '/text'",
        "DELETE FROM message_definitions"), 40,
        [rf"String: the log defines it in another way \({WRONG_HASH}\) than this machine \(RIHS01_df668c74"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LESS_THAN_WHOLE)
def test_given_a_log_that_is_less_than_whole_when_read_then_what_is_there_comes_and_it_says_what_is(
    tmp_path, case
):
    kind, damage, count, told = LESS_THAN_WHOLE[case]
    path = logs.KINDS[kind](tmp_path)
    damage(path)
    messages, notes, findings = read(path)
    assert [m.data for m in messages] == [
        data for topic, _, data, _ in logs.cdr() if count == 40 or topic != "/text"
    ]
    assert (len(messages), len(notes), findings.chunks_lost) == (count, len(told), 0)
    for words in told:
        assert any(re.search(words, text) for text in notes), notes


def test_given_a_compressed_file_with_a_damaged_block_when_read_then_what_comes_before_it_is_there(
    tmp_path,
):
    entries = logs.cdr(size=20_000)
    folder = logs.rosbag2(tmp_path / "log", mode=CompressionMode.FILE, entries=entries)
    file = logs.storage_file(folder)
    with zstandard.ZstdDecompressor().stream_reader(file.open("rb")) as reader:
        raw = reader.read()
    frames = [zstandard.compress(raw[at : at + 50_000]) for at in range(0, len(raw), 50_000)]
    frames[4] = b"\xff" * 50
    file.write_bytes(b"".join(frames))
    messages, notes, _ = read(folder)
    assert [m.data for m in messages] == [entry[2] for entry in entries[: len(messages)]]
    assert len(messages) >= 12
    assert notes[0].startswith(f"log {file}: is damaged after 200,000 unpacked bytes (")


# -- types

OWN_TYPE = "parking_msgs/msg/Slot"
OWN_TEXT = (
    "std_msgs/Header header\nSide side\nfloat64[4] at\n"
    + "=" * 80
    + "\nMSG: parking_msgs/Side\nuint8 value\n"
)


def test_given_a_type_that_only_the_log_knows_when_read_then_its_bytes_pass_and_can_be_decoded(
    tmp_path, monkeypatch
):
    data = b"\x00\x01\x00\x00" + struct.pack("<iIIBB2x4d", 5, 6, 1, 0, 3, 1.0, 2.0, 3.0, 4.0)
    entry = "/slot", OWN_TYPE, data, logs.START_NS
    path = logs.mcap(tmp_path / "log.mcap", [entry], definitions={OWN_TYPE: OWN_TEXT})
    with LogReader(path) as log:
        (message,) = log.messages()
        assert (message.type_name, message.data) == (OWN_TYPE, data)
        decoded = log.decode(message)
        assert log.write_definitions(["/slot"], tmp_path / "prefix")
    assert (decoded.header.stamp.sec, decoded.side.value, decoded.at.tolist()) == (
        5,
        3,
        [1.0, 2.0, 3.0, 4.0],
    )
    elsewhere = get_typestore(Stores.ROS2_JAZZY)  # as another process has it
    monkeypatch.setattr(message_types, "_store", lambda: elsewhere)
    monkeypatch.setenv("AMENT_PREFIX_PATH", str(tmp_path / "prefix"))
    assert message_types.decode(data, OWN_TYPE).side.value == 3


def test_given_another_definition_than_ours_when_read_then_it_says_which_and_decodes_by_the_logs(tmp_path):
    text = "uint32 number\nstring data\n"
    data = b"\x00\x01\x00\x00" + struct.pack("<II3s", 7, 3, b"ab\x00")
    path = logs.mcap(
        tmp_path / "log.mcap", [("/text", logs.TEXT, data, logs.START_NS)], definitions={logs.TEXT: text}
    )
    notes = []
    with LogReader(path, notes.append) as log:
        (message,) = log.messages()
        assert (log.decode(message).number, log.decode(message).data) == (7, "ab")
        assert log.findings.types_differing == 1
    assert re.search(
        r"/text: std_msgs/msg/String: the log defines it in another way \(RIHS01_\w+\)|\(\)", notes[0]
    )
    assert (
        "this machine (RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18)" in notes[0]
    )


@pytest.mark.parametrize("name", ["", "../../x"])
def test_given_a_name_that_is_no_types_when_decoded_then_it_says_so(tmp_path, name):
    entry = "/odd", name, b"\0\1\0\0\7", logs.START_NS
    path = logs.mcap(tmp_path / "log.mcap", [entry], definitions={name: "uint8 a\n"})
    with LogReader(path) as log:
        (message,) = log.messages()
        assert message.data == b"\0\1\0\0\7"
        with pytest.raises(UnknownMessageType, match="does not have the form"):
            log.decode(message)


def test_given_a_topic_with_two_types_when_read_then_that_of_most_messages_comes_and_it_says_so(tmp_path):
    entries = [("/both", kind, data, at) for _, kind, data, at in logs.cdr()[:5]]
    notes = []
    with LogReader(logs.mcap(tmp_path / "log.mcap", entries), notes.append) as log:
        assert (log.topics["/both"].type_name, log.topics["/both"].count) == (logs.TEXT, 3)
        assert [m.data for m in log.messages()] == [entry[2] for entry in entries if entry[1] == logs.TEXT]
    both = f"{logs.TEXT} (3 messages), {logs.NUMBERS} (2 messages); only {logs.TEXT} is read"
    assert [text.partition(": ")[2] for text in notes] == [f"topic /both has more than one type: {both}"]


# -- nothing to read


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.mcap", None, "does not exist"),
        ("empty.bag", b"", "is empty"),
        ("notes.txt", b"hello", "is no log; it has to be"),
        ("log.mcap", b"\x89MCAP0\r\nnot really", "`mcap recover` may find more"),
        ("log.bag", b"#ROSBAG V2.0\nnot really", "nothing in it can be read: it is damaged"),
        (
            "log.bag",
            b"#ROSBAG V1.2\n",
            "is not a ROS 1 bag of version 2.0: it begins with b'#ROSBAG V1.2\\n'",
        ),
        ("notes.bag.active", b"some notes", "is not a ROS 1 bag of version 2.0"),
        ("log.db3", b"\x89not really", "is not a database of SQLite: it begins with b'\\x89not really'"),
        ("cut.db3", b"SQLite format 3\0", "`sqlite3 .recover` may find more"),
        ("notes.mcap.zstd", b"some notes", "is not a file compressed by zstd"),
        (
            "log.mcap.zstd",
            zstandard.compress(b"notes"),
            "log.mcap.zstd: is not an MCAP file: it begins with b'notes'",
        ),
        *(
            ("", metadata, f": {says}, and there is no .mcap, .db3 or .bag file in it")
            for metadata, says in (
                (None, "has no metadata.yaml"),
                (b"x: 1", "its metadata.yaml is not that of a rosbag2"),
                (
                    b"rosbag2_bagfile_information: {relative_file_paths: [gone.mcap]}",
                    "of the files that its metadata.yaml names none is there (gone.mcap)",
                ),
            )
        ),
    ],
)
def test_given_no_log_when_opened_then_one_line_says_which_and_why(tmp_path, name, content, says):
    path, notes = tmp_path / name, []
    if content is not None:
        (path if name else path / "metadata.yaml").write_bytes(content)
    with pytest.raises(LogError) as error:
        LogReader(path, notes.append)
    assert notes == []
    assert str(error.value).startswith(f"log {path}: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_given_more_files_than_may_be_open_when_opened_then_that_is_the_error_and_no_file_is_left_out(
    tmp_path, limited
):
    for number in range(40):
        logs.mcap(tmp_path / f"log_{number}.mcap", logs.cdr(2))
    too_many = pytest.raises(LogError, match=r"\.mcap: cannot be read: Too many open files")
    with limited("NOFILE", len(os.listdir("/proc/self/fd")) + 20), too_many:
        LogReader(tmp_path)


def test_given_what_is_no_log_itself_when_opened_then_the_error_says_what_it_is_and_nobody_waits(tmp_path):
    os.mkfifo(tmp_path / "log.mcap")
    (tmp_path / "week" / "both").mkdir(parents=True)
    logs.rosbag2(tmp_path / "week" / "monday")
    logs.ros1_bag(tmp_path / "week" / "both" / "old.bag")
    logs.mcap(tmp_path / "week" / "both" / "new.mcap")
    for path, says in (
        (tmp_path / "log.mcap", "is no file and no folder"),
        (tmp_path / "week", "name one of the logs in it: monday"),
        (tmp_path / "week" / "both", r"different kinds, new\.mcap and old\.bag, and no metadata\.yaml"),
        (Path("/proc/self/mem"), r"^log /proc/self/mem: cannot be read: Input/output error$"),
    ):
        with pytest.raises(LogError, match=says):
            LogReader(path)


# -- anything at all

FUZZED = ("mcap", "mcap zstd", "mcap without chunks", "db3", "bag", "bag lz4")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The bytes of a sound log of each kind, and a folder to write damaged ones to."""
    folder = tmp_path_factory.mktemp("sound")
    content = {}
    for kind in FUZZED:
        (folder / kind).mkdir()
        content[kind] = logs.KINDS[kind](folder / kind).read_bytes()
    return folder, content


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_given_any_truncation_and_any_flipped_bytes_when_read_then_messages_or_a_log_error_and_no_more(
    sound, data
):
    folder, contents = sound
    kind = data.draw(st.sampled_from(FUZZED))
    content = bytearray(contents[kind])
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)
    ):
        content[at] = value
    path = folder / f"damaged.{kind.split()[0]}"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    try:
        with LogReader(path) as log:
            assert all(isinstance(m.data, bytes) and isinstance(m.t_ns, int) for m in log.messages())
    except LogError as error:
        assert str(path) in str(error)  # noqa: PT017 - either end is right
        assert "\n" not in str(error)  # noqa: PT017
