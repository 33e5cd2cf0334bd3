"""The command `torchperf anomalies`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.analysis.anomalies_run import Course, Verdict
    from torchperf_ros.core.anomaly.series_detector import SeriesDetector

_BAD_INPUT = 2
_SHOWN_EVENTS = 30
_ADVANCE_EVERY = 1000  # rows
_PLAIN_WIDTH = 100
_DAY_S = 86_400.0


def anomalies_command(
    file: Annotated[
        Path, typer.Argument(help="timestamp,value rows: ISO times or numbers, with or without a header line.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the scores go; default: FILE.anomalies.csv beside the file; - for stdout."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw series, baseline band, score and events to this PNG file.")
    ] = None,
    direction: Annotated[
        Literal["both", "up", "down"], typer.Option(help="Which departures count: both, only up, only down.")
    ] = "both",
    floor: Annotated[
        float, typer.Option(min=0.0, help="The smallest departure worth telling, in the unit of the value.")
    ] = 0.0,
    caution: Annotated[
        float, typer.Option(min=1.0, max=4.0, help="Ask for more surprise: 1.6 makes a tenth of the false alarms.")
    ] = 1.0,
) -> None:
    """Score every row of a time series from 0 (usual) to 1 (never seen the like).

    The detector learns while it reads: each row is judged by the rows before
    it, and none has to be set up for a file. It finds spikes, new levels,
    drifts, changed variation, runs like none before, flat lines and, once it
    has seen three days or three cycles, what is unusual for the time. The first 64 rows score 0.

    The output has a row for each of the input's, in order:
    timestamp,value,anomaly_score, the first two as they were written. 0.5 and
    more is an anomaly; below, a score says how close a row came. After an
    event the score fades over 300 rows and stays below 0.5. Empty values and
    NaN score below 0.5; repeated and backward timestamps are taken as they come.

    Examples: torchperf anomalies cpu.csv --plot cpu.png
              torchperf anomalies cpu.csv -o - | sort -t, -k3 -r | head

    Exit status: 0 if every row was scored, with anomalies or without; 2 if the
    file cannot be read.
    """
    from torchperf_ros.analysis.anomalies_run import Course
    from torchperf_ros.core.errors import TorchperfError

    to_stdout = output == Path("-")
    target = output or file.with_name(f"{file.stem}.anomalies.csv")
    console = _console(to_stdout)
    course = Course() if plot is not None else None
    try:
        _check(file, None if to_stdout else target, plot)
        from torchperf_ros.core.anomaly.series_detector import SeriesDetector

        detector = SeriesDetector(direction, floor, caution)
        with open(file, "rb") as binary, _target(None if to_stdout else target) as scores:
            verdict = _judge(file, binary, scores, detector, course)
        _show(verdict, file, console)
        if not to_stdout:
            console.print(f"scores: {target}", highlight=False, markup=False, soft_wrap=True)
        if plot is not None and course is not None:
            from torchperf_ros.analysis.anomalies_picture import save_picture

            save_picture(course, verdict.events, file.name, plot)
            console.print(f"picture: {plot}", highlight=False, markup=False, soft_wrap=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (TorchperfError, OSError, ValueError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from None


def _check(file: Path, target: Path | None, plot: Path | None) -> None:
    from torchperf_ros.analysis.anomalies_rows import SeriesError

    if not file.is_file():
        msg = f"{file} is {'a folder' if file.is_dir() else 'not there'}; it has to be a file of timestamp,value rows"
        raise SeriesError(msg)
    for flag, path in (("--output", target), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir() or not path.parent.is_dir():
            msg = f"{flag} {path}: needs a file name in an existing folder"
            raise SeriesError(msg)
        if path.exists() and path.samefile(file):
            msg = f"{flag} {path} is the input; name another file"
            raise SeriesError(msg)
    if target is not None and plot is not None and target.absolute() == plot.absolute():
        msg = f"--output and --plot are both {plot}; name two files"
        raise SeriesError(msg)


@contextmanager
def _target(path: Path | None) -> Iterator[TextIO]:
    """The file for the scores; takes its name only when it is complete."""
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    if path.exists() and not path.is_file():  # a device or a pipe
        with open(path, "w", encoding="utf-8", newline="") as file:
            yield file
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _judge(
    path: Path, binary: BinaryIO, scores: TextIO, detector: "SeriesDetector", course: "Course | None"
) -> "Verdict":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from torchperf_ros.analysis.anomalies_rows import Rows, SeriesError
    from torchperf_ros.analysis.anomalies_run import csv_writer, judge_rows

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(path.name, total=path.stat().st_size)
        rows = Rows(path, binary)
        verdict = judge_rows(
            rows, detector, csv_writer(scores), course, _every(lambda: progress.update(task, completed=binary.tell()))
        )
    if not verdict.rows:
        msg = f"{path} has a header line and no rows; it needs rows of {','.join(rows.names)}"
        raise SeriesError(msg)
    return verdict


def _every(show: Callable[[], None]) -> Callable[[], None]:
    count = 0

    def advance() -> None:
        nonlocal count
        count += 1
        if count % _ADVANCE_EVERY == 0:
            show()

    return advance


def _show(verdict: "Verdict", file: Path, console: "Console") -> None:
    from rich.table import Table

    events = verdict.events
    days = (verdict.last_s - verdict.first_s) / _DAY_S
    parts = [f"{file}: {verdict.rows} rows over {_duration(verdict.last_s - verdict.first_s)}"]
    for number, what in (
        (verdict.missing, "without a value"),
        (verdict.repeated, "with a repeated timestamp"),
        (verdict.backward, "with a timestamp that goes backward"),
    ):
        if number:
            parts.append(f"{number} {what}")
    console.print(", ".join(parts), highlight=False, markup=False, soft_wrap=True)
    rate = f", {len(events) / days:.2g} a day" if days >= 1 else ""
    count = "no event" if not events else f"{len(events)} event{'s' if len(events) > 1 else ''}{rate}"
    most = f"; the {_SHOWN_EVENTS} that score most:" if len(events) > _SHOWN_EVENTS else ""
    console.print(f"{count} (score 0.5 and more){most}", highlight=False, markup=False)
    if not events:
        return
    table = Table("from", "to", "kind", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("value", "baseline", "score"):
        table.add_column(column, justify="right")
    shown = sorted(sorted(events, key=lambda event: -event.score)[:_SHOWN_EVENTS], key=lambda event: event.begin_s)
    for event in shown:
        table.add_row(event.first, event.last, event.kind, f"{event.value:.6g}", f"{event.baseline:.6g}",
                      f"{event.score:.2f}")  # fmt: skip
    console.print(table)


def _duration(seconds: float) -> str:
    for unit_s, name in ((_DAY_S, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {name}"
    return f"{seconds:.3g} s"


def _console(stderr: bool) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)
