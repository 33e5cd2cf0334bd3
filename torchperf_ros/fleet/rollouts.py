"""Candidates of the node's stages.

Beside the version that serves, in its place, and back as soon as a guard breaks.
"""

import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import monotonic_ns
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.api.outcome import Health
from torchperf_ros.fleet.comparer import OutputComparer
from torchperf_ros.fleet.guards import CandidateFigures, Guards, broken_guard, why_not_to_serve
from torchperf_ros.fleet.shadow import Shadow, counts, promote, shadow_of
from torchperf_ros.fleet.sources import ParameterSource, PlanSource, Source, Wish, facts_of_vehicle
from torchperf_ros.observe.watch.memory_watch import MemoryTrend
from torchperf_ros.settings.candidate import BASE, read_candidate
from torchperf_ros.settings.config import NodeConfig, StageConfig, stage_config
from torchperf_ros.settings.rollout_options import RolloutOptions
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.process_setup import step_back
from torchperf_ros.workers.worker_pool import Log, WorkerPool
from torchperf_ros.workers.worker_setup import worker_setup

_LOOK_S: Final = 0.1
"""A candidate that breaks a guard is out of service a tenth of a second and one frame later."""
_MINUTE_S: Final = 60.0
_SECOND_S: Final = 1.0
_LATER_S: Final = 30.0
_END_S: Final = 5.0
_MIB: Final = 1 << 20
_COUNTED: Final = ("frames", "deaths", "refused", "misses")


class Trial:
    """One candidate of one stage, from its start until one of the two versions leaves.

    Attributes:
        over: why it ends; "" while it goes on.
        leave_by_s: from then on what serves leaves for whatever can answer, by the monotonic clock.
        served: whether the candidate did at the last look.
        waits: why it does not serve yet although it is to; "" mostly.
    """

    def __init__(self, stage: Stage, candidate: str) -> None:
        """Compare the two versions of `stage`, one of which is the candidate."""
        self.stage, self.candidate = stage, candidate
        if self.shadow is not None:
            self.shadow.figures.version = candidate
        self._begun = "" if self.shadow is None else self.shadow.version
        self.over, self.leave_by_s, self.served = "", math.inf, self.serves
        self.waits = ""
        self._comparer: OutputComparer | None = None
        self._safe_stops, self._in_safe_stop = 0, False
        self._trend = MemoryTrend()
        self._trend_pid, self._minute_s, self._second_s = 0, 0.0, 0.0
        self._memory_mib = self._mib_per_h = math.nan
        self._before = self._minute_before = self._counts()

    @property
    def shadow(self) -> Shadow | None:
        """The version beside the one that serves."""
        return shadow_of(self.stage)

    @property
    def serves(self) -> bool:
        """Whether the candidate serves."""
        return self.stage.version == self.candidate

    def may_exchange(self) -> bool:
        """Whether the shadow can serve as well as the version that does.

        What began with this trial is made able to.

        From `leave_by_s` on one worker of lowest priority is enough: it is better than a broken guard.
        """
        shadow = self.shadow
        if shadow is None or not shadow.pool.ready:
            return False  # nobody else can serve, and the stage's fallbacks do what they can
        if shadow.version != self._begun or (self.serves and time.monotonic() >= self.leave_by_s):
            return True
        if not shadow.ready:
            shadow.promote()
        return shadow.ready

    def may_serve(self, limits: Guards) -> bool:
        """Whether the candidate has shown beside the other version that it may take its place.

        Else see `waits`.
        """
        shadow = self.shadow
        if shadow is not None:
            total = shadow.figures.total
            base_share = total.base_late / total.pairs if total.pairs else 0.0
            self.waits = why_not_to_serve(total.pairs, total.both, total.candidate_late, base_share, limits)
        return not self.waits

    def compare(self) -> None:
        """Take what both versions have answered since the last call, and what was found out about their outputs."""
        shadow = self.shadow
        if shadow is None:
            return
        model = self.stage.model if self.serves else shadow.model
        pool, setup = model.pool, model.setup
        if pool.description is None:
            return
        if self._comparer is None:
            scorer = (
                {name: setup[name] for name in ("adapter", "options")} if pool.description.scores else None
            )
            self._comparer = OutputComparer(
                pool.description.output, self.stage.config.candidate_tolerance, scorer
            )
            shadow.comparing = self._comparer.hold
        if (found := self._comparer.take()) is not None:
            shadow.figures.compared(found)
        for pair in shadow.take_pairs():
            shadow.figures.add(pair, candidate_serves=self.serves)
            if pair.served is not None and pair.payload is not None:
                outputs = (pair.payload, pair.served) if self.serves else (pair.served, pair.payload)
                self._comparer.offer(pair.answer.frame.seq, *outputs, pair.known)
        if (now_s := time.monotonic()) - self._second_s > _SECOND_S:
            self._second_s = now_s
            self._weigh(pool, now_s)

    def _weigh(self, pool: WorkerPool, now_s: float) -> None:
        """Follow the memory of the candidate's first worker."""
        worker = pool.workers[0]
        if worker is None or worker.ready_at_ns is None:
            return
        if worker.pid != self._trend_pid:
            self._trend, self._trend_pid = MemoryTrend(), worker.pid
        try:
            memory = psutil.Process(worker.pid).memory_info()
        except psutil.Error:
            return
        self._memory_mib = (memory.rss - memory.shared) / _MIB
        self._trend.add(now_s, self._memory_mib)
        growth = self._trend.suspicion()
        self._mib_per_h = math.nan if growth is None else growth.mib_per_hour

    def changed_places(self) -> None:
        """The versions have, a while ago: count what guards are about since then."""
        self.served, self._in_safe_stop = self.serves, False
        shadow = self.shadow
        now = self._counts()  # a safe stop that goes on is not of what serves now
        then = (
            CandidateFigures(**shadow.counts_at_exchange)
            if self.serves and shadow is not None
            else replace(now, deaths=0)
        )
        self._before = self._minute_before = then
        self._safe_stops = 0

    def figures(self) -> CandidateFigures:
        """What the candidate has done since it is where it is."""
        return self._since(self._before)

    def _since(self, before: CandidateFigures) -> CandidateFigures:
        shadow = self.shadow
        total = None if shadow is None else shadow.figures.total
        compared = {"disagreements": total.different, "compared": total.compared} if total else {}
        now = self._counts()
        since = {name: getattr(now, name) - getattr(before, name) for name in _COUNTED}
        return CandidateFigures(
            **since, safe_stops=self._safe_stops, memory_mib_per_h=self._mib_per_h, **compared
        )

    def _counts(self) -> CandidateFigures:
        shadow = self.shadow
        if not self.serves:
            return (
                CandidateFigures()
                if shadow is None
                else CandidateFigures(deaths=shadow.deaths, refused=shadow.figures.total.candidate_refused)
            )
        is_stopped = self.stage.statistics.health.state(monotonic_ns()) is Health.SAFE_STOP
        self._safe_stops += is_stopped and not self._in_safe_stop
        self._in_safe_stop = is_stopped
        return CandidateFigures(**counts(self.stage))

    def minute(self, source: Source) -> str:
        """Hand the last minute over, if it has passed.

        Returns the guard that is broken within the last hour.
        """
        shadow, now_s = self.shadow, time.monotonic()
        self._minute_s = self._minute_s or now_s
        if shadow is None or now_s - self._minute_s < _MINUTE_S:
            return ""
        self._minute_s += _MINUTE_S
        figures, self._minute_before = self._since(self._minute_before), self._counts()
        return source.minute(shadow.figures.take_block(), figures, self._memory_mib, serves=self.serves)

    def target(self, wish: Wish) -> str:
        """Which of the two versions is to serve.

        Where neither is wished for any more, the one not on trial.
        """
        shadow = self.shadow
        both = [self.stage.version, *([] if shadow is None else [shadow.version])]
        return (
            wish.serve
            if wish.serve in both
            else next((one for one in both if one != self.candidate), both[0])
        )

    def values(self) -> dict[str, str]:
        """For `/diagnostics`."""
        shadow = self.shadow
        found = {"version": self.stage.version, "candidate": f"{self.candidate}: {self._state()}"}
        if shadow is None:
            return found
        figures = shadow.figures
        found |= {"candidate_pairs": figures.words, "candidate_skipped": str(shadow.skipped)}
        left_out = 0 if self._comparer is None else self._comparer.left_out
        found |= {"candidate_lost_pairs": str(shadow.lost_pairs), "candidate_not_compared": str(left_out)}
        if figures.last_difference:
            found["candidate_differs"] = figures.last_difference
        if figures.last_refusal:
            found["candidate_refused"] = figures.last_refusal
        if figures.last_failure:
            found["candidate_failed"] = figures.last_failure
        if self._comparer is not None and self._comparer.problem:
            found["candidate_problem"] = self._comparer.problem
        return found

    def _state(self) -> str:
        shadow = self.shadow
        if self.over:
            return self.over
        if self.serves:
            return "serves"
        if shadow is None or not shadow.pool.ready:
            return f"starts: {'' if shadow is None else shadow.pool.progress}"
        return f"shadow, which is to serve and waits: {self.waits}" if self.waits else "shadow"

    def close(self) -> None:
        """Leave no process behind."""
        if self._comparer is not None:
            self._comparer.close()


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
        self._sources: dict[str, Source] = {}  # by stage
        self._trials: dict[str, Trial] = {}  # by stage
        self._later_s: dict[str, float] = {}  # by stage: when there may be memory for a candidate
        self._said: dict[str, str] = {}  # by stage: what was said last of its candidate
        self._begins: dict[str, tuple[str, dict[str, Any]]] = {}  # by stage: a version that it begins with
        # stages whose version may have had to serve before it had all its workers
        self._unpromoted: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self, config: NodeConfig) -> None:
        """See that a changed candidate can be read, and that facts are some that plans may ask for.

        The thread that asks receives frames, too, so that nothing is read that has been before.

        Raises:
            ConfigError: one cannot; the message names the file, or the parameter.
        """
        self._check(config, self._config)

    def _check(self, config: NodeConfig, before: NodeConfig | None) -> None:
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
        self._check(config, None)
        self._sources, self._begins, self._config = {}, {}, config
        return replace(config, stages=tuple(self._prepared(stage, config) for stage in config.stages))

    def _prepared(self, stage: StageConfig, config: NodeConfig) -> StageConfig:
        name = stage.name
        if not stage.rollout_plan:
            self._sources[name] = ParameterSource(
                name, lambda: self._stage_config(name), lambda: self._values(name)
            )
            return stage
        source = PlanSource(
            stage, self._options, lambda: self._values(name), lambda: self._card(name), self._node
        )
        self._sources[name] = source
        if source.vehicle.adopted:
            self._say(name, source.vehicle.adopted)
        try:
            running = source.running()
            if running is None:
                return stage
            worker_setup(running.config, config)
        except ConfigError as error:
            self._say(name, f"begins with its own parameters, as {error}")
            return stage
        self._begins[name] = running.version, dict(running.changes)
        return replace(
            running.config, guard=stage.guard
        )  # which has the node's vehicle; no version changes it

    def _options(self) -> RolloutOptions:
        assert self._config is not None
        return self._config.rollout

    def _stage_config(self, name: str) -> StageConfig:
        assert self._config is not None
        return next(one for one in self._config.stages if one.name == name)

    def reconfigure(self, config: NodeConfig) -> None:
        """Take changed parameters."""
        self._config = config

    def _card(self, name: str) -> str:
        found = [stage.pool.description for stage in self._stages if stage.config.name == name]
        return next((one.card for one in found if one is not None), "")

    def begin(self, stages: Sequence[Stage], config: NodeConfig) -> None:
        """Look after the versions of these stages; before they start."""
        self._stages, self._config = stages, config
        for stage in stages:
            if stage.config.name in self._begins:
                stage.model.name, stage.model.changes = self._begins[stage.config.name]
        # of its own: one that hangs on a disk is not to go on with these stages
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run,
            args=(self._stopping, stages, dict(self._sources)),
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
                    f"{what} after {_END_S:g} s: it waits for a disk, of the plans or of rollout.folder",
                )
        self._thread = None
        for trial in self._trials.values():
            trial.close()
        for source in () if hangs else self._sources.values():  # of the same disk, and still that thread's
            source.stops()
        self._stages, self._trials, self._said, self._sources = (), {}, {}, {}
        self._unpromoted = set()

    def values(self, stage: str) -> dict[str, str]:
        """What `/diagnostics` says of a stage's versions; empty where it never had a candidate."""
        if (trial := self._trials.get(stage)) is not None:
            return trial.values()
        actor = next((one for one in self._stages if one.config.name == stage), None)
        said = self._said.get(stage, "")
        return {"version": actor.version, "candidate": said} if actor is not None and said else {}

    # -- the thread

    def _run(
        self, stopping: threading.Event, stages: Sequence[Stage], sources: Mapping[str, Source]
    ) -> None:
        step_back()
        while not stopping.wait(_LOOK_S):
            for stage in stages:
                try:
                    self._look_after(stage, sources[stage.config.name])
                except (
                    Exception
                ):  # the thread's boundary: one stage's candidate must not cost another's guard
                    text = f"{stage.config.name}: looking after a candidate failed"
                    self._log("error", f"{text}:\n{traceback.format_exc()}")

    def _look_after(self, stage: Stage, source: Source) -> None:
        name, wish = stage.config.name, source.wish()
        trial = self._trials.get(name)
        if trial is None:
            if name in self._unpromoted:
                if promote(stage.model):
                    return  # no other version begins before what serves is whole again
                self._unpromoted.remove(name)
            other = wish.serve if wish.serve != stage.version else wish.beside
            if other and stage.pool.ready:
                if time.monotonic() < self._later_s.get(name, 0.0):
                    return
                self._start(stage, source, wish, other)
            elif wish.why:
                self._said[name] = wish.why
            elif not wish.candidate:
                self._said.pop(name, None)
            return
        trial.compare()
        if trial.serves != trial.served:
            trial.changed_places()
            other = BASE if stage.shadow is None else stage.shadow.version
            self._say(name, f"version {stage.version} serves from now on; {other} is warm beside it")
        if not trial.over:
            wish = self._judge(trial, source, wish)
        if trial.target(wish) != stage.version:
            self._exchange(trial, source, wish)
            return
        trial.waits = ""
        if trial.over:
            self._end(trial)
        elif trial.serves:
            trial.may_exchange()  # the way back is kept open

    def _judge(self, trial: Trial, source: Source, wish: Wish) -> Wish:
        """See whether the trial goes on; returns what is to run now."""
        shadow, broken = (
            trial.shadow,
            broken_guard(wish.limits, trial.figures()) or trial.minute(source),
        )
        bad = ""
        if shadow is not None and shadow.refused and not trial.serves:
            bad = f"refused: {shadow.refused}"
        elif broken:
            bad = f"rolled back: {broken}" if trial.serves else f"given up as a shadow: {broken}"
        elif trial.candidate == wish.candidate and wish.beside:  # without, the roll-out is done
            return wish
        trial.over = bad or f"over: {wish.why or 'not asked for any more'}"
        trial.leave_by_s = time.monotonic() + (0.0 if bad else _MINUTE_S)
        self._say(trial.stage.config.name, f"version {trial.candidate} {trial.over}")
        if bad:
            source.rolled_back(bad)
        return source.wish()

    def _start(self, stage: Stage, source: Source, wish: Wish, other: str) -> None:
        name = stage.config.name
        if why := "memory is short" if stage.memory.tight else stage.pool.why_no_room():
            self._later_s[name] = time.monotonic() + _LATER_S
            self._said[name] = f"version {other} takes one more worker, for which there is no memory: {why}"
            self._say(name, self._said[name])
            return
        try:
            assert self._config is not None
            if other == BASE:
                changes, config = {}, stage_config(name, self._values(name))
            else:
                version = source.version(other)
                changes, config = dict(version.changes), version.config
            config = replace(config, guard=stage.config.guard)
            Shadow(stage, other, config, changes, worker_setup(config, self._config))
        except ConfigError as error:
            self._said[name] = str(error)
            self._say(name, str(error))
            source.rolled_back(str(error))
            return
        # Where the stage is to be led away from what it runs, that is what is on trial, and not what comes.
        leaves = stage.version if other == wish.serve else other
        self._trials[name] = Trial(stage, wish.candidate or leaves)
        self._say(name, f"version {other} starts beside {stage.version}, which serves")

    def _exchange(self, trial: Trial, source: Source, wish: Wish) -> None:
        """Have the other version serve.

        At once where that is the way back, else once it has shown that it can.

        It then needs all its workers as well.
        """
        if not trial.serves and not trial.may_serve(wish.limits):
            return
        shadow = trial.shadow
        if shadow is None or shadow.exchanges or not trial.may_exchange():
            return
        if not trial.serves:
            try:
                source.begins()
            except TorchperfError as error:
                trial.over = f"given up: {error}"
                return
        shadow.exchange()

    def _end(self, trial: Trial) -> None:
        name = trial.stage.config.name
        self._said[name] = f"{trial.candidate}: {trial.over}"
        self._unpromoted.add(name)
        if trial.shadow is not None:
            trial.shadow.remove()
        trial.close()
        del self._trials[name]

    def _say(self, stage: str, text: str) -> None:
        self._log("warn", f"{stage}: {text}")
        self._alert(change_alert(stage, "rollout", text))
