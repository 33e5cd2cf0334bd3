"""A roll-out's plan: which version, onto which vehicles, in which steps, and what it must not do.

A plan is the whole state of a roll-out. Every change of it (the next step, a hold, a roll-back) is another
plan with a greater `serial`, signed anew (`signature.py`); a vehicle needs nothing else, and no server. The
version is a candidate: a YAML file of the stage's parameters that differ, which may also come without a
plan.
"""

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.guards import Guards, PlanError
from torchperf_ros.fleet.targeting import UNITS, check_rule
from torchperf_ros.settings.config import BASE, STAGE_PARAMETERS, StageConfig, stage_config
from torchperf_ros.settings.files import exposed_at, read_bounded
from torchperf_ros.settings.params_file import params_of, ros_yaml

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
_VERSION: Final = "version"
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
    return candidate_of(str(given.pop(_VERSION, path.stem)), given, stage, values, where)


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
    """The smallest differences that matter, see `sequence.py`; those of `torchperf compare`.

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
        targeting: a rule of flagd's on the facts of a vehicle, see `targeting.py`; None: every vehicle.
        guards, margins: see there.
        revoked: versions that no vehicle may run any more.
        again: versions that may come back although a vehicle rolled them back.
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
        return self._next(now, state=ROLLED_BACK, revoked=(*self.revoked, self.version))

    def _next(self, now: datetime.datetime, **changes: object) -> "RolloutPlan":
        days = self.expires - self.issued
        changes |= {"serial": self.serial + 1, "issued": now, "expires": now + days}
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
    if not isinstance(found, datetime.datetime):
        raise PlanError(f"{where} {value!r} has to be a time in UTC like 2026-11-24T08:00:00Z")
    utc = datetime.timezone.utc
    return (found if found.tzinfo else found.replace(tzinfo=utc)).astimezone(utc)


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
