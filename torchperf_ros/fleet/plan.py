"""A roll-out's plan: which version, onto which vehicles, in which steps, and what it must not do.

A plan is the whole state of a roll-out. Every change of it (the next step, a hold, a roll-back) is another
plan with a greater `serial`, signed anew (`signature.py`); a vehicle needs nothing else, and no server. The
version is a candidate: a YAML file of the stage's parameters that differ, which may also come without a
plan.

Hard guards are limits that a candidate breaks or keeps on one vehicle, independent of the statistics of the
fleet.

Which vehicles a plan is for, rules on their facts and stable buckets say, both exactly as flagd has them. A
vehicle's bucket is flagd's `fractional`: MurmurHash3 (x86, 32 bit, seed 0) of the CBOR of [roll-out,
vehicle], times the number of buckets, shifted right by 32 bits (flagd, "Fractional operation"; the
reference is openfeature-flagd-core 2.0). It depends on nothing else, so a vehicle that is in at 1 % is in
at 5 %. Rules are flagd's targeting rules: JsonLogic with `sem_ver`, `starts_with`, `ends_with` and
`fractional`, evaluated by that library.
"""

import contextlib
import datetime
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.settings.config import BASE, STAGE_PARAMETERS, StageConfig, stage_config
from torchperf_ros.settings.files import exposed_at, read_bounded
from torchperf_ros.settings.params_file import params_of, ros_yaml

# Shares are judged from so many frames on.
#
# Half a minute at 30 Hz. One miss of the first ten is no tenth of them.
LEAST_FRAMES: Final = 1000
# Figures are of the candidate's last hour at most, so that rare single events do not add up over
# weeks.
WINDOW_S: Final = 3600.0


class PlanError(TorchperfError):
    """A roll-out plan cannot be used.

    The message names the file or the field, the value, and what would be right.
    """


@dataclass(frozen=True)
class Guards:
    """The most that each figure of a vehicle may be within `WINDOW_S`.

    One above it rolls that vehicle back.

    Attributes:
        worker_deaths: crashes, hangs and kills of the candidate's worker. One may be the machine's, two are
            not.
        refused_plans: of the candidate; beside the base those that the guard of plans would replace where
            it accepts the base's, in service those that it replaced by a stop.
        safe_stops: times that the stage went into SAFE_STOP.
        miss_ratio: share of frames without an own result in time, 0 to 1.
        memory_mib_per_h: growth of the candidate's worker in MiB per hour.
        disagreement: share of compared outputs that differ beyond the rules of golden tests, 0 to 1.
    """

    worker_deaths: int = 1
    refused_plans: int = 3
    safe_stops: int = 0
    miss_ratio: float = 0.02
    memory_mib_per_h: float = 60.0
    disagreement: float = 0.05

    def changed(self, values: object, where: str) -> "Guards":
        """The same with other limits.

        Raises:
            PlanError: an unknown name, or a limit that is none.
        """
        if not isinstance(values, Mapping):
            raise PlanError(
                f"{where}: {values!r} has to be limits by name, for example {{worker_deaths: 1}}"
            )
        known: dict[str, float] = asdict(self)
        for name, value in values.items():
            if name not in known:
                raise PlanError(f"{where}: no guard is called {name!r}; there are: {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise PlanError(f"{where}.{name}: {value!r} has to be a number from 0 on")
            if name in _SHARES and value > 1:
                raise PlanError(f"{where}.{name}: {value!r} is a share; it has to be a number from 0 to 1")
        return replace(self, **values)


_SHARES: Final = ("miss_ratio", "disagreement")


@dataclass(frozen=True)
class CandidateFigures:
    """What a candidate did on one vehicle, within `WINDOW_S`.

    Attributes:
        frames: that it was given.
        deaths, refused, safe_stops, misses: counts, see `Guards`.
        memory_mib_per_h: trend of its worker's memory; NaN while it is not known.
        disagreements: outputs that differ, of those `compared`.
    """

    frames: int = 0
    deaths: int = 0
    refused: int = 0
    safe_stops: int = 0
    misses: int = 0
    memory_mib_per_h: float = math.nan
    disagreements: int = 0
    compared: int = 0

    def __add__(self, other: "CandidateFigures") -> "CandidateFigures":
        """Counts of both; the trend of the later one."""
        return CandidateFigures(
            self.frames + other.frames,
            self.deaths + other.deaths,
            self.refused + other.refused,
            self.safe_stops + other.safe_stops,
            self.misses + other.misses,
            other.memory_mib_per_h,
            self.disagreements + other.disagreements,
            self.compared + other.compared,
        )


def broken_guard(guards: Guards, figures: CandidateFigures) -> str:
    """The figure that is over its limit and that limit, in words; "" where every guard holds.

    Pure and quick, so that a vehicle can ask after every frame.
    """
    figure: tuple[tuple[str, Any, float], ...] = (
        ("worker_deaths", figures.deaths, guards.worker_deaths),
        ("safe_stops", figures.safe_stops, guards.safe_stops),
        ("refused_plans", figures.refused, guards.refused_plans),
        ("memory_mib_per_h", figures.memory_mib_per_h, guards.memory_mib_per_h),
        ("miss_ratio", _share(figures.misses, figures.frames), guards.miss_ratio),
        ("disagreement", _share(figures.disagreements, figures.compared), guards.disagreement),
    )
    for name, value, limit in figure:
        if value > limit:  # false for NaN: what is not known breaks nothing
            return f"{name} {value:.4g} is over its limit {limit:g}"
    return ""


# Frames that both versions had before a candidate serves, and those among them with a known time of
# the candidate.
#
# Where none of 50 fails at most 6 % do (the rule of three, at 95 %). A time is known where no other
# frame came meanwhile: of a candidate that takes longer than frames are apart none is, and on a
# full machine few are.
LEAST_PAIRS, LEAST_TIMED = 50, 5


def why_not_to_serve(pairs: int, timed: int, late: int, base_share: float, limits: Guards) -> str:
    """Why a candidate that stands beside may not serve yet, by the frames that both versions had.

    "" if it may.

    Args:
        pairs: frames that both had.
        timed: of them, those with a known time of the candidate.
        late: frames in which the candidate would have missed the deadline, or had no result.
        base_share: share of its frames in which the base missed it.
        limits: a candidate that is over the budget more often than `miss_ratio`, and than the base, does
            not serve.
    """
    most = max(limits.miss_ratio, base_share)
    if pairs < LEAST_PAIRS:
        return f"{pairs} of the {LEAST_PAIRS} frames beside the base that it has to have first"
    if late > most * timed:
        return (
            f"{late} of {timed} frames would be over the budget or without a result; at most {most:.2%} may"
        )
    if timed < LEAST_TIMED:
        return (
            f"{timed} of {pairs} frames have a known time, {LEAST_TIMED} are needed: it gives way to other"
            " frames"
        )
    return ""


def _share(part: int, whole: int) -> float:
    return part / whole if whole >= LEAST_FRAMES else math.nan


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
_ID: Final = re.compile(r"\S(.{0,126}\S)?")
_FLAGDS_LIBRARIES: Final = ("cryptography", "mmh3", "cbor2", "openfeature.contrib.tools.flagd.core")


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
    return (hashed * _BUCKETS >> 32) / _PERCENT


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
    if missing := [name for name in _FLAGDS_LIBRARIES if not _installed(name)]:
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


# What a candidate may change.
#
# How outputs come about. What others rely on (topics, budget, fallbacks, the names of the tiers) is
# the stage's.
CHANGES: Final = (
    "adapter",
    "options",
    "engine",
    "compile_mode",
    "precision",
    "channels_last",
    "parts",
    "packages",
    "shapes",
    "common_shapes",
)
# A candidate has a few lines, the parameter file with all comments 22 kB.
#
# A node reads it on the thread that receives frames, where someone sets the parameter: 1 to 2 ms
# for a few lines, 25 ms for all parameters (by hand).
_MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Candidate:
    """A version of a stage's model, checked.

    Attributes:
        changes: the fields of the stage's configuration that are this version's own.
    """

    version: str
    config: StageConfig
    changes: Mapping[str, Any]


def read_candidate(path: Path, stage: str, values: Mapping[str, Any]) -> Candidate:
    """Read the file of a candidate of this stage, by names without the stage's; `values` are its own.

    It may also be a parameter file, such as `torchperf tune` writes: what it says of the stage counts, its
    name is the version.

    Raises:
        ConfigError: it cannot be read, or others can change it: it names the code that runs. Or it changes
            nothing, or what it may not change, or a value is not allowed.
    """
    where = f"candidate {path}"
    try:
        data = read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); it has to be a YAML file"
        ) from error
    if why := exposed_at(path):
        raise ConfigError(f"{where}: is not taken, as it says which code runs: {why}")
    found = ros_yaml(data, where)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{where}: is no mapping of parameters, such as `adapter: module:Class`")
    given = {str(name): value for name, value in found.items()}
    if any(isinstance(value, Mapping) and "ros__parameters" in str(value) for value in given.values()):
        own = {
            name.partition(".")[2]: v
            for name, v in params_of(found, path).items()
            if name.startswith(f"{stage}.")
        }
        given = {name: value for name, value in own.items() if name in CHANGES or value != values.get(name)}
    return candidate_of(str(given.pop("version", path.stem)), given, stage, values, where)


def candidate_of(
    version: str, given: Mapping[str, Any], stage: str, values: Mapping[str, Any], where: str
) -> Candidate:
    """The version of this name that differs from the stage's own `values` by what is `given`.

    Errors name `where`.

    Raises:
        ConfigError: it changes nothing, or what it may not change, or a value is not allowed.
    """
    if wrong := sorted(given.keys() - set(CHANGES)):
        raise ConfigError(
            f"{where}: {', '.join(wrong)} cannot be changed; a candidate changes {', '.join(CHANGES)}"
        )
    own = {name: as_parameter(name, value) for name, value in given.items()}
    try:
        before, config = stage_config(stage, values), stage_config(stage, {**values, **own})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    changes = {
        field.name: getattr(config, field.name)
        for field in fields(StageConfig)
        if getattr(config, field.name) != getattr(before, field.name)
    }
    if version == BASE:
        raise ConfigError(
            f"{where}: its version is called {BASE}, as the stage's own is; give it another name"
        )
    if not changes:
        raise ConfigError(
            f"{where}: is what stage {stage} runs already; it has to change one of {', '.join(CHANGES)}"
        )
    return Candidate(version, config, changes)


def as_parameter(name: str, value: object) -> object:
    """A value as the parameter has it: `options` as text; of lists also one that is not in a list."""
    if name == "options" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    return (
        [value] if name in {"precision", "packages", "common_shapes"} and isinstance(value, str) else value
    )


RUNNING: Final = "running"
HELD: Final = "held"
ROLLED_BACK: Final = "rolled_back"
DONE: Final = "done"
STATES: Final = (RUNNING, HELD, ROLLED_BACK, DONE)
# How far a vehicle's clock may be behind the one that signed.
#
# Ten minutes, more than any that has seen GPS or NTP.
CLOCK_TOLERANCE_S: Final = 600.0
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_VALID_DAYS: Final = 30
_TIMES: Final = ("issued", "expires", "step_since")
_NEEDED: Final = ("name", "stage", "version", "serial", "issued", "expires", "candidate")
_WHOLE: Final = 100.0


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(_NAME.fullmatch(value))


def _is_versions(value: object) -> bool:
    return value is None or (
        isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
    )


_A_NAME: Final = "a text in quotes of letters, digits and . _ + -, 64 at most"
_VERSIONS: Final = "a list of versions, each a text in quotes"
# What a field of a plan has to be: whether a value is, and in words.
_ALLOWED: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "name": (_is_name, _A_NAME),
    "stage": (_is_name, _A_NAME),
    "version": (
        lambda value: _is_name(value) and value != BASE,
        f"{_A_NAME}, and another name than {BASE}: this is what vehicles have without a plan",
    ),
    "serial": (lambda value: type(value) is int and value >= 1, "a whole number from 1 on"),
    "step": (lambda value: type(value) is int and value >= 0, "a whole number from 0 on"),
    "state": (lambda value: value in STATES, f"one of: {', '.join(STATES)}"),
    "unit": (lambda value: value in UNITS, f"one of: {', '.join(UNITS)}"),
    "revoked": (_is_versions, _VERSIONS),
    "again": (_is_versions, _VERSIONS),
}


@dataclass(frozen=True)
class RolloutStep:
    """One step of a roll-out.

    Attributes:
        share: percent of the vehicles that the plan is for, 0 to 100.
        shadow: the candidate only runs beside the version in service and never publishes.
        least_exposure_h: hours of driving with the candidate, of all vehicles together, before the next
            step.
        soak_h: hours since the step began, before the next step.
        guards: limits that hold from this step on in place of the plan's.
    """

    share: float
    shadow: bool = False
    least_exposure_h: float = 0.0
    soak_h: float = 0.0
    guards: Mapping[str, float] = field(default_factory=dict)


# The steps of a plan that names none.
#
# Each exposes two to five times as many vehicles as the one before.
STEPS: Final = (
    # The first vehicles see the candidate before it may publish anything anywhere. One in a hundred, not
    # all: a shadow that leaks or takes the machine's time does harm without publishing, too.
    RolloutStep(1, shadow=True, least_exposure_h=10, soak_h=24),
    RolloutStep(1, least_exposure_h=10, soak_h=24),
    RolloutStep(5, least_exposure_h=50, soak_h=24),
    RolloutStep(20, least_exposure_h=200, soak_h=24),
    RolloutStep(50, least_exposure_h=500, soak_h=24),
    RolloutStep(100),
)


@dataclass(frozen=True)
class Margins:
    """The smallest differences that matter, see `status.py`; those of `torchperf compare`.

    Attributes:
        latency_percent: of the mean of all frames.
        p99_percent: of the p99 of a minute.
        miss_points: of the miss ratio, in percentage points.
    """

    latency_percent: float = 2.0
    p99_percent: float = 3.0
    miss_points: float = 0.1


@dataclass(frozen=True)
class RolloutPlan:
    """A plan, checked.

    Attributes:
        name: of the roll-out; another name puts other vehicles first.
        stage: the node's stage that gets the candidate.
        version: the candidate's name.
        serial: grows with every signed change; a new plan begins with its date, as the serials of DNS zones
        do. issued, expires: UTC. A vehicle follows no plan after its end.
        candidate: the stage's parameters that differ from the vehicle's own.
        files: path to SHA-256 of what has to be there, unchanged, before anything of it is loaded.
        steps, step: the steps, and the index of the one that is on.
        step_since: when that one began, UTC.
        state: running, held (no vehicle begins), rolled_back, done.
        shadow_min: minutes of driving beside the version in service, on each vehicle, before it serves
            there.
        probation_min: minutes of serving before a vehicle counts the candidate as good.
        unit: what is drawn by bucket, `vehicle` or `drive`.
        targeting: a rule of flagd's on the facts of a vehicle, see `check_rule`; None: every vehicle.
        guards, margins: see there.
        revoked: versions that no vehicle may run any more.
        again: versions that may come back although a vehicle rolled them back: once, so that the next
            plan does not name them. A vehicle that rolled one back since then keeps out of it.
    """

    name: str
    stage: str
    version: str
    serial: int
    issued: datetime.datetime
    expires: datetime.datetime
    candidate: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[RolloutStep, ...] = STEPS
    step: int = 0
    step_since: datetime.datetime = datetime.datetime.min.replace(tzinfo=datetime.timezone.utc)
    state: str = RUNNING
    shadow_min: float = 10.0
    probation_min: float = 30.0
    unit: str = UNITS[0]
    targeting: Mapping[str, Any] | None = None
    guards: Guards = field(default_factory=Guards)
    margins: Margins = field(default_factory=Margins)
    revoked: tuple[str, ...] = ()
    again: tuple[str, ...] = ()

    @property
    def now_at(self) -> RolloutStep:
        return self.steps[self.step]

    @property
    def share(self) -> float:
        """Percent of the vehicles that have the candidate, as a shadow or serving."""
        return 0.0 if self.state == ROLLED_BACK else self.now_at.share

    @property
    def taken_back(self) -> tuple[str, ...]:
        """Versions that no vehicle may run from this plan on."""
        return (*self.revoked, self.version) if self.state == ROLLED_BACK else self.revoked

    @property
    def limits(self) -> Guards:
        found = self.guards
        for step in self.steps[: self.step + 1]:
            found = found.changed(step.guards, "guards")
        return found

    def advanced(self, now: datetime.datetime) -> "RolloutPlan":
        """The plan of the next step; after the last one the roll-out is done."""
        last = self.step == len(self.steps) - 1
        return self._next(
            now, state=DONE if last else RUNNING, step=self.step if last else self.step + 1, step_since=now
        )

    def held(self, now: datetime.datetime) -> "RolloutPlan":
        """The plan with which no further vehicle begins; those that have begun go on."""
        return self._next(now, state=HELD)

    def rolled_back(self, now: datetime.datetime) -> "RolloutPlan":
        """The plan with which every vehicle goes back, and none may run this version again."""
        return self._next(
            now, state=ROLLED_BACK, revoked=tuple(dict.fromkeys((*self.revoked, self.version)))
        )

    def _next(self, now: datetime.datetime, **changes: object) -> "RolloutPlan":
        days = self.expires - self.issued
        changes |= {"serial": self.serial + 1, "issued": now, "expires": now + days, "again": ()}
        return replace(self, **changes)  # type: ignore[arg-type]

    def to_mapping(self) -> dict[str, Any]:
        times = {name: getattr(self, name).strftime("%Y-%m-%dT%H:%M:%SZ") for name in _TIMES}
        return asdict(self) | times


def utc_now() -> datetime.datetime:
    """The time, to the second: a plan says no more."""
    return datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)


def new_plan(values: Mapping[str, Any], now: datetime.datetime, where: str = "plan") -> RolloutPlan:
    """A plan that begins now; what `values` leaves out has its default.

    Raises:
        PlanError: a value is not allowed.
    """
    begun = {
        "serial": int(now.strftime("%Y%m%d")) * 100 + 1,
        "issued": now,
        "step_since": now,
        "expires": now + datetime.timedelta(days=_VALID_DAYS),
    }
    return plan_of({**begun, **values}, where)


def plan_of(values: object, where: str) -> RolloutPlan:
    """Check what a file says; messages begin with `where`, the file.

    Raises:
        PlanError: a field is missing, unknown, or has a value that is not allowed.
    """
    if not isinstance(values, Mapping):
        raise PlanError(
            f"{where}: is no plan; it has to be a mapping with the fields that `torchperf rollout new`"
            " writes"
        )
    known = {one.name for one in fields(RolloutPlan)}
    if unknown := sorted(map(str, set(values) - known)):
        raise PlanError(f"{where}: unknown field {unknown[0]!r}; there are: {', '.join(sorted(known))}")
    if missing := [name for name in _NEEDED if name not in values]:
        raise PlanError(f"{where}: the field {missing[0]!r} is missing")
    found = {"step_since": values["issued"], **values}
    for name, (holds, allowed) in _ALLOWED.items():
        _require(name not in found or holds(found[name]), where, name, found.get(name), allowed)
    for name in _TIMES:
        found[name] = _time(found[name], f"{where}: {name}")
    for name in ("revoked", "again"):
        found[name] = tuple(found.get(name) or ())
    for name in {"shadow_min", "probation_min"} & found.keys():
        found[name] = _number(found[name], f"{where}: {name}")
    found["candidate"] = _candidate(found["candidate"], where)
    found["files"] = _files(found.get("files") or {}, where)
    for package in filter(None, found["candidate"].get("packages", ())):
        _require(
            package in found["files"],
            where,
            "candidate: package",
            package,
            "among `files` with its SHA-256, by the same path from the plan's folder",
        )
    found["steps"] = steps = _steps(found["steps"], where) if "steps" in found else STEPS
    step = found.get("step", 0)
    _require(step < len(steps), where, "step", step, f"below the number of steps, {len(steps)}")
    expires = found["expires"]
    _require(found["issued"] < expires, where, "expires", expires.isoformat(), "after `issued`")
    if found.get("targeting") is not None:
        check_rule(found["targeting"], f"{where}: targeting")
    found["guards"] = Guards().changed(found.get("guards", {}), f"{where}: guards")
    found["margins"] = _margins(found.get("margins", {}), where)
    return RolloutPlan(**found)


def read_plan_file(path: Path) -> RolloutPlan:
    """A plan for people: YAML, not signed.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """
    from torchperf_ros.settings.params_file import read_yaml

    try:
        values = read_yaml(path, "plan")
    except ConfigError as error:
        raise PlanError(str(error)) from error
    return plan_of(values, f"plan {path}")


def plan_text(plan: RolloutPlan) -> str:
    import io

    from ruamel.yaml import YAML

    writer = YAML(typ="safe", pure=True)
    writer.default_flow_style, writer.width = None, 120
    writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    text = io.StringIO()
    writer.dump(plan.to_mapping(), text)
    return text.getvalue()


def _require(holds: object, where: str, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise PlanError(f"{where}: {name} {value!r} has to be {allowed}")


def _number(value: object, where: str, most: float = 1e6) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
        raise PlanError(f"{where} {value!r} has to be a number from 0 to {most:g}")
    return float(value)


def _time(value: object, where: str) -> datetime.datetime:
    found = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            found = datetime.datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(found, datetime.datetime):
        utc = datetime.timezone.utc
        with contextlib.suppress(OverflowError):  # at the end of the calendar
            return (found if found.tzinfo else found.replace(tzinfo=utc)).astimezone(utc)
    raise PlanError(f"{where} {value!r} has to be a time in UTC like 2026-11-24T08:00:00Z")


def _candidate(values: object, where: str) -> dict[str, Any]:
    known = {one.name: one for one in STAGE_PARAMETERS if one.name in CHANGES}
    if not isinstance(values, Mapping) or not values:
        raise PlanError(
            f"{where}: candidate {values!r} has to be the stage's parameters that differ, one at least"
        )
    found = {str(name): as_parameter(str(name), value) for name, value in values.items()}
    for name, value in found.items():
        if name not in known:
            raise PlanError(
                f"{where}: candidate: {name!r} is no parameter of a stage that a candidate may change; "
                f"there are: {', '.join(known)}"
            )
        try:
            known[name].check(value)
        except ConfigError as error:
            raise PlanError(f"{where}: candidate: {error}") from error
    return found


def _files(values: object, where: str) -> dict[str, str]:
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: files {values!r} has to be SHA-256 sums by path")
    for path, digest in values.items():
        _require(
            isinstance(digest, str) and _SHA256.fullmatch(digest),
            where,
            f"files: {path}",
            digest,
            "a SHA-256 of 64 hexadecimal digits, as `sha256sum` prints it",
        )
    return {str(path): digest for path, digest in values.items()}


def _steps(values: object, where: str) -> tuple[RolloutStep, ...]:
    if not isinstance(values, (list, tuple)) or not values:
        raise PlanError(
            f"{where}: steps {values!r} has to be a list of steps, for example [{{share: 1}}, {{share:"
            " 100}]"
        )
    names = [one.name for one in fields(RolloutStep)]
    steps: list[RolloutStep] = []
    for number, given in enumerate(values):
        at = f"{where}: steps[{number}]"
        if not isinstance(given, Mapping) or "share" not in given or (set(given) - set(names)):
            raise PlanError(f"{at} {given!r} has to have a share, and may have: {', '.join(names[1:])}")
        one: dict[str, Any] = {
            name: _number(given.get(name, 0), f"{at}.{name}", _WHOLE if name == "share" else 1e6)
            for name in ("share", "least_exposure_h", "soak_h")
        }
        _require(
            given.get("shadow", False) in (True, False), at, "shadow", given.get("shadow"), "true or false"
        )
        Guards().changed(given.get("guards") or {}, f"{at}.guards")
        one |= {"shadow": bool(given.get("shadow", False)), "guards": dict(given.get("guards") or {})}
        before = steps[-1] if steps else RolloutStep(0, shadow=True)
        if one["share"] < before.share or (one["shadow"] and not before.shadow):
            raise PlanError(
                f"{at}: exposes less than the step before it ({before.share:g} %); shares have to grow, and"
                " a shadow comes before what serves. To take a version back: `torchperf rollout rollback`"
            )
        steps.append(RolloutStep(**one))
    return tuple(steps)


def _margins(values: object, where: str) -> Margins:
    known = vars(Margins())
    if not isinstance(values, Mapping) or set(values) - set(known):
        raise PlanError(
            f"{where}: margins {values!r} has to be numbers by name; there are: {', '.join(known)}"
        )
    return Margins(
        **{name: _number(value, f"{where}: margins.{name}", _WHOLE) for name, value in values.items()}
    )
