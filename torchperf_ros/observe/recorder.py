"""The recorder's process: gives what the node sends to the records, the black box and the watch.

Structured records are a JSON object per line for each frame and event, in rotated files; their schema is
here.
"""

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from torchperf_ros.api.alert import Level
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Health, Outcome
from torchperf_ros.observe.black_box import BlackBox
from torchperf_ros.observe.telemetry.rows import (
    SENT,
    FrameRecord,
    MessageRecord,
    StreamReader,
    StreamRecord,
    event_bytes,
)
from torchperf_ros.observe.watch.watch import COUNTERS, Watch
from torchperf_ros.settings.files import make_private
from torchperf_ros.stage.frame_table import KEPT, MEANINGS
from torchperf_ros.workers.incident_folder import open_incidents
from torchperf_ros.workers.process_setup import is_readable, keep_freed_memory

VERSION: Final = 1
_FILES: Final = 4
_NAME: Final = "records"
# `dumps` makes a new encoder each time.
_ENCODE: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode
_WRITTEN: Final = (*(name for name, _ in KEPT), "profiled", "step")
# By index; the last is for -1, which is none.
_WORDS: Final[dict[str, list[str | None]]] = {
    "outcome": [outcome.word for outcome in Outcome],
    "fallback": [*(fallback.word for fallback in Fallback), None],
    "check": [*(verdict.word for verdict in GuardVerdict), None],
}
# Records of a kind that are written each second. What comes beyond, in a storm, is counted under `drops`.
_MOST_FRAMES_PER_S: Final = 1000
_MOST_PER_S: Final = 50


class RecordLog:
    """Writes `records.jsonl`.

    When that is full it becomes `records.1.jsonl`, and so on; the oldest is removed.

    Another process may write to the same folder: the recorder before this one, which still writes its last
    words, or that of a second node of this name. What is there is looked at anew before each decision, and
    no other one writes or rotates meanwhile.

    Attributes:
        problem: why records cannot be written at present, empty if they can.
        written: how many were.
    """

    def __init__(self, folder: Path, limit_bytes: int, start: Mapping[str, Any]) -> None:
        """Begin a new file.

        Each begins with `start`: node, versions, stages. The limit is for all files together.
        """
        self.problem = ""
        self.written = 0
        self._folder, self._path = folder, folder / f"{_NAME}.jsonl"
        self._file_bytes = limit_bytes // _FILES
        self._start = start
        self._lines: list[str] = []
        self._recent: deque[tuple[int, str]] = deque(maxlen=10_000)
        self._this_second: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        # inode and size of the file that has our start, after our last line
        self._begun = (0, 0)

    def frame(self, record: FrameRecord) -> None:
        row = dict(zip(SENT.names or (), record.row.item(), strict=True))
        stage, shapes, tier = self._start["stages"][record.stage], row["shapes"], row["tier"]
        fields: dict[str, Any] = {name: _known(row[name]) for name in _WRITTEN}
        fields |= {name: words[row[name]] for name, words in _WORDS.items()}
        fields |= {
            "stage": stage["name"],
            "tier": stage["tiers"][tier] if 0 <= tier < len(stage["tiers"]) else None,
            "reason": record.reason,
            "stale": bool(row["stale"]),
            "input_shapes": shapes.decode(errors="replace") or None,
            "batch": _batch_size(shapes),
        }
        self._add("frame", record.t_ns, fields)

    def event(self, t_ns: int, fields: Mapping[str, Any]) -> None:
        """Add an event; `fields` holds its `kind`, and numbers that are not finite become null."""
        self._add(str(fields["kind"]), t_ns, _finite(fields))

    def _add(self, kind: str, t_ns: int, fields: Mapping[str, Any]) -> None:
        self._this_second[kind] += 1
        if self._this_second[kind] > (_MOST_FRAMES_PER_S if kind == "frame" else _MOST_PER_S):
            self._dropped[kind] += 1
            return
        line = _ENCODE({"v": VERSION, "kind": kind, "t_ns": t_ns, **fields})
        self._lines.append(line)
        self._recent.append((t_ns, line))

    def _start_line(self, t_ns: int) -> str:
        return _ENCODE({"v": VERSION, "kind": "start", "t_ns": t_ns, **self._start})

    def since(self, t_ns: int) -> str:
        """The latest records from then on, 10,000 at most, as a file of their own."""
        lines = [line for at_ns, line in self._recent if at_ns >= t_ns]
        return "\n".join([self._start_line(t_ns), *lines, ""])

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
            self.problem = ""
        except OSError as error:  # a full or read-only disk: reported, counted, and tried again in a second
            self.problem = f"records cannot be written to {self._path}: {error}"
            self._dropped["disk"] += len(lines)
            self._begun = (0, 0)

    def _write(self, lines: list[str], t_ns: int) -> None:
        """Append these lines, while no other process writes to the folder or rotates its files."""
        make_private(self._folder)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # its holder writes for a moment, to the same disk
            if self._path.exists() and self._path.stat().st_size >= self._file_bytes:
                self._rotate()
            with open(self._path, "ab", buffering=0, opener=_open_at_once) as file:
                status = os.fstat(file.fileno())
                inode, size = self._begun
                if inode != status.st_ino or status.st_size < size:  # it is new, or another one's
                    lines = [self._start_line(t_ns), *lines]
                data = "\n".join([*lines, ""]).encode(errors="replace")
                left = data
                try:
                    while left:
                        left = left[file.write(left) :]
                except OSError:  # half a line, if the disk was full in the middle of it
                    with contextlib.suppress(OSError):
                        file.truncate(status.st_size)
                    raise
        finally:
            os.close(folder)
        self._begun = status.st_ino, status.st_size + len(data)
        self.written += len(lines)

    def _rotate(self) -> None:
        paths = [self._path, *(self._folder / f"{_NAME}.{number}.jsonl" for number in range(1, _FILES))]
        for newer, older in reversed(list(zip(paths, paths[1:], strict=False))):
            if newer.exists():
                newer.replace(older)


def _open_at_once(path: str, flags: int) -> int:
    """Without waiting: a FIFO without a reader is an error."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def _batch_size(shapes: bytes) -> int | None:
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
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


# -- the schema of a line, made of the table of a frame's columns and that of events

_Json = dict[str, Any]

_TEXT: Final[_Json] = {"type": "string"}
_COUNT: Final[_Json] = {"type": "integer", "minimum": 0}
_YES_OR_NO: Final[_Json] = {"type": "boolean"}
_REAL: Final[_Json] = {"$ref": "#/$defs/known"}
_STAGE: Final[_Json] = {"$ref": "#/$defs/stage"}
_HEALTH: Final[_Json] = {"$ref": "#/$defs/health"}
# Columns that records of older versions do not have.
_ABSENT: Final = frozenset({"answer_ms", "check", "deadline_ms", "stale", "scene", "missing_inputs"})


def _described(what: _Json, description: str) -> _Json:
    return {**what, "description": description}


def _all(values: _Json) -> _Json:
    return {"type": "object", "additionalProperties": values}


def _or_null(kind: str) -> _Json:
    return {"type": [kind, "null"]}


def _frame() -> tuple[str, _Json, _Json]:
    columns = {name: _REAL if kind == "f8" else _COUNT for name, kind in KEPT if name != "t_ns"}
    columns |= {
        "tier": _or_null("string"),
        "outcome": {"enum": [outcome.word for outcome in Outcome]},
        "fallback": {"enum": [*(fallback.word for fallback in Fallback), None]},
        "check": {"enum": [*(verdict.word for verdict in GuardVerdict), None]},
        "stamp_ns": {"type": "integer"},
        "stale": _YES_OR_NO,
    }
    columns = {
        name: _described(what, MEANINGS[name]) if name in MEANINGS else what
        for name, what in columns.items()
    }
    always = {name: what for name, what in columns.items() if name not in _ABSENT}
    reason = "why it was not on time, or what the guard refused; then a traceback if there is one"
    shapes = (
        "of the model's inputs, as 1x3x480x640 1x6, cut after 48 characters; null: no worker has answered"
    )
    more = {
        "step": _described(_COUNT, "of an anytime model, whose outputs these are; or 0"),
        "input_shapes": _described(_or_null("string"), shapes),
        "batch": _described(
            _or_null("integer"), "first dimension of the model's first input, of all frames of its run"
        ),
    }
    always |= {
        "stage": _STAGE,
        "reason": _described(_TEXT, reason),
        "profiled": _described(_YES_OR_NO, "whether a profiler was recording"),
    }
    return (
        "an answered frame; times in ms",
        always,
        {name: columns[name] for name in columns if name in _ABSENT} | more,
    )


_STARTED: Final[_Json] = {
    "type": "object",
    "required": ["name", "tiers", "budget_ms"],
    "properties": {
        "name": _TEXT,
        "tiers": {"type": "array", "items": _TEXT},
        "budget_ms": {"type": "number"},
        "trigger": _described(
            _or_null("string"), "topic of the input that it runs for, null where another stage gives it out"
        ),
        "output": _described(_TEXT, "topic"),
    },
}
_CANDIDATE_TEXTS: Final = ("pairs", "skipped", "differs", "refused", "failed")
# By kind: what it is, fields that each record of it has, and others.
_KINDS: Final[dict[str, tuple[str, _Json, _Json]]] = {
    "start": (
        "first line of each file, and of each run of the node",
        {"node": _TEXT, "versions": _all(_TEXT), "stages": {"type": "array", "items": _STARTED}},
        {},
    ),
    "frame": _frame(),
    "memory": ("once a second, MiB by the labels of /perf/memory_stats", {"values": _all(_REAL)}, {}),
    "candidate": (
        "every 10 s while a stage has another version of its model, as on /diagnostics",
        {
            "stage": _STAGE,
            "version": _described(_TEXT, "which serves"),
            "candidate": _described(_TEXT, "name and state of the one on trial"),
        },
        {f"candidate_{name}": _TEXT for name in _CANDIDATE_TEXTS},
    ),
    "health": ("a stage's state has changed", {"stage": _STAGE, "from": _HEALTH, "to": _HEALTH}, {}),
    "anomaly": (
        "an alert as /perf/anomaly has it; level OK: it is over",
        {
            "level": {"enum": [level.name for level in Level]},
            "name": _TEXT,
            "message": _TEXT,
            "values": _all(_TEXT),
        },
        {},
    ),
    "signals": (
        "once a second, what the watch judges; by name with its unit, see docs/watching.md",
        {"machine": _all(_REAL), "stages": _all(_all(_REAL))},
        {},
    ),
    "dropped": (
        "frames that were never answered, in the second before",
        {"stage": _STAGE, "superseded": _COUNT},
        {
            "stale": _described(
                _COUNT, "of older records: frames dropped as too old; now they have an answer"
            )
        },
    ),
    "log": (
        "a line of the node's log",
        {"severity": {"enum": ["info", "warn", "error"]}, "text": _TEXT},
        {},
    ),
    "drops": (
        "records that were not written: by kind beyond its rate, lost on the way, or for want of a disk",
        {"records": {"type": "integer", "minimum": 1}, "by": _all({"type": "integer"})},
        {},
    ),
}


def schema() -> str:
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"torchperf_ros records, version {VERSION}",
        "description": "One JSON object per line of records.jsonl. Readers ignore kinds and fields that they do"
        " not know; a new version is announced by v.",
        "type": "object",
        "required": ["v", "kind", "t_ns"],
        "properties": {
            "v": {"const": VERSION},
            "kind": _TEXT,
            "t_ns": {
                "type": "integer",
                "description": "ROS time in ns: of a frame, when its answer was published",
            },
        },
        "$defs": {
            "known": {"type": ["number", "null"], "description": "null where unknown"},
            "stage": _described(_TEXT, "name of the stage"),
            "health": {"enum": [state.name for state in Health]},
        },
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}},
                "then": {"description": text, "required": [*always], "properties": always | other},
            }
            for kind, (text, always, other) in _KINDS.items()
        ],
    }
    return json.dumps(whole, indent=2) + "\n"


_TICK_S = 1.0
_REST_S = 0.005  # in which the rest follows of what the node passes on at once, 20 times a second
_MOST_AT_ONCE = 256
_MIB = 1 << 20


class Recorder:
    """Everything that is recorded of a node, in a process that no frame waits for."""

    def __init__(self, setup: Mapping[str, Any], reader: StreamReader) -> None:
        """Take the node's setup, and its stream, whose socket also carries the reports back."""
        self._reader = reader
        self._setup = setup
        self._ended = False
        self._t_ns = 0
        self._lost = self._refused = 0
        self._refusal = self._watch_problem = ""
        self._evidence = open_incidents(setup["evidence_dir"], setup["evidence_mib"])
        stages = [
            {
                **{key: stage[key] for key in ("name", "tiers", "budget_ms")},
                "trigger": next((topic and topic[0] for topic in stage["inputs"]), None),
                "output": stage["output"][0],
            }
            for stage in setup["stages"]
        ]
        start = {"node": setup["node"], "versions": setup["versions"], "stages": stages}
        folder, size_bytes = Path(setup["record_dir"]), setup["record_mib"] * _MIB
        self._log = RecordLog(folder, size_bytes, start) if size_bytes else None
        self._box = BlackBox(setup, self._evidence)
        self._watch: Watch | None = None
        with self._without_fail():  # there may be an unforeseen message type
            self._watch = Watch(setup) if setup["watch"] else None
        self._known_ns = time.monotonic_ns()
        self._behind = False

    def run(self) -> None:
        """Until the node says that it ends, or is gone: then what is known of its end is written.

        A thread of the node that no frame waits for wakes it. At 30 Hz a ring of three frames has each of
        them still.
        """
        next_tick = time.monotonic() + _TICK_S
        while not self._ended:
            if is_readable(self._reader.socket.fileno(), max(0.0, next_tick - time.monotonic())):
                time.sleep(_REST_S)
            looked_ns, self._behind = time.monotonic_ns(), False
            if not self._take_some() and not self._ended:
                self._node_died()
                break
            if not self._behind:
                self._known_ns = looked_ns
            if time.monotonic() >= next_tick:
                self._tick()
                next_tick = time.monotonic() + _TICK_S
        self._tick()
        self._box.finish()

    def _take_some(self) -> bool:
        """Take what the node has sent, but not so much that all else waits; False at its end."""
        for _ in range(_MOST_AT_ONCE):
            try:
                record = self._reader.read()
                if record is None:
                    return False
                self._take(record)
            except BlockingIOError:
                return True
            # The node died and left a word of ours unread: what it sent before comes next.
            except ConnectionResetError:
                continue
            except OSError:
                return False
            except Exception:  # one unforeseen record must not end the black box
                self._refused += 1
                what = f"{self._refused} records were not understood, the last one"
                self._refusal = f"{what}:\n{traceback.format_exc()}"
        self._behind = True
        return True

    def _take(self, record: StreamRecord) -> None:
        self._t_ns = record.t_ns
        with self._without_fail():
            if self._watch is not None:
                self._watch.take(record)
        if isinstance(record, FrameRecord):
            self._box.frame(record)
            if self._log is not None:
                self._log.frame(record)
        elif isinstance(record, MessageRecord):
            self._box.message(record)
        elif record.fields["kind"] == "end":
            self._ended = True
        elif record.fields["kind"] == "record":
            self._record(record.fields["name"], record.fields["why"], record.fields["stacks"])
        elif record.fields["kind"] != COUNTERS:
            self._event(record.t_ns, record.fields)

    def _event(self, t_ns: int, fields: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.event(t_ns, fields)

    def _record(self, name: str, why: str, stacks: str) -> None:
        stages = [
            {
                "name": one["name"],
                "inputs": [topic and topic[0] for topic in one["inputs"]],
                "output": one["output"][0],
            }
            for one in self._setup["stages"]
        ]
        incident = {
            "name": name,
            "why": why,
            "t_ns": self._t_ns,
            "node": self._setup["node"],
            "stages": stages,
            "versions": self._setup["versions"],
        }
        files = {
            "incident.json": json.dumps(incident, indent=2),
            "parameters.json": json.dumps(self._setup["parameters"], indent=2),
            "stacks.txt": stacks,
        }
        self._box.record(name, time.monotonic(), files, self._records_since)

    def _records_since(self, t_ns: int) -> dict[str, str]:
        return {} if self._log is None else {"records.jsonl": self._log.since(t_ns)}

    def _node_died(self) -> None:
        """The stream ended without an `end`: only this process can still write what came before."""
        signal.alarm(60)  # no other process would end this one, should a disk hang
        gone = "is gone without a word"
        why = f"node {self._setup['node']} (pid {self._setup['pid']}) {gone}"
        self._record(self._evidence.name("node-died"), why, "")
        self._event(self._t_ns, {"kind": "log", "severity": "error", "text": f"the node {gone}"})

    def _tick(self) -> None:
        lost = self._reader.lost
        self._send_findings()
        if self._log is not None:
            self._log.tick(self._t_ns, lost - self._lost)
        self._lost = lost
        self._box.tick(time.monotonic())
        problems = ["" if self._log is None else self._log.problem, self._box.problem]
        self._send(
            kind="status",
            problem="; ".join(filter(None, (*problems, self._watch_problem, self._refusal))),
            written=0 if self._log is None else self._log.written,
            incidents=self._box.incidents,
            held_mib=round(self._box.held_bytes / _MIB, 1),
            lost=lost,
            overwritten=self._reader.overwritten,
            **({} if self._watch is None else {"gpu": self._watch.gpu}),
        )

    def _send_findings(self) -> None:
        with self._without_fail():
            if self._watch is None:
                return
            for found in self._watch.tick(time.monotonic_ns(), self._known_ns):
                fields = {"name": found.name, "message": found.message, "values": dict(found.values)}
                self._send(kind="finding", level=found.level.name, **fields)
            if self._t_ns:
                self._event(self._t_ns, {"kind": "signals", **self._watch.signals})

    @contextlib.contextmanager
    def _without_fail(self) -> Iterator[None]:
        """An error of the watch ends the watch: what is recorded must not depend on it."""
        try:
            yield
        except Exception:  # the watch's boundary: each status names it from now on
            self._watch = None
            what = "the watch has ended, nothing is judged any more"
            self._watch_problem = f"{what}:\n{traceback.format_exc()}"

    def _send(self, **fields: Any) -> None:  # noqa: ANN401 - JSON
        with contextlib.suppress(OSError):  # the node does not listen at present; it hears the next one
            self._reader.socket.send(event_bytes(fields)[0])


def main(node_fd: int, setup_fd: int, ring_fd: int, *stage_fds: int) -> None:
    """Take the setup, record, and end some time after the node; spawned by `RecorderProcess`."""
    # The images of an incident, up to twice black_box_mib, go back to the system once they are written.
    # Without these bounds the C library learns from the first ones to keep such buffers: 280 MiB for the
    # rest of the drive.
    keep_freed_memory(_MIB, _MIB)
    with contextlib.suppress(psutil.Error, OSError):  # a kernel without it: then the disk is shared evenly
        psutil.Process().ionice(psutil.IOPRIO_CLASS_IDLE)
    with os.fdopen(setup_fd, "rb") as file:
        setup = json.load(file)
    node = socket.socket(fileno=node_fd)
    node.setblocking(False)
    Recorder(setup, StreamReader(node, ring_fd, list(stage_fds))).run()
