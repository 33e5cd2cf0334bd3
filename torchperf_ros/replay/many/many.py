"""Many logs side by side: the entry point behind `torchperf replay LOG LOG...` and `torchperf replay FOLDER`."""

import contextlib
import dataclasses
import fcntl
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.many.many_cluster import check_installed, open_cluster
from torchperf_ros.replay.many.many_logs import FoundLog, ManyError, check_results, duration_s, find_logs, is_log
from torchperf_ros.replay.many.many_options import ManyOptions
from torchperf_ros.replay.many.many_results import finished, options_key, result_key
from torchperf_ros.replay.many.many_run import ManyRun
from torchperf_ros.replay.many.many_summary import check_summary, summary_rows, write_page, write_summary
from torchperf_ros.replay.many.many_task import Ended, LogTask
from torchperf_ros.replay.replay_config import read_config
from torchperf_ros.replay.replay_options import ReplayOptions

if TYPE_CHECKING:
    from rich.console import Console

_RUN: Final = ".run-"
_OF_RUNS: Final = _RUN + "[0-9a-f]" * 8
_LOCK: Final = ".lock"
_MIB: Final = 1 << 20
_PLAIN_WIDTH: Final = 120


@dataclass(frozen=True)
class ManyResult:
    """What became of many logs.

    Attributes:
        replayed: names of those that were replayed now.
        kept: names of those that had been replayed before.
        failed: why the others were not, by name.
        unusable: whether no log has results, as none can be used like this.
        interrupted: whether the user ended it.
        folder: of the results.
    """

    replayed: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    unusable: bool = False
    interrupted: bool = False
    folder: Path = Path()

    @property
    def status(self) -> int:
        """The exit status: 0 if every log has its results, 2 if none can be used, else 1."""
        return 2 if self.unusable else 1 if self.failed or self.interrupted else 0


def is_many(paths: Sequence[Path]) -> bool:
    """Whether these are several logs, or a folder to search, and not one log."""
    return len(paths) > 1 or (paths[0].is_dir() and not is_log(paths[0]))


def plan_many(paths: Sequence[Path], options: ReplayOptions, many: ManyOptions) -> Iterator[str]:
    """What would be replayed and what is done, a line for each log, and one for all.

    Raises:
        TorchperfError: there is no log, or an option is not allowed.
        OSError: a file of the options cannot be read.
    """
    passed_over: list[str] = []
    logs = find_logs(paths, many.folder, passed_over.append)
    check_results(logs, many.folder)
    check_summary(many.folder)
    of_options, left = options_key(_absolute(options), many.keep_output), 0
    yield from passed_over
    for log in logs:
        done = not many.fresh and finished(many.folder / log.name, result_key(log, of_options)) is not None
        left += not done
        length = "" if (seconds := duration_s(log)) is None else f"{seconds:,.1f} s"
        size = f"{log.size_bytes / _MIB:,.1f} MiB"
        yield f"{'done' if done else 'replay':6} {size:>12} {length:>10}  {log.name}  {_near(log.path)}"
    yield f"{left} of {len(logs)} logs to replay, {sum(log.size_bytes for log in logs) / _MIB:,.1f} MiB in all"


def replay_many(
    paths: Sequence[Path], options: ReplayOptions, many: ManyOptions, told: "Console", shown: "Console"
) -> ManyResult:
    """Replay logs side by side; what is done already is kept, what fails stops nothing.

    Ctrl-C and SIGTERM end it; the next start goes on from there.

    Args:
        paths: logs, and folders to search.
        options: how to replay each; `output` is not used.
        many: where to, how many at a time, and the rest.
        told: for progress and what fails; standard error.
        shown: for the table.

    Raises:
        TorchperfError: nothing can be replayed like this: no log, a bad option, no cluster.
        OSError: the folder of results cannot be written.
    """
    check_installed()

    def say(text: str) -> None:
        told.print(text, highlight=False, markup=False, soft_wrap=True)

    options = _absolute(options)
    read_config(options)  # what is wrong for every log is told before one is looked at
    of_options = options_key(options, many.keep_output)
    logs = find_logs(paths, many.folder, say)
    check_results(logs, many.folder)
    check_summary(many.folder)
    many.folder.mkdir(parents=True, exist_ok=True)
    many = dataclasses.replace(many, folder=many.folder.resolve())
    with _own(many.folder) as run_folder:
        keys = {log.name: result_key(log, of_options) for log in logs}
        done = {log.name: finished(many.folder / log.name, keys[log.name]) for log in logs} if not many.fresh else {}
        kept = {name: summary for name, summary in done.items() if summary is not None}
        if kept:
            say(f"{len(kept)} of {len(logs)} logs are done already; --fresh replays them, too")
        tasks = [
            LogTask(log, options, many.folder, run_folder, keys[log.name], keep_output=many.keep_output)
            for log in sorted(logs, key=lambda log: -log.size_bytes)  # the longest one does not begin last
            if log.name not in kept
        ]
        ended: dict[str, Ended] = {}
        interrupted = False
        try:
            if tasks:
                _replay(tasks, many, told, ended)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: what is done is kept, and the same command goes on from there")
        failed = {task.log.name: (task.log, ended[task.log.name]) for task in tasks if _failed(ended, task)}
        replayed = tuple(name for name, how in ended.items() if not how.reason)
        summaries = {
            name: summary
            for name in (*kept, *replayed)
            if (summary := finished(many.folder / name, keys[name])) is not None
        }
        _tell(len(logs), summaries, failed, many, told, shown)
    reasons = {name: how.reason for name, (_, how) in failed.items()}
    unusable = bool(failed) and not summaries and not interrupted and all(how.lasting for _, how in failed.values())
    return ManyResult(replayed, tuple(kept), reasons, unusable, interrupted, many.folder)


def _replay(tasks: Sequence[LogTask], many: ManyOptions, console: "Console", ended: dict[str, Ended]) -> None:
    from torchperf_ros.replay.many.many_view import ManyView

    with (
        _terminated_like_ctrl_c(),
        open_cluster(many, tasks[0].options.pace, len(tasks)) as cluster,
        ManyView(console, [task.log for task in tasks]) as view,
    ):
        if cluster.dashboard:
            console.print(f"dashboard: {cluster.dashboard}", highlight=False, markup=False, soft_wrap=True)
        run = ManyRun(cluster, view, many.retries, many.timeout_s)
        run.run([dataclasses.replace(task, beside=cluster.beside) for task in tasks], ended)


def _failed(ended: Mapping[str, Ended], task: LogTask) -> bool:
    return task.log.name in ended and bool(ended[task.log.name].reason)


def _tell(
    logs: int, summaries: Mapping[str, Mapping[str, Any]], failed: Mapping[str, tuple[FoundLog, Ended]],
    many: ManyOptions, told: "Console", shown: "Console",
) -> None:  # fmt: skip
    """Write and show what all of it came to."""
    from torchperf_ros.replay.many.many_view import summary_table

    rows = summary_rows(summaries)
    if rows:
        if not shown.is_terminal:  # a file is as wide as it needs to be
            shown.width = max(shown.width, _PLAIN_WIDTH)
        shown.print(summary_table(rows))
    write_summary(many.folder, rows, failed)
    page = ""
    if rows:
        with told.status("writing the page") if told.is_terminal else contextlib.nullcontext():
            try:
                page = write_page(many.folder, rows, failed, many.worst)
            except (TorchperfError, OSError) as error:
                page = f"no page: {error}"
    count = f"{len(summaries):,} of {logs:,} logs have results in {many.folder}"
    shown.print(f"{count}; {page}" if page else count, highlight=False, markup=False, soft_wrap=True)


def _near(path: Path) -> Path:
    """As seen from here, if it is below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _absolute(options: ReplayOptions) -> ReplayOptions:
    """The same for a process that runs elsewhere."""
    params = None if options.params is None else options.params.resolve()
    times = options.step_times if options.step_times == "log" else str(Path(options.step_times).resolve())
    return dataclasses.replace(options, params=params, step_times=times, output=None)


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """A folder for what is not complete; gone at the end, as are those of starts that were killed.

    Raises:
        ManyError: another command writes its results there.
    """
    with open(folder / _LOCK, "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = f"--output {folder}: another replay writes there now; wait for it, or name another folder"
            raise ManyError(msg) from None
        for old in folder.glob(_OF_RUNS):
            shutil.rmtree(old, ignore_errors=True)
        run_folder = folder / f"{_RUN}{secrets.token_hex(4)}"
        run_folder.mkdir()
        try:
            yield run_folder
        finally:
            shutil.rmtree(run_folder, ignore_errors=True)


@contextlib.contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
