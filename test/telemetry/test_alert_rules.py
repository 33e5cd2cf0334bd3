import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from torchperf_ros.telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "config/prometheus/torchperf_rules.yaml"
EXAMPLES = Path(__file__).with_name("torchperf_rules_test.yaml")
needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian's package prometheus)"
)


@pytest.fixture(scope="module")
def rules():
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    return group["rules"]


def promtool(*arguments):
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


@needs_promtool
def test_given_the_examples_when_the_rules_are_run_then_each_alert_fires_where_it_should():
    done = promtool("test", "rules", EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_given_the_configuration_when_checked_then_it_is_valid_and_finds_the_rules(rules):
    done = promtool("check", "config", ROOT / "config/prometheus/prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_given_the_rules_when_read_then_each_says_how_bad_it_is_and_where_to_look_and_has_an_example(rules):
    examples = EXAMPLES.read_text()
    for rule in rules:
        assert rule["alert"] in examples
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "runbook"}


def test_given_the_rules_when_read_then_every_metric_that_they_name_is_exported(rules):
    exported = {spec.name for spec in METRICS}
    for rule in rules:
        named = set(re.findall(r"torchperf_\w+", f"{rule['expr']} {rule['annotations']['runbook']}"))
        assert {name for name in named if name != "torchperf_rules"} <= exported, rule["alert"]
