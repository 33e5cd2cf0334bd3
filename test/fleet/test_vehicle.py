"""One vehicle.

What it does about plans, what it remembers, and that a kill at any moment leaves one version to run.
"""

import datetime
import hashlib
import os
import re
import signal
import tempfile
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from test.settings.test_files import MIB
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import PlanError, RolloutStep, bucket_percent
from torchperf_ros.fleet.records import read_records, record_files
from torchperf_ros.fleet.signature import read_public_key, read_signed
from torchperf_ros.fleet.vehicle import (
    STATE_FILE,
    Role,
    RolloutStateError,
    VehicleRollout,
    Version,
    load_state,
)

from .conftest import EARLY, LATE, NOW, Desk, minute, plan_with, serving


def begun(vehicle):
    """On trial."""
    assert vehicle.look().role is Role.SERVING
    vehicle.begins_trial()
    return vehicle


def on_trial(desk, **changes):
    """A vehicle whose candidate is on trial, under a plan of one step."""
    desk.publish(serving(**changes))
    return begun(desk.vehicle())


def served(vehicle):
    """Until the candidate is good."""
    begun(vehicle).minute(minute())
    return vehicle


def test_given_steps_when_a_vehicle_looks_then_its_bucket_decides_and_is_named(desk):
    plan = desk.publish(plan_with())
    decision = desk.vehicle().look()
    assert decision.role is Role.SHADOW
    assert decision.why.startswith(f"vehicle {EARLY} is in bucket 0.")
    assert "step 0 exposes 1 % as a shadow" in decision.why
    assert (decision.serve.name, decision.beside.name, decision.beside.parameters) == (
        "base",
        "7",
        plan.candidate,
    )
    later = desk.vehicle(LATE)
    assert later.look().role is Role.NONE
    desk.publish(replace(plan, serial=plan.serial + 1, step=5))
    assert later.look().role is Role.SHADOW
    assert later.look().why.endswith("10 min as a shadow come first")
    for _ in range(10):
        later.minute(minute("shadow"))
    decision = later.look()
    assert (decision.role, decision.serve.name, decision.beside.name) == (Role.SERVING, "7", "base")


def test_given_minutes_without_a_frame_of_both_when_they_pass_then_the_candidate_has_not_been_beside(desk):
    desk.publish(serving(shadow_min=2.0))
    vehicle = desk.vehicle()
    for _ in range(9):
        vehicle.minute(minute("shadow", frames=0))
        assert vehicle.look().role is Role.SHADOW
    for _ in range(2):
        assert vehicle.look().role is Role.SHADOW
        vehicle.minute(minute("shadow"))
    assert vehicle.look().role is Role.SERVING


def test_given_a_probation_when_served_then_the_candidate_is_good_and_comes_up_after_a_start(desk):
    vehicle = on_trial(desk, probation_min=2.0)
    vehicle.minute(minute())
    assert desk.vehicle().running.name == "base"
    vehicle.minute(minute())
    assert desk.vehicle().running.name == "7"
    decision = desk.vehicle().look()
    assert (decision.role, decision.serve.name, decision.beside.name) == (Role.SERVING, "7", "base")
    desk.publish(replace(serving(), serial=serving().serial + 1, step=1, state="done"))
    decision = desk.vehicle(EARLY).look()
    assert (decision.role, decision.serve.name, decision.beside) == (Role.NONE, "7", None)


def test_given_a_broken_guard_when_rolled_back_then_the_version_stays_out_also_under_a_new_serial(desk):
    plan = desk.publish(serving())
    vehicle = served(desk.vehicle())
    assert vehicle.minute(minute(deaths=1)) == ""
    broken = vehicle.minute(minute(deaths=1))
    assert broken == "worker_deaths 2 is over its limit 1"
    decision = vehicle.rolled_back(broken)
    assert (decision.role, decision.serve.name) == (Role.NONE, "base")
    desk.publish(replace(plan, serial=plan.serial + 1, step=1))
    for one in (vehicle, desk.vehicle()):
        assert one.look().role is Role.NONE
        assert one.look().why == f"version 7 was rolled back here: {broken}"
        assert one.running.name == "base"
    again = desk.publish(replace(plan, serial=plan.serial + 2, step=1, again=("7",)))
    assert (back := served(desk.vehicle())).look().role is Role.SERVING
    back.rolled_back("worse than before")
    for change in (again.advanced, again.held):
        desk.publish(change(again.issued))
        assert desk.vehicle().look().why == "version 7 was rolled back here: worse than before"


def test_given_a_second_version_when_it_is_rolled_back_then_the_first_one_is_back(desk):
    first = desk.publish(serving())
    vehicle = served(desk.vehicle())
    second = desk.publish(replace(first, serial=first.serial + 1, version="8"))
    decision = vehicle.look()
    assert (decision.role, decision.serve.name, decision.beside.name) == (Role.SERVING, "8", "7")
    vehicle.begins_trial()
    assert desk.vehicle().running.name == "7"
    assert vehicle.rolled_back("x").serve.name == "7"
    desk.publish(replace(second, serial=first.serial + 2, revoked=("7", "8")))
    assert vehicle.look().serve.name == "base"
    assert desk.vehicle().running.name == "base"


def test_given_the_owner_rolls_back_when_a_vehicle_looks_then_it_goes_back_from_trial_and_from_good(desk):
    plan = desk.publish(serving())
    tried, good = begun(desk.vehicle()), desk.vehicle()
    desk.publish(plan.rolled_back(NOW))
    decision = tried.look()
    assert (decision.serve.name, tried.state.trial, "revoked" in decision.why) == ("base", "", True)
    assert good.running.name == "base"


@pytest.mark.parametrize("days", [-4000, 40, 4000])
@pytest.mark.parametrize(
    "changes", [{"state": "rolled_back"}, {"revoked": ("7",)}, {"version": "8", "revoked": ("7",)}]
)
def test_given_a_plan_that_takes_back_when_clocks_are_wrong_or_it_comes_late_then_it_is_obeyed_all_the_same(
    desk, days, changes
):
    plan = desk.publish(serving())
    served(desk.vehicle())
    desk.publish(replace(plan, serial=plan.serial + 1, issued=NOW + datetime.timedelta(days=1), **changes))
    desk.now = NOW + datetime.timedelta(days=days)
    assert desk.vehicle().look().serve.name == "base"
    desk.plan_path.unlink()
    assert desk.vehicle().running.name == "base"


def test_given_a_version_that_was_revoked_before_it_came_here_when_a_plan_has_it_then_only_again_brings_it(
    desk,
):
    plan = desk.publish(serving().rolled_back(NOW))
    assert desk.vehicle().look().role is Role.NONE
    later = desk.publish(replace(serving(), serial=plan.serial + 1))
    assert desk.vehicle().look().why.endswith(f"revoked by serial {plan.serial}")
    desk.publish(replace(later, serial=plan.serial + 2, again=("7",)))
    assert desk.vehicle().look().role is Role.SERVING


@pytest.mark.parametrize("bring", [begun, served])
def test_given_a_version_that_ran_when_a_plan_has_other_parameters_for_it_then_it_needs_another_name(
    desk, bring
):
    plan = desk.publish(serving(probation_min=1.0 if bring is served else 5.0))
    bring(desk.vehicle()).minute(minute())
    other = replace(plan, serial=plan.serial + 1, candidate={"engine": "compile"})
    desk.publish(other)
    decision = desk.vehicle().look()
    assert (decision.serve.parameters, decision.plan) == (plan.candidate, plan)
    assert "has another candidate, or other files" in decision.problem
    desk.publish(replace(other, version="8"))
    assert desk.vehicle().look().serve.name == "8"


@pytest.mark.parametrize("ended", [False, True])
def test_given_another_plan_or_none_by_now_when_a_version_is_rolled_back_then_it_stays_out_and_no_other(
    desk, ended
):
    plan = desk.publish(serving())
    vehicle = served(desk.vehicle())
    desk.publish(replace(plan, serial=plan.serial + 1, version="8"))
    desk.now = plan.expires + datetime.timedelta(days=1) if ended else NOW
    vehicle.look()
    assert vehicle.rolled_back("worker_deaths 2", "7").serve.name == "base"
    assert vehicle.state.barred == {"7": "worker_deaths 2"}


def test_given_a_hold_when_vehicles_look_then_those_that_began_go_on_and_no_other_begins(desk):
    plan = desk.publish(serving())
    tried = begun(desk.vehicle())
    tried.minute(minute())
    other = next(f"car-x{n}" for n in range(9999) if bucket_percent(plan.name, f"car-x{n}") < plan.share)
    assert desk.vehicle(other).look().role is Role.SERVING
    desk.publish(plan.held(NOW))
    assert tried.look().role is Role.SERVING
    assert desk.vehicle(other).look().why.endswith("the roll-out is held, and no vehicle begins")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda plan: replace(plan, serial=plan.serial - 1), "a replay"),
        (lambda plan: replace(plan, version="9"), "another plan with that serial was accepted"),
        (
            lambda plan: replace(plan, serial=plan.serial + 1, steps=(RolloutStep(0.5),), step=0),
            "exposes 0.5 %, less than",
        ),
        (lambda plan: replace(plan, serial=plan.serial + 1, stage="planning"), "is for stage 'planning'"),
        (
            lambda plan: replace(plan, serial=plan.serial + 1, issued=NOW + datetime.timedelta(hours=1)),
            "Is the clock",
        ),
        (
            lambda plan: replace(
                plan,
                serial=plan.serial + 1,
                issued=NOW - datetime.timedelta(days=9),
                expires=NOW - datetime.timedelta(days=1),
            ),
            "expired",
        ),
    ],
)
def test_given_a_plan_that_must_not_be_followed_when_it_comes_then_it_is_said_and_the_last_one_holds(
    desk, change, match
):
    plan = desk.publish(serving())
    assert desk.vehicle().look().role is Role.SERVING
    desk.publish(change(plan))
    decision = desk.vehicle().look()
    assert match in decision.problem
    assert f"the last accepted plan, serial {plan.serial} holds" in decision.problem
    assert (decision.role, decision.plan) == (Role.SERVING, plan)
    desk.plan_path.unlink()
    assert "is not there; the last accepted plan" in desk.vehicle().look().problem


def test_given_clocks_that_jump_when_a_vehicle_looks_then_ten_minutes_are_tolerated_and_the_end_stays_the_end(
    desk,
):
    plan = desk.publish(serving())
    desk.now = NOW - datetime.timedelta(minutes=9)
    assert desk.vehicle().look().role is Role.SERVING
    desk.now = NOW - datetime.timedelta(
        days=400
    )  # a clock that lost its battery: the signature says it is later
    assert desk.vehicle().look().role is Role.SERVING
    desk.now = plan.expires + datetime.timedelta(days=1)
    decision = desk.vehicle().look()
    assert (decision.role, decision.plan) == (Role.NONE, None)
    assert "expired" in decision.problem


def sum_of(data):
    return hashlib.sha256(data).hexdigest()


def test_given_files_when_one_is_missing_or_changed_then_nothing_is_loaded_also_with_its_times_set_back(
    desk,
):
    file = desk.folder / "a.pt2"
    desk.publish(serving(files={"a.pt2": sum_of(b"abc")}))
    vehicle = desk.vehicle()
    assert "a.pt2: cannot be read" in vehicle.look().why
    file.write_bytes(b"abc")
    assert vehicle.look().role is Role.SERVING
    before = file.stat()
    file.write_bytes(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    decision = vehicle.look()
    assert (decision.role, "and the plan says ba7816bf8f01cfea..." in decision.why) == (Role.NONE, True)


@pytest.fixture
def published(desk):
    """A plan with a file that is there."""
    (desk.folder / "a.pt2").write_bytes(b"abc")
    desk.publish(serving(files={"a.pt2": sum_of(b"abc")}))


CHANGES = {
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "too large": lambda path: os.truncate(path, 64 * MIB),
    "of others": lambda path: path.chmod(0o666),
}


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        ("a fifo", "plan.json", "plan.json: cannot be read: is a FIFO and no file"),
        ("a fifo", "a.pt2", "a.pt2: cannot be read (is a FIFO and no file)"),
        ("a fifo", STATE_FILE, "cannot be read: is a FIFO and no file"),
        ("a fifo", "key.pub", "key.pub: cannot be read (is a FIFO and no file)"),
        ("too large", "plan.json", "cannot be read: has more than 1,048,576 bytes; the last accepted plan"),
        ("too large", "a.pt2", "and the plan says"),  # packages are large
        ("too large", STATE_FILE, "has more than 16,777,216 bytes"),
        ("too large", "key.pub", "cannot be read (has more than 1,048,576 bytes)"),
        ("of others", "plan.json", "plan.json (mode 0666)"),
        ("of others", "a.pt2", "a.pt2 (mode 0666)"),
        ("of others", "key.pub", "key.pub (mode 0666)"),
    ],
)
def test_given_a_file_that_is_none_or_too_large_or_of_others_when_it_looks_then_it_says_so_at_once_and_holds_little(
    desk, change, name, said
):
    """`read_bounded` and `open_regular` are tested with everything that is no file; here, their use."""
    vehicle = desk.vehicle()
    assert vehicle.look().role is Role.SERVING
    CHANGES[change](desk.folder / (EARLY if name == STATE_FILE else "") / name)
    tracemalloc.start()
    try:
        if name == "key.pub":
            with pytest.raises(ConfigError, match=re.escape(said)):
                desk.vehicle()
        else:
            decision = (desk.vehicle() if name == STATE_FILE else vehicle).look()
            assert said in f"{decision.problem} {decision.why}"
            assert decision.role is (Role.SERVING if name == "plan.json" else Role.NONE)
        assert tracemalloc.get_traced_memory()[1] < 40 * MIB
    finally:
        tracemalloc.stop()


def other_plan(desk, **changes):
    """Another node of the same vehicle, whose plan is another file."""
    path = desk.folder / "rear.json"
    path.write_text(desk.plan_path.read_text())
    return VehicleRollout(
        desk.folder / EARLY, {"vehicle": EARLY}, desk.public, path, "perception", **changes
    )


def test_given_a_folder_that_another_node_uses_when_it_starts_then_it_is_refused_until_that_one_ends(desk):
    desk.publish(serving())
    vehicle = desk.vehicle()
    with pytest.raises(RolloutStateError, match="another node uses it.*name or namespace of its own"):
        other_plan(desk)
    begun(vehicle)
    assert desk.vehicle().state.trial == "7"  # the node itself, which is configured again
    vehicle.stops()
    other_plan(desk).stops()


def test_given_a_damaged_state_when_it_comes_up_then_it_runs_its_base_keeps_the_file_and_doubts_the_plan(
    desk,
):
    plan = desk.publish(serving())
    served(desk.vehicle())
    state = desk.folder / EARLY / STATE_FILE
    for damage in (
        b"",
        b"{}",
        state.read_bytes()[:-9],
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        state.read_bytes().replace(b'"good"', b'"god"'),
    ):
        for old in state.parent.glob("state.damaged-*"):
            old.unlink()
        state.write_bytes(damage)
        vehicle = desk.vehicle()
        assert vehicle.running.name == "base"
        assert "is damaged" in vehicle.look().problem
        assert [one.read_bytes() for one in state.parent.glob("state.damaged-*.json")] == [damage]
        assert "in doubt" in desk.vehicle().look().why
    desk.publish(replace(plan, serial=plan.serial + 1, again=("7",)))
    assert desk.vehicle().look().role is Role.SERVING


def test_given_a_vehicle_with_another_key_when_a_plan_of_it_comes_then_it_is_followed_and_older_serials_are_not(
    desk,
):
    plan = desk.publish(serving())
    served(desk.vehicle())
    for path in (desk.folder / "key", desk.public):
        path.unlink()
    desk.__post_init__()
    assert "signed with the key" in desk.vehicle().look().problem
    assert desk.vehicle().running.name == "7"
    desk.publish(replace(plan, serial=plan.serial - 1))
    assert "a replay" in desk.vehicle().look().problem
    desk.publish(replace(plan, serial=plan.serial + 1))
    assert desk.vehicle().look().role is Role.SERVING


def test_given_a_plan_that_is_refused_when_looked_at_again_and_again_then_the_record_says_so_once(desk):
    desk.publish(replace(serving(), stage="planning"))
    vehicle = desk.vehicle()
    for _ in range(3):
        vehicle.look()
    (event,) = read_records(record_files([desk.folder])).events
    assert (event["what"], event["vehicle"]) == ("refused", EARLY)
    assert "is for stage 'planning'" in event["reason"]


def disk(number=28):
    """That takes nothing: full (28) or read-only (30); 0: as it is."""
    error = OSError(number, os.strerror(number)) if number else None
    return patch("os.fsync", side_effect=error)


@pytest.mark.parametrize("number", [28, 30])
def test_given_a_disk_that_takes_nothing_when_a_candidate_would_serve_then_nothing_begins(desk, number):
    desk.publish(serving())
    vehicle = desk.vehicle()
    with disk(number):
        decision = vehicle.look()
    assert (decision.role, decision.serve.name) == (Role.NONE, "base")
    assert decision.why == "nothing begins that cannot be remembered"
    assert os.strerror(number) in decision.problem
    assert not list((desk.folder / EARLY).glob(".state*"))
    assert vehicle.look().role is Role.SERVING
    with disk(number), pytest.raises(RolloutStateError, match="version 7 does not serve"):
        vehicle.begins_trial()
    vehicle.begins_trial()
    with disk(number):
        vehicle.minute(minute())  # good, and after a loss of power the one before it comes up
        assert os.strerror(number) in vehicle.look().problem
        assert desk.vehicle().running.name == "base"
        assert vehicle.rolled_back("miss_ratio").serve.name == "base"
    assert "lines are lost" in vehicle.look().problem
    assert "7" in desk.vehicle().state.barred


def test_given_one_loss_of_power_when_configure_fails_again_and_again_then_it_counts_once(desk):
    vehicle = on_trial(desk)
    for _ in range(9):
        vehicle = desk.vehicle()
        assert vehicle.look().role is Role.SERVING
        vehicle.stops()  # as the node does where its configuration comes to nothing
        assert (vehicle.state.cut_off, vehicle.state.trial) == (1, "7")


def test_given_a_trial_that_ends_the_machine_as_soon_as_its_workers_start_then_each_end_counts(desk):
    vehicle = on_trial(desk)
    for number in range(1, 5):
        vehicle = desk.vehicle()
        vehicle.look()
        assert vehicle.state.cut_off == number
        vehicle.runs("7")
    assert desk.vehicle().look().why == "version 7 was rolled back here: its trial was cut off 5 times"


def test_given_a_node_that_stops_in_order_when_started_again_and_again_then_the_trial_goes_on(desk):
    desk.publish(serving())
    for _ in range(8):
        begun(desk.vehicle()).stops()


CALLS = ("open", "write", "fsync", "replace", "close")


def killed_at(desk, number, half):
    """A process that lives a candidate's life, and is killed at its n-th system call.

    What it had begun and done.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            tell = os.write
            left, originals = [number], {name: getattr(os, name) for name in CALLS}

            def counted(name):
                def call(*arguments, **options):
                    left[0] -= 1
                    if not left[0]:
                        if half and name == "write":
                            originals["write"](arguments[0], arguments[1][: len(arguments[1]) // 2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    return originals[name](*arguments, **options)

                return call

            vehicle = desk.vehicle()
            for name in CALLS:
                setattr(os, name, counted(name))
            assert vehicle.look().role is Role.SERVING
            vehicle.begins_trial()
            tell(writing, b"C")
            vehicle.minute(minute())
            tell(writing, b"c")
            vehicle.rolled_back("worker_deaths 2 is over its limit 1")
            tell(writing, b"r")
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode(), status


@pytest.mark.parametrize("half", [False, True])
def test_given_a_kill_at_any_system_call_when_it_comes_up_then_one_version_runs_the_last_good_one(
    tmp_path, half, desk
):
    desk.publish(serving())
    allowed = {"": {"base"}, "C": {"base", "7"}, "Cc": {"base", "7"}, "Ccr": {"base"}}
    seen = set()
    for number in range(1, 200):
        for old in (desk.folder / EARLY).glob("*"):
            old.unlink()
        done, status = killed_at(desk, number, half)
        state, problem = load_state(desk.folder / EARLY)
        vehicle = desk.vehicle()
        assert problem == ""
        assert vehicle.running.name in allowed[done]
        assert vehicle.running.name == state.last_good.name
        if done == "Cc" and "7" not in state.barred:
            assert vehicle.running.name == "7"
        decision = vehicle.look()
        assert decision.role is (Role.NONE if "7" in state.barred else Role.SERVING)
        seen.add(done)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert seen == set(allowed)
    assert number > 30


CHANGED = [
    {},
    {"again": ("7",)},
    {"revoked": ("7",)},
    {"steps": (RolloutStep(0),)},
    {"state": "held"},
    {"state": "rolled_back"},
]


class Life(RuleBasedStateMachine):
    """A vehicle whose plans, clock, disk and power are anything at any time."""

    def __init__(self):
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.desk = Desk(Path(self.home.name))
        self.plans, self.serial, self.full = (
            [self.desk.publish(serving(steps=(RolloutStep(100),)))],
            0,
            False,
        )
        self.vehicle = self.desk.vehicle()

    @rule(
        version=st.sampled_from("789"),
        engine=st.sampled_from(["eager", "compile"]),
        shadow_min=st.sampled_from([0.0, 1.0]),
        changes=st.sampled_from(CHANGED),
    )
    def the_owner_signs(self, version, engine, shadow_min, changes):
        values = {"version": version, "candidate": {"engine": engine}, "shadow_min": shadow_min} | changes
        self.plans.append(replace(self.plans[0], serial=self.plans[-1].serial + 1, **values))
        self.desk.publish(self.plans[-1])

    @rule(which=st.integers(0, 99), length=st.none() | st.integers(0, 2000))
    def an_older_or_cut_file_comes(self, which, length):
        self.desk.publish(self.plans[which % len(self.plans)])
        self.desk.plan_path.write_bytes(self.desk.plan_path.read_bytes()[:length])

    @rule(days=st.sampled_from([-4000, 0, 40, 4000]), full=st.sampled_from([0, 28]))
    def the_clock_jumps_and_the_disk_is_filled_or_freed(self, days, full):
        self.desk.now, self.full = NOW + datetime.timedelta(days=days), full

    @rule(orderly=st.booleans())
    def the_power_goes(self, orderly):
        with disk(self.full):
            if orderly:
                self.vehicle.stops()
            self.vehicle = self.desk.vehicle()

    @rule(deaths=st.sampled_from([0, 0, 0, 2]))
    def it_drives_a_minute(self, deaths):
        found = self.vehicle.decision
        with disk(self.full), suppress(RolloutStateError):
            if found.role is Role.SERVING:
                self.vehicle.begins_trial()
            if found.role is not Role.NONE and (
                broken := self.vehicle.minute(minute(found.role.value, found.plan.version, deaths=deaths))
            ):
                self.vehicle.rolled_back(broken, found.plan.version)

    @invariant()
    def what_runs_is_signed_wanted_and_tried(self):
        with disk(self.full):
            found = self.vehicle.look()
        state, plan, running = self.vehicle.state, found.plan, [found.serve, *filter(None, [found.beside])]
        signed = [Version(one.version, one.candidate, one.files) for one in self.plans]
        assert all(one == Version() or one in signed for one in running)
        with suppress(PlanError):
            there = read_signed(
                self.desk.plan_path.read_bytes(), read_public_key(self.desk.public), "the plan"
            )
            if there.serial >= state.serial:
                assert not {one.name for one in running} & {*there.taken_back}
        assert not {one.name for one in running} & state.barred.keys()
        if found.role is Role.NONE:
            assert found.serve in [Version(), *state.good]
        else:
            assert plan in self.plans and plan.share and self.desk.now <= plan.expires  # noqa: PT018
            served_s = state.shadow_s.get(plan.version, 0.0)
            assert (
                found.role is Role.SHADOW or served_s >= 60.0 * plan.shadow_min or found.serve in state.good
            )
        saved, damage = load_state(self.desk.folder / EARLY)
        assert (damage, saved.serial >= self.serial) == ("", True)
        self.serial = saved.serial

    def teardown(self):
        self.home.cleanup()


def test_given_a_life_of_plans_clocks_disks_and_power_when_it_looks_then_what_runs_is_signed_wanted_and_tried():
    run_state_machine_as_test(
        Life,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True),
    )
