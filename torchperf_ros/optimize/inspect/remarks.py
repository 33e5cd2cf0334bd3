"""What is no break and still matters: compilations anew and why, unrolled loops, branches on sizes, traced NumPy."""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchperf_ros.optimize.inspect.graph_breaks import Frame, is_users, read_frames, readable_function
from torchperf_ros.optimize.inspect.users_source import SourceLine, read_line, reads_size

_FEWEST_REPEATS = 3
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
class Op:
    """One call in a graph.

    Attributes:
        name: of the function, method or module called.
        traced_numpy: whether it is a NumPy function that the compiler carries out with torch.
        module: path of the innermost module that it belongs to, empty where there is none.
        frames: where it comes from in the user's Python, outermost first.
    """

    name: str
    traced_numpy: bool
    module: str
    frames: tuple[Frame, ...]

    @classmethod
    def of(cls, node: torch.fx.Node) -> "Op":
        """The call that a node of a captured graph makes."""
        target = node.target
        name = str(target if isinstance(target, str) else getattr(target, "__name__", target))
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        frames = read_frames(str(node.meta.get("stack_trace") or ""))
        return cls(
            name.rpartition(".")[2],
            type(target).__name__.startswith("numpy_"),
            str(modules[-1][0]) if modules else "",
            tuple(frame for frame in frames if is_users(frame.file)),
        )


@dataclass(frozen=True)
class Recompilation:
    """One more compilation of a function that had been compiled.

    Attributes:
        function: name of it.
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
class Remark:
    """One thing to know.

    Attributes:
        kind: unrolled loop, shape-dependent branch, or traced NumPy.
        line: where.
        text: what was found, with its numbers.
        advice: what to do, if it matters.
    """

    kind: str
    line: SourceLine
    text: str
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
    sizes = Counter(
        (function_of(item[0]), guard.partition("expected")[0]) for item, guard in zip(raw, guards, strict=True)
    )
    for (compile_id, input_set, _), reason in zip(raw, guards, strict=True):
        place = _PLACE.search(reason)
        guard = re.sub(r"\. Guard failed on a parameter.*", "", re.sub(r"\s+#.*", "", reason)).strip()
        source = f"{place['file'].rpartition('/')[2]}:{place['line']}: {place['text']}" if place else ""
        kind = "limit" if int(compile_id.partition("/")[2] or 0) >= limit else _kind(guard, source)
        function = function_of(compile_id)
        if kind == "size" and sizes[function, reason.partition("expected")[0]] > 1:
            kind = "unrolled"  # a size that the compiler could leave open fails once; one that it built in, each time
        found.append(
            Recompilation(readable_function(function[0]), *function[1:], input_set, kind, guard, source, _ADVICE[kind])
        )
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


def find_remarks(traced: list[tuple[int, Op]], sizes: int, broken: set[tuple[str, int]]) -> list[Remark]:
    """Look at where the ops of all graphs come from.

    Args:
        traced: graph and op, for all graphs of all input sets.
        sizes: how many input sets there were.
        broken: file and line of what breaks graphs anyway, where NumPy deserves no second word.
    """
    return [*_unrolled(traced, sizes), *_shape_branches(traced), *_numpy(traced, broken)]


def _unrolled(traced: list[tuple[int, Op]], sizes: int) -> list[Remark]:
    """Loops whose body gave the same op of the same module three times and more in one graph."""
    repeats: dict[tuple[str, int], Counter[tuple[int, str, str, Frame]]] = {}
    for graph, op in traced:
        loops = {
            (frame.file, getattr(loop, "lineno", 0))
            for frame in op.frames
            for loop in read_line(frame.file, frame.line).loops
        }
        for loop in loops:
            repeats.setdefault(loop, Counter())[graph, op.name, op.module, op.frames[-1]] += 1
    remarks = []
    for loop, counts in sorted(repeats.items()):
        (_, name, _, _), most = counts.most_common(1)[0]
        if most < _FEWEST_REPEATS:
            continue
        by_graph: Counter[int] = Counter()
        for (graph, *_), times in counts.items():
            by_graph[graph] += times
        text = f"{max(by_graph.values())} ops in one graph come from this loop, {name} {most} times"
        if sizes > 1 and len(set(by_graph.values())) > 1:
            text += f"; over the graphs: {', '.join(str(by_graph[graph]) for graph in sorted(by_graph))}"
        advice = "Each round is compiled by itself: use one operation on the whole tensor, or a batched one."
        remarks.append(Remark("unrolled loop", read_line(*loop), text, advice))
    return remarks


def _shape_branches(traced: list[tuple[int, Op]]) -> list[Remark]:
    """`if` on a size, in functions that ops come from."""
    lines = [read_line(frame.file, frame.line) for _, op in traced for frame in op.frames]
    functions = {(line.file, line.function.lineno): line.function for line in lines if line.function is not None}
    advice = "Pad to one size, or warm up with inputs on both sides."
    remarks = []
    for (file, _), function in functions.items():
        for node in ast.walk(function):
            if not isinstance(node, (ast.If, ast.IfExp, ast.While)) or not reads_size(node.test):
                continue
            if isinstance(node, ast.If) and all(isinstance(part, ast.Raise) for part in node.body):
                continue  # a check of the input compiles to nothing
            text = f"`{ast.unparse(node.test)}` is decided while compiling: each outcome is a graph of its own"
            remarks.append(Remark("shape-dependent branch", read_line(file, node.lineno), text, advice))
    return remarks


def _numpy(traced: list[tuple[int, Op]], broken: set[tuple[str, int]]) -> list[Remark]:
    """NumPy functions that the compiler carries out with torch."""
    names: dict[tuple[str, int], dict[str, None]] = {}
    for _, op in traced:
        if op.traced_numpy and op.frames and op.frames[-1][:2] not in broken:
            names.setdefault(op.frames[-1][:2], {})[op.name.removeprefix("wrapped_")] = None
    advice = "No break, but without the compiler it leaves torch, and on CUDA it copies to the CPU: use torch's own."
    return [
        Remark("traced NumPy", read_line(*place), f"{', '.join(found)}: traced as torch operations", advice)
        for place, found in names.items()
    ]
