"""A real node whose camera freezes, in part or as a whole, and whose models become slow or fail.

/perf/anomaly has it, and the rules of its stages act on it.
"""

import json
import os
import time

import jsonschema
import pytest

pytest.importorskip("rclpy")

from sensor_msgs.msg import Image

from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.recorder import schema

EVERY_S = 0.1
HEIGHT, STEP = 48, 192
OFF, OTHER, TIERS = 1, 2, 3  # stages, after `camera`


def picture(fault, before):
    """Bytes of the camera's next picture, by the one before: rows of their own brightness, and noise."""
    noise = os.urandom(HEIGHT * STEP)
    live = bytes(4 * (at // STEP) + (byte & 3) for at, byte in enumerate(noise))
    half = HEIGHT // 2 * STEP
    return {
        "": live,
        "frozen": before,
        "black": bytes(byte & 3 for byte in noise),
        "noise": noise,
        "half": live[:half] + before[half:],
    }[fault]


RETURN_S = 3.0
ACTIONS = {
    "other": {
        "bad": "bad input -> lower_rate",
        "raise": "model error -> scene slow",
        "nan": "invalid output -> backup_active",
    },
    "tiers": {"nan": "invalid output -> lower_tier"},
}
"""By stage, what is ordered of its model, and the rule that acts on it."""


class Watched:
    """A node with a recorder that watches its stages, which all take the same images.

    `camera` has no rules. The others have the rules whose actions are tried. Frames come at 10 Hz while
    something is waited for.
    """

    def __init__(self, graph, start_node, obedient, folder):
        self.records = folder / "evidence" / "records"
        own = {"recorder": True, "evidence_dir": str(folder / "evidence")}
        self.orders = {name: folder / name for name in ("camera", "off", *ACTIONS)}
        for orders in self.orders.values():
            orders.mkdir()

        def stage(name, **changed):
            usual = {
                "budget_ms": 200.0,
                "hang_ms": 15_000.0,
                "fallback": ["stop"],
                "output": f"{name}_point",
            }
            return obedient(self.orders[name], **usual | changed)

        off = ["input frozen -> off"]
        own_of = {
            "other": {"scenes": ["slow"], "scene.slow.tiers": ["fast"], "backup": "standby"},
            "tiers": {"tiers": ["full", "medium", "fast"]},
        }
        acting = {
            name: stage(name, actions=list(rules.values()), action_return_s=RETURN_S, **own_of[name])
            for name, rules in ACTIONS.items()
        }
        self.node = start_node(
            {
                "stages": list(self.orders),
                "camera": stage("camera"),
                "off": stage("off", actions=off, action_return_s=RETURN_S),
                **acting,
                **own,
            }
        )
        self.camera = self.node.publisher("image", Image)
        self.node.wait_until_ready(*self.orders)
        self.image = Image(width=STEP // 3, height=HEIGHT, encoding="rgb8", step=STEP)

    def in_force(self, stage):
        """The actions of a stage that are in force, in words."""
        return self.node.values(stage)["actions"]

    def taken(self, stage):
        """How many steps a stage has taken so far."""
        return int(self.node.values(stage)["actions_taken"])

    def drive_on(self, seconds, fault=""):
        """Send images for so long."""
        ends_s = time.monotonic() + seconds
        self.drive(lambda: time.monotonic() > ends_s, "time to pass", fault)

    def told(self, name, level):
        """The first status of this name and level."""
        statuses = (status for array in self.node.anomalies for status in array.status)
        return next((s for s in statuses if s.name == name and ord(s.level) == level), None)

    def drive(self, until, what, fault=""):
        """Send images until a condition holds; returns its value."""
        due_s = time.monotonic()

        def step():
            nonlocal due_s
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + EVERY_S
                stamp = self.image.header.stamp
                stamp.sec, stamp.nanosec = divmod(time.time_ns(), 1_000_000_000)
                self.image.data = picture(fault, bytes(self.image.data))
                self.camera.publish(self.image)
            return until()

        return self.node.wait_for(step, what)


@pytest.fixture(scope="module")
def watched(graph, start_node, obedient, tmp_path_factory):
    return Watched(graph, start_node, obedient, tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize(
    ("fault", "name", "text"),
    [
        (
            "half",
            "camera: input frozen",
            "50% of the picture of {}/image is frozen (x 0 to 100, y 50 to 100 %)",
        ),
        ("noise", "camera: input noise", "images of {}/image are noise"),
    ],
)
def test_given_a_camera_at_fault_when_it_goes_on_with_new_stamps_then_an_error_says_so(
    watched, fault, name, text
):
    seen = len(watched.node.rows_of(0))
    watched.drive(
        lambda: len(watched.node.rows_of(0)) > seen + 40, "frames"
    )  # of which every part has changed all the time
    assert watched.told(name, 2) is None
    status = watched.drive(lambda: watched.told(name, 2), "the finding", fault)
    assert text.format(watched.node.namespace) in status.message
    values = {pair.key: pair.value for pair in status.values}
    assert values["topic"] == f"{watched.node.namespace}/image"
    # There is one incident a minute. On a busy machine an input that stopped for a moment may have had it.
    told = [pair for array in watched.node.anomalies for one in array.status for pair in one.values]
    assert any(pair.key == "evidence" and pair.value for pair in told)


def test_given_a_model_that_is_slow_when_deadlines_are_missed_then_their_share_is_told_with_the_load_of_others(
    watched,
):
    order = watched.orders["camera"] / "sleep-64"

    def told():
        order.touch()  # again and again: too few frames may come while it sleeps
        statuses = [
            one for array in watched.node.anomalies for one in array.status if one.name == "camera: misses"
        ]
        values = [
            {pair.key: pair.value for pair in one.values} | {"message": one.message} for one in statuses
        ]
        return next(
            (each for each in values if each.get("others_cpu_percent")), None
        )  # not known in the first second

    values = watched.drive(told, "misses")
    order.unlink(missing_ok=True)
    assert "late" in values["message"]
    assert 0 <= float(values["others_cpu_percent"]) <= 100
    assert int(values["misses"]) >= 3


def test_given_the_records_when_read_then_there_are_signals_for_each_second(watched):
    def signals():
        lines = [
            line for path in watched.records.rglob("*.jsonl") for line in path.read_text().splitlines(True)
        ]
        # the last one may be being written
        told = [json.loads(line) for line in lines if line.endswith("\n")]
        found = [line for line in told if line["kind"] == "signals"]
        return (
            len(found) >= 3
            and {"rate_hz", "latency_p50_ms"} <= set(found[-1]["stages"]["camera"])
            and found
        )

    signals = watched.drive(signals, "three seconds' signals")
    for line in signals:
        jsonschema.Draft202012Validator(json.loads(schema())).validate(line)
    assert "others_cpu_percent" in signals[-1]["machine"]
    assert "recorder_gpu" in watched.node.values("node")


def test_given_rules_that_turn_the_stage_off_when_the_camera_is_well_again_then_it_runs_again_and_stays(
    watched,
):
    """The stage that is off must not keep the alert going that keeps it off."""
    watched.drive(lambda: not watched.in_force("off"), "the faults of before to be over")
    before = watched.taken("off")
    rule = "input frozen -> off"
    watched.drive(lambda: rule in watched.in_force("off"), rule, "frozen")
    watched.drive_on(RETURN_S + 2.0, "frozen")
    assert rule in watched.in_force("off")  # it is still seen
    watched.drive(lambda: not watched.in_force("off"), "the stage to run again")
    watched.drive_on(3.0)
    assert not watched.in_force("off")
    outcomes = {Outcome(int(row["outcome"])) for row in watched.node.rows_of(OFF)[-20:]}
    assert outcomes <= {Outcome.ON_TIME, Outcome.LATE}
    assert watched.taken("off") == before + 1


def test_given_rules_when_their_causes_were_there_once_then_each_action_begins_and_ends_once(watched):
    began = len(watched.node.rows_of(TIERS))
    due = {name: watched.taken(name) + len(rules) for name, rules in ACTIONS.items()}
    waited_for = {(name, rule) for name, rules in ACTIONS.items() for rule in rules.values()}
    for name, rules in ACTIONS.items():
        for order in rules:
            (watched.orders[name] / f"{order}-64").touch()

    def all_began():
        in_force = {name: watched.in_force(name) for name in ACTIONS}
        waited_for.difference_update({(name, rule) for name, rule in waited_for if rule in in_force[name]})
        return not waited_for

    watched.drive(all_began, lambda: f"{waited_for}")
    watched.drive(lambda: not any(map(watched.in_force, ACTIONS)), "their end")
    watched.drive_on(2.0 * RETURN_S)
    # The number of steps tells of one that was taken in between, too, as of a second tier left out.
    assert {name: (watched.in_force(name), watched.taken(name)) for name in ACTIONS} == {
        name: ("", steps) for name, steps in due.items()
    }
    for stage in (OTHER, TIERS):
        outcome = Outcome(int(watched.node.rows_of(stage)[-1]["outcome"]))
        assert outcome in {Outcome.ON_TIME, Outcome.LATE}
    tiers = [
        row["tier"] for row in watched.node.rows_of(TIERS)[began:] if row["outcome"] == Outcome.ON_TIME
    ]
    assert (set(tiers), tiers[-1]) == ({0.0, 1.0}, 0.0)
