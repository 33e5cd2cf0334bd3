"""Deadlines, ladders and fallbacks on a virtual clock.

What follows from log, parameters, times and seed alone.
"""

import hashlib
import json
import signal

import numpy as np
import pytest

from torchperf_ros.api.outcome import Fallback
from torchperf_ros.observe.runs.run_log import run_of, write_run
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.stage.frame_table import FRAME
from torchperf_ros.workers.worker_process import WorkerProcess

from .conftest import MS, START_NS, drive, one_stage, point, two_stages, write_points


def run(log, folder, times, *, values=None, name="out", **options):
    path = times
    if isinstance(times, dict):
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps(times), encoding="utf-8")
    said = []
    options = {"overrides": values or one_stage(), "output": folder / f"{name}.mcap", **options}
    return (
        replay(log, ReplayOptions(pace="virtual", step_times=str(path), **options), say=said.append),
        said,
    )


def rows(result, stage="first"):
    return result.stage(stage).frames


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_points(tmp_path_factory.mktemp("log") / "log", drive(150))


def test_given_fixed_times_when_replayed_then_every_latency_is_exactly_theirs(log, tmp_path):
    steps = {
        "inference_ms": 12.0,
        "decode_ms": 0.5,
        "preprocess_ms": 1,
        "postprocess_ms": 0.25,
        "overhead_ms": 0.25,
    }
    result, _ = run(log, tmp_path, {"first": {"full": steps}})
    assert set(rows(result)["total_ms"]) == {14.0}
    assert set(rows(result)["inference_ms"]) == {12.0}
    assert result.stage("first").outcomes == {"on_time": 150}


def test_given_a_tier_too_slow_when_replayed_then_the_ladder_takes_the_lower_one_from_the_first_frame(
    log, tmp_path
):
    result, _ = run(log, tmp_path, {"first": {"full": {"inference_ms": 45}, "fast": {"inference_ms": 10}}})
    assert set(rows(result)["tier"]) == {1}
    assert [m.message.point.x for m in result.stage("first").messages][:2] == [1000.0, 1001.0]


def test_given_every_tier_too_slow_when_replayed_then_each_answer_leaves_before_its_deadline(log, tmp_path):
    values = one_stage(fallback=["hold_last"], hold_last_ms=500.0)
    times = {"first": {"full": {"inference_ms": 38.0}}}
    result, _ = run(log, tmp_path, times, values=values, duration_s=2.0)
    assert set(result.stage("first").outcomes) == {"late"}
    assert np.all(rows(result)["lateness_ms"] <= 0)
    assert result.stage("first").received == 50


def test_given_an_anytime_model_when_its_time_is_up_then_the_share_of_its_steps_that_was_done_is_published(
    log, tmp_path
):
    values = one_stage(adapter="replay_adapters:Stepping", tiers=["full"], fallback=["none"])
    times = {"first": {"full": {"inference_ms": [20.0, 36.0, 50.0]}}}  # in 30 ms: all steps, three, two
    options = {"values": values, "seed": 1, "duration_s": 2.0}
    first, second = (run(log, tmp_path, times, name=name, **options)[0] for name in ("a", "b"))
    assert first.output.read_bytes() == second.output.read_bytes()
    stage, frames = first.stage("first"), rows(first)
    assert set(stage.outcomes) == {"on_time", "partial"}
    assert stage.miss_ratio == 0.0
    xs = np.array([message.message.point.x for message in stage.messages])
    steps = xs - np.round((frames["stamp_ns"] - START_NS) / (40 * MS))
    own = [
        (int(step), round(ms / (50 / 4)), round(ms / (36 / 4)))
        for step, ms in zip(steps, frames["inference_ms"], strict=True)
    ]
    assert all(step == 4 for (step, *_), outcome in zip(own, frames["outcome"], strict=True) if not outcome)
    partial = [each for each, outcome in zip(own, frames["outcome"], strict=True) if outcome]
    assert {step for step, *_ in partial} == {2, 3}
    assert all(step in others for step, *others in partial)
    assert "step 2 of tier full was published: tier full on worker" in " ".join(stage.reasons.values())
    assert np.all(np.diff(frames["seq"]) == 1)  # stopped, it takes the next frame

    again, _ = run(log, tmp_path, first.output, name="c", **options)  # as that run's frames went
    assert again.stage("first").outcomes == stage.outcomes


@pytest.mark.parametrize(("run_ms", "outcomes"), [(22.0, {"on_time"}), (32.0, {"late"})])
def test_given_a_lower_stage_then_it_runs_between_the_higher_ones_frames_or_not_at_all(
    tmp_path, run_ms, outcomes
):
    """The higher one runs for 10 of each 40 ms; frames of both come together."""
    messages = drive(60)
    other = [("/other", t_ns + 1, data) for _, t_ns, data in messages]
    log = write_points(tmp_path / "log", sorted(messages + other, key=lambda message: message[1]))
    inputs = {"inputs": {"other": "geometry_msgs/msg/PointStamped"}}
    second = {"adapter": "replay_adapters:Counting", "options": json.dumps(inputs)}
    values = two_stages(first={"priority": 1}, second={**second, "budget_ms": 38.0, "fallback": ["none"]})
    times = {"first": {"full": {"inference_ms": 10}}, "second": {"full": {"inference_ms": run_ms}}}
    result, _ = run(log, tmp_path, times, values=values)
    assert set(result.stage("first").outcomes) == {"on_time"}
    assert set(rows(result)["total_ms"]) == {10.0}
    lower = result.stage("second")
    assert set(lower.outcomes) - {"starting"} == outcomes
    if outcomes == {"late"}:
        begun = [
            why
            for why in list(lower.reasons.values())[8:]
            if "not begun: stage first, of higher" not in why
        ]
        assert len(begun) == 1  # one trial in 2 s
    else:  # it waited until the other one was done
        assert np.all(rows(result, "second")["total_ms"][8:] >= 10.0 + run_ms - 1.0)
        assert np.all(rows(result, "second")["total_ms"] <= 38.0)


def test_given_a_seed_when_replayed_twice_then_the_files_are_the_same_bytes(tmp_path):
    messages = drive(120, words={20: "raise", 40: "nan", 41: "nan", 60: "sigkill"})
    log = write_points(tmp_path / "log", messages)
    values = two_stages(first={"backup": "standby", "budget_ms": 25.0})
    tier = {"inference_ms": {"median": 15, "p99": 40}, "decode_ms": [0.2, 0.4]}
    times = {
        "first": {"full": tier, "fast": {"inference_ms": {"median": 12, "p99": 30}}},
        "second": {"full": tier},
    }
    first, second = (run(log, tmp_path, times, values=values, name=name, seed=1)[0] for name in ("a", "b"))
    sums = [hashlib.sha256(result.output.read_bytes()).hexdigest() for result in (first, second)]
    assert sums[0] == sums[1]
    assert first.stage("first").outcomes == second.stage("first").outcomes
    for outcome in ("on_time", "late", "error", "invalid", "crashed"):
        assert first.stage("first").outcomes[outcome] > 0, outcome


def test_given_a_model_that_draws_at_random_when_replayed_then_what_it_draws_follows_from_seed_and_frame(
    tmp_path,
):
    calm = write_points(tmp_path / "calm", drive(60))
    crashing = write_points(tmp_path / "crashing", drive(60, words={10: "sigkill"}))
    values = one_stage(adapter="replay_adapters:Drawing")
    times = {"first": {"full": {"inference_ms": 5}}, "restart_ms": 95}
    drawn = []
    for log, seed in ((calm, 1), (crashing, 1), (calm, 2)):
        result, _ = run(log, tmp_path, times, values=values, seed=seed)
        points = [message.message for message in result.stage("first").messages]
        drawn.append({(p.header.stamp.sec, p.header.stamp.nanosec): (p.point.x, p.point.z) for p in points})
    first, with_another_worker, with_another_seed = drawn
    assert len(set(first.values())) == 60
    assert 20 < len(with_another_worker) < 60
    assert with_another_worker.items() <= first.items()
    for axis in range(2):
        assert not {point[axis] for point in first.values()} & {
            point[axis] for point in with_another_seed.values()
        }


@pytest.mark.parametrize(
    "inference_ms", [5, 70]
)  # a frame is computed as it is given; as the one before is answered
def test_given_ctrl_c_while_a_frame_is_computed_then_its_row_is_as_ever(
    log, tmp_path, monkeypatch, inference_ms
):
    values, times = one_stage(budget_ms=200.0), {"first": {"full": {"inference_ms": inference_ms}}}
    whole, _ = run(log, tmp_path, times, values=values)
    computed, run_process = [], WorkerProcess.run

    def interrupted(self, tier, seq, *arguments, **options):
        sent = run_process(self, tier, seq, *arguments, **options)
        computed.append(seq)
        if len(computed) == 16:
            signal.raise_signal(signal.SIGINT)
        return sent

    monkeypatch.setattr(WorkerProcess, "run", interrupted)
    part, said = run(log, tmp_path, times, values=values)
    count = len(rows(part))
    assert not part.complete
    assert 16 <= count < 150
    assert rows(part).tobytes() == rows(whole)[:count].tobytes()
    assert not any("never answered" in line for line in said)


def test_given_a_crash_when_replayed_then_the_replacement_comes_after_restart_ms_of_the_log(tmp_path):
    log = write_points(tmp_path / "log", drive(200, words={150: "sigkill"}))
    times = {"first": {"full": {"inference_ms": 5}}, "restart_ms": 195}
    result, said = run(log, tmp_path, times, values=one_stage(fallback=["none"]))
    assert result.stage("first").outcomes == {"on_time": 195, "crashed": 1, "starting": 4}
    assert np.flatnonzero(rows(result)["outcome"]).tolist() == [150, 151, 152, 153, 154]
    assert any(line.startswith("first: worker 0 ended: it died, at 1700000006.0") for line in said)


def test_given_a_hang_when_replayed_then_the_worker_is_replaced_and_its_history_is_gone(tmp_path):
    log = write_points(tmp_path / "log", drive(60))
    times = {"first": {"full": {"inference_ms": [5.0] * 9 + [500.0]}}, "restart_ms": 100}
    values = one_stage(tiers=["full"], hang_ms=200.0, fallback=["none"])
    result, said = run(log, tmp_path, times, values=values, seed=3)
    stage = result.stage("first")
    assert stage.outcomes["late"] > 0
    assert any("hang_ms is 200" in line for line in said)
    observed = [m.message.point.y for m in stage.messages]
    assert min(np.diff(observed)) < 0  # a new worker begins to count anew


def test_given_a_run_when_its_times_are_replayed_then_late_frames_are_late_again_until_hedges_pay(
    log, tmp_path
):
    late = [30, 31, 60, 90, 120, 140]
    frames = np.zeros(150, dtype=FRAME)
    frames["seq"], frames["stamp_ns"] = np.arange(150), START_NS + np.arange(150) * 40 * MS
    frames["t_ns"] = frames["stamp_ns"] + 20 * MS
    frames["inference_ms"] = 8.0 + np.arange(150) % 3
    frames["total_ms"], frames["budget_ms"], frames["fallback"] = frames["inference_ms"] + 0.5, 30.0, -1
    frames["outcome"][late], frames["inference_ms"][late] = 1, np.nan
    path = tmp_path / "run.json"
    summary = {"stages": [{"name": "first", "tiers": ["full", "fast"]}]}
    write_run(run_of(summary, {"first": frames}), path)
    result, _ = run(log, tmp_path, path, values=one_stage(backup="standby"))
    assert np.flatnonzero(rows(result)["outcome"]).tolist() == late
    # run again, the first of them were quick: from then on the standby runs what is overdue
    assert rows(result)["fallback"][late].tolist() == [Fallback.HOLD_LAST] * 4 + [Fallback.BACKUP] * 2
    on_time = rows(result)["outcome"] == 0
    np.testing.assert_allclose(rows(result)["total_ms"][on_time], frames["total_ms"][on_time], atol=1e-6)


OFFSET_MS = 102
"""What the stamps are behind the log's clock: as if the camera's host were 0.1 s behind."""


def both_stages(log, folder, first=None, second=None, **more):
    """Both stages with a budget of 50 ms; the first one's counts from the stamp."""
    stamped = {"budget_ms": 50.0, "budget_from": "stamp", "fallback": ["hold_last"], "hold_last_ms": 300.0}
    values = two_stages(first={**stamped, **(first or {})}, second={"budget_ms": 50.0, **(second or {})})
    times = {
        stage: {tier: {"inference_ms": 10.0} for tier in ("full", "fast")} for stage in ("first", "second")
    }
    return run(log, folder, times, values=values, **more)


@pytest.mark.parametrize("second", [{"budget_from": "receipt"}, {"budget_from": "stamp"}])
def test_given_an_offset_between_the_clocks_when_replayed_then_every_frame_of_both_stages_is_answered(
    tmp_path, second
):
    log = write_points(tmp_path / "log", drive(60, age_ms=OFFSET_MS))
    result, _ = both_stages(log, tmp_path, second=second)
    first, behind = (result.stage(name) for name in ("first", "second"))
    assert (first.received, first.stale, first.superseded) == (60, 60, 0)
    assert first.outcomes == {"late": 60}
    assert first.fallbacks == {"none": 1, "hold_last": 59}  # the first frame has nothing to hold
    assert set(rows(result)["total_ms"]) == {0.0}
    assert set(rows(result)["lateness_ms"]) == {OFFSET_MS - 50.0}
    assert {why.partition(":")[0] for why in first.reasons.values()} == {"stale"}
    xs = [message.message.point.x for message in first.messages]
    assert xs == list(range(59))  # each is one frame old, of the best tier
    ys = [message.message.point.y for message in first.messages]
    assert ys == list(range(1, 60))  # no history misses one
    assert behind.outcomes == {"bad_input": 1, "on_time": 59}
    assert set(rows(result, "second")["total_ms"][1:]) == {10.0}
    assert set(rows(result, "second")["lateness_ms"][1:]) == {-40.0}
    assert "first: stale" in {alert.name for _, alert in result.anomalies}
    assert result.summary["stages"][0]["dropped"] == 0


def test_given_a_clock_that_steps_for_a_while_when_replayed_then_only_those_frames_are_stale_and_all_is_as_before(
    tmp_path,
):
    """The last frame before the step is held, then each is one frame old.

    Afterwards all is well at once.
    """
    messages = drive(60, age_ms=2)
    late = [(t, ns, data) for t, ns, data in messages if not 20 <= (ns - START_NS) // (40 * MS) < 40]
    stepped = [
        ("/point", ns, point(ns - (2 + OFFSET_MS) * MS, (ns - START_NS) // (40 * MS)))
        for _, ns, _ in messages[20:40]
    ]
    log = write_points(tmp_path / "log", sorted([*late, *stepped], key=lambda message: message[1]))
    result, _ = both_stages(log, tmp_path)
    first, behind = result.stage("first"), result.stage("second")
    assert first.outcomes == {"on_time": 40, "late": 20}
    assert [message.message.point.x for message in first.messages] == [
        *range(20),
        *range(19, 39),
        *range(40, 60),
    ]
    assert behind.outcomes == {"on_time": 60}
    (text,) = {
        alert.message for _, alert in result.anomalies if alert.name == "first: stale" and alert.level > 0
    }
    assert "by its stamp when it was received" in text
    assert "; frame 19 before it was 2.0 ms old; compare the clocks of both hosts" in text


@pytest.mark.parametrize("age_ms", [47, 48, 49, 50, 51])
def test_given_ages_around_the_budget_when_replayed_then_each_frame_is_answered_by_its_deadline_or_at_once(
    tmp_path, age_ms
):
    log = write_points(tmp_path / "log", drive(30, age_ms=age_ms))
    result, _ = both_stages(log, tmp_path)
    frames = rows(result)
    assert len(frames) == 30
    assert set(result.stage("first").outcomes) == {"late"}
    assert np.all(frames["total_ms"] <= max(0.0, 50.0 - age_ms))
    assert result.stage("first").stale == (30 if age_ms >= 50 else 0)
    assert all(
        "ms of its budget of 50 ms had passed at its turn" in why
        for why in result.stage("first").reasons.values()
    )
    assert result.stage("second").outcomes["on_time"] == 29


def test_given_synchronised_inputs_when_a_frame_is_stale_then_it_waits_for_none(tmp_path):
    messages = drive(20, age_ms=OFFSET_MS)
    others = [("/other", t_ns + 20 * MS, data) for _, t_ns, data in messages]
    log = write_points(tmp_path / "log", sorted([*messages, *others], key=lambda message: message[1]))
    inputs = {
        "inputs": {"point": "geometry_msgs/msg/PointStamped", "other": "geometry_msgs/msg/PointStamped"}
    }
    values = one_stage(
        options=json.dumps(inputs),
        sync=["other slop 10 wait 30"],
        budget_from="stamp",
        budget_ms=50.0,
        fallback=["hold_last"],
    )
    result, _ = run(log, tmp_path, {"first": {"full": {"inference_ms": 10.0}}}, values=values)
    assert set(rows(result)["total_ms"]) == {0.0}
    assert set(rows(result)["wait_ms"]) == {0.0}
    assert result.stage("first").outcomes == {"late": 20}
