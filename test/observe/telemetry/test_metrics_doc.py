import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from torchperf_ros.observe.telemetry.fields import FIELDS, NODE_FIELDS

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "config/prometheus/torchperf_rules.yaml"
EXAMPLES = Path(__file__).with_name("torchperf_rules_test.yaml")
DOC = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian's package prometheus)"
)


@pytest.fixture(scope="module")
def rules():
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    return group["rules"]


def promtool(*arguments):
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def rows(pattern):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(pattern, DOC, re.MULTILINE)
    ]


def test_given_the_table_of_the_document_when_compared_with_what_is_exported_then_they_agree():
    told = [
        (name.strip("`"), kind, re.findall(r"`(\w+)`", labels), text)
        for name, kind, labels, text in rows(r"^\| `torchperf_.*$")
    ]
    metrics = [(field, ["stage", *field.labels]) for field in FIELDS if field.name]
    metrics += [(field, list(field.labels)) for field in NODE_FIELDS]
    assert sorted(told) == sorted((field.name, field.kind, labels, field.text) for field, labels in metrics)


def test_given_the_alerts_of_the_document_when_compared_with_the_rules_then_they_agree(rules):
    told = [(name.strip("`"), severity) for name, _, severity in rows(r"^\| `Torchperf\w+` .*$")]
    assert told == [(rule["alert"], rule["labels"]["severity"]) for rule in rules]


def test_given_whatever_becomes_of_a_frame_when_the_dashboard_is_read_then_a_panel_counts_it():
    dashboard = (ROOT / "config/grafana/torchperf.json").read_text(encoding="utf-8")
    for what in ("answers", "unanswered", "fallbacks", "dropped", "missed_deadlines"):
        assert f"(torchperf_{what}_total{{" in dashboard, what


@needs_promtool
def test_given_the_examples_when_the_rules_are_run_then_each_alert_fires_where_it_should():
    done = promtool("test", "rules", EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_given_the_configuration_when_checked_then_it_is_valid_and_finds_the_rules(rules):
    done = promtool("check", "config", ROOT / "config/prometheus/prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_given_the_rules_when_read_then_every_metric_that_they_name_is_exported(rules):
    exported = {field.name for field in (*FIELDS, *NODE_FIELDS)}
    for rule in rules:
        named = set(re.findall(r"torchperf_\w+", f"{rule['expr']} {rule['annotations']['runbook']}"))
        assert {name for name in named if name != "torchperf_rules"} <= exported, rule["alert"]
