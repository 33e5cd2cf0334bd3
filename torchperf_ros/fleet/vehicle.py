"""What one vehicle does about a plan, by itself and offline.

That is whether it is meant, what runs, and the way back. What it remembers is in one file that is whole
whenever the power may go. The order of writing keeps it safe: a version is written down as `trial` before
it serves and as good after its probation, and what runs after a start is the last good one. A loss of power
at any moment leaves one of the two states.
"""

import contextlib
import datetime
import enum
import fcntl
import hashlib
import json
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.fleet.plan import (
    DONE,
    HELD,
    ROLLED_BACK,
    UNITS,
    WINDOW_S,
    CandidateFigures,
    Guards,
    PlanError,
    RolloutPlan,
    broken_guard,
    bucket_percent,
    check_installed,
    facts_of,
    is_for,
    unit_of,
    utc_now,
)
from torchperf_ros.fleet.records import BLOCK_S, SERVING, Block, RecordWriter
from torchperf_ros.fleet.signature import check_time, read_public_key, read_signed
from torchperf_ros.settings.config import BASE
from torchperf_ros.settings.files import (
    exposed_at,
    make_private,
    open_regular,
    read_bounded,
    replace_file,
    sha256_of,
)

STATE_FILE: Final = "state.json"
_VERSION: Final = 1
# Of the file: a plan of 1 MiB at most, and what is left of earlier ones.
_MOST_BYTES: Final = 16 << 20


class RolloutStateError(TorchperfError):
    """The vehicle cannot remember what it is about to do, so it must not do it.

    The message says why and what to do.
    """


@dataclass(frozen=True)
class Version:
    """What a stage runs.

    A name, the parameters that differ from the vehicle's own, sums of its files by path.
    """

    name: str = BASE
    parameters: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass
class VehicleState:
    """What lasts over a loss of power.

    Attributes:
        serial: of the last plan that was accepted; older ones are replays.
        plan: that plan as it was signed, "" for none, so that a file that is lost or damaged later changes
            nothing.
        good: versions that served their probation, the last one in service; without any, the base is.
        trial: the version that serves and is not good yet, "" for none.
        cut_off: how often that trial was ended by a loss of power or a kill.
        counted: whether the last such end is among them, and the version has not run since. A start that
            comes to nothing, as a camera is not there yet, is no end of a trial.
        shadow_s, serving_s: how long each version ran here beside another one, and in service.
        barred: versions that were rolled back here, with the reason.
        lost: when an earlier state was found damaged: what was barred then is not known. The first version
            that a plan brings after it is barred, in doubt.
    """

    serial: int = 0
    plan: str = ""
    good: list[Version] = field(default_factory=list)
    trial: str = ""
    cut_off: int = 0
    counted: bool = False
    shadow_s: dict[str, float] = field(default_factory=dict)
    serving_s: dict[str, float] = field(default_factory=dict)
    barred: dict[str, str] = field(default_factory=dict)
    lost: str = ""

    @property
    def last_good(self) -> Version:
        return self.good[-1] if self.good else Version()


def load_state(folder: Path) -> tuple[VehicleState, str]:
    """What the folder holds, and what is wrong with it; "" for nothing.

    A file that is damaged or cannot be read is kept beside, under a name with the time, and the vehicle
    comes up with its base.
    """
    path = folder / STATE_FILE
    try:
        whole = json.loads(read_bounded(path, _MOST_BYTES))
        content = whole["state"]
        if whole["v"] != _VERSION or whole["sha256"] != _sum(content):
            raise ValueError("another version, or changed since it was written")
        content["good"] = [Version(**one) for one in content["good"]]
        state = VehicleState(**content)
    except FileNotFoundError:
        return VehicleState(), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        beside = path.with_name(f"state.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json")
        wrong = (
            f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is damaged ({error})"
        )
        why = f"state {path}: {wrong}; the vehicle runs its base, and the file is kept as {beside.name}"
        with contextlib.suppress(OSError):
            path.replace(beside)
        return VehicleState(lost=why), why
    return state, ""


class FolderLock:
    """A folder whose state one node reads and replaces.

    No other node may meanwhile. The lock holds until the object goes.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder where it is missing, and take it.

        Raises:
            RolloutStateError: another one has it.
            OSError: it cannot be made, as the disk is full or read-only.
        """
        make_private(folder)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.release = weakref.finalize(self, os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.release()
            raise RolloutStateError(
                f"state {folder}: another node uses it, and each would forget what the other one has"
                " written; give each node a name or namespace of its own, or another XDG_STATE_HOME"
            ) from error


_LOCKS: Final = weakref.WeakValueDictionary[tuple[str, str], FolderLock]()


def lock_folder(folder: Path, plan: Path) -> FolderLock:
    """The lock of the folder for whoever follows this plan.

    A process that has it for this plan already gets the same one: it is the same node, which is configured
    again.

    Raises:
        RolloutStateError, OSError: see `FolderLock`.
    """
    key = os.path.realpath(folder), os.path.realpath(plan)
    if (lock := _LOCKS.get(key)) is None:
        lock = _LOCKS[key] = FolderLock(folder)
    return lock


def save_state(folder: Path, state: VehicleState) -> None:
    """Replace the file.

    All of the new state is on the disk on return, and until then all of the old one is.

    Raises:
        OSError: it cannot be written; the old state stays.
    """
    content = asdict(state)
    text = json.dumps({"v": _VERSION, "sha256": _sum(content), "state": content}, allow_nan=False).encode()
    replace_file(folder / STATE_FILE, text)


def _sum(content: object) -> str:
    """Finds what a disk has changed, in a number, too."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# So often a trial may end with a loss of power.
#
# A candidate that brings the machine down is not tried for ever.
MOST_CUT_OFF: Final = 5
_MIN_S: Final = 60.0


class Role(enum.Enum):
    NONE = "none"
    SHADOW = "shadow"
    SERVING = "serving"


@dataclass(frozen=True)
class Decision:
    """What the stage has to run now.

    Attributes:
        role: of the plan's candidate.
        serve: the version that answers and publishes.
        beside: the version that takes the same frames and never publishes; None for none.
        why: in words, with the figures that decided.
        plan: that is followed; None for none.
        limits: the guards of this step.
        problem: what is wrong with a file, "" for nothing; the decision holds all the same.
    """

    role: Role
    serve: Version
    beside: Version | None
    why: str
    plan: RolloutPlan | None = None
    limits: Guards = Guards()
    problem: str = ""


@dataclass(frozen=True)
class Placement:
    """The role that a plan gives its candidate on one vehicle.

    Attributes:
        role: of the candidate.
        why: in words, with the figures that decided.
        leaves: the candidate must not serve here, even where it is good already.
    """

    role: Role
    why: str
    leaves: bool = False


def role_of(plan: RolloutPlan, bucket: float, shadow_s: float, begun: bool, good: bool) -> tuple[Role, str]:
    """The candidate's role on a vehicle that the plan may be for, and a remark.

    The simulation asks it, too.

    Args:
        plan: neither rolled back nor revoked.
        bucket: of the vehicle, percent.
        shadow_s: how long the candidate ran there beside the version in service.
        begun: whether it ever ran there.
        good: whether it served its probation there.
    """
    if bucket >= plan.share:
        return Role.NONE, ""
    if plan.state == HELD and not begun:
        return Role.NONE, "; the roll-out is held, and no vehicle begins"
    if plan.now_at.shadow:
        return Role.SHADOW, " as a shadow"
    left_min = plan.shadow_min - shadow_s / _MIN_S
    if left_min > 0 and not good:
        return Role.SHADOW, f"; {left_min:.0f} min as a shadow come first"
    return Role.SERVING, ""


def placement_of(
    plan: RolloutPlan,
    facts: Mapping[str, str],
    state: VehicleState,
    changed: Callable[[Mapping[str, str]], str],
) -> Placement:
    """The candidate's place on the vehicle with these facts, which remembers `state`.

    `changed` names a file of the plan that is not what was signed; "" for none.
    """
    version, name = plan.version, facts["vehicle"]
    is_barred = version in state.barred
    if is_barred or plan.state == ROLLED_BACK or version in plan.revoked:
        how = f"is rolled back by serial {plan.serial}"
        if is_barred:
            how = f"was rolled back here: {state.barred[version]}"
        return Placement(Role.NONE, f"version {version} {how}", leaves=True)
    if why := changed(plan.files):
        # Nothing of it is loaded anew; the last good version may be another one.
        return Placement(Role.NONE, why)
    try:
        unit = unit_of(facts, plan.unit)
        bucket = bucket_percent(plan.name, unit)
        if not is_for(plan.name, plan.targeting, facts, unit):
            return Placement(Role.NONE, f"the plan's targeting leaves vehicle {name} out", leaves=True)
    except PlanError as error:
        # The fact is not known, so the version that serves goes on.
        return Placement(Role.NONE, str(error))
    good = state.last_good.name == version
    if good and plan.state == DONE:
        return Placement(Role.NONE, f"version {version} is in service: the roll-out is done")
    begun = version in state.shadow_s or version in state.serving_s
    role, remark = role_of(plan, bucket, state.shadow_s.get(version, 0.0), begun, good)
    by_drive = plan.unit != UNITS[0]
    of = f"{name}, drive {facts['drive']}," if by_drive else name
    why = f"vehicle {of} is in bucket {bucket:.2f} %, step {plan.step} exposes {plan.share:g} %{remark}"
    # A drive that is not drawn runs the version before; another drive may have the candidate again.
    return Placement(role, why, leaves=by_drive and bucket >= plan.share)


class SignedFiles:
    """Compares the files of versions, which lie from the plan's folder on, with what was signed."""

    def __init__(self, folder: Path, exposure: Callable[[Path], str]) -> None:
        """`exposure` names others that can change a file, see `exposed_at`."""
        self._folder, self._exposure = folder, exposure
        self._hashed: dict[Path, tuple[tuple[int, ...], str]] = {}

    def changed(self, files: Mapping[str, str]) -> str:
        """The first of the files that is not what was signed, and why; "" for none.

        A sum is made anew only for a file that was touched.
        """
        for name, wanted in files.items():
            path = self._folder / name
            try:
                found = self._sum(path)
            except OSError as error:
                return f"file {path}: cannot be read ({error.strerror or error}); the plan needs it"
            if why := self._exposure(path):
                return f"file {path}: is not loaded: {why}"
            if found != wanted:
                return f"file {path}: has SHA-256 {found[:16]}..., and the plan says {wanted[:16]}..."
        return ""

    def _sum(self, path: Path) -> str:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            # Times of a change can be set back by hand, but not st_ctime, which is that of the setting.
            mark = (
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_size,
                status.st_ino,
                status.st_dev,
            )
            if self._hashed.get(path, (None,))[0] != mark:
                self._hashed[path] = mark, sha256_of(file)
        return self._hashed[path][1]


class VehicleRollout:
    """One stage of one vehicle.

    Not for several threads at once, and not for the thread that answers frames.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, object],
        public_key: Path,
        plan_path: Path,
        stage: str,
        clock: Callable[[], datetime.datetime] = utc_now,
        exposure: Callable[[Path], str] = exposed_at,
    ) -> None:
        """Come up with what the folder remembers; `decision` has what was decided last.

        Args:
            folder: of this stage of this node alone: `state.json` and the records lie in it. It is made
                where it is missing, and locked until `stops`.
            facts: of the vehicle, see `targeting.FACTS`; `vehicle`, its id, is needed.
            public_key: of the plans' owner.
            plan_path: the signed plan; it may come, change and go at any time. Its files are found from its
                folder.
            stage: the node's stage; a plan for another one is refused.
            clock: UTC.
            exposure: names others that can change a file, see `exposed_at`.

        Raises:
            TargetingError: the vehicle has no id, a fact is none, or a library of the extra `rollout` is
                missing.
            ConfigError: the public key cannot be read, is none, or others can change it.
            RolloutStateError: another node uses the folder.
        """
        check_installed()
        self.facts = facts_of(facts)
        self._folder, self._plan_path, self._stage, self._clock = folder, plan_path, stage, clock
        self._key = read_public_key(public_key)
        if why := exposure(public_key):
            raise ConfigError(f"key {public_key}: is not trusted: {why}")
        self._exposure = exposure
        self._lock: FolderLock | None = None
        self._unsaved = self._refused = ""
        try:
            self._lock = lock_folder(folder, plan_path)
        except OSError as error:
            self._unsaved = self._cannot(error)
        self.state, self._damage = load_state(folder)
        self._files = SignedFiles(plan_path.parent, exposure)
        self._recent: deque[CandidateFigures] = deque(maxlen=round(WINDOW_S / BLOCK_S))
        self.decision = Decision(Role.NONE, self.running, None, "no plan was looked at yet")
        self.records = RecordWriter(folder, self.facts, clock=lambda: clock().timestamp())
        if self.state.trial and not self.state.counted:
            # The power went while it ran, or the process was killed.
            self.state.cut_off += 1
            self.state.counted = True
            if self.state.cut_off >= MOST_CUT_OFF:
                self._bar(self.state.trial, f"its trial was cut off {self.state.cut_off} times")
            else:
                self._save()

    def learn(self, facts: Mapping[str, object]) -> None:
        """Take other facts: the card is known once a worker is up, and a vehicle comes into another region.

        Raises:
            TargetingError: a fact is none; those before hold.
        """
        self.facts = self.records.facts = facts_of(facts)

    @property
    def running(self) -> Version:
        """The one version to begin with after a start.

        The last good one whose files are as they were signed.
        """
        return self._last_good()

    def _last_good(self, without: str = "") -> Version:
        good = (one for one in reversed(self.state.good) if one.name != without)
        return next((one for one in good if not self._files.changed(one.files)), Version())

    def look(self) -> Decision:
        """Read the plan and say what has to run; call it at the start, and every few seconds.

        It takes about 1 ms, and longer where a file of the plan is new or was touched: its sum is made.
        It changes what is remembered where the plan says so: a newer serial, a version that is revoked. It
        never
        raises: what is wrong stands in `problem`, and the last accepted plan, or the last good version,
            holds.
        """
        if self._unsaved:
            self._save()
        plan, problem = self._current_plan()
        problem = "; ".join(filter(None, (self._damage, problem)))
        place = Placement(Role.NONE, "there is no plan")
        if plan is not None:
            place = placement_of(plan, self.facts, self.state, self._files.changed)
        if self._unsaved and place.role is not Role.NONE and not self._confirmed(plan):
            place = Placement(Role.NONE, "nothing begins that cannot be remembered")
        problem = "; ".join(filter(None, (problem, self._unsaved, self.records.problem)))
        if self.state.trial and (
            place.role is not Role.SERVING or plan is None or plan.version != self.state.trial
        ):
            self._ends_trial()
        self.decision = self._decide(place, plan, problem)
        return self.decision

    def begins_trial(self) -> None:
        """To be called before the candidate is let serve, whenever `look` says SERVING.

        It is on the disk on return.

        Raises:
            RolloutStateError: `look` did not say so, or it cannot be written down; then the candidate must
                not serve.
        """
        plan = self.decision.plan
        if plan is None or self.decision.role is not Role.SERVING:
            raise RolloutStateError(f"no candidate is to serve here: {self.decision.why}")
        self.runs(plan.version)
        if self._confirmed(plan) or self.state.trial == plan.version:
            return
        self.state.trial, self.state.cut_off, self.state.counted = plan.version, 0, False
        if not self._save():
            self.state.trial = ""
            raise RolloutStateError(
                f"version {plan.version} does not serve: {self._unsaved}; free or mend that disk"
            )
        self._event("trial", plan)

    def runs(self, version: str) -> None:
        """To be called before workers of a version start, or it serves.

        If it is on trial, what ends it now counts.
        """
        if version == self.state.trial and self.state.counted:
            self.state.counted = False
            self._save()

    def rolled_back(self, reason: str, version: str = "") -> Decision:
        """To be called after a version was taken out of service, or its shadow ended: it stays out.

        Args:
            reason: the figure and its limit, as `broken_guard` has it.
            version: the one; the plan may name another one by now, or have ended. "": the plan's.

        Returns:
            What runs now: the last good version that is not this one. It holds even where it cannot be written down,
            which `look` then tries again.
        """
        plan = self.decision.plan
        if version := version or ("" if plan is None else plan.version):
            name = plan.name if plan is not None and plan.version == version else ""
            self._bar(version, reason)
            self.records.event("rolled_back", version, self.state.serial, reason, self._stage, name)
        self.decision = self._decide(
            Placement(Role.NONE, f"rolled back here: {reason}"), plan, self._unsaved
        )
        return self.decision

    def stops(self) -> None:
        """To be called when the node is stopped in order: the trial goes on later, and was not cut off.

        What was cut off before still counts where the version has not run since. Another one may have the
        folder from then on; nothing else may be called any more.
        """
        if self.state.trial and not self.state.counted:
            self._ends_trial()
        self._lock = None

    def minute(self, block: Block) -> str:
        """Keep a minute of both versions, count its exposure, and look at the guards.

        A candidate that has served its probation is the last good version from then on.

        The guards can be asked at any moment (`broken_guard` with `Decision.limits`): a roll-back need not
        wait.

        Returns:
            The guard that is broken within the last hour, "" for none.
        """
        served = self.state.serving_s if block.role == SERVING else self.state.shadow_s
        # A minute beside it without a frame of both shows nothing.
        if block.frames or block.role == SERVING:
            served[block.version] = served.get(block.version, 0.0) + BLOCK_S
            self._save()
        self.records.minute(block)
        self._recent.append(block.figures)
        broken = broken_guard(self.decision.limits, sum(self._recent, CandidateFigures()))
        plan, trial = self.decision.plan, self.state.trial
        if plan is None or plan.version != trial or broken or block.role != SERVING:
            return broken
        if served.get(trial, 0.0) >= plan.probation_min * _MIN_S:
            # Good as soon as it has served its probation; a full disk is tried again, see `look`.
            self.state.good.append(_candidate(plan))
            self._event("confirmed", plan)
            self._ends_trial()
        return broken

    def _event(self, what: str, plan: RolloutPlan, reason: str = "") -> None:
        self.records.event(what, plan.version, plan.serial, reason, plan.stage, plan.name)

    def _current_plan(self) -> tuple[RolloutPlan | None, str]:
        problem = ""
        try:
            text = read_bounded(self._plan_path)
            if why := self._exposure(self._plan_path):
                raise PlanError(f"plan {self._plan_path}: is not taken: {why}")
            self._accept(text)
        except FileNotFoundError:
            problem = f"plan {self._plan_path}: is not there" if self.state.plan else ""
        except OSError as error:
            problem = f"plan {self._plan_path}: cannot be read: {error.strerror or error}"
        except PlanError as error:
            problem = str(error)
            if problem != self._refused:  # once, not at every look
                self.records.event("refused", "", self.state.serial, problem, self._stage)
            self._refused = problem
        if not self.state.plan:
            return None, problem
        where = f"the last accepted plan, serial {self.state.serial}"
        try:
            plan = read_signed(self.state.plan.encode(), self._key, where)
            check_time(plan, self._now(plan), where)
        except PlanError as error:
            return None, problem or str(error)
        return plan, f"{problem}; {where} holds" if problem else ""

    def _accept(self, text: bytes) -> None:
        """Remember a plan that is signed, valid now, and not older than the one before.

        A `PlanError` says why not.
        """
        where = f"plan {self._plan_path}"
        state = self.state
        if text == state.plan.encode():
            return
        plan = read_signed(text, self._key, where)
        if plan.stage != self._stage:
            raise PlanError(f"{where}: is for stage {plan.stage!r}; this is {self._stage!r}")
        if plan.serial <= state.serial:
            same = (
                "another plan with that serial was accepted" if plan.serial == state.serial else "a replay"
            )
            raise PlanError(
                f"{where}: has serial {plan.serial}, and {state.serial} was accepted before: {same}; sign "
                "the newest plan with a greater one"
            )
        # Before the time is looked at: the clock may be wrong by years, and the vehicle may have been away.
        for version in plan.taken_back:
            self._take_back(version, plan)
        before = self._last_accepted()
        check_time(plan, self._now(before), where)
        same_rollout = before is not None and (before.name, before.version) == (plan.name, plan.version)
        if self._is_another(plan, before):
            raise PlanError(
                f"{where}: its version {plan.version} has another candidate, or other files, than the one"
                " that ran here; what differs needs a version of its own, which is tried anew"
            )
        if same_rollout and before and plan.share < before.share and plan.state != ROLLED_BACK:
            raise PlanError(
                f"{where}: exposes {plan.share:g} %, less than the {before.share:g} % of serial "
                f"{before.serial}; to take a version back: `torchperf rollout rollback`"
            )
        state.serial, state.plan = plan.serial, text.decode()
        for version in (*plan.again, *((before.version,) if before and not same_rollout else ())):
            state.shadow_s.pop(version, None)
            state.serving_s.pop(version, None)
        for version in plan.again:
            state.barred.pop(version, None)
        if state.lost and plan.version not in plan.again:
            state.barred[plan.version] = (
                f"in doubt, for what was rolled back here is not known: {state.lost}"
            )
        state.lost = ""
        self._recent.clear()
        self._save()

    def _take_back(self, version: str, plan: RolloutPlan) -> None:
        """Keep a version that the plan revokes out, also one that has not run here."""
        state, why = self.state, f"revoked by serial {plan.serial}"
        has_run = {*state.shadow_s, *state.serving_s, state.trial, *(one.name for one in state.good)}
        if version not in state.barred:
            self._bar(version, why)
            if version in has_run:
                self.records.event("rolled_back", version, plan.serial, why, plan.stage, plan.name)

    def _is_another(self, plan: RolloutPlan, before: RolloutPlan | None) -> bool:
        """Whether what ran here under the name of the plan's version is not what the plan has."""
        began = {*self.state.shadow_s, *self.state.serving_s} - {*plan.again}
        last = [_candidate(before)] if before is not None and before.version in began else []
        ran = [*self.state.good, *last]
        return any(one.name == plan.version and one != _candidate(plan) for one in ran)

    def _last_accepted(self) -> RolloutPlan | None:
        """The plan before; None for none, or where the vehicle has been given another key since."""
        try:
            return read_signed(self.state.plan.encode(), self._key, "the last accepted plan")
        except PlanError:
            return None

    def _now(self, plan: RolloutPlan | None) -> datetime.datetime:
        """The clock, or the time of a signature that was accepted.

        A clock that jumps back makes no plan valid anew.
        """
        now = self._clock()
        return now if plan is None else max(now, plan.issued)

    def _decide(self, place: Placement, plan: RolloutPlan | None, problem: str) -> Decision:
        why, limits = place.why, plan.limits if plan else Guards()
        if plan is None or place.role is Role.NONE:
            good = self._last_good(plan.version if plan and place.leaves else "")
            return Decision(Role.NONE, good, None, why, plan, limits, problem)
        serve, beside = self._last_good(), _candidate(plan)
        if place.role is Role.SERVING:
            serve, beside = beside, self._last_good(plan.version)
        return Decision(place.role, serve, beside, why, plan, limits, problem)

    def _ends_trial(self) -> None:
        self.state.trial, self.state.cut_off = "", 0
        self._save()

    def _confirmed(self, plan: RolloutPlan | None) -> bool:
        return plan is not None and self.state.last_good.name == plan.version

    def _bar(self, version: str, reason: str) -> None:
        state = self.state
        state.barred[version] = reason
        state.good = [one for one in state.good if one.name != version]
        if state.trial == version:
            state.trial, state.cut_off = "", 0
        self._recent.clear()
        self._save()

    def _save(self) -> bool:
        """Whether all is on the disk; without its folder's lock nothing can be remembered either."""
        try:
            self._lock = self._lock or lock_folder(self._folder, self._plan_path)
            save_state(self._folder, self.state)
            self._unsaved = ""
        except RolloutStateError as error:
            self._unsaved = str(error)
        except OSError as error:
            self._unsaved = self._cannot(error)
        return not self._unsaved

    def _cannot(self, error: OSError) -> str:
        return f"state {self._folder}: cannot be written: {error.strerror or error}"


def _candidate(plan: RolloutPlan) -> Version:
    return Version(plan.version, dict(plan.candidate), dict(plan.files))
