"""One inspection: compile a model for all its inputs, watch the compiler, time the graphs, and put it together."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from torchperf_ros.analysis.compiler_trace import CompilerTrace, TraceEvent
from torchperf_ros.analysis.graph_breaks import (
    BREAK_EVENT,
    GraphBreak,
    RawBreak,
    merge_breaks,
    parse_break,
    put_cost,
    readable_function,
)
from torchperf_ros.analysis.graph_capture import BEFORE_FIRST, Graph, GraphCapture, Timing, quiet
from torchperf_ros.analysis.graph_remarks import Remark, find_remarks
from torchperf_ros.analysis.inspected_model import Inputs, InspectedModel, InspectError, shapes_text
from torchperf_ros.analysis.recompilations import (
    METRICS_EVENT,
    RECOMPILE_EVENT,
    RawRecompilation,
    Recompilation,
    explain_recompilations,
    parse_recompilation,
)

_Function = tuple[str, str, int]


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        name: of the model.
        device: where it ran.
        backend: what ran the graphs.
        inputs: sizes and types of each input set.
        graphs: in the order of their capture, over all input sets.
        functions: name, file and line of the compiled function, by frame, the first number of a compile id.
        breaks: by line of the user's code, dearest first.
        recompilations: in order.
        remarks: what is worth knowing and no break.
        timings: one for each input set.
        failure: what the compiled model raised where the eager one did not; empty if it ran.
    """

    name: str
    device: str
    backend: str
    inputs: list[str]
    graphs: list[Graph]
    functions: dict[str, _Function]
    breaks: list[GraphBreak]
    recompilations: list[Recompilation]
    remarks: list[Remark]
    timings: list[Timing]
    failure: str

    def function(self, compile_id: str) -> tuple[str, str, int]:
        """Name, file and line of the function that was compiled."""
        name, file, line = self.functions.get(compile_id.partition("/")[0], ("?", "?", 0))
        return readable_function(name), file, line

    @property
    def doubt(self) -> str:
        """Why "no breaks" means nothing here; empty where it does."""
        if self.breaks or self.failure:
            return ""
        if not self.graphs:
            return (
                "no graph: the model does nothing with tensors, or is kept from the compiler by torch.compiler.disable"
            )
        frames = {graph.compile_id.partition("/")[0] for graph in self.graphs if graph.input_set == 0}
        if len(frames) > 1:
            return f"torch {torch.__version__} captures {len(frames)} pieces and does not say what is between them"
        return ""

    def exit_status(self, max_breaks: int | None) -> int:
        """1 where there are more breaks than allowed or that is in doubt, or the compiled model fails; else 0."""
        gate = max_breaks is not None and (len(self.breaks) > max_breaks or bool(self.doubt))
        return 1 if gate or self.failure else 0


class Inspector:
    """Listens to the compiler while a model runs with each input set."""

    def __init__(
        self,
        model: InspectedModel,
        backend: str,
        device: torch.device,
        progress: Callable[[str], None],
        listen: Callable[[TraceEvent], None] | None = None,
        compiling: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Prepare.

        Args:
            model: what to look at.
            backend: of torch.compile, what runs the graphs.
            device: where the model is.
            progress: told what is going on.
            listen: also gets every event of the compiler.
            compiling: makes the context that compilations run in, and measurements do not.

        Raises:
            InspectError: no backend of that name.
        """
        self._model, self._backend, self._device = model, backend, device
        self._progress, self._also, self._compiling = progress, listen, compiling
        try:
            self._capture = GraphCapture(backend, device)
        except Exception as error:  # torch has another class for it in each version
            names = ", ".join(torch.compiler.list_backends())
            msg = f"--backend {backend!r} is not one that torch {torch.__version__} has here: eager, aot_eager, {names}"
            raise InspectError(msg) from error
        self._breaks: list[RawBreak] = []
        self._recompilations: list[RawRecompilation] = []
        self._functions: dict[str, _Function] = {}

    def run(self) -> Inspection:
        """Compile and measure.

        Raises:
            InspectError: the model does not run eagerly on its inputs.
        """
        torch.compiler.reset()
        sets, timings, failure = self._model.input_sets, [], ""
        compiled = torch.compile(self._model.call, backend=self._capture)
        with CompilerTrace(self._listen), quiet():
            for index, inputs in enumerate(sets):
                self._capture.input_set = index
                which = f"input {index + 1} of {len(sets)}, {shapes_text(inputs)}"
                self._progress(f"running eagerly: {which}")
                self._run_eagerly(inputs)
                self._progress(f"capturing graphs with {self._backend}: {which}")
                if not failure:
                    failure = self._run_compiled(compiled, inputs)
                self._progress(f"measuring: {which}")
                timing, failure = self._measure(None if failure else compiled, inputs, failure)
                timings.append(timing)
        torch.compiler.reset()
        graphs = self._capture.graphs
        for graph in graphs:
            if graph.input_set < len(timings):
                graph.ms = timings[graph.input_set].graph_ms.get(graph.index, float("nan"))
        breaks = merge_breaks(self._breaks, graphs, self._functions)
        put_cost(breaks, [timing.gap_ms for timing in timings])
        return Inspection(
            self._model.name, str(self._device), self._backend, [shapes_text(inputs) for inputs in sets],
            graphs, self._functions, breaks,
            explain_recompilations(self._recompilations, self._functions, self._given_up()),
            find_remarks(graphs, len(sets), {(item.line.file, item.line.line) for item in breaks}), timings, failure,
        )  # fmt: skip

    def _listen(self, event: TraceEvent) -> None:
        which = self._capture.input_set
        if event.name == BREAK_EVENT:
            self._breaks.append(parse_break(event, self._capture.last_graph, which))
        elif event.name == RECOMPILE_EVENT:
            self._recompilations.append(parse_recompilation(event, which))
        elif event.name == METRICS_EVENT:
            values = event.values
            frame = event.compile_id.partition("/")[0]
            if values.get("co_name"):
                line = int(values.get("co_firstlineno") or 0)
                self._functions[frame] = (str(values["co_name"]), str(values.get("co_filename")), line)
        if self._also is not None:
            self._also(event)

    def _run_eagerly(self, inputs: Inputs) -> None:
        try:
            with torch.no_grad():
                self._model.call(*(tensor.clone() for tensor in inputs))
        except Exception as error:
            msg = (
                f"{self._model.name} does not run on the inputs {shapes_text(inputs)}, even without the compiler:"
                f" {type(error).__name__}: {error}"
            )
            raise InspectError(msg) from error

    def _run_compiled(self, compiled: Callable[..., Any], inputs: Inputs) -> str:
        self._capture.last_graph = BEFORE_FIRST
        try:
            with torch.no_grad(), self._compiling():
                compiled(*(tensor.clone() for tensor in inputs))
        except Exception as error:
            first = re.sub(r"\s+", " ", str(error).partition("\n\n")[0])
            return f"compiled, it raises {type(error).__name__}: {first}"
        return ""

    def _measure(self, compiled: Callable[..., Any] | None, inputs: Inputs, failure: str) -> tuple[Timing, str]:
        """Times, and what failed so far; a compiled model may also fail when it is run again."""
        if compiled is not None:
            try:
                return self._capture.measure(self._model.call, compiled, inputs), failure
            except Exception as error:
                failure = f"compiled and run again, it raises {type(error).__name__}: {error}"
        try:
            return self._capture.measure(self._model.call, None, inputs), failure
        except Exception as error:
            msg = f"{self._model.name} fails when it is run again: {type(error).__name__}: {error}"
            raise InspectError(msg) from error

    def _given_up(self) -> set[str]:
        """Compile ids beyond the number of compilations that torch allows for a function."""
        config = torch._dynamo.config
        limit = int(getattr(config, "recompile_limit", 0) or getattr(config, "cache_size_limit", 0) or 8)
        return {r.compile_id for r in self._recompilations if int(r.compile_id.partition("/")[2] or 0) >= limit}
