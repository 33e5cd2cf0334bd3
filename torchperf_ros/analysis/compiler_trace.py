"""The compiler's own structured trace (what `TORCH_TRACE` writes), read while it compiles."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

_TRACE = "torch.__trace"
_SET_BY_TORCH = frozenset(
    {"rank", "compiled_autograd_id", "frame_id", "frame_compile_id", "attempt", "stack", "pathname"}
)
_NOISY = ("torch._dynamo", "torch._inductor", "torch.fx")


@dataclass(frozen=True)
class TraceEvent:
    """One thing that the compiler says.

    Attributes:
        name: what it is, for example `dynamo_graph_break_reason` or `inductor_output_code`.
        compile_id: frame and how often it was compiled before, as in `0/1`; empty outside a compilation.
        values: facts, as the compiler names them.
        text: the long form: source code, a reason, a graph.
    """

    name: str
    compile_id: str
    values: dict[str, Any]
    text: str


class CompilerTrace(logging.Handler):
    """Context that hands every event to a listener, and keeps the compiler's warnings off the terminal."""

    def __init__(self, listen: Callable[[TraceEvent], None]) -> None:
        """Call `listen` for each event, on the thread that compiles."""
        super().__init__()
        self._listen = listen
        self._levels: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's trace logger, whose records carry `metadata` and `payload`."""
        metadata = getattr(record, "metadata", {})
        name = next((key for key in metadata if key not in _SET_BY_TORCH), "")
        values = metadata.get(name)
        if not isinstance(values, dict):
            values = {}
        if name == "artifact":
            name = str(values.get("name", name))
        frame, again = metadata.get("frame_id"), metadata.get("frame_compile_id")
        compile_id = "" if frame is None else f"{frame}/{again}"
        self._listen(TraceEvent(name, compile_id, values, getattr(record, "payload", None) or ""))

    def __enter__(self) -> "CompilerTrace":
        # Older versions of torch trace the reason of a graph break only where its log is on, too.
        self._levels = {name: logging.getLogger(name).level for name in _NOISY}
        for name in _NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
        self._breaks_before = (breaks.level, breaks.propagate)
        breaks.setLevel(logging.DEBUG)
        breaks.propagate = False
        breaks.addHandler(_SILENT)
        logging.getLogger(_TRACE).addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        logging.getLogger(_TRACE).removeHandler(self)
        breaks = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
        breaks.removeHandler(_SILENT)
        breaks.setLevel(self._breaks_before[0])
        breaks.propagate = self._breaks_before[1]
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)


def current_compile_id() -> str:
    """Of the compilation that runs on this thread, as `TraceEvent.compile_id` has it."""
    return str(torch._guards.CompileContext.current_compile_id() or "")


_SILENT = logging.NullHandler()
