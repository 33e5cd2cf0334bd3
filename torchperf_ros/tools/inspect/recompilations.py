"""What is compiled anew for other inputs, and why.

Sizes, loops that unroll, branches on sizes, types, values.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchperf_ros.tools.inspect.graph_breaks import readable_function

_PLACE = re.compile(r"#\s*(?P<text>[^#]*?)\s*#\s*(?P<file>\S+?):(?P<line>\d+) in \w+")
_ADVICE = {
    "size": "Happens once for each dimension that varies.",
    "unrolled": (
        "The size is built into the graph, as by a Python loop over that dimension: each size is compiled"
        " anew. Work on the whole tensor instead."
    ),
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
        kind: size, unrolled, shape branch, one, dtype, stride, value or limit.
        guard: the condition that the compiled code had assumed and that does not hold, in the compiler's
            words.
        source: `file:line: text` of the user's code that asked for this condition, where the compiler knows
            it.
    """

    function: str
    file: str
    line: int
    input_set: int
    kind: str
    guard: str
    source: str
    advice: str


def explain_recompilations(
    raw: list[tuple[str, int, str]], function_of: Callable[[str], tuple[str, str, int]]
) -> list[Recompilation]:
    """For each, the guard that failed and what would help.

    Args:
        raw: in order: compile id, input set, and `recompile_reasons` of the compiler's trace.
        function_of: name, file and line of the function that a compilation is of, by compile id.
    """
    config = torch._dynamo.config
    limit = int(getattr(config, "recompile_limit", 0) or getattr(config, "cache_size_limit", 8))
    found: list[Recompilation] = []
    guards = [_newest_guard(text) for _, _, text in raw]
    functions = [function_of(compile_id) for compile_id, _, _ in raw]
    sizes = Counter(zip(functions, (guard.partition("expected")[0] for guard in guards), strict=True))
    for (compile_id, input_set, _), reason, function in zip(raw, guards, functions, strict=True):
        place = _PLACE.search(reason)
        guard = re.sub(r"\. Guard failed on a parameter.*", "", re.sub(r"\s+#.*", "", reason)).strip()
        source = f"{place['file'].rpartition('/')[2]}:{place['line']}: {place['text']}" if place else ""
        kind = "limit" if int(compile_id.partition("/")[2] or 0) >= limit else _kind(guard, source)
        if kind == "size" and sizes[function, reason.partition("expected")[0]] > 1:
            # a size that the compiler could leave open fails once; one that it built in, each time
            kind = "unrolled"
        name = readable_function(function[0])
        found.append(Recompilation(name, *function[1:], input_set, kind, guard, source, _ADVICE[kind]))
    return found


def _newest_guard(text: str) -> str:
    """The reasons are one text, or a JSON list with one for each earlier compilation, the newest first."""
    try:
        reasons = json.loads(text)
    except ValueError:
        reasons = [text]
    first = str(reasons[0]) if isinstance(reasons, list) and reasons else ""
    return re.sub(r"^\d+/\d+: ", "", first).partition("\n")[0]


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
