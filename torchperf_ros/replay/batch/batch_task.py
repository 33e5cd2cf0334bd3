"""One log of many, from its bytes to its folder of results; runs in a worker process of the cluster."""

import json
import os
import shutil
import socket
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from torchperf_ros.config.config import NodeConfig
from torchperf_ros.frame.errors import ConfigError, TorchperfError
from torchperf_ros.logs.log_storage import LogError
from torchperf_ros.replay.batch.batch_logs import BatchError, FoundLog
from torchperf_ros.replay.batch.batch_results import KIND, OUTPUT_FILE, SUMMARY_FILE, check_replaceable, read_summary
from torchperf_ros.replay.replay import Progress, replay
from torchperf_ros.replay.replay_options import ReplayOptions, prefer_this_process, read_config
from torchperf_ros.runs.run_file import RUN_FILE, write_run

_VERSION: Final = 1
_LASTING: Final = (LogError, ConfigError, BatchError)
"""What fails the same way again."""


@dataclass(frozen=True)
class LogTask:
    """What a worker gets: small, and paths that mean the same on every machine.

    Attributes:
        log: what to replay.
        options: how.
        folder: of all results.
        run_folder: of this start of the command, in `folder`: what is not complete lies there.
        key: see `result_key`.
        attempt: 0, 1, ...
        keep_output: whether to write what was published.
        beside: so many logs are replayed on one machine at a time, this one among them.
    """

    log: FoundLog
    options: ReplayOptions
    folder: Path
    run_folder: Path
    key: str
    attempt: int = 0
    keep_output: bool = False
    beside: int = 1


@dataclass(frozen=True)
class Ended:
    """How a task ended: "" or why it failed, whether it would fail again, and where in the code if that is unknown."""

    reason: str = ""
    lasting: bool = False
    traceback: str = ""


def replay_one(task: LogTask, progress: Progress = lambda _done, _total: None) -> Ended:
    """Replay a log into its folder of results, which gets its name when all of it is there."""
    part = task.run_folder / f"{task.log.name}.{task.attempt}"
    try:
        if why := why_invisible(task.run_folder):
            return Ended(why, lasting=True)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        return _replay_into(part, task, progress)
    except TorchperfError as error:
        return Ended(str(error), isinstance(error, _LASTING))
    except Exception as error:  # the task's boundary: the command shows it
        return Ended(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    finally:
        shutil.rmtree(part, ignore_errors=True)


def why_invisible(folder: Path) -> str:
    """Why this machine cannot take part: it does not see the folder of results; "" if it does."""
    where = "logs and results have to lie under the same path on a file system that all machines of the cluster share"
    return "" if folder.is_dir() else f"{folder.parent} is not there on {socket.gethostname()}; {where}"


def _replay_into(part: Path, task: LogTask, progress: Progress) -> Ended:
    log = task.log
    if not log.path.exists():
        return Ended(f"log {log.path}: is not there on {socket.gethostname()}", lasting=True)
    options = replace(task.options, output=part / OUTPUT_FILE if task.keep_output else None)
    config = read_config(options, log.path)
    if options.pace == "real" and task.beside == 1:
        prefer_this_process(config)
    troubles: list[str] = []
    began_s = time.monotonic()
    result = replay(log.path, sharing(options, config, task.beside), progress, troubles.append)
    if not result.complete:
        return Ended(troubles[-1])
    write_run(result.run, part / RUN_FILE)
    summary = {
        **result.summary, "v": _VERSION, "kind": KIND, "key": task.key, "name": log.name,
        "seconds": time.monotonic() - began_s, "host": socket.gethostname(), "attempt": task.attempt,
        "anomalies": len(result.anomalies), "troubles": troubles,
        "stages": [{**of, "anomalies": len(result.stage(of["name"]).anomalies)} for of in result.summary["stages"]],
        "files": {file.name: file.stat().st_size for file in part.iterdir()},
    }  # fmt: skip
    (part / SUMMARY_FILE).write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    final = task.folder / log.name
    check_replaceable(final, bool(read_summary(final)))  # once more: it may have come while the log was replayed
    if final.exists():
        final.rename(task.run_folder / f"{log.name}.{task.attempt}.old")
    part.rename(final)
    return Ended()


def sharing(options: ReplayOptions, config: NodeConfig, beside: int) -> ReplayOptions:
    """The same with this machine's cores shared among the logs, unless the parameters say how many threads it is."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // beside)
    if config.worker_threads or threads >= cores - 1:  # which is what a worker takes by itself
        return options
    return replace(options, overrides={**options.overrides, "worker_threads": threads})
