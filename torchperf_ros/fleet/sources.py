"""Decides which version of a stage serves: its parameters, or a signed plan."""

import abc
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.fleet.comparer import PairBlock
from torchperf_ros.fleet.plan import (
    Candidate,
    CandidateFigures,
    Guards,
    TargetingError,
    candidate_of,
    facts_of,
    read_candidate,
)
from torchperf_ros.settings.build_options import version_of
from torchperf_ros.settings.config import BASE, RolloutOptions, StageConfig
from torchperf_ros.settings.files import node_folder, user_folder

if TYPE_CHECKING:
    from torchperf_ros.fleet.vehicle import Version

# Gives a stage's own parameters as they are now, by name without the stage's.
Values = Callable[[], Mapping[str, Any]]
_LOOK_S: Final = 2.0
_GIB: Final = 1 << 30
# A new model should give other outputs.
#
# By hand their share is shown only, and takes no candidate back.
_BY_HAND: Final = Guards(disagreement=1.0)


@dataclass(frozen=True)
class Wish:
    """What a stage is to run.

    Attributes:
        serve, beside: names of versions; no `beside`: nothing.
        candidate: which of them is on trial; "" for none.
        why: in words.
    """

    serve: str = BASE
    beside: str = ""
    candidate: str = ""
    limits: Guards = field(default_factory=Guards)
    why: str = ""


class Source(abc.ABC):
    """Asked by the thread that looks after candidates, ten times a second."""

    @abc.abstractmethod
    def wish(self) -> Wish:
        """What is to run now."""

    @abc.abstractmethod
    def version(self, name: str) -> Candidate:
        """A version of the wish that is not the base; raises `ConfigError` where it cannot be."""

    @abc.abstractmethod
    def rolled_back(self, reason: str, version: str = "") -> None:
        """A version is out of service, or no longer beside: it stays out. "": the candidate."""

    def begins(self) -> None:  # noqa: B027 - who remembers nothing has nothing to do
        """The candidate is about to serve; raises a `TorchperfError` where it must not."""

    def minute(
        self, block: PairBlock, figures: CandidateFigures, memory_mib: float, *, serves: bool
    ) -> str:
        """A minute of both versions has passed; returns the guard that is broken within the last hour."""
        return ""

    def stops(self) -> None:  # noqa: B027
        """The node ends its candidates in order."""


class ParameterSource(Source):
    """`STAGE.candidate` and `STAGE.candidate_serves`."""

    def __init__(self, stage: str, config: Callable[[], StageConfig], values: Values) -> None:
        self._stage, self._config, self._values = stage, config, values
        self._file = self._out = ""  # what the parameter names, and why that is out
        self._candidate: Candidate | None = None

    def wish(self) -> Wish:
        """The candidate beside or in service, unless it was rolled back since its file was named."""
        config = self._config()
        if config.candidate != self._file:
            self._file, self._candidate, self._out = config.candidate, None, ""
            try:
                if self._file:
                    path = Path(self._file).expanduser()
                    self._candidate = read_candidate(path, self._stage, self._values())
            except ConfigError as error:
                self._out = str(error)
        if self._candidate is None or self._out:
            return Wish(why=self._out)
        name = self._candidate.version
        serve, beside = (name, BASE) if config.candidate_serves else (BASE, name)
        return Wish(serve, beside, name, limits=_BY_HAND)

    def version(self, name: str) -> Candidate:
        assert self._candidate is not None
        return self._candidate

    def rolled_back(self, reason: str, version: str = "") -> None:
        own = "" if self._candidate is None else self._candidate.version
        if version in {"", own}:  # another one may be named by now
            self._out = f"{own}: {reason}"


class PlanSource(Source):
    """A signed plan, and what the vehicle remembers of it."""

    def __init__(
        self,
        stage: StageConfig,
        options: Callable[[], RolloutOptions],
        values: Values,
        device: Callable[[], str],
        node: str = "/perf",
    ) -> None:
        """Come up with what the vehicle remembers.

        Args:
            stage: whose `rollout_plan` is followed.
            options: gives `rollout.NAME` as they are now: its facts may change while the vehicle drives.
            values: gives the stage's own parameters.
            device: gives the name of the stage's card, "" for none.
            node: its fully qualified name; what it remembers is its own.

        Raises:
            ConfigError: the vehicle has no id, the key cannot be read, a library is not installed, or
                another node uses the folder.
        """
        self._options, self._stage, self._values, self._device = options, stage.name, values, device
        now = options()
        folder = user_folder("XDG_STATE_HOME", ".local/state") / "rollout"
        self._drive = _drive_id()
        try:
            from torchperf_ros.fleet.vehicle import RolloutStateError, VehicleRollout
        except ImportError as error:
            raise ConfigError(
                f"parameter {stage.name}.rollout_plan: {error}; `pip install 'torchperf_ros[rollout]'`"
            ) from error
        try:
            self.vehicle = VehicleRollout(
                node_folder(folder, node) / stage.name,
                self._facts(),
                Path(now.key).expanduser(),
                Path(stage.rollout_plan).expanduser(),
                stage.name,
            )
        except RolloutStateError as error:
            raise ConfigError(f"parameter {stage.name}.rollout_plan: {error}") from error
        except TorchperfError as error:
            raise ConfigError(f"parameter rollout.key: {error}") from error
        self._folder = Path(stage.rollout_plan).expanduser().parent
        self._looked_s = -math.inf

    def wish(self) -> Wish:
        """What the plan says, looked at every 2 s."""
        if time.monotonic() - self._looked_s > _LOOK_S:
            self.vehicle.learn(self._facts())
            self.vehicle.look()
            self._looked_s = time.monotonic()
        found = self.vehicle.decision
        beside = "" if found.beside is None else found.beside.name
        candidate = "" if found.plan is None else found.plan.version
        why = "; ".join(filter(None, [found.why, found.problem]))
        on_trial = candidate if candidate in {found.serve.name, beside} else ""
        return Wish(found.serve.name, beside, on_trial, found.limits, why)

    def _facts(self) -> dict[str, Any]:
        return facts_of_vehicle(self._options(), drive=self._drive, gpu=self._device())

    def version(self, name: str) -> Candidate:
        """A version as the plan has it, whose workers are about to start."""
        self.vehicle.runs(name)
        versions = (self.vehicle.decision.serve, self.vehicle.decision.beside)
        return self._candidate(next(one for one in versions if one is not None and one.name == name))

    def running(self) -> Candidate | None:
        """The version to begin with, None for the base: a good one, unless the plan has it back by now.

        Raises:
            ConfigError: it cannot be.
        """
        found = self.vehicle.look()
        good = found.serve if found.beside is None else self.vehicle.running
        return None if good.name == BASE else self._candidate(good)

    def _candidate(self, version: "Version") -> Candidate:
        """A version whose packages are the files that were signed, which lie from the plan's folder on."""
        given = dict(version.parameters)
        if "packages" in given:
            given["packages"] = [str(self._folder / name) if name else "" for name in given["packages"]]
        return candidate_of(version.name, given, self._stage, self._values(), f"version {version.name}")

    def begins(self) -> None:
        """Write down that it is on trial; raises a `TorchperfError` where that cannot be."""
        self.vehicle.begins_trial()

    def rolled_back(self, reason: str, version: str = "") -> None:
        self.vehicle.rolled_back(reason, version)

    def minute(
        self, block: PairBlock, figures: CandidateFigures, memory_mib: float, *, serves: bool
    ) -> str:
        from torchperf_ros.fleet.records import SERVING, SHADOW, Block, paired_figures

        plan = self.vehicle.decision.plan
        if plan is None:
            return ""
        paired = paired_figures(block.base_ms, block.candidate_ms, float("inf")) if block.both else {}
        paired |= {
            "frames": block.pairs,
            "base_misses": block.base_late,
            "candidate_misses": block.candidate_late,
        }
        return self.vehicle.minute(
            Block(
                time.time(),
                self._drive,
                plan.version,
                plan.serial,
                plan.step,
                SERVING if serves else SHADOW,
                **paired,
                compared=block.compared,
                agreed=block.compared - block.different,
                score=block.score,
                deaths=figures.deaths,
                refused=figures.refused,
                safe_stops=figures.safe_stops,
                memory_mib=memory_mib,
                memory_mib_per_h=figures.memory_mib_per_h,
                stage=plan.stage,
                rollout=plan.name,
            )
        )

    def stops(self) -> None:
        """The trial goes on after the next start."""
        self.vehicle.stops()


def _drive_id() -> str:
    """Of this process alone: nodes in containers of one vehicle begin in one second with one process id."""
    return f"{time.time():.0f}-{os.urandom(4).hex()}"


def facts_of_vehicle(options: RolloutOptions, **known: str) -> dict[str, Any]:
    """What a vehicle says of itself.

    The user's own facts go before what is found out; empty ones are left out.

    Raises:
        ConfigError: a fact is none that plans may ask for, or has no usable value.
    """
    found = {
        "memory_gib": f"{psutil.virtual_memory().total / _GIB:.1f}",
        "torch": version_of("torch"),
        "ros_distro": os.environ.get("ROS_DISTRO", ""),
        **known,
        **options.more,
    }
    try:
        return facts_of(
            {**{name: value for name, value in found.items() if value}, "vehicle": options.vehicle}
        )
    except TargetingError as error:
        raise ConfigError(f"parameter rollout.vehicle or rollout.facts: {error}") from error
