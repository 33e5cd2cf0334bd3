"""The node with a stopwatch at its joints.

`python -m benchmarks.rig.instrumented_node FILE --ros-args ...`.

Runs the node as its own entry does, and writes to FILE as it ends: `events`, monotonic times in s of what
happens once (of each worker: once per worker), and `samples`, for each joint the wall and processor time of
its calls in us.

A stopwatch takes some us itself. So the parts of a joint are timed in every fourth call only, and such a
call does not count for the whole.
"""

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PARTS_EVERY = 4
_EVENTS: dict[str, float] = {"interpreter": time.monotonic()}
_SAMPLES: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)


def _happened(event: str) -> None:
    if event:
        _EVENTS.setdefault(event, time.monotonic())


class Stopwatch:
    """Times the calls of a method; `parts` are stopwatches of what it calls."""

    def __init__(
        self, owner: type, method: str, name: Callable[..., str | None], parts: Sequence["Stopwatch"] = ()
    ):
        """Wrap the method.

        `name` makes the samples' name from the arguments; None: do not time this call.
        """
        self.on = True
        self._inner, self._name, self._parts, self._calls = getattr(owner, method), name, parts, 0
        stopwatch = self

        @functools.wraps(self._inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return stopwatch.call(*args, **kwargs)

        setattr(owner, method, call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        name = self._name(*args) if self.on else None
        if name is None:
            return self._inner(*args, **kwargs)
        self._calls += 1
        whole = not self._parts or self._calls % _PARTS_EVERY != 0
        for part in self._parts:
            part.on = not whole
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = self._inner(*args, **kwargs)
        took_us = (time.perf_counter_ns() - wall_ns) / 1e3
        if whole:
            _SAMPLES[name].append((took_us, (time.thread_time_ns() - cpu_ns) / 1e3))
        return result


def _noted(
    owner: type, method: str, before: Callable[..., str], after: Callable[..., str] = lambda *_: ""
) -> None:
    """Note what `before` makes of a method's arguments, and `after` of its result and them.

    "" is nothing.
    """
    inner = getattr(owner, method)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        _happened(before(*args))
        result = inner(*args, **kwargs)
        _happened(after(result, *args))
        return result

    setattr(owner, method, call)


def _said(report: Any, worker: Any) -> str:
    if report is None:
        return ""
    kind = type(report).__name__
    return f"worker {worker.number}: {report.text if kind == 'Progress' else kind.lower()}"


def _once_active(event: str, *, when: bool = True) -> str:
    """Warming up is before the first frame that comes in, and before the first that is answered from itself."""
    return event if when and "activate" in _EVENTS else ""


def _topic_of(publisher: Any, *_: Any) -> str:
    return f"publish {publisher.topic_name.rpartition('/')[2]}"


def _instrument() -> Callable[[list[str]], int]:
    from torchperf_ros.node.endpoints import RawPublisher
    from torchperf_ros.node.main import main
    from torchperf_ros.node.node import PerfNode
    from torchperf_ros.node.reporter import Reporter
    from torchperf_ros.observe.recording import Recording
    from torchperf_ros.observe.telemetry.rows import LatencyRecord
    from torchperf_ros.stage.figures import StageStatistics
    from torchperf_ros.workers.worker_process import WorkerProcess

    _happened("imported")
    for method, begun, ended in (
        ("__init__", "node begins", "node constructed"),
        ("on_configure", "configure", "configured"),
        ("on_activate", "activate", "active"),
    ):
        _noted(PerfNode, method, lambda *_, begun=begun: begun, lambda *_, ended=ended: ended)
    _noted(WorkerProcess, "receive_report", lambda *_: "", _said)
    _noted(StageStatistics, "received", lambda *_: _once_active("first frame received"))
    parts = [
        Stopwatch(RawPublisher, "publish", _topic_of),
        Stopwatch(LatencyRecord, "encode", lambda *_: "encode the record"),
        Stopwatch(Recording, "frame", lambda *_: "tell the recorder"),
    ]
    for part in parts:
        part.on = False
    Stopwatch(PerfNode, "_publish_record", lambda *_: "record and publish", parts)
    Stopwatch(StageStatistics, "answered", lambda *_: "count and judge health")
    Stopwatch(Reporter, "report", lambda *_: "report")
    _noted(
        StageStatistics,
        "answered",
        lambda _, answer: _once_active("first fresh answer", when=answer.fallback is None),
    )
    return main


def main() -> int:
    file, *ros_arguments = sys.argv[1:]
    try:
        return _instrument()(ros_arguments)
    finally:
        Path(file).write_text(json.dumps({"events": _EVENTS, "samples": _SAMPLES}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
