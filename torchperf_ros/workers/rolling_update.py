"""How workers get successors while they serve: compiled tiers, and packages that are swapped in."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchperf_ros.config.config import StageConfig
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import ConfigError, ProtocolError
from torchperf_ros.packages.compile_process import PackageBuilder
from torchperf_ros.packages.package_cache import find_package
from torchperf_ros.packages.package_manifest import PackageError
from torchperf_ros.workers.worker_process import WorkerProcess

_SETTLE_NS = 2 * NS_PER_S
_PAUSE_NS = 5 * NS_PER_S  # after a new worker that died
_TRIES = 2
_DONE = "done"

Workers = Sequence[WorkerProcess | None]


@dataclass(frozen=True)
class Kit:
    """What workers are told at their start.

    Attributes:
        setup: the message's fields.
        number: counts kits; workers of a lower one are to be replaced.
    """

    setup: dict[str, Any]
    number: int


class Renewal:
    """The rules by which a pool renews itself; the pool does what they say.

    There are three states.

    - settled: every worker may stay. `ask` and `swap` put a new kit on trial.
    - on trial: the pool starts a candidate with the new kit beside the others. Once it has been ready for 2 s (its
      histories are warm by then) it takes the place of an older worker, which is ended between two frames: the new kit
      is proven and spreads. Candidates that die use up the tries; then the trial ends, and nothing has changed.
    - spreading: the other workers are replaced one by one. A candidate that dies is tried again.

    A worker that replaces a dead one gets the proven kit. What is asked for meanwhile waits until the state is settled.

    Attributes:
        proven: the last kit with which a worker has taken its place.
        outcome: how the last renewal ended, `done` or why not; "" while one goes on.
        swap_outcome: likewise of the last swap.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        """Take what the first workers are told."""
        self.proven = Kit({"swapped": None, **setup}, 0)
        self.outcome = self.swap_outcome = _DONE
        self._trial: Kit | None = None
        self._numbers = 0
        self._tries = 0
        self._asked_again = False
        self._not_before_ns = 0
        self._lock = threading.RLock()

    def ask(self) -> None:
        """Have every worker replaced by one that starts after now; if a renewal goes on, after that."""
        with self._lock:
            if self.outcome:
                self._try({"swapped": None}, _TRIES)
            else:
                self._asked_again = True

    def swap(self, **changes: object) -> bool:
        """Try workers that are told something else; False if a renewal goes on. May be called from any thread."""
        with self._lock:
            if not self.outcome:
                return False
            self.swap_outcome = ""
            self._try(changes, tries=1)
            return True

    def _try(self, changes: dict[str, object], tries: int) -> None:
        self._numbers += 1
        self._trial = Kit({**self.proven.setup, **changes}, self._numbers)
        self.outcome, self._tries = "", tries

    def without_graphs(self, generation: int) -> None:
        """A worker of this kit could not capture a CUDA graph: the next one with this kit does without."""
        with self._lock:
            if self._trial is not None and self._trial.number == generation:
                self._trial.setup["without_graphs"] = True
            elif self.proven.number == generation:
                self.proven.setup["without_graphs"] = True

    def kit(self, *, candidate: bool) -> Kit:
        """What a new worker gets: a candidate the kit on trial, one that replaces a dead worker the proven one.

        The latter is as good as a candidate if the kits are the same, as when only what they find in the cache is new.
        """
        with self._lock:
            trial = self._trial
            if trial is not None and (candidate or trial.setup == self.proven.setup):
                return trial
            return self.proven

    def wants_candidate(self, workers: Workers, now_ns: int) -> bool:
        """Whether to start a candidate now: all workers are up, and one is to be replaced."""
        return now_ns >= self._not_before_ns and _all_up(workers) and self.outdated(workers) is not None

    def outdated(self, workers: Workers) -> WorkerProcess | None:
        """A worker that is to be replaced, the last one first: the standby rather than the one that runs."""
        with self._lock:
            if self.outcome:
                return None
            wanted = self.kit(candidate=True).number
        for worker in reversed(workers):
            if worker is not None and worker.usable and worker.generation < wanted:
                return worker
        return None

    def has_settled(self, candidate: WorkerProcess, now_ns: int) -> bool:
        """Whether a candidate has been ready for long enough to be relied on."""
        return candidate.usable and candidate.ready_at_ns is not None and now_ns - candidate.ready_at_ns >= _SETTLE_NS

    def is_over(self, candidate: WorkerProcess, workers: Workers) -> bool:
        """Whether nobody is left whom a candidate would replace, or its kit was given up."""
        unwanted = bool(self.outcome) or candidate.generation != self.kit(candidate=True).number
        return unwanted or (_all_up(workers) and self.outdated(workers) is None)

    def took_a_place(self) -> None:
        """A candidate serves in place of an older worker: its kit is proven."""
        with self._lock:
            if self._trial is not None:
                self.proven = Kit({**self._trial.setup, "swapped": None}, self._trial.number)
                self._trial = None

    def failed(self, reason: str, now_ns: int) -> bool:
        """A candidate died; True if that ends the renewal, and nothing has changed."""
        with self._lock:
            self._not_before_ns = now_ns + _PAUSE_NS
            if self._trial is None:
                return False
            self._tries -= 1
            if self._tries > 0:
                return False
            self.give_up(reason)
            return True

    def give_up(self, reason: str) -> None:
        """Replace nobody any more; nothing if nobody is being replaced."""
        with self._lock:
            if not self.outcome:
                self._end(reason)

    def settled(self, workers: Workers) -> None:
        """Note that a renewal is done, once every worker is there and has the new kit."""
        with self._lock:
            if not self.outcome and _all_up(workers) and self.outdated(workers) is None:
                self.took_a_place()  # if all workers died meanwhile, what replaced them had the same kit
                self._end(_DONE)

    def _end(self, outcome: str) -> None:
        self._trial, self.outcome = None, outcome
        self.swap_outcome = self.swap_outcome or outcome
        if self._asked_again:
            self._asked_again = False
            self.ask()


def _all_up(workers: Workers) -> bool:
    return all(worker is not None and worker.usable for worker in workers)


Spawn = Callable[[int], WorkerProcess]
Replace = Callable[[WorkerProcess, WorkerProcess], bool]
Dismiss = Callable[[WorkerProcess, str], None]
Tell = Callable[[str], None]


class RollingUpdate:
    """One more worker beside a pool's own, until it takes the place of one of them; the pool's thread calls.

    Attributes:
        renewal: who is to be replaced, and what each new worker is told.
        candidate: the worker that is to take a place, None mostly.
        may_compile: whether there is the memory for compilers and one more worker now.
    """

    def __init__(self, config: StageConfig, setup: dict[str, Any], tell: Tell) -> None:
        """Take the stage's configuration, what its workers are told, and who hears what people should know."""
        self.renewal = Renewal(setup)
        self.candidate: WorkerProcess | None = None
        self.may_compile = True
        self._missing: list[str] = []
        self._config = config
        self._tell = tell
        self._builder = PackageBuilder(setup, self._package_built, tell)

    @property
    def news(self) -> list[int]:
        """Descriptors to wait for."""
        return [] if self._builder.news is None else [self._builder.news]

    @property
    def compiling(self) -> str:
        """What is compiled in the background, for example `compiling 2 of 3`; "" if nothing is."""
        candidate = self.candidate
        if candidate is not None and candidate.progress.startswith("compiling"):
            return candidate.progress
        return self._builder.progress

    def complete(self, worker: WorkerProcess) -> None:
        """A worker is ready, but not everything is compiled: have that done, once every worker is up."""
        if not worker.missing or not self.may_compile:
            return
        if self._config.engine != "compile":
            self._missing = worker.missing
        elif not worker.compiles:
            self.renewal.ask()

    def _package_built(self, tier: str) -> None:
        self.renewal.ask()

    def swap(self, tier: str, package: str) -> None:
        """Have every worker replaced by one that runs this package on this tier.

        Raises:
            ConfigError: no such tier, no package that may be taken, or workers are being replaced already.
        """
        tiers = self._config.tiers
        if tier not in tiers:
            msg = f"tier {tier!r} is not there; stage {self._config.name} has {', '.join(tiers)}"
            raise ConfigError(msg)
        if not self.may_compile:
            msg = f"stage {self._config.name} is short of memory, and a swap takes one more worker; try again later"
            raise ConfigError(msg)
        setup = self.renewal.proven.setup
        try:
            find_package(Path(package), setup["package_dirs"])
        except PackageError as error:
            raise ConfigError(str(error)) from error
        packages = list(setup["packages"])
        packages[tiers.index(tier)] = package
        if not self.renewal.swap(packages=packages, swapped=tiers.index(tier)):
            msg = f"stage {self._config.name} replaces its workers just now; try again later"
            raise ConfigError(msg)

    def why_too_slow(self, worker: WorkerProcess, budget_ms: float) -> str:
        """Why the candidate's new package cannot be swapped in by what it measured; "" if it can, or has none."""
        if worker is not self.candidate or worker.swapped is None:
            return ""
        p99_ms, tier = worker.calibrations[worker.swapped].p99_ms, self._config.tiers[worker.swapped]
        return "" if p99_ms < budget_ms else f"tier {tier} takes {p99_ms:.1f} ms (p99); the budget is {budget_ms:g} ms"

    @property
    def swap_state(self) -> tuple[bool, str]:
        """Whether the last swap is done, and how it went: `swapping: ...` while it goes on, else `done` or why not."""
        outcome = self.renewal.swap_outcome
        candidate = self.candidate
        return outcome == "done", outcome or f"swapping: new worker {candidate.state if candidate else 'is next'}"

    def step(
        self, workers: list[WorkerProcess | None], now_ns: int, spawn: Spawn, replace: Replace, dismiss: Dismiss
    ) -> None:
        """Take the next step, if there is one to take.

        Args:
            workers: the pool's own; one of them may be exchanged.
            now_ns: monotonic time.
            spawn: starts a worker with this number.
            replace: gives a worker no more frames as another takes its place; False if it is busy.
            dismiss: ends a worker, for this reason.
        """
        all_up = all(worker is not None and worker.usable for worker in workers)
        if all_up and self._missing:
            self._builder.want(self._missing)
            self._missing = []
        self._builder.hold(held=not all_up)
        self._builder.listen()
        candidate = self.candidate
        if candidate is not None and self.renewal.is_over(candidate, workers):
            serves = next((worker for worker in workers if worker is not None and worker.usable), None)
            if not candidate.usable or (serves is not None and replace(candidate, serves)):
                self.candidate = None
                dismiss(candidate, "nobody is left whom it would replace")
        elif candidate is None:
            if not self.may_compile or not self.renewal.wants_candidate(workers, now_ns):
                self.renewal.settled(workers)
                return
            try:
                self.candidate = spawn(len(workers))
            except (OSError, ProtocolError) as error:
                self._tell(f"no new worker can be started: {error}")
                self.renewal.give_up(str(error))
        elif self.renewal.has_settled(candidate, now_ns):
            outdated = self.renewal.outdated(workers)
            if outdated is not None and replace(outdated, candidate):
                candidate.number = outdated.number
                workers[candidate.number], self.candidate = candidate, None
                self.renewal.took_a_place()
                dismiss(outdated, f"replaced by pid {candidate.pid}")

    def lost(self, candidate: WorkerProcess, reason: str) -> None:
        """The candidate has died before it took a place: the others serve on."""
        self.candidate = None
        candidate.usable = False
        ended = self.renewal.failed(reason, time.monotonic_ns())
        self._tell(f"{'nothing is replaced' if ended else 'it is tried again'}: {reason}")

    def give_up(self, reason: str) -> None:
        """Compile and replace nothing more."""
        self._builder.stop()
        self.renewal.give_up(reason)

    def stop(self) -> None:
        """End what compiles, and wait until it has ended."""
        self._builder.close()
