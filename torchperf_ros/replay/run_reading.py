"""Reads the runs that a path holds: recorded logs, records, incident folders with both, and replayed runs.

And what a frame was computed from, as small pictures: images of the log whose stamps are the frames'.
"""

import base64
import io
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.text import listed
from torchperf_ros.observe.runs.run_builder import Progress, RunLogBuilder, read_records
from torchperf_ros.observe.runs.run_log import RUN_FILE, SUFFIXES, RunLog, RunLogError, read_run
from torchperf_ros.observe.telemetry.diagnostics import DIAGNOSTICS_TYPE
from torchperf_ros.observe.telemetry.node_state import by_label
from torchperf_ros.observe.telemetry.rows import ROW_TYPE
from torchperf_ros.replay.logs.log_reader import METADATA, LogError, LogMessage, LogReader, is_log
from torchperf_ros.replay.logs.log_reader import SUFFIXES as LOG_SUFFIXES
from torchperf_ros.safety.sensor_points import SensorPoints

_ROTATED: Final = re.compile(r"\.\d+\.jsonl$")
_NO_LOG: Final = "is no rosbag2 folder, .mcap, .db3, .bag, .jsonl or replayed run"


def read_runs(path: Path, progress: Progress, node: str | None = None) -> list[RunLog]:
    """Everything that a path holds; only this `node`, where a recorded log holds several.

    It is a recorded log as `LogReader` takes it, a `.jsonl` file of records, a `.json` or `.parquet` file
    that `torchperf replay` wrote, or a folder with such.

    Raises:
        RunLogError: it does not exist, holds nothing of the kind, or cannot be read.
    """
    if not path.exists():
        raise RunLogError(f"log {path}: does not exist")
    name = path.resolve().name
    if path.suffix == ".jsonl":
        return [read_records(path, name, progress)]
    if path.is_file() and path.suffix in SUFFIXES:
        return [_replayed(path, name)]
    if path.is_file():
        return _read_log(path, name, progress, node)
    if replayed := sorted([*path.glob(RUN_FILE), *path.glob(f"*/{RUN_FILE}")]):
        return [_replayed(file, name if file.parent == path else file.parent.name) for file in replayed]
    documents, recordings = tuple(sorted(path.glob("*.json"))), recorded_logs(path)
    if records := [file for file in sorted(path.glob("*.jsonl")) if not _ROTATED.search(file.name)]:
        # They say more than the topics do; what was recorded beside them shows the inputs.
        names = [name if len(records) == 1 else f"{name}/{file.name}" for file in records]
        runs = [read_records(file, shown, progress) for file, shown in zip(records, names, strict=True)]
    else:
        runs = _read_logs(path, name, recordings, progress, node)
    return [replace(run, documents=documents, recordings=recordings) for run in runs]


def load_run(path: Path) -> RunLog:
    """One run to compare.

    A `RunLogError` where it has no frame that was answered after the start, or is several.
    """
    runs = read_runs(path, lambda _done, _total: None)
    if len(runs) > 1:
        raise RunLogError(
            f"run {path}: holds {len(runs)} runs ({', '.join(run.name for run in runs)}); name one of them"
        )
    if not any(stage.counted.any() for stage in runs[0].stages):
        raise RunLogError(
            f"run {path}: holds no frame that was answered after the start; record `/perf/.*`, or replay"
            " a log"
        )
    return replace(runs[0], name=str(path))


# What only a node publishes, below its name.
_TOPICS: Final = {"latency_stages": ROW_TYPE, "memory_stats": ROW_TYPE, "anomaly": DIAGNOSTICS_TYPE}
_LITTLE_ENDIAN: Final = b"\x00\x01"
_MESSAGES_AT_ONCE: Final = 1_000


def recorded_logs(path: Path) -> tuple[Path, ...]:
    """The recorded logs that a path stands for; none if it is something else."""
    if path.is_file():
        return (path,) if is_log(path) else ()
    if (path / METADATA).is_file():
        return (path,)
    folders = (
        folder for folder in sorted(path.glob("*")) if (folder / METADATA).is_file() or _log_files(folder)
    )
    return tuple(_log_files(path) or folders)


def _log_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.name.endswith(LOG_SUFFIXES))


def _read_logs(
    path: Path, name: str, recordings: tuple[Path, ...], progress: Progress, node: str | None
) -> list[RunLog]:
    """The recorded logs in a folder: its files are one log, folders in it are several."""
    if not recordings:
        raise RunLogError(f"log {path}: {_NO_LOG}, and holds none")
    if recordings[0].is_file():
        recordings = (path,) if len(recordings) > 1 else recordings
    runs: list[RunLog] = []
    errors: list[RunLogError] = []
    for log in recordings:
        try:
            runs += _read_log(log, name if len(recordings) == 1 else f"{name}/{log.name}", progress, node)
        except RunLogError as error:
            errors.append(error)
    if not runs:
        raise errors[0]
    return [replace(run, troubles=(*run.troubles, *map(str, errors))) for run in runs]


class _Rows:
    """Reads labelled arrays.

    After the first of its kind, only the numbers at the end of the bytes are new.
    """

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._labels: list[str] = []
        self._prefix = b""
        self._numbers = struct.Struct("")

    def read(self, message: LogMessage) -> dict[str, float]:
        raw = message.data
        if not self._labels or raw[: -self._numbers.size] != self._prefix:
            array = self._log.decode(message)
            values = by_label(array)
            if raw[:2] != _LITTLE_ENDIAN or len(values) != len(array.data):
                return values
            self._labels, self._numbers = list(values), struct.Struct(f"<{len(values)}d")
            self._prefix = raw[: -self._numbers.size]
        return dict(
            zip(self._labels, self._numbers.unpack_from(raw, len(raw) - self._numbers.size), strict=True)
        )


def _read_log(path: Path, name: str, progress: Progress, node: str | None) -> list[RunLog]:
    notes: list[str] = []
    try:
        if path.is_file() and not is_log(path):
            raise RunLogError(f"log {path}: {_NO_LOG}")
        with LogReader(path, notes.append) as log:
            places = [(*one.name.rpartition("/")[::2], one.type_name) for one in log.topics.values()]
            nodes = sorted({found for found, topic, kind in places if found and _TOPICS.get(topic) == kind})
            builders = {found: RunLogBuilder(found) for found in nodes if node in {None, found}}
            if not builders:
                raise RunLogError(_nothing(path, log, nodes, node))
            _fold_log(log, builders, progress)
            there = {topic.name for topic in log.topics.values() if topic.count}
    except LogError as error:
        raise RunLogError(str(error)) from error
    except OSError as error:
        raise RunLogError(f"log {path}: cannot be read: {error.strerror or error}") from error
    runs = []
    for found, builder in builders.items():
        expected = {
            f"{found}/latency_stages": "latencies, tiers and outcomes",
            f"{found}/memory_stats": "memory",
            f"{found}/anomaly": "anomalies",
            "/diagnostics": "names of stages and tiers, health",
        }
        missing = (
            f"no {topic} in this log: {what}" for topic, what in expected.items() if topic not in there
        )
        run = builder.build(name if len(builders) == 1 else f"{name} {found}", path, tuple(missing))
        runs.append(replace(run, recordings=(path,), troubles=(*run.troubles, *notes)))
    return runs


_TAKES: Final = {
    "latency_stages": RunLogBuilder.row,
    "memory_stats": RunLogBuilder.memory,
    "anomaly": RunLogBuilder.on_anomaly,
}


def _fold_log(log: LogReader, builders: Mapping[str, RunLogBuilder], progress: Progress) -> None:
    wanted = {f"{found}/{topic}": kind for found in builders for topic, kind in _TOPICS.items()}
    wanted["/diagnostics"] = DIAGNOSTICS_TYPE
    topics = [topic for topic in log.topics.values() if wanted.get(topic.name) == topic.type_name]
    total = sum(max(topic.count, 0) for topic in topics)
    rows = {topic.name: _Rows(log) for topic in topics}
    done = 0
    for done, message in enumerate(log.messages([topic.name for topic in topics]), start=1):
        if done % _MESSAGES_AT_ONCE == 0:
            progress(done, total)
        found, _, topic = message.topic.rpartition("/")
        own = [builders[found]] if topic in _TOPICS else list(builders.values())
        take: Callable[[RunLogBuilder, int, Any], None] = _TAKES.get(topic, RunLogBuilder.on_diagnostics)
        is_array = message.type_name == ROW_TYPE
        try:
            value = rows[message.topic].read(message) if is_array else log.decode(message)
            for builder in own:
                take(builder, message.t_ns, value)
        except BadInput as error:
            for builder in own:
                builder.trouble(f"topic {message.topic}: {error}")
    progress(done, total)
    for builder in builders.values() if done < total else ():
        builder.trouble(f"{total - done:,} of {total:,} messages cannot be read")


def _nothing(path: Path, log: LogReader, nodes: list[str], node: str | None) -> str:
    others = f"; it has the nodes {', '.join(nodes)}" if nodes else ""
    return (
        f"log {path}: no node's topics such as {node or '/perf'}/latency_stages{others}; record them with "
        f"`ros2 bag record -e '/perf/.*|/diagnostics'`; it has {listed(sorted(log.topics))}"
    )


def _replayed(file: Path, name: str) -> RunLog:
    """A run with the log that it was made of, which shows its inputs.

    Where that is gone, what was recorded beside a run in the folder of its log may show them.
    """
    run = replace(read_run(file), name=name)
    log = Path(str(run.fact("log", "path") or ""))
    recordings = recorded_logs(log) if log.is_absolute() and log.exists() else ()
    if not recordings and file.name == RUN_FILE:
        recordings = tuple(sorted(file.parent.glob("*.mcap")))
    return replace(run, recordings=recordings)


_IMAGE: Final = "sensor_msgs/msg/Image"
_COMPRESSED: Final = "sensor_msgs/msg/CompressedImage"
_CLOUD: Final = "sensor_msgs/msg/PointCloud2"
_NEAR_MS: Final = 100.0  # a neighbour of the frame shows the scene, too, and says by how much it is off
_NONE_NEAR: Final = f"the log has none with a stamp within {_NEAR_MS:.0f} ms of the frame's"
_SAME_MS: Final = 8.0  # a frame's stamp is known from outside to some milliseconds
_BEFORE_NS: Final = 1_500_000_000
_AFTER_NS: Final = 200_000_000
_NS_PER_MS: Final = 1e6
_CLOUD_CELLS: Final = 240
_CLOUD_M: Final = 40.0
_ANY_M: Final = 1e6  # heights of points that are shown: all
_QUALITY: Final = 70


def input_pictures(
    run: RunLog, chosen: Mapping[str, Collection[int]], side: int
) -> tuple[dict[tuple[str, int], dict[str, str]], str]:
    """Pictures by trigger and stamp in ns, and why some are missing, empty if none is.

    They are of frames that are `chosen` by stage and index, if their stamps are known, and come from the
    run's recordings; what stages publish shows no input. `side`: longest side of a picture in pixels.
    """
    if not run.recordings:
        return {}, "no recorded inputs beside these figures, so the worst frames are shown without pictures"
    rows = [
        (stage.trigger, stage.frames[index]) for stage in run.stages for index in chosen.get(stage.name, ())
    ]
    frames = {(trigger, int(row["stamp_ns"])): int(row["t_ns"]) for trigger, row in rows if row["stamp_ns"]}
    found: dict[tuple[str, int], dict[str, str]] = {}
    failures: dict[tuple[str, int], str] = {}
    triggers = {trigger for trigger, _ in frames if trigger}
    ends = tuple(f"/{stage.output.lstrip('/')}" for stage in run.stages if stage.output)
    for path in run.recordings:
        try:
            with LogReader(path) as log:
                shown = {
                    one.name: one.type_name
                    for one in log.topics.values()
                    if one.type_name in {_IMAGE, _COMPRESSED, _CLOUD}
                    and one.count
                    and not f"/{one.name}".endswith(ends)
                }
                images = [
                    name for name, kind in shown.items() if kind != _CLOUD and "depth" not in name.lower()
                ]
                for key in [key for key in frames if key not in found] if shown else ():
                    topics = (
                        [key[0]]
                        if key[0] in shown
                        else [name for name in shown if name in triggers] or images or list(shown)
                    )
                    try:
                        found[key] = _nearest(log, topics, key[1], frames[key], side)
                    except (ValueError, IndexError, OSError, BadInput, struct.error) as error:
                        failures[key] = str(error)
        except LogError as error:
            failures |= dict.fromkeys(frames, str(error))
    missing = Counter(why for key, why in failures.items() if key not in found)
    if not found and not missing and frames:
        return {}, "no images or point clouds in this log, so the frames' inputs cannot be shown"
    return found, "; ".join(f"{count} frames without a picture: {why}" for why, count in missing.items())


def _nearest(log: LogReader, topics: list[str], stamp_ns: int, t_ns: int, side: int) -> dict[str, str]:
    """The message with the nearest stamp of those recorded shortly before the answer; or a `ValueError`."""
    from PIL import Image

    from torchperf_ros.api.pixels import compressed_pixels, raw_pixels

    near = [
        (abs(off_ms), off_ms, message)
        for message in log.messages(topics, t_ns - _BEFORE_NS, t_ns + _AFTER_NS)
        if abs(off_ms := (header_stamp_ns(message.data) - stamp_ns) / _NS_PER_MS) <= _NEAR_MS
    ]
    if not near:
        raise ValueError(_NONE_NEAR)
    _, off_ms, message = min(near, key=lambda one: one[0])
    if message.type_name == _CLOUD:
        picture = Image.fromarray(_from_above(message.data)).convert("RGB")
    else:
        read = raw_pixels if message.type_name == _IMAGE else compressed_pixels
        picture = Image.fromarray(read(log.decode(message)).rgb())
    picture.thumbnail((side, side))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=_QUALITY, optimize=True)
    return {
        "picture": f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}",
        "words": f"{message.topic}, stamp {off_ms:+.1f} ms from the frame's",
        "off": f"a neighbour, {off_ms:+.0f} ms off" if abs(off_ms) > _SAME_MS else "",
    }


def _from_above(cloud: bytes) -> NDArray[np.uint8]:
    """The points from above, forward up, within 40 m: the more in a cell, the brighter."""
    points = SensorPoints("PointCloud2", (0.0, 0.0, 0.0, 0.0), (-_ANY_M, _ANY_M)).read(cloud)
    x, y = points.x, points.y
    near = (np.abs(x) < _CLOUD_M) & (np.abs(y) < _CLOUD_M)
    cells, _, _ = np.histogram2d(-x[near], -y[near], bins=_CLOUD_CELLS, range=[[-_CLOUD_M, _CLOUD_M]] * 2)
    bright = np.log1p(cells) / max(float(np.log1p(cells.max())), 1.0) * 255
    return bright.astype(np.uint8)
