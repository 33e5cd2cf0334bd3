"""A run that `torchperf replay` wrote down, as a `RunLog`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from torchperf_ros.analysis.run_log import COLUMNS, LoggedAnomaly, RunLog, RunLogError, StageLog
from torchperf_ros.analysis.run_log_bag import bag_paths
from torchperf_ros.core.run_file import RunFileError, read_run

RUN_FILE = "run.parquet"
"""The run in the folder of a log that was replayed beside others."""
SUFFIXES = (".json", ".parquet")
_NODE = "/perf"
_NO_DEADLINES = "fast"
_MEMORY = {
    "rss_mib": "workers_rss_mib",
    "own_rss_mib": "node_rss_mib",
}  # sampled in the replay's time from its start on
_VERSIONS = ("torchperf_ros", "commit", "pace")


def run_files(folder: Path) -> list[Path]:
    """The runs in a folder of one log that was replayed, or of many."""
    return sorted([*folder.glob(RUN_FILE), *folder.glob(f"*/{RUN_FILE}")])


def read_run_file(path: Path, name: str) -> RunLog:
    """Read what `write_run` wrote.

    Args:
        path: a `.json` or `.parquet` file.
        name: what the report calls it.

    Raises:
        RunLogError: it cannot be read, or is no run.
    """
    try:
        run = read_run(path)
    except RunFileError as error:
        raise RunLogError(str(error)) from error
    summary = run.summary
    stages = []
    for told in summary["stages"]:
        rows = run.frames[told["name"]]
        order = np.argsort(rows["t_ns"], kind="stable")
        drops = [told[word] for word in ("superseded", "stale") if word in told]
        reasons = {int(seq): str(reason) for seq, reason in (told.get("reasons") or {}).items()}
        columns = {column: rows[column][order] for column in COLUMNS}
        if summary.get("pace") == _NO_DEADLINES:
            columns["budget_ms"] = np.full(len(rows), np.nan)
        at_ns = dict(zip(rows["seq"].tolist(), rows["t_ns"].tolist(), strict=True)) if reasons else {}
        stages.append(
            StageLog(
                str(told["name"]), tuple(map(str, told.get("tiers") or ())),
                columns, dropped=sum(drops) if drops else None,
                reasons={at_ns[seq]: reason for seq, reason in reasons.items() if seq in at_ns},
            )
        )  # fmt: skip
    anomalies = [_anomaly(told) for told in summary.get("anomalies") or ()]
    memory = summary.get("memory") or {}
    begin_ns = min((int(stage.frames["t_ns"][0]) for stage in stages if len(stage)), default=0)
    return RunLog(
        name, path, _NODE, tuple(stages), begin_ns + np.array(memory.get("t_ns") or (), dtype=np.int64),
        {label: np.array(memory[key], dtype=np.float64) for key, label in _MEMORY.items() if key in memory},
        tuple(sorted(anomalies, key=lambda anomaly: anomaly.t_ns)),
        {key: str(summary[key]) for key in _VERSIONS if key in summary},
        missing=() if memory.get("t_ns") else ("no memory samples in this run: memory",),
        troubles=tuple(map(str, summary.get("troubles") or ())),
        recordings=_recordings(summary),
    )  # fmt: skip


def read_replayed(folder: Path, files: list[Path]) -> list[RunLog]:
    """Read the runs of a folder; where a log is gone, what was recorded beside its run may show its inputs."""
    runs = []
    for file in files:
        run = read_run_file(file, folder.resolve().name if file.parent == folder else file.parent.name)
        runs.append(run if run.recordings else replace(run, recordings=tuple(sorted(file.parent.glob("*.mcap")))))
    return runs


def _recordings(summary: Mapping[str, Any]) -> tuple[Path, ...]:
    """The log that was replayed, which shows the inputs, if it is still there."""
    log = Path(str((summary.get("log") or {}).get("path", "")))
    return tuple(bag_paths(log)) if log.is_absolute() and log.exists() else ()


def _anomaly(told: Mapping[str, Any]) -> LoggedAnomaly:
    values = {str(key): str(value) for key, value in (told.get("values") or {}).items()}
    return LoggedAnomaly(int(told["t_ns"]), str(told["level"]), str(told["name"]), str(told["message"]), values)
