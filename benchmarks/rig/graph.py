"""The processes of a benchmark's ROS graph: the node, the naive node, the camera, busy neighbours."""

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.rig.bench_stage import ADAPTER, NAIVE, OURS, STAGE, TIERS
from benchmarks.rig.observer import Observer
from benchmarks.rig.report import say
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.tools.demo.drive import ChildProcess, own_graph

_START_S = 120.0
_ON_THE_WAY_S = 0.4
_CONNECT_S, _MOMENT_S = 60.0, 0.5
_STATUS, _NODE_STATUS = f"perf: {STAGE}", "perf: node"


class GraphError(TorchperfError):
    """A process of the benchmark ended or did not start; the message says which, and its last words."""


@functools.cache
def model_options(model_ms: float, device: str = "cpu") -> dict[str, Any]:
    """Options of the bench adapter for a model of this cost here, measured in a process of its own.

    0: the smallest.
    """
    if not model_ms:
        return {"layers": dict.fromkeys(TIERS, 1)}
    say(f"sizing the model for {model_ms:g} ms on {'one thread' if device == 'cpu' else device}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rig.bench_adapter", str(model_ms), device],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return dict(json.loads(done.stdout))


class Graph:
    def __init__(self, namespaces: tuple[str, ...], *, outputs: bool = True, device: str = "cpu") -> None:
        """Join as an onlooker of these namespaces; `device` is what the models of the processes run on."""
        own_graph()
        self.device = device
        self._stack = contextlib.ExitStack()
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="torchperf-bench-"))
        )
        self.observer = Observer(namespaces, outputs=outputs)
        self._stack.callback(self.observer.close)

    def __enter__(self) -> "Graph":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def process(self, name: str, arguments: list[str]) -> ChildProcess:
        """Start `python -m` with these arguments."""
        return self._stack.enter_context(ChildProcess(name, arguments, self.folder))

    def busy(self, count: int) -> None:
        """Start so many processes that each keep a core busy."""
        for number in range(count):
            self.process(f"busy-{number}", ["benchmarks.rig.busy"])

    def wait(
        self, until: Callable[[], bool], what: str, process: ChildProcess, seconds: float = _START_S
    ) -> None:
        """Listen until a condition holds.

        Raises:
            GraphError: it does not hold in time, or the process has ended.
        """

        def holds_or_ended() -> bool:
            return until() or process.exit_status is not None

        if not self.observer.listen(seconds, holds_or_ended) or not until():
            msg = (
                f"not within {seconds:.0f} s: {what}; status"
                f" {process.exit_status}\n{process.errors.tail(12)}"
            )
            raise GraphError(msg)


class PerfNodeProcess:
    """This project's node with one stage, `bench`."""

    def __init__(
        self,
        graph: Graph,
        adapter: str,
        options: dict[str, Any],
        instrumented: Path | None = None,
        metrics_port: int = 0,
        recorder: bool = True,
        node_parameters: Mapping[str, Any] = MappingProxyType({}),
        **stage: Any,
    ) -> None:
        """Start it.

        Args:
            graph: where.
            adapter: `module:Class`.
            options: of the adapter.
            instrumented: file that it writes what its stopwatch measured to, see `instrumented_node`.
            metrics_port: of its exporter; 0: none.
            recorder: whether it is recorded, as by default.
            node_parameters: others of the node, by name.
            stage: parameters of the stage.
        """
        stage = {
            "adapter": adapter,
            "options": json.dumps(options),
            "output": "answer",
            "tiers": list(TIERS),
            "engine": "eager",
            **stage,
        }
        parameters = {
            "stages": [STAGE],
            "metrics_port": metrics_port,
            "worker_threads": 1,
            "device": graph.device,
            STAGE: stage,
            "recorder": recorder,
            "evidence_dir": str(graph.folder / "evidence"),
            **node_parameters,
        }
        file = graph.folder / "parameters.yaml"
        file.write_text(json.dumps({"/**": {"ros__parameters": parameters}}), encoding="utf-8")
        self._graph = graph
        self._workers = 1 if stage.get("backup") == "none" else 2
        module = (
            ["benchmarks.rig.instrumented_node", str(instrumented)]
            if instrumented
            else ["torchperf_ros.node.main"]
        )
        ros_arguments = ["--ros-args", "-r", f"__ns:={OURS}", "--params-file", str(file)]
        self.process = graph.process("node", [*module, *ros_arguments])

    @property
    def counters(self) -> dict[str, str]:
        """What the stage says on `/diagnostics`."""
        return self._graph.observer.values(_STATUS)

    @property
    def pid(self) -> int:
        return int(self._graph.observer.values(_NODE_STATUS)["pid"])

    @property
    def scheduling(self) -> str:
        """How its process is scheduled; its workers run at normal priority."""
        return self._graph.observer.values(_NODE_STATUS).get("scheduling", "")

    def worker_pids(self) -> list[int]:
        pids = [self.counters.get(f"worker_{number}_pid", "") for number in range(self._workers)]
        return [int(pid) for pid in pids if pid]

    def all_ready(self) -> bool:
        """Whether every worker can serve."""
        states = [self.counters.get(f"worker_{number}_state") for number in range(self._workers)]
        return all(state in {"idle", "busy"} for state in states)

    def wait_ready(self, seconds: float = _START_S) -> None:
        """Wait until every worker can serve, as a fresh report says."""
        reports = self._graph.observer.reports
        self._graph.wait(
            lambda: self._graph.observer.reports >= reports + 2 and self.all_ready(),
            f"every worker ready ({self.counters.get('progress', 'nothing heard')})",
            self.process,
            seconds,
        )

    def settled_counters(self) -> dict[str, float]:
        """Counters after what has happened so far: of a report that was not yet on its way."""
        reports = self._graph.observer.reports
        self._graph.wait(lambda: self._graph.observer.reports >= reports + 2, "diagnostics", self.process)
        return {key: float(value) for key, value in self.counters.items() if value.isdecimal()}


class NaiveProcess:
    """The naive node, started anew at once whenever it ends, as `respawn=True` of ROS's launch does.

    Attributes:
        starts: how often it was started.
        scheduling: how its process is scheduled, as it says once it is ready.
    """

    def __init__(
        self,
        graph: Graph,
        adapter: str,
        options: dict[str, Any],
        budget_ms: float,
        margin_ms: float,
        realtime_priority: int = 0,
    ) -> None:
        """Start it; with a priority under SCHED_FIFO, as the other node has it."""
        self._graph = graph
        self._config = {
            "adapter": adapter,
            "options": options,
            "budget_ms": budget_ms,
            "margin_ms": margin_ms,
            "realtime_priority": realtime_priority,
            "device": graph.device,
        }
        self.starts = 0
        self.scheduling = ""
        self._start()

    def _start(self) -> None:
        self.starts += 1
        arguments = [
            "benchmarks.rig.naive_node",
            "--namespace",
            NAIVE,
            "--config",
            json.dumps(self._config),
        ]
        self.process = self._graph.process(f"naive-{self.starts}", arguments)
        self._ready = False

    def respawn(self) -> None:
        """Start it again if it has ended; to be called while listening."""
        if self.process.exit_status is not None:
            self._start()

    def ready(self) -> bool:
        self.respawn()
        for line in self.process.output.lines():
            self._ready |= line == "ready"
            self.scheduling = (
                line.removeprefix("scheduling ") if line.startswith("scheduling") else self.scheduling
            )
        return self._ready

    def wait_ready(self) -> None:
        """Wait until it takes images; raises `GraphError` where it does not within two minutes."""
        if not self._graph.observer.listen(_START_S, self.ready):
            msg = f"the naive node is not ready after {_START_S:.0f} s:\n{self.process.errors.tail(12)}"
            raise GraphError(msg)


class Requests:
    """A process of the rig that answers each line of JSON with one of its own, after a first one that it is ready."""

    def __init__(self, graph: Graph, name: str, arguments: list[str]) -> None:
        """Start it and wait for its first line."""
        self._graph = graph
        self._replies: list[dict[str, Any]] = []
        self.process = graph.process(name, arguments)
        graph.wait(lambda: bool(self._read()), f"the {name}", self.process)
        self._replies.clear()

    def _read(self) -> list[dict[str, Any]]:
        self._replies.extend(json.loads(line) for line in self.process.output.lines())
        return self._replies

    def ask(self, seconds: float, meanwhile: Callable[[], object] = bool, **request: Any) -> dict[str, Any]:
        """What it says to a request that takes so long; `meanwhile` is called until then."""
        self.process.say(json.dumps({"seconds": seconds, **request}))

        def over() -> bool:
            meanwhile()
            return bool(self._read())

        self._graph.wait(over, f"the end of {request}", self.process, seconds + 60)
        return self._replies.pop()


class BareLoopProcess(Requests):
    """The adapter's steps in a bare loop; see `bare_loop.py`."""

    def __init__(self, graph: Graph, adapter: str, options: dict[str, Any], tier: str) -> None:
        config = json.dumps({"adapter": adapter, "options": options, "tier": tier, "device": graph.device})
        super().__init__(graph, "bare loop", ["benchmarks.rig.bare_loop", "--config", config])


class CameraProcess(Requests):
    """The camera; one stream at a time."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, "camera", ["benchmarks.rig.camera_stream"])

    def begin(self, namespace: str, **stream: Any) -> None:
        """Begin to stream, as soon as someone subscribes; its end is not waited for."""
        self.process.say(json.dumps({"topic": f"{namespace}/image", **stream}))

    def connect(self, namespace: str, *, size: str, rate: float) -> None:
        """Stream for a moment until the onlooker hears of an answer.

        From then on all three have found each other.

        Raises:
            GraphError: no answer within a minute.
        """
        seen = self._graph.observer.seen[namespace]
        for _ in range(round(_CONNECT_S / _MOMENT_S)):
            self.stream(namespace, seconds=_MOMENT_S, rate=rate, size=size)
            if seen.rows:
                seen.clear()
                return
        msg = f"no image is answered in {namespace}"
        raise GraphError(msg)

    def stream(self, namespace: str, **stream: Any) -> dict[str, Any]:
        """Stream to `image` in a namespace, listening until it is over; see `ask` and `camera_stream.py`.

        Returns:
            What the camera says: `stamps` of the images, `worst_late_ms` of their publication.
        """
        said = self.ask(topic=f"{namespace}/image", **stream)
        self._graph.observer.listen(_ON_THE_WAY_S)
        return said


class Streaming:
    """A node of this project with one stage and the camera that has found it; a context that ends both.

    Attributes:
        graph, node, camera: the processes.
        seen: what the node has published since it was cleared.
    """

    def __init__(
        self, arguments: Any, *, adapter: str = ADAPTER, outputs: bool = True, **node: Any
    ) -> None:
        """Start them as the arguments say.

        Model, budget, backup, device, and size and rate of the images.
        """
        device = getattr(arguments, "device", "cpu")
        options = model_options(arguments.model_ms, device)
        self._images = {"rate": arguments.rate, "size": arguments.size}
        self.graph = Graph((OURS,), outputs=outputs, device=device)
        self.seen = self.graph.observer.seen[OURS]
        try:
            stage = {"budget_ms": arguments.budget_ms, "backup": getattr(arguments, "backup", ""), **node}
            self.node = PerfNodeProcess(self.graph, adapter, options, **stage)
            self.camera = CameraProcess(self.graph)
            self.node.wait_ready()
            self.camera.connect(OURS, **self._images)
        except BaseException:
            self.graph.__exit__()
            raise

    def __enter__(self) -> "Streaming":
        return self

    def __exit__(self, *_: object) -> None:
        self.graph.__exit__()

    def stream(self, seconds: float, **more: Any) -> dict[str, Any]:
        """Stream for so long, see `CameraProcess.stream`."""
        return self.camera.stream(OURS, seconds=seconds, **self._images, **more)


def sabotaged(
    graph: Graph, name: str, options: dict[str, Any], faults: dict[str, Any], seed: int
) -> tuple[str, dict]:
    """Adapter and options for the bench model with faults.

    The journal is `NAME.jsonl` in the graph's folder.
    """
    return "torchperf_ros.models.sabotage:SabotagedAdapter", {
        "adapter": ADAPTER,
        "options": options,
        "journal": str(graph.folder / f"{name}.jsonl"),
        "faults": faults,
        "seed": seed,
    }


def injected(graph: Graph, name: str) -> Iterator[dict[str, Any]]:
    file = graph.folder / f"{name}.jsonl"
    if file.exists():
        yield from (json.loads(line) for line in file.read_text(encoding="utf-8").splitlines())
