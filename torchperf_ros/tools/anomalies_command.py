"""The command `torchperf anomalies`.

A series or a run in, a score for each row, the events and a picture out.
"""

import csv
import math
import os
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from typer import Argument, Option

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.tools.shell import File, check_outputs, fail

if TYPE_CHECKING:
    from torchperf_ros.observe.watch.series_detector import SeriesDetector

_SHOWN_EVENTS = 30
_DAY_S = 86_400.0  # also the unit of matplotlib's dates, which count from 1970
_DATES_FROM_S = 1e8  # smaller times count from a start, not from 1970
_RUNS = {".json", ".parquet"}
_MISSING = {"", "nan", "na", "n/a", "null", "none", "-", "?"}
_EPOCH_UNITS = (
    (1e17, 1e9),
    (1e14, 1e6),
    (1e11, 1e3),
)  # from so large on, numbers are nano-, micro-, milliseconds
_TIME_NAMES = ("timestamp", "time", "date", "datetime", "time_s", "ts")


class SeriesError(TorchperfError):
    """A file is no series; the message says what, where, and what would be right."""


def anomalies(
    file: Annotated[
        Path, Argument(help="timestamp,value rows (ISO times or numbers), or a run of replay.")
    ],
    output: Annotated[
        File, Option("--output", "-o", help="Default: FILE.anomalies.csv; - for stdout.")
    ] = None,
    plot: Annotated[File, Option(help="Draw series, baseline, score and events to this PNG file.")] = None,
    direction: Annotated[Literal["both", "up", "down"], Option(help="Which departures count.")] = "both",
    floor: Annotated[
        float, Option(min=0.0, help="The smallest departure to report, in the unit of the value.")
    ] = 0.0,
    caution: Annotated[
        float | None, Option(min=1.0, max=4.0, help="More surprise; default 1, of a run 1.4.")
    ] = None,
    stage: Annotated[str, Option(help="Of a run: whose latency; default: the last stage's.")] = "",
) -> None:
    """Score every row of a time series from 0 (usual) to 1 (never seen the like).

    The detector learns while it reads: each row is judged by the rows before
    it, and nothing has to be set up for a file. It finds values and levels
    where the series has never been, steps larger than it ever makes, flat
    lines and gaps. The first 64 rows score 0. Of a run, it judges the
    latency of each frame.

    The output has a row for each of the input's, in order:
    timestamp,value,anomaly_score, the first two as they were written. 0.5 and
    more is an anomaly, reported once: in the next 150 rows only a higher
    score is another, and others are halved. Empty values and NaN score below
    0.5; repeated and backward timestamps are taken as they come.

    Examples: torchperf anomalies cpu.csv --plot cpu.png
              torchperf anomalies run.parquet --stage perception -o - | head

    Exit status: 0 if every row was scored, with anomalies or without; 2 if the
    file cannot be read.
    """
    from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, SeriesDetector

    is_run, to_stdout = file.suffix in _RUNS, output == Path("-")
    target = None if to_stdout else output or file.with_name(f"{file.stem}.anomalies.csv")
    say = sys.stderr if to_stdout else sys.stdout
    if not file.is_file():
        fail(f"{file} is {'a folder' if file.is_dir() else 'not there'}; it has to be a CSV file or a run")
    check_outputs({"--output": target, "--plot": plot}, [file])
    try:
        detector = SeriesDetector(direction, floor, caution or (FRAME_CAUTION if is_run else 1.0))
        rows = run_rows(file, stage) if is_run else csv_rows(file)
        events = _judge(rows, detector)
        _write(rows, target)
        _show(rows, events, file, say)
        if target is not None:
            say.write(f"scores: {target}\n")
        if plot is not None:
            _draw(rows, events, file.name, plot)
            say.write(f"picture: {plot}\n")
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ValueError as error:
        fail(str(error))


@dataclass(slots=True)
class Row:
    """One row: both fields as they were written, what they mean (NaN.

    No value), and what the detector makes of it.
    """

    timestamp: str
    text: str
    time_s: float
    value: float
    score: float = 0.0
    kind: str = ""
    baseline: float = math.nan


_Event = list[Row]  # one anomaly, from its first row to its last


def csv_rows(path: Path) -> list[Row]:
    """The rows of a CSV file, separated by commas, semicolons or tabs; empty lines are no rows.

    A first line whose fields are names is a header; it may name the columns in another order, among others.

    Raises:
        SeriesError: the file or a row cannot be read; the message names file, line, value and what would be
            right.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        msg = f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): a CSV file is"
        raise SeriesError(msg) from error
    first = next((line for line in lines if line.strip()), "")
    reader = csv.reader(lines, delimiter=max(",;\t", key=first.count))
    filled = [(reader.line_num, fields) for fields in reader if fields]
    if not filled:
        raise SeriesError(f"{path} is empty: it needs rows of timestamp,value")
    (line, names), columns = filled[0], (0, 1)
    if len(names) == 1:
        raise SeriesError(f"{path}:{line}: {names[0]!r} has one field; a row is timestamp,value")
    if header := _seconds(names[0]) is None and _number(names[1]) is None:
        plain = [name.strip().lower() for name in names]
        time = next((plain.index(name) for name in _TIME_NAMES if name in plain), 0)
        columns = time, plain.index("value") if "value" in plain else int(time == 0)
    rows = [_row(fields, columns, f"{path}:{line}") for line, fields in filled[header:]]
    if not rows:
        raise SeriesError(f"{path} has a header line and no rows; it needs rows of timestamp,value")
    return rows


def _row(fields: list[str], columns: tuple[int, int], where: str) -> Row:
    if len(fields) <= max(columns):
        raise SeriesError(
            f"{where}: {','.join(fields)!r} has {len(fields)} fields; a row is timestamp,value"
        )
    timestamp, text = (fields[column] for column in columns)
    time_s, value = _seconds(timestamp), _number(text)
    if time_s is None:
        msg = f"{where}: timestamp {timestamp!r} is neither an ISO time nor a number; "
        raise SeriesError(msg + "for example 2024-05-01 12:00:00 or 1714564800")
    if value is None:
        raise SeriesError(f"{where}: value {text!r} is no number; a missing one is an empty field or NaN")
    return Row(timestamp, text, time_s, value)


def _number(text: str) -> float | None:
    try:
        return math.nan if text.strip().lower() in _MISSING else float(text)
    except ValueError:
        return None


def _seconds(text: str) -> float | None:
    """A timestamp in seconds, None for another text; ISO times without a zone count as UTC."""
    try:
        number = float(text)
    except ValueError:
        # Python 3.10 reads neither a Z nor fractions of other than 3 or 6 digits
        text = re.sub(r"[zZ]$", "+00:00", text.strip().replace("/", "-"))
        text = re.sub(r"\.(\d+)", lambda match: "." + match[1][:6].ljust(6, "0"), text)
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
    if not math.isfinite(number):
        return None
    return next((number / unit for least, unit in _EPOCH_UNITS if abs(number) >= least), number)


def run_rows(path: Path, stage: str) -> list[Row]:
    """The latency of a stage's frames in ms; of the last stage where none is named.

    Raises:
        TorchperfError: the file holds no run, or no such stage, or no frames of it.
    """
    from torchperf_ros.observe.runs.run_file import read_run

    frames = read_run(path).frames
    name = stage or list(frames)[-1]
    if name not in frames or not len(frames[name]):
        raise SeriesError(f"{path} has no frames of stage {name!r}; its stages: {', '.join(frames)}")
    stamps, totals = (frames[name][column].tolist() for column in ("t_ns", "total_ms"))
    return [
        Row(f"{t_ns / 1e9:.6f}", f"{ms:.3f}", t_ns / 1e9, ms)
        for t_ns, ms in zip(stamps, totals, strict=True)
    ]


def _judge(rows: list[Row], detector: "SeriesDetector") -> list[_Event]:
    events: list[_Event] = []
    on = False
    for row in rows:
        reading = detector.update(row.time_s, row.value)
        row.score, row.kind, row.baseline = reading.score, reading.kind, reading.baseline
        if detector.active and not on:
            events.append([row])
        elif detector.active and row.kind not in {"", "gap"}:
            events[-1].append(row)
        on = detector.active
    return events


def _peak(event: _Event) -> Row:
    return max(event, key=lambda row: row.score)


def _write(rows: list[Row], target: Path | None) -> None:
    with (
        nullcontext(sys.stdout) if target is None else open(target, "w", encoding="utf-8", newline="")
    ) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("timestamp", "value", "anomaly_score"))
        writer.writerows((row.timestamp, row.text, f"{row.score:.6f}") for row in rows)
        file.flush()


def _show(rows: list[Row], events: list[_Event], file: Path, say: TextIO) -> None:
    times = [row.time_s for row in rows]
    span_s = max(times) - min(times)
    unit_s, unit = next(
        (one for one in ((_DAY_S, "days"), (3600.0, "h"), (60.0, "min")) if span_s >= one[0]), (1, "s")
    )
    pairs = list(zip(times, times[1:], strict=False))
    parts = [f"{file}: {len(rows)} rows over {span_s / unit_s:.3g} {unit}"]
    for number, what in (
        (sum(not math.isfinite(row.value) for row in rows), "without a value"),
        (sum(now == before for before, now in pairs), "with a repeated timestamp"),
        (sum(now < before for before, now in pairs), "with a timestamp that goes backward"),
    ):
        parts += [f"{number} {what}"] if number else []
    say.write(", ".join(parts) + "\n")
    rate = f", {len(events) * _DAY_S / span_s:.2g} a day" if events and span_s >= _DAY_S else ""
    most = f"; the {_SHOWN_EVENTS} that score most:" if len(events) > _SHOWN_EVENTS else ""
    say.write(
        f"{len(events) or 'no'} event{'' if len(events) < 2 else 's'}{rate} (score 0.5 and more){most}\n"  # noqa: PLR2004
    )
    shown = sorted(events, key=lambda event: -_peak(event).score)[:_SHOWN_EVENTS]
    lines = [("from", "to", "kind", "value", "baseline", "score")]
    for event in sorted(shown, key=lambda event: event[0].time_s):
        peak = _peak(event)
        numbers = (f"{peak.value:.6g}", f"{peak.baseline:.6g}", f"{peak.score:.2f}")
        lines.append((event[0].timestamp, event[-1].timestamp, peak.kind, *numbers))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines if events else []:
        words = [cell.ljust(width) for cell, width in zip(line[:3], widths, strict=False)]
        words += [cell.rjust(width) for cell, width in zip(line[3:], widths[3:], strict=True)]
        say.write("  ".join(words) + "\n")


def _draw(rows: list[Row], events: list[_Event], title: str, path: Path) -> None:
    import numpy as np
    from matplotlib.figure import Figure

    from torchperf_ros.observe.watch.series_detector import THRESHOLD

    figure = Figure(figsize=(12.0, 6.0), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    ordered = sorted(
        rows, key=lambda row: row.time_s
    )  # a time that goes back would draw lines across the picture
    dated = ordered[0].time_s >= _DATES_FROM_S
    unit_s = _DAY_S if dated else 1.0
    x, value, baseline, score = np.array(
        [(r.time_s / unit_s, r.value, r.baseline, r.score) for r in ordered]
    ).T
    value[~np.isfinite(value)] = math.nan
    above.plot(x, value, color="#2a78d6", linewidth=0.8, label="value")
    above.plot(x, baseline, color="#1baf7a", linewidth=0.8, label="baseline")
    below.plot(x, score, color="#52514e", linewidth=0.8)
    below.axhline(THRESHOLD, color="#e34948", linewidth=0.8, linestyle="--")
    below.set(ylim=(0, 1), ylabel="score")
    for event in events:
        for axes in (above, below):
            axes.axvspan(event[0].time_s / unit_s, event[-1].time_s / unit_s, color="#e34948", alpha=0.25)
        peak = _peak(event)
        place = peak.time_s / unit_s, peak.value
        above.plot(*place, "o", color="#e34948", markersize=5, markerfacecolor="none")
        above.annotate(
            peak.kind, place, (4, 6), textcoords="offset points", fontsize="x-small", color="#e34948"
        )
    if dated:
        below.xaxis_date("UTC")
    else:
        below.set_xlabel("time in s")
    above.set_title(title, loc="left", fontweight="bold")
    above.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)
    figure.savefig(path, dpi=130, format="png")
