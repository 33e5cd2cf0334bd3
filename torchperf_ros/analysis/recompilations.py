"""Why a model is compiled again when it meets other inputs: the guard that failed, and what would help."""

import json
import re
from collections import Counter
from dataclasses import dataclass

from torchperf_ros.analysis.compiler_trace import TraceEvent
from torchperf_ros.analysis.graph_breaks import readable_function

RECOMPILE_EVENT = "recompile_reasons"
METRICS_EVENT = "compilation_metrics"

_PLACE = re.compile(r"#\s*(?P<text>[^#]*?)\s*#\s*(?P<file>\S+?):(?P<line>\d+) in \w+")
_ADVICE = {
    "size": "Happens once for each dimension that varies; torch._dynamo.mark_dynamic(x, dim) before the first call"
    " or torch.compile(dynamic=True) avoids it.",
    "unrolled": "The size is built into the graph, as by a Python loop over that dimension: each size is compiled"
    " anew. Work on the whole tensor instead.",
    "shape branch": "Each side is a graph of its own. Pad to one size, or mask instead of `if`.",
    "one": "Sizes 0 and 1 always get graphs of their own: pad to 2, or warm up with both.",
    "dtype": "Cast in preprocess, so that the model always gets the same type.",
    "stride": "Call .contiguous() on it before, so that the memory layout is always the same.",
    "value": "A Python value is built into the graph: pass it as a tensor, or keep it constant.",
    "limit": "The compiler has given up on this function, which now runs uncompiled.",
}


@dataclass(frozen=True)
class Recompilation:
    """One more compilation of a function that had been compiled.

    Attributes:
        function: name, file and line of it.
        file: where it is defined.
        line: from 1.
        input_set: the inputs that caused it.
        kind: size, unrolled, shape branch, one, dtype, stride, value or limit.
        guard: the condition that the compiled code had assumed and that does not hold, in the compiler's words.
        source: `file:line: text` of the user's code that asked for this condition, where the compiler knows it.
        advice: what would avoid it.
    """

    function: str
    file: str
    line: int
    input_set: int
    kind: str
    guard: str
    source: str
    advice: str


@dataclass(frozen=True)
class RawRecompilation:
    """The compiler's words: the compilation, the guards that failed (newest first), and whose inputs."""

    compile_id: str
    guards: tuple[str, ...]
    input_set: int


def parse_recompilation(event: TraceEvent, input_set: int) -> RawRecompilation:
    """Read the reasons: one text, or a JSON list with one for each earlier compilation."""
    try:
        reasons = json.loads(event.text)
    except ValueError:
        reasons = [event.text]
    texts = [re.sub(r"^\d+/\d+: ", "", str(reason)) for reason in (reasons if isinstance(reasons, list) else [reasons])]
    return RawRecompilation(event.compile_id, tuple(texts), input_set)


def explain_recompilations(
    raw: list[RawRecompilation], functions: dict[str, tuple[str, str, int]], limit_reached: set[str]
) -> list[Recompilation]:
    """Say for each what failed and what would help.

    Args:
        raw: in order.
        functions: name, file and line by frame, the first number of a compile id.
        limit_reached: compile ids at which the compiler gave up.
    """
    found = []
    sizes = Counter(_dimension(item) for item in raw)
    for item in raw:
        guard, source = _split(item.guards[0] if item.guards else "")
        kind = "limit" if item.compile_id in limit_reached else _kind(guard, source)
        frame = item.compile_id.partition("/")[0]
        name, file, line = functions.get(frame, ("?", "?", 0))
        if kind == "size":
            # a size that the compiler could leave open fails once; one that it built in fails each time
            kind = "unrolled" if sizes[_dimension(item)] > 1 else kind
        found.append(
            Recompilation(readable_function(name), file, line, item.input_set, kind, guard, source, _ADVICE[kind])
        )
    return found


def _dimension(item: RawRecompilation) -> str:
    guard = item.guards[0] if item.guards else ""
    return f"{item.compile_id.partition('/')[0]} {guard.partition('expected')[0]}"


def _split(reason: str) -> tuple[str, str]:
    """The guard itself, and the place in the user's code that its comment names."""
    first = reason.partition("\n")[0]
    place = _PLACE.search(first)
    guard = re.sub(r"\. Guard failed on a parameter.*", "", re.sub(r"\s+#.*", "", first)).strip()
    return guard, f"{place['file'].rpartition('/')[2]}:{place['line']}: {place['text']}" if place else ""


def _kind(guard: str, source: str) -> str:
    if "dtype mismatch" in guard or "dispatch key" in guard:
        return "dtype"
    if "stride mismatch" in guard:
        return "stride"
    if "size mismatch" in guard or "rank mismatch" in guard:
        return "size"
    if "size()" in guard or "shape[" in guard:
        branches = re.search(r"\b(if|elif|while|else|assert)\b", source)
        if re.fullmatch(r"2 <= \S+", guard) and not branches:
            return "one"
        return "shape branch" if branches or "==" not in guard else "unrolled"
    return "value"
