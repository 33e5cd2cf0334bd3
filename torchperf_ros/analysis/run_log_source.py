"""What a path is: a recorded log, records, an evidence folder with both, or replayed runs; read as what it is."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torchperf_ros.analysis.run_log import RunLog, RunLogError
from torchperf_ros.analysis.run_log_bag import bag_paths, read_bag
from torchperf_ros.analysis.run_log_records import is_newest, read_records
from torchperf_ros.analysis.run_log_run_file import SUFFIXES, read_replayed, read_run_file, run_files


def read_runs(path: Path, progress: Callable[[int, int], None], node: str | None = None) -> list[RunLog]:
    """Everything that a path holds.

    Args:
        path: a rosbag2 folder, a `.mcap`, `.db3` or `.bag` file, a `.jsonl` file of records, a `.json` or `.parquet`
            file that `torchperf replay` wrote, or a folder with such.
        progress: told how far it is.
        node: only this one, where a recorded log holds several.

    Raises:
        RunLogError: it does not exist, holds nothing of the kind, or cannot be read.
    """
    if not path.exists():
        msg = f"log {path}: does not exist"
        raise RunLogError(msg)
    name = path.resolve().name
    if path.suffix == ".jsonl":
        return [read_records(path, name, progress)]
    if path.is_file() and path.suffix in SUFFIXES:
        return [read_run_file(path, name)]
    if path.is_dir() and (replayed := run_files(path)):
        return read_replayed(path, replayed)
    bags = bag_paths(path)
    documents = sorted(path.glob("*.json")) if path.is_dir() else []
    records = [file for file in sorted(path.glob("*.jsonl")) if path.is_dir() and is_newest(file)]
    if records:  # they tell more than the topics do; what was recorded beside them shows the inputs
        names = [name if len(records) == 1 else f"{name}/{file.name}" for file in records]
        runs = [read_records(file, shown, progress) for file, shown in zip(records, names, strict=True)]
        return [replace(run, documents=tuple(documents), recordings=tuple(bags)) for run in runs]
    if bags:
        runs = read_bag(bags, name, progress, node)
        return [replace(run, documents=tuple(documents), recordings=tuple(bags)) for run in runs]
    msg = f"log {path}: is no rosbag2 folder, .mcap, .db3, .bag, .jsonl or replayed run, and holds none"
    raise RunLogError(msg)
