"""Damaged, incomplete and mixed-up logs: what can be read is read, what is lost is said and counted."""

import os
import re
import resource
import sqlite3
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcap.exceptions import McapError
from mcap.reader import make_reader
from mcap.writer import CompressionType
from rosbags.rosbag2 import CompressionMode, StoragePlugin

from torchperf_ros.core.errors import UnknownMessageType
from torchperf_ros.replay.logs.log_reader import LogError, LogFindings, LogReader

from . import small_logs as logs

ROOT = Path(__file__).resolve().parents[3]


def read(path, **options):
    """Messages, what was said, and the findings."""
    said = []
    with LogReader(path, said.append, **options) as log:
        return list(log.messages()), said, log.findings


def overwrite(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def chunk_offsets(path):
    with path.open("rb") as file:
        return [index.chunk_start_offset for index in make_reader(file).get_summary().chunk_indexes]


# -- MCAP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mcap", "mcap zstd", "mcap lz4", "mcap without chunks"])
def test_given_a_file_that_breaks_off_when_read_then_what_comes_before_is_there_and_it_says_so(tmp_path, kind):
    path = logs.KINDS[kind](tmp_path)
    os.truncate(path, path.stat().st_size * 2 // 5)
    with path.open("rb") as file, pytest.raises((McapError, struct.error)):
        make_reader(file).get_summary()
    messages, said, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()[: len(messages)]]
    assert len(messages) >= 10
    assert findings.unindexed == 1
    assert any(str(path) in text and "no usable index" in text for text in said)
    assert any("offset" in text for text in said)


def test_given_an_mcap_without_its_index_when_opened_then_topics_counts_and_times_are_found_anyway(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap", compression=CompressionType.ZSTD)
    last = chunk_offsets(path)[-1]
    os.truncate(path, last)
    with LogReader(path) as log:
        messages = list(log.messages())
        assert {(t.name, t.type_name) for t in log.topics.values()} == {
            ("/text", logs.TEXT),
            ("/numbers", logs.NUMBERS),
        }
        assert log.count == len(messages) == sum(topic.count for topic in log.topics.values())
        assert (log.start_ns, log.end_ns) == (messages[0].t_ns, messages[-1].t_ns)


@pytest.mark.parametrize("more_bytes", [0, 5])
def test_given_a_file_that_breaks_off_between_the_indexes_of_a_chunk_when_a_topic_is_asked_for_then_none_is_missed(
    tmp_path, more_bytes
):
    path = logs.mcap(tmp_path / "log.mcap")
    with path.open("rb") as file:
        _, chunk, *_ = make_reader(file).get_summary().chunk_indexes
    os.truncate(path, max(chunk.message_index_offsets.values()) + more_bytes)
    with LogReader(path) as log:
        all_messages = list(log.messages())
        for topic in ("/text", "/numbers"):
            own = [message for message in all_messages if message.topic == topic]
            assert list(log.messages({topic})) == own
            assert len(own) == log.topics[topic].count >= 8


@pytest.mark.parametrize("kind", ["mcap", "mcap zstd"])
def test_given_a_chunk_with_a_wrong_checksum_when_read_then_it_alone_is_left_out_with_file_and_offset(tmp_path, kind):
    path = logs.KINDS[kind](tmp_path)
    offset = chunk_offsets(path)[1]
    overwrite(path, offset + 400, b"\x55\xaa" * 4)
    messages, said, findings = read(path)
    lost = 40 - len(messages)
    assert 0 < lost < 20
    written = [entry[2] for entry in logs.cdr()]
    before = next(number for number, m in enumerate(messages) if m.data != written[number])
    assert [m.data for m in messages] == written[:before] + written[before + lost :]
    assert (findings.chunks_lost, findings.messages_lost) == (1, lost)
    (text,) = said
    assert text.startswith(f"log {path}: the chunk at offset {offset:,} is damaged")


def test_given_many_damaged_chunks_when_read_twice_then_a_few_are_said_and_each_is_counted_once(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap", chunk_bytes=500)
    offsets = chunk_offsets(path)
    for offset in offsets[2:]:
        overwrite(path, offset + 100, b"\x55\xaa" * 4)
    said = []
    with LogReader(path, said.append) as log:
        assert len(list(log.messages())) == len(list(log.messages())) < 10
        assert (log.findings.chunks_lost, len(said)) == (len(offsets) - 2, 6)
    assert "only counted" in said[-1]


def test_given_a_wrong_checksum_when_asked_not_to_check_then_all_messages_come(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap")
    overwrite(path, chunk_offsets(path)[1] + 400, b"\x55\xaa" * 4)
    messages, said, findings = read(path, check_crc=False)
    assert (len(messages), said, findings) == (40, [], LogFindings())


def test_given_a_chunk_that_unpacks_to_zeros_when_read_then_it_is_damaged_and_nobody_goes_through_all_of_it(tmp_path):
    zeros = bytes(64 << 20)
    packed = zstandard.compress(zeros)
    fields = struct.pack("<QQQII", logs.START_NS, logs.START_NS, len(zeros), 0, 4) + b"zstd"
    content = fields + struct.pack("<Q", len(packed)) + packed
    path = logs.mcap(tmp_path / "log.mcap")
    head = path.read_bytes()[: chunk_offsets(path)[-1]]
    path.write_bytes(head + struct.pack("<BQ", 6, len(content)) + content)
    messages, said, findings = read(path)
    assert (len(messages) >= 30, findings.chunks_lost) == (True, 1)
    assert (
        said[-1]
        == f"log {path}: the chunk at offset {len(head):,} is damaged: one of its records is not sound; it is left out"
    )


def test_given_a_damaged_record_in_a_file_without_index_when_read_then_it_goes_on_at_the_next_chunk(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap")
    offsets = chunk_offsets(path)
    os.truncate(path, path.stat().st_size - 20)
    overwrite(path, offsets[2], b"\xff" * 30)
    messages, said, findings = read(path)
    assert messages[-1].data == logs.cdr()[-1][2]
    assert 25 <= len(messages) < 40
    assert findings.bytes_skipped > 0
    assert any(f"at offset {offsets[2]:,} are no sound record" in text for text in said)


def test_given_a_damaged_message_outside_of_chunks_when_read_then_it_goes_on_at_the_next_one(tmp_path):
    path = logs.KINDS["mcap without chunks"](tmp_path)
    at = path.read_bytes().index(b"message 9\x00") - 4 - 4 - 22 - 9
    overwrite(path, at, b"\xee" * 9)
    messages, _, findings = read(path)
    assert [m.data for m in messages] == [e[2] for e in logs.cdr() if b"message 9\x00" not in e[2]]
    assert findings.bytes_skipped > 0


def test_given_a_summary_whose_checksum_is_wrong_when_read_then_it_is_not_believed(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap")
    content = path.read_bytes()
    overwrite(path, content.rindex(b"/text"), b"/tex_")
    messages, _, findings = read(path)
    assert {m.topic for m in messages} == {"/text", "/numbers"}
    assert (len(messages), findings.unindexed) == (40, 1)


def test_given_messages_that_were_written_late_and_no_index_when_read_then_disorder_is_said_and_counted(tmp_path):
    entries = logs.cdr()
    entries[10], entries[30] = entries[30], entries[10]
    path = logs.mcap(tmp_path / "log.mcap", entries, chunking=False)
    with LogReader(path) as log:
        assert [m.t_ns for m in log.messages()] == sorted(entry[3] for entry in entries)  # one run of 1 MiB at most
    entries = logs.cdr(size=1 << 20)
    entries[0], entries[30] = entries[30], entries[0]
    damaged = logs.mcap(tmp_path / "chunks.mcap", entries, chunk_bytes=1 << 20)
    for second, offset in enumerate(chunk_offsets(damaged)):  # times that are not those of the messages
        overwrite(damaged, offset + 9, struct.pack("<Q", logs.START_NS + second * 10**9))
    os.truncate(damaged, damaged.stat().st_size - 9)
    messages, said, findings = read(damaged)
    assert sorted(m.t_ns for m in messages) == sorted(entry[3] for entry in entries)
    assert findings.out_of_order == 2  # the message that came too early, and the one that came too late
    assert sum("not in the order of time" in text for text in said) == 1


# -- ROS 1 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bag", "bag bz2", "bag lz4"])
def test_given_a_ros1_bag_that_breaks_off_when_read_then_what_comes_before_is_there(tmp_path, kind):
    path = logs.KINDS[kind](tmp_path)
    os.truncate(path, path.stat().st_size * 3 // 5)
    messages, said, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()[: len(messages)]]
    assert len(messages) >= 10
    assert findings.unindexed == 1
    assert any("offset" in text for text in said)


def test_given_a_ros1_bag_of_a_recorder_that_was_killed_when_read_then_all_of_it_comes(tmp_path):
    path = logs.ros1_bag(tmp_path / "log.bag.active")
    at = path.read_bytes().index(b"index_pos=") + len(b"index_pos=")
    overwrite(path, at, bytes(8))
    messages, _, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()]
    assert (findings.unindexed, findings.chunks_lost) == (1, 0)


def test_given_a_ros1_bag_with_a_damaged_chunk_and_index_when_read_then_it_goes_on_at_the_next_chunk(tmp_path):
    path = logs.ros1_bag(tmp_path / "log.bag")
    content = path.read_bytes()
    second = [match.start() for match in re.finditer(rb"op=\x05", content)][1]
    overwrite(path, second - 30, b"\xff" * 60)
    messages, said, findings = read(path)
    assert messages[-1].data == logs.cdr()[-1][2]
    assert 25 <= len(messages) < 40
    assert findings.bytes_skipped > 0
    assert any("no sound record" in text for text in said)


def test_given_a_ros1_bag_with_an_index_that_leads_over_a_chunk_when_read_then_that_chunk_is_found(tmp_path):
    path = logs.ros1_bag(tmp_path / "log.bag")
    content = path.read_bytes()
    os.truncate(path, len(content) - 9)  # so that it is searched
    at = content.index(b"count=", content.index(b"op=\x04")) + 10  # how long an index of messages is
    overwrite(path, at, struct.pack("<I", 3000))
    messages, said, findings = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()]
    assert findings.bytes_skipped > 0
    assert not any(": 0 bytes" in text for text in said)


# -- SQLite -----------------------------------------------------------------------------------------------------------


def test_given_a_db3_that_breaks_off_when_read_then_what_sqlite_still_finds_is_there(tmp_path):
    path = logs.storage_file(logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3, entries=logs.cdr(200)))
    os.truncate(path, path.stat().st_size * 3 // 5 // 4096 * 4096)
    messages, said, _ = read(path)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr(200)[: len(messages)]]
    assert len(messages) >= 80
    assert any("damaged" in text for text in said)
    with LogReader(path) as log:
        assert log.count == -1


def test_given_a_db3_with_a_damaged_page_when_read_then_messages_before_and_after_it_come(tmp_path):
    path = logs.storage_file(logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3, entries=logs.cdr(200)))
    at = path.read_bytes().index(b"message 40\x00") // 4096 * 4096
    overwrite(path, at, b"\xff" * 4096)
    messages, _, findings = read(path)
    data = [m.data for m in messages]
    assert data[0] == logs.cdr(200)[0][2]
    assert data[-1] == logs.cdr(200)[-1][2]
    assert 150 < len(set(data)) == len(data) < 200
    assert findings.messages_lost > 0


def test_given_rows_before_and_after_damaged_pages_when_read_then_those_next_to_them_come_too(tmp_path):
    entries = [entry for entry in logs.cdr(2000) if entry[0] == "/text"]
    path = logs.storage_file(logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3, entries=entries))
    with sqlite3.connect(path) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'timestamp_idx'").fetchone()
    content, lost = path.read_bytes(), set()
    pages = [at for at in range(0, len(content), 4096) if content[at] == 0x0D]  # with the rows of a table
    of_rows = [at for at in pages if b"message 40" in content[at : at + 4096]]
    for at in (*of_rows[-2:], pages[-1]):
        overwrite(path, at, b"\xff" * 4096)
        lost |= {data for _, _, data, _ in entries if data in content[at : at + 4096]}
    overwrite(path, (root - 1) * 4096, b"\xff" * 4096)  # the rows have to be found without the index
    messages, _, _ = read(path)
    assert len(lost) > 200
    assert [m.data for m in messages] == [data for _, _, data, _ in entries if data not in lost]


def killed_recorder(folder):
    """A `.db3` of which the last message is in the journal beside it."""
    path = logs.KINDS["db3"](folder)
    db = sqlite3.connect(path)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(
        "INSERT INTO messages(topic_id, timestamp, data) VALUES (1, ?, ?)", (logs.START_NS + 10**9, logs.cdr()[0][2])
    )
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


def test_given_a_journal_that_another_process_opens_meanwhile_when_closed_then_what_that_one_uses_stays(tmp_path):
    copy = killed_recorder(tmp_path)
    code = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); print(db.execute('SELECT count(*) FROM messages')"
    command = [sys.executable, "-c", code + ".fetchone(), flush=True); sys.stdin.read()", str(copy)]
    reader = LogReader(copy)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"(41,)\n"
        reader.close()
        assert Path(f"{copy}-shm").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_given_a_journal_that_nobody_may_write_beside_when_read_then_the_others_come_and_it_says_so():
    with tempfile.TemporaryDirectory() as folder:
        path = killed_recorder(Path(folder))
        Path(folder).chmod(0o555)
        os.seteuid(65534)  # nobody
        try:
            messages, said, _ = read(path)
        finally:
            os.seteuid(0)
    assert len(messages) == 40
    assert said == [f"log {path}: its last messages, in killed.db3-wal, cannot be read: unable to open database file"]


def test_given_a_database_of_something_else_when_opened_then_it_says_what_is_missing(tmp_path):
    path = tmp_path / "other.db3"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t(x)")
    with pytest.raises(LogError, match=r"other\.db3: its topics cannot be read.*no tables `topics` and `messages`"):
        LogReader(path)


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, "", "a: [", "rosbag2_bagfile_information: {}", "x: 1", "\xff"])
@pytest.mark.parametrize("kind", ["rosbag2 mcap", "rosbag2 sqlite3", "rosbag2 mcap, messages compressed"])
def test_given_a_folder_whose_metadata_is_missing_or_damaged_when_read_then_the_files_in_it_are(
    tmp_path, metadata, kind
):
    folder = logs.KINDS[kind](tmp_path)
    if metadata is None:
        (folder / "metadata.yaml").unlink()
    else:
        (folder / "metadata.yaml").write_text(metadata, encoding="latin-1")
    messages, said, _ = read(folder)
    assert [m.data for m in messages] == [entry[2] for entry in logs.cdr()]
    assert len(said) == 1
    assert "metadata.yaml" in said[0]
    assert said[0].endswith("the files in the folder are read")


def test_given_a_split_log_of_which_a_file_is_missing_or_damaged_when_read_then_the_others_are(tmp_path):
    folder = logs.rosbag2(tmp_path / "log")
    metadata = folder / "metadata.yaml"
    metadata.write_text(metadata.read_text().replace("- log.mcap", "- log.mcap\n  - gone.mcap\n  - bad.mcap", 1))
    (folder / "bad.mcap").write_bytes(b"not an mcap")
    (folder / "more.mcap").write_bytes(b"whatever")
    messages, said, _ = read(folder)
    assert len(messages) == 40
    assert any("files that are not there: gone.mcap" in text for text in said)
    assert any("left out: more.mcap" in text for text in said)
    assert any("bad.mcap" in text and "the other files are read" in text for text in said)


def test_given_ros1_and_ros2_in_one_folder_when_opened_then_the_error_names_both(tmp_path):
    logs.ros1_bag(tmp_path / "old.bag")
    logs.mcap(tmp_path / "new.mcap")
    with pytest.raises(LogError, match=r"different kinds, new\.mcap and old\.bag, and no metadata\.yaml"):
        LogReader(tmp_path)


def test_given_a_compressed_file_that_breaks_off_when_read_then_what_can_be_unpacked_is_there(tmp_path):
    entries = logs.cdr(size=20_000)
    folder = logs.rosbag2(tmp_path / "log", mode=CompressionMode.FILE, entries=entries)
    file = logs.storage_file(folder)
    os.truncate(file, file.stat().st_size * 4 // 5)
    messages, said, _ = read(folder)
    assert [m.data for m in messages] == [entry[2] for entry in entries[: len(messages)]]
    assert len(messages) > 20
    assert all(text.startswith(f"log {file}: ") for text in said)
    os.truncate(file, 100)
    with pytest.raises(LogError, match=re.escape(f"log {file}: nothing ")):
        LogReader(folder)


def test_given_a_compressed_file_with_a_damaged_block_when_read_then_what_comes_before_it_is_there(tmp_path):
    entries = logs.cdr(size=20_000)
    folder = logs.rosbag2(tmp_path / "log", mode=CompressionMode.FILE, entries=entries)
    file = logs.storage_file(folder)
    with zstandard.ZstdDecompressor().stream_reader(file.open("rb")) as reader:
        raw = reader.read()
    frames = [zstandard.compress(raw[at : at + 50_000]) for at in range(0, len(raw), 50_000)]
    frames[4] = b"\xff" * 50
    file.write_bytes(b"".join(frames))
    messages, said, _ = read(folder)
    assert [m.data for m in messages] == [entry[2] for entry in entries[: len(messages)]]
    assert len(messages) >= 12
    assert said[0].startswith(f"log {file}: is damaged after 200,000 unpacked bytes (")


# -- types ------------------------------------------------------------------------------------------------------------

OWN_TYPE = "parking_msgs/msg/Slot"
OWN_TEXT = (
    "std_msgs/Header header\nSide side\nfloat64[4] corners\n" + "=" * 80 + "\nMSG: parking_msgs/Side\nuint8 value\n"
)


def test_given_a_type_that_only_the_log_knows_when_read_then_its_bytes_pass_and_it_can_be_decoded(tmp_path):
    data = b"\x00\x01\x00\x00" + struct.pack("<iIIBB2x4d", 5, 6, 1, 0, 3, 1.0, 2.0, 3.0, 4.0)
    path = logs.mcap(
        tmp_path / "log.mcap", [("/slot", OWN_TYPE, data, logs.START_NS)], definitions={OWN_TYPE: OWN_TEXT}
    )
    with LogReader(path) as log:
        (message,) = log.messages()
        assert (message.type_name, message.data) == (OWN_TYPE, data)
        decoded = log.decode(message)
        assert log.write_definitions(["/slot"], tmp_path / "prefix")
    assert (decoded.header.stamp.sec, decoded.side.value, decoded.corners.tolist()) == (5, 3, [1.0, 2.0, 3.0, 4.0])
    code = f"from torchperf_ros.core.message_types import decode; print(decode({data!r}, {OWN_TYPE!r}).side.value)"
    elsewhere = os.environ | {"AMENT_PREFIX_PATH": str(tmp_path / "prefix")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=elsewhere, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "3\n", done.stderr


def test_given_another_definition_than_ours_when_read_then_it_says_which_and_decodes_by_the_logs(tmp_path):
    text = "uint32 number\nstring data\n"
    data = b"\x00\x01\x00\x00" + struct.pack("<II3s", 7, 3, b"ab\x00")
    path = logs.mcap(tmp_path / "log.mcap", [("/text", logs.TEXT, data, logs.START_NS)], definitions={logs.TEXT: text})
    said = []
    with LogReader(path, said.append) as log:
        (message,) = log.messages()
        assert (log.decode(message).number, log.decode(message).data) == (7, "ab")
        assert log.findings.types_differing == 1
    assert re.search(
        r"topic /text: std_msgs/msg/String: the log defines it in another way \(RIHS01_\w+\)|\(\)", said[0]
    )
    assert "this machine (RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18)" in said[0]


@pytest.mark.parametrize("defined", [True, False])
def test_given_a_hash_that_is_not_the_definitions_when_read_then_it_names_type_and_both(tmp_path, defined):
    wrong = "RIHS01_" + "0" * 64
    folder = logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3)
    path = logs.storage_file(folder)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE topics SET type_description_hash = ? WHERE name = '/text'", (wrong,))
        if not defined:
            db.execute("DELETE FROM message_definitions")
    messages, said, findings = read(path)
    assert (len(messages), findings.types_differing) == (40, 1)
    (text,) = said
    assert "std_msgs/msg/String: its hash in the log" in text
    assert wrong in text
    assert "RIHS01_df668c740482bbd48fb39d76a70dfd4bd59db1288021743503259e948f6b1a18" in text


def test_given_a_ros1_type_with_another_md5_when_read_then_it_names_type_and_both(tmp_path):
    path = logs.ros1_bag(tmp_path / "log.bag")
    path.write_bytes(path.read_bytes().replace(b"992ce8a1687cec8c8bd883ec73ca41d1", b"0" * 32))
    messages, said, _ = read(path)
    assert len(messages) == 40
    assert any("0" * 32 in text and "992ce8a1687cec8c8bd883ec73ca41d1" in text for text in said)


@pytest.mark.parametrize("name", ["", "a", "a/b/c/d", "../../x", "a/msg/../b"])
def test_given_a_name_that_is_no_types_when_decoded_then_it_says_so(tmp_path, name):
    path = logs.mcap(
        tmp_path / "log.mcap", [("/odd", name, b"\0\1\0\0\7", logs.START_NS)], definitions={name: "uint8 a\n"}
    )
    with LogReader(path) as log:
        (message,) = log.messages()
        assert message.data == b"\0\1\0\0\7"
        with pytest.raises(UnknownMessageType, match="does not have the form"):
            log.decode(message)


def test_given_a_topic_with_two_types_when_read_then_it_says_so_and_each_message_tells_its_own(tmp_path):
    entries = [("/both", kind, data, at) for _, kind, data, at in logs.cdr()[:5]]
    said = []
    with LogReader(logs.mcap(tmp_path / "log.mcap", entries), said.append) as log:
        assert (log.topics["/both"].type_name, log.topics["/both"].count) == (logs.TEXT, 5)
        assert [m.type_name for m in log.messages()] == [entry[1] for entry in entries]
    assert any("/both has more than one type" in text and logs.NUMBERS in text for text in said)


def test_given_one_topic_in_another_encoding_when_read_then_it_alone_is_left_out(tmp_path):
    path = logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3)
    with sqlite3.connect(logs.storage_file(path)) as db:
        db.execute("UPDATE topics SET serialization_format = 'json' WHERE name = '/text'")
    messages, said, _ = read(path)
    assert {m.topic for m in messages} == {"/numbers"}
    assert any("topic /text: serialized as 'json'; it has to be 'cdr'; left out" in text for text in said)


# -- nothing to read --------------------------------------------------------------------------------------------------


def test_given_a_file_that_the_system_does_not_give_out_when_opened_then_the_error_says_which_and_why():
    with pytest.raises(LogError, match=r"^log /proc/self/mem: cannot be read: Input/output error$"):
        LogReader(Path("/proc/self/mem"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_given_no_permission_when_opened_then_the_error_says_which_and_why(tmp_path):
    path = logs.mcap(tmp_path / "log.mcap")
    os.seteuid(65534)  # nobody
    try:
        with pytest.raises(LogError, match=r"^log .*: cannot be read: Permission denied$"):
            LogReader(path)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.mcap", None, "does not exist"),
        ("empty.bag", b"", "is empty"),
        ("notes.txt", b"hello", "is no log; it has to be"),
        ("log.mcap", b"\x89MCAP0\r\nnot really" * 99, "nothing in it can be read"),
        ("log.db3", b"\x89not really" * 99, "not a database"),
        ("log.bag", b"#ROSBAG V2.0\nnot really" * 99, "nothing in it can be read"),
        ("log.bag", b"#ROSBAG V1.2\n" * 99, "nothing in it can be read"),
        (
            "notes.mcap",
            b"my notes",
            r"it is not an MCAP file, as it begins with b'my notes', not with b'\x89MCAP0\r\n'",
        ),
        ("notes.mcap", b"some notes of a drive\n" * 99, "not an MCAP file, as it begins with b'some notes of a "),
        (
            "notes.bag",
            b"some notes of a drive\n",
            "not a ROS 1 bag of version 2.0, as it begins with b'some notes of a '",
        ),
        (
            "notes.bag.active",
            b"some notes of a drive\n",
            "not a ROS 1 bag of version 2.0, as it begins with b'some notes ",
        ),
        ("notes.db3", b"some notes of a drive\n", "not a database of SQLite, as it begins with b'some notes of a '"),
        (
            "notes.mcap.zstd",
            b"some notes of a drive\n",
            "nothing of it can be unpacked: it begins with b'some', not with",
        ),
        ("cut.db3", b"SQLite format 3\0", "not a database"),
        ("cut.mcap", b"\x89MCAP", "not an MCAP file"),
    ],
)
def test_given_no_log_when_opened_then_one_line_says_which_and_why(tmp_path, name, content, says):
    path, said = tmp_path / name, []
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LogError) as error:
        LogReader(path, said.append)
    assert said == []
    assert str(error.value).startswith(f"log {path}: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (None, "has no metadata.yaml"),
        ("a: [", "its metadata.yaml is not YAML: "),
        ("x: 1", "its metadata.yaml names no files, so it is not that of a rosbag2"),
        ("- 1", "its metadata.yaml names no files, so it is not that of a rosbag2"),
        (
            "rosbag2_bagfile_information: {relative_file_paths: [gone.mcap]}",
            "of the files that its metadata.yaml names none is there (gone.mcap)",
        ),
    ],
)
def test_given_a_folder_without_logs_when_opened_then_one_error_says_what_is_wrong_with_it(tmp_path, metadata, says):
    (tmp_path / "notes.txt").write_text("of a drive")
    if metadata is not None:
        (tmp_path / "metadata.yaml").write_text(metadata)
    said = []
    with pytest.raises(LogError) as error:
        LogReader(tmp_path, said.append)
    assert str(error.value).startswith(f"log {tmp_path}: {says}")
    assert str(error.value).endswith(", and there is no .mcap, .db3 or .bag file in it")
    assert said == []


def test_given_metadata_that_is_a_pipe_when_opened_then_nobody_waits_for_it(tmp_path):
    folder = logs.rosbag2(tmp_path / "log")
    (folder / "metadata.yaml").unlink()
    os.mkfifo(folder / "metadata.yaml")
    messages, said, _ = read(folder)
    assert (len(messages), said) == (40, [f"log {folder}: has no metadata.yaml; the files in the folder are read"])


def test_given_more_files_than_may_be_open_when_opened_then_that_is_the_error_and_no_file_is_left_out(tmp_path):
    for number in range(40):
        logs.mcap(tmp_path / f"log_{number}.mcap", logs.cdr(2))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        with pytest.raises(LogError, match=r"\.mcap: cannot be read: Too many open files; `ulimit -n` says how many"):
            LogReader(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_given_a_pipe_when_opened_then_nobody_waits_for_it(tmp_path):
    os.mkfifo(tmp_path / "log.mcap")
    with pytest.raises(LogError, match="is no file and no folder"):
        LogReader(tmp_path / "log.mcap")


def test_given_a_folder_of_logs_when_opened_then_the_error_names_them(tmp_path):
    logs.rosbag2(tmp_path / "monday")
    with pytest.raises(LogError, match=r"name one of the logs in it: monday"):
        LogReader(tmp_path)


# -- anything at all --------------------------------------------------------------------------------------------------

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


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_given_any_truncation_and_any_flipped_bytes_when_read_then_messages_or_a_log_error_and_nothing_else(
    sound, data
):
    folder, contents = sound
    kind = data.draw(st.sampled_from(FUZZED))
    content = bytearray(contents[kind])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)):
        content[at] = value
    path = folder / f"damaged.{kind.split()[0]}"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    error = outcome(path)
    assert error == "" or (str(path) in error and "\n" not in error)


def outcome(path):
    """The text of the `LogError`, empty if there is none."""
    try:
        with LogReader(path) as log:
            assert all(isinstance(m.data, bytes) and isinstance(m.t_ns, int) for m in log.messages())
    except LogError as error:
        return str(error)
    return ""
