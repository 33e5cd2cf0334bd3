"""A log's folder of results, from the log's bytes to its frames and summary.

And all folders as a table and a page.
"""

import hashlib
import importlib.util
import json
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros import __version__
from torchperf_ros.api.errors import ConfigError, TorchperfError, one_line
from torchperf_ros.observe.runs.run_file import RUN_FILE, whole_file, write_run
from torchperf_ros.replay.batch.batch_logs import BatchError, FoundLog
from torchperf_ros.replay.logs.log_storage import LogError
from torchperf_ros.replay.replay import Progress, replay
from torchperf_ros.replay.replay_options import ReplayOptions, prefer_this_process, read_config
from torchperf_ros.settings.config import NodeConfig

SUMMARY_FILE, OUTPUT_FILE = "summary.json", "output.mcap"
"""What lies in the folder of a replayed log beside its frames: what came of it, and what was published."""
KIND: Final = "replayed log"
"""What the summary in such a folder says that it is of."""
SUMMARY_PARQUET, PAGE = "summary.parquet", "report.html"
_KIND_OF_ALL: Final = "replayed logs"
_VERSION: Final = 1
_WORST: Final = 8  # logs that are shown in detail on the page
# logs whose worst frames are shown: a picture is read from the log, and takes its place
_PICTURED: Final = 3
_TEXT: Final = ("name", "path", "stage", "reason")
_WHOLE: Final = ("frames", "received", "superseded", "stale", "anomalies", "attempt", "troubles")
_REAL: Final = (
    "miss_ratio",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
    "budget_ms",
    "log_s",
    "seconds",
    "speed",
)
_LASTING: Final = (LogError, ConfigError, BatchError)
"""What fails the same way again."""
LOST: Final = "its worker was lost: killed, perhaps for want of memory"
_LOOK_S: Final = 0.25


def read_summary(folder: Path, kind: str = KIND) -> dict[str, Any]:
    """The summary in a folder of results, of one log or of all; empty where there is none."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) and summary.get("kind") == kind else {}


def owner_in(results: Path) -> Callable[[str], str]:
    """Gives the path of the log that the results of a name belong to; "" if nobody's."""
    return lambda name: str(read_summary(results / name).get("log", {}).get("path", ""))


def result_keys(logs: Sequence[FoundLog], options: ReplayOptions) -> dict[str, str]:
    """What the result of each log depends on, by name: a hash.

    Of the log its files' names, sizes and times of change; the options, parameters and step times; this
    version. Not of the code of an adapter.

    Raises:
        OSError: a file is gone, or one that the options name cannot be read.
    """
    times = Path(options.step_times)
    named = [options.params, times if options.step_times != "log" and times.is_file() else None]
    contents = [hashlib.blake2b(path.read_bytes()).hexdigest() for path in named if path is not None]
    values = {**asdict(options), "params": None}
    same = json.dumps([_VERSION, __version__, values, contents], sort_keys=True, default=str)
    keys = {}
    for log in logs:
        files = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in log.files]
        keys[log.name] = hashlib.blake2b(json.dumps([same, files]).encode(), digest_size=16).hexdigest()
    return keys


def finished(folder: Path, keys: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """What came of those logs whose folders of results are complete and have these keys, by name."""
    found = {}
    for name, key in keys.items():
        summary = read_summary(folder / name)
        try:
            sizes = {file: (folder / name / file).stat().st_size for file in summary["files"]}
        except (OSError, KeyError, TypeError):
            continue
        if summary.get("key") == key and sizes == summary["files"] and RUN_FILE in sizes:
            found[name] = summary
    return found


def check_results(logs: Sequence[FoundLog], results: Path) -> None:
    """See that no log, and nothing else that no replay wrote, gives way to results.

    Their folder need not be there.

    Raises:
        BatchError: it lies in a log, a log lies where results would, or something else does.
    """
    if results.exists() and not results.is_dir():
        raise BatchError(f"--output {results}: is a file; for several logs it has to be a folder")
    within = results.resolve()
    for log in logs:
        if within.is_relative_to(log.path):
            raise BatchError(f"--output {results}: lies in the log {log.path}; name another folder")
        final = within / log.name
        holds_a_log = any(other.path.is_relative_to(final.resolve()) for other in logs)
        _check_replaceable(final, bool(read_summary(final)) and not holds_a_log)
    ours = bool(read_summary(within, _KIND_OF_ALL))
    for name in (SUMMARY_FILE, SUMMARY_PARQUET, PAGE):
        _check_replaceable(within / name, ours)


def _check_replaceable(path: Path, is_ours: bool) -> None:
    if (path.exists() or path.is_symlink()) and not is_ours:
        why = (
            f"results would replace {path}, which no replay of many logs wrote; name another folder, or"
            " move it away"
        )
        raise BatchError(f"--output {path.parent}: {why}")


@dataclass(frozen=True)
class LogTask:
    """What a worker gets: small, and paths that mean the same on every machine."""

    log: FoundLog
    # with an `output` if the messages are to be kept, which then lie in the log's own folder
    options: ReplayOptions
    folder: Path  # of all results
    run_folder: Path  # in it that of this start, where what is not complete lies
    key: str  # see `result_keys`
    timeout_s: float = 0.0  # how long a try may take; 0: as long as it needs
    beside: int = 1  # so many logs are replayed on one machine at a time, this one among them

    @property
    def name(self) -> str:
        """Of this start, on the cluster."""
        return f"{self.run_folder.name}-{self.log.name}"


@dataclass(frozen=True)
class Ended:
    """How a task ended.

    "" or why it failed, whether it would fail again, and where in the code if that is unknown.

    `before`: why each earlier try ended, by an error or with its worker.
    """

    reason: str = ""
    lasting: bool = False
    traceback: str = ""
    before: tuple[str, ...] = ()


def replay_one(task: LogTask, progress: Progress = lambda _done, _total: None) -> Ended:
    """Replay a log into its folder of results, which gets its name when all of it is there.

    `progress` is called four times a second at most.

    Raises:
        Exception: it failed by what may not fail again.
    """
    if why := why_invisible(task.run_folder):
        return Ended(why, lasting=True)
    before: tuple[str, ...] = ()
    while (note := task.run_folder / f"{task.log.name}.{len(before)}.try").exists():
        before = (*before, note.read_text(encoding="utf-8"))
    note.write_text(LOST, encoding="utf-8")  # which holds if nothing else gets to be written there
    part = task.run_folder / f"{task.log.name}.{len(before)}"
    part.mkdir()
    next_s, until_s = 0.0, time.monotonic() + (task.timeout_s or math.inf)

    def look(done_ns: int, total_ns: int) -> None:
        nonlocal next_s
        now_s = time.monotonic()
        if now_s < next_s:
            return
        next_s = now_s + _LOOK_S
        if now_s >= until_s:
            raise TorchperfError(f"took longer than --timeout {task.timeout_s:g} s")
        if not task.run_folder.is_dir():  # nothing else ends a task of a cluster that stays
            raise TorchperfError("the command that wanted it has ended")
        progress(done_ns, total_ns)

    try:
        _replay_into(part, task, len(before), look)
    except _LASTING as error:
        return Ended(str(error), lasting=True, before=before)
    except Exception as error:
        if task.run_folder.is_dir():
            note.write_text(one_line(error), encoding="utf-8")
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Ended(before=before)


def why_invisible(folder: Path) -> str:
    """Why this machine cannot take part: it does not see the folder of results; "" if it does."""
    where = (
        "logs and results have to lie under the same path on a file system that all machines of the cluster"
        " share"
    )
    return "" if folder.is_dir() else f"{folder.parent} is not there on {socket.gethostname()}; {where}"


def _replay_into(part: Path, task: LogTask, attempt: int, progress: Progress) -> None:
    log = task.log
    if not log.path.exists():
        raise BatchError(f"log {log.path}: is not there on {socket.gethostname()}")
    options = replace(task.options, output=task.options.output and part / OUTPUT_FILE)
    config = read_config(options, log.path)
    if options.pace == "real" and task.beside == 1:
        prefer_this_process(config)
    troubles: list[str] = []
    began_s = time.monotonic()
    result = replay(log.path, sharing(options, config, task.beside), progress, troubles.append)
    if not result.complete:
        raise TorchperfError(troubles[-1])
    write_run(result.run, part / RUN_FILE)
    summary = {
        **result.summary,
        "v": _VERSION,
        "kind": KIND,
        "key": task.key,
        "name": log.name,
        "seconds": time.monotonic() - began_s,
        "host": socket.gethostname(),
        "attempt": attempt,
        "anomalies": len(result.anomalies),
        "troubles": troubles,
        "stages": [
            {**of, "anomalies": len(result.stage(of["name"]).anomalies)} for of in result.summary["stages"]
        ],
        "files": {file.name: file.stat().st_size for file in part.iterdir()},
    }
    (part / SUMMARY_FILE).write_text(
        json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    final = task.folder / log.name
    _check_replaceable(
        final, bool(read_summary(final))
    )  # once more: it may have come while the log was replayed
    if final.exists():
        final.rename(task.run_folder / f"{log.name}.{attempt}.old")
    part.rename(final)


def sharing(options: ReplayOptions, config: NodeConfig, beside: int) -> ReplayOptions:
    """The same with this machine's cores shared among the logs, unless the parameters say how many threads it is."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // beside)
    if config.worker_threads or threads >= cores - 1:  # which is what a worker takes by itself
        return options
    return replace(options, overrides={**options.overrides, "worker_threads": threads})


def summary_rows(summaries: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each log and stage.

    The logs with the most misses first, among equal ones those with the longest p99.

    `summaries` has what each log came to, by name.
    """

    def worst(rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [
            max((r[key] for r in rows if r[key] is not None), default=-1.0)
            for key in ("miss_ratio", "p99_ms")
        ]

    logs = []
    for name, summary in summaries.items():
        log_s, seconds = float(summary["log"]["duration_s"]), float(summary["seconds"])
        own = {
            "path": summary["log"]["path"],
            "reason": None,
            "attempt": summary["attempt"],
            "troubles": len(summary["troubles"]),
            "log_s": log_s,
            "seconds": seconds,
            "speed": log_s / seconds if seconds > 0 else None,
        }
        stages = [
            {**s, **own, "name": name, "stage": s["name"], "frames": s["answered"]}
            for s in summary["stages"]
        ]
        logs.append([{key: stage[key] for key in (*_TEXT, *_WHOLE, *_REAL)} for stage in stages])
    return [row for rows in sorted(logs, key=worst, reverse=True) for row in rows]


def write_summary(
    folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[FoundLog, Ended]
) -> None:
    """Write `summary.json` and `summary.parquet`.

    The rows of `summary_rows`, and how the logs ended that have none.

    Raises:
        OSError: a file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    lost = [
        {"name": log.name, "path": str(log.path), "reason": how.reason, "traceback": how.traceback}
        for log, how in failed.items()
    ]
    content = {"v": _VERSION, "kind": _KIND_OF_ALL, "rows": rows, "failed": lost}
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    kinds = [(name, pa.string()) for name in _TEXT] + [(name, pa.int64()) for name in _WHOLE]
    schema = pa.schema(kinds + [(name, pa.float64()) for name in _REAL])
    table = pa.Table.from_pylist(
        [{name: row.get(name) for name in schema.names} for row in [*rows, *lost]], schema
    )
    with whole_file(folder / SUMMARY_FILE) as part:
        part.write_text(text, encoding="utf-8")
    with whole_file(folder / SUMMARY_PARQUET) as part:
        pq.write_table(table, part, compression="zstd")


def write_page(folder: Path, rows: Sequence[Mapping[str, Any]], failed: Mapping[FoundLog, Ended]) -> str:
    """Write `report.html`.

    All logs in a table, and the worst in detail. Returns where it is, or why there is none.

    One run is in memory at a time, and those that are shown in detail.

    Raises:
        TorchperfError: a run cannot be read, or the page would be too large.
        OSError: a run is gone, or the page cannot be written.
    """
    if importlib.util.find_spec("plotly") is None:
        return "no page, as plotly is not installed: `pip install 'torchperf_ros[analysis]'`"
    from torchperf_ros.observe.runs.report.report_page import Overview, OverviewRow, write_report
    from torchperf_ros.observe.runs.report.report_words import stage_figures
    from torchperf_ros.observe.runs.run_log import RunLog
    from torchperf_ros.replay.input_pictures import input_pictures
    from torchperf_ros.replay.run_reading import read_runs

    names = list(dict.fromkeys(row["name"] for row in rows))
    anomalies = {(row["name"], row["stage"]): row["anomalies"] for row in rows}
    detailed: list[RunLog] = []
    shown: list[OverviewRow] = []
    for name in names:
        (run,) = read_runs(folder / name, lambda _done, _total: None)
        shown += [OverviewRow(name, s.name, stage_figures(s), anomalies[name, s.name]) for s in run.stages]
        if len(detailed) < _WORST:
            detailed.append(run if len(detailed) < _PICTURED else replace(run, recordings=()))
    lost = [(log.name, how.reason) for log, how in failed.items()]
    title = f"{len(names):,} of {len(names) + len(failed):,} logs in {folder.resolve().name}"
    with whole_file(folder / PAGE) as part:
        write_report(detailed, part, lambda _: None, input_pictures, Overview(shown, lost, title))
    return f"all of them on a page: {folder / PAGE}"
