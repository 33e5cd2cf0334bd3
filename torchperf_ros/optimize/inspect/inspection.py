"""One inspection: a model runs under torch.compile with each of its inputs, and what the compiler says is kept."""

import contextlib
import gc
import io
import itertools
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._inductor.config
from torch.utils._pytree import tree_leaves

from torchperf_ros.engines.parts import exported_parts
from torchperf_ros.engines.quantisation import quiet_log
from torchperf_ros.optimize.inspect import graph_breaks
from torchperf_ros.optimize.inspect.graph_breaks import GraphBreak, Kind
from torchperf_ros.optimize.inspect.inspected_model import InspectedModel, InspectError, shapes_text
from torchperf_ros.optimize.inspect.recompilations import Recompilation, explain_recompilations
from torchperf_ros.optimize.inspect.users_source import rewritten

BEFORE_FIRST = -1
"""The gap before the first graph; gap i is what runs after graph i, until the next graph or the end."""

_NS_PER_MS = 1e6
_WARM_UP_RUNS = 3
_MOST_RUNS = 30
_FEWEST_RUNS = 5
_SECONDS = 1.0
_SEED = 0
_ROUNDS = 4  # after the first, in which it compiles; later ones may compile once more
_HELPS = "was tried: it is captured, and answers are the same"
_HELPS_NOT = "was tried: it does not help here"
_CALLS = ("call_function", "call_method", "call_module")
_TRACE = logging.getLogger("torch.__trace")  # what TORCH_TRACE writes to a file
_BREAKS_LOG = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
_NOWHERE = logging.NullHandler()


@dataclass
class Graph:
    """One captured graph: the `ops` that it calls, in order, and their median `ms` in one run, NaN until measured."""

    index: int
    compile_id: str
    input_set: int
    ops: list[str]
    function: str = "?"
    ms: float = float("nan")

    def op_counts(self) -> Counter[str]:
        """How often each op is called."""
        return Counter(self.ops)


@dataclass(frozen=True)
class Timing:
    """Medians over runs with one input set, NaN where unknown; of gaps by their index, see `BEFORE_FIRST`."""

    eager_ms: float
    compiled_ms: float = float("nan")
    between_graphs_ms: float = float("nan")
    graph_ms: dict[int, float] = field(default_factory=dict)
    gap_ms: dict[int, float] = field(default_factory=dict)


class Inspection(logging.Handler):
    """A model under torch.compile with each of its inputs: what the compiler's trace says, and when each graph runs.

    Attributes:
        backend: what runs the graphs: `eager` runs their ops one by one, `inductor` compiles them.
        inputs: sizes and types of each input set.
        graphs: in the order of their capture, over all input sets.
        breaks: by line of the user's code, dearest first.
        parts: why the whole cannot be exported, and what of it can, see `exported_parts`; None of what is no module.
        failure: what the compiled model raised where the eager one did not; empty if it ran.
    """

    def __init__(
        self, model: InspectedModel, backend: str, device: torch.device, *, dynamic: bool | None = None
    ) -> None:
        """Forget what was compiled before; an `InspectError` where there is no backend of that name.

        `dynamic` is torch.compile's.
        """
        super().__init__()  # of the log handler
        self.target, self.backend, self.device = model.name, backend, device
        self.inputs = [shapes_text(inputs) for inputs in model.input_sets]
        self.graphs: list[Graph] = []
        self.breaks: list[GraphBreak] = []
        self.recompilations: list[Recompilation] = []
        self.timings: list[Timing] = []
        self.parts: tuple[str, dict[str, float]] | None = None
        self.failure = ""
        try:
            self._backend = torch._dynamo.lookup_backend(backend)
        except Exception as error:  # torch has another class for it in each version
            names = ", ".join(torch.compiler.list_backends())
            msg = f"--backend {backend!r} is not one that torch {torch.__version__} has here: eager, aot_eager, {names}"
            raise InspectError(msg) from error
        torch.compiler.reset()
        self._model, self._compiled = model, torch.compile(model.call, backend=self._keep, dynamic=dynamic)
        self._functions: dict[str, tuple[str, str, int]] = {}  # by the first number of a compile id
        self._recompile_reasons: list[tuple[str, int, str]] = []
        self._input_set, self._last_graph, self._ended_ns = 0, BEFORE_FIRST, 0
        self._graphs_ns: Counter[int] = Counter()
        self._gaps_ns: Counter[int] = Counter()

    @property
    def doubt(self) -> str:
        """Why "no breaks" means nothing here; empty where it does."""
        if self.breaks or self.failure:
            return ""
        if not self.graphs:
            why = "the model does nothing with tensors, or is kept from the compiler by torch.compiler.disable"
            return f"no graph: {why}"
        frames = {graph.compile_id.partition("/")[0] for graph in self.graphs if graph.input_set == 0}
        if len(frames) <= 1:
            return ""
        return f"torch {torch.__version__} captures {len(frames)} pieces and does not say what is between them"

    def exit_status(self, max_breaks: int | None) -> int:
        """1 where there are more breaks than allowed or that is in doubt, or the compiled model fails; else 0."""
        gate = max_breaks is not None and (len(self.breaks) > max_breaks or bool(self.doubt))
        return 1 if gate or self.failure else 0

    def run(self, progress: Callable[[str], None], trace_folder: Path | None = None) -> None:
        """Compile and measure the model with each input set, and try what it could be written as instead.

        `progress` gets a line on each step; the compiler's trace is kept in the `trace_folder`, which exists.

        Raises:
            InspectError: the model does not run eagerly on its inputs.
        """
        with self._listening():
            for index, shapes in enumerate(self.inputs):
                which = f"input {index + 1} of {len(self.inputs)}, {shapes}"
                try:
                    progress(f"running eagerly: {which}")
                    self._call(self._model.call, index)
                    if not self.failure:
                        progress(f"capturing graphs with {self.backend}: {which}")
                        self.failure = self._compile(index, trace_folder)
                    progress(f"measuring: {which}")
                    self.timings.append(self._measure(index))
                except Exception as error:
                    msg = f"{self.target} does not run on the inputs {shapes}, even without the compiler: "
                    raise InspectError(f"{msg}{type(error).__name__}: {error}") from error
            if isinstance(self._model.call, torch.nn.Module):
                progress("exporting the whole, or what of it can be")
                self.parts = exported_parts(self._model.call, self._model.input_sets)
        for graph in self.graphs:
            graph.function = graph_breaks.readable_function(self._function(graph.compile_id)[0])
            graph.ms = self.timings[graph.input_set].graph_ms.get(graph.index, float("nan"))
        graph_of = {graph.compile_id: graph.index for graph in self.graphs}
        for item in self.breaks:
            gap_ms = self.timings[item.input_set].gap_ms
            item.gaps = list(dict.fromkeys(graph_of.get(compile_id, last) for compile_id, last in item.ended))
            if known := [gap_ms[gap] for gap in item.gaps if gap in gap_ms]:
                item.gap_ms = sum(known)
            functions = (self._function(compile_id) for compile_id, _ in item.ended)
            users = (graph_breaks.own_function(name) for name, file, _ in functions if graph_breaks.is_users(file))
            item.splits = list(dict.fromkeys(users))
            if item.after:
                progress(f"capturing again with line {item.line.line} rewritten")
                if not self._holds(item):
                    item.before = item.after = ""
            if item.kind is Kind.RNN:
                progress("capturing again with allow_rnn")
                with torch._dynamo.config.patch(allow_rnn=True):
                    helps = self._answers_again(item, nullcontext())
                item.tried = f"torch._dynamo.config.allow_rnn = True {_HELPS if helps else _HELPS_NOT}."
        torch.compiler.reset()
        self.breaks.sort(key=lambda item: -item.gap_ms if item.gap_ms == item.gap_ms else 0.0)
        self.recompilations = explain_recompilations(self._recompile_reasons, self._function)
        if any(found.kind == "size" for found in self.recompilations):
            progress("capturing again with dynamic=True")
            self._try_dynamic()

    def _function(self, compile_id: str) -> tuple[str, str, int]:
        return self._functions.get(compile_id.partition("/")[0], ("?", "<unknown>", 0))

    def _compile(self, index: int, trace_folder: Path | None) -> str:
        try:
            with nullcontext() if trace_folder is None else _trace_to(trace_folder):
                self._call(self._compiled, index)
            self._call(self._compiled, index)
        except Exception as error:
            first = re.sub(r"\s+", " ", str(error).partition("\n\n")[0])
            return f"compiled, it raises {type(error).__name__}: {first}"
        return ""

    def _holds(self, item: GraphBreak) -> bool:
        """Whether the model, with this statement rewritten, answers as before, without this break or a new one.

        A break in a loop hides those behind it, so new ones count only where a rewrite can cause them.
        """
        return self._answers_again(item, rewritten(item.line, item.after))

    def _try_dynamic(self) -> None:
        """Compile with dynamic=True, and say of sizes that vary whether that would have avoided their compilations."""
        again = Inspection(self._model, "eager", self.device, dynamic=True)
        with again._listening():
            failure = next(filter(None, (again._compile(index, None) for index in range(len(self.inputs)))), "")
        torch.compiler.reset()
        count, now = len(self.recompilations), len(again._recompile_reasons)
        found = failure or f"{now} recompilation{'' if now == 1 else 's'} instead of {count}"
        tried = f"torch.compile(dynamic=True) was tried: {found}."
        if not failure and 0 < now < count:
            tried += " What is left is compiled for each side of a branch on the size."
        if failure or now >= count:
            tried += " It does not help here."
        self.recompilations = [
            replace(each, advice=f"{each.advice} {tried}") if each.kind == "size" else each
            for each in self.recompilations
        ]

    def _rounds(self, call: Callable[..., Any], sets: range) -> tuple[list[Any], bool]:
        """What it returns for each input set, and whether it leaves tensors behind in each further round."""
        outputs = [self._call(call, index) for index in sets]
        alive = []
        for _ in range(_ROUNDS):
            for index in sets:
                self._call(call, index)
            alive.append(_tensors_alive())
        return outputs, all(before < after for before, after in itertools.pairwise(alive))

    def _answers_again(self, item: GraphBreak, changed: contextlib.AbstractContextManager[None]) -> bool:
        """Whether the model in this context answers as before, without this break, a new one, or a leak."""
        again = Inspection(self._model, "eager", self.device)
        sets = range(item.input_set + 1)
        try:
            with again._listening():
                expected, leaks = again._rounds(self._model.call, sets)
                with changed:
                    found, leaks_now = again._rounds(again._compiled, sets)
        except Exception:  # whatever the user's code or the compiler raises, this rewrite is none
            return False
        before, after = ({broken.place for broken in inspection.breaks} for inspection in (self, again))
        if item.place in after or again.doubt or (item.kind is not Kind.PRINT and not after <= before):
            return False
        return (leaks or not leaks_now) and _alike(expected, found)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which the compiler is listened to, and neither it nor the model writes to the terminal."""
        nowhere, propagate = io.StringIO(), _BREAKS_LOG.propagate
        with (
            quiet_log("torch._dynamo", "torch._inductor", "torch.fx", _BREAKS_LOG.name),
            contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            _BREAKS_LOG.setLevel(logging.DEBUG)  # the trace has some breaks only where this log is on
            _BREAKS_LOG.propagate = False
            _BREAKS_LOG.addHandler(_NOWHERE)
            _TRACE.addHandler(self)
            try:
                yield
            finally:
                _TRACE.removeHandler(self)
                _BREAKS_LOG.removeHandler(_NOWHERE)
                _BREAKS_LOG.propagate = propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's trace logger, whose records carry `metadata` and `payload`."""
        metadata, text = getattr(record, "metadata", {}), getattr(record, "payload", None) or ""
        frame_id = str(metadata.get("frame_id"))
        compile_id = f"{frame_id}/{metadata.get('frame_compile_id')}"
        name = (metadata.get("artifact") or {}).get("name")
        if name == "dynamo_graph_break_reason":
            reason, whole_function, frame = graph_breaks.parse_break(text)
            item = next((known for known in self.breaks if known.place == frame[:2]), None)
            if item is None:
                item = graph_breaks.new_break(reason, frame, self._input_set)
                self.breaks.append(item)
            item.reasons += [] if reason in item.reasons else [reason]
            item.whole_function |= whole_function
            item.ended.append((compile_id, self._last_graph))
        elif name == "recompile_reasons":
            self._recompile_reasons.append((compile_id, self._input_set, text))
        elif (values := metadata.get("compilation_metrics")) and values.get("co_name"):
            line = int(values.get("co_firstlineno") or 0)
            self._functions[frame_id] = (str(values["co_name"]), str(values.get("co_filename")), line)

    def _call(self, call: Callable[..., Any], index: int) -> Any:  # noqa: ANN401 - whatever a model returns
        return self._timed(call, index)[0]

    def _measure(self, index: int) -> Timing:
        """Both ways, warm, in turn so that a disturbance hits both; at most 30 runs or a second, but at least 5."""
        eager_ns: list[int] = []
        runs: list[tuple[int, Counter[int], Counter[int]]] = []
        stop_at = time.monotonic() + _SECONDS
        while len(eager_ns) < _WARM_UP_RUNS + _FEWEST_RUNS or (
            len(eager_ns) < _WARM_UP_RUNS + _MOST_RUNS and time.monotonic() < stop_at
        ):
            eager_ns.append(self._timed(self._model.call, index)[1])
            if not self.failure:
                runs.append((self._timed(self._compiled, index)[1], self._graphs_ns, self._gaps_ns))
        eager_ms, runs = median(eager_ns[_WARM_UP_RUNS:]) / _NS_PER_MS, runs[_WARM_UP_RUNS:]
        if not runs:
            return Timing(eager_ms)
        return Timing(
            eager_ms,
            median(total for total, _, _ in runs) / _NS_PER_MS,
            median(total - graphs.total() for total, graphs, _ in runs) / _NS_PER_MS,
            _medians([graphs for _, graphs, _ in runs]),
            _medians([gaps for _, _, gaps in runs]),
        )

    def _timed(self, call: Callable[..., Any], index: int) -> tuple[Any, int]:
        """What it returns, and the ns that it takes; those of each graph and gap are kept."""
        arguments = tuple(tensor.clone() for tensor in self._model.input_sets[index])
        self._input_set, self._last_graph = index, BEFORE_FIRST
        self._graphs_ns, self._gaps_ns = Counter(), Counter()
        torch.manual_seed(_SEED)
        started_ns = self._ended_ns = self._now_ns()
        with torch.no_grad():
            outputs = call(*arguments)
        stopped_ns = self._now_ns()
        self._gaps_ns[self._last_graph] += stopped_ns - self._ended_ns
        return outputs, stopped_ns - started_ns

    def _keep(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The compiler calls this for each graph; graphs without an op only pass values on and are left out."""
        compiled: Callable[..., Any] = self._backend(module, inputs)
        ops = [_name_of(node.target) for node in module.graph.nodes if node.op in _CALLS]
        if not ops:
            return compiled
        compile_id = str(torch._guards.CompileContext.current_compile_id() or "")
        index = len(self.graphs)
        self.graphs.append(Graph(index, compile_id, self._input_set, ops))

        def timed(*arguments: torch.Tensor) -> Any:  # noqa: ANN401
            started_ns = self._now_ns()
            outputs = compiled(*arguments)
            ended_ns = self._now_ns()
            self._gaps_ns[self._last_graph] += started_ns - self._ended_ns
            self._graphs_ns[index] += ended_ns - started_ns
            self._last_graph, self._ended_ns = index, ended_ns
            return outputs

        return timed

    def _now_ns(self) -> int:
        """The time when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()


@contextlib.contextmanager
def _trace_to(folder: Path) -> Iterator[None]:
    """Context in which the compiler's trace goes to a folder, as TORCH_TRACE has it, with inductor's debug files."""
    handler = torch._logging._internal.LazyTraceHandler(str(folder))
    handler.setFormatter(torch._logging._internal.TorchLogsFormatter(trace=True))
    _TRACE.addHandler(handler)
    # What a cache holds is not compiled, so nothing would be written about it.
    inductor = {"trace.enabled": True, "trace.debug_dir": str(folder), "force_disable_caches": True}
    try:
        with torch._inductor.config.patch(inductor):
            yield
    finally:
        _TRACE.removeHandler(handler)
        handler.close()


def _name_of(target: Any) -> str:  # noqa: ANN401 - what a node of a graph calls
    name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
    return name.rpartition(".")[2]


def _alike(expected: object, found: object) -> bool:
    """Whether two nests of tensors and numbers hold the same values; a number may have become a tensor."""
    values, others = (
        [torch.as_tensor(leaf).cpu() for leaf in tree_leaves(side) if isinstance(leaf, (torch.Tensor, int, float))]
        for side in (expected, found)
    )
    return len(values) == len(others) and all(
        a.shape == b.shape
        and torch.allclose(a.to(torch.complex128), b.to(torch.complex128), 1e-4, 1e-6, equal_nan=True)
        for a, b in zip(values, others, strict=True)
    )


def _tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def _medians(runs: list[Counter[int]]) -> dict[int, float]:
    """In ms; what ran in few runs only is not part of a run."""
    medians = {index: median(run[index] for run in runs) / _NS_PER_MS for index in sorted(set().union(*runs))}
    return {index: ms for index, ms in medians.items() if ms}
