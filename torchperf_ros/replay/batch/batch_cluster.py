"""The Dask cluster that replays many logs, and the logs on their way through it.

The cluster is one on this machine that comes and goes with the command, or a given one. A worker gets one log at a
time, and the next when that has ended: a worker that dies takes one log with it.
"""

import contextlib
import importlib.util
import logging
import os
import re
import signal
import tempfile
import time
from collections import Counter, deque
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torchperf_ros.replay.batch.batch_logs import BatchError, FoundLog
from torchperf_ros.replay.batch.batch_task import Ended, LogTask, replay_one, why_invisible

if TYPE_CHECKING:
    from distributed import Client, Future

_LOG_BYTES: Final = 2 << 30
_HERE: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(tcp|tls)://\S+:\d+")
_CONNECT_S: Final = 15.0
_WORKERS_S: Final = 30.0
_LOOK_S: Final = 0.25
_RESTART_S: Final = 30.0
_GONE: Final = Ended("the connection to the scheduler was lost")
_QUIET: Final = {
    "distributed.scheduler.allowed-failures": 0,  # a lost worker is known at once; the log is tried again from here
    "distributed.scheduler.worker-saturation": 1.0,  # no log waits in a worker that may be lost
    "distributed.worker.profile.enabled": False,  # it would look at the replay's thread 100 times a second
    "distributed.worker.multiprocessing-method": "spawn",
    "distributed.nanny.pre-spawn-environ": {},  # what it sets for malloc and OpenMP would reach the models
    "distributed.admin.tick.interval": "1s",  # 20 ms would wake every process of the cluster 50 times a second
    "distributed.admin.tick.limit": "1h",  # a long-lasting step of a replay is none of the scheduler's worries
}
_NO_PAGES: Final[dict[str, list[str]]] = {  # every user of this machine could read them
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}


@dataclass(frozen=True)
class BatchOptions:
    """What `torchperf replay` takes besides for several logs.

    Attributes:
        folder: where the results go, a folder for each log; made if it is not there.
        parallel: so many logs at a time; 0: as `default_parallel` says.
        scheduler: address of a Dask scheduler, for example `tcp://10.0.0.5:8786`; "": a cluster on this machine.
        retries: how often a log is tried again after a worker was lost or something failed that may not fail again.
        timeout_s: how long a log may take; 0: as long as it needs.
        fresh: replay what is done already, too.
        keep_output: write what was published to an MCAP file beside each log's results.
        dashboard: address of Dask's dashboard, for example `:8787`; "": none.
    """

    folder: Path
    parallel: int = 0
    scheduler: str = ""
    retries: int = 1
    timeout_s: float = 0.0
    fresh: bool = False
    keep_output: bool = False
    dashboard: str = ""


@dataclass(frozen=True)
class Cluster:
    """A cluster to submit to.

    Attributes:
        client: of Dask.
        slots: so many logs at a time.
        beside: so many of them on one machine.
        dashboard: where to look, "" for nowhere.
        given: whether it was there before, and stays.
    """

    client: "Client"
    slots: int
    beside: int
    dashboard: str = ""
    given: bool = False


class BatchView:
    """Gets how it goes; this one shows nothing."""

    def progress(self, log: FoundLog, done_ns: int, total_ns: int) -> None:
        """A log is so far; `total_ns` is 0 where it is not known."""

    def ended(self, log: FoundLog, ended: Ended, again: bool) -> None:
        """A log is done, has failed, or is tried `again`."""


def check_installed() -> None:
    """Ask for what many logs need and one log does not.

    Raises:
        BatchError: it is not installed.
    """
    needed = ("cryptography", "dask", "distributed", "pyarrow")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        are = "is" if len(missing) == 1 else "are"
        msg = f"several logs need {', '.join(missing)}, which {are} not installed: `pip install 'torchperf_ros[logs]'`"
        raise BatchError(msg)


def default_parallel(pace: str, cores: int, available_bytes: int) -> int:
    """How many logs this machine replays at a time by default: one for each core that memory is there for.

    A log takes up to 2 GiB: two stages with two worker processes each. At the pace `real` it is one log, as its
    latencies would otherwise be those of a machine that has other things to do.
    """
    return 1 if pace == "real" else max(1, min(cores, available_bytes // _LOG_BYTES))


@contextlib.contextmanager
def open_cluster(batch: BatchOptions, pace: str, logs: int) -> Iterator[Cluster]:
    """Start a cluster on this machine, or reach the one that `batch` names; for that many logs at most.

    Raises:
        BatchError: it cannot be reached, or has no worker.
    """
    import dask
    import distributed  # noqa: F401 - brings its defaults, which the settings below replace

    with dask.config.set(_QUIET), contextlib.ExitStack() as stack:
        stack.enter_context(_silent())
        cluster = _reached(stack, batch) if batch.scheduler else _started(stack, batch, pace, logs)
        stack.enter_context(cluster.client.as_current())
        try:
            yield cluster
        finally:
            with _signals_held():  # who presses Ctrl-C twice is in a hurry, and this is it
                stack.close()


def _started(stack: contextlib.ExitStack, batch: BatchOptions, pace: str, logs: int) -> Cluster:
    import dask
    import psutil
    from distributed import Client, LocalCluster, Security
    from distributed.system import MEMORY_LIMIT

    available = min(psutil.virtual_memory().available, int(MEMORY_LIMIT))
    parallel = batch.parallel or default_parallel(pace, len(os.sched_getaffinity(0)), available)
    parallel = max(1, min(parallel, logs))
    host, _, port = batch.dashboard.rpartition(":")
    # temporary files of scheduler and workers, so that nothing stays of those that are killed
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_many_", ignore_cleanup_errors=True))
    pages: dict[str, list[str]] = {} if batch.dashboard else _NO_PAGES
    stack.enter_context(dask.config.set({"temporary-directory": folder, **pages}))
    with _signals_held():
        try:
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=parallel, threads_per_worker=1, processes=True, memory_limit=0, host=_HERE,
                    dashboard_address=f"{host or _HERE}:{port or 0}", worker_dashboard_address=None,
                    scheduler_kwargs={"dashboard": bool(batch.dashboard)}, silence_logs=logging.CRITICAL,
                    security=Security.temporary(),  # a port of this machine is open to all of its users
                    env={"TMPDIR": folder},
                )
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            what = f"--dashboard {batch.dashboard}" if batch.dashboard else "several logs"
            msg = f"{what}: the processes of this machine that would replay could not be started: {why}"
            raise BatchError(msg) from error
        client = stack.enter_context(Client(cluster, set_as_default=False))
    return Cluster(client, parallel, parallel, cluster.dashboard_link if batch.dashboard else "")


def _reached(stack: contextlib.ExitStack, batch: BatchOptions) -> Cluster:
    from distributed import Client
    from distributed import TimeoutError as Overdue

    if not _ADDRESS.fullmatch(batch.scheduler):
        msg = f"--scheduler {batch.scheduler}: has to be an address like tcp://10.0.0.5:8786"
        raise BatchError(msg)
    try:
        client = stack.enter_context(Client(batch.scheduler, timeout=_CONNECT_S, set_as_default=False))
    except (OSError, ValueError, Overdue) as error:
        msg = f"--scheduler {batch.scheduler}: nobody answers there: {error}"
        raise BatchError(msg) from error
    with contextlib.suppress(Overdue):
        client.wait_for_workers(1, timeout=_WORKERS_S)
    hosts = Counter(worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
    if not hosts:
        example = f"dask worker {batch.scheduler} --nworkers 1 --nthreads 1"
        msg = f"--scheduler {batch.scheduler}: has no worker; start some, on each machine: `{example}`"
        raise BatchError(msg)
    slots = min(hosts.total(), batch.parallel or hosts.total())
    return Cluster(client, slots, min(slots, max(hosts.values())), given=True)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait; threads and processes that are started meanwhile never get them.

    From a terminal they reach every process of the group; the command ends its workers itself.
    """
    resource_tracker.ensure_running()  # it lets the signals through when it is started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Dask logs comings and goings; the command shows them, once."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in {"distributed", "tornado"}]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def replay_on(
    cluster: Cluster, tasks: Sequence[LogTask], batch: BatchOptions, view: BatchView
) -> Generator[tuple[LogTask, Ended], None, None]:
    """Replay logs on a cluster; gives how each ended. To be closed: then no task goes on.

    Raises:
        BatchError: a machine of the cluster does not see the folder of results.
        KeyboardInterrupt: the user does not want to wait.
    """
    client, run_folder = cluster.client, tasks[0].run_folder
    for worker, why in client.run(why_invisible, run_folder).items():
        if why:
            msg = f"worker {worker}: {why}"
            raise BatchError(msg)
    waiting, running = deque(tasks), _Running(client, run_folder.name, batch.timeout_s)
    try:
        while waiting or running.tasks:
            while waiting and running.reachable and len(running.tasks) < cluster.slots:
                running.submit(waiting.popleft())
            ended = [*running.finished(), *running.overdue()]
            if not running.tasks and not running.reachable:
                ended += [(task, _GONE) for task in waiting]
                waiting.clear()
            running.show(view)
            for task, how in ended:
                failed = bool(how.reason) and not how.lasting
                again = failed and task.attempt < batch.retries and running.reachable
                view.ended(task.log, how, again)
                if again:
                    waiting.append(replace(task, attempt=task.attempt + 1))
                else:
                    yield task, how
    finally:
        if running.reachable:
            client.unsubscribe_topic(run_folder.name)
        if cluster.given:  # another one ends with the command
            running.end(list(running.tasks))


class _Running:
    """The tasks in the cluster. A worker tells how far it is by events of a topic that is the run's own."""

    def __init__(self, client: "Client", topic: str, timeout_s: float) -> None:
        self.tasks: dict[Future, LogTask] = {}
        self._client, self._topic, self._timeout_s = client, topic, timeout_s
        self._begun_s: dict[str, float] = {}
        self._told: dict[str, dict[str, Any]] = {}
        client.subscribe_topic(topic, self._hear)

    def _hear(self, event: tuple[float, dict[str, Any]]) -> None:
        """An event, on Dask's thread: `key`, `done_ns` and `total_ns` of a task, and the `worker` that it is from."""
        _, message = event
        self._begun_s.setdefault(message["key"], time.monotonic())
        self._told[message["key"]] = message

    @property
    def reachable(self) -> bool:
        """Whether there is a scheduler to talk to."""
        return bool(self._client.status == "running")

    def submit(self, task: LogTask) -> None:
        key = f"{self._topic}-{task.log.name}-{task.attempt}"
        future = self._client.submit(_in_worker, task, self._topic, key, key=key, pure=False, retries=0)
        self.tasks[future] = task

    def finished(self) -> Iterator[tuple[LogTask, Ended]]:
        """Wait a moment for tasks that end."""
        _wait(self.tasks, _LOOK_S)
        for future in [future for future in self.tasks if future.done()]:
            yield self.tasks.pop(future), _outcome(future)

    def show(self, view: BatchView) -> None:
        for future, task in self.tasks.items():
            if message := self._told.get(future.key):
                view.progress(task.log, message["done_ns"], message["total_ns"])

    def overdue(self) -> Iterator[tuple[LogTask, Ended]]:
        """End tasks that take too long."""
        now_s = time.monotonic()
        for future, task in list(self.tasks.items()):
            if self._timeout_s and now_s - self._begun_s.get(future.key, now_s) > self._timeout_s:
                self.end([future])
                yield task, Ended(f"took longer than --timeout {self._timeout_s:g} s")

    def end(self, futures: "list[Future]") -> None:
        """Let tasks go, and restart the workers that are at them: a thread cannot be ended from outside."""
        for future in futures:
            del self.tasks[future]
        if futures and self.reachable:
            workers = [message["worker"] for future in futures if (message := self._told.get(future.key))]
            self._client.cancel(futures, force=True)
            if workers:
                self._client.restart_workers(workers, timeout=_RESTART_S, raise_for_error=False)


def _wait(futures: "Collection[Future]", timeout_s: float) -> None:
    """Wait for a task to end, but not for longer; also those that the cluster no longer knows have ended."""
    from distributed import CancelledError, wait
    from distributed import TimeoutError as Overdue

    if futures:
        with contextlib.suppress(Overdue, CancelledError):
            wait(list(futures), timeout=timeout_s, return_when="FIRST_COMPLETED")


def _in_worker(task: LogTask, topic: str, key: str) -> Ended:
    from distributed import get_worker

    worker, next_s = get_worker(), 0.0

    def tell(done_ns: int, total_ns: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _LOOK_S
            worker.log_event(topic, {"key": key, "done_ns": done_ns, "total_ns": total_ns})

    tell(0, 0)
    return replay_one(task, tell)


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
