"""A signed plan on a vehicle, by the node's own way to it: drives, regions of the map, cards, memory."""

import math

import pytest

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet import sources
from torchperf_ros.fleet.guards import CandidateFigures
from torchperf_ros.fleet.pair_figures import PairBlock
from torchperf_ros.fleet.plan import RolloutStep, utc_now
from torchperf_ros.fleet.records import read_records, record_files
from torchperf_ros.fleet.sources import PlanSource, facts_of_vehicle
from torchperf_ros.fleet.targeting import bucket_percent
from torchperf_ros.settings.config import stage_config
from torchperf_ros.settings.rollout_options import rollout_options

from .conftest import NAME, Desk, serving

IN_NORTH = {"==": [{"var": "region"}, "north"]}
VALUES = {"adapter": "adapters_for_graph:Obedient", "output": "point", "engine": "aoti", "tiers": ["full"]}


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
        stage = stage_config("perception", VALUES | {"rollout_plan": str(desk.plan_path)})
        return PlanSource(stage, lambda: options[-1], lambda: VALUES, lambda: card), options

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
    assert brought.events[-1]["reason"] == broken
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
