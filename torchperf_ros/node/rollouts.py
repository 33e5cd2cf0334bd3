"""Candidates of the node's stages: beside the version that serves, in its place, and back as soon as a guard breaks."""

import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torchperf_ros.config.candidate import Candidate, read_candidate
from torchperf_ros.config.config import NodeConfig
from torchperf_ros.frame.alert_rules import Alert, change_alert
from torchperf_ros.frame.clock import monotonic_ns
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import GuardVerdict, Health
from torchperf_ros.rollout.comparer import OutputComparer
from torchperf_ros.rollout.guards import Figures, Guards, broken_guard
from torchperf_ros.stage.stage_actor import StageActor
from torchperf_ros.workers.process_setup import step_back
from torchperf_ros.workers.worker_pool import Log
from torchperf_ros.workers.worker_setup import worker_setup

_LOOK_S: Final = 0.1
"""A candidate that breaks a guard is back out of service a tenth of a second and one frame later."""
_BASE: Final = "base"
_COUNTED: Final = ("frames", "deaths", "refused", "misses")


class Trial:
    """One candidate of one stage, from its start until its workers are gone.

    Attributes:
        over: why it is to leave, or was rolled back; "" while it may stay.
    """

    def __init__(self, stage: StageActor, candidate: Candidate, source: str) -> None:
        """Stand `candidate` beside the stage; `source` is the parameter that asked for it."""
        self.stage, self.candidate, self.source = stage, candidate, source
        self.over = ""
        self.comparer: OutputComparer | None = None
        self.served = False  # whether it did at the last look
        self._before = Figures()
        self._safe_stops = 0
        self._in_safe_stop = False

    @property
    def serves(self) -> bool:
        """Whether the candidate serves."""
        return self.stage.version == self.candidate.version

    def compare(self) -> None:
        """Take what both versions have answered since the last call, and what was found out about their outputs."""
        shadow, description = self.stage.shadow, self.stage.pool.description
        if shadow is None or description is None:
            return
        if self.comparer is None:
            self.comparer = OutputComparer(description.output, self.stage.config.candidate_tolerance)
        if (found := self.comparer.take()) is not None:
            shadow.figures.compared(found.difference)
        for pair in shadow.take_pairs():
            shadow.figures.add(pair, candidate_serves=self.serves)
            if pair.both and pair.payload is not None and pair.answer.payload is not None:
                self.comparer.offer(pair.answer.frame.seq, pair.answer.payload, pair.payload)

    def changed_places(self) -> None:
        """The versions have: count what guards are about from now on."""
        self.served, self._in_safe_stop = self.serves, False
        self._before, self._safe_stops = self._counts(), 0

    def guarded(self) -> Figures:
        """What the candidate has done: since it serves, or as a shadow."""
        shadow = self.stage.shadow
        if shadow is None:
            return Figures()
        total = shadow.figures.total
        compared = {"disagreements": total.different, "compared": total.compared}
        if not self.serves:
            return Figures(deaths=shadow.deaths, **compared)
        now, before = self._counts(), self._before
        counts = {
            name: getattr(now, name) - getattr(before, name) for name in ("frames", "deaths", "refused", "misses")
        }
        return Figures(**counts, safe_stops=self._safe_stops, **compared)

    def _counts(self) -> Figures:
        counters, health = self.stage.statistics.counters, self.stage.statistics.health
        is_stopped = health.state(monotonic_ns()) is Health.SAFE_STOP
        self._safe_stops += is_stopped and not self._in_safe_stop
        self._in_safe_stop = is_stopped
        return Figures(
            frames=counters.answered + counters.unanswered, deaths=self.stage.pool.restarts,
            refused=counters.checks[GuardVerdict.STOP], misses=counters.missed_deadline,
        )  # fmt: skip

    @property
    def state(self) -> str:
        """In words, for `/diagnostics`."""
        shadow = self.stage.shadow
        if self.over:
            return self.over
        if self.serves:
            return "serves"
        if shadow is None or not shadow.pool.ready:
            return f"starts: {'' if shadow is None else shadow.pool.progress}"
        return "shadow"

    def close(self) -> None:
        """Leave no process behind."""
        if self.comparer is not None:
            self.comparer.close()


class Rollouts:
    """A thread of the node that looks after the candidates of all its stages."""

    def __init__(self, values: Callable[[str], dict[str, Any]], log: Log, alert: Callable[[Alert], None]) -> None:
        """`values` gives a stage's own parameters; nothing runs before `begin`."""
        self._values, self._log, self._alert = values, log, alert
        self._stages: Sequence[StageActor] = ()
        self._config: NodeConfig | None = None
        self._trials: dict[str, Trial] = {}  # by stage
        self._ended: dict[str, tuple[str, str]] = {}  # by stage: the source of a candidate that left, and why
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self, config: NodeConfig) -> None:
        """See that the candidates of a configuration can be read.

        Raises:
            ConfigError: one cannot; the message names the file.
        """
        for stage in config.stages:
            if stage.candidate:
                read_candidate(Path(stage.candidate).expanduser(), stage.name, self._values(stage.name))

    def begin(self, stages: Sequence[StageActor], config: NodeConfig) -> None:
        """Look after the candidates of these stages."""
        self._stages, self._config = stages, config
        self._stopping.clear()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def reconfigure(self, config: NodeConfig) -> None:
        """Take changed parameters."""
        self._config = config

    def end(self) -> None:
        """Look after none any more, before the stages stop."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        for trial in self._trials.values():
            trial.close()
        self._stages, self._trials, self._ended = (), {}, {}

    def values(self, stage: str) -> dict[str, str]:
        """What `/diagnostics` says of a stage's versions; empty where it never had a candidate."""
        trial, ended = self._trials.get(stage), self._ended.get(stage)
        if trial is None:
            return {} if ended is None else {"version": _BASE, "candidate": ended[1]}
        shadow = trial.stage.shadow
        found = {"version": trial.stage.version or _BASE, "candidate": f"{trial.candidate.version}: {trial.state}"}
        if shadow is None:
            return found
        figures = shadow.figures
        found |= {"candidate_pairs": figures.words, "candidate_skipped": str(shadow.skipped)}
        if figures.last_difference:
            found["candidate_differs"] = figures.last_difference
        if figures.last_failure:
            found["candidate_failed"] = figures.last_failure
        if trial.comparer is not None and trial.comparer.problem:
            found["candidate_warning"] = trial.comparer.problem
        return found

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        step_back()
        while not self._stopping.wait(_LOOK_S):
            for stage in self._stages:
                try:
                    self._look_after(stage)
                except Exception:  # the thread's boundary: one stage's candidate must not cost another's guard
                    text = f"{stage.config.name}: looking after a candidate failed"
                    self._log("error", f"{text}:\n{traceback.format_exc()}")

    def _look_after(self, stage: StageActor) -> None:
        name = stage.config.name
        trial = self._trials.get(name)
        wanted = next((one for one in self._config.stages if one.name == name), None) if self._config else None
        source = "" if wanted is None else wanted.candidate
        if trial is None:
            if self._ended.get(name, ("",))[0] != source:
                self._ended.pop(name, None)
            if source and name not in self._ended and stage.pool.ready:
                self._start(stage, source)
            return
        trial.compare()
        if trial.serves != trial.served:
            trial.changed_places()
            self._tell(trial, "serves; the base is warm beside it" if trial.served else "serves no more; the base does")
        if not trial.over:
            trial.over = self._why_over(trial, source)
            if trial.over:
                self._tell(trial, trial.over)
        serves = bool(wanted is not None and wanted.candidate_serves) and not trial.over
        if serves != trial.serves:
            self._exchange(trial)
        elif trial.over:
            self._end(trial)

    def _start(self, stage: StageActor, source: str) -> None:
        name = stage.config.name
        try:
            candidate = read_candidate(Path(source).expanduser(), name, self._values(name))
            assert self._config is not None
            setup = worker_setup(candidate.config, self._config)
            stage.add_shadow(candidate.version, dict(candidate.changes), setup)
        except ConfigError as error:
            self._ended[name] = source, str(error)
            self._say(name, str(error))
            return
        self._trials[name] = Trial(stage, candidate, source)
        self._say(name, f"version {candidate.version} starts beside the one that serves")

    def _why_over(self, trial: Trial, source: str) -> str:
        shadow = trial.stage.shadow
        if shadow is not None and shadow.refused and not trial.serves:
            return f"refused: {shadow.refused}"
        if broken := broken_guard(Guards(), trial.guarded()):
            return f"rolled back: {broken}" if trial.serves else f"given up as a shadow: {broken}"
        return "" if source == trial.source else "not asked for any more"

    def _exchange(self, trial: Trial) -> None:
        """Have the candidate serve, as soon as it has all its workers, or, at once, the base."""
        shadow = trial.stage.shadow
        if shadow is None or trial.stage.exchanges:
            return
        if trial.serves or shadow.ready:
            trial.stage.exchange()
        else:
            shadow.promote()

    def _end(self, trial: Trial) -> None:
        name = trial.stage.config.name
        self._ended[name] = trial.source, f"{trial.candidate.version}: {trial.over}"
        trial.stage.remove_shadow()
        trial.close()
        del self._trials[name]

    def _tell(self, trial: Trial, text: str) -> None:
        self._say(trial.stage.config.name, f"version {trial.candidate.version} {text}")

    def _say(self, stage: str, text: str) -> None:
        self._log("warn", f"{stage}: {text}")
        self._alert(change_alert(stage, "rollout", text))
