"""The Dask cluster that replays many logs, and the logs on their way through it.

The cluster is one on this machine that comes and goes with the command, or a given one. A worker gets one
log at a time, and the next when that has ended: a worker that dies takes one log with it.
"""

import contextlib
import logging
import os
import re
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.replay.batch.batch_logs import BatchError, FoundLog
from torchperf_ros.replay.batch.batch_results import Ended, LogTask, replay_one, why_invisible

if TYPE_CHECKING:
    from distributed import Client, Future

_LOG_BYTES: Final = 2 << 30
_HERE: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(tcp|tls)://\S+:\d+")
_CONNECT_S: Final = 15.0
_RETRIES: Final = 1  # how often Dask tries a log again that failed by what may not fail again
_GONE: Final = Ended("the connection to the scheduler was lost")
_QUIET: Final = {
    "distributed.scheduler.worker-saturation": 1.0,  # no log waits in a worker that may be lost
    "distributed.worker.profile.enabled": False,  # it would look at the replay's thread 100 times a second
    "distributed.worker.multiprocessing-method": "spawn",
    "distributed.nanny.pre-spawn-environ": {},  # what it sets for malloc and OpenMP would reach the models
    # 20 ms would wake every process of the cluster 50 times a second
    "distributed.admin.tick.interval": "1s",
    # a long-lasting step of a replay is none of the scheduler's worries
    "distributed.admin.tick.limit": "1h",
    "distributed.scheduler.http.routes": [],  # pages, which every user of this machine could read
    "distributed.worker.http.routes": [],
}


@dataclass(frozen=True)
class BatchOptions:
    """What `torchperf replay` takes besides for several logs."""

    folder: Path  # where the results go, a folder for each log; made if it is not there
    parallel: int = 0  # so many logs at a time on this machine; 0: as `default_parallel` says
    # address of a Dask scheduler, for example `tcp://10.0.0.5:8786`; "": a cluster on this machine
    scheduler: str = ""


@dataclass(frozen=True)
class Cluster:
    """A cluster to submit to, which replays at most `beside` logs on one machine at a time."""

    client: "Client"
    beside: int


def default_parallel(pace: str, cores: int, available_bytes: int) -> int:
    """How many logs this machine replays at a time by default: one for each core that memory is there for.

    A log takes up to 2 GiB: two stages with two worker processes each. At the pace `real` it is one log, as
    its latencies would otherwise be those of a machine that has other things to do.
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
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # Dask logs comings and goings; the command shows them, once
        cluster = _reached(stack, batch) if batch.scheduler else _started(stack, batch, pace, logs)
        stack.enter_context(cluster.client.as_current())
        try:
            yield cluster
        finally:
            with _signals_held():  # a second Ctrl-C does not leave workers behind
                stack.close()


def _started(stack: contextlib.ExitStack, batch: BatchOptions, pace: str, logs: int) -> Cluster:
    import dask
    import psutil
    from distributed import Client, LocalCluster, Security
    from distributed.system import MEMORY_LIMIT

    available = min(psutil.virtual_memory().available, int(MEMORY_LIMIT))
    parallel = batch.parallel or default_parallel(pace, len(os.sched_getaffinity(0)), available)
    parallel = max(1, min(parallel, logs))
    # temporary files of scheduler and workers, so that nothing stays of those that are killed
    folder = stack.enter_context(
        tempfile.TemporaryDirectory(prefix="torchperf_many_", ignore_cleanup_errors=True)
    )
    stack.enter_context(dask.config.set({"temporary-directory": folder}))
    with _signals_held():
        try:
            cluster = stack.enter_context(
                LocalCluster(
                    n_workers=parallel,
                    threads_per_worker=1,
                    processes=True,
                    memory_limit=0,
                    host=_HERE,
                    dashboard_address=f"{_HERE}:0",
                    worker_dashboard_address=None,
                    scheduler_kwargs={"dashboard": False},
                    silence_logs=logging.CRITICAL,
                    security=Security.temporary(),  # a port of this machine is open to all of its users
                    env={"TMPDIR": folder},
                )
            )
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            why = " ".join(str(error).split())
            raise BatchError(
                f"several logs: the processes of this machine that would replay could not be started: {why}"
            ) from error
        client = stack.enter_context(Client(cluster, set_as_default=False))
    return Cluster(client, parallel)


def _reached(stack: contextlib.ExitStack, batch: BatchOptions) -> Cluster:
    from distributed import Client
    from distributed import TimeoutError as Overdue

    if not _ADDRESS.fullmatch(batch.scheduler):
        raise BatchError(f"--scheduler {batch.scheduler}: has to be an address like tcp://10.0.0.5:8786")
    try:
        client = stack.enter_context(Client(batch.scheduler, timeout=_CONNECT_S, set_as_default=False))
    except (OSError, ValueError, Overdue) as error:
        raise BatchError(f"--scheduler {batch.scheduler}: no scheduler answers there: {error}") from error
    with contextlib.suppress(Overdue):
        client.wait_for_workers(1, timeout=30.0)
    hosts = Counter(worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
    if not hosts:
        example = f"dask worker {batch.scheduler} --nworkers 1 --nthreads 1"
        raise BatchError(
            f"--scheduler {batch.scheduler}: has no worker; start some, on each machine: `{example}`"
        )
    return Cluster(client, max(hosts.values()))


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


def replay_on(cluster: Cluster, tasks: Sequence[LogTask], ended: Callable[[FoundLog, Ended], None]) -> None:
    """Replay logs on a cluster, which tries again what fails or loses its worker.

    Afterwards no task goes on. `ended` gets how a log ended.

    Raises:
        BatchError: a machine of the cluster does not see the folder of results.
        KeyboardInterrupt: the user does not want to wait.
    """
    from distributed import as_completed

    client, seen = cluster.client, tasks[0].run_folder
    blind = {worker: why for worker, why in client.run(why_invisible, seen).items() if why}
    for worker, why in blind.items():
        raise BatchError(f"worker {worker}: {why}")
    running = {
        client.submit(replay_one, task, key=task.name, pure=False, retries=_RETRIES): task for task in tasks
    }
    try:
        for future in as_completed(list(running)):
            ended(running.pop(future).log, _outcome(future))
    finally:
        # a replay that runs ends by itself: the folder of this start goes
        if running and client.status == "running":
            client.cancel(list(running), force=True)


def _outcome(future: "Future") -> Ended:
    from distributed import KilledWorker

    if future.status == "finished":
        return cast("Ended", future.result())
    if (
        future.status != "error"
    ):  # cancelled or lost: the scheduler is gone, or knows nothing of it any more
        return _GONE
    error = future.exception()
    if isinstance(error, KilledWorker):
        return Ended("its worker was lost: killed, perhaps for want of memory")
    if isinstance(error, TorchperfError):
        return Ended(str(error))
    calls = traceback.format_exception(type(error), error, future.traceback())
    return Ended(f"{type(error).__name__}: {error}", traceback="".join(calls))
