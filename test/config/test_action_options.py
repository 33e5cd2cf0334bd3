"""Lines ALERT -> ACTION: what they mean, and what is refused."""

import re
from pathlib import Path

import pytest

from torchperf_ros.config.action_options import ALERTS, alert_kind
from torchperf_ros.config.config import stage_config
from torchperf_ros.frame.errors import ConfigError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def rules(*lines, **values):
    return stage_config("camera", {"adapter": "a:B", "output": "o", "actions": list(lines), **values}).actions


def test_given_lines_when_read_then_each_is_a_rule_and_reads_as_it_was_written():
    found = rules("drift -> lower_tier", "", " gpu memory->scene default ")
    assert [(one.alert, one.action, one.scene) for one in found] == [
        ("drift", "lower_tier", ""), ("gpu memory", "scene", "default"),
    ]  # fmt: skip
    assert [str(one) for one in found] == ["drift -> lower_tier", "gpu memory -> scene default"]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("drift", ["camera.actions: 'drift'", "ALERT -> ACTION"]),
        ("drfit -> off", ["there is no alert 'drfit'", "drift, latency"]),
        (" -> off", ["there is no alert ''"]),
        ("drift -> stop", ["there is no action 'stop'", "lower_tier, lower_rate, scene, backup_active, off"]),
        ("drift -> scene moon", ["there is no scene 'moon'", "default"]),
        ("drift -> scene", ["there is no scene ''"]),
        ("drift -> off now", ["'now' behind off"]),
    ],
)
def test_given_a_line_that_means_nothing_when_read_then_the_error_says_what_would(line, parts):
    with pytest.raises(ConfigError) as caught:
        rules(line)
    for part in parts:
        assert part in str(caught.value)


def test_given_a_stage_with_one_worker_when_a_rule_needs_two_then_it_is_refused():
    with pytest.raises(ConfigError, match="needs a second worker, and backup is none"):
        rules("misses -> backup_active", backup="none")


@pytest.mark.parametrize("kind", ALERTS)
def test_given_a_kind_when_an_alert_has_its_name_then_it_is_found_and_the_page_has_it(kind):
    assert alert_kind(f"camera: {kind}") == alert_kind(f"camera: {kind} (/image)") == kind
    assert {kind, kind.removeprefix("input ")} & set(re.findall(r"`([a-z ]+?)(?: of \.\.\.)?`", PAGE))
