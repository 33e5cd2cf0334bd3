"""How a crew's workers get successors while they serve: compiled tiers, packages that are swapped in."""

import time
from collections.abc import Callable
from typing import Any

from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.errors import ConfigError, ProtocolError
from torchperf_ros.supervise.package_builder import PackageBuilder
from torchperf_ros.supervise.renewal import Renewal
from torchperf_ros.supervise.worker_process import WorkerProcess

Spawn = Callable[[int], WorkerProcess]
Replace = Callable[[WorkerProcess, WorkerProcess], bool]
Dismiss = Callable[[WorkerProcess, str], None]
Tell = Callable[[str], None]


class Succession:
    """One more worker beside a crew's own, until it takes the place of one of them; the crew's thread calls.

    Attributes:
        renewal: who is to be replaced, and what new workers are told.
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
        if self._config.engine == "aoti":
            self._missing = worker.missing
        elif not worker.compiles:
            self.renewal.ask()

    def _package_built(self, tier: str) -> None:
        self.renewal.ask()

    def swap(self, tier: str, package: str) -> None:
        """Have every worker replaced by one that runs this package on this tier.

        Raises:
            ConfigError: no such tier, or workers are being replaced already.
        """
        tiers = self._config.tiers
        if tier not in tiers:
            msg = f"tier {tier!r} is not there; stage {self._config.name} has {', '.join(tiers)}"
            raise ConfigError(msg)
        if not self.may_compile:
            msg = f"stage {self._config.name} is short of memory, and a swap takes one more worker; try again later"
            raise ConfigError(msg)
        if not self.renewal.outcome:
            msg = f"stage {self._config.name} replaces its workers just now; try again later"
            raise ConfigError(msg)
        packages = list(self.renewal.setup["packages"])
        packages[tiers.index(tier)] = package
        self.renewal.ask(tries=1, packages=packages, swapped=tiers.index(tier))

    def why_too_slow(self, worker: WorkerProcess, budget_ms: float) -> str:
        """Why the candidate's new package cannot be swapped in by what it measured; "" if it can, or has none."""
        if worker is not self.candidate or worker.swapped is None:
            return ""
        p99_ms, tier = worker.calibrations[worker.swapped].p99_ms, self._config.tiers[worker.swapped]
        return "" if p99_ms < budget_ms else f"tier {tier} takes {p99_ms:.1f} ms (p99); the budget is {budget_ms:g} ms"

    @property
    def swap_state(self) -> tuple[bool, str]:
        """Whether the last swap is done, and how it went: `swapping: ...` while it goes on, else `done` or why not."""
        outcome = self.renewal.outcome
        candidate = self.candidate
        return outcome == "done", outcome or f"swapping: new worker {candidate.state if candidate else 'is next'}"

    def step(
        self, workers: list[WorkerProcess | None], now_ns: int, spawn: Spawn, replace: Replace, dismiss: Dismiss
    ) -> None:
        """Take the next step, if there is one to take.

        Args:
            workers: the crew's own; one of them may be exchanged.
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
        if candidate is None:
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
            if outdated is None:
                self.candidate = None
                dismiss(candidate, "nobody is left whom it would replace")
            elif replace(outdated, candidate):
                candidate.number = outdated.number
                workers[candidate.number], self.candidate = candidate, None
                self.renewal.took_a_place()
                dismiss(outdated, f"replaced by pid {candidate.pid}")

    def lost(self, candidate: WorkerProcess, reason: str) -> None:
        """The candidate has died before it took a place: the others serve on."""
        self.candidate = None
        candidate.usable = False
        ended = self.renewal.failed(candidate, reason, time.monotonic_ns())
        self._tell(f"{'nothing is replaced' if ended else 'it is tried again'}: {reason}")

    def give_up(self, reason: str) -> None:
        """Compile and replace nothing more."""
        self._builder.stop()
        self.renewal.give_up(reason)

    def stop(self) -> None:
        """End what compiles."""
        self._builder.stop()
