"""What a stage's frames run on.

The version of its model that serves, the one beside it, and what limits their tiers.

Each version has workers of its own, with ladders of tiers and a dispatcher; all else of a stage is there
once. The workers' comings and goings arrive here, on their pool's thread.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_MS, Clock, monotonic_ns
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import IN_TIME, Fallback, GuardVerdict
from torchperf_ros.safety.guard import Guard, Known
from torchperf_ros.safety.stop_output import warm_up_stop
from torchperf_ros.settings.candidate import BASE
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_rules import DRIFT
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.dispatcher import Dispatcher
from torchperf_ros.stage.drift import DriftWatch
from torchperf_ros.stage.fallback_outputs import FallbackOutputs
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.frame_in_flight import FrameInFlight
from torchperf_ros.stage.scenes import SceneChooser
from torchperf_ros.stage.shadow import Shadow, ShadowParts, promote
from torchperf_ros.stage.stage_guard import StageGuard
from torchperf_ros.stage.stage_statistics import StageStatistics
from torchperf_ros.stage.stage_waiter import StageWaiter
from torchperf_ros.stage.tier_ladder import MemoryGuard, TierClock, TierLadder
from torchperf_ros.stage.waiting import PublishMargin
from torchperf_ros.workers.worker_pool import Log, WorkerPool
from torchperf_ros.workers.worker_process import WorkerProcess

_LOOK_AGAIN_NS = NS_PER_MS
_FIRST_WAKE_MS = 2.0
_FIRST_WAKE_SHARE = 0.06  # of the budget

Instead = tuple[Fallback, bytes | None]
"""What the emergency lane published in place of a stage's output: `stop` with its bytes, or `none`."""


@dataclass
class StagePorts:
    """Where a stage's answers go. All but `log` are called on the stage's thread, `publish` first.

    Attributes:
        publish: of the output's CDR bytes; returns what went out in their place, None if they did.
        hand_on: output bytes (None: there is nothing) with their frame, to the next stage inside the node.
            A held output comes with the stamp of the frame that it was computed from.
    """

    publish: Callable[[bytes], Instead | None]
    hand_on: Callable[[bytes | None, Frame], None]
    answered: Callable[[Answer], None]  # the record of a frame
    anomaly: Callable[[Alert], None]  # an event for `/perf/anomaly`
    log: Log  # severity and text; also called on the pool's thread


@dataclass(frozen=True)
class StageMachinery:
    """Made once for each stage."""

    clock: Clock = monotonic_ns  # monotonic time in ns
    waiter: Callable[[], Any] = StageWaiter  # makes what the stage's thread waits for, see `StageWaiter`
    pool: Callable[..., Any] = WorkerPool  # makes the stage's workers, with the arguments of `WorkerPool`
    input_clock: Clock | None = None
    """What waiting for inputs is measured by.

    None: `clock`. Who moves another one calls `inputs_are_over`.
    """


LIVE = StageMachinery()
"""The machine's clock, threads and processes."""


class StageVersions:
    """The versions of a stage's model, and the parts that they share.

    Attributes:
        statistics, ladders, scenes, actions, margin, memory, pool, hedge_rule: the stage's parts, for `/diagnostics`;
            there is a ladder for each scene.
        guard: checks every output before it is published; None where the parameters ask for none.
        setup: what the workers of the version that serves are told at their start.
        version: name of the model that serves; `BASE` is the one of the stage's own parameters.
        shadow: another version, which gets the same frames; None mostly.
        exchanges: whether the two change places as soon as no frame is in flight.
        counts_at_exchange: `counts` of the version that serves, when it began to.
    """

    def __init__(
        self,
        config: StageConfig,
        setup: dict[str, Any],
        ports: StagePorts,
        ros_now: Callable[[], int],
        machinery: StageMachinery,
    ) -> None:
        """See `StageActor`."""
        self._clock, self._ros_now, self._ports = machinery.clock, ros_now, ports
        self.config = config  # parameters; replaced as a whole when one changes
        self.statistics = StageStatistics(config, self._clock)
        clocks = [TierClock() for _ in config.tiers]
        self.ladders = [TierLadder(scene.tiers, clocks) for scene in config.scenes]
        self.scenes = SceneChooser(config)
        self.actions = AlertActions(config)
        self._drift = DriftWatch(config.name) if self.actions.asks_for(DRIFT) else None
        self.margin = PublishMargin(first_wake_ms=min(_FIRST_WAKE_MS, _FIRST_WAKE_SHARE * config.budget_ms))
        self.memory = MemoryGuard()
        self._untold: deque[Alert] = deque()  # what the stage's thread has to publish; any thread appends
        self.guard: StageGuard | None = None
        if config.guard is not None:
            guard, counters = Guard(config.guard), self.statistics.counters
            self.guard = StageGuard(config.name, guard, counters, self._untold.append)
        self._lock = threading.Lock()
        self._in_flight: FrameInFlight | None = None
        self.budget_ms = config.budget_ms  # of the last frame that was begun
        self._cold = ""  # the last scene that was wanted and not loaded
        self._waiter: StageWaiter = machinery.waiter()
        self._outputs = FallbackOutputs()
        self.version, self._changes = BASE, dict[str, Any]()
        self.setup = {**setup, "loaded": self.scenes.tiers_to_load()}
        self.pool = machinery.pool(config, self.setup, self, ports.log)
        self._dispatcher = Dispatcher(self.pool, self.ladders, self._outputs, self.statistics.counters)
        self.hedge_rule = self._dispatcher.hedge_rule
        self.shadow: Shadow | None = None
        self.exchanges = False
        self.counts_at_exchange = self.counts

    @property
    def counts(self) -> dict[str, int]:
        """What a roll-out's guards count of what serves.

        Frames, deaths of workers, plans refused, and misses.

        A miss is a frame without an own result in time, whatever was published for it by its deadline.
        """
        counters = self.statistics.counters
        frames = counters.ended
        return {
            "frames": frames,
            "deaths": self.pool.restarts,
            "refused": counters.checks[GuardVerdict.STOP] + counters.checks[GuardVerdict.UNAVOIDABLE],
            "misses": frames - sum(counters.outcomes[outcome] for outcome in IN_TIME),
        }

    def reconfigure(self, config: StageConfig) -> None:
        """Take changed parameters (those that may change live); each version keeps what is its own."""
        with self._lock:  # no exchange in between may give one version the other's changes
            own = replace(config, **self._changes)
            self.config = self.pool.config = self.scenes.config = self.actions.config = own
            if (shadow := self.shadow) is not None:
                shadow.config = replace(config, **shadow.changes)
                # It has as many workers as were asked for so far; all else that changes is for its pool,
                # too.
                shadow.pool.config = replace(shadow.config, backup=shadow.pool.config.backup)
        self.statistics.reconfigure(own)

    @property
    def everyone(self) -> list[WorkerProcess]:
        """The workers of all its versions."""
        shadow = self.shadow
        return self.pool.everyone if shadow is None else [*self.pool.everyone, *shadow.pool.everyone]

    def begin_as(self, version: str, changes: dict[str, Any]) -> None:
        """Call what serves so.

        `changes` are the fields of its configuration that are its own; before `start`.
        """
        self.version, self._changes = version, changes

    def add_shadow(
        self, version: str, config: StageConfig, changes: dict[str, Any], setup: dict[str, Any]
    ) -> None:
        """Have another version get the same frames from now on.

        `changes` are the fields of `config` that are its own.

        Raises:
            ConfigError: there is one already.
        """
        if self.shadow is not None:
            raise ConfigError(
                f"stage {self.config.name} has version {self.shadow.version} beside it already"
            )
        parts = ShadowParts(
            self._lock,
            self._waiter,
            self._clock,
            self._ports.log,
            lambda: self.pool.description,
            self._guard_knows,
        )
        shadow = Shadow(version, config, changes, setup, self.pool, parts)
        with self._lock:
            self.shadow = shadow
        shadow.pool.start()

    def _guard_knows(self, frame: Frame, now_ns: int) -> Known | None:
        """What the guard would judge a plan by that was computed from this frame."""
        if self.guard is None:
            return None
        return self.guard.known(frame, now_ns, self._ros_now())

    def remove_shadow(self) -> None:
        """Have no other version any more, and end its workers; nothing if there is none."""
        with self._lock:
            shadow, self.shadow, self.exchanges = self.shadow, None, False
            for worker in () if shadow is None else shadow.pool.everyone:
                self._waiter.drop(worker)
            if shadow is not None:  # a worker that is ready from now on is not to be waited for
                shadow.refused = shadow.refused or "it was removed"
        if shadow is not None:
            shadow.pool.stop()

    def exchange(self) -> None:
        """Have the shadow serve from the next frame on, and what serves now be the shadow.

        The frame in flight is answered before that, by its deadline, by the version that has it.

        Raises:
            ConfigError: there is no shadow, or none of its workers can serve.
        """
        with self._lock:
            if self.shadow is None or not self.shadow.pool.ready:
                raise ConfigError(f"stage {self.config.name} has no other version whose workers are ready")
            self.exchanges = True
            self._waiter.wake()

    def promote(self) -> bool:
        """Give what serves its workers and their priority, where it had to serve before it had them.

        See `promote`.
        """
        return promote(self.pool, self.setup, self.config)

    def _exchange(self, shadow: Shadow, now_ns: int) -> None:
        """Called with the stage's lock held, while no frame is in flight; see `_change_places`.

        A pool that is just telling its side of a worker that comes or goes has told nothing yet: until it
        has, the two stay where they are, and the stage's thread looks again.
        """
        with contextlib.ExitStack() as quiet:
            for pool in (self.pool, shadow.pool):
                if not pool.telling.acquire(blocking=False):
                    self._waiter.set(now_ns + _LOOK_AGAIN_NS)
                    return
                quiet.callback(pool.telling.release)
            self.exchanges = False
            if shadow.pool.ready:
                shadow.go_on(now_ns)
                self._change_places(shadow)
            else:
                text = (
                    f"version {shadow.version} does not begin to serve: its workers have died since it was"
                    " asked to"
                )
                self._untold.append(change_alert(self.config.name, "model", text))
                self._waiter.wake()

    def _change_places(self, shadow: Shadow) -> None:
        served = (
            self.version,
            self.config,
            self._changes,
            self.setup,
            self.pool,
            self.ladders,
            self._dispatcher,
        )
        self.version, self.config, self._changes, self.setup = (
            shadow.version,
            shadow.config,
            shadow.changes,
            shadow.setup,
        )
        self.pool, self.ladders, self._dispatcher = shadow.pool, shadow.ladders, shadow.dispatcher
        shadow.version, shadow.config, shadow.changes, shadow.setup = served[:4]
        shadow.pool, shadow.ladders, shadow.dispatcher = served[4:]
        self._dispatcher.take_over(shadow.dispatcher)
        self.hedge_rule = self._dispatcher.hedge_rule
        self.pool.listener, shadow.pool.listener = self, shadow
        self.pool.owns_ring, shadow.pool.owns_ring = shadow.pool.owns_ring, self.pool.owns_ring
        self.scenes.config = self.actions.config = self.config
        self._leave_out()
        self._note_loaded()
        self.scenes.forget_word()  # the other version's workers say it anew
        shadow.exchanged()
        self.counts_at_exchange = self.counts

    def limit_memory(self, used_share: float, share: float, suspect: str = "") -> None:
        """Take a sample of the memory in use, see `MemoryGuard`.

        While it is short, nothing is compiled either.

        `suspect` says which worker took it, "" if none took much.
        """
        guard, was_tight = self.memory, self.memory.tight
        guard.update(used_share, share, max(len(ladder.tiers) for ladder in self.ladders))
        self.pool.rolling_update.may_compile = not guard.tight
        self._leave_out()
        if self.shadow is not None:
            self.shadow.pool.rolling_update.may_compile = not guard.tight
        if guard.tight and not was_tight:
            text = f"memory is short: {used_share:.0%} of the limit is in use, memory_share is {share:.0%}"
            text += f"; {suspect}" if suspect else ""
            text += "; lower tiers run, and nothing is compiled"
            self._ports.log("warn", f"{self.config.name}: {text}")
            self.worker_told(text)

    def act(self, now_ns: int) -> None:
        """Once a second: do what follows from the alerts that were reported to `actions`."""
        if self._drift is not None and (alert := self._drift.step(now_ns, self._fresh_ms)) is not None:
            self.actions.report(alert, now_ns)
            self._tell(alert)
        for change in self.actions.step(now_ns):
            self._ports.log("warn", f"{self.config.name}: {change}")
            self._tell(change_alert(self.config.name, "action", change))
        self._leave_out()
        names = [scene.name for scene in self.config.scenes]
        self.scenes.forced = names.index(self.actions.scene) if self.actions.scene else None
        self._dispatcher.backup_active = self.actions.backup_active

    def _leave_out(self) -> None:
        """Leave tiers out for want of memory, or as an alert's action."""
        short, lower = self.memory.left_out, self.actions.lower_tiers
        for ladder in self.ladders:
            ladder.left_out = min(max(short, lower), len(ladder.tiers) - 1)
            ladder.why_left_out = "while memory is short" if short >= lower else "as an alert's action"

    def _load_wanted_scene(self) -> None:
        """Frames run `default` while workers that have loaded the scene take the places of those that have not."""
        scene = self.config.scenes[self.scenes.wanted].name
        begins = self.pool.ready and self.pool.rolling_update.renewal.load(self.scenes.tiers_to_load())
        if begins and scene != self._cold:
            self._cold = scene  # it is asked for again where that fails, and not told again
            text = f"scene {scene} is not loaded; default runs until it is"
            self._ports.log("warn", f"{self.config.name}: {text}")
            self._untold.append(change_alert(self.config.name, "model", text))

    # -- the pool's thread: workers come and go

    def worker_ready(self, worker: WorkerProcess) -> None:
        """A worker can take frames.

        Calibrate the ladder by the first one, and wake the stage: a frame may wait.
        """
        warm_up_stop(self._output_type)
        with self._lock:
            if not self.pool.ready:
                self._calibrate(worker)
            worker.usable = True
            self._note_loaded()
            self._waiter.add(worker)
            self.statistics.health.ready()
            self._waiter.wake()

    def worker_died(self, worker: WorkerProcess | None, reason: str, *, lasting: bool) -> None:
        """A worker is gone, or was never there.

        The stage's thread answers for it if it had not noticed yet.
        """
        with self._lock:
            pid = 0
            if worker is not None:
                self._drop(worker)
                pid = worker.pid
            alone, restarts = not self.pool.ready, self.pool.restarts
            self._untold.append(
                self.statistics.worker_died(reason, pid, restarts, lasting=lasting, alone=alone)
            )
            self._waiter.wake()

    def worker_replaced(self, worker: WorkerProcess, successor: WorkerProcess) -> bool:
        """Have nothing more to do with an idle worker; predict from what its successor measured."""
        with self._lock:
            if not worker.idle:
                return False
            worker.usable = False
            self._waiter.drop(worker)
            self._calibrate(successor)
            self._note_loaded()
            return True

    def worker_told(self, text: str) -> None:
        """Something about a worker's models: for `/perf/anomaly`."""
        self._tell(change_alert(self.config.name, "model", text))

    def _tell(self, alert: Alert) -> None:
        with self._lock:
            self._untold.append(alert)
            self._waiter.wake()

    def _drop(self, worker: WorkerProcess) -> None:
        """Have nothing more to do with a worker that is gone; called with the stage's lock held."""
        worker.usable = False
        if worker is self.scenes.word_of:
            self.scenes.forget_word()  # the tiers of that scene may be what ends its workers
        self._note_loaded()
        if self._waiter.drop(worker):
            self._dispatcher.lost(worker)

    def _calibrate(self, worker: WorkerProcess) -> None:
        for ladder in self.ladders:
            ladder.calibrate(worker.calibrations)

    def _note_loaded(self) -> None:
        self.scenes.loaded(worker.loaded for worker in self.pool.everyone if worker.usable)

    @property
    def ladder(self) -> TierLadder:
        """The one in use."""
        return self._dispatcher.ladder

    @property
    def _fresh_ms(self) -> float:
        """Time that a frame has which did not wait."""
        return self.budget_ms - self.margin.ms

    @property
    def _output_type(self) -> str:
        return "" if self.pool.description is None else self.pool.description.output
