"""What a roll-out's guards are told of a candidate in service, and the thread that looks after candidates."""

import math
import threading
import time
from types import SimpleNamespace

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.fleet import rollouts, sources
from torchperf_ros.fleet.comparer import Pair, PairBlock, PairFigures
from torchperf_ros.fleet.plan import (
    CandidateFigures,
    Guards,
    RolloutStep,
    broken_guard,
    bucket_percent,
    utc_now,
    why_not_to_serve,
)
from torchperf_ros.fleet.records import read_records, record_files
from torchperf_ros.fleet.rollouts import Rollouts
from torchperf_ros.fleet.sources import ParameterSource, PlanSource, Wish, facts_of_vehicle
from torchperf_ros.fleet.trial import Trial
from torchperf_ros.settings.config import node_config, rollout_options, stage_config
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.stage.hooks import StagePorts
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_setup import worker_setup

from .conftest import NAME, Desk, serving

MS = 1_000_000
VALUES = {"adapter": "m:C", "output": "o"}
PORTS = StagePorts(lambda _: None, lambda *_: None, lambda _: None, lambda _: None, lambda *_: None)


@pytest.fixture
def stage():
    """A stage whose candidate `7` serves; it has no workers, and is told how its frames ended."""
    config = stage_config("perception", VALUES)
    actor = Stage(config, worker_setup(config, node_config({"device": "cpu"}, {})), PORTS, time.time_ns)
    actor.model.name = "7"
    yield actor
    actor.stop()


def answer_of(number, outcome=Outcome.ON_TIME, fallback=None, check=None, took_ms=49.0, steps=None):
    """A frame with a budget of 50 ms, which was answered after so many."""
    now_ns = time.monotonic_ns()
    frame = Frame(number, None, now_ns, 1.0, now_ns, now_ns + 50 * MS, Origin(now_ns, 1.0))
    times = (0, 0.0, took_ms, 50.0, took_ms - 50.0, now_ns + round(took_ms * MS), steps or StepTimes())
    return Answer(frame, outcome, fallback, "", *times, check=check)


def answered(stage, number, *more, **how):
    stage.statistics.answered(answer_of(number, *more, **how))


@pytest.fixture
def trial(stage):
    return Trial(stage, "7")


@pytest.mark.parametrize("fallback", [Fallback.HOLD_LAST, Fallback.BACKUP, Fallback.STOP])
@pytest.mark.parametrize(("late_of_100", "breaks"), [(1, False), (3, True)])
def test_given_a_candidate_whose_late_frames_are_answered_in_time_when_guarded_then_they_are_misses(
    trial, stage, fallback, late_of_100, breaks
):
    for number in range(2000):
        late = number % 100 < late_of_100
        answered(stage, number, *((Outcome.LATE, fallback) if late else ()))
    figures = trial.figures()
    assert stage.statistics.counters.missed_deadline == 0
    assert (figures.frames, figures.misses) == (2000, 20 * late_of_100)
    limit = f"miss_ratio {late_of_100 / 100:g} is over its limit 0.02"
    assert broken_guard(Guards(safe_stops=9), figures) == (limit if breaks else "")


@pytest.mark.parametrize("outcome", [one for one in Outcome if one is not Outcome.ON_TIME])
def test_given_each_way_in_which_a_frame_ends_when_guarded_then_what_has_no_result_in_time_is_a_miss(
    trial, stage, outcome
):
    answered(stage, 0, outcome)
    assert trial.figures().misses == (outcome is not Outcome.PARTIAL)


@pytest.mark.parametrize("check", GuardVerdict)
def test_given_plans_of_the_candidate_when_guarded_then_those_that_a_stop_has_replaced_are_refused(
    trial, stage, check
):
    for number in range(4):
        answered(stage, number, check=check)
    refused = check in {GuardVerdict.STOP, GuardVerdict.UNAVOIDABLE}
    assert trial.figures().refused == 4 * refused
    assert broken_guard(Guards(), trial.figures()) == (
        "refused_plans 4 is over its limit 3" if refused else ""
    )


def test_given_misses_of_the_version_before_when_the_candidate_takes_over_then_they_are_not_its_own(stage):
    for number in range(2000):
        answered(stage, number, Outcome.LATE, Fallback.HOLD_LAST)
    trial = Trial(stage, "7")
    answered(stage, 2000)
    assert (trial.figures().frames, trial.figures().misses) == (1, 0)


class Beside:
    """What a trial knows of the version beside: pairs, and that all its workers are up."""

    def __init__(self, stage):
        self.version, self.figures, self.refused, self.deaths = "base", PairFigures(), "", 0
        self.ready, self.exchanges, self.skipped, self.lost_pairs = True, False, 0, 0
        self.pool = SimpleNamespace(ready=True, description=None, progress="")
        self.stage = stage

    def pairs(self, number, *, late=0, untimed=False):
        """So many pairs, of which the candidate would have been late in some."""
        for seq in range(number):
            answer = answer_of(seq, took_ms=10.0, steps=StepTimes(1, 1, 1, 1))
            steps_ms = 90.0 if seq < late else 4.0
            self.figures.add(
                Pair(answer, Outcome.ON_TIME, steps_ms, b"x", b"x", disturbed=untimed),
                candidate_serves=False,
            )


@pytest.fixture
def beside(stage):
    stage.model.name = "base"
    stage.shadow = Beside(stage)
    stage.shadow.version = "7"
    yield stage.shadow
    stage.shadow = None


@pytest.mark.parametrize(
    ("pairs", "waits"),
    [
        ({"number": 0}, "0 of the 50 frames beside the base that it has to have first"),
        ({"number": 49}, "49 of the 50 frames beside the base that it has to have first"),
        ({"number": 500, "untimed": True}, "0 of 500 frames have a known time, 5 are needed"),
        (
            {"number": 200, "late": 5},
            "5 of 200 frames would be over the budget or without a result; at most 2.00% may",
        ),
        ({"number": 200, "late": 200}, "200 of 200 frames would be over the budget"),
        ({"number": 200, "late": 4}, ""),
        ({"number": 50}, ""),
    ],
)
def test_given_pairs_when_the_candidate_is_to_serve_then_it_does_after_enough_and_never_over_the_budget(
    trial, beside, pairs, waits
):
    begun = []
    beside.exchange = lambda: begun.append("exchange")
    beside.pairs(**pairs)
    source = SimpleNamespace(begins=lambda: begun.append("begins"))
    trial.exchange(source, Wish("7", "base", "7"))
    assert trial.waits.startswith(waits)
    assert begun == ([] if waits else ["begins", "exchange"])
    said = trial.values()["candidate"]
    assert (
        said.startswith(f"7: shadow, which is to serve and waits: {waits}")
        if waits
        else said == "7: shadow"
    )


def test_given_a_candidate_that_serves_when_it_is_to_leave_then_it_waits_for_no_pair(stage, beside):
    begun = []
    beside.exchange = lambda: begun.append("exchange")
    stage.model.name = "7"
    beside.version = "base"
    Trial(stage, "7").exchange(SimpleNamespace(), Wish())
    assert begun == ["exchange"]


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("serves", [False, True])
def test_given_each_state_and_event_of_a_trial_when_looked_at_then_it_ends_with_its_reason_and_bars_what_is_at_fault(
    stage, beside, serves, refused, wanted, broken
):
    beside.refused = "it publishes B" if refused else ""
    if serves:
        stage.model.name, beside.version = "7", "base"
    trial = Trial(stage, "7")
    source = SimpleNamespace(minute=lambda *_, **__: "")
    limits = Guards(worker_deaths=-1) if broken else Guards()
    wish = Wish("7", "base", "7", limits) if wanted else Wish(limits=limits)
    bars = trial.ends(source, wish)
    death = "worker_deaths 0 is over its limit -1"
    if refused and not serves:
        expected = "refused: it publishes B"
    elif broken:
        expected = f"{'rolled back' if serves else 'given up as a shadow'}: {death}"
    else:
        expected = "" if wanted else "over: not asked for any more"
    assert (trial.over, bars) == (expected, bool(expected) and not expected.startswith("over"))
    at_once = trial.leave_by_s <= time.monotonic()
    assert at_once is bars


def test_given_a_base_that_is_late_as_often_when_the_candidate_is_to_serve_then_it_may():
    assert why_not_to_serve(200, 200, 20, 0.1, Guards()) == ""
    assert why_not_to_serve(200, 200, 21, 0.1, Guards()) != ""
    assert why_not_to_serve(1000, 10, 1, 0.0, Guards()) != ""


# -- the thread


def test_given_a_thread_that_waits_for_a_disk_when_the_node_takes_its_stages_down_then_it_does_not_wait_for_ever(
    stage, monkeypatch
):
    monkeypatch.setattr(rollouts, "_END_S", 0.2)
    said, begun, disk = [], threading.Event(), threading.Event()

    def wish(_source):
        begun.set()
        disk.wait(60.0)
        return VALUES

    config = node_config({"stages": ["perception"]}, {"perception": VALUES})
    found = Rollouts(lambda _: VALUES, lambda _, text: said.append(text), lambda _: None, "/perf")
    found.prepared(config)
    monkeypatch.setattr(ParameterSource, "wish", wish)
    found.begin([stage], config)
    assert begun.wait(60.0)
    found.end()
    assert any("has not ended after 0.2 s: it waits for a disk" in text for text in said)
    hanging = [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    found.prepared(config)
    found.begin([], config)
    disk.set()
    for thread in hanging:
        thread.join(60.0)  # it belongs to stages that are gone: it does not go on with others
        assert not thread.is_alive()
    found.end()


# -- what is read for it


def wish_of(path):
    """What a stage is to run whose parameter `candidate` names this file."""
    config = stage_config("perception", {**VALUES, "candidate": str(path)})
    return ParameterSource("perception", lambda: config, lambda: VALUES).wish()


@pytest.mark.parametrize("named", ["before the look", "after the look", "never"])
def test_given_another_file_is_named_meanwhile_when_a_trial_is_rolled_back_then_that_is_of_its_own_file(
    stage, beside, tmp_path, named
):
    for version in ("7", "8"):
        (tmp_path / version).write_text(f"version: '{version}'\nadapter: m:Other\n")
    files = [tmp_path / "7"]
    source = ParameterSource(
        "perception",
        lambda: stage_config("perception", {**VALUES, "candidate": str(files[-1])}),
        lambda: VALUES,
    )
    assert source.wish().beside == "7"
    trial = Trial(stage, "7")
    beside.refused = "it publishes B"
    if named == "before the look":
        files.append(tmp_path / "8")
    wish = source.wish()
    if named == "after the look":
        files.append(tmp_path / "8")
    if trial.ends(source, wish):
        source.rolled_back(trial.over, trial.candidate)
    assert trial.over == "refused: it publishes B"
    expected = ("", "7: refused: it publishes B") if named == "never" else ("8", "")
    assert (source.wish().beside, source.wish().why) == expected


def test_given_a_candidate_that_others_can_change_when_read_then_it_is_refused_and_the_mode_is_named(
    tmp_path,
):
    path = tmp_path / "c.yaml"
    path.write_text("version: b\nadapter: m:Other\n")
    path.chmod(0o666)
    refused = f"candidate {path}: is not taken, as it says which code runs: others can write {path}"
    assert refused in wish_of(path).why
    path.chmod(0o600)
    assert wish_of(path).beside == "b"


def test_given_a_change_of_another_parameter_when_checked_then_no_candidate_is_read_again(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("version: b\nadapter: m:Other\n")
    found = Rollouts(lambda _: VALUES, lambda *_: None, lambda _: None, "/perf")
    config = node_config({"stages": ["perception"]}, {"perception": {**VALUES, "candidate": str(path)}})
    found.prepared(config)
    path.write_text("no mapping")
    found.check(config)
    other = node_config({"stages": ["perception"]}, {"perception": {**VALUES, "candidate": f"{path}x"}})
    with pytest.raises(ConfigError, match="cannot be read"):
        found.check(other)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 60_000, "is not YAML"),
        (f"version: b\nadapter: m:{'x' * 70_000}", "has more than 65,536 bytes"),
    ],
)
def test_given_a_candidate_that_is_none_when_read_then_it_is_a_message(tmp_path, text, why):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert why in wish_of(path).why


def test_given_two_nodes_of_a_vehicle_when_each_has_a_stage_of_the_same_name_then_each_remembers_for_itself(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    desk = Desk(tmp_path, utc_now())
    desk.publish(serving(steps=(RolloutStep(100),), issued=desk.now))
    options = rollout_options({"rollout.vehicle": "car-7", "rollout.key": str(desk.public)})
    stage = stage_config("perception", {**VALUES, "rollout_plan": str(desk.plan_path)})

    def start(node):
        return PlanSource(stage, lambda: options, lambda: VALUES, lambda: "", node)

    front, rear = start("/front/perf"), start("/rear/perf")
    for one in (front, rear):
        assert one.wish().serve == "7"
        one.begins()
    front.rolled_back("worker_deaths 2 is over its limit 1")
    for one in (front, rear):
        one.stops()
    assert [start(f"/{name}/perf").wish().serve for name in ("front", "rear")] == ["base", "7"]
    states = sorted(str(path.relative_to(tmp_path / "state")) for path in tmp_path.rglob("state.json"))
    assert states == [
        f"torchperf_ros/rollout/{node}/perf/perception/state.json" for node in ("front", "rear")
    ]
    again = start("/rear/perf")
    other = stage_config("perception", {**VALUES, "rollout_plan": f"{desk.plan_path}2"})
    with pytest.raises(
        ConfigError, match="parameter perception.rollout_plan: state .*another node uses it"
    ):
        PlanSource(other, lambda: options, lambda: VALUES, lambda: "", "/rear/perf")
    assert again.wish().serve == "7"


# -- a signed plan on a vehicle, by the node's own way to it


IN_NORTH = {"==": [{"var": "region"}, "north"]}
COMPILED = {
    "adapter": "adapters_for_graph:Obedient",
    "output": "point",
    "engine": "aoti",
    "tiers": ["full"],
}


def options_with(*facts, desk=None):
    given = {} if desk is None else {"key": str(desk.public), "folder": str(desk.folder / "state")}
    return rollout_options(
        {f"rollout.{name}": value for name, value in given.items()}
        | {"rollout.vehicle": "car-7", "rollout.facts": list(facts)}
    )


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, utc_now())


@pytest.fixture
def vehicle(desk, monkeypatch):
    """Starts a vehicle on a drive, which looks at its plan every time.

    Returns how its node asks, and its facts.
    """
    monkeypatch.setattr(sources, "_LOOK_S", -1.0)
    monkeypatch.setenv("XDG_STATE_HOME", str(desk.folder))

    def start(drive="monday", card="orin", **facts):
        monkeypatch.setattr(sources, "_drive_id", lambda: drive)
        options = [options_with(*(f"{name}={value}" for name, value in facts.items()), desk=desk)]
        stage = stage_config("perception", COMPILED | {"rollout_plan": str(desk.plan_path)})
        return PlanSource(stage, lambda: options[-1], lambda: COMPILED, lambda: card), options

    return start


def minute(source, *, serves, mib_per_h=math.nan):
    times_ms = [20.0] * 1800
    block = PairBlock(pairs=1800, both=1800, base_ms=times_ms, candidate_ms=times_ms)
    return source.minute(
        block, CandidateFigures(frames=1800, memory_mib_per_h=mib_per_h), 300.0, serves=serves
    )


def serve(source, **figures):
    """Until the candidate is good."""
    assert source.wish().serve == "7"
    source.begins()
    assert minute(source, serves=True, **figures) == ""


def drives(share):
    """A drive of the vehicle that has the candidate at this share, and one that has not."""
    buckets = {name: bucket_percent(NAME, f"car-7 {name}") for name in map(str, range(99))}
    return (next(name for name in buckets if (buckets[name] < share) is inside) for inside in (True, False))


def test_given_a_plan_by_drive_when_drives_come_then_each_has_its_own_version_also_once_the_candidate_is_good(
    desk, vehicle
):
    inside, outside = drives(50)
    desk.publish(serving(unit="drive", steps=(RolloutStep(50), RolloutStep(100)), issued=desk.now))
    source, _ = vehicle(inside)
    serve(source)
    source.stops()
    source, _ = vehicle(outside)
    assert source.running() is None
    assert (source.wish().serve, source.wish().beside) == ("base", "")
    assert f"vehicle car-7, drive {outside}, is in bucket" in source.wish().why
    source, _ = vehicle(inside)
    assert source.running().version == "7"
    assert (source.wish().serve, source.wish().beside, source.wish().candidate) == ("7", "base", "7")
    desk.publish(
        serving(
            unit="drive", steps=(RolloutStep(50), RolloutStep(100)), issued=desk.now, serial=2**31, step=1
        )
    )
    assert vehicle(outside)[0].wish().serve == "7"
    assert {one for one in read_records(record_files([desk.folder])).blocks["drive"]} == {inside}


def test_given_a_plan_for_a_region_when_the_vehicle_drives_out_of_it_then_the_base_serves_and_back_in_the_candidate(
    desk, vehicle
):
    desk.publish(serving(targeting=IN_NORTH, steps=(RolloutStep(100),), issued=desk.now))
    source, options = vehicle(region="north")
    serve(source)
    options.append(options_with("region=south"))
    assert (source.wish().serve, source.wish().beside) == ("base", "")
    assert source.wish().why == "the plan's targeting leaves vehicle car-7 out"
    assert vehicle(region="south")[0].running() is None
    options.append(options[0])
    assert source.wish().serve == "7"
    options.append(options_with())  # where it is is not known: what serves goes on
    assert (source.wish().serve, source.wish().candidate) == ("7", "7")
    assert "asks for the fact 'region' (of the map), and the vehicle does not know it" in source.wish().why


def test_given_a_plan_for_a_card_when_the_card_is_known_then_the_record_has_it(desk, vehicle, monkeypatch):
    desk.publish(
        serving(targeting={"in": ["Orin", {"var": "gpu"}]}, steps=(RolloutStep(100),), issued=desk.now)
    )
    source, _ = vehicle(card="")
    assert "asks for the fact 'gpu'" in source.wish().why
    monkeypatch.setattr(source, "_device", lambda: "NVIDIA Orin")
    serve(source)
    brought = read_records(record_files([desk.folder]))
    assert brought.facts["car-7"]["gpu"] == "NVIDIA Orin"
    assert brought.blocks["base_sum_ms"].tolist() == [1800 * 20.0]


def test_given_a_candidate_whose_memory_grows_when_a_minute_ends_then_it_is_out_and_the_record_names_the_figure(
    desk, vehicle
):
    desk.publish(serving(steps=(RolloutStep(100),), issued=desk.now))
    source, _ = vehicle()
    serve(source, mib_per_h=59.0)
    broken = minute(source, serves=True, mib_per_h=75.0)
    assert broken == "memory_mib_per_h 75 is over its limit 60"
    source.rolled_back(broken)
    assert (source.wish().serve, source.wish().why) == ("base", f"version 7 was rolled back here: {broken}")
    brought = read_records(record_files([desk.folder]))
    last = brought.events[-1]
    assert (last["reason"], last["stage"], last["rollout"]) == (broken, "perception", NAME)
    assert brought.blocks["memory_mib_per_h"].tolist() == [59.0, 75.0]


def test_given_a_good_version_whose_file_was_changed_when_started_then_it_is_not_loaded(desk, vehicle):
    (desk.folder / "a.pt2").write_bytes(b"abc")
    sums = {"a.pt2": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}
    desk.publish(
        serving(files=sums, candidate={"packages": ["a.pt2"]}, steps=(RolloutStep(100),), issued=desk.now)
    )
    serve(vehicle()[0])
    assert vehicle()[0].running().changes["packages"][0] == str(desk.folder / "a.pt2")
    (desk.folder / "a.pt2").write_bytes(b"abd")
    source, _ = vehicle()
    assert source.running() is None
    assert source.wish().serve == "base"
    assert "and the plan says ba7816bf8f01cfea..." in source.wish().why


@pytest.mark.parametrize(
    ("fact", "said"),
    [
        ("colour=red", "fact 'colour' is not known"),
        ("memory_gib=much", "fact memory_gib 'much' has to be a number"),
    ],
)
def test_given_facts_that_no_plan_can_ask_for_when_checked_then_the_parameter_is_named(fact, said):
    with pytest.raises(ConfigError, match=f"parameter rollout.vehicle or rollout.facts: .*{said}"):
        facts_of_vehicle(options_with(fact))


def test_given_the_owner_rolled_back_while_it_was_off_when_started_then_the_base_comes_up(desk, vehicle):
    plan = desk.publish(serving(steps=(RolloutStep(100),), issued=desk.now))
    serve(vehicle()[0])
    desk.publish(plan.rolled_back(desk.now))
    assert vehicle()[0].running() is None  # though version 7 was good when it was switched off
