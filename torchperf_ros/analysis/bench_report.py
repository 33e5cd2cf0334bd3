"""The results of `torchperf bench model` as a table, as CSV and as JSON."""

import csv
import io
import json
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from torchperf_ros.analysis.bench_case import Figures, Result

_CASE = ("tier", "batch", "engine")
_LEFT = ("tier", "engine")
_SHOWN_CALLS = (1, 2, 5, 10, 30)
_COUNTED_FROM = 100.0


def bench_table(results: Sequence[Result]) -> Table:
    """Once warm, one row for each case."""
    table = _table("once warm, in ms", "p50", "p95", "p99", "max", "x eager", "items/s", "peak MiB", "rel. L2")
    for result in results:
        cells = _warm(result.figures) if result.figures is not None else [Text("none", "red")]
        table.add_row(*_named(result), *cells)
    return table


def start_table(results: Sequence[Result]) -> Table:
    """How each case starts: seconds from the start of the process to the first answer, and ms of the calls after it."""
    calls_of = [str(number) for number in _SHOWN_CALLS]
    title = "s until the first answer, of that compiling; then ms of the nth call; calls until warm"
    table = _table(title, "answer", "compile", *calls_of, "cold")
    for result in results:
        if (figures := result.figures) is not None:
            calls = [_short(figures.warm_up_ms[n - 1]) if n <= len(figures.warm_up_ms) else "" for n in _SHOWN_CALLS]
            seconds = f"{figures.cold_start_s:.1f}", f"{figures.compile_s:.1f}" if figures.compile_s else ""
            table.add_row(*_named(result), *seconds, *calls, str(figures.calls_to_warm))
    return table


def bench_csv(results: Sequence[Result]) -> str:
    """One line for each case; the warm-up calls in one cell, separated by spaces."""
    rows = [result.as_dict() for result in results]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**row, "warm_up_ms": " ".join(map(str, row.get("warm_up_ms", [])))})
    return text.getvalue()


def bench_json(results: Sequence[Result], advice: Sequence[str], subject: Mapping[str, object]) -> str:
    """Everything, with what was measured and on what."""
    report = {**subject, "results": [result.as_dict() for result in results], "advice": list(advice)}
    return json.dumps(report, indent=2) + "\n"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in (*_CASE, *columns):
        table.add_column(name, justify="left" if name in _LEFT else "right")
    return table


def _named(result: Result) -> tuple[str, str, str]:
    return result.case.tier, str(result.case.batch), result.case.engine


def _warm(figures: Figures) -> list[str]:
    times_ms = [figures.p50_ms, figures.p95_ms, figures.p99_ms, figures.max_ms]
    error = f"{figures.relative_l2:.0e}" if figures.relative_l2 else "0"
    rates = f"{figures.times_eager:.2f}", _short(figures.items_per_s), f"{figures.peak_mib:.0f}"
    return [*map(_short, times_ms), *rates, error]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= _COUNTED_FROM else f"{value:.3g}"
