"""Every alert with every action, in a loop that is closed.

What the action does to frames is what the watch sees next.

The watch and the rules are the real ones, on a virtual clock; frames, outputs and machine are drawn.
"""

import copy
import functools
import random

import numpy as np
import pytest

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.messages import encode, header
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.models.detection_messages import MARKER_ARRAY, Detection, ImageFrame, MarkerArrays
from torchperf_ros.observe.watch.watch import StageWatch
from torchperf_ros.settings.config import stage_config
from torchperf_ros.settings.stage_options import ACTIONS, ALERTS
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.alert_rules import answer_alert, death_alert, superseded_alert
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.stage.health import Flow, SupersededRule
from torchperf_ros.stage.limits import DriftWatch
from torchperf_ros.workers.frame_ring import InputBytes

from ..api.test_pixels import image
from ..observe.telemetry.frame_records import answered_frame, frame_record
from ..safety.sensor_messages import cloud_bytes

IMAGE, CLOUD, MARKERS = "sensor_msgs/msg/Image", "sensor_msgs/msg/PointCloud2", MarkerArrays(70.0)
HZ = 5
BUDGET_MS = 50.0
USUAL_MS = (32.0, 20.0, 10.0)  # of each tier
USUAL_COUNT = (9, 6, 3)  # objects that each tier finds
TIERS = ("full", "medium", "fast")
SLOW = 2  # the tier of scene `slow`
RETURN_S = 5.0
LEARNT_S = 100
OTHERS = 35.0  # percent of the processors: an alert only where frames suffer
OUTCOMES = {
    "stale": (Outcome.LATE, Fallback.HOLD_LAST),
    "misses": (Outcome.LATE, Fallback.HOLD_LAST), "result too slow": (Outcome.LATE, Fallback.HOLD_LAST),
    "load": (Outcome.LATE, Fallback.HOLD_LAST), "deadline missed": (Outcome.LATE, Fallback.NONE),
    "model error": (Outcome.ERROR, Fallback.HOLD_LAST), "invalid output": (Outcome.INVALID, Fallback.HOLD_LAST),
    "bad input": (Outcome.BAD_INPUT, Fallback.HOLD_LAST), "worker failed": (Outcome.CRASHED, Fallback.HOLD_LAST),
    "partial result": (Outcome.PARTIAL, None),
}  # fmt: skip
SEEN_IN_IMAGES = {"input black": 0, "input white": 255, "input featureless": 127}


@functools.cache
def picture(number):
    """Bytes of an image by its number.

    `noise`, one that is `saturated`, and by others below zero of one value.
    """
    noise = np.random.default_rng(abs(number)).integers(0, 250, 32 * 48)
    pixels = (np.linspace(20, 200, noise.size) + noise // 32).astype(np.uint8)
    if number <= -2000:
        pixels[:] = noise
    elif number == -1000:
        pixels[: pixels.size * 9 // 10] = 255
    elif number < 0:
        pixels[:] = -1 - number
    return bytes(encode(image("mono8", pixels.reshape(32, 48), header=header(1, "")), IMAGE))


@functools.cache
def cloud(count):
    """Bytes of a point cloud."""
    return cloud_bytes(np.random.default_rng(count).random((count, 3)), fields="xyz", stamp_ns=1)


@functools.cache
def objects(count, place):
    found = [Detection(number % 4, 0.8, 50.0 + place, 60.0, 20.0, 30.0) for number in range(count)]
    return bytes(encode(MARKERS.build(found, ImageFrame(1, "camera", 640, 480)), MARKER_ARRAY))


class Loop:
    """A stage on paper with its watch.

    `cause` is the kind of alert for which there is a reason while it is `on`.
    """

    def __init__(self, cause, tiers_known=()):
        """With what is usual learnt, also on these tiers."""
        self.cause, self.on, self.slower, self.others = cause, False, 1.0, False  # others: a machine in use
        kind = "" if not cause.startswith("input") else CLOUD if cause == "input empty" else IMAGE
        made = MARKER_ARRAY if cause.startswith("output") else ""  # others need not be decoded
        inputs = [["/sensor", kind], ["/wheels", kind and "nav_msgs/msg/Odometry"]]
        setup = {
            "name": "camera",
            "tiers": TIERS,
            "budget_ms": BUDGET_MS,
            "output": ["/boxes", made],
            "inputs": inputs,
        }
        self.watch = StageWatch({**setup, "scenes": {"default": (0, 1, 2), "slow": (SLOW,)}})
        self.rng, self.second, self.seq, self.restarts, self.misses = random.Random(1), 1000, 0, 0, 0
        self.stood_ns, self.pending, self.drift, self.since = 0, [], DriftWatch("camera"), None
        self.flow, self.superseded = SupersededRule(), 0
        self.actions = AlertActions(stage_config("camera", {"adapter": "a:B", "output": "o"}))
        for self.least_tier in (*tiers_known, 0):
            self.frames_of(LEARNT_S)

    def with_rule(self, *lines, **values):
        """The same stage with rules, from here on."""
        loop = copy.deepcopy(self)
        given = {
            "adapter": "a:B",
            "output": "o",
            "tiers": list(TIERS),
            "actions": list(lines),
            "scenes": ["slow"],
            "scene.slow.tiers": [TIERS[SLOW]],
            "action_return_s": RETURN_S,
            "budget_ms": BUDGET_MS,
            "backup": "standby",
            **values,
        }
        loop.actions = AlertActions(stage_config("camera", given))
        return loop

    def frames_of(self, seconds):
        """Drive on for so long; the actions in force after each second, in words."""
        return [self._a_second() for _ in range(seconds)]

    def _a_second(self):
        begin_ns, actions = self.second * NS_PER_S, self.actions
        self.second += 1
        end_ns = self.second * NS_PER_S
        self.since = (self.since or self.second) if self.on else None
        rate_hz = {"input rate": HZ // 2, "input stopped": 0}.get(self.cause, HZ) if self.on else HZ
        for number in range(rate_hz):
            received_ns = begin_ns + number * NS_PER_S // rate_hz
            if self.on and self.cause == "jitter":
                received_ns += round(self.rng.uniform(0, 60) * NS_PER_MS)
            self._a_frame(received_ns)
        runs = not actions.off
        if self.on and runs and self.cause in {"restarts", "recompilation", "worker died"}:
            self.restarts += 1
            if self.cause == "worker died":
                actions.report(
                    death_alert("camera", "signal SIGSEGV", 7, self.restarts, lasting=False), end_ns
                )
        key = "restarts" if self.cause == "restarts" else "tier_full_recompiles"
        self.watch.counters.status(self.second, {key: str(self.restarts)})
        for alert in self.pending:  # of the second before: the recorder's second, and the node's
            actions.report(alert, end_ns)
        self.watch.advance(end_ns)
        self.pending = [*self.watch.alerts, *self._machine(runs)]
        self.watch.missed, self.watch.harmed = 0, False
        self.flow.look(Flow(end_ns, self.seq, self.superseded, self.seq, 0.0))
        if self.flow.broken is not None:
            actions.report(superseded_alert("camera", self.flow.broken), end_ns)
        if (alert := self.drift.step(end_ns, BUDGET_MS - 1.0)) is not None:
            actions.report(alert, end_ns)
        actions.step(end_ns)
        return actions.words(end_ns)

    def _machine(self, runs):
        """Alerts that the watch of a stage does not find."""
        harmed = self.watch.missed >= 2 or self.watch.harmed
        if self.cause == "load" or self.others:
            more = {"misses": str(self.watch.missed)}
            return [Alert(Level.WARN, "machine: load", f"others took {OTHERS} %", more)] if harmed else []
        guard = self.cause in {"plan refused", "plan unchecked"} and (
            self.on or not runs
        )  # also what is held
        of_machine = {"temperature", "gpu", "gpu memory", "memory", "memory grows", "emergency stop"}
        if guard or (self.on and self.cause in of_machine):
            return [Alert(Level.WARN, f"{'camera' if guard else 'machine'}: {self.cause}", "")]
        return []

    def _a_frame(self, received_ns):
        actions, on, cause = self.actions, self.on, self.cause
        self.seq += 1
        signals = self.watch.signals
        if (actions.lower_rate and self.seq & 1) or (on and cause == "drops" and self.rng.random() < 0.6):
            signals.superseded += 1
            self.superseded += 1
            return
        tier = SLOW if actions.scene else max(actions.lower_tiers, self.least_tier, on and cause == "tier")
        took_ms = USUAL_MS[tier] * self.slower * self.rng.lognormvariate(0.0, 0.02)
        took_ms *= 1.1 if actions.backup_active else 1.0
        if on and cause in {"latency", "drift"}:
            took_ms *= 1.3 if cause == "latency" else 1.0 + 0.05 * (self.second - self.since)
        outcome, fallback, count = Outcome.ON_TIME, None, USUAL_COUNT[tier]
        if on and cause in OUTCOMES and (cause == "partial result" or self.rng.random() < 0.5):
            outcome, fallback = OUTCOMES[cause]
        if took_ms > BUDGET_MS - 1.0:
            outcome, fallback, took_ms = Outcome.LATE, Fallback.HOLD_LAST, BUDGET_MS - 1.0
        if actions.off:
            outcome, fallback, tier, took_ms = Outcome.BAD_INPUT, Fallback.HOLD_LAST, -1, 0.2
        if on and cause == "output":
            count *= 4
        place = 0 if on and cause == "output frozen" else self.seq % 50
        count = 0 if on and cause == "output empty" else count
        made = outcome is Outcome.ON_TIME
        answer = dict(
            seq=self.seq,
            stamp_ns=received_ns,
            received_ns=received_ns,
            outcome=outcome,
            fallback=fallback,
            tier=tier,
            total_ms=took_ms,
            age_ms=40.0 if on and cause == "age" else self.rng.uniform(3.0, 5.0),
            lateness_ms=5.0 if fallback is Fallback.NONE else took_ms - BUDGET_MS,
            stale=on and cause == "stale" and outcome is Outcome.LATE,
            steps=StepTimes(1.0, 1.0, took_ms - 2.0, 0.0) if made else None,
            payload=objects(count, place) if made else None,
        )
        record = frame_record(inputs=self._inputs(received_ns), **answer)
        if (alert := answer_alert("camera", answered_frame(**answer), 1, 5, None)) is not None:
            actions.report(alert, received_ns)
        if made:
            self.drift.add(tier, took_ms)
        self.watch.frame(record)

    def _inputs(self, received_ns):
        on, cause = self.on, self.cause
        number = 7 if on and cause == "input frozen" else self.seq % 50
        if on and cause in SEEN_IN_IMAGES:
            number = -1 - SEEN_IN_IMAGES[cause]
        if on and cause == "input saturated":
            number = -1000
        if on and cause == "input noise":
            number = -2000 - self.seq % 50
        data = picture(number) if cause != "input empty" else cloud(0 if on else 100 + self.seq % 50)
        stood = on and cause == "input stands still"
        wheels_ns = self.stood_ns if stood else received_ns
        self.stood_ns = wheels_ns
        return [InputBytes(0, received_ns, 4.0, data), InputBytes(1, wheels_ns, 4.0, bytes(64))]


@functools.cache
def learnt(cause):
    return Loop(cause)


ACTION_LINES = {action: f"{action} slow" if action == "scene" else action for action in ACTIONS}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ALERTS)
def test_given_a_rule_when_its_cause_comes_and_goes_then_it_begins_and_ends_and_is_not_back(kind, action):
    loop = learnt(kind).with_rule(f"{kind} -> {ACTION_LINES[action]}")
    assert not any(loop.frames_of(5))
    loop.on = True
    during = loop.frames_of(25)
    assert any(during), "it begins"
    loop.on = False
    after = loop.frames_of(35)
    while any(after[-25:]) and len(after) < 200:
        after += loop.frames_of(10)
    assert not any(after[80:]), [second for second, words in enumerate(after) if words]


@pytest.mark.parametrize(
    "kind", ["input frozen", "input black", "input empty", "input stands still", "gpu", "age"]
)
def test_given_a_cause_that_the_action_has_no_part_in_when_it_lasts_then_the_action_does_too(kind):
    loop = learnt(kind).with_rule(f"{kind} -> off")
    loop.on = True
    during = loop.frames_of(100)
    assert all(during[20:])
    loop.on = False
    after = loop.frames_of(60)
    assert not any(after[20:])


@functools.cache
def all_tiers_learnt():
    return Loop("latency", tiers_known=(2, 1))


@pytest.mark.parametrize(
    "known", [learnt, lambda cause: all_tiers_learnt()], ids=["one tier known", "all known"]
)
@pytest.mark.parametrize("seed", range(5))
def test_given_a_rise_of_30_percent_then_one_tier_is_left_out_until_it_is_over_and_none_afterwards(
    known, seed
):
    loop = known("latency").with_rule("latency -> lower_tier", action_return_s=30.0)
    loop.rng = random.Random(seed)
    loop.on = True
    levels = [loop.frames_of(1) and loop.actions.lower_tiers for _ in range(60)]
    assert (max(levels), 1 in levels[:10]) == (1, True)
    loop.on = False
    after = [loop.frames_of(1) and loop.actions.lower_tiers for _ in range(400)]
    assert max(after) <= 1
    assert 1 not in after[75:]
    assert [(one, other) for one, other in zip(after, after[1:], strict=False) if other > one] == []


@pytest.mark.parametrize("seed", range(6))
def test_given_several_rules_that_lower_the_tier_when_all_take_30_percent_longer_then_one_tier_is_left_out(
    seed,
):
    """By whichever rule first: the others find its rise on the next tier, where they know less."""
    rng = random.Random(seed)
    kinds = ["latency", *rng.sample(["drift", "load", "misses", "age", "memory", "output"], 3)]
    rng.shuffle(kinds)
    loop = all_tiers_learnt().with_rule(*(f"{kind} -> lower_tier" for kind in kinds), action_return_s=30.0)
    loop.rng, loop.others = rng, True
    loop.frames_of(5)
    loop.slower = rng.uniform(1.25, 1.35)
    levels = [loop.frames_of(1) and loop.actions.lower_tiers for _ in range(60)]
    assert (max(levels), 1 in levels[:10]) == (1, True)
    loop.slower = 1.0
    after = [loop.frames_of(1) and loop.actions.lower_tiers for _ in range(150)]
    assert max(after) == 1
    assert not any(after[75:])


@pytest.mark.parametrize("seed", range(3))
def test_given_a_rise_that_the_next_tier_just_makes_up_for_then_noise_leaves_out_no_further_one(seed):
    loop = all_tiers_learnt().with_rule("latency -> lower_tier")
    loop.rng = random.Random(seed)
    loop.slower = USUAL_MS[0] / USUAL_MS[1]
    assert max(loop.frames_of(1) and loop.actions.lower_tiers for _ in range(60)) == 1


def test_given_a_rise_that_one_tier_does_not_make_up_for_then_the_next_is_left_out_too():
    loop = all_tiers_learnt().with_rule("latency -> lower_tier")
    loop.slower = 1.4
    loop.frames_of(20)
    assert loop.actions.lower_tiers == 1
    loop.slower = 2.2  # 44 ms on the middle one, where 32 ms were usual on the first
    loop.frames_of(20)
    assert loop.actions.lower_tiers == 2
    loop.slower = 1.0
    loop.frames_of(60)
    assert loop.actions.lower_tiers == 0
