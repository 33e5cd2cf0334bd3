"""Lines of `actions` and `sync`: what they mean, and what is refused."""

import re
from pathlib import Path

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import stage_config
from torchperf_ros.settings.stage_rules import ALERTS, SyncRule, alert_kind, check_sync

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "watching.md").read_text(encoding="utf-8")


def stage(**values):
    return stage_config("fusion", {"adapter": "a:B", "output": "o", **values})


def test_given_actions_when_read_then_each_is_a_rule_and_reads_as_it_was_written():
    found = stage(actions=["drift -> lower_tier", "", " gpu memory->scene default "]).actions
    assert [(one.alert, one.action, one.scene) for one in found] == [
        ("drift", "lower_tier", ""),
        ("gpu memory", "scene", "default"),
    ]
    assert [str(one) for one in found] == ["drift -> lower_tier", "gpu memory -> scene default"]


def test_given_inputs_when_read_then_each_is_a_rule_whatever_the_order_of_its_words_and_reads_as_such_a_line():
    found = stage(sync=["cloud offset 0 slop 40 wait 15", "", "/radar/points slop 2.5 offset -100"]).sync
    assert found == (SyncRule("cloud", 40.0, 0.0, 15.0), SyncRule("/radar/points", 2.5, -100.0))
    assert stage(sync=[str(rule) for rule in found]).sync == found
    assert stage().sync == ()


@pytest.mark.parametrize(
    ("name", "line", "parts"),
    [
        ("actions", "drift", ["fusion.actions: 'drift'", "ALERT -> ACTION"]),
        ("actions", "drfit -> off", ["there is no alert 'drfit'", "drift, latency"]),
        ("actions", " -> off", ["there is no alert ''"]),
        (
            "actions",
            "drift -> stop",
            ["there is no action 'stop'", "lower_rate, scene, backup_active, off"],
        ),
        ("actions", "drift -> scene moon", ["there is no scene 'moon'", "default"]),
        ("actions", "drift -> scene", ["there is no scene ''"]),
        ("actions", "drift -> off now", ["'now' behind off"]),
        ("sync", "cloud", ["fusion.sync: 'cloud'", "INPUT slop MS"]),
        ("sync", "cloud slop", ["'cloud slop'", "INPUT slop MS"]),
        ("sync", "cloud wait 5", ["'cloud wait 5'", "INPUT slop MS"]),
        ("sync", "cloud slop -1", ["slop -1", "from 0 to 60000 ms"]),
        ("sync", "cloud slop 5 wait -1", ["wait -1", "from 0 to 60000 ms"]),
        ("sync", "cloud slop 5 offset -1e9", ["offset -1e9", "from -60000 to 60000 ms"]),
        ("sync", "cloud slop nan", ["slop nan", "from 0 to 60000 ms"]),
        ("sync", "cloud slop soon", ["slop soon", "from 0 to 60000 ms"]),
        ("sync", "cloud slop 5 slop 6", ["slop stands there twice"]),
        ("sync", "cloud slop 5 queue 3", ["'queue' is not allowed"]),
        ("sync", "cloud slop 5 wait 50", ["wait 50", "below the shortest budget, 50 ms"]),
    ],
)
def test_given_a_line_that_means_nothing_when_read_then_the_error_says_what_would(name, line, parts):
    with pytest.raises(ConfigError) as caught:
        stage(**{name: [line]})
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"actions": ["misses -> backup_active"], "backup": "none"},
            "needs a second worker, and backup is none",
        ),
        ({"sync": ["cloud slop 5", "cloud slop 6"]}, "cloud stands in 2 lines"),
        (
            {
                "sync": ["cloud slop 5 wait 20"],
                "scenes": ["fast"],
                "scene.fast.tiers": ["a"],
                "scene.fast.budget_ms": 20.0,
            },
            "below the shortest budget, 20 ms",
        ),
    ],
)
def test_given_lines_that_do_not_go_with_the_stage_when_read_then_the_error_says_why(values, said):
    with pytest.raises(ConfigError, match=said):
        stage(**values)


@pytest.mark.parametrize("kind", ALERTS)
def test_given_a_kind_when_an_alert_has_its_name_then_it_is_found_and_the_page_has_it(kind):
    assert alert_kind(f"camera: {kind}") == alert_kind(f"camera: {kind} (/image)") == kind
    assert {kind, kind.removeprefix("input ")} & set(re.findall(r"`([a-z ]+?)(?: of \.\.\.)?`", PAGE))


@pytest.mark.parametrize(
    ("topic", "inputs", "said"),
    [
        ("clout", [("image", True), ("cloud", True)], "the adapter has no input clout; it has: cloud"),
        ("cloud", [("image", True)], "it has: none beside its trigger"),
        ("image", [("image", True), ("cloud", True)], "image is the trigger"),
        (
            "cloud",
            [("image", True), ("cloud", False)],
            "the message type of cloud does not begin with a std_msgs/Hea",
        ),
    ],
)
def test_given_an_adapters_inputs_when_a_rule_is_for_none_that_has_stamps_then_it_is_refused(
    topic, inputs, said
):
    with pytest.raises(ConfigError, match=said):
        check_sync("fusion", stage(sync=[f"{topic} slop 5"]).sync, inputs)
