"""Which vehicles a plan is for: rules on their facts, and stable buckets, both exactly as flagd has them.

A vehicle's bucket is flagd's `fractional`: MurmurHash3 (x86, 32 bit, seed 0) of the CBOR of [roll-out,
vehicle], times the number of buckets, shifted right by 32 bits (flagd, "Fractional operation"; the
reference is openfeature-flagd-core 2.0). It depends on nothing else, so a vehicle that is in at 1 % is in
at 5 %. Rules are flagd's targeting rules: JsonLogic with `sem_ver`, `starts_with`, `ends_with` and
`fractional`, evaluated by that library.
"""

import importlib.util
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from torchperf_ros.fleet.guards import PlanError

# What gets a bucket: a vehicle for good, or each drive of each vehicle.
UNITS: Final = ("vehicle", "drive")
# What a rule may ask about a vehicle.
FACTS: Final = {
    "vehicle": "its id",
    "drive": "the id of this drive",
    "gpu": "for example orin, or none",
    "memory_gib": "a number",
    "torch": "its version",
    "ros_distro": "for example jazzy",
    "region": "of the map",
}
# What a rule gives for the vehicles that the plan is for; true means the same.
CANDIDATE: Final = "candidate"
_OTHERS: Final = (None, False, "base")
_FLAGDS_OWN: Final = ("targetingKey", "$flagd.flagKey", "$flagd.timestamp")
# A thousandth of a percent each: flagd takes whole weights.
_BUCKETS: Final = 100_000
_PERCENT: Final = _BUCKETS / 100
_HASH_BITS: Final = 32
_ID: Final = re.compile(r"\S(.{0,126}\S)?")
_LIBRARIES: Final = ("cryptography", "mmh3", "cbor2", "openfeature.contrib.tools.flagd.core")


class TargetingError(PlanError):
    """It cannot be known whether a plan is for a vehicle; the message says which fact or rule is wrong."""


def facts_of(values: Mapping[str, object]) -> dict[str, Any]:
    """Check what a vehicle says of itself.

    Raises:
        TargetingError: it has no id, or a fact is unknown or has the wrong type.
    """
    if unknown := sorted(set(values) - set(FACTS)):
        raise TargetingError(f"fact {unknown[0]!r} is not known; there are: {', '.join(FACTS)}")
    vehicle = values.get("vehicle")
    if not isinstance(vehicle, str) or not _ID.fullmatch(vehicle):
        raise TargetingError(
            f"the vehicle has no id ({vehicle!r}): a roll-out needs one that never changes, for "
            "example its serial number, 1 to 128 characters"
        )
    found: dict[str, Any] = dict(values)
    for name, value in values.items():
        if name == "memory_gib":
            try:
                found[name] = float(str(value))
            except ValueError as error:
                raise TargetingError(f"fact memory_gib {value!r} has to be a number of GiB") from error
        elif not isinstance(value, str):
            raise TargetingError(f"fact {name} {value!r} has to be a text ({FACTS[name]})")
    return found


def unit_of(facts: Mapping[str, Any], unit: str) -> str:
    """What the bucket is drawn for.

    Raises:
        TargetingError: buckets are drawn by drive, and the vehicle does not say which one it is on.
    """
    if unit == UNITS[0]:
        return str(facts["vehicle"])
    if not facts.get("drive"):
        raise TargetingError(
            f"vehicle {facts['vehicle']}: the plan draws by drive, and the fact `drive` is not known"
        )
    return f"{facts['vehicle']} {facts['drive']}"


def bucket_percent(name: str, unit: str) -> float:
    """Where a vehicle stands in the roll-out of this name, 0 up to 100.

    It is in from a share above this.
    """
    import cbor2
    import mmh3

    hashed = mmh3.hash(cbor2.dumps([name, unit], canonical=True), signed=False)
    return (hashed * _BUCKETS >> _HASH_BITS) / _PERCENT


def is_for(name: str, rule: Mapping[str, Any] | None, facts: Mapping[str, Any], unit: str) -> bool:
    """Whether a plan's rule takes a vehicle in; its bucket does not count here.

    Raises:
        TargetingError: the rule asks for a fact that the vehicle does not know, or gives what is no answer.
    """
    if rule is None:
        return True
    from openfeature.contrib.tools.flagd.core.targeting import targeting
    from openfeature.evaluation_context import EvaluationContext

    for fact in _asked(rule):
        if fact in FACTS and facts.get(fact) is None:
            raise TargetingError(
                f"vehicle {facts['vehicle']}: the plan asks for the fact {fact!r} ({FACTS[fact]}), "
                "and the vehicle does not know it"
            )
    try:
        answer = targeting(name, dict(rule), EvaluationContext(unit, dict(facts)))
    except (
        Exception
    ) as error:  # the library's operators raise what Python's do: TypeError, ZeroDivisionError, ...
        raise TargetingError(
            f"targeting: cannot be evaluated for vehicle {facts['vehicle']}: {error!r}"
        ) from error
    if answer in _OTHERS or answer in (True, CANDIDATE):
        return answer not in _OTHERS
    raise TargetingError(
        f"targeting: gives {answer!r} for vehicle {facts['vehicle']}; it has to be {CANDIDATE!r} or "
        "true for those that the plan is for, and `base` or false for others"
    )


def check_installed() -> None:
    """See that what plans are read with is there; a `TargetingError` says what to install."""
    if missing := [name for name in _LIBRARIES if not _installed(name)]:
        raise TargetingError(f"{missing[0]} is not installed: `pip install 'torchperf_ros[rollout]'`")


def check_rule(rule: object, where: str) -> None:
    """See that a rule is one of flagd's, and asks only for facts that there are.

    Raises:
        TargetingError: it is not.
    """
    check_installed()
    if not isinstance(rule, Mapping):
        raise TargetingError(
            f'{where}: {rule!r} has to be a rule of flagd, like {{"==": [{{"var": "gpu"}}, "orin"]}}'
        )
    from openfeature.contrib.tools.flagd.core.targeting.targeting import OPERATORS

    for operator, _ in _operations(rule, where):
        if operator not in {
            *OPERATORS,
            "if",
            "and",
            "or",
            "?:",
            "filter",
            "map",
            "reduce",
            "all",
            "some",
            "none",
        }:
            raise TargetingError(f"{where}: {operator!r} is no operation of flagd's rules")
    for name in _asked(rule):
        if name not in FACTS and name not in _FLAGDS_OWN:
            raise TargetingError(
                f"{where}: asks for {name!r}, which no vehicle knows; there are: {', '.join(FACTS)}"
            )


def _asked(rule: object) -> list[str]:
    asked = (given for operator, given in _operations(rule, "targeting") if operator == "var")
    return [str(given[0] if isinstance(given, list) and given else given) for given in asked]


def _operations(rule: object, where: str) -> Iterator[tuple[str, object]]:
    if isinstance(rule, Mapping):
        if len(rule) != 1:
            raise TargetingError(
                f'{where}: {dict(rule)!r} has to have one operation, for example {{"var": "gpu"}}'
            )
        ((operator, given),) = rule.items()
        yield str(operator), given
        yield from _operations(given, where)
    elif isinstance(rule, list):
        for one in rule:
            yield from _operations(one, where)


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is not there
        return False
