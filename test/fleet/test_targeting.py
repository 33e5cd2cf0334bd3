"""Buckets and rules: exactly flagd's, stable, and even."""

import numpy as np
import pytest
from openfeature.contrib.tools.flagd.core import FlagdCore
from openfeature.evaluation_context import EvaluationContext

from torchperf_ros.fleet.targeting import TargetingError, bucket_percent, facts_of, is_for, unit_of

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


@pytest.mark.parametrize(
    "values", [{}, {"vehicle": ""}, {"vehicle": None}, {"vehicle": 7}, {"vehicle": "x" * 200}]
)
def test_given_a_vehicle_without_an_id_when_asked_then_it_is_said(values):
    with pytest.raises(TargetingError, match="the vehicle has no id"):
        facts_of(values)


def test_given_facts_that_are_unknown_or_wrong_when_asked_then_each_is_named():
    with pytest.raises(TargetingError, match="fact 'colour' is not known"):
        facts_of({"vehicle": "a", "colour": "red"})
    with pytest.raises(TargetingError, match="memory_gib 'much' has to be a number"):
        facts_of({"vehicle": "a", "memory_gib": "much"})
    with pytest.raises(TargetingError, match="asks for the fact 'region'"):
        is_for("r", {"==": [{"var": "region"}, "eu"]}, CAR, "car-7")
    with pytest.raises(TargetingError, match="gives 'blue'"):
        is_for("r", {"if": [True, "blue"]}, CAR, "car-7")
    with pytest.raises(TargetingError, match="the fact `drive` is not known"):
        unit_of(CAR, "drive")
    assert unit_of({**CAR, "drive": "3"}, "drive") == "car-7 3"
