import time

import pytest

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.observe.telemetry.diagnostics import diagnostic_bytes, stage_status
from torchperf_ros.workers.calibration import Calibration

from ...stage.conftest import STORE

NOW_NS = 1_700_000_000_500_000_000


def read(data):
    return STORE.deserialize_cdr(data, "diagnostic_msgs/msg/DiagnosticArray")


def test_given_statuses_when_encoded_then_another_reader_finds_levels_names_and_values():
    statuses = [
        Alert(Level.OK, "perf: perception", "NOMINAL", {"tier": "full", "empty": ""}),
        Alert(Level.ERROR, "perf: planning", "SAFE_STOP: why", {}),
    ]
    message = read(diagnostic_bytes(statuses, "/perf", NOW_NS))
    assert (message.header.stamp.sec, message.header.stamp.nanosec) == (1_700_000_000, 500_000_000)
    first, second = message.status
    assert (first.level, first.name, first.message, first.hardware_id) == (
        0,
        "perf: perception",
        "NOMINAL",
        "/perf",
    )
    assert [(pair.key, pair.value) for pair in first.values] == [("tier", "full"), ("empty", "")]
    assert (second.level, second.message, len(second.values)) == (2, "SAFE_STOP: why", 0)
    assert len(read(diagnostic_bytes([], "", 0)).status) == 0


@pytest.mark.parametrize("text", ["no such file: \udcff", "nul \0 inside", "\N{GRINNING FACE}"])
def test_given_a_text_of_any_characters_when_encoded_then_reporting_goes_on(text):
    (status,) = read(
        diagnostic_bytes([Alert(Level.ERROR, "perf: x", text, {"last_error": text})], "", 0)
    ).status
    assert status.level == 2
    assert status.message[:3] == text[:3]


def test_given_a_stage_with_answers_when_reported_then_counters_and_latencies_are_there(
    make_stage, make_worker, make_answer, answered
):
    stage = make_stage(workers=(make_worker(), None))
    for seq in range(3):
        answered(stage, make_answer(seq=seq, total_ms=10.0 * (seq + 1)))
    answered(stage, make_answer(Outcome.LATE, Fallback.HOLD_LAST, seq=3, total_ms=50.0))
    stage.mailbox.superseded = 5
    stage.statistics.counters.stale = 2
    status = stage_status(stage, Health.DEGRADED, {77: 3 << 20})
    assert (status.level, status.name, status.message) == (
        Level.WARN,
        "perf: perception",
        "DEGRADED: tier full, 0 of 30 frames on time in a row",
    )
    wanted = {
        "health": "DEGRADED",
        "tier": "full",
        "tiers": "full,medium,fast",
        "engine": "auto",
        "device": "cpu",
        "p50_ms": "25.000",
        "max_ms": "50.000",
        "budget_ms": "50.000",
        "miss_ratio": "0.667",
        "frames": "4",
        "answered": "4",
        "on_time": "3",
        "late": "1",
        "hung": "0",
        "fallback_hold_last": "1",
        "fallback_stop": "0",
        "superseded": "5",
        "dropped": "5",
        "stale": "2",
        "restarts": "3",
        "unended": "1",
        "unended_pids": "4711",
        "worker_0_pid": "77",
        "worker_0_state": "idle",
        "worker_0_rss_mib": "3.000",
        "worker_1_pid": "",
        "worker_1_state": "waits for its restart",
        "worker_1_rss_mib": "",
    }
    assert {key: status.values.get(key) for key in wanted} == wanted
    assert {outcome.word for outcome in Outcome} <= set(status.values)
    assert all(isinstance(value, str) for value in status.values.values())
    read(diagnostic_bytes([status], "/perf", NOW_NS))


def test_given_a_stage_on_a_lower_tier_when_reported_then_each_prediction_and_what_keeps_it_down_are_told(
    make_stage,
):
    stage = make_stage(tiers=["full", "fast"])
    stage.ladder.calibrate([Calibration(40.0, 61.0), Calibration(2.0, 3.0)])
    now_ns = time.monotonic_ns()
    stage.ladder.choose(49.0, 49.0, now_ns)
    stage.ladder.probed(0, 60.0, 62.0, 49.0)
    for _ in range(2):
        stage.ladder.learn(1, 2.0, 1.0)
    status = stage_status(stage, Health.DEGRADED, {})
    values = status.values
    assert (values["tier_full_predicted_ms"], values["tier_fast_predicted_ms"]) == ("61.000", "3.000")
    assert values["tier_full_predicted_from"] == "last probe 60.0 ms x 1.00 + overhead 1.0 ms"
    assert values["tier_fast_predicted_from"] == "2 own runs + overhead 1.0 ms"
    assert values["ladder"].startswith("full predicted 61.0 ms > 49.0 left; next probe in 0.")
    assert status.message.startswith(
        "DEGRADED: tier fast, full predicted 61.0 ms > 49.0 left; next probe in 0."
    )


def test_given_frames_without_anything_to_publish_when_reported_then_they_are_unanswered_and_not_answered(
    make_stage, make_answer, answered
):
    stage = make_stage()
    answered(stage, make_answer(Outcome.STARTING, Fallback.NONE))
    answered(stage, make_answer())
    values = stage_status(stage, Health.NOMINAL, {}).values
    assert (values["frames"], values["answered"], values["unanswered"]) == ("2", "1", "1")
    assert (values["ladder"], values["unrecorded"]) == ("", "0")


def test_given_answers_of_two_tiers_then_each_span_tier_and_state_has_its_times(
    make_stage, make_answer, answered
):
    stage = make_stage(tiers=["full", "fast"])
    stage.statistics.figures.window_s = 600.0
    for total_ms in (10.0, 14.0, 12.0):
        answered(stage, make_answer(total_ms=total_ms, age_ms=3.0))
    stage.statistics.activated()
    answered(stage, make_answer(Outcome.LATE, Fallback.STOP, total_ms=51.0, tier=1, age_ms=5.0))
    values = stage_status(stage, Health.DEGRADED, {}).values
    wanted = {
        "p50_ms": "13.000",
        "window_p50_ms": "13.000",
        "window_max_ms": "51.000",
        "run_max_ms": "51.000",
        "active_max_ms": "51.000",
        "window_miss_ratio": "0.250",
        "tier_full_p50_ms": "12.000",
        "tier_full_max_ms": "14.000",
        "tier_full_run_max_ms": "14.000",
        "tier_full_active_p99_ms": "nan",
        "tier_full_window_miss_ratio": "0.000",
        "tier_fast_p99_ms": "51.000",
        "tier_fast_active_max_ms": "51.000",
        "tier_fast_window_miss_ratio": "1.000",
        "lateness_max_ms": "-1.000",
        "age_max_ms": "5.000",
        "wait_p99_ms": "0.500",
        "latency_jitter_ms": f"{(4 + 2 + 39) / 3:.3f}",
        "unrecorded": "0",
        "health_nominal_s": "0.000",
        "health_safe_stop_s": "0.000",
    }
    assert {key: values.get(key) for key in wanted} == wanted
    assert float(values["run_p99_ms"]) == pytest.approx(14.0, rel=0.01)
    assert float(values["interval_ms"]) >= 0 <= float(values["interval_jitter_ms"])
    assert not [key for key in values if key.startswith(("tier__", "health_NOMINAL"))]


FULL = {
    "name": "full",
    "engine": "aoti",
    "graphs": 1,
    "package": "f00d",
    "recompiles": 2,
    "hits": 8,
    "misses": 1,
}
FAST = {"name": "fast", "engine": "eager", "why": "not compiled yet", "waste": 0.25}


def test_given_workers_with_engines_then_states_are_the_first_ones_and_counters_are_of_both(
    make_stage, make_worker
):
    first = make_worker(facts=[FULL, FAST], out_of_memory=1)
    second = make_worker(
        78, facts=[{**FULL, "engine": "eager", "recompiles": 3, "hits": 1}, FAST], out_of_memory=2
    )
    stage = make_stage(workers=(first, second), tiers=["full", "fast"])
    gone = make_worker(79, facts=[{**FULL, "recompiles": 10}, FAST], out_of_memory=4)
    stage.pool.tally.left(gone)
    wanted = {
        "engine": "aoti",
        "tier_full_engine": "aoti",
        "tier_full_graphs": "1",
        "tier_full_package": "f00d",
        "tier_full_recompiles": "15",
        "tier_full_hits": "17",
        "tier_full_misses": "3",
        "tier_fast_engine": "eager",
        "tier_fast_why": "not compiled yet",
        "tier_fast_waste": "0.250",
        "out_of_memory": "8",
        "compiling": "",
    }
    values = stage_status(stage, Health.NOMINAL, {}).values
    assert {key: values.get(key) for key in wanted} == wanted


def test_given_a_stage_without_answers_when_reported_then_latencies_are_nan_and_nothing_fails(make_stage):
    stage = make_stage(ready=False)
    stage.pool.description = None
    status = stage_status(stage, stage.statistics.health.state(time.monotonic_ns()), {})
    assert status.level is Level.WARN
    assert status.message.startswith("STARTING: worker 0 ")
    assert {status.values[key] for key in ("p50_ms", "p99_ms", "lateness_p99_ms")} == {"nan"}
    assert (status.values["device"], status.values["miss_ratio"]) == ("", "0.000")


def test_given_a_stage_that_waits_when_reported_then_it_says_whether_input_ever_came(
    make_stage, make_answer, answered
):
    stage = make_stage()
    assert stage_status(stage, Health.WAITING, {}).message == "WAITING: no input"
    answered(stage, make_answer())
    assert stage_status(stage, Health.WAITING, {}).message == "WAITING: input stopped"


def test_given_a_safe_stop_when_reported_then_it_says_why(make_stage, make_worker, make_answer, answered):
    stage = make_stage()
    stage.pool.last_error = "worker 0 (pid 7) ended by exit status 1: RuntimeError: why\nTraceback ..."
    status = stage_status(stage, Health.SAFE_STOP, {})
    why = "worker 0 (pid 7) ended by exit status 1: RuntimeError: why"
    assert status.message == f"SAFE_STOP: {why}; {stage.pool.progress}"
    assert status.values["last_error"] == stage.pool.last_error
    serving = make_stage(workers=(make_worker(7),))
    answered(serving, make_answer(Outcome.LATE, Fallback.HOLD_LAST))
    said = stage_status(serving, Health.SAFE_STOP, {}).message
    assert (
        said == f"SAFE_STOP: 1 misses in a row, the last one of {serving.statistics.counters.last_reason}"
    )
    answered(serving, make_answer())
    said = stage_status(serving, Health.SAFE_STOP, {}).message
    assert said == "SAFE_STOP: over after 30 frames on time in a row, 1 so far"


def test_given_a_warmed_up_process_when_the_first_frame_is_reported_then_nothing_is_imported_any_more(
    python,
):
    script = """
import sys
from torchperf_ros.settings.config import stage_config
from torchperf_ros.api.outcome import Health
from torchperf_ros.stage.figures import StageCounters
from torchperf_ros.observe.telemetry import diagnostics
config = stage_config("perception", {"adapter": "a:B", "output": "detections"})
if sys.argv[1:]:
    diagnostics.warm_up(config)
before = set(sys.modules)
diagnostics.warm_up(config)
print(*sorted(set(sys.modules) - before))
"""

    assert python(script, "warm").split() == []
    assert "rosbags.serde.primitives" in python(script).split(), "there is nothing to warm up any more"
