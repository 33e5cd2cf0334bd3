"""Results of many logs on disk: whose they are, and whether they are complete and still true."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torchperf_ros import __version__
from torchperf_ros.replay.many.many_logs import RUN_FILE, SUMMARY_FILE, FoundLog
from torchperf_ros.replay.replay_options import ReplayOptions

_VERSION: Final = 1


def options_key(options: ReplayOptions, keep_output: bool) -> str:
    """What every result depends on: options, parameters, step times, this version; not the code of an adapter.

    Raises:
        OSError: a file that the options name cannot be read.
    """
    told = {**asdict(options), "params": None, "output": None, "keep_output": keep_output}
    contents = [hashlib.blake2b(path.read_bytes()).hexdigest() for path in _files_of(options)]
    return json.dumps([_VERSION, __version__, told, contents], sort_keys=True, default=str)


def result_key(log: FoundLog, of_options: str) -> str:
    """What a log's result depends on: `options_key`, and name, size and time of change of the log's files.

    Raises:
        OSError: a file is gone.
    """
    files = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in log.files]
    return hashlib.blake2b(json.dumps([of_options, files]).encode(), digest_size=16).hexdigest()


def finished(folder: Path, key: str) -> dict[str, Any] | None:
    """What came of a log, if its folder of results is complete and has this key."""
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        complete = summary["key"] == key and all(
            (folder / name).stat().st_size == size for name, size in summary["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return summary if complete and RUN_FILE in summary["files"] else None


def _files_of(options: ReplayOptions) -> Iterator[Path]:
    if options.params is not None:
        yield options.params
    if options.step_times != "log" and (file := Path(options.step_times)).is_file():
        yield file
