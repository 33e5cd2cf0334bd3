"""One inspection.

A model runs under torch.compile with each of its inputs, and what the compiler says is kept.
"""

import contextlib
import io
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from torchperf_ros.engines.quantisation import quiet_log
from torchperf_ros.tools.inspect import graph_breaks
from torchperf_ros.tools.inspect.graph_breaks import GraphBreak
from torchperf_ros.tools.inspect.inspected_model import InspectedModel, InspectError, shapes_text
from torchperf_ros.tools.inspect.recompilations import Recompilation, explain_recompilations

# of the compiled model: what changes with each run is compiled 8 times before the compiler gives up
_RUNS = 10
_SEED = 0
_CALLS = ("call_function", "call_method", "call_module")
_TRACE = logging.getLogger("torch.__trace")  # what TORCH_TRACE writes to a file
_BREAKS_LOG = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
_NOWHERE = logging.NullHandler()


@dataclass
class Graph:
    """One captured graph: the `ops` that it calls, in order."""

    index: int
    compile_id: str
    input_set: int
    ops: list[str]
    function: str = "?"

    def op_counts(self) -> Counter[str]:
        """How often each op is called."""
        return Counter(self.ops)


class Inspection(logging.Handler):
    """A model under torch.compile with each of its inputs: what the compiler's trace says.

    Attributes:
        backend: what runs the graphs: `eager` runs their ops one by one, `inductor` compiles them.
        inputs: sizes and types of each input set.
        graphs: in the order of their capture, over all input sets.
        breaks: by line of the user's code, in the order in which they were found.
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
        self.failure = ""
        try:
            self._backend = torch._dynamo.lookup_backend(backend)
        except Exception as error:  # torch has another class for it in each version
            names = ", ".join(torch.compiler.list_backends())
            msg = (
                f"--backend {backend!r} is not one that torch {torch.__version__} has here: eager,"
                f" aot_eager, {names}"
            )
            raise InspectError(msg) from error
        torch.compiler.reset()
        self._model, self._compiled = model, torch.compile(model.call, backend=self._keep, dynamic=dynamic)
        self._functions: dict[str, tuple[str, str, int]] = {}  # by the first number of a compile id
        self._recompile_reasons: list[tuple[str, int, str]] = []
        self._input_set = 0

    @property
    def doubt(self) -> str:
        """Why "no breaks" means nothing here; empty where it does."""
        if self.breaks or self.failure:
            return ""
        if not self.graphs:
            why = (
                "the model does nothing with tensors, or is kept from the compiler by"
                " torch.compiler.disable"
            )
            return f"no graph: {why}"
        frames = {graph.compile_id.partition("/")[0] for graph in self.graphs if graph.input_set == 0}
        if len(frames) <= 1:
            return ""
        return (
            f"torch {torch.__version__} captures {len(frames)} pieces and does not say what is between them"
        )

    def exit_status(self, max_breaks: int | None) -> int:
        """1 where there are more breaks than allowed or that is in doubt, or the compiled model fails.

        Else 0.
        """
        gate = max_breaks is not None and (len(self.breaks) > max_breaks or bool(self.doubt))
        return 1 if gate or self.failure else 0

    def run(self, progress: Callable[[str], None], trace_folder: Path | None = None) -> None:
        """Compile the model with each input set.

        `progress` gets a line on each step; the compiler's trace is kept in the `trace_folder`, which
        exists.

        Raises:
            InspectError: the model does not run eagerly on its inputs.
        """
        with self._listening():
            for index, shapes in enumerate(self.inputs):
                which = f"input {index + 1} of {len(self.inputs)}, {shapes}"
                try:
                    progress(f"running eagerly: {which}")
                    for _ in range(2):  # one that runs only once says nothing about the compiler
                        self._call(self._model.call, index)
                except Exception as error:
                    msg = f"{self.target} does not run on the inputs {shapes}, even without the compiler: "
                    raise InspectError(f"{msg}{type(error).__name__}: {error}") from error
                if not self.failure:
                    progress(f"capturing graphs with {self.backend}: {which}")
                    self.failure = self._compile(index, trace_folder)
        for graph in self.graphs:
            graph.function = graph_breaks.readable_function(self._function(graph.compile_id)[0])
        for item in self.breaks:
            functions = (self._function(compile_id) for compile_id in item.ended)
            users = (
                graph_breaks.own_function(name)
                for name, file, _ in functions
                if graph_breaks.is_users(file)
            )
            item.splits = list(dict.fromkeys(users))
        torch.compiler.reset()
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
            for _ in range(_RUNS - 1):
                self._call(self._compiled, index)
        except Exception as error:
            first = re.sub(r"\s+", " ", str(error).partition("\n\n")[0])
            return f"compiled, it raises {type(error).__name__}: {first}"
        return ""

    def _try_dynamic(self) -> None:
        """Compile with dynamic=True, and say of sizes that vary whether that would have avoided their compilations."""
        again = Inspection(self._model, "eager", self.device, dynamic=True)
        with again._listening():
            failure = next(
                filter(None, (again._compile(index, None) for index in range(len(self.inputs)))), ""
            )
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

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which the compiler is listened to, and neither it nor the model writes to the terminal."""
        nowhere, propagate = io.StringIO(), _BREAKS_LOG.propagate
        with (
            quiet_log("torch._dynamo", "torch._inductor", "torch.fx", _BREAKS_LOG.name),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
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
            item.ended.append(compile_id)
        elif name == "recompile_reasons":
            self._recompile_reasons.append((compile_id, self._input_set, text))
        elif (values := metadata.get("compilation_metrics")) and values.get("co_name"):
            line = int(values.get("co_firstlineno") or 0)
            self._functions[frame_id] = (str(values["co_name"]), str(values.get("co_filename")), line)

    def _call(self, call: Callable[..., Any], index: int) -> None:
        """Run the model on copies of one input set; what it draws at random is the same each time."""
        arguments = tuple(tensor.clone() for tensor in self._model.input_sets[index])
        self._input_set = index
        torch.manual_seed(_SEED)
        with torch.no_grad():
            call(*arguments)

    def _keep(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """The compiler calls this for each graph.

        Graphs without an op only pass values on and are left out.
        """
        compiled: Callable[..., Any] = self._backend(module, inputs)
        ops = [_name_of(node.target) for node in module.graph.nodes if node.op in _CALLS]
        if not ops:
            return compiled
        compile_id = str(torch._guards.CompileContext.current_compile_id() or "")
        self.graphs.append(Graph(len(self.graphs), compile_id, self._input_set, ops))
        return compiled


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
