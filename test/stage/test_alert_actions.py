"""What follows from alerts: rules on a virtual clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.alert_actions import AlertActions

S = 1_000_000_000
SCENES = {"scenes": ["slow"], "scene.slow.tiers": ["fast"]}


def actions(*lines, **values):
    given = {"adapter": "a:B", "output": "o", "actions": list(lines), **SCENES, **values}
    return AlertActions(stage_config("camera", given))


def alert(name):
    return Alert(Level.WARN, name, "")


def drive(rules, seconds, found=lambda second: ()):
    """Step once a second, with the alerts that are found in it; yields the second and the rules."""
    for second in range(1, seconds + 1):
        for name in found(second):
            rules.report(alert(name), second * S)
        rules.step(second * S)
        yield second


def test_given_rules_when_asked_for_an_alert_then_it_is_one_that_a_rule_has():
    rules = actions("drift -> off", "latency -> lower_rate")
    assert [rules.asks_for(name) for name in ("drift", "latency", "off", "load")] == [
        True,
        True,
        False,
        False,
    ]
    assert not actions().asks_for("drift")


@pytest.mark.parametrize(
    ("action", "name", "value"),
    [
        ("lower_tier", "lower_tiers", 1),
        ("lower_rate", "lower_rate", True),
        ("backup_active", "backup_active", True),
        ("off", "off", True),
        ("scene slow", "scene", "slow"),
    ],
)
def test_given_a_rule_when_its_alert_is_found_then_it_is_in_force_at_once_until_quiet_for_long(
    action, name, value
):
    rules, calm = actions(f"drift -> {action}"), actions(f"drift -> {action}")
    seconds = drive(rules, 60, lambda second: ["camera: drift"] if second == 5 else [])
    assert [second for second in seconds if getattr(rules, name) == value] == list(range(5, 35))
    assert getattr(rules, name) == getattr(calm, name)
    assert (rules.taken, calm.taken) == (1, 0)


def test_given_an_alert_that_goes_on_when_stepped_then_tiers_fall_one_by_one_and_come_back_one_by_one():
    rules = actions("latency -> lower_tier", action_return_s=10.0)
    found = {second: ["camera: latency"] for second in range(5, 21)}
    levels = [rules.lower_tiers for _ in drive(rules, 60, lambda second: found.get(second, []))]
    changes = [
        (at, now)
        for at, (before, now) in enumerate(zip(levels, levels[1:], strict=False), 2)
        if now != before
    ]
    assert changes == [(5, 1), (8, 2), (30, 1), (40, 0)]


def test_given_an_alert_that_is_back_soon_when_stepped_then_the_action_stays_twice_as_long_each_time():
    rules, held, since = actions("drift -> lower_tier", action_return_s=10.0), [], None

    def found(second):
        return ["camera: drift"] if not rules.lower_tiers else []

    for second in drive(rules, 900, found):
        if rules.lower_tiers and since is None:
            since = second
        elif not rules.lower_tiers and since is not None:
            held.append(second - since)
            since = None
    assert held[:5] == [10, 20, 40, 80, 160]
    assert set(held[5:]) <= {160}


IN_FORCE = {  # the rule, the seconds in which its alert is found, and those in which the action is in force
    "back at once: it stays twice as long; over for long: the first time counts": (
        "drift -> lower_tier",
        {1, 12, 200},
        [*range(1, 11), *range(12, 32), *range(200, 210)],
    ),
    "a stage that is off misses frames": ("misses -> off", {*range(5, 26)}, range(5, 15)),
    "and refuses its input": ("bad input -> off", {*range(5, 26)}, range(5, 15)),
    "a lower rate drops frames": ("drops -> lower_rate", {*range(5, 26)}, range(5, 15)),
    "a lower tier is an alert of its own": ("tier -> lower_tier", {*range(5, 26)}, range(5, 15)),
    "after it ran again the alert is one of others": (
        "misses -> off",
        {1, 11, 12, 40},
        [*range(1, 11), *range(40, 50)],
    ),
}


@pytest.mark.parametrize("case", IN_FORCE)
def test_given_a_rule_when_its_alert_is_found_then_the_action_is_in_force_in_these_seconds(case):
    line, found, expected = IN_FORCE[case]
    rules, name = actions(line, action_return_s=10.0), f"camera: {line.partition(' ->')[0]}"
    seconds = drive(rules, 300, lambda second: [name] if second in found else [])
    assert [second for second in seconds if rules.words(second * S)] == list(expected)


def test_given_two_rules_with_one_action_when_each_alert_is_its_effect_then_neither_keeps_the_other_going():
    rules = actions("misses -> lower_tier", "output -> lower_tier", action_return_s=10.0)
    in_force = [False]

    def found(second):
        return ["camera: misses", "camera: output"] if second == 5 or in_force[-1] else []

    for _ in drive(rules, 300, found):
        in_force.append(rules.lower_tiers > 0)
    assert not any(in_force[100:])


def test_given_an_alert_of_frames_from_before_the_step_when_it_is_told_late_then_it_leads_no_further():
    rules = actions("latency -> lower_tier")
    values = {"value": "41.6", "baseline": "32.0", "signal": "p50"}
    for second, tier in ((1, "full"), (2, "full"), (3, "full"), (6, "full"), (7, "medium")):
        tiers = (
            values | {"tier": tier} | ({"value": "26.0", "baseline": "20.0"} if tier == "medium" else {})
        )
        rules.report(Alert(Level.WARN, "camera: latency", "", tiers), second * S)
        rules.step(second * S)
        assert rules.lower_tiers == 1
    rules.step(37 * S)
    assert rules.lower_tiers == 0


def test_given_restarts_in_a_span_of_time_when_none_is_added_then_they_lead_to_one_step_and_the_next_to_another():
    rules = actions("restarts -> lower_tier", action_return_s=10.0)

    def at(second, count):
        rules.report(
            Alert(Level.WARN, "camera: restarts", "", {"value": str(count), "kind": "level"}), second * S
        )
        rules.step(second * S)
        return rules.lower_tiers

    assert [at(second, 3) for second in range(1, 60)] == [1] * 10 + [0] * 49
    assert at(60, 4) == 1


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("camera: gpu", True),
        ("machine: gpu", True),
        ("node: gpu", True),
        ("planner: gpu", False),
        ("machine: gpu memory", False),
        ("camera: nothing like it", False),
    ],
)
def test_given_an_alert_of_another_stage_or_kind_when_reported_then_it_does_not_count(name, counts):
    rules = actions("gpu -> lower_tier")
    rules.report(alert(name), S)
    rules.step(S)
    assert bool(rules.lower_tiers) == counts


def test_given_an_alert_with_a_suffix_when_reported_then_its_kind_counts():
    rules = actions("temperature -> lower_rate", "input frozen -> off")
    for name in ("machine: temperature of cpu-thermal", "camera: input frozen (/image)"):
        rules.report(alert(name), S)
    lines = rules.step(S)
    assert rules.lower_rate
    assert rules.off
    assert lines == ["temperature -> lower_rate: step 1 begins", "input frozen -> off: step 1 begins"]
    assert "input frozen -> off (1 step, for 4 s)" in rules.words(5 * S)


def test_given_two_alerts_of_one_cause_when_both_lead_to_lower_tiers_then_the_larger_one_counts():
    rules = actions("drift -> lower_tier", "latency -> lower_tier")
    for name in ("camera: drift", "camera: latency"):
        rules.report(alert(name), S)
    rules.step(S)
    assert rules.lower_tiers == 1


def test_given_changed_times_when_stepped_then_they_count():
    rules = actions("drift -> lower_tier", action_return_s=100.0)
    rules.report(alert("camera: drift"), S)
    rules.step(S)
    rules.config = stage_config("camera", {"adapter": "a:B", "output": "o", "action_return_s": 5.0})
    rules.step(6 * S)
    assert rules.lower_tiers == 0


@given(found=st.lists(st.sampled_from([None, "drift", "latency", "gpu"]), max_size=200))
def test_given_any_alerts_when_stepped_then_steps_keep_their_distance_and_all_is_over_in_the_end(
    found,
):
    lines = ("drift -> lower_tier", "latency -> lower_rate", "gpu -> scene slow")
    rules, before, last = actions(*lines, action_return_s=10.0), 0, -math.inf
    for second in drive(rules, len(found), lambda s: [f"camera: {found[s - 1]}"] if found[s - 1] else []):
        if rules.lower_tiers > before > 0:
            assert second - last >= 2.0
        if rules.lower_tiers != before:
            before, last = rules.lower_tiers, second
        assert 0 <= rules.lower_tiers <= 2
    for second in range(len(found), len(found) + 16 * 10 * 3 + 2):
        rules.step(second * S)
    assert (rules.lower_tiers, rules.lower_rate, rules.scene) == (0, False, "")
    assert rules.words(0) == ""
