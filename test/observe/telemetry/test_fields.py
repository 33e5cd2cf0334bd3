"""One table of fields: what `top`, the doctor and the watch read of a status is what the node writes."""

import ast
import re
from collections import Counter
from pathlib import Path

from torchperf_ros.observe.telemetry.fields import FIELDS, METRICS, NODE_FIELDS
from torchperf_ros.observe.watch.stage_signals import COUNTED

ROOT = Path(__file__).resolve().parents[3]
READERS = ("observe/telemetry/node_state.py", "observe/top/view.py", "observe/doctor/doctor.py")
OF_THE_REPORTER = {"trigger", "publishes", "waits_for", "candidate", "candidate_pairs"}
OF_THE_NODES_STATUS = {"pid", "health", "lifecycle", "scheduling"}
READ_BY = {"count", "number", "get"}


def keys():
    for field in FIELDS:
        yield from [field.key] if isinstance(field.key, str) else field.key.values()


def read_by(path):
    """The keys that a file asks a status for, by name."""
    for call in ast.walk(ast.parse((ROOT / "torchperf_ros" / path).read_text(encoding="utf-8"))):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in READ_BY
        ):
            owner = ast.unparse(call.func.value)
            if (
                call.args
                and isinstance(call.args[0], ast.Constant)
                and owner.split(".")[-1] != "parameters"
            ):
                yield str(call.args[0].value)


def test_given_what_the_readers_ask_for_when_looked_up_then_the_table_has_each_key():
    # Keys that begin with a label would match nearly all: the words of these are named.
    of_labels = {f"{quantile}_ms" for quantile in ("p50", "p95", "p99", "max")}
    whole = [key for key in keys() if key and not key.startswith("{}")]
    patterns = [re.compile(re.escape(key).replace(r"\{\}", ".+")) for key in whole]
    asked = {key for path in READERS for key in read_by(path)}
    assert {"answered", "restarts", "tiers"} <= asked
    unknown = {
        key
        for key in asked - OF_THE_REPORTER - OF_THE_NODES_STATUS - of_labels
        if not any(pattern.fullmatch(key) for pattern in patterns)
    }
    words = {key for key in unknown if key in {"on_time", "partial"}}  # outcomes, by the key "{}"
    of_messages = {
        "outcome", "stage", "fallback", "total_ms", "age_ms", "budget_ms", "lateness_ms", "use_sim_time",
        "_", "node_rss_mib", "publication_sequence_number", "realtime_priority", "lock_memory",
    }  # fmt: skip
    assert unknown - words - of_messages == set()


def test_given_counters_that_the_watch_follows_when_looked_up_then_the_table_has_each():
    assert {key for key in COUNTED if key not in keys() and f"tier_{{}}_{key}" not in keys()} == set()


def test_given_the_table_when_read_then_no_name_stands_twice_and_each_metric_says_what_it_means():
    twice = Counter(field.name for field in METRICS)
    assert max(twice.values()) == 1
    assert all(field.text for field in METRICS)
    assert {field.kind for field in METRICS} == {"counter", "gauge", "histogram"}
    assert all(not field.key for field in NODE_FIELDS)
