"""Many logs side by side.

The entry point behind `torchperf replay LOG LOG...` and `torchperf replay FOLDER`.
"""

import contextlib
import dataclasses
import fcntl
import functools
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.text import percent
from torchperf_ros.replay.batch import batch_results as results
from torchperf_ros.replay.batch.batch_cluster import BatchOptions, open_cluster, replay_on
from torchperf_ros.replay.batch.batch_logs import BatchError, FoundLog, find_logs
from torchperf_ros.replay.replay_options import ReplayOptions, read_config
from torchperf_ros.stage.health import too_many_superseded

_RUN: Final = ".run-"
_MIB: Final = 1 << 20
_PLAIN_WIDTH: Final = 120
_MOST_ROWS: Final = 40


@dataclass(frozen=True)
class BatchResult:
    """What became of many logs.

    Names of those replayed now and before, and why the others were not, by name.

    `too_slow`: the logs of which a stage left more than a tenth of its frames without an answer.
    `unusable`: no log has results, as none can be used like this. `interrupted`: the user ended it.
    """

    replayed: tuple[str, ...]
    kept: tuple[str, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    too_slow: tuple[str, ...] = ()
    unusable: bool = False
    interrupted: bool = False

    @property
    def status(self) -> int:
        """The exit status.

        0 if every log has its results and its answers, 2 if none can be used, else 1.
        """
        return 2 if self.unusable else 1 if self.failed or self.too_slow or self.interrupted else 0


def plan_batch(paths: Sequence[Path], options: ReplayOptions, batch: BatchOptions) -> Iterator[str]:
    """What would be replayed and what is done, a line for each log, and one for all.

    Raises:
        TorchperfError: there is no log, or an option is not allowed.
        OSError: a file of the options cannot be read.
    """
    passed_over: list[str] = []
    logs, keys = _found(paths, _for_workers(options, batch), batch, passed_over.append)
    kept = {} if batch.fresh else results.finished(batch.folder, keys)
    yield from passed_over
    for log in logs:
        near = log.path.relative_to(Path.cwd()) if log.path.is_relative_to(Path.cwd()) else log.path
        size = f"{log.size_bytes / _MIB:,.1f} MiB"
        yield f"{'done' if log.name in kept else 'replay':6} {size:>12}  {log.name}  {near}"
    size = f"{sum(log.size_bytes for log in logs) / _MIB:,.1f} MiB"
    yield f"{len(logs) - len(kept)} of {len(logs)} logs to replay, {size} in all"


def replay_batch(
    paths: Sequence[Path], options: ReplayOptions, batch: BatchOptions, bars: Progress, shown: Console
) -> BatchResult:
    """Replay logs side by side.

    What is done is kept, what fails stops nothing. After Ctrl-C the next start goes on.

    Progress and what fails go to the `bars`, on standard error, the table to `shown`. `options.output` is
    not used.

    Raises:
        TorchperfError: nothing can be replayed like this: no log, a bad option, no cluster.
        OSError: the folder of results cannot be written.
    """
    told = bars.console
    say = functools.partial(told.print, highlight=False, markup=False, soft_wrap=True)
    options = _for_workers(options, batch)
    read_config(options)  # an error for every log comes before one is looked at
    logs, keys = _found(paths, options, batch, say)
    batch.folder.mkdir(parents=True, exist_ok=True)
    folder = batch.folder.resolve()
    ended: dict[FoundLog, results.Ended] = {}
    interrupted = False
    with _own(folder) as run_folder:
        kept = {} if batch.fresh else results.finished(folder, keys)
        if kept:
            say(f"{len(kept)} of {len(logs)} logs are done already; --fresh replays them, too")
        tasks = [
            results.LogTask(log, options, folder, run_folder, keys[log.name], batch.timeout_s)
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
        summaries = results.finished(
            folder, {name: keys[name] for name in [*kept, *(log.name for log in ended)]}
        )
        rows = results.summary_rows({name: summaries[name] for name in keys if name in summaries})
        results.write_summary(folder, rows, failed)
        text = f"{len(summaries):,} of {len(logs):,} logs have results in {folder}"
        if rows:
            if not shown.is_terminal:  # a file is as wide as it needs to be
                shown.width = max(shown.width, _PLAIN_WIDTH)
            shown.print(_table(rows))
            with told.status("writing the page") if told.is_terminal else contextlib.nullcontext():
                try:
                    text += f"; {results.write_page(folder, rows, failed)}"
                except (TorchperfError, OSError) as error:
                    text += f"; no page: {error}"
        too_slow = [row["name"] for row in rows if too_many_superseded(row["received"], row["superseded"])]
        if too_slow:
            text += (
                f"; more than a tenth of the frames had no answer in {', '.join(dict.fromkeys(too_slow))}"
            )
        shown.print(text, highlight=False, markup=False, soft_wrap=True)
    reasons = {log.name: how.reason for log, how in failed.items()}
    unusable = (
        bool(failed) and not summaries and not interrupted and all(how.lasting for how in failed.values())
    )
    replayed = tuple(log.name for log in ended if log not in failed)
    return BatchResult(replayed, tuple(kept), reasons, tuple(too_slow), unusable, interrupted)


def _for_workers(options: ReplayOptions, batch: BatchOptions) -> ReplayOptions:
    params = None if options.params is None else options.params.resolve()
    times = options.step_times if options.step_times == "log" else str(Path(options.step_times).resolve())
    output = Path(results.OUTPUT_FILE) if batch.keep_output else None
    return dataclasses.replace(options, params=params, step_times=times, output=output)


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
    with open_cluster(batch, tasks[0].options.pace, len(tasks)) as cluster:
        sharing = [dataclasses.replace(task, beside=cluster.beside) for task in tasks]
        with bars:
            shown = _Bars(bars, say, [task.log for task in tasks], ended)
            replay_on(cluster, sharing, batch, shown.ended, shown.progress)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """The first 40 rows of `summary_rows`.

    The worst. `notes`: what was wrong with a log and could be done without.
    """
    table = Table(
        title="times in ms, the worst log first", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("log", overflow="fold", min_width=20)
    table.add_column("stage", no_wrap=True)
    for name in ("frames", "missed", "p50", "p99", "anomalies", "notes", "seconds", "speed"):
        table.add_column(name, justify="right", no_wrap=True)

    def cell(value: float | None, how: str = ",.1f", unit: str = "") -> str:
        return "-" if value is None else f"{value:{how}}{unit}"

    before = ""
    for row in rows[:_MOST_ROWS]:
        first, before = row["name"] != before, row["name"]
        of_log = (
            [f"{row['troubles']:,}", f"{row['seconds']:.1f}", cell(row["speed"], ".1f", "x")]
            if first
            else []
        )
        table.add_row(
            escape(row["name"]) if first else "",
            escape(row["stage"]),
            f"{row['frames']:,}",
            "-" if row["miss_ratio"] is None else percent(row["miss_ratio"], 2),
            cell(row["p50_ms"]),
            cell(row["p99_ms"]),
            f"{row['anomalies']:,}",
            *of_log,
        )
    if len(rows) > _MOST_ROWS:
        table.caption = f"{len(rows) - _MOST_ROWS:,} more rows in summary.parquet"
    return table


class _Bars:
    """Bars in a terminal, a line for each log elsewhere.

    A log counts by its bytes. `kept` gets how each has ended.
    """

    def __init__(
        self,
        bars: Progress,
        say: Callable[[str], None],
        logs: Sequence[FoundLog],
        kept: dict[FoundLog, results.Ended],
    ) -> None:
        self._bars = bars
        self._say, self._kept, self._tasks = say, kept, dict[FoundLog, TaskID]()
        self._bytes = dict.fromkeys(logs, 0.0)
        self._all = bars.add_task("", total=sum(max(1.0, log.size_bytes) for log in logs), at="")
        self._update()

    def progress(self, log: FoundLog, done_ns: int, total_ns: int) -> None:
        if log not in self._tasks:
            self._tasks[log] = self._bars.add_task(f"  {log.name}", total=None, at="")
        self._bars.update(self._tasks[log], completed=done_ns, total=total_ns or None)
        self._bytes[log] = log.size_bytes * min(1.0, done_ns / total_ns) if total_ns else 0.0
        self._update()

    def ended(self, log: FoundLog, ended: results.Ended) -> None:
        if (task := self._tasks.pop(log, None)) is not None:
            self._bars.remove_task(task)
        self._bytes[log] = max(1.0, log.size_bytes)
        self._kept[log] = ended
        for number, why in enumerate(ended.before, 1):
            self._say(f"{log.name}: try {number}: {why}")
        if ended.reason or self._bars.disable:
            how = f"failed: {ended.reason}" if ended.reason else "done"
            self._say(f"[{len(self._kept)}/{len(self._bytes)}] {log.name}: {how}")
        self._update()

    def _update(self) -> None:
        failed = sum(bool(how.reason) for how in self._kept.values())
        done = f"{len(self._kept)} of {len(self._bytes)} logs{f', {failed} failed' if failed else ''}"
        self._bars.update(self._all, completed=sum(self._bytes.values()), description=done)


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
            msg = f"--output {folder}: another replay writes there now; wait for it, or name another folder"
            raise BatchError(msg) from None
        for old in folder.glob(_RUN + "[0-9a-f]" * 8):
            shutil.rmtree(old, ignore_errors=True)
        run_folder = folder / f"{_RUN}{secrets.token_hex(4)}"
        run_folder.mkdir()
        try:
            yield run_folder
        finally:
            shutil.rmtree(run_folder, ignore_errors=True)
