"""Replays with real workers, on small logs of points."""

import math
import threading

import pytest
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from torchperf_ros.replay.logs.log_reader import LogError, LogReader
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayError, ReplayOptions
from torchperf_ros.replay.replay_record import ReplayRecord

from .conftest import MS, START_NS, drive, one_stage, point, two_stages, write_points

pytestmark = pytest.mark.filterwarnings("error")


def run(log, folder, *, values=None, **options):
    said = []
    options = {"overrides": values or one_stage(), "output": folder / "out.mcap", **options}
    return replay(log, ReplayOptions(**options), say=said.append), said


def counted(result, stage="first"):
    """What a stage published: (x, frames observed, z)."""
    return [(m.message.point.x, m.message.point.y, m.message.point.z) for m in result.stage(stage).messages]


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """Twelve frames, among them one that raises, one that is NaN, one that kills its worker; two stages."""
    folder = tmp_path_factory.mktemp("fast")
    messages = drive(12, words={3: "raise", 5: "nan", 7: "sigkill", 9: "bad_input"})
    messages += [
        ("/other", START_NS + number * 100 * MS + MS, point(START_NS, 10.0 + number)) for number in range(4)
    ]
    log = write_points(folder / "log", sorted(messages, key=lambda m: m[1]))
    return run(log, folder, values=two_stages(), inputs="all")


def test_given_frames_that_fail_when_replayed_fast_then_each_has_its_outcome_and_its_reason(fast):
    assert [len(stage.frames) for stage in fast[0].stages.values()] == [12, 12]
    stage = fast[0].stage("first")
    assert stage.superseded == stage.stale == 0
    assert stage.outcomes == {"on_time": 8, "error": 1, "invalid": 1, "crashed": 1, "bad_input": 1}
    assert stage.reasons[3].startswith("RuntimeError: as ordered (")
    assert any("SIGKILL" in line for line in fast[1])
    assert any(anomaly.name == "first: model error" for _, anomaly in stage.anomalies)


def test_given_two_stages_when_replayed_fast_then_the_second_takes_what_was_latest_in_the_log(fast):
    others = {}
    for x, _, z in counted(fast[0], "second"):
        others.setdefault(x, z)  # what is held for a frame that failed joins a later one
    received_ms = {float(number): number * 40 + 2 for number in range(12) if number not in {3, 5, 7, 9}}
    assert others == {x: 10.0 + min(3, (at_ms - 1) // 100) for x, at_ms in received_ms.items()}


def test_given_a_replay_when_its_output_is_read_then_outputs_rows_and_inputs_lie_on_one_time_line(fast):
    with LogReader(fast[0].output) as log:
        messages = list(log.messages())
        counts = {name: topic.count for name, topic in log.topics.items()}
    assert counts["/point"] == 12
    assert counts["/other"] == 4
    assert counts["/perf/latency_stages"] == 24
    assert counts["/perf/latency"] == 12
    assert counts["/perf/anomaly"] >= 1
    assert counts["/perf/memory"] == counts["/perf/memory_stats"] == counts["/diagnostics"] >= 1
    times = [message.t_ns for message in messages if message.topic == "/first"]
    assert times == sorted(times)
    assert times[0] == START_NS + 2 * MS


def test_given_a_replay_when_summed_up_then_log_model_parameters_and_machine_are_named(fast):
    summary = fast[0].summary
    assert summary["log"]["messages"] == 16
    assert (
        len(summary["log"]["sha256"])
        == len(summary["params_sha256"])
        == len(summary["model"]["first"])
        == 64
    )
    assert summary["machine"]["fingerprint"]
    assert summary["memory"]["rss_mib"][0] > 10
    assert [stage["answered"] for stage in summary["stages"]] == [12, 12]


def test_given_a_log_when_replayed_in_real_time_then_outputs_are_those_of_the_fast_replay(tmp_path):
    log = write_points(
        tmp_path / "log", drive(4, period_ms=300)
    )  # on a busy machine, too, no frame waits for another
    values = one_stage(budget_ms=1000.0, actions=["drift -> lower_tier"])
    real, _ = run(log, tmp_path, values=values, pace="real")
    fast, _ = run(log, tmp_path, values=values)
    assert real.stage("first").outcomes == {"on_time": 4}
    assert (
        real.stage("first").frames["output_hash"].tolist()
        == fast.stage("first").frames["output_hash"].tolist()
    )
    assert real.summary["troubles"][0].startswith("first: its actions are not applied")
    assert real.summary["took_s"] > 0.8  # 3 periods of 300 ms cannot take less


def test_given_a_frame_that_stalls_when_replayed_in_real_time_then_it_is_late_and_what_waited_is_dropped(
    tmp_path,
):
    words = dict.fromkeys(
        range(5, 40), "sleep"
    )  # each of them: on a busy machine any may be the one that is dropped
    log = write_points(tmp_path / "log", drive(40, period_ms=20, words=words))
    result, _ = run(log, tmp_path, values=one_stage(budget_ms=60.0), pace="real")
    stage = result.stage("first")
    assert stage.outcomes["late"] >= 1
    assert any("tier full on worker 0 was not done" in reason for reason in stage.reasons.values())
    assert stage.received == 40 == len(stage.frames) + stage.superseded


def test_given_stamps_that_are_zero_repeat_and_go_back_when_replayed_then_each_frame_is_answered(tmp_path):
    stamps = [0, START_NS, START_NS, START_NS - 3_000 * MS, START_NS + 20_000 * MS, START_NS + 40 * MS]
    messages = [
        ("/point", START_NS + n * 40 * MS, point(stamp, float(n))) for n, stamp in enumerate(stamps)
    ]
    result, _ = run(write_points(tmp_path / "log", messages), tmp_path)
    assert [x for x, _, _ in counted(result)] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    ages_ms = result.stage("first").frames["age_ms"]
    assert math.isnan(ages_ms[0])
    assert ages_ms[3] == pytest.approx(3120.0)
    assert ages_ms[4] == pytest.approx(-19_840.0)


@pytest.mark.parametrize(
    ("topics", "own", "options", "error", "words"),
    [
        (["/point"], {}, {"start_s": 60.0}, LogError, r"has no message on /point in that time"),
        (
            ["/a", "/b"],
            {"adapter": "replay_adapters:NeverBuilt"},
            {},
            LogError,  # before models are loaded
            r"first takes point .*several such topics",
        ),
        (
            ["/point"],
            {"adapter": "no_such_module:Adapter"},
            {},
            ReplayError,
            r"stage first cannot run: .*no_such_module",
        ),
    ],
)
def test_given_a_log_or_a_stage_that_cannot_be_used_when_replayed_then_it_is_refused_and_nothing_is_written(
    tmp_path, topics, own, options, error, words
):
    log = write_points(tmp_path / "log", [(topic, START_NS, point(START_NS)) for topic in topics])
    with pytest.raises(error, match=words):
        run(log, tmp_path, values={**one_stage(**own), "start_timeout_s": 30.0}, **options)
    assert list(tmp_path.glob("*.mcap")) + list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize(
    "frames", [2, 300]
)  # the disk is full when the file is closed; while it is written
def test_given_a_full_disk_when_replayed_then_that_is_said_and_nothing_has_the_final_name(tmp_path, frames):
    """`/dev/full` stands for the disk: every write to it fails as on a full one."""
    log = write_points(
        tmp_path / "log", drive(frames, period_ms=1, words=dict.fromkeys(range(frames), "x" * 8000))
    )
    (tmp_path / ".out.mcap.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as error:
        run(log, tmp_path, inputs="all")
    assert error.value.filename == str(tmp_path / "out.mcap")
    assert not (tmp_path / "out.mcap").exists()


@pytest.mark.usefixtures("ctrl_c_at_the_16th")
@pytest.mark.parametrize("pace", ["fast", "real"])
def test_given_ctrl_c_while_a_frame_is_given_when_replayed_then_that_frame_is_answered_too(tmp_path, pace):
    log = write_points(tmp_path / "log", drive(60, words={15: "sleep"}))  # the last one to be given
    result, said = run(log, tmp_path, pace=pace)
    first = result.stage("first")
    assert not result.complete
    assert first.received == result.summary["log"]["messages"] == 16
    assert len(first.frames) == first.received - first.superseded > 0
    assert not any("never answered" in line for line in said)


def test_given_a_type_that_only_the_log_knows_when_replayed_then_workers_decode_it(tmp_path):
    store, name = get_typestore(Stores.ROS2_JAZZY), "robot_of_one/msg/Blinker"
    store.register(get_types_from_msg("std_msgs/Header header\nint8 side", name))
    header = store.types["std_msgs/msg/Header"](
        store.types["builtin_interfaces/msg/Time"](1_700_000_000, 0), ""
    )
    with Writer(tmp_path / "log", version=9, storage_plugin=StoragePlugin.MCAP) as writer:
        connection = writer.add_connection("/blinker", name, typestore=store)
        for number in range(3):
            data = store.serialize_cdr(store.types[name](header=header, side=number - 1), name)
            writer.write(connection, START_NS + number * 40 * MS, data)
    result, _ = run(tmp_path / "log", tmp_path, values=one_stage(adapter="replay_adapters:Blinking"))
    assert [x for x, _, _ in counted(result)] == [-1.0, 0.0, 1.0]
    assert not any(result.summary["log"]["findings"].values())


def test_given_a_stage_that_keeps_dying_when_replayed_fast_then_the_results_reach_up_to_there(tmp_path):
    log = write_points(tmp_path / "log", drive(12, words=dict.fromkeys(range(2, 12), "sigkill")))
    result, said = run(log, tmp_path)
    assert not result.complete
    assert any("stage first cannot run any more" in line for line in said)
    assert result.stage("first").outcomes["on_time"] == 2


def test_given_inputs_that_the_replay_publishes_itself_when_replayed_then_they_never_mix(tmp_path):
    messages = drive(4) + [("/counted", START_NS + 500 * MS, point(START_NS, -7.0))]
    log, before = write_points(tmp_path / "log", messages), set(threading.enumerate())
    with pytest.raises(LogError, match=r"--inputs: /counted is what the replay itself publishes"):
        run(log, tmp_path, inputs="/point,/counted", remap={"point": "/point"})
    result, _ = run(log, tmp_path, inputs="all", remap={"point": "/point"})
    assert [x for x, _, _ in counted(result)] == [0.0, 1.0, 2.0, 3.0]
    assert set(threading.enumerate()) <= before  # no thread and no other file is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out.mcap"]


def test_given_an_error_of_ours_when_replayed_then_the_frame_that_it_cost_is_counted(tmp_path, monkeypatch):
    """A port that raises stands for any error on a stage's thread."""
    publish = ReplayRecord.publish

    def fail_once(record, index, payload):
        monkeypatch.setattr(ReplayRecord, "publish", publish)
        raise RuntimeError("as ordered")

    monkeypatch.setattr(ReplayRecord, "publish", fail_once)
    result, said = run(write_points(tmp_path / "log", drive(4)), tmp_path)
    assert len(result.stage("first").frames) == 3
    assert "frames that were begun and never answered: 1" in said
