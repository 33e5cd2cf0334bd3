"""How the replay of many logs is shown: bars in a terminal, a line for each log elsewhere; a table at the end."""

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from torchperf_ros.core.percent import percent
from torchperf_ros.replay.many.many_logs import FoundLog
from torchperf_ros.replay.many.many_task import Ended

_MOST_ROWS: Final = 40


class ManyView:
    """Shows logs as they come and go; a log counts by its bytes."""

    def __init__(self, console: Console, logs: Sequence[FoundLog]) -> None:
        """Take the console, and what is to be replayed."""
        columns = (
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[at]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )  # fmt: skip
        self._bars = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal, refresh_per_second=4,
            speed_estimate_period=600.0,
        )  # fmt: skip
        self._console = console
        self._count, self._done, self._failed = len(logs), 0, 0
        self._ended_bytes = 0.0
        self._parts: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._begun_s: dict[str, float] = {}
        self._all = self._bars.add_task("", total=sum(self._weight(log) for log in logs), at="left")
        self._tell()

    def progress(self, log: FoundLog, done_ns: int, total_ns: int) -> None:
        """A log is so far; `total_ns` is 0 where it is not known."""
        if log.name not in self._tasks:
            self._tasks[log.name] = self._bars.add_task(f"  {escape(log.name)}", total=None, at="starts")
            self._begun_s[log.name] = time.monotonic()
        at = "left" if total_ns else "replays" if done_ns else "starts"
        self._bars.update(self._tasks[log.name], completed=done_ns, total=total_ns or None, at=at)
        self._parts[log.name] = self._weight(log) * min(1.0, done_ns / total_ns) if total_ns else 0.0
        self._tell()

    def ended(self, log: FoundLog, ended: Ended, again: bool) -> None:
        """A log is done, has failed, or is tried `again`."""
        if (task := self._tasks.pop(log.name, None)) is not None:
            self._bars.remove_task(task)
        took_s = time.monotonic() - self._begun_s.pop(log.name, time.monotonic())
        self._parts.pop(log.name, None)
        if again:
            self._say(f"{log.name}: again, as {ended.reason}")
            return
        self._done += 1
        self._failed += bool(ended.reason)
        self._ended_bytes += self._weight(log)
        how = f"failed: {ended.reason}" if ended.reason else f"done in {took_s:.1f} s"
        if ended.reason or not self._console.is_terminal:
            self._say(f"[{self._done}/{self._count}] {log.name}: {how}")
        self._tell()

    def _tell(self) -> None:
        failed = f", [red]{self._failed} failed[/red]" if self._failed else ""
        done = self._ended_bytes + sum(self._parts.values())
        self._bars.update(self._all, completed=done, description=f"{self._done} of {self._count} logs{failed}")

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @staticmethod
    def _weight(log: FoundLog) -> float:
        return max(1.0, float(log.size_bytes))

    def __enter__(self) -> "ManyView":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bars.stop()


def summary_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The first 40 rows of `summary_rows`: the worst. `notes`: what was wrong with a log and could be done without."""
    table = Table(title="times in ms, the worst log first", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("log", overflow="fold", min_width=20)
    table.add_column("stage", no_wrap=True)
    for name in ("frames", "missed", "p50", "p99", "anomalies", "notes", "seconds", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for row in rows[:_MOST_ROWS]:
        first = row["name"] != before
        before = row["name"]
        speed = f"{row['speed']:.1f}x" if row["speed"] is not None else "-"
        table.add_row(
            escape(row["name"]) if first else "", escape(row["stage"]), f"{row['frames']:,}", _share(row["miss_ratio"]),
            _ms(row["p50_ms"]), _ms(row["p99_ms"]), f"{row['anomalies']:,}",
            f"{row['troubles']:,}" if first else "", f"{row['seconds']:.1f}" if first else "", speed if first else "",
        )  # fmt: skip
    if len(rows) > _MOST_ROWS:
        table.caption = f"{len(rows) - _MOST_ROWS:,} more rows in summary.parquet"
    return table


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else percent(value, 2)


def _ms(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:,.1f}"
