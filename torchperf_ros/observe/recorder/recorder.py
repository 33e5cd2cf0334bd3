"""The recorder's process: gives what the node sends to the records, the black box and the watch."""

import contextlib
import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from torchperf_ros.observe.recorder.black_box import BlackBox
from torchperf_ros.observe.recorder.record_log import RecordLog
from torchperf_ros.observe.telemetry.record_stream import (
    FrameRecord,
    MessageRecord,
    StreamReader,
    StreamRecord,
    event_bytes,
)
from torchperf_ros.observe.watch.watch import COUNTERS, Watch
from torchperf_ros.workers.incident_folder import open_incidents
from torchperf_ros.workers.process_setup import is_readable, keep_freed_memory

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
