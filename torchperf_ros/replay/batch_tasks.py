"""Many logs: where they lie, one log's replay on a process of a Dask cluster, and the folder of results.

The cluster is one on this machine that comes and goes with the command, or a given one. A worker gets one
log at a time, and the next when that has ended: a worker that dies takes one log with it. Each log has a
name in the folder of results; all folders together are a table and a page.
"""

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from torchperf_ros import __version__
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.observe.runs.run_log import RUN_FILE, whole_file, write_run
from torchperf_ros.replay.logs.log_reader import METADATA, SUFFIXES, Progress
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import (
    ReplayOptions,
    prefer_this_process,
    read_config,
    recording_in,
)
from torchperf_ros.settings.config import NodeConfig

if TYPE_CHECKING:
    from distributed import Client, Future


_SPLIT: Final = re.compile(r"(?P<stem>.+)_(?P<number>\d+)\.(mcap|db3)(\.zstd)?")
_ODD: Final = re.compile(r"[^\w.+-]+")


class BatchError(TorchperfError):
    """Many logs cannot be replayed like this; the message says why and what would do."""


@dataclass(frozen=True)
class FoundLog:
    path: Path  # what a `LogReader` takes; absolute
    name: str  # of its folder of results; unique
    files: tuple[Path, ...]  # those that it consists of
    size_bytes: int  # of all of them


def is_batch(paths: Sequence[Path]) -> bool:
    """Whether these are several logs, or a folder to search, and not one log."""
    return len(paths) > 1 or (paths[0].is_dir() and not is_log(paths[0]))


def is_log(path: Path) -> bool:
    """Whether a path is one log, not a folder to search: a file, a rosbag2 folder, an incident's folder."""
    if not path.is_dir():
        return path.name.endswith(SUFFIXES)
    return (path / METADATA).is_file() or recording_in(path) != path or _is_split(path)


def find_logs(
    paths: Sequence[Path],
    owner: Callable[[str], str] = lambda _: "",
    say: Callable[[str], None] = lambda _: None,
) -> tuple[FoundLog, ...]:
    """Every log that is named, and those in folders that are, at any depth; each once.

    A rosbag2 folder is one log with all its files, also where its metadata is lost, and so is an incident's
    folder. What is hidden is passed over, and so are results of replays.

    `owner` gives the path of the log that has results of a name already: it keeps the name. `say` gets a
    line for a folder that cannot be read.

    Raises:
        LogError: a path does not exist.
        BatchError: there is no log.
    """
    found: dict[Path, FoundLog] = {}
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise LogError(f"log {path}: does not exist")
        for log in _search(path, seen, say):
            resolved = log.resolve()
            if not resolved.exists():
                say(f"log {log}: is passed over: a link to nothing")
            elif resolved not in found:
                found[resolved] = _described(log, resolved)
    if not found:
        shown = ", ".join(map(str, paths))
        raise BatchError(
            f"no log in {shown}: no rosbag2 folder, .mcap, .db3 or ROS 1 .bag file; name one, or a folder"
            " with some"
        )
    return _named(sorted(found.values(), key=lambda log: (log.name, log.path)), owner)


def _is_split(folder: Path) -> bool:
    """Whether a folder holds one log's numbered files, as of rosbag2, though no metadata says so."""
    try:
        names = [file.name for file in folder.iterdir() if file.name.endswith(SUFFIXES)]
    except OSError:
        return False
    parts = [match for name in names if (match := _SPLIT.fullmatch(name))]
    stems, numbers = {part["stem"] for part in parts}, sorted(int(part["number"]) for part in parts)
    whole = len(parts) == len(names) and len(stems) == 1 and numbers == list(range(len(numbers)))
    return whole and (len(names) > 1 or stems == {folder.name})


def _search(path: Path, seen: set[Path], say: Callable[[str], None]) -> Iterator[Path]:
    """A log, or those in a folder, at any depth; no folder twice, also where links lead back to it."""
    try:
        if is_log(path):
            yield path
        elif path.is_dir() and (resolved := path.resolve()) not in seen:
            seen.add(resolved)
            is_result = (path / RUN_FILE).is_file()
            for entry in [] if is_result else sorted(path.iterdir()):
                if not entry.name.startswith("."):
                    yield from _search(entry, seen, say)
    except OSError as error:
        what = "link" if path.is_symlink() else "folder"
        say(f"{what} {path}: is passed over: {error.strerror or error}")


def _described(log: Path, resolved: Path) -> FoundLog:
    files: tuple[Path, ...] = (resolved,)
    name = log.name
    if resolved.is_dir():  # SQLite's shared memory changes when somebody reads
        files = tuple(
            sorted(
                file for file in resolved.rglob("*") if file.is_file() and not file.name.endswith("-shm")
            )
        )
        name = log.absolute().name
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        name = name.removesuffix(suffix)
    return FoundLog(
        resolved, _ODD.sub("_", name).lstrip(".") or "log", files, sum(os.stat(f).st_size for f in files)
    )


def _named(logs: Sequence[FoundLog], owner: Callable[[str], str]) -> tuple[FoundLog, ...]:
    """Names that differ.

    With their folder's and a part of the path's hash where two are the same, or one is taken.
    """
    count = Counter(log.name for log in logs)
    named = []
    for log in logs:
        of = owner(log.name)
        if of != str(log.path) and (count[log.name] > 1 or (of and Path(of).exists())):
            digest = hashlib.blake2b(str(log.path).encode(), digest_size=8).hexdigest()[:6]
            beside = _ODD.sub("_", log.path.parent.name).lstrip(".")
            # the same log
            log = replace(log, name=f"{beside}-{log.name}-{digest}".lstrip("-"))  # noqa: PLW2901
        named.append(log)
    return tuple(named)


SUMMARY_FILE, PAGE = "summary.json", "report.html"
# What the summary in the folder of a replayed log says that it is of.
KIND: Final = "replayed log"
_KIND_OF_ALL: Final = "replayed logs"
_VERSION: Final = 1
_WORST: Final = 8  # logs that are shown in detail on the page
# logs whose worst frames are shown: a picture is read from the log, and takes its place
_PICTURED: Final = 3
_FIGURES: Final = ("miss_ratio", "p50_ms", "p95_ms", "p99_ms", "max_ms", "budget_ms")
_COUNTS: Final = ("received", "superseded", "stale", "anomalies")
# What fails the same way again.
_LASTING: Final = (LogError, ConfigError, BatchError)
_LOOK_S: Final = 0.25
_LOG_BYTES: Final = 2 << 30
_HERE: Final = "127.0.0.1"
_ADDRESS: Final = re.compile(r"(tcp|tls)://\S+:\d+")
_CONNECT_S: Final = 15.0
_RETRIES: Final = 1  # how often Dask tries a log again that failed by what may not fail again
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


def read_summary(folder: Path, kind: str = KIND) -> dict[str, Any]:
    """The summary in a folder of results, of one log or of all; empty where there is none."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) and summary.get("kind") == kind else {}


def owner_in(results: Path) -> Callable[[str], str]:
    """Gives the path of the log that the results of a name belong to; "" if there are none."""
    return lambda name: str(read_summary(results / name).get("log", {}).get("path", ""))


def result_keys(logs: Sequence[FoundLog], options: ReplayOptions) -> dict[str, str]:
    """What the result of each log depends on, by name: a hash.

    Of the log its files' names, sizes and times of change; the options, parameters and step times; this
    version. Not of the code of an adapter.

    Raises:
        OSError: a file is gone, or one that the options name cannot be read.
    """
    times = Path(options.step_times)
    named = [options.params, times if options.step_times != "log" and times.is_file() else None]
    contents = [hashlib.blake2b(path.read_bytes()).hexdigest() for path in named if path is not None]
    values = {**asdict(options), "params": None}
    same = json.dumps([_VERSION, __version__, values, contents], sort_keys=True, default=str)
    keys = {}
    for log in logs:
        files = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in log.files]
        keys[log.name] = hashlib.blake2b(json.dumps([same, files]).encode(), digest_size=16).hexdigest()
    return keys


def finished(folder: Path, keys: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The summaries of those logs that have results of these keys, by name."""
    found = {name: read_summary(folder / name) for name in keys if (folder / name / RUN_FILE).is_file()}
    return {name: summary for name, summary in found.items() if summary.get("key") == keys[name]}


def check_results(logs: Sequence[FoundLog], results: Path) -> None:
    """See that no log, and nothing else that no replay wrote, gives way to results.

    Their folder need not be there.

    Raises:
        BatchError: it lies in a log, a log lies where results would, or something else does.
    """
    if results.exists() and not results.is_dir():
        raise BatchError(f"--output {results}: is a file; for several logs it has to be a folder")
    within = results.resolve()
    for log in logs:
        if within.is_relative_to(log.path):
            raise BatchError(f"--output {results}: lies in the log {log.path}; name another folder")
        final = within / log.name
        holds_a_log = any(other.path.is_relative_to(final.resolve()) for other in logs)
        _check_replaceable(final, bool(read_summary(final)) and not holds_a_log)
    ours = bool(read_summary(within, _KIND_OF_ALL))
    for name in (SUMMARY_FILE, PAGE):
        _check_replaceable(within / name, ours)


def _check_replaceable(path: Path, is_ours: bool) -> None:
    if (path.exists() or path.is_symlink()) and not is_ours:
        why = (
            f"results would replace {path}, which no replay of many logs wrote; name another folder, or"
            " move it away"
        )
        raise BatchError(f"--output {path.parent}: {why}")


@dataclass(frozen=True)
class LogTask:
    """What a worker gets: small, and paths that mean the same on every machine."""

    log: FoundLog
    options: ReplayOptions
    folder: Path  # of all results
    run_folder: Path  # in it that of this start, where what is not complete lies
    key: str  # see `result_keys`
    beside: int = 1  # so many logs are replayed on one machine at a time, this one among them

    @property
    def name(self) -> str:
        return f"{self.run_folder.name}-{self.log.name}"


@dataclass(frozen=True)
class Ended:
    """How a task ended: with results where `reason` is empty, else why not."""

    reason: str = ""
    lasting: bool = False  # whether it would fail again
    traceback: str = ""  # where in the code, for an unexpected error


def replay_one(task: LogTask) -> Ended:
    """Replay a log into its folder of results, which gets its name when all of it is there.

    Raises:
        Exception: it failed by what may not fail again.
    """
    if why := why_invisible(task.run_folder):
        return Ended(why, lasting=True)
    next_s = 0.0

    def look(_done_ns: int, _total_ns: int) -> None:
        """End the replay with the command: nothing else ends a task of a cluster that stays."""
        nonlocal next_s
        if (now_s := time.monotonic()) >= next_s:
            next_s = now_s + _LOOK_S
            if not task.run_folder.is_dir():
                raise TorchperfError("the command that started it has ended")

    part = task.run_folder / f"{task.log.name}.{secrets.token_hex(4)}"  # of this try
    part.mkdir()
    try:
        _replay_into(part, task, look)
    except _LASTING as error:
        return Ended(str(error), lasting=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Ended()


def why_invisible(folder: Path) -> str:
    """Why this machine cannot take part: it does not see the folder of results; "" if it does."""
    where = (
        "logs and results have to lie under the same path on a file system that all machines of the cluster"
        " share"
    )
    return "" if folder.is_dir() else f"{folder.parent} is not there on {socket.gethostname()}; {where}"


def _replay_into(part: Path, task: LogTask, progress: Progress) -> None:
    log, options = task.log, task.options
    if not log.path.exists():
        raise BatchError(f"log {log.path}: is not there on {socket.gethostname()}")
    config = read_config(options, log.path)
    if options.pace == "real" and task.beside == 1:
        prefer_this_process(config)
    troubles: list[str] = []
    began_s = time.monotonic()
    result = replay(log.path, sharing(options, config, task.beside), progress, troubles.append)
    if not result.complete:
        raise TorchperfError(troubles[-1])
    write_run(result.run, part / RUN_FILE)
    own = {
        "v": _VERSION,
        "kind": KIND,
        "key": task.key,
        "name": log.name,
        "seconds": time.monotonic() - began_s,
        "host": socket.gethostname(),
        "troubles": troubles,
        "stages": [
            {**of, "anomalies": len(result.stage(of["name"]).anomalies)} for of in result.summary["stages"]
        ],
    }
    _write_json(part / SUMMARY_FILE, {**result.summary, **own})
    final = task.folder / log.name
    # once more: it may have come while the log was replayed
    _check_replaceable(final, bool(read_summary(final)))
    if final.exists():
        final.rename(part.with_suffix(".old"))
    part.rename(final)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def sharing(options: ReplayOptions, config: NodeConfig, beside: int) -> ReplayOptions:
    """The same with the cores shared among the logs, unless the parameters set the threads."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // beside)
    if config.worker_threads or threads >= cores - 1:  # which is what a worker takes by itself
        return options
    return replace(options, overrides={**options.overrides, "worker_threads": threads})


def summary_rows(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each log and stage of these summaries by the log's name.

    The logs with the most misses first, among equal ones those with the longest p99.
    """

    def worst(rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [
            max((row[key] for row in rows if row[key] is not None), default=-1.0)
            for key in ("miss_ratio", "p99_ms")
        ]

    logs = [
        [
            {
                "name": name,
                "path": summary["log"]["path"],
                "stage": stage["name"],
                "frames": stage["answered"],
                **{key: stage[key] for key in (*_COUNTS, *_FIGURES)},
                "troubles": len(summary["troubles"]),
                "log_s": float(summary["log"]["duration_s"]),
                "seconds": float(summary["seconds"]),
            }
            for stage in summary["stages"]
        ]
        for name, summary in summaries.items()
    ]
    return [row for rows in sorted(logs, key=worst, reverse=True) for row in rows]


def write_summary(
    folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[FoundLog, Ended]
) -> None:
    """Write `summary.json`: the rows of `summary_rows`, and why the other logs have none.

    Raises:
        OSError: it cannot be written.
    """
    lost = [
        {"name": log.name, "path": str(log.path), "reason": how.reason, "traceback": how.traceback}
        for log, how in failed.items()
    ]
    with whole_file(folder / SUMMARY_FILE) as part:
        _write_json(part, {"v": _VERSION, "kind": _KIND_OF_ALL, "rows": rows, "failed": lost})


def write_page(folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[FoundLog, Ended]) -> str:
    """Write `report.html`.

    All logs in a table, and the worst in detail. Returns where it is, or why there is none.

    One run is in memory at a time, and those that are shown in detail.

    Raises:
        TorchperfError: a run cannot be read, or the page would be too large.
        OSError: a run is gone, or the page cannot be written.
    """
    if importlib.util.find_spec("plotly") is None:
        return "no page, as plotly is not installed: `pip install 'torchperf_ros[analysis]'`"
    from torchperf_ros.observe.runs.report import Overview, OverviewRow, stage_figures, write_report
    from torchperf_ros.observe.runs.run_log import RunLog
    from torchperf_ros.replay.run_reading import input_pictures, read_runs

    names = list(dict.fromkeys(row["name"] for row in rows))
    anomalies = {(row["name"], row["stage"]): row["anomalies"] for row in rows}
    detailed: list[RunLog] = []
    shown: list[OverviewRow] = []
    for name in names:
        (run,) = read_runs(folder / name, lambda _done, _total: None)
        shown += [OverviewRow(name, s.name, stage_figures(s), anomalies[name, s.name]) for s in run.stages]
        if len(detailed) < _WORST:
            detailed.append(run if len(detailed) < _PICTURED else replace(run, recordings=()))
    lost = [(log.name, how.reason) for log, how in failed.items()]
    title = f"{len(names):,} of {len(names) + len(failed):,} logs in {folder.resolve().name}"
    write_report(detailed, folder / PAGE, lambda _: None, input_pictures, Overview(shown, lost, title))
    return f"all of them on a page: {folder / PAGE}"


@dataclass(frozen=True)
class BatchOptions:
    folder: Path  # where the results go, a folder for each log; made if it is not there
    parallel: int = 0  # so many logs at a time on this machine; 0: as `default_parallel` says
    # address of a Dask scheduler, for example `tcp://10.0.0.5:8786`; "": a cluster on this machine
    scheduler: str = ""


def default_parallel(pace: str, cores: int, available_bytes: int) -> int:
    """How many logs this machine replays at a time by default: one for each core that memory is there for.

    A log takes up to 2 GiB: two stages with two worker processes each. At the pace `real` it is one log, as
    its latencies would otherwise be those of a machine that has other things to do.
    """
    return 1 if pace == "real" else max(1, min(cores, available_bytes // _LOG_BYTES))


@contextlib.contextmanager
def open_cluster(batch: BatchOptions, pace: str, logs: int) -> Iterator[tuple["Client", int]]:
    """Start a cluster on this machine, or reach the one that `batch` names; for that many logs at most.

    Gives its client, and how many logs it replays on one machine at a time at most.

    Raises:
        BatchError: it cannot be reached, or has no worker.
    """
    import dask
    import distributed  # noqa: F401 - brings its defaults, which the settings below replace

    with dask.config.set(_QUIET), contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # Dask logs comings and goings; the command shows them, once
        found = _reached(stack, batch) if batch.scheduler else _started(stack, batch, pace, logs)
        stack.enter_context(found[0].as_current())
        try:
            yield found
        finally:
            with _signals_held():  # a second Ctrl-C does not leave workers behind
                stack.close()


def _started(
    stack: contextlib.ExitStack, batch: BatchOptions, pace: str, logs: int
) -> tuple["Client", int]:
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
        return stack.enter_context(Client(cluster, set_as_default=False)), parallel


def _reached(stack: contextlib.ExitStack, batch: BatchOptions) -> tuple["Client", int]:
    from distributed import Client
    from distributed import TimeoutError as Overdue

    if not _ADDRESS.fullmatch(batch.scheduler):
        raise BatchError(f"--parallel {batch.scheduler}: has to be an address like tcp://10.0.0.5:8786")
    try:
        client = stack.enter_context(Client(batch.scheduler, timeout=_CONNECT_S, set_as_default=False))
    except (OSError, ValueError, Overdue) as error:
        raise BatchError(f"--parallel {batch.scheduler}: no scheduler answers there: {error}") from error
    with contextlib.suppress(Overdue):
        client.wait_for_workers(1, timeout=30.0)
    hosts = Counter(worker["host"] for worker in client.scheduler_info(n_workers=-1)["workers"].values())
    if not hosts:
        example = f"dask worker {batch.scheduler} --nworkers 1 --nthreads 1"
        raise BatchError(
            f"--parallel {batch.scheduler}: has no worker; start some, on each machine: `{example}`"
        )
    return client, max(hosts.values())


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


def replay_on(client: "Client", tasks: Sequence[LogTask], ended: Callable[[FoundLog, Ended], None]) -> None:
    """Replay logs on a cluster, which tries again what fails or loses its worker.

    Afterwards no task goes on. `ended` gets how a log ended.

    Raises:
        BatchError: a machine of the cluster does not see the folder of results.
        KeyboardInterrupt: the user does not want to wait.
    """
    from distributed import as_completed

    for worker, why in client.run(why_invisible, tasks[0].run_folder).items():
        if why:
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
    if future.status != "error":  # the scheduler is gone, or knows nothing of it any more
        return Ended("the connection to the scheduler was lost")
    error = future.exception()
    if isinstance(error, KilledWorker):
        return Ended("its worker was lost: killed, perhaps for want of memory")
    if isinstance(error, TorchperfError):
        return Ended(str(error))
    calls = traceback.format_exception(type(error), error, future.traceback())
    return Ended(f"{type(error).__name__}: {error}", traceback="".join(calls))
