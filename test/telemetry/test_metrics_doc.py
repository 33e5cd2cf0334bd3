import re
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from ruamel.yaml import YAML

from torchperf_ros.frame.outcome import Health
from torchperf_ros.frame.stage_figures import STEPS
from torchperf_ros.telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


def rows(pattern):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(pattern, DOC, re.MULTILINE)]


def test_given_the_table_of_the_document_when_compared_with_what_is_exported_then_they_agree():
    told = [(name.strip("`"), kind, re.findall(r"`(\w+)`", labels), text)
            for name, kind, labels, text in rows(r"^\| `torchperf_.*$")]  # fmt: skip
    assert told == [(spec.name, spec.kind, list(spec.labels), spec.text) for spec in METRICS]


def test_given_the_metrics_of_the_process_when_compared_with_the_document_then_it_has_each():
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    exported = {f.name + "_total" * (f.type == "counter") for f in registry.collect()}
    assert {name.strip("`") for name, *_ in rows(r"^\| `process_.*$")} == exported


def test_given_the_alerts_of_the_document_when_compared_with_the_rules_then_they_agree():
    (group,) = YAML(typ="safe").load(ROOT / "config/prometheus/torchperf_rules.yaml")["groups"]
    told = [(name.strip("`"), severity) for name, _, severity in rows(r"^\| `Torchperf\w+` .*$")]
    assert told == [(rule["alert"], rule["labels"]["severity"]) for rule in group["rules"]]


def test_given_values_of_labels_when_looked_up_in_the_document_then_they_are_there():
    for word in [*(state.word for state in Health), *STEPS]:
        assert f"`{word}`" in DOC


def test_given_whatever_becomes_of_a_frame_when_the_dashboard_is_read_then_a_panel_counts_it():
    dashboard = (ROOT / "config/grafana/torchperf.json").read_text(encoding="utf-8")
    for what in ("answers", "unanswered", "fallbacks", "dropped", "missed_deadlines"):
        assert f"(torchperf_{what}_total{{" in dashboard, what
