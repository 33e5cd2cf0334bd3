"""Logs on their way through a cluster: handed out, watched, tried again, given up."""

import contextlib
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from torchperf_ros.replay.many.many_cluster import Cluster
from torchperf_ros.replay.many.many_logs import FoundLog, ManyError
from torchperf_ros.replay.many.many_task import Ended, LogTask, check_visible, read_progress, replay_one

if TYPE_CHECKING:
    from distributed import Future

_LOOK_S: Final = 0.25
_GRACE_S: Final = 5.0  # a task that is told to end looks up four times a second, unless it starts or hangs
_RESTART_S: Final = 30.0
_NO_WORKER_S: Final = 60.0
_GONE: Final = Ended("the connection to the scheduler was lost")


class Watcher(Protocol):
    """Whoever shows how it goes."""

    def progress(self, log: FoundLog, done_ns: int, total_ns: int) -> None:
        """A log is so far; `total_ns` is 0 where it is not known."""

    def ended(self, log: FoundLog, ended: Ended, again: bool) -> None:
        """A log is done, has failed, or is tried `again`."""


@dataclass
class _Running:
    """A task in a worker.

    Attributes:
        task: what it was told.
        handed_s: when it was given to the scheduler.
        worker: its address, "" until it has begun.
        begun_s: when it was seen to have begun.
    """

    task: LogTask
    handed_s: float
    worker: str = ""
    begun_s: float = 0.0


class ManyRun:
    """Replays logs on a cluster.

    A worker is given one log at a time, and the next when that has ended: whoever dies takes one log with it.
    """

    def __init__(self, cluster: Cluster, watcher: Watcher, retries: int, timeout_s: float) -> None:
        """Take the cluster.

        Args:
            cluster: to hand logs to.
            watcher: told of everything.
            retries: how often a log is tried again.
            timeout_s: how long one may take; 0: as long as it needs.
        """
        self._cluster, self._watcher = cluster, watcher
        self._retries, self._timeout_s = retries, timeout_s
        self._running: dict[Future, _Running] = {}

    def run(self, tasks: Sequence[LogTask], ended: dict[str, Ended]) -> None:
        """Replay, and note how each log ended, by name. Whatever is raised meanwhile, no task goes on.

        Raises:
            ManyError: a machine of the cluster does not see the folder of results.
            KeyboardInterrupt: the user does not want to wait.
        """
        self._check(tasks[0])
        waiting = deque(tasks)
        try:
            while waiting or self._running:
                while waiting and self._reachable and len(self._running) < self._cluster.slots:
                    self._submit(waiting.popleft())
                gone = [] if self._running or self._reachable else [(task, _GONE) for task in waiting]
                for task, how in [*self._finished(), *self._overdue(), *gone]:
                    failed = bool(how.reason) and not how.lasting
                    again = failed and task.attempt < self._retries and self._reachable
                    self._watcher.ended(task.log, how, again)
                    if again:
                        waiting.append(replace(task, attempt=task.attempt + 1))
                    else:
                        ended[task.log.name] = how
                if gone:
                    return
        except BaseException:
            self._end(list(self._running))
            raise

    def _check(self, task: LogTask) -> None:
        for worker, why in self._cluster.client.run(_why_not, task.run_folder).items():
            if why:
                msg = f"worker {worker}: {why}"
                raise ManyError(msg)

    def _submit(self, task: LogTask) -> None:
        key = f"{task.run_folder.name}-{task.log.name}-{task.attempt}"
        future = self._cluster.client.submit(_in_worker, task, key=key, pure=False, retries=0)
        self._running[future] = _Running(task, time.monotonic())

    def _finished(self) -> Iterator[tuple[LogTask, Ended]]:
        """Wait a moment for tasks that end; show how far the others are."""
        _wait(self._running, _LOOK_S, "FIRST_COMPLETED")
        for future in [future for future in self._running if future.done()]:
            yield self._running.pop(future).task, _outcome(future)
        for running in self._running.values():
            with contextlib.suppress(OSError, ValueError):
                done_ns, total_ns, running.worker = read_progress(running.task.progress_file)
                running.begun_s = running.begun_s or time.monotonic()
                self._watcher.progress(running.task.log, done_ns, total_ns)

    def _overdue(self) -> Iterator[tuple[LogTask, Ended]]:
        """End tasks that take too long, or that nobody is left to begin."""
        now_s = time.monotonic()
        for future, running in list(self._running.items()):
            if self._timeout_s and running.begun_s and now_s - running.begun_s > self._timeout_s:
                self._end([future])
                yield running.task, Ended(f"took longer than --timeout {self._timeout_s:g} s")
            elif not running.begun_s and now_s - running.handed_s > _NO_WORKER_S and not self._workers():
                self._end([future])
                yield running.task, Ended("no worker is left in the cluster", lasting=True)

    @property
    def _reachable(self) -> bool:
        """Whether there is a scheduler to talk to."""
        return bool(self._cluster.client.status == "running")

    def _workers(self) -> bool:
        return bool(self._cluster.client.scheduler_info(n_workers=-1)["workers"])

    def _end(self, futures: "list[Future]") -> None:
        """Let tasks end themselves, with their worker processes; a worker whose task does not is restarted."""
        ended = {future: self._running.pop(future) for future in futures}
        for running in ended.values():
            running.task.progress_file.unlink(missing_ok=True)
        _wait(futures, _GRACE_S)
        if not self._reachable:
            return
        stuck = [running.worker for future, running in ended.items() if not future.done() and running.worker]
        self._cluster.client.cancel(futures, force=True)
        if stuck:
            self._cluster.client.restart_workers(stuck, timeout=_RESTART_S, raise_for_error=False)


def _wait(futures: "Collection[Future]", timeout_s: float, until: str = "ALL_COMPLETED") -> None:
    """Wait for tasks, but not for longer; also those that the cluster no longer knows count as completed."""
    from distributed import CancelledError, wait
    from distributed import TimeoutError as Overdue

    if futures:
        with contextlib.suppress(Overdue, CancelledError):
            wait(list(futures), timeout=timeout_s, return_when=until)


def _in_worker(task: LogTask) -> Ended:
    from distributed import get_worker

    return replay_one(task, get_worker().address)


def _why_not(folder: Path) -> str:
    """Why this machine cannot take part, "" if it can."""
    try:
        check_visible(folder)
    except ManyError as error:
        return str(error)
    return ""


def _outcome(future: "Future") -> Ended:
    from distributed import KilledWorker

    if future.status == "finished":
        return cast("Ended", future.result())
    if future.status != "error":  # cancelled or lost: the scheduler is gone, or knows nothing of it any more
        return _GONE
    error = future.exception()
    if isinstance(error, KilledWorker):
        return Ended("its worker was lost: killed, perhaps for want of memory")
    return Ended(f"the cluster could not run it: {type(error).__name__}: {error}")
