"""How workers get successors while they serve: compiled tiers, and packages that are swapped in."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError, ProtocolError
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.workers.compile_process import PackageBuilder
from torchperf_ros.workers.package_cache import find_package
from torchperf_ros.workers.package_manifest import PackageError, made_for
from torchperf_ros.workers.worker_process import WorkerProcess
from torchperf_ros.workers.worker_setup import WorkerSetup

if TYPE_CHECKING:
    from torchperf_ros.workers.worker_pool import WorkerPool

_SETTLE_NS = 2 * NS_PER_S
_PAUSE_NS = 5 * NS_PER_S  # after a new worker that died
_TRIES = 2
_DONE = "done"

Workers = Sequence[WorkerProcess | None]


class Kit(NamedTuple):
    """What workers are given at their start. Workers of a lower number are to be replaced."""

    setup: WorkerSetup
    number: int

    def without_graphs(self) -> "Kit":
        return self._replace(setup=replace(self.setup, without_graphs=True))


class Renewal:
    """The rules by which a pool renews itself; the pool does what they say.

    There are three states.

    - settled: every worker may stay. `ask` and `swap` put a new kit on trial.
    - on trial: the pool starts a candidate with the new kit beside the others. Once it has been ready for 2
      s (its histories are warm by then) it takes the place of an older worker, which is ended between two
      frames: the new kit is proven and spreads. Candidates that die use up the tries; then the trial ends,
      and nothing has changed.
    - spreading: the other workers are replaced one by one. A candidate that dies is tried again.

    A worker that replaces a dead one gets the proven kit. What is asked for meanwhile waits until the state
    is settled.

    Attributes:
        outcome: how the last renewal ended, `done` or why not; "" while one goes on.
        swap_outcome: likewise of the last swap.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        self.proven = Kit(setup, 0)  # the last kit with which a worker has taken its place
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
                self._try(replace(self.proven.setup, swapped=None), _TRIES)
            else:
                self._asked_again = True

    def swap(self, setup: WorkerSetup) -> bool:
        """Try workers that are given something else.

        False if a renewal goes on. May be called from any thread.
        """
        with self._lock:
            if not self.outcome:
                return False
            self.swap_outcome = ""
            self._try(setup, tries=1)
            return True

    def load(self, tiers: Sequence[int]) -> bool:
        """Have every worker replaced by one that loads these tiers.

        False if they all do, or a renewal goes on.
        """
        with self._lock:
            proven, loaded = self.proven.setup, tuple(tiers)
            if not self.outcome or proven.loaded == loaded:
                return False
            self._try(replace(proven, loaded=loaded, swapped=None), tries=1)
            return True

    def _try(self, setup: WorkerSetup, tries: int) -> None:
        self._numbers += 1
        self._trial = Kit(setup, self._numbers)
        self.outcome, self._tries = "", tries

    def without_graphs(self, generation: int) -> None:
        """A worker of this kit could not capture a CUDA graph: the next one with this kit does without."""
        with self._lock:
            if self._trial is not None and self._trial.number == generation:
                self._trial = self._trial.without_graphs()
            if self.proven.number == generation:
                self.proven = self.proven.without_graphs()

    def kit(self, *, candidate: bool) -> Kit:
        """What a new worker gets.

        A candidate the kit on trial, one that replaces a dead worker the proven one.

        The latter is as good as a candidate if the kits are the same, as when only what they find in the
        cache is new.
        """
        with self._lock:
            proven, trial = self.proven, self._trial or self.proven
            return trial if candidate or trial.setup == proven.setup else proven

    def wants_candidate(self, workers: Workers, now_ns: int) -> bool:
        return now_ns >= self._not_before_ns and _all_up(workers) and self.outdated(workers) is not None

    def outdated(self, workers: Workers) -> WorkerProcess | None:
        """A worker that is to be replaced, the last one first.

        The standby rather than the one that runs.
        """
        with self._lock:
            if self.outcome:
                return None
            wanted = self.kit(candidate=True).number
        old = (w for w in reversed(workers) if w is not None and w.usable and w.generation < wanted)
        return next(old, None)

    def has_settled(self, candidate: WorkerProcess, now_ns: int) -> bool:
        return (
            candidate.usable
            and candidate.ready_at_ns is not None
            and now_ns - candidate.ready_at_ns >= _SETTLE_NS
        )

    def is_over(self, candidate: WorkerProcess, workers: Workers) -> bool:
        """Whether no worker is left that a candidate would replace, or its kit was given up."""
        unwanted = bool(self.outcome) or candidate.generation != self.kit(candidate=True).number
        return unwanted or (_all_up(workers) and self.outdated(workers) is None)

    def took_a_place(self) -> None:
        with self._lock:
            if self._trial is not None:
                self.proven = Kit(replace(self._trial.setup, swapped=None), self._trial.number)
                self._trial = None

    def failed(self, reason: str, now_ns: int) -> bool:
        """A candidate died; True if that ends the renewal, and nothing has changed."""
        with self._lock:
            self._not_before_ns = now_ns + _PAUSE_NS
            self._tries -= self._trial is not None
            ends = self._trial is not None and self._tries <= 0
            if ends:
                self.give_up(reason)
            return ends

    def give_up(self, reason: str) -> None:
        """Replace no more workers; nothing if none is being replaced."""
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


class RollingUpdate:
    """One more worker beside a pool's own, until it takes the place of one of them.

    The pool's thread calls.

    Attributes:
        builder: has packages built that are missing.
    """

    def __init__(self, config: StageConfig, setup: WorkerSetup, tell: Callable[[str], None]) -> None:
        """`tell` takes lines for the log and `/perf/anomaly`."""
        self.renewal = Renewal(setup)  # which workers are to be replaced, and what each new one is given
        self.candidate: WorkerProcess | None = None  # the worker that is to take a place, None mostly
        self.may_compile = True  # whether there is the memory for compilers and one more worker now
        self.builder = PackageBuilder(setup, lambda _tier: self.renewal.ask(), tell)
        self._missing: tuple[str, ...] = ()
        self._config = config
        self._tell = tell

    @property
    def compiling(self) -> str:
        """What is compiled in the background, for example `compiling 2 of 3`; "" if nothing is."""
        progress = "" if self.candidate is None else self.candidate.reported.progress
        return progress if progress.startswith("compiling") else self.builder.progress

    def complete(self, worker: WorkerProcess) -> None:
        """A worker is ready, but not everything is compiled: have that done, once every worker is up."""
        if worker.reported.missing and self.may_compile:
            if self._config.engine != "compile":
                self._missing = worker.reported.missing
            elif not worker.setup.compiles:
                self.renewal.ask()

    def swap(self, tier: str, package: str) -> None:
        """Have every worker replaced by one that runs this package on this tier.

        Raises:
            ConfigError: no such tier, no package that may be taken, or workers are being replaced already.
        """
        tiers, stage = self._config.tiers, f"stage {self._config.name}"
        if tier not in tiers:
            raise ConfigError(f"tier {tier!r} is not there; {stage} has {', '.join(tiers)}")
        if not self.may_compile:
            raise ConfigError(
                f"{stage} is short of memory, and a swap takes one more worker; try again later"
            )
        setup = self.renewal.proven.setup
        try:
            built_for = made_for(find_package(Path(package), setup.package_dirs))
        except PackageError as error:
            raise ConfigError(str(error)) from error
        here = setup.adapter, tier
        if built_for and built_for != here:
            was, wanted = (f"tier {name} of {adapter}" for adapter, name in (built_for, here))
            raise ConfigError(
                f"package {package} was built for {was}; it cannot run as {wanted} of {stage}"
            )
        number = tiers.index(tier)
        if number not in setup.loaded:
            raise ConfigError(
                f"tier {tier!r} of {stage} belongs to a scene that is not loaded; it can be swapped once"
                " it is"
            )
        packages = (*setup.packages[:number], package, *setup.packages[number + 1 :])
        if not self.renewal.swap(replace(setup, packages=packages, swapped=number)):
            raise ConfigError(f"{stage} replaces its workers just now; try again later")

    def why_too_slow(self, worker: WorkerProcess, budget_ms: float) -> str:
        """Why the candidate's new package cannot be swapped in by what it measured.

        "" if it can, or has none.
        """
        swapped = worker.setup.swapped
        if worker is not self.candidate or swapped is None:
            return ""
        p99_ms = worker.calibrations[swapped].p99_ms
        if p99_ms < budget_ms:
            return ""
        tier = self._config.tiers[swapped]
        return f"tier {tier} takes {p99_ms:.1f} ms (p99); the budget is {budget_ms:g} ms"

    @property
    def swap_state(self) -> tuple[bool, str]:
        """Whether the last swap is done, and how it went.

        `swapping: ...` while it goes on, else `done` or why not.
        """
        outcome, candidate = self.renewal.swap_outcome, self.candidate
        return (
            outcome == _DONE,
            outcome or f"swapping: new worker {candidate.state if candidate else 'is next'}",
        )

    def step(self, pool: "WorkerPool", now_ns: int) -> None:
        """Take the next step, if there is one to take; one of the pool's own workers may be exchanged."""
        workers, candidate = pool.workers, self.candidate
        all_up = _all_up(workers)
        if all_up and self._missing:
            self.builder.want(self._missing)
            self._missing = ()
        self.builder.hold(held=not all_up)
        self.builder.listen()
        if candidate is None:
            if not self.may_compile or not self.renewal.wants_candidate(workers, now_ns):
                self.renewal.settled(workers)
                return
            try:
                self.candidate = pool.spawn(len(workers))
            except (OSError, ProtocolError) as error:
                self.lost(f"no new worker can be started: {error}")
        elif self.renewal.is_over(candidate, workers):
            serves = next((worker for worker in workers if worker is not None and worker.usable), None)
            if not candidate.usable or (serves is not None and pool.replace(candidate, serves)):
                self.candidate = None
                pool.dismiss(candidate, "no worker is left that it would replace")
        elif self.renewal.has_settled(candidate, now_ns):
            outdated = self.renewal.outdated(workers)
            if outdated is not None and pool.replace(outdated, candidate):
                candidate.number = outdated.number
                workers[candidate.number], self.candidate = candidate, None
                self.renewal.took_a_place()
                pool.dismiss(outdated, f"replaced by pid {candidate.pid}")

    def lost(self, reason: str) -> None:
        """The candidate has died before it took a place: the others serve on."""
        self.candidate = None
        ended = self.renewal.failed(reason, time.monotonic_ns())
        self._tell(f"{'nothing is replaced' if ended else 'it is tried again'}: {reason}")

    def give_up(self, reason: str) -> None:
        self.builder.stop()
        self.renewal.give_up(reason)
