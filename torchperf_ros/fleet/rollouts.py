"""Candidates of the node's stages.

Beside the version that serves, in its place, and back as soon as a guard breaks.
"""

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.fleet.plan import read_candidate
from torchperf_ros.fleet.shadow import Shadow, promote
from torchperf_ros.fleet.sources import ParameterSource, PlanSource, Source, Wish, facts_of_vehicle
from torchperf_ros.fleet.trial import Trial
from torchperf_ros.settings.config import BASE, NodeConfig, StageConfig, stage_config
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.process_setup import step_back
from torchperf_ros.workers.worker_pool import Log
from torchperf_ros.workers.worker_setup import worker_setup

# A candidate that breaks a guard is out of service a tenth of a second and one frame later.
_LOOK_S: Final = 0.1
_LATER_S: Final = 30.0
_END_S: Final = 5.0


@dataclass
class WatchedStage:
    """What is known of one stage's versions, from `prepared` to `end`.

    Attributes:
        begins: the version that the stage begins with and the fields that it changes; None: its own.
        trial: None while there is no candidate.
        text: the last thing to show of its candidate.
        later_s: from then on there may be memory for a candidate.
        unpromoted: its version may have had to serve before it had all its workers.
    """

    source: Source
    begins: tuple[str, dict[str, Any]] | None = None
    trial: Trial | None = None
    text: str = ""
    later_s: float = 0.0
    unpromoted: bool = False


class Rollouts:
    """A thread of the node that looks after the versions of all its stages."""

    def __init__(
        self, values: Callable[[str], dict[str, Any]], log: Log, alert: Callable[[Alert], None], node: str
    ) -> None:
        """`values` gives a stage's own parameters, `node` is its fully qualified name.

        Nothing runs before `begin`.
        """
        self._values, self._log, self._alert, self._node = values, log, alert, node
        self._stages: Sequence[Stage] = ()
        self._config: NodeConfig | None = None
        self._watched: dict[str, WatchedStage] = {}  # by stage
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self, config: NodeConfig) -> None:
        """See that a changed candidate can be read, and that facts are some that plans may ask for.

        The thread that asks receives frames, too, so that nothing is read that has been before.

        Raises:
            ConfigError: one cannot; the message names the file, or the parameter.
        """
        before = self._config
        is_followed = any(stage.rollout_plan for stage in config.stages)
        if is_followed and (before is None or before.rollout != config.rollout):
            facts_of_vehicle(config.rollout)
        known = {} if before is None else {stage.name: stage.candidate for stage in before.stages}
        for stage in config.stages:
            if stage.candidate and stage.candidate != known.get(stage.name):
                read_candidate(Path(stage.candidate).expanduser(), stage.name, self._values(stage.name))

    def prepared(self, config: NodeConfig) -> NodeConfig:
        """The configuration with the versions that the vehicle's plans begin with.

        `end` takes back what this takes.

        Raises:
            ConfigError: a candidate cannot be read, or a plan cannot be followed.
        """
        self._config = None
        self.check(config)
        self._watched, self._config = {}, config
        return replace(config, stages=tuple(self._prepared(stage, config) for stage in config.stages))

    def _prepared(self, stage: StageConfig, config: NodeConfig) -> StageConfig:
        name = stage.name
        if not stage.rollout_plan:
            self._watched[name] = WatchedStage(
                ParameterSource(name, lambda: self._stage_config(name), lambda: self._values(name))
            )
            return stage
        source = PlanSource(
            stage,
            lambda: self._configured.rollout,
            lambda: self._values(name),
            lambda: self._card(name),
            self._node,
        )
        watched = self._watched[name] = WatchedStage(source)
        try:
            running = source.running()
            if running is None:
                return stage
            worker_setup(running.config, config)
        except ConfigError as error:
            self._say(name, f"begins with its own parameters, as {error}")
            return stage
        watched.begins = running.version, dict(running.changes)
        # The guard has the node's vehicle, which no version changes.
        return replace(running.config, guard=stage.guard)

    @property
    def _configured(self) -> NodeConfig:
        assert self._config is not None
        return self._config

    def _stage_config(self, name: str) -> StageConfig:
        return next(one for one in self._configured.stages if one.name == name)

    def reconfigure(self, config: NodeConfig) -> None:
        self._config = config

    def _card(self, name: str) -> str:
        found = [stage.pool.description for stage in self._stages if stage.config.name == name]
        return next((one.card for one in found if one is not None), "")

    def begin(self, stages: Sequence[Stage], config: NodeConfig) -> None:
        self._stages, self._config = stages, config
        watched = [self._watched[stage.config.name] for stage in stages]
        for stage, one in zip(stages, watched, strict=True):
            if one.begins is not None:
                stage.model.name, stage.model.changes = one.begins
        # A thread before it that hangs on a disk has its own event, and does not go on with these stages.
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._stopping, list(zip(stages, watched, strict=True))),
            name="rollouts",
            daemon=True,
        )
        self._thread.start()

    def end(self) -> None:
        """Look after none any more, before the stages stop."""
        self._stopping.set()
        hangs = False
        if self._thread is not None:
            self._thread.join(_END_S)
            if hangs := self._thread.is_alive():
                what = "the thread that looks after candidates has not ended"
                self._log(
                    "error",
                    f"{what} after {_END_S:g} s: it waits for a disk, of the plans or of XDG_STATE_HOME",
                )
        self._thread = None
        for watched in self._watched.values():
            if watched.trial is not None:
                watched.trial.close()
            # A thread that hangs still has the source, which waits for the same disk.
            if not hangs:
                watched.source.stops()
        self._stages, self._watched = (), {}

    def values(self, stage: str) -> dict[str, str]:
        """What `/diagnostics` says of a stage's versions; empty where it never had a candidate."""
        watched = self._watched.get(stage)
        if watched is None:
            return {}
        if watched.trial is not None:
            return watched.trial.values()
        actor = next((one for one in self._stages if one.config.name == stage), None)
        if actor is None or not watched.text:
            return {}
        return {"version": actor.version, "candidate": watched.text}

    # -- the thread

    def _run(self, stopping: threading.Event, watched: Sequence[tuple[Stage, WatchedStage]]) -> None:
        step_back()
        while not stopping.wait(_LOOK_S):
            for stage, one in watched:
                try:
                    self._look_after(stage, one)
                except Exception:
                    # The thread's boundary: one stage's candidate must not cost another's guard.
                    text = f"{stage.config.name}: looking after a candidate failed"
                    self._log("error", f"{text}:\n{traceback.format_exc()}")

    def _look_after(self, stage: Stage, watched: WatchedStage) -> None:
        wish, trial = watched.source.wish(), watched.trial
        if trial is None:
            self._without_trial(stage, watched, wish)
            return
        trial.compare()
        if trial.serves != trial.served:
            trial.changed_places()
            other = BASE if stage.shadow is None else stage.shadow.version
            text = f"version {stage.version} serves from now on; {other} is warm beside it"
            self._say(stage.config.name, text)
        if not trial.over:
            bars = trial.ends(watched.source, wish)
            if trial.over:
                self._say(stage.config.name, f"version {trial.candidate} {trial.over}")
                if bars:
                    watched.source.rolled_back(trial.over, trial.candidate)
                wish = watched.source.wish()
        if trial.target(wish) != stage.version:
            trial.exchange(watched.source, wish)
            return
        trial.waits = ""
        if trial.over:
            self._end(trial, watched)
        elif trial.serves:
            trial.may_exchange()  # the way back is kept open

    def _without_trial(self, stage: Stage, watched: WatchedStage, wish: Wish) -> None:
        if watched.unpromoted:
            if promote(stage.model):
                return  # no other version begins before what serves is whole again
            watched.unpromoted = False
        other = wish.serve if wish.serve != stage.version else wish.beside
        if other and stage.pool.ready:
            if time.monotonic() >= watched.later_s:
                self._start(stage, watched, wish, other)
        elif wish.why or not wish.candidate:
            watched.text = wish.why

    def _start(self, stage: Stage, watched: WatchedStage, wish: Wish, other: str) -> None:
        name = stage.config.name
        if why := "memory is short" if stage.memory.tight else stage.pool.why_no_room():
            watched.later_s = time.monotonic() + _LATER_S
            watched.text = f"version {other} takes one more worker, for which there is no memory: {why}"
            self._say(name, watched.text)
            return
        try:
            if other == BASE:
                changes, config = {}, stage_config(name, self._values(name))
            else:
                version = watched.source.version(other)
                changes, config = dict(version.changes), version.config
            config = replace(config, guard=stage.config.guard)
            Shadow(stage, other, config, changes, worker_setup(config, self._configured))
        except ConfigError as error:
            watched.text = str(error)
            self._say(name, str(error))
            # The one that cannot be built, so that the way back leads past it.
            watched.source.rolled_back(str(error), wish.candidate if other == BASE else other)
            return
        # Where the stage is to leave the version that it runs, that version is on trial, and not the other.
        leaves = stage.version if other == wish.serve else other
        watched.trial = Trial(stage, wish.candidate or leaves)
        self._say(name, f"version {other} starts beside {stage.version}, which serves")

    @staticmethod
    def _end(trial: Trial, watched: WatchedStage) -> None:
        watched.text = f"{trial.candidate}: {trial.over}"
        watched.unpromoted = True
        if trial.shadow is not None:
            trial.shadow.remove()
        trial.close()
        watched.trial = None

    def _say(self, stage: str, text: str) -> None:
        self._log("warn", f"{stage}: {text}")
        self._alert(change_alert(stage, "rollout", text))
