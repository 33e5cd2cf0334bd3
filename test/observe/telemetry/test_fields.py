"""One table of fields: what the node writes of a stage is what others read, with its type."""

from collections import Counter

import pytest

from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.observe.telemetry.diagnostics import stage_status
from torchperf_ros.observe.telemetry.fields import FIELDS, METRICS, NODE_FIELDS, typed
from torchperf_ros.observe.telemetry.node_state import StageState
from torchperf_ros.observe.watch.stage_signals import COUNTED


@pytest.fixture
def status(make_stage, make_worker, make_answer, answered):
    """Of a stage with a worker, whose tiers are called 1 and 2, after a frame."""
    facts = [{"name": name, "engine": "aoti", "package": "1234"} for name in ("1", "2")]
    worker = make_worker(facts=facts)
    stage = make_stage(workers=(worker, None), tiers=["1", "2"])
    answered(stage, make_answer())
    return StageState("perception", typed(stage_status(stage, Health.NOMINAL, {77: 3 << 20}).values))


READ = (
    "frames",
    "answered",
    "unanswered",
    "dropped",
    "stale",
    "restarts",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
)
READ += (
    "budget_ms",
    "tier_1_predicted_ms",
    "worker_0_rss_mib",
    *(f"fallback_{one.word}" for one in Fallback),
)


@pytest.mark.parametrize("key", [*READ, *(one.word for one in Outcome), "superseded"])
def test_given_a_status_when_read_then_its_numbers_are_numbers(status, key):
    assert (
        status.number(key) == status.number(key) or key == "tier_1_predicted_ms"
    )  # nan: before the first run
    assert isinstance(status.values[key], float)


def test_given_words_that_look_like_numbers_when_read_then_they_stay_words(status):
    words = ("tier", "tiers", "worker_0_pid", "worker_0_state", "tier_1_package", "engine", "health")
    assert [status.values[key] for key in words] == ["1", "1,2", "77", "idle", "1234", "aoti", "NOMINAL"]
    assert status.count("answered") == 1
    assert typed({"version": "2", "frames": "many"}) == {"version": "2", "frames": "many"}


def test_given_counters_that_the_watch_follows_when_looked_up_then_the_table_has_each():
    keys = {field.key for field in FIELDS if isinstance(field.key, str)}
    assert {key for key in COUNTED if key not in keys and f"tier_{{}}_{key}" not in keys} == set()


def test_given_the_table_when_read_then_no_name_stands_twice_and_each_metric_has_a_meaning():
    twice = Counter(field.name for field in METRICS)
    assert max(twice.values()) == 1
    assert all(field.text for field in METRICS)
    assert {field.kind for field in METRICS} == {"counter", "gauge", "histogram"}
    assert all(not field.key for field in NODE_FIELDS)
