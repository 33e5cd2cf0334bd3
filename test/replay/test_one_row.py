"""One row of a frame.

The stage's answer, the topic, records, run files, `top`, `report` and `compare` say the same.
"""

import json
import math
import socket

import numpy as np
import pytest

from torchperf_ros.api.messages import decode
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.recorder import RecordLog
from torchperf_ros.observe.runs.report import stage_figures
from torchperf_ros.observe.runs.run_log import write_run
from torchperf_ros.observe.telemetry.node_state import NodeState, StageState
from torchperf_ros.observe.telemetry.rows import LatencyRecord, StreamReader, StreamWriter
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.run_reading import load_run, read_runs
from torchperf_ros.workers.frame_ring import FrameRing

from .conftest import MS, START_NS, one_stage, point, write_points

BUDGET_MS, RUN_MS = 50.0, 10.0
ARRAY = "std_msgs/msg/Float64MultiArray"
AGES_MS = {0: 2.0, 100: 2.0, 200: 45.0, 300: 55.0, 400: 2.0, 403: 2.0, 406: 2.0}
"""By when a frame is received.

In time twice, too old for its run, older than its budget, and the last but one of three that come together
is superseded.
"""
WANTED = {
    0: (Outcome.ON_TIME, 48.0, -38.0, False),
    1: (Outcome.ON_TIME, 48.0, -38.0, False),
    2: (Outcome.LATE, 5.0, None, False),
    3: (Outcome.LATE, -5.0, 5.0, True),
    4: (Outcome.ON_TIME, 48.0, -38.0, False),
    6: (Outcome.ON_TIME, 48.0, None, False),
}
"""Outcome, deadline, lateness (None.

The margin decides) and whether it was stale, by the frame's number.
"""


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    """A replay with a worker on a virtual clock: its folder, what its stage answered, and the result."""
    folder = tmp_path_factory.mktemp("drive")
    messages = [
        ("/point", START_NS + at_ms * MS, point(START_NS + round((at_ms - age_ms) * MS), float(at_ms)))
        for at_ms, age_ms in AGES_MS.items()
    ]
    log, times, answers = write_points(folder / "log", messages), folder / "times.yaml", []
    times.write_text(
        json.dumps({"first": {tier: {"inference_ms": RUN_MS} for tier in ("full", "fast")}}), "utf-8"
    )
    values = one_stage(
        budget_ms=BUDGET_MS, budget_from="stamp", fallback=["hold_last"], hold_last_ms=1000.0
    )
    with pytest.MonkeyPatch.context() as patch:
        keep = ReplayRecord._keep
        patch.setattr(
            ReplayRecord,
            "_keep",
            lambda self, index, answer: (answers.append((answer, self._now())), keep(self, index, answer)),
        )
        options = ReplayOptions(
            pace="virtual", step_times=str(times), overrides=values, output=folder / "out.mcap"
        )
        result = replay(log, options)
    return folder, answers, result


def same(rows, answers):
    """Each frame's row has its deadline and lateness, to the microsecond that records keep."""
    assert len(rows) == len(answers) == len(WANTED)
    for row, (answer, _) in zip(rows, answers, strict=True):
        assert int(row["seq"]) == answer.frame.seq
        assert row["lateness_ms"] == pytest.approx(answer.lateness_ms, abs=1e-3)
        assert row["deadline_ms"] == pytest.approx(
            (answer.frame.deadline_ns - answer.frame.received_ns) / MS, abs=1e-3
        )
        assert bool(row["stale"]) == answer.frame.stale
        assert int(row["outcome"]) == answer.outcome


def run_of(path):
    (run,) = read_runs(path, lambda done, total: None)
    return run


def test_given_frames_of_each_kind_when_answered_then_deadline_and_lateness_are_as_the_clock_says(drive):
    _, answers, result = drive
    found = {
        a.frame.seq: (a.outcome, a.total_ms - a.lateness_ms, a.lateness_ms, a.frame.stale)
        for a, _ in answers
    }
    assert set(found) == set(WANTED)  # frame 5 is superseded
    for seq, (outcome, deadline_ms, lateness_ms, stale) in WANTED.items():
        assert found[seq][0] is outcome
        assert found[seq][1] == pytest.approx(deadline_ms, abs=1e-6)
        assert (
            found[seq][2] == pytest.approx(lateness_ms, abs=1e-6)
            if lateness_ms is not None
            else found[seq][2] <= 0
        )
        assert found[seq][3] is stale
    first = result.stage("first")
    assert (first.received, first.superseded, first.stale, len(first.frames)) == (7, 1, 1, 6)


def test_given_the_topic_when_read_from_a_log_then_it_says_the_same(drive):
    folder, answers, _ = drive
    run = run_of(folder / "out.mcap")
    same(run.stages[0].frames, answers)
    assert run.troubles == ()


def test_given_the_recorders_stream_and_records_when_read_then_they_say_the_same(drive):
    folder, answers, _ = drive
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ring, writer = FrameRing(1 << 16), StreamWriter(1 << 16)
    writer.connect(own)
    reader = StreamReader(theirs, writer.ring.fd, [ring.fd])
    stages = [{"name": "first", "tiers": ["full", "fast"], "budget_ms": BUDGET_MS}]
    log = RecordLog(folder / "records", 1 << 20, {"node": "/perf", "versions": {}, "stages": stages})
    for answer, t_ns in answers:
        length, answer.length = answer.length, 0  # its inputs are in the replay's ring, which is gone
        writer.frame(0, t_ns, answer, math.nan)
        answer.length = length
        record = reader.read()
        assert record.row["stale"] == answer.frame.stale
        assert record.row["lateness_ms"] == answer.lateness_ms
        deadline_ns = record.row["received_ns"] + round(record.row["deadline_ms"] * 1e6)
        assert deadline_ns == answer.frame.deadline_ns
        log.frame(record)
    log.tick(answers[-1][1], 0)
    for end in (reader.socket, writer, ring):
        end.close()
    lines = [
        json.loads(line) for line in (folder / "records/records.jsonl").read_text("utf-8").splitlines()
    ]
    frames = [line for line in lines if line["kind"] == "frame"]
    same([{**line, "outcome": Outcome[line["outcome"].upper()]} for line in frames], answers)
    assert [line["input_shapes"] for line in frames] == [
        "1" if a.outcome is Outcome.ON_TIME else None for a, _ in answers
    ]
    same(run_of(folder / "records/records.jsonl").stages[0].frames, answers)


@pytest.mark.parametrize("suffix", ["json", "parquet"])
def test_given_a_run_file_when_read_then_it_says_the_same(drive, suffix):
    folder, answers, result = drive
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = folder / f"run.{suffix}"
    write_run(result.run, path)
    run = run_of(path)
    same(run.stages[0].frames, answers)
    assert run.stages[0].dropped == 1


def test_given_the_topic_when_looked_at_then_top_and_the_demo_have_the_same(drive):
    _, answers, _ = drive
    node, record = NodeState("/perf"), LatencyRecord(0)
    node.stages["first"] = stage = StageState("first")
    for answer, t_ns in answers:
        node.on_frame(decode(record.encode(answer), ARRAY), t_ns)
    assert [seen.lateness_ms for seen in stage.recent] == [answer.lateness_ms for answer, _ in answers]
    assert stage.worst_ms == 5.0


def test_given_the_drive_when_reported_and_compared_then_the_latest_answer_and_the_misses_are_the_same(
    drive,
):
    folder, answers, result = drive
    write_run(result.run, folder / "base.json")
    latest_ms = max(answer.lateness_ms for answer, _ in answers)
    for path in (folder / "out.mcap", folder / "base.json"):
        (stage,) = load_run(path).stages  # as `compare` has it
        figures = stage_figures(stage)
        assert figures.worst_lateness_ms == pytest.approx(latest_ms, abs=1e-6) == pytest.approx(5.0)
        assert figures.outcomes == {Outcome.LATE: 2}
        assert np.mean(stage.missed) == pytest.approx(2 / 6)
