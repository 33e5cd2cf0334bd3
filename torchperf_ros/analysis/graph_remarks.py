"""What does not break a graph and still deserves a word: unrolled loops, branches on sizes, NumPy traced by torch."""

import ast
from collections import Counter
from dataclasses import dataclass

from torchperf_ros.analysis.graph_breaks import Frame, is_users, read_frames
from torchperf_ros.analysis.graph_capture import Graph, Op
from torchperf_ros.analysis.source_line import SourceLine, read_line, reads_size

_FEWEST_REPEATS = 3


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


def find_remarks(graphs: list[Graph], sizes: int, broken: set[tuple[str, int]]) -> list[Remark]:
    """Look at where the ops of all graphs come from.

    Args:
        graphs: captured, of all input sets.
        sizes: how many input sets there were.
        broken: file and line of what breaks graphs anyway, where NumPy deserves no second word.
    """
    traced = [(graph, op, _users_frames(op)) for graph in graphs for op in graph.ops]
    return [*_unrolled(traced, sizes), *_shape_branches(traced), *_numpy(traced, broken)]


Traced = list[tuple[Graph, Op, list[Frame]]]


def _users_frames(op: Op) -> list[Frame]:
    return [frame for frame in read_frames(op.stack) if is_users(frame.file)]


def _unrolled(traced: Traced, sizes: int) -> list[Remark]:
    """Loops whose body gave the same op of the same module three times and more in one graph."""
    bodies: dict[tuple[str, int], Counter[int]] = {}
    repeats: dict[tuple[str, int], Counter[tuple[int, str, str, str]]] = {}
    loops: dict[tuple[str, int], SourceLine] = {}
    for graph, op, frames in traced:
        counted = set()
        for frame in frames:
            for loop in read_line(frame.file, frame.line).loops:
                key = (frame.file, getattr(loop, "lineno", 0))
                if key in counted or isinstance(loop, ast.AsyncFor):
                    continue
                counted.add(key)
                loops[key] = read_line(*key)
                bodies.setdefault(key, Counter())[graph.index] += 1
                place = f"{frames[-1].file}:{frames[-1].line} {frames[-1].underline}"
                repeats.setdefault(key, Counter())[graph.index, op.name, op.module, place] += 1
    remarks = []
    for key, counts in repeats.items():
        (_, name, _, _), most = counts.most_common(1)[0]
        if most < _FEWEST_REPEATS:
            continue
        by_graph = [count for _, count in sorted(bodies[key].items())]
        text = f"{max(by_graph)} ops in one graph come from this loop, {name} {most} times"
        if sizes > 1 and len(set(by_graph)) > 1:
            text += f"; over the graphs: {', '.join(map(str, by_graph))}"
        advice = "Each round is compiled by itself: use one operation on the whole tensor, or a batched one."
        remarks.append(Remark("unrolled loop", loops[key], text, advice))
    return remarks


def _shape_branches(traced: Traced) -> list[Remark]:
    """`if` on a size, in functions that ops come from."""
    functions = {}
    for _, _, frames in traced:
        for frame in frames:
            line = read_line(frame.file, frame.line)
            if line.function is not None:
                functions[frame.file, line.function.lineno] = line.function
    remarks = []
    for (file, _), function in functions.items():
        for node in ast.walk(function):
            if isinstance(node, (ast.If, ast.IfExp, ast.While)) and reads_size(node.test):
                if isinstance(node, ast.If) and all(isinstance(part, ast.Raise) for part in node.body):
                    continue  # a check of the input compiles to nothing
                text = f"`{ast.unparse(node.test)}` is decided while compiling: each outcome is a graph of its own"
                advice = "Pad to one size, or warm up with inputs on both sides."
                remarks.append(Remark("shape-dependent branch", read_line(file, node.lineno), text, advice))
    return remarks


def _numpy(traced: Traced, broken: set[tuple[str, int]]) -> list[Remark]:
    """NumPy functions that the compiler carries out with torch."""
    names: dict[tuple[str, int], dict[str, None]] = {}
    for _, op, frames in traced:
        if op.traced_numpy and frames:
            names.setdefault((frames[-1].file, frames[-1].line), {})[op.name.removeprefix("wrapped_")] = None
    advice = "No break, but without the compiler it leaves torch, and on CUDA it copies to the CPU: use torch's own."
    return [
        Remark("traced NumPy", read_line(*key), f"{', '.join(found)}: traced as torch operations", advice)
        for key, found in names.items()
        if key not in broken
    ]
