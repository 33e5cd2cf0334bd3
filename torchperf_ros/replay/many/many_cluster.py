"""The Dask cluster that replays many logs: one on this machine that comes and goes with the command, or a given one."""

import contextlib
import importlib.util
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, Final

from torchperf_ros.replay.many.many_logs import ManyError
from torchperf_ros.replay.many.many_options import ManyOptions

if TYPE_CHECKING:
    from distributed import Client

_GIB: Final = 1 << 30
_LOG_GIB: Final = 2.0
_HERE: Final = "127.0.0.1"
_CONNECT_S: Final = 15.0
_WORKERS_S: Final = 30.0
_QUIET: Final = {
    "distributed.scheduler.allowed-failures": 0,  # a lost worker is told at once; who asked for the log tries again
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
class Cluster:
    """A cluster to submit to.

    Attributes:
        client: of Dask.
        slots: so many logs at a time.
        beside: so many of them on one machine.
        dashboard: where to look, "" for nowhere.
    """

    client: "Client"
    slots: int
    beside: int
    dashboard: str


def check_installed() -> None:
    """Ask for what many logs need and one log does not.

    Raises:
        ManyError: it is not installed.
    """
    needed = ("cryptography", "dask", "distributed", "pyarrow")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        msg = f"several logs need {', '.join(missing)}, which {are} not installed: `pip install 'torchperf_ros[logs]'`"
        raise ManyError(msg)


def default_workers(pace: str, cores: int, available_bytes: int) -> int:
    """How many logs this machine replays at a time unless told: one for each core that memory is there for.

    A log takes up to 2 GiB: two stages with two worker processes each. At the pace `real` it is one log, as its
    latencies would otherwise be those of a machine that has other things to do.
    """
    return 1 if pace == "real" else max(1, min(cores, int(available_bytes / _GIB / _LOG_GIB)))


@contextlib.contextmanager
def open_cluster(many: ManyOptions, pace: str, logs: int) -> Iterator[Cluster]:
    """Start a cluster on this machine, or reach the one that `many` names; for that many logs at most.

    Raises:
        ManyError: it cannot be reached, or has no worker.
    """
    import dask
    import distributed  # noqa: F401 - brings its defaults, which the settings below replace

    with dask.config.set(_QUIET):
        if many.scheduler:
            with _reached(many) as cluster:
                yield cluster
        else:
            with _embedded(many, pace, logs) as cluster:
                yield cluster


@contextlib.contextmanager
def _embedded(many: ManyOptions, pace: str, logs: int) -> Iterator[Cluster]:
    import dask
    import psutil
    from distributed import Client, LocalCluster
    from distributed.system import MEMORY_LIMIT

    available = min(psutil.virtual_memory().available, int(MEMORY_LIMIT))
    workers = many.workers or default_workers(pace, len(os.sched_getaffinity(0)), available)
    workers = max(1, min(workers, logs))
    host, _, port = many.dashboard.rpartition(":")
    with contextlib.ExitStack() as stack:
        # temporary files of scheduler and workers, so that nothing stays of those that are killed
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_many_", ignore_cleanup_errors=True))
        pages: dict[str, list[str]] = {} if many.dashboard else _NO_PAGES
        stack.enter_context(dask.config.set({"temporary-directory": folder, **pages}))
        stack.enter_context(_silent())
        with _signals_held():
            try:
                cluster = stack.enter_context(
                    LocalCluster(
                        n_workers=workers, threads_per_worker=1, processes=True, memory_limit=0, host=_HERE,
                        dashboard_address=f"{host or _HERE}:{port or 0}", worker_dashboard_address=None,
                        scheduler_kwargs={"dashboard": bool(many.dashboard)},
                        silence_logs=logging.CRITICAL, security=_security(), env={"TMPDIR": folder},
                    )
                )  # fmt: skip
            except (OSError, RuntimeError) as error:
                raise ManyError(_not_started(many, error)) from error
            client = stack.enter_context(Client(cluster, set_as_default=False))
        stack.enter_context(client.as_current())
        try:
            yield Cluster(client, workers, workers, cluster.dashboard_link if many.dashboard else "")
        finally:
            with _signals_held():  # who presses Ctrl-C twice is in a hurry, and this is it
                stack.close()


def _not_started(many: ManyOptions, error: BaseException) -> str:
    """One line: what was asked for, and the first cause that Dask found."""
    cause = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    why = " ".join(str(cause).split()) or type(cause).__name__
    what = f"--dashboard {many.dashboard}" if many.dashboard else "several logs"
    return f"{what}: the processes of this machine that would replay could not be started: {why}"


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
def _reached(many: ManyOptions) -> Iterator[Cluster]:
    from distributed import Client
    from distributed import TimeoutError as Overdue

    with contextlib.ExitStack() as stack:
        stack.enter_context(_silent())
        try:
            client = stack.enter_context(Client(many.scheduler, timeout=_CONNECT_S, set_as_default=False))
        except (OSError, ValueError, Overdue) as error:
            msg = f"--scheduler {many.scheduler}: nobody answers there: {error}"
            raise ManyError(msg) from error
        stack.enter_context(client.as_current())
        with contextlib.suppress(Overdue):
            client.wait_for_workers(1, timeout=_WORKERS_S)
        hosts = Counter(worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
        if not hosts:
            example = f"dask worker {many.scheduler} --nworkers 1 --nthreads 1"
            msg = f"--scheduler {many.scheduler}: has no worker; start some, on each machine: `{example}`"
            raise ManyError(msg)
        slots = min(hosts.total(), many.workers or hosts.total())
        yield Cluster(client, slots, min(slots, max(hosts.values())), "")


def _security() -> Any:  # noqa: ANN401 - distributed's
    """Certificates for this cluster alone: a port of this machine is open to all of its users."""
    from distributed import Security

    return Security.temporary()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What Dask tells of comings and goings is told by us, once."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in {"distributed", "tornado"}]
    levels = {logger: logger.level for logger in map(logging.getLogger, names)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
