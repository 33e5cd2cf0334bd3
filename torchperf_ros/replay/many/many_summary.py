"""What many replays came to, together: a row for each log and stage as Parquet, everything as JSON, and a page."""

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.analysis.report_overview import Overview, OverviewRow
from torchperf_ros.analysis.report_summary import stage_figures
from torchperf_ros.analysis.run_log import RunLog
from torchperf_ros.analysis.run_log_source import read_runs
from torchperf_ros.replay.many.many_logs import FoundLog, ManyError
from torchperf_ros.replay.many.many_task import Ended

SUMMARY_JSON, SUMMARY_PARQUET, PAGE = "summary.json", "summary.parquet", "report.html"
KIND: Final = "replayed logs"
VERSION: Final = 1
_MARK: Final = f"<!-- {KIND} -->\n".encode()
"""Ends a page that is of many logs: `torchperf report` writes pages of that name, too."""
_PICTURED: Final = 3  # logs whose worst frames are shown: a picture is read from the log, and takes its place
_TEXT: Final = ("name", "path", "stage", "reason")
_WHOLE: Final = ("frames", "received", "superseded", "stale", "anomalies", "attempt", "troubles")
_REAL: Final = (
    "miss_ratio", "p50_ms", "p95_ms", "p99_ms", "max_ms", "budget_ms", "log_s", "seconds", "speed",
)  # fmt: skip


def summary_rows(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each log and stage: the logs with the most misses first, among equal ones those with the longest p99.

    Args:
        summaries: what each log came to, by name.
    """
    rows = {name: [_row(name, summary, stage) for stage in summary["stages"]] for name, summary in summaries.items()}
    ranked = sorted(rows.values(), key=lambda own: (_worst(own, "miss_ratio"), _worst(own, "p99_ms")), reverse=True)
    return [row for own in ranked for row in own]


def check_summary(folder: Path) -> None:
    """See that `summary.json`, `summary.parquet` and `report.html` replace nothing but those of an earlier replay.

    Args:
        folder: of the results; need not be there.

    Raises:
        ManyError: one of them is something else.
    """
    ours = {SUMMARY_JSON: _is_summary(folder), SUMMARY_PARQUET: _is_summary(folder), PAGE: _is_page(folder)}
    for name, replaceable in ours.items():
        path = folder / name
        if (path.exists() or path.is_symlink()) and not replaceable:
            msg = (
                f"--output {folder}: results would replace {path}, which no replay of many logs wrote; "
                "name another folder, or move it away"
            )
            raise ManyError(msg)


def write_summary(
    folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[str, tuple[FoundLog, Ended]]
) -> None:
    """Write `summary.json` and `summary.parquet`.

    Args:
        folder: of the results.
        rows: of `summary_rows`.
        failed: the logs that have none, and how they ended, by name.

    Raises:
        ManyError: a file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lost = [
        {"name": name, "path": str(log.path), "reason": how.reason, "traceback": how.traceback}
        for name, (log, how) in failed.items()
    ]
    content = {"v": VERSION, "kind": KIND, "rows": rows, "failed": lost}
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    _replace(folder / SUMMARY_JSON, lambda part: part.write_text(text, encoding="utf-8"))
    kinds = [(name, pa.string()) for name in _TEXT] + [(name, pa.int64()) for name in _WHOLE]
    schema = pa.schema(kinds + [(name, pa.float64()) for name in _REAL])
    table = pa.Table.from_pylist([{name: row.get(name) for name in schema.names} for row in [*rows, *lost]], schema)
    _replace(folder / SUMMARY_PARQUET, lambda part: pq.write_table(table, part, compression="zstd"))


def write_page(
    folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[str, tuple[FoundLog, Ended]], worst: int
) -> str:
    """Write `report.html`: all logs in a table, and the worst in detail. Returns where it is, or why there is none.

    One run is in memory at a time, and those that are shown in detail.

    Raises:
        TorchperfError: a run cannot be read, the page would be too large, or it cannot be written.
        OSError: a run is gone.
    """
    if importlib.util.find_spec("plotly") is None:
        return "no page, as plotly is not installed: `pip install 'torchperf_ros[analysis]'`"
    from torchperf_ros.analysis.report_page import write_report

    names = list(dict.fromkeys(row["name"] for row in rows))
    anomalies = {(row["name"], row["stage"]): row["anomalies"] for row in rows}
    detailed: list[RunLog] = []
    told: list[OverviewRow] = []
    for name in names:
        (run,) = read_runs(folder / name, lambda _done, _total: None)
        told += [
            OverviewRow(name, stage.name, stage_figures(stage), anomalies[name, stage.name]) for stage in run.stages
        ]
        if len(detailed) < worst:
            detailed.append(run if len(detailed) < _PICTURED else replace(run, recordings=()))
    lost = [(name, how.reason) for name, (_, how) in failed.items()]
    title = f"{len(names):,} of {len(names) + len(failed):,} logs in {folder.resolve().name}"

    def write(part: Path) -> None:
        write_report(detailed, part, lambda _: None, Overview(told, lost, title))
        with part.open("ab") as page:
            page.write(_MARK)

    _replace(folder / PAGE, write)
    return f"all of them on a page: {folder / PAGE}"


def _is_summary(folder: Path) -> bool:
    """Whether the summary is of many logs, and so what lies beside it as Parquet."""
    try:
        return bool(json.loads((folder / SUMMARY_JSON).read_text(encoding="utf-8"))["kind"] == KIND)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_page(folder: Path) -> bool:
    try:
        return (folder / PAGE).read_bytes().endswith(_MARK)
    except OSError:
        return False


def _row(name: str, summary: Mapping[str, Any], stage: Mapping[str, Any]) -> dict[str, Any]:
    log_s, seconds = float(summary["log"]["duration_s"]), float(summary["seconds"])
    return {
        "name": name, "path": summary["log"]["path"], "stage": stage["name"], "reason": None,
        "frames": stage["answered"], "received": stage["received"], "superseded": stage["superseded"],
        "stale": stage["stale"], "anomalies": stage["anomalies"], "attempt": summary["attempt"],
        "troubles": len(summary["troubles"]),
        **{key: stage[key] for key in ("miss_ratio", "p50_ms", "p95_ms", "p99_ms", "max_ms", "budget_ms")},
        "log_s": log_s, "seconds": seconds, "speed": log_s / seconds if seconds > 0 else None,
    }  # fmt: skip


def _worst(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    return max((row[key] for row in rows if row[key] is not None), default=-1.0)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """All of a file, or what was there before.

    Raises:
        ManyError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        part.replace(path)
    except OSError as error:
        msg = f"{path}: cannot be written: {error.strerror or error}"
        raise ManyError(msg) from error
    finally:
        part.unlink(missing_ok=True)
