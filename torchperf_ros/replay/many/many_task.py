"""One log of many, from its bytes to its folder of results; runs in a worker process of the cluster."""

import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.core.config import NodeConfig
from torchperf_ros.core.errors import ConfigError, TorchperfError
from torchperf_ros.core.run_file import write_run
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.many.many_logs import (
    KIND,
    OUTPUT_FILE,
    RUN_FILE,
    SUMMARY_FILE,
    FoundLog,
    ManyError,
    check_replaceable,
)
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_config import prefer_this_process, read_config
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_result import ReplayResult

VERSION: Final = 1
_LASTING: Final = (LogError, ConfigError, ManyError)
"""What fails the same way again."""
_TOLD_EVERY_S: Final = 0.25
_LINE: Final = 63


class TakenAway(TorchperfError):
    """Whoever had asked for this result no longer wants it."""


@dataclass(frozen=True)
class LogTask:
    """What a worker is told: small, and paths that mean the same on every machine.

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

    @property
    def progress_file(self) -> Path:
        """There while the task runs: done and total ns, and the worker's address; who removes it ends the task."""
        return self.run_folder / f"{self.log.name}.{self.attempt}.progress"


@dataclass(frozen=True)
class Ended:
    """How a task ended: "" or why it failed, whether it would fail again, and where in the code if that is unknown."""

    reason: str = ""
    lasting: bool = False
    traceback: str = ""


def replay_one(task: LogTask, worker: str = "") -> Ended:
    """Replay a log into its folder of results, which gets its name when all of it is there.

    Args:
        task: what to do.
        worker: address of the worker that this runs in, for whoever watches.
    """
    part = task.run_folder / f"{task.log.name}.{task.attempt}"
    try:
        check_visible(task.run_folder)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _replay_into(part, task, worker)
    except TorchperfError as error:
        return Ended(str(error), isinstance(error, _LASTING))
    except Exception as error:  # the task's boundary: whoever asked for it tells
        return Ended(f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    finally:
        task.progress_file.unlink(missing_ok=True)
        shutil.rmtree(part, ignore_errors=True)
    return Ended()


def check_visible(folder: Path) -> None:
    """Look whether this machine sees a folder.

    Raises:
        ManyError: it does not.
    """
    if not folder.is_dir():
        msg = (
            f"{folder.parent} is not there on {socket.gethostname()}; logs and results have to lie under the same path "
            "on a file system that all machines of the cluster share"
        )
        raise ManyError(msg)


def read_progress(file: Path) -> tuple[int, int, str]:
    """Done and total ns of the log, and the worker's address.

    Raises:
        OSError, ValueError: the task has not begun, or is over.
    """
    done, total, worker = file.read_text(encoding="ascii").split(" ", 2)
    return int(done), int(total), worker.strip()


def _replay_into(part: Path, task: LogTask, worker: str) -> None:
    log = task.log
    if not log.path.exists():
        msg = f"log {log.path}: is not there on {socket.gethostname()}"
        raise LogError(msg)
    options = replace(task.options, output=part / OUTPUT_FILE if task.keep_output else None)
    config = read_config(options, log.path)
    if options.pace == "real" and task.beside == 1:
        prefer_this_process(config)
    tell = _teller(task.progress_file, worker)
    troubles: list[str] = []
    began_s = time.monotonic()
    result = replay(log.path, sharing(options, config, task.beside), tell, troubles.append)
    if not result.complete:
        msg = f"log {log.path}: its replay was interrupted"
        raise TakenAway(msg)
    write_run(result.run, part / RUN_FILE)
    summary = _summary(task, result, part, troubles, time.monotonic() - began_s)
    (part / SUMMARY_FILE).write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if not task.progress_file.exists():
        raise TakenAway(_taken_away(task.progress_file))
    final = task.folder / log.name
    check_replaceable(final)  # once more: it may have come while the log was replayed
    if final.exists():
        final.rename(task.run_folder / f"{log.name}.{task.attempt}.old")
    part.rename(final)


def sharing(options: ReplayOptions, config: NodeConfig, beside: int) -> ReplayOptions:
    """The same with this machine's cores shared among the logs, unless the parameters say how many threads it is."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // beside)
    if config.worker_threads or threads >= cores - 1:  # which is what a worker takes by itself
        return options
    return replace(options, overrides={**options.overrides, "worker_threads": threads})


def _teller(file: Path, worker: str) -> Callable[[int, int], None]:
    """Writes to the file how far the task is, now and then, and ends the task if the file is gone."""
    file.write_text(f"{f'0 0 {worker}':<{_LINE}}\n", encoding="ascii")
    told_s = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s < _TOLD_EVERY_S:
            return
        told_s = time.monotonic()
        try:
            with file.open("r+", encoding="ascii") as line:  # does not make it anew
                line.write(f"{f'{done} {total} {worker}':<{_LINE}}\n")
        except FileNotFoundError:
            raise TakenAway(_taken_away(file)) from None

    return tell


def _taken_away(file: Path) -> str:
    return f"{file.stem}: nobody waits for it any more"


def _summary(task: LogTask, result: ReplayResult, part: Path, troubles: list[str], seconds: float) -> Mapping[str, Any]:
    """What `OUT_DIR/summary.json` and the table are made of; the frames and the anomalies stand in the run."""
    found = {name: len(stage.anomalies) for name, stage in result.stages.items()}
    stages = [{**stage, "anomalies": found[stage["name"]]} for stage in result.summary["stages"]]
    sizes = {name: (part / name).stat().st_size for name in (RUN_FILE, OUTPUT_FILE) if (part / name).exists()}
    return {
        **result.summary, "v": VERSION, "kind": KIND, "key": task.key, "name": task.log.name, "seconds": seconds,
        "host": socket.gethostname(), "attempt": task.attempt, "anomalies": len(result.anomalies),
        "troubles": troubles, "stages": stages, "files": sizes,
    }  # fmt: skip
