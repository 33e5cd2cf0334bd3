"""Structured records: one JSON object per line for each frame and event, in files that are rotated."""

import contextlib
import fcntl
import json
import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.observe.recorder.record_schema import VERSION
from torchperf_ros.observe.telemetry.record_stream import SENT, FrameRecord
from torchperf_ros.settings.user_folder import make_private
from torchperf_ros.stage.frame_table import KEPT

_FILES = 4
_RECENT = 10_000
_NAME = "records"
_ENCODE = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False
).encode  # `dumps` makes a new one
_COLUMNS = SENT.names or ()
_WRITTEN = (*(name for name, _ in KEPT), "profiled", "step")
# By index; the last is for -1, which is none.
_WORDS: dict[str, list[str | None]] = {
    "outcome": [outcome.word for outcome in Outcome],
    "fallback": [*(fallback.word for fallback in Fallback), None],
    "check": [*(verdict.word for verdict in GuardVerdict), None],
}
# Records of a kind that are written each second.
#
# What comes beyond, in a storm, is counted under `drops`.
_MOST_PER_S = {"frame": 1000, "event": 50}


class RecordLog:
    """Writes `records.jsonl`.

    When that is full it becomes `records.1.jsonl`, and so on; the oldest is removed.

    Another process may write to the same folder: the recorder before this one, which still writes its last
    words, or that of a second node of this name. What is there is looked at anew before each decision, and
    no other one writes or rotates meanwhile.
    """

    def __init__(self, folder: Path, limit_bytes: int, start: Mapping[str, Any]) -> None:
        """Begin a new file.

        Each begins with `start`: node, versions, stages. The limit is for all files together.
        """
        self.problem = ""  # why records cannot be written at present, empty if they can
        self.written = 0  # records written
        self._folder = folder
        self._file_bytes = limit_bytes // _FILES
        self._start = start
        self._tiers = [list(stage["tiers"]) for stage in start["stages"]]
        self._names = [stage["name"] for stage in start["stages"]]
        self._lines: list[str] = []
        self._recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)
        self._this_second: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._path = folder / f"{_NAME}.jsonl"
        # inode and size of the file that has our start, after our last line
        self._begun: tuple[int, int] | None = None

    def frame(self, record: FrameRecord) -> None:
        row, tiers = dict(zip(_COLUMNS, record.row.item(), strict=True)), self._tiers[record.stage]
        shapes, tier = row["shapes"], row["tier"]
        fields: dict[str, Any] = {name: _known(row[name]) for name in _WRITTEN}
        fields |= {name: words[row[name]] for name, words in _WORDS.items()}
        fields |= {
            "stage": self._names[record.stage],
            "tier": tiers[tier] if 0 <= tier < len(tiers) else None,
            "reason": record.reason,
            "stale": bool(row["stale"]),
            "input_shapes": shapes.decode(errors="replace") or None,
            "batch": batch_size(shapes),
        }
        self._add("frame", record.t_ns, fields)

    def event(self, t_ns: int, fields: Mapping[str, Any]) -> None:
        """Add an event; `fields` holds its `kind`, and numbers that are not finite become null."""
        self._add(str(fields["kind"]), t_ns, {key: _finite(value) for key, value in fields.items()})

    def _add(self, kind: str, t_ns: int, fields: Mapping[str, Any]) -> None:
        self._this_second[kind] += 1
        if self._this_second[kind] > _MOST_PER_S.get(kind, _MOST_PER_S["event"]):
            self._dropped[kind] += 1
            return
        line = _ENCODE({"v": VERSION, "kind": kind, "t_ns": t_ns, **fields})
        self._lines.append(line)
        self._recent.append((t_ns, line))

    def since(self, t_ns: int) -> str:
        """The latest records from then on, 10,000 at most, as a file of their own."""
        start = json.dumps({"v": VERSION, "kind": "start", "t_ns": t_ns, **self._start})
        return "\n".join([start, *(line for at_ns, line in self._recent if at_ns >= t_ns)]) + "\n"

    def tick(self, t_ns: int, lost: int) -> None:
        """Once a second: write what has come, and how much was dropped (`lost`: on its way here)."""
        self._this_second.clear()
        if lost:
            self._dropped["lost"] += lost
        if self._dropped:
            dropped, self._dropped = dict(self._dropped), Counter()
            self._add("drops", t_ns, {"records": sum(dropped.values()), "by": dropped})
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            self._write(lines, t_ns)
        except OSError as error:  # a full or read-only disk: reported, counted, and tried again in a second
            self.problem = f"records cannot be written to {self._path}: {error}"
            self._dropped["disk"] += len(lines)
            self._begun = None

    def _write(self, lines: list[str], t_ns: int) -> None:
        make_private(self._folder)
        with self._alone():
            handle = self._open()
            try:
                status = os.fstat(handle)
                begun_inode, begun_bytes = self._begun or (0, 0)
                if (
                    begun_inode != status.st_ino or status.st_size < begun_bytes
                ):  # it is new, or another one's
                    start = {"v": VERSION, "kind": "start", "t_ns": t_ns, **self._start}
                    lines = [_ENCODE(start), *lines]
                data = ("\n".join(lines) + "\n").encode(errors="replace")
                try:
                    _write_all(handle, data)
                except OSError:
                    with contextlib.suppress(
                        OSError
                    ):  # half a line, if the disk was full in the middle of it
                        os.ftruncate(handle, status.st_size)
                    raise
            finally:
                os.close(handle)
        self._begun = status.st_ino, status.st_size + len(data)
        self.written += len(lines)
        self.problem = ""

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # who holds it writes for a moment, to the same disk
            yield
        finally:
            os.close(folder)

    def _open(self) -> int:
        """The file to append to: a new one where it is full."""
        # a FIFO without a reader is an error
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        handle = os.open(self._path, flags, 0o666)
        if os.fstat(handle).st_size < self._file_bytes:
            return handle
        os.close(handle)
        self._rotate()
        return os.open(self._path, flags, 0o666)

    def _rotate(self) -> None:
        """The oldest file goes, each other one becomes one older, and a new one begins."""
        paths = [self._path, *(self._folder / f"{_NAME}.{number}.jsonl" for number in range(1, _FILES))]
        for newer, older in reversed(list(zip(paths, paths[1:], strict=False))):
            if newer.exists():
                newer.replace(older)
        self._begun = None


def _write_all(handle: int, data: bytes) -> None:
    while data:
        data = data[os.write(handle, data) :]


def batch_size(shapes: bytes) -> int | None:
    """The first dimension of the model's first input; None where it has none, or is unknown."""
    first = shapes.partition(b" ")[0].partition(b"x")[0]
    return int(first) if first.isdigit() else None


def _known(value: Any) -> Any:  # noqa: ANN401
    """JSON has no NaN: null; microseconds are exact enough for what was measured in ms."""
    if value.__class__ is not float:
        return value
    return round(value, 3) if math.isfinite(value) else None


def _finite(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
