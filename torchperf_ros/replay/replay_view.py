"""How a replay is shown in a terminal."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.percent import percent
from torchperf_ros.replay.replay import Progress as Told
from torchperf_ros.replay.replay_result import ReplayResult, StageResult

_EVERY_S: Final = 0.25
_LINE_EVERY_S: Final = 10.0
_WORST: Final = 5


@contextmanager
def progress_bar(name: str, console: Console) -> Iterator[Told]:
    """A bar over the log's time, with what is left to wait; a line now and then where there is no terminal."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[at]}"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    plain = not console.is_terminal
    every_s = _LINE_EVERY_S if plain else _EVERY_S
    with Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=plain) as bar:
        task = bar.add_task(name, total=None, at="starting")
        next_s = 0.0

        def told(done_ns: int, total_ns: int) -> None:
            nonlocal next_s
            now_s = monotonic()
            if now_s < next_s:
                return
            next_s = now_s + every_s
            of = f" of {total_ns / NS_PER_S:.1f}" if total_ns else ""
            at = f"{done_ns / NS_PER_S:.1f}{of} s"
            if plain:
                console.print(f"{name}: at {at}", highlight=False, markup=False, soft_wrap=True)
            else:
                bar.update(task, completed=done_ns, total=total_ns or None, at=at)

        yield told


def stage_table(result: ReplayResult) -> Table:
    """A row for each stage."""
    timed = result.summary["pace"] != "fast"
    table = Table(title=f"{result.log}, times in ms", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("stage", no_wrap=True)
    for name in ("frames", "on time", "p50", "p99", "max", *(["budget"] if timed else []), "dropped"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tiers")
    table.add_column("not on time")
    for stage in result.stages.values():
        table.add_row(
            stage.name, f"{len(stage.frames):,}", percent(1.0 - stage.miss_ratio) if len(stage.frames) else "-",
            *(f"{value:.1f}" for value in (stage.p50_ms, stage.p99_ms, stage.max_ms)),
            *([f"{stage.budget_ms:g}"] if timed else []), f"{stage.superseded + stage.stale:,}",
            _tiers(stage), _otherwise(stage),
        )  # fmt: skip
    return table


def _tiers(stage: StageResult) -> str:
    """Which tiers gave results, and how often, the most used first."""
    used = Counter(int(tier) for tier in stage.frames["tier"] if tier >= 0)
    return (
        ", ".join(f"{stage.tiers[tier]} {percent(n / len(stage.frames), 0)}" for tier, n in used.most_common()) or "-"
    )


def _otherwise(stage: StageResult) -> str:
    missed = [f"{count:,} {word}" for word, count in stage.outcomes.most_common() if word != "on_time"]
    instead = [f"{count:,} {word}" for word, count in stage.fallbacks.most_common()]
    return "; ".join(filter(None, [", ".join(missed), ", ".join(instead)])) or "-"


def lines(result: ReplayResult) -> Iterator[str]:
    """What there is to say below the table."""
    summary = result.summary
    log_s, took_s = summary["log"]["duration_s"], summary["took_s"]
    speed = f", {log_s / took_s:.1f} times as fast as it was" if took_s and summary["pace"] != "real" else ""
    yield f"{log_s:.1f} s of log in {took_s:.1f} s{speed}; workers were ready after {summary['start_up_s']:.1f} s"
    if summary["pace"] == "fast":
        yield "every frame had all the time that it needed; with --pace real or virtual deadlines count"
    if summary.get("late_messages"):
        yield f"{summary['late_messages']:,} messages were given late, up to {summary['worst_late_ms']:.1f} ms"
    for stage in result.stages.values():
        for seq, reason in list(stage.reasons.items())[:_WORST]:
            yield f"{stage.name} frame {seq}: {reason.splitlines()[0] if reason else 'no reason was given'}"
        if len(stage.reasons) > _WORST:
            yield f"{stage.name}: {len(stage.reasons) - _WORST:,} more, see --json"
    if result.anomalies:
        count = len(result.anomalies)
        yield f"{count:,} {'anomaly' if count == 1 else 'anomalies'}, the first: {result.anomalies[0][1].name}"
