"""Plans: what is signed comes back, and every file that is not good is refused with its reason."""

import datetime
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from openfeature.contrib.tools.flagd.core import FlagdCore
from openfeature.evaluation_context import EvaluationContext

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import (
    CandidateFigures,
    Guards,
    PlanError,
    TargetingError,
    broken_guard,
    bucket_percent,
    facts_of,
    is_for,
    plan_of,
    plan_text,
    read_plan_file,
    unit_of,
)
from torchperf_ros.fleet.signature import make_keys, read_private_key, read_public_key, read_signed, sign

from .conftest import NOW, plan_with


def signed(desk, **changes):
    return json.loads(sign(plan_with(**changes), desk.private))


def read(desk, content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return read_signed(text, read_public_key(desk.public), "plan x.json")


def test_given_a_plan_when_signed_or_written_for_people_then_the_same_is_read(desk, tmp_path):
    plan = plan_with(
        targeting={"in": [{"var": "gpu"}, ["orin", "xavier"]]},
        guards={"worker_deaths": 2},
        files={"a.pt2": "0" * 64},
        revoked=["5"],
        again=["6"],
    )
    assert read(desk, sign(plan, desk.private).encode()) == plan
    (tmp_path / "plan.yaml").write_text(plan_text(plan))
    assert read_plan_file(tmp_path / "plan.yaml") == plan


def test_given_a_signed_plan_when_cut_anywhere_or_one_value_changes_then_it_is_refused(desk):
    text = sign(plan_with(), desk.private).encode()
    for end in range(0, len(text) - 2, 97):
        with pytest.raises(PlanError, match=r"cut or malformed|not signed"):
            read(desk, text[:end])
    for name in signed(desk)["plan"]:
        content = signed(desk)
        content["plan"][name] = 12345
        with pytest.raises(PlanError, match="changed after it was signed"):
            read(desk, content)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"[]", "is not signed"),
        (b"\xff\xfe{}", "cut or malformed"),
        (b"[" * 100_000, "cut or malformed"),
        (b" " * (2 << 20), "at most 1,048,576"),
        ({"plan": {}, "signature": 5}, "no signed plan of version 1"),
        ({"v": 1, "plan": {}, "key": "x", "signature": "??"}, "signed with the key x"),
        ({"v": 1, "plan": {}, "key": "x", "signature": 5}, "signed with the key x"),
    ],
)
def test_given_a_file_that_is_no_signed_plan_when_read_then_the_reason_is_said(desk, content, match):
    with pytest.raises(PlanError, match=match):
        read(desk, content)


def test_given_another_key_when_read_then_both_keys_are_named(desk, tmp_path):
    make_keys(tmp_path / "other")
    with pytest.raises(PlanError, match=r"signed with the key \w{16}; this vehicle trusts \w{16} only"):
        read(desk, sign(plan_with(), read_private_key(tmp_path / "other")).encode())
    with pytest.raises(ConfigError, match="is there already"):
        make_keys(tmp_path / "other")
    assert (tmp_path / "other").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"versoin": "7"}, "unknown field 'versoin'"),
        ({"version": 7.2}, "version 7.2 has to be a text in quotes"),
        ({"version": "base"}, "another name"),
        ({"candidate": {}}, "one at least"),
        ({"candidate": {"adaptor": "a:B"}}, "'adaptor' is no parameter"),
        (
            {"candidate": {"budget_ms": 9.0}},
            "'budget_ms' is no parameter of a stage that a candidate may change",
        ),
        ({"candidate": {"engine": "fast"}}, "parameter engine: 'fast' is not allowed"),
        ({"candidate": {"packages": "a.pt2"}}, "package 'a.pt2' has to be among `files` with its SHA-256"),
        ({"files": {"a": "12"}}, "files: a '12' has to be a SHA-256"),
        ({"steps": []}, "has to be a list of steps"),
        ({"steps": [{"share": 101}]}, r"steps\[0\].share 101 has to be a number from 0 to 100"),
        ({"steps": [{"share": 5}, {"share": 1}]}, "shares have to grow"),
        ({"steps": [{"share": 5}, {"share": 5, "shadow": True}]}, "a shadow comes before"),
        ({"steps": [{"share": 5, "soak": 1}]}, "may have: shadow"),
        ({"step": 6}, "below the number of steps, 6"),
        ({"serial": "7"}, "serial '7' has to be a whole number"),
        ({"state": "paused"}, "one of: running, held"),
        ({"unit": "frame"}, "one of: vehicle, drive"),
        ({"guards": {"deaths": 1}}, "no guard is called 'deaths'"),
        ({"guards": {"miss_ratio": 2}}, "from 0 to 1"),
        ({"guards": {"safe_stops": float("nan")}}, "a number from 0 on"),
        ({"margins": {"p50": 1}}, "margins"),
        ({"expires": "tomorrow"}, "has to be a time in UTC"),
        ({"expires": "9999-12-31T23:59:59-05:00"}, "has to be a time in UTC"),
        ({"expires": NOW - datetime.timedelta(days=1)}, "after `issued`"),
        ({"targeting": {"==": [{"var": "gpuu"}, "orin"]}}, "asks for 'gpuu', which no vehicle knows"),
        ({"targeting": {"equals": [1, 2]}}, "'equals' is no operation"),
        ({"targeting": {"and": [], "or": []}}, "one operation"),
        ({"shadow_min": -1}, "shadow_min -1"),
        ({"again": "7"}, "a list of versions"),
    ],
)
def test_given_a_value_that_is_not_allowed_when_checked_then_the_field_and_what_is_right_are_named(
    changes, match
):
    with pytest.raises(PlanError, match=match):
        plan_with(**changes)


@pytest.mark.parametrize(
    ("values", "match"), [([], "is no plan"), ({"name": "a"}, "the field 'stage' is missing")]
)
def test_given_no_mapping_or_a_field_less_when_checked_then_it_is_said(values, match):
    with pytest.raises(PlanError, match=match):
        plan_of(values, "plan")


def test_given_a_plan_when_it_goes_on_then_the_serial_grows_and_the_last_step_is_followed_by_done():
    plan, later = plan_with(), NOW + datetime.timedelta(days=1)
    seen = [plan]
    while seen[-1].state == "running":
        seen.append(seen[-1].advanced(later))
    assert [one.serial for one in seen] == [plan.serial + n for n in range(7)]
    assert [one.share for one in seen] == [1, 1, 5, 20, 50, 100, 100]
    assert seen[-1].state == "done"
    assert seen[1].expires - seen[1].issued == plan.expires - plan.issued
    assert (plan.rolled_back(later).share, plan.rolled_back(later).revoked) == (0.0, ("7",))


def test_given_guards_of_steps_when_the_step_is_on_then_they_hold_from_there_on():
    steps = [
        {"share": 1, "guards": {"worker_deaths": 0}},
        {"share": 5},
        {"share": 9, "guards": {"worker_deaths": 4}},
    ]
    plan = plan_with(steps=steps)
    assert [replace(plan, step=n).limits.worker_deaths for n in range(3)] == [0, 0, 4]


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        (CandidateFigures(), ""),
        (CandidateFigures(deaths=1), ""),
        (CandidateFigures(deaths=2), "worker_deaths 2 is over its limit 1"),
        (CandidateFigures(safe_stops=1), "safe_stops 1 is over its limit 0"),
        (CandidateFigures(refused=4), "refused_plans 4 is over its limit 3"),
        (CandidateFigures(memory_mib_per_h=61.5), "memory_mib_per_h 61.5 is over its limit 60"),
        (CandidateFigures(frames=999, misses=999), ""),
        (CandidateFigures(frames=1000, misses=20), ""),
        (CandidateFigures(frames=1000, misses=21), "miss_ratio 0.021 is over its limit 0.02"),
        (CandidateFigures(compared=2000, disagreements=101), "disagreement 0.0505 is over its limit 0.05"),
    ],
)
def test_given_figures_when_a_limit_is_passed_then_it_is_named_with_the_figure(figures, text):
    assert broken_guard(Guards(), figures) == text


def test_given_figures_of_two_times_when_added_then_every_count_is_their_sum_and_the_trend_the_later_ones():
    first, later = (
        CandidateFigures(**{one.name: by + at for at, one in enumerate(fields(CandidateFigures))})
        for by in (1, 100)
    )
    sums = {one.name: 101 + 2 * at for at, one in enumerate(fields(CandidateFigures))}
    assert first + later == CandidateFigures(**sums | {"memory_mib_per_h": later.memory_mib_per_h})


# -- which vehicles a plan is for


CAR = {"vehicle": "car-7", "gpu": "orin", "memory_gib": 32.0, "torch": "2.13.0+cpu", "ros_distro": "jazzy"}


@pytest.mark.parametrize("share", [0.0, 1.0, 5.0, 37.125, 100.0])
def test_given_any_share_when_flagd_itself_is_asked_then_the_same_vehicles_are_in(share):
    weight = round(share * 1000)
    fractional = {"fractional": [["candidate", weight], ["base", 100_000 - weight]]}
    flag = {
        "state": "ENABLED",
        "variants": {"candidate": True, "base": False},
        "defaultVariant": "base",
        "targeting": fractional,
    }
    core = FlagdCore()
    core.set_flags({"flags": {"detector-7": flag}})
    ids = [f"car-{n}" for n in range(2000)]
    flagd = [core.resolve_boolean_value("detector-7", False, EvaluationContext(one)).value for one in ids]
    assert [bucket_percent("detector-7", one) < share for one in ids] == flagd


def test_given_100_000_vehicles_when_shares_grow_then_nobody_leaves_and_each_share_is_within_two_tenths_of_a_percent():
    for name in ("detector-7", "planner-3"):
        buckets = np.array([bucket_percent(name, f"vehicle-{n}") for n in range(100_000)])
        before = np.zeros(len(buckets), bool)
        for share in (1, 5, 20, 50, 100):
            inside = buckets < share
            assert inside[before].all()
            assert abs(100 * inside.mean() - share) <= 0.2
            before = inside


def test_given_another_roll_out_when_drawn_then_other_vehicles_are_first():
    first = [{n for n in range(5000) if bucket_percent(name, f"car-{n}") < 10} for name in ("a", "b")]
    assert len(first[0] & first[1]) < 0.2 * len(first[0])


@pytest.mark.parametrize(
    ("rule", "taken"),
    [
        (None, True),
        ({"==": [{"var": "gpu"}, "orin"]}, True),
        ({"if": [{">=": [{"var": "memory_gib"}, 64]}, "candidate", "base"]}, False),
        ({"if": [{"sem_ver": [{"var": "torch"}, ">=", "2.6.0"]}, "candidate"]}, True),
        ({"starts_with": [{"var": "ros_distro"}, "kil"]}, False),
        ({"in": [{"var": "targetingKey"}, ["car-7"]]}, True),
    ],
)
def test_given_a_rule_of_flagd_when_asked_then_it_is_for_the_vehicles_that_it_names(rule, taken):
    assert is_for("r", rule, CAR, "car-7") is taken


NO_ID = "the vehicle has no id"


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({}, NO_ID),
        ({"vehicle": ""}, NO_ID),
        ({"vehicle": None}, NO_ID),
        ({"vehicle": 7}, NO_ID),
        ({"vehicle": "x" * 200}, NO_ID),
        ({"vehicle": "a", "colour": "red"}, "fact 'colour' is not known"),
        ({"vehicle": "a", "memory_gib": "much"}, "memory_gib 'much' has to be a number"),
    ],
)
def test_given_facts_without_an_id_or_that_are_unknown_or_wrong_when_read_then_it_is_said(values, match):
    with pytest.raises(TargetingError, match=match):
        facts_of(values)


def test_given_facts_that_are_asked_for_when_unknown_or_wrong_then_each_is_named():
    with pytest.raises(TargetingError, match="asks for the fact 'region'"):
        is_for("r", {"==": [{"var": "region"}, "eu"]}, CAR, "car-7")
    with pytest.raises(TargetingError, match="gives 'blue'"):
        is_for("r", {"if": [True, "blue"]}, CAR, "car-7")
    with pytest.raises(TargetingError, match="the fact `drive` is not known"):
        unit_of(CAR, "drive")
    assert unit_of({**CAR, "drive": "3"}, "drive") == "car-7 3"
