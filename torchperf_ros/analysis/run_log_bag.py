"""A recorded log (MCAP, rosbag2, ROS 1 bag) with a node's topics in it, as a `RunLog` for each node."""

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rosbags.highlevel import AnyReader
from rosbags.typesys import Stores, get_typestore

from torchperf_ros.analysis.run_log import RunLog, RunLogError
from torchperf_ros.analysis.run_log_builder import RunLogBuilder

Progress = Callable[[int, int], None]
"""Told how many of how many messages have been read."""

_ARRAY = "std_msgs/msg/Float64MultiArray"
_FLOAT = "std_msgs/msg/Float64"
_DIAGNOSTICS = "diagnostic_msgs/msg/DiagnosticArray"
_TOPICS = {"latency_stages": _ARRAY, "memory_stats": _ARRAY, "anomaly": _DIAGNOSTICS}
_LITTLE_ENDIAN = b"\x00\x01"
_TOLD_EVERY = 1_000
_BAGS = {".mcap", ".db3", ".bag"}


def bag_paths(path: Path) -> list[Path]:
    """The recorded logs that a path stands for, as `rosbags` takes them; none if it is something else."""
    if path.is_file():
        return [path] if path.suffix in _BAGS else []
    if (path / "metadata.yaml").is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if file.suffix in _BAGS)
    return found or sorted(file.parent for file in path.glob("*/metadata.yaml"))


class _Rows:
    """Reads labelled arrays: after the first of its kind, only the numbers at the end of the bytes are new."""

    def __init__(self, decode: Callable[[bytes], Any]) -> None:
        self._decode = decode
        self._labels: list[str] = []
        self._prefix = b""
        self._numbers = struct.Struct("")

    def read(self, raw: bytes) -> dict[str, float]:
        if not self._labels or bytes(raw[: -self._numbers.size]) != self._prefix:
            message = self._decode(raw)
            labels = [dim.label for dim in message.layout.dim][: len(message.data)]
            if bytes(raw[:2]) != _LITTLE_ENDIAN or len(labels) != len(message.data) or not labels:
                return dict(zip(labels, map(float, message.data), strict=False))
            self._labels, self._numbers = labels, struct.Struct(f"<{len(labels)}d")
            self._prefix = bytes(raw[: -self._numbers.size])
        return dict(zip(self._labels, self._numbers.unpack_from(raw, len(raw) - self._numbers.size), strict=True))


def read_bag(paths: Sequence[Path], name: str, progress: Progress, node: str | None = None) -> list[RunLog]:
    """Read what nodes said about themselves, one log for each node that is in it.

    A log that is damaged is read up to there, and says so.

    Args:
        paths: a rosbag2 folder, `.mcap`, `.db3` or `.bag` files that belong together.
        name: what the report calls it.
        progress: told how far it is.
        node: only this one, for example `/perf`.

    Raises:
        RunLogError: it cannot be read, or no node, or not this one, has left its topics in it.
    """
    try:
        reader = AnyReader(list(paths), default_typestore=get_typestore(Stores.ROS2_JAZZY))
        reader.open()
    except Exception as error:  # a stranger's file: rosbags raises its own errors, assertions, struct.error, lz4's, ...
        why = str(error).splitlines()[0] if str(error) else "its index is damaged"
        msg = f"log {paths[0]}: cannot be read: {why} ({type(error).__name__})"
        raise RunLogError(msg) from error
    try:
        builders = {found: RunLogBuilder(found) for found in _nodes(reader) if node in {None, found}}
        if not builders:
            raise RunLogError(_nothing(paths[0], reader, node))
        _read(reader, builders, progress)
        stem = {found: name if len(builders) == 1 else f"{name} {found}" for found in builders}
        return [builder.build(stem[found], paths[0], _missing(reader, found)) for found, builder in builders.items()]
    finally:
        reader.close()


def _read(reader: AnyReader, builders: dict[str, RunLogBuilder], progress: Progress) -> None:
    wanted = {f"{found}/{topic}": type_name for found in builders for topic, type_name in _TOPICS.items()}
    wanted["/diagnostics"] = _DIAGNOSTICS
    connections = [c for c in reader.connections if wanted.get(c.topic) == c.msgtype]
    total, done = sum(c.msgcount for c in connections), 0
    rows = {c.topic: _Rows(_decoder(reader, c.msgtype)) for c in connections if c.msgtype == _ARRAY}
    try:
        for connection, t_ns, raw in reader.messages(connections) if connections else ():
            found, _, topic = connection.topic.rpartition("/")
            if topic == "latency_stages":
                builders[found].row(t_ns, rows[connection.topic].read(raw))
            elif topic == "memory_stats":
                builders[found].memory(t_ns, rows[connection.topic].read(raw))
            elif topic == "anomaly":
                builders[found].on_anomaly(t_ns, reader.deserialize(raw, connection.msgtype))
            else:
                message = reader.deserialize(raw, connection.msgtype)
                for builder in builders.values():
                    builder.on_diagnostics(t_ns, message)
            done += 1
            if done % _TOLD_EVERY == 0:
                progress(done, total)
    except Exception as error:  # see above: a damaged chunk may raise anything
        for builder in builders.values():
            builder.trouble(f"{total - done:,} of {total:,} messages cannot be read: {type(error).__name__}: {error}")
    else:
        if done < total:  # a damaged chunk may also end the messages as if there were no more
            for builder in builders.values():
                builder.trouble(f"{total - done:,} of {total:,} messages are not there: the log is damaged")
    progress(done, total)


def _decoder(reader: AnyReader, type_name: str) -> Callable[[bytes], Any]:
    return lambda raw: reader.deserialize(raw, type_name)


def _nodes(reader: AnyReader) -> list[str]:
    """Names of the nodes that have left their topics, by what only they publish."""
    found = {c.topic.rpartition("/")[0] for c in reader.connections if _TOPICS.get(_leaf(c.topic)) == c.msgtype}
    return sorted(name for name in found if name)


def _leaf(topic: str) -> str:
    return topic.rpartition("/")[2]


def _missing(reader: AnyReader, node: str) -> list[str]:
    counts = {c.topic: 0 for c in reader.connections}
    for connection in reader.connections:
        counts[connection.topic] += connection.msgcount
    expected = {
        f"{node}/latency_stages": "latencies, tiers and outcomes",
        f"{node}/memory_stats": "memory",
        f"{node}/anomaly": "anomalies",
        "/diagnostics": "names of stages and tiers, health",
    }
    return [f"no {topic} in this log: {what}" for topic, what in expected.items() if not counts.get(topic)]


def _nothing(path: Path, reader: AnyReader, node: str | None) -> str:
    topics = sorted({c.topic for c in reader.connections})
    shown = ", ".join(topics[:6]) + (f" and {len(topics) - 6} more" if len(topics) > 6 else "")  # noqa: PLR2004
    wanted = f"{node or '/perf'}/latency_stages"
    nodes = f"; it has the nodes {', '.join(_nodes(reader))}" if node and _nodes(reader) else ""
    return (
        f"log {path}: no node's topics such as {wanted}{nodes}; record them with "
        f"`ros2 bag record -e '/perf/.*|/diagnostics'`; it has {shown or 'no topics'}"
    )
