"""Sound logs of every kind, and what is asked of them."""

import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
from mcap.writer import CompressionType
from rosbags.rosbag2 import StoragePlugin

from torchperf_ros.replay.logs.log_reader import LogError, LogFindings, LogReader

from . import small_logs as logs

FIELD_LOGS = Path(__file__).parents[4] / "shared" / "fieldlogs"


@pytest.mark.parametrize("kind", logs.KINDS)
def test_given_a_sound_log_of_any_kind_when_read_then_each_message_comes_as_written_and_nothing_is_said(
    tmp_path, kind
):
    notes = []
    with LogReader(logs.KINDS[kind](tmp_path), notes.append) as log:
        assert [(m.topic, m.type_name, m.data, m.t_ns) for m in log.messages()] == logs.cdr()
        assert {(t.name, t.type_name, t.count) for t in log.topics.values()} == {
            ("/text", logs.TEXT, 20),
            ("/numbers", logs.NUMBERS, 20),
        }
        last_ns = logs.START_NS + 19 * logs.STEP_NS + logs.STEP_NS // 2
        assert (log.count, log.start_ns, log.end_ns) == (40, logs.START_NS, last_ns)
        assert not kind.startswith("bag") or [t.name for t in log.topics.values() if t.latched] == ["/text"]
        if kind not in {"mcap without indexes", "mcap without chunks"}:
            assert (notes, log.findings) == ([], LogFindings())


@pytest.mark.parametrize("kind", ["mcap", "mcap without chunks", "db3", "bag"])
def test_given_a_topic_and_a_time_range_when_read_then_only_those_messages_come_without_the_end(
    tmp_path, kind
):
    start_ns, end_ns = logs.START_NS + 3 * logs.STEP_NS, logs.START_NS + 7 * logs.STEP_NS
    with LogReader(logs.KINDS[kind](tmp_path)) as log:
        found = [(m.topic, m.t_ns) for m in log.messages({"/text"}, start_ns, end_ns)]
        assert found == [("/text", logs.START_NS + number * logs.STEP_NS) for number in range(3, 7)]
        assert list(log.messages({"/other"})) == []
        assert list(log.messages(set())) == []
        assert len(list(log.messages())) == 40  # may be read again


def test_given_two_iterations_at_once_when_they_take_turns_then_each_gets_all_messages(tmp_path):
    with LogReader(logs.KINDS["mcap"](tmp_path)) as log:
        pairs = list(zip(log.messages(), log.messages(), strict=True))
    assert len(pairs) == 40
    assert all(first == second for first, second in pairs)


def test_given_a_log_of_many_chunks_when_read_then_one_chunk_is_held_at_a_time(tmp_path):
    chunk_bytes, chunks = 1 << 20, 12
    entries = logs.cdr(count=2 * chunks, size=chunk_bytes)
    path = logs.mcap(
        tmp_path / "log.mcap", entries, chunk_bytes=chunk_bytes, compression=CompressionType.ZSTD
    )
    del entries
    with LogReader(path) as log:
        messages = log.messages()
        next(messages)
        tracemalloc.start()
        try:
            assert sum(1 for _ in messages) == 2 * chunks - 1
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 4.5 * chunk_bytes  # packed, unpacked, its messages, and the message before


def test_given_chunks_that_overlap_in_time_when_read_then_messages_still_come_in_the_order_of_their_time(
    tmp_path,
):
    entries = logs.cdr()
    late = entries[::2] + entries[1::2]  # first all of one topic, then all of the other
    with LogReader(logs.mcap(tmp_path / "log.mcap", late, chunk_bytes=500)) as log:
        assert [m.t_ns for m in log.messages()] == [entry[3] for entry in entries]
        assert log.findings.out_of_order == 0


def test_given_equal_times_when_read_then_the_order_of_writing_is_kept(tmp_path):
    entries = [(topic, kind, data, logs.START_NS) for topic, kind, data, _ in logs.cdr()]
    for path in (
        logs.mcap(tmp_path / "log.mcap", entries),
        logs.rosbag2(tmp_path / "log", entries=entries),
    ):
        with LogReader(path) as log:
            assert [m.data for m in log.messages()] == [entry[2] for entry in entries]


@pytest.mark.parametrize("storage", list(StoragePlugin))
def test_given_a_log_split_into_files_when_read_then_they_are_one_log(tmp_path, storage):
    halves = logs.cdr()[:20], logs.cdr()[20:]
    folder = tmp_path / "log"
    folder.mkdir()
    for number, half in enumerate(halves):
        file = logs.storage_file(logs.rosbag2(tmp_path / f"half_{number}", storage, entries=half))
        shutil.move(file, folder / f"log_{number}{file.suffix}")
    names = "\n".join(f"    - {file.name}" for file in sorted(folder.iterdir(), reverse=True))
    (folder / "metadata.yaml").write_text(
        f"rosbag2_bagfile_information:\n  relative_file_paths:\n{names}\n"
    )
    with LogReader(folder) as log:
        assert [m.data for m in log.messages()] == [entry[2] for entry in logs.cdr()]
        assert log.topics["/text"].count == 20


def test_given_an_mcap_with_the_messages_of_ros1_when_read_then_they_are_cdr(tmp_path):
    entries = [
        (topic, kind.replace("/msg", ""), bytes(logs.ROS1.serialize_ros1(message, kind)), at_ns)
        for topic, kind, at_ns, message in logs.messages(logs.ROS1)
    ]
    definitions = {
        entry[1]: logs.ROS1.generate_msgdef(entry[1].replace("/", "/msg/"))[0] for entry in entries
    }
    with LogReader(
        logs.mcap(tmp_path / "log.mcap", entries, encoding="ros1", definitions=definitions)
    ) as log:
        assert [(m.topic, m.type_name, m.data, m.t_ns) for m in log.messages()] == logs.cdr()


@pytest.mark.parametrize(("durability", "latched"), [("1", True), ("transient_local", True), ("2", False)])
def test_given_qos_profiles_of_old_and_new_form_when_opened_then_a_latched_topic_is_told(
    tmp_path, durability, latched
):
    metadata = {"offered_qos_profiles": f"- history: 3\n  durability: {durability}\n  depth: 1"}
    with LogReader(logs.mcap(tmp_path / "log.mcap", metadata=metadata)) as log:
        assert log.topics["/text"].latched is latched


def test_given_messages_that_publishers_kept_when_a_part_is_read_then_it_begins_with_them(tmp_path):
    with LogReader(logs.ros1_bag(tmp_path / "log.bag")) as log:  # keeps `/text`
        messages, begin_ns = list(log.messages()), logs.START_NS + 2 * logs.STEP_NS + 1
        kept = messages[4]._replace(t_ns=begin_ns)
        assert list(log.part(log.topics, begin_ns, None)) == [kept, *messages[5:]]
        assert list(log.part({"/numbers"}, begin_ns, None)) == messages[5::2]
        assert list(log.part(log.topics, None, begin_ns)) == messages[:5]
        assert list(log.part(log.topics, log.end_ns + 1, None)) == []
    entries = [("/tf_static", *each[1:]) for each in logs.cdr()]
    with LogReader(logs.mcap(tmp_path / "log.mcap", [*entries[:4:2], *entries[::2]])) as log:
        found = log.part(log.topics, logs.START_NS + 6 * logs.STEP_NS, None)
        assert [message.data for message in found] == [entry[2] for entry in entries[::2]]


def test_given_a_topic_without_messages_when_opened_then_it_is_there_with_none(tmp_path):
    with LogReader(logs.mcap(tmp_path / "empty.mcap", [])) as log:
        assert (log.topics, log.count, log.start_ns, log.end_ns, list(log.messages())) == ({}, 0, 0, 0, [])


@pytest.mark.parametrize(
    "name", ["a b?c#d%20e", "Straße 東", "line\nbreak", os.fsdecode(b"not UTF-8 \xff")]
)
@pytest.mark.parametrize("kind", ["mcap", "mcap zstd", "db3", "bag"])
def test_given_another_name_even_with_odd_characters_when_opened_then_the_content_says_what_it_is(
    tmp_path, kind, name
):
    with LogReader(logs.KINDS[kind](tmp_path).rename(tmp_path / name)) as log:
        assert log.count == len(list(log.messages())) == 40


@pytest.mark.parametrize("t_ns", [-5, 0, (1 << 63) - 1])
def test_given_a_time_before_1970_or_at_the_end_of_time_when_read_then_the_message_comes(tmp_path, t_ns):
    entries = [(*entry[:3], t_ns) for entry in logs.cdr(2)]
    with LogReader(logs.rosbag2(tmp_path / "log", StoragePlugin.SQLITE3, entries=entries)) as log:
        assert [(m.topic, m.t_ns) for m in log.messages()] == [("/text", t_ns), ("/numbers", t_ns)]


FIELD = {
    "highway_960x540_25hz": (221, {"/camera/image/compressed": "sensor_msgs/msg/CompressedImage"}, 8.8),
    "tum_fr1_rpy_head60_mcap": (899, {"/imu": "sensor_msgs/msg/Imu"}, 5.747509),
    "tum_fr1_rpy_head60_sqlite3": (899, {"/ground_truth/pose": "geometry_msgs/msg/PoseStamped"}, 5.747509),
    "robots/zaki0929_2019-01-17_expt04.bag": (3267, {"/odom": "nav_msgs/msg/Odometry"}, 121.560367004),
    "robots/robot_localization_test1_husky.bag": (
        16806,
        {"/imu/data": "sensor_msgs/msg/Imu"},
        395.307116140,
    ),
    "lidar/embag_test_luminar.bag": (
        15,
        {"/luminar_pointcloud": "sensor_msgs/msg/PointCloud2"},
        7.588637635,
    ),
    "edge/scan_tools_laser_scan_matcher_demo_badindex.bag": (
        360,
        {"/scan": "sensor_msgs/msg/LaserScan"},
        35.811282012,
    ),
    "edge/example-lz4.bag": (
        8647,
        dict.fromkeys(["/tf", "/tf_static"], "tf2_msgs/msg/TFMessage"),
        21.700086256,
    ),
    "edge/empty_bag": (0, {"/rosout": "rcl_interfaces/msg/Log"}, 0.0),
}


ODD_STAMPS = {
    "robots/zaki0929_2019-01-17_expt04.bag": [
        "977 stamps: 977 more than 10 s off, up to 79.768 s ahead of their receipt",
        "962 stamps: 962 more than 10 s off, up to 79.774 s ahead of their receipt",
    ],
    "lidar/embag_test_luminar.bag": [
        "5 stamps: 5 more than 10 s off, up to 20,543,620.216 s behind their receipt",
        *["5 stamps: 5 more than 10 s off, up to 1,604,515,137.223 s behind their receipt"] * 2,
    ],
    "edge/example-lz4.bag": ["10 stamps: 1 going back by up to 1.913 s"],
}


@pytest.mark.parametrize("name", FIELD)
def test_given_a_field_log_when_read_then_all_of_it_comes_in_order_and_decodes(name):
    if not (FIELD_LOGS / name).exists():
        pytest.skip(f"{FIELD_LOGS / name} is not there")
    count, topics, seconds = FIELD[name]
    notes = []
    with LogReader(FIELD_LOGS / name, notes.append) as log:
        assert {topic: log.topics[topic].type_name for topic in topics} == topics
        assert (log.count, (log.end_ns - log.start_ns) / 1e9) == (count, pytest.approx(seconds, abs=1e-9))
        times, seen = [], set()
        for message in log.messages():
            times.append(message.t_ns)
            if message.topic not in seen:  # the first of each topic
                seen.add(message.topic)
                log.decode(message)
    assert (len(times), times) == (count, sorted(times))
    assert len(seen) == sum(topic.count > 0 for topic in log.topics.values())
    odd = [text.partition("odd among ")[2] for text in notes]
    assert (odd, log.findings) == (ODD_STAMPS.get(name, []), LogFindings())


def test_given_the_field_log_of_another_serialization_when_opened_then_it_says_which_and_which_can_be_read():
    path = FIELD_LOGS / "edge" / "wrong_rmw_test"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with pytest.raises(
        LogError, match=r"/test_topic and 1 more: serialized as 'wrong_format'; it has to be 'cdr'"
    ):
        LogReader(path)
