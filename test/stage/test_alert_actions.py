"""What follows from alerts: rules on a virtual clock."""

import math
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.settings.config import node_config, stage_config
from torchperf_ros.stage.alert_actions import AlertActions, find_circles
from torchperf_ros.stage.alert_rules import answer_alert, change_alert, death_alert
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.limits import DriftWatch
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.wiring import StageInput, Wiring
from torchperf_ros.workers.worker_setup import worker_setup

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


OF_ANSWERS = {
    "misses",
    "output",
    "output empty",
    "bad input",
    "latency",
    "drift",
    "model error",
    "plan refused",
}
OF_MACHINE = {"load", "temperature", "memory", "age", "jitter", "input rate"}
MAY_CAUSE = {
    "off": OF_ANSWERS,
    "lower_rate": OF_ANSWERS | {"jitter"},
    "lower_tier": OF_ANSWERS - {"latency", "drift"},
    "scene slow": OF_ANSWERS,  # its tier is lighter
    "scene heavy": OF_ANSWERS | OF_MACHINE,
    "backup_active": OF_ANSWERS | OF_MACHINE,
}
OF_INPUTS = {"input noise", "input empty", "input stands still", "age", "jitter", "input rate"}
LASTS_S = {"misses": 10, "drift": 0, "load": 5}  # longer than what it is found for; others: 2
STAGES = ("camera.front", "camera.rear", "planner", "control")  # the first two are streams of one stage
FEEDS = {"camera.front": ["planner"], "camera.rear": ["control"], "planner": ["control"], "control": []}
KINDS = sorted(OF_ANSWERS | OF_MACHINE | OF_INPUTS)


class Node:
    """Stages with rules, and a machine in which actions have this share of the effects that they may have."""

    def __init__(self, rules, draw, share=0.9):
        self.draw, self.second, self.last, self.changes = draw, 0, {}, {name: [] for name in rules}
        scenes = {
            "scenes": ["slow", "heavy"],
            "scene.slow.tiers": ["fast"],
            "scene.heavy.tiers": ["full", "medium"],
        }
        self.given = {
            "adapter": "a:B",
            "output": "o",
            "action_return_s": 10.0,
            "backup": "standby",
            **scenes,
        }
        self.stages = {
            name: AlertActions(
                self.config(name, actions=[f"{kind} -> {action}" for kind, action in rules[name].items()])
            )
            for name in rules
        }
        fed = {name: [taker for taker in FEEDS[name] if taker in rules] for name in rules}
        find_circles({self.stages[name]: [self.stages[taker] for taker in fed[name]] for name in rules})
        self.effects = {
            (name, action): {one for one in self.reached(name, action, fed) if draw.random() < share}
            for name in rules
            for action in MAY_CAUSE
        }

    def config(self, name, **values):
        stage, _, stream = name.partition(".")
        return stage_config(stage, {**self.given, **values}, **({"stream": stream} if stream else {}))

    def reached(self, name, action, fed):
        """What the action of a stage may bring about, and after how many seconds: in the same order each time."""
        by_probes = 8 * (action == "lower_tier")  # until frames run on the tier that is allowed again
        heavy = "load" in MAY_CAUSE[action]
        others = [one for one in fed if heavy or one.split(".")[0] == name.split(".")[0]]
        near = {(other, kind): by_probes for other in others for kind in MAY_CAUSE[action]}
        takers = set(fed[name]).union(*(fed[taker] for taker in fed[name]))
        far = {(taker, kind): 8 for taker in takers for kind in OF_ANSWERS | OF_INPUTS}
        return sorted((near | far | ({(name, "load"): 0} if takers else {})).items())

    def seconds(self, count, cause):
        """Drive on for so long; what is in force after each second, by stage."""
        return [self._a_second(cause) for _ in range(count)]

    def _a_second(self, cause):
        self.second += 1
        now_ns = self.second * S
        in_force = {name: stage.words(now_ns) for name, stage in self.stages.items()}
        for (name, action), effects in self.effects.items():
            if f"-> {action} (" in in_force[name]:
                self.last.update(
                    {what: max(self.last.get(what, 0), self.second + s) for what, s in effects}
                )
        found = {what for what, at in self.last.items() if self.second - at <= LASTS_S.get(what[1], 2)}
        for stage, kind in self.draw.sample(sorted(found | cause), len(found | cause)):
            name = "machine" if kind in OF_MACHINE - OF_INPUTS else stage
            for each in self.stages.values():
                each.report(alert(f"{name}: {kind}"), now_ns)
        for name, each in self.stages.items():
            self.changes[name] += each.step(now_ns)
        return {name: words for name, each in self.stages.items() if (words := each.words(now_ns))}


@pytest.mark.parametrize(("topic", "goes_on"), [("seen", False), ("map", True)])
def test_given_two_stages_when_the_one_takes_what_the_other_publishes_then_doubt_reaches_over_both(
    topic, goes_on
):
    """The camera's tier may be why the planner has other inputs; where it takes a map, it is not."""
    lines = {"seen": ["load -> lower_tier"], "plan": ["input noise -> backup_active"]}
    given = {"adapter": "a:B", "backup": "standby", "tiers": ["full", "fast"], "action_return_s": 10.0}
    stages = []
    for output, actions in lines.items():
        config = stage_config(output, {**given, "output": output, "actions": actions})
        ports = StagePorts(*[lambda *_: None] * 5)
        stages.append(Stage(config, worker_setup(config, node_config({}, {})), ports, lambda: 0))
    camera, planner = stages
    taken = [[], [StageInput(planner, 0, topic, "std_msgs/msg/String", stamped=False)]]
    Wiring(stages, taken, str)
    found, in_force = ["machine: load", "plan: input noise"], []
    for second in range(1, 60):
        for stage in stages:
            for name in found:
                stage.actions.report(alert(name), second * S)
            stage.act(second * S)
        in_force.append((camera.actions.lower_tiers, planner.actions.backup_active))
    for stage in stages:
        stage.stop()
    assert in_force[0] == (1, True)
    assert all(one == (1, True) for one in in_force) is goes_on


@pytest.mark.parametrize("names", [STAGES[:1], STAGES[:2], STAGES[0::2], STAGES])
@settings(max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 1 << 32))
def test_given_stages_whose_actions_cause_each_others_alerts_when_the_first_cause_is_over_then_all_end(
    names, seed
):
    """Effects are drawn of all that an action may bring about, by the machine and by the stage's outputs.

    In between, each stage gets another configuration, as by a parameter or another version.
    """
    draw = random.Random(seed)
    rules = {
        name: {draw.choice(KINDS): draw.choice(sorted(MAY_CAUSE)) for _ in range(draw.randrange(4))}
        for name in names
    }
    rules[draw.choice(names)]["misses"] = draw.choice(sorted(MAY_CAUSE))
    node = Node(rules, draw)
    causes = [(name, kind) for name, lines in rules.items() for kind in lines]
    begun = node.seconds(draw.randrange(5, 60), {draw.choice(causes)})
    for name, stage in node.stages.items():
        stage.config = node.config(name, budget_ms=70.0, action_return_s=draw.choice([5.0, 10.0, 20.0]))
    begun += node.seconds(draw.randrange(60), {draw.choice(causes)})
    assert any(begun)
    assert not any(node.seconds(1000, set())[-200:])


@pytest.mark.parametrize("cause", ["gpu", "latency"])
def test_given_rules_that_make_no_circle_when_a_cause_lasts_then_the_actions_of_all_stages_do_too(cause):
    """The tiers of the one change what the other takes, and not the other way round."""
    rules = {name: {cause: "lower_tier", "input noise": "off"} for name in ("camera.front", "planner")}
    node = Node(rules, random.Random(1))
    lasts = {(name, kind) for name in rules for kind in (cause, "input noise")}
    for in_force in node.seconds(500, lasts):
        assert {name: words.count("step") for name, words in in_force.items()} == dict.fromkeys(rules, 2)
    assert not any(node.seconds(200, set())[-100:])


def test_given_a_circle_over_two_stages_when_its_cause_is_over_then_it_ends_and_each_stage_says_why():
    """The second worker loads the machine; the lower tier that follows has the planner find other inputs."""
    node = Node(
        {"camera.front": {"load": "lower_tier"}, "planner": {"output": "backup_active"}},
        random.Random(2),
        share=1.0,
    )
    assert any(len(in_force) == 2 for in_force in node.seconds(20, {("planner", "output")}))
    assert not any(node.seconds(400, set())[-300:])
    assert {name: {line.partition(":")[0] for line in lines} for name, lines in node.changes.items()} == {
        "camera.front": {"load -> lower_tier"},
        "planner": {"output -> backup_active"},
    }
    assert "as another action may have caused the alert" in str(node.changes)


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


def test_given_a_stream_when_an_alert_of_its_stage_or_of_another_stream_is_found_then_only_the_first_counts():
    """The memory of workers is the whole stage's: the streams share them."""
    values = {"adapter": "a:B", "output": "o", "actions": ["memory grows -> lower_tier"]}
    for name, counts in (("camera", 1), ("camera.front", 1), ("camera.rear", 0), ("camera/7.2", 0)):
        rules = AlertActions(stage_config("camera", values, stream="front"))
        rules.report(alert(f"{name}: memory grows"), S)
        rules.step(S)
        assert rules.lower_tiers == counts


def test_given_an_alert_with_a_suffix_when_reported_then_its_kind_counts():
    rules = actions("temperature -> lower_rate", "input frozen -> off")
    for name in ("machine: temperature of cpu-thermal", "camera: input frozen (/image)"):
        rules.report(alert(name), S)
    lines = rules.step(S)
    assert rules.lower_rate
    assert rules.off
    assert lines == ["temperature -> lower_rate: step 1 begins", "input frozen -> off: step 1 begins"]
    assert "input frozen -> off (1 step, for 4 s)" in rules.words(5 * S)


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


# -- which frames, deaths and trends are alerts


SUSTAINED = 10


@pytest.fixture
def tell(make_answer):
    def answered(outcome=Outcome.LATE, misses=1, fallback=Fallback.HOLD_LAST, **values):
        return answer_alert("perception", make_answer(outcome, fallback, **values), misses, SUSTAINED, None)

    return answered


def test_given_a_miss_when_told_then_it_is_a_warning_with_what_one_asks_next(tell):
    anomaly = tell(seq=42, reason="tier full was not done after 49.0 ms", total_ms=49.5)
    assert anomaly.level is Level.WARN
    assert anomaly.name == "perception: result too slow"
    assert anomaly.message == "tier full was not done after 49.0 ms"
    assert anomaly.values == {
        "seq": "42",
        "outcome": "late",
        "fallback": "hold_last",
        "total_ms": "49.500",
        "budget_ms": "50.000",
        "misses_in_a_row": "1",
        "value": "49.500",
        "baseline": "50.000",
    }


@pytest.mark.parametrize("outcome", [Outcome.ON_TIME, Outcome.STARTING])
def test_given_a_frame_that_is_no_anomaly_when_answered_then_nothing_is_told(tell, outcome):
    assert tell(outcome, misses=100) is None


@pytest.mark.parametrize(
    ("outcome", "name"),
    [
        (Outcome.LATE, "result too slow"),
        (Outcome.HUNG, "worker failed"),
        (Outcome.CRASHED, "worker failed"),
        (Outcome.ERROR, "model error"),
        (Outcome.INVALID, "invalid output"),
        (Outcome.BAD_INPUT, "bad input"),
        (Outcome.PARTIAL, "partial result"),
    ],
)
def test_given_an_outcome_when_told_then_its_kind_is_named(tell, outcome, name):
    anomaly = tell(outcome)
    assert anomaly.name == f"perception: {name}"
    assert anomaly.values["outcome"] == outcome.word


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.HUNG, Outcome.CRASHED])
def test_given_an_answer_when_it_left_before_its_deadline_then_none_is_said_to_be_missed(tell, outcome):
    assert "deadline missed" not in tell(outcome, lateness_ms=0.0).name
    assert tell(outcome, lateness_ms=0.1).name == "perception: deadline missed"
    assert tell(outcome, lateness_ms=-1.0, fallback=Fallback.NONE).name == "perception: deadline missed"


def test_given_a_death_when_told_then_a_lasting_one_is_an_error():
    first = death_alert("planning", "exit status 1\nTraceback", pid=7, restarts=1, lasting=False)
    assert (first.level, first.name, first.message) == (
        Level.WARN,
        "planning: worker died",
        "exit status 1",
    )
    assert first.values == {"pid": "7", "restarts": "1", "detail": "Traceback"}
    assert death_alert("planning", "and again", 9, 3, lasting=True).level is Level.ERROR


def test_given_something_about_a_model_when_told_then_it_is_never_held_back():
    anomaly = change_alert("planning", "model", "tier full: refused")
    assert (anomaly.name, anomaly.level, anomaly.once) == ("planning: model", Level.WARN, True)


FRESH_MS = 49.0


def watched(took_ms, *, seconds=60, seed=0, noise=0.03, tier=lambda second: 0, hz=30):
    """The seconds in which there was an alert.

    `took_ms` is what a frame takes in a second, without noise.
    """
    watch, draw, found = DriftWatch("camera"), random.Random(seed), {}
    for second in range(1, seconds + 1):
        for frame in range(hz):
            at_s = second - 1 + frame / hz
            watch.add(tier(second), took_ms(at_s) * draw.lognormvariate(0.0, noise))
        if (alert := watch.step(second * S, FRESH_MS)) is not None:
            found[second] = alert
    return found


@pytest.mark.parametrize("ramp_s", [10, 20, 60])
@pytest.mark.parametrize("seed", range(3))
def test_given_a_ramp_when_it_leads_past_the_deadline_then_it_is_found_before_that(ramp_s, seed):
    found = watched(lambda s: 34.0 * (1 + 0.5 * min(max(0.0, s - 20) / ramp_s, 1.0)), seconds=90, seed=seed)
    reached_s = 20 + ramp_s * (FRESH_MS / 34.0 / 1.08 - 1) / 0.5  # by one frame in 200, with the noise
    first = min(found)
    assert 20 < first <= reached_s
    alert = found[first]
    assert (alert.level, alert.name) == (Level.WARN, "camera: drift")
    assert "grows by" in alert.message


@pytest.mark.parametrize(
    ("took_ms", "more"),
    [
        (lambda s: 44.0, {}),  # near the deadline, but steady
        (lambda s: 20.0 * (1 + 0.5 * min(s / 20, 1.0)), {}),  # grows, and has room
        (lambda s: 44.0 * (1 - 0.3 * min(s / 20, 1.0)), {}),  # shrinks
        (lambda s: 0.0, {}),
        (lambda s: 80.0 if round(s * 30) % 200 == 7 else 40.0, {"noise": 0.01}),  # single stalls
        # a change of the tier: times of two make no trend
        (lambda s: 20.0 if s < 30 else 44.0, {"tier": lambda second: int(second > 30), "noise": 0.01}),
    ],
)
def test_given_times_that_do_not_lead_past_the_deadline_when_judged_then_there_is_no_alert(took_ms, more):
    assert watched(took_ms, **more) == {}


def test_given_few_frames_when_judged_then_they_wait_until_they_are_enough():
    watch = DriftWatch("camera")
    for second in range(1, 5):
        watch.add(0, 10.0)
        assert watch.step(second * S, FRESH_MS) is None
    assert len(watch.frames) == 4


def test_given_frames_of_many_tiers_when_none_has_enough_then_there_is_no_alert_but_they_count_as_judged():
    watch = DriftWatch("camera")
    for frame in range(30):
        watch.add(frame % 10, 100.0)
    assert watch.step(S, FRESH_MS) is None
    assert not watch.frames
