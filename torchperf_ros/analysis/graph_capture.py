"""The graphs that torch.compile makes of a model, and the time that is spent in each and between them."""

import contextlib
import io
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from torchperf_ros.analysis.compiler_trace import current_compile_id
from torchperf_ros.analysis.inspected_model import Inputs

BEFORE_FIRST = -1
"""The gap before the first graph; gap i is what runs after graph i, until the next graph or the end."""

_NS_PER_MS = 1e6
_WARM_UP_RUNS = 3
_MOST_RUNS = 30
_FEWEST_RUNS = 5
_SECONDS = 1.0
_CALLS = ("call_function", "call_method", "call_module")


@dataclass(frozen=True)
class Op:
    """One call in a graph.

    Attributes:
        name: of the function, method or module called.
        traced_numpy: whether it is a NumPy function that the compiler carries out with torch.
        module: path of the innermost module that it belongs to, empty where there is none.
        stack: where it comes from in Python, as formatted frames, outermost first.
    """

    name: str
    traced_numpy: bool
    module: str
    stack: str


@dataclass
class Graph:
    """One captured graph.

    Attributes:
        index: in order of capture.
        compile_id: the compilation that it came from.
        input_set: which input set it was captured for.
        ops: its calls, in order.
        ms: median time of its executions in one run; NaN until measured.
    """

    index: int
    compile_id: str
    input_set: int
    ops: list[Op]
    ms: float = float("nan")

    def op_counts(self) -> dict[str, int]:
        """How often each op is called, most frequent first."""
        return dict(Counter(op.name for op in self.ops).most_common())


@dataclass(frozen=True)
class Timing:
    """Medians over runs with one input set.

    Attributes:
        eager_ms: the model as it is, without the compiler.
        compiled_ms: compiled, graphs and everything between; NaN where it does not run compiled.
        graph_ms: by graph index.
        gap_ms: by gap index, see `BEFORE_FIRST`.
        between_ms: compiled_ms less the graphs.
    """

    eager_ms: float
    compiled_ms: float = float("nan")
    graph_ms: dict[int, float] = field(default_factory=dict)
    gap_ms: dict[int, float] = field(default_factory=dict)
    between_ms: float = float("nan")


class GraphCapture:
    """A backend for torch.compile that keeps every graph and notes when each one runs."""

    def __init__(self, backend: str, device: torch.device) -> None:
        """Hand graphs on to this backend: `eager` runs their ops one by one, `inductor` compiles them.

        Raises:
            torch._dynamo.exc.InvalidBackend: no backend of that name.
        """
        self.graphs: list[Graph] = []
        self.input_set = 0
        self.last_graph = BEFORE_FIRST
        self._compile = torch._dynamo.lookup_backend(backend)
        self._device = device
        self._spans_ns: list[tuple[int, int, int]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Called by the compiler for each graph; graphs without an op only pass values on and are left out."""
        ops = [_op(node) for node in module.graph.nodes if node.op in _CALLS]
        compiled = self._compile(module, inputs)
        if not ops:
            return compiled
        graph = Graph(len(self.graphs), current_compile_id(), self.input_set, ops)
        self.graphs.append(graph)

        def timed(*arguments: torch.Tensor) -> Any:  # noqa: ANN401
            self._synchronize()
            started_ns = time.perf_counter_ns()
            outputs = compiled(*arguments)
            self._synchronize()
            self._spans_ns.append((graph.index, started_ns, time.perf_counter_ns()))
            self.last_graph = graph.index
            return outputs

        return timed

    def measure(self, eager: Callable[..., Any], compiled: Callable[..., Any] | None, inputs: Inputs) -> Timing:
        """Both ways, warm, in turn so that a disturbance hits both; at most 30 runs or a second, but at least 5."""
        eager_ms: list[float] = []
        runs: list[tuple[float, dict[int, float], dict[int, float]]] = []
        for _ in range(_WARM_UP_RUNS):
            self._run(eager, inputs)
            if compiled is not None:
                self._run(compiled, inputs)
        stop_at = time.monotonic() + _SECONDS
        while len(eager_ms) < _MOST_RUNS and (len(eager_ms) < _FEWEST_RUNS or time.monotonic() < stop_at):
            eager_ms.append(self._run(eager, inputs)[0])
            if compiled is not None:
                runs.append(self._run(compiled, inputs))
        if not runs:
            return Timing(median(eager_ms))
        return Timing(
            median(eager_ms),
            median(total for total, _, _ in runs),
            _medians([graphs for _, graphs, _ in runs]),
            _medians([gaps for _, _, gaps in runs]),
            median(total - sum(graphs.values()) for total, graphs, _ in runs),
        )

    def _run(self, model: Callable[..., Any], inputs: Inputs) -> tuple[float, dict[int, float], dict[int, float]]:
        """Time in ms: of all, in each graph, in each gap."""
        arguments = tuple(tensor.clone() for tensor in inputs)
        self._spans_ns.clear()
        self.last_graph = BEFORE_FIRST
        self._synchronize()
        started_ns = ended_ns = time.perf_counter_ns()
        with torch.no_grad():
            model(*arguments)
        self._synchronize()
        stopped_ns = time.perf_counter_ns()
        graphs: Counter[int] = Counter()
        gaps: Counter[int] = Counter()
        last = BEFORE_FIRST
        for index, begin_ns, end_ns in self._spans_ns:
            gaps[last] += begin_ns - ended_ns
            graphs[index] += end_ns - begin_ns
            last, ended_ns = index, end_ns
        gaps[last] += stopped_ns - ended_ns
        return (stopped_ns - started_ns) / _NS_PER_MS, _in_ms(graphs), _in_ms(gaps)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While a model runs dozens of times, what it prints and warns of is not shown."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def _op(node: torch.fx.Node) -> Op:
    target = node.target
    kind = type(target).__name__
    name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(modules[-1][0]) if modules else ""
    return Op(name.rpartition(".")[2], kind.startswith("numpy_"), path, str(node.meta.get("stack_trace") or ""))


def _in_ms(times_ns: Counter[int]) -> dict[int, float]:
    return {index: ns / _NS_PER_MS for index, ns in times_ns.items()}


def _medians(runs: list[dict[int, float]]) -> dict[int, float]:
    indices = sorted({index for run in runs for index in run})
    medians = {index: median(run.get(index, 0.0) for run in runs) for index in indices}
    return {index: ms for index, ms in medians.items() if ms}  # what ran in few runs only is not part of a run
