"""Many logs side by side.

The entry point behind `torchperf replay LOG LOG...` and `torchperf replay FOLDER`.
"""

import contextlib
import dataclasses
import fcntl
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.text import console_table, percent
from torchperf_ros.replay import batch_tasks as results
from torchperf_ros.replay.batch_tasks import (
    BatchError,
    BatchOptions,
    FoundLog,
    find_logs,
    open_cluster,
    replay_on,
)
from torchperf_ros.replay.replay_options import ReplayOptions, read_config
from torchperf_ros.stage.health import too_many_superseded

_RUN: Final = ".run-"
_MIB: Final = 1 << 20
_PLAIN_WIDTH: Final = 120
_MOST_ROWS: Final = 40
# `notes`: how many things were wrong with a log and could be done without.
_HEADS: Final = (
    *("log", "stage", ">frames", ">missed", ">p50", ">p99", ">anomalies"),
    *(">notes", ">took s", ">log s"),
)


def plan_batch(paths: Sequence[Path], options: ReplayOptions, batch: BatchOptions) -> Iterator[str]:
    """What would be replayed and what is done, a line for each log, and one for all.

    Raises:
        TorchperfError: there is no log, or an option is not allowed.
        OSError: a file of the options cannot be read.
    """
    passed_over: list[str] = []
    logs, keys = _found(paths, _for_workers(options), batch, passed_over.append)
    kept = results.finished(batch.folder, keys)
    yield from passed_over
    for log in logs:
        near = log.path.relative_to(Path.cwd()) if log.path.is_relative_to(Path.cwd()) else log.path
        size = f"{log.size_bytes / _MIB:,.1f} MiB"
        yield f"{'done' if log.name in kept else 'replay':6} {size:>12}  {log.name}  {near}"
    size = f"{sum(log.size_bytes for log in logs) / _MIB:,.1f} MiB"
    yield f"{len(logs) - len(kept)} of {len(logs)} logs to replay, {size} in all"


def replay_batch(
    paths: Sequence[Path], options: ReplayOptions, batch: BatchOptions, bars: Progress, shown: Console
) -> int:
    """Replay logs side by side.

    What is done is kept, what fails stops nothing. After Ctrl-C the next start goes on.

    Returns the exit status: 0 if every log has its results and its answers, 2 if no log can be used, else 1.

    Progress and what fails go to the `bars`, on standard error, the table to `shown`. `options.output` is
    not used.

    Raises:
        TorchperfError: nothing can be replayed like this: no log, a bad option, no cluster.
        OSError: the folder of results cannot be written.
    """
    errors = bars.console
    say = functools.partial(errors.print, highlight=False, markup=False, soft_wrap=True)
    options = _for_workers(options)
    read_config(options)  # an error for every log comes before one is looked at
    logs, keys = _found(paths, options, batch, say)
    batch.folder.mkdir(parents=True, exist_ok=True)
    folder = batch.folder.resolve()
    ended: dict[FoundLog, results.Ended] = {}
    interrupted = False
    with _own(folder) as run_folder:
        kept = results.finished(folder, keys)
        if kept:
            say(f"{len(kept)} of {len(logs)} logs are done already; remove a log's folder to replay it")
        tasks = [
            results.LogTask(log, options, folder, run_folder, keys[log.name])
            for log in sorted(logs, key=lambda log: -log.size_bytes)  # the longest one does not begin last
            if log.name not in kept
        ]
        try:
            if tasks:
                _replay(tasks, batch, bars, say, ended)
        except KeyboardInterrupt:
            interrupted = True
            say("interrupted: what is done is kept, and the same command goes on from there")
        failed = {log: how for log, how in ended.items() if how.reason}
        done = {*kept, *(log.name for log in ended)}
        summaries = results.finished(folder, {name: key for name, key in keys.items() if name in done})
        rows = results.summary_rows(summaries)
        results.write_summary(folder, rows, failed)
        text = f"{len(summaries):,} of {len(logs):,} logs have results in {folder}"
        if rows:
            if not shown.is_terminal:  # a file is as wide as it needs to be
                shown.width = max(shown.width, _PLAIN_WIDTH)
            shown.print("times in ms, the worst log first")
            shown.print(console_table(_HEADS, _cells(rows[:_MOST_ROWS])))
            if more := rows[_MOST_ROWS:]:
                shown.print(f"{len(more):,} more rows in {results.SUMMARY_FILE}")
            try:
                text += f"; {results.write_page(folder, rows, failed)}"
            except (TorchperfError, OSError) as error:
                text += f"; no page: {error}"
        slow = {
            row["name"]: None for row in rows if too_many_superseded(row["received"], row["superseded"])
        }
        if slow:
            text += f"; more than a tenth of the frames had no answer in {', '.join(slow)}"
        shown.print(text, highlight=False, markup=False, soft_wrap=True)
    if failed and not summaries and not interrupted and all(how.lasting for how in failed.values()):
        return 2
    return 1 if failed or slow or interrupted else 0


def _for_workers(options: ReplayOptions) -> ReplayOptions:
    params = None if options.params is None else options.params.resolve()
    times = options.step_times if options.step_times == "log" else str(Path(options.step_times).resolve())
    return dataclasses.replace(options, params=params, step_times=times, output=None)


def _found(
    paths: Sequence[Path], options: ReplayOptions, batch: BatchOptions, say: Callable[[str], None]
) -> tuple[Sequence[FoundLog], dict[str, str]]:
    logs = find_logs(paths, results.owner_in(batch.folder), say)
    results.check_results(logs, batch.folder)
    return logs, results.result_keys(logs, options)


def _replay(
    tasks: Sequence[results.LogTask],
    batch: BatchOptions,
    bars: Progress,
    say: Callable[[str], None],
    ended: dict[FoundLog, results.Ended],
) -> None:
    bar = bars.add_task("", total=sum(max(1.0, task.log.size_bytes) for task in tasks), at="")

    def note(log: FoundLog, how: results.Ended) -> None:
        ended[log] = how
        if how.reason or bars.disable:
            outcome = f"failed: {how.reason}" if how.reason else "done"
            say(f"[{len(ended)}/{len(tasks)}] {log.name}: {outcome}")
        done = f"{len(ended)} of {len(tasks)} logs"
        bars.update(bar, advance=max(1.0, log.size_bytes), description=done)

    with open_cluster(batch, tasks[0].options.pace, len(tasks)) as (client, beside), bars:
        replay_on(client, [dataclasses.replace(task, beside=beside) for task in tasks], note)


def _cells(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:,.1f}"

    before = ""
    for row in rows:
        missed = "-" if row["miss_ratio"] is None else percent(row["miss_ratio"], 2)
        of_log = [row["name"], f"{row['troubles']:,}", cell(row["seconds"]), cell(row["log_s"])]
        name, *own = of_log if row["name"] != before else [""] * len(of_log)
        before = row["name"]
        figures = [missed, cell(row["p50_ms"]), cell(row["p99_ms"]), f"{row['anomalies']:,}"]
        yield [name, row["stage"], f"{row['frames']:,}", *figures, *own]


@contextlib.contextmanager
def _own(folder: Path) -> Iterator[Path]:
    """A folder for what is not complete; gone at the end, as are those of starts that were killed.

    Raises:
        BatchError: another command writes its results there.
    """
    with open(folder / ".lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(
                f"--output {folder}: another replay writes there now; wait for it, or name another folder"
            ) from None
        for old in folder.glob(_RUN + "[0-9a-f]" * 8):
            shutil.rmtree(old, ignore_errors=True)
        run_folder = folder / f"{_RUN}{secrets.token_hex(4)}"
        run_folder.mkdir()
        try:
            yield run_folder
        finally:
            shutil.rmtree(run_folder, ignore_errors=True)
