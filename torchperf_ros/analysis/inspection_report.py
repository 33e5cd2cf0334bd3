"""An inspection as JSON, and as one line."""

import math
from dataclasses import asdict
from typing import Any

import torch

from torchperf_ros.analysis.graph_breaks import GraphBreak
from torchperf_ros.analysis.inspection import Inspection
from torchperf_ros.analysis.source_line import SourceLine


def as_json(inspection: Inspection, max_breaks: int | None) -> dict[str, Any]:
    """Everything that was found; what is not known is null."""
    return {
        "target": inspection.name,
        "torch": torch.__version__,
        "device": inspection.device,
        "backend": inspection.backend,
        "inputs": [
            {
                "shapes": text,
                "eager_ms": _number(timing.eager_ms),
                "compiled_ms": _number(timing.compiled_ms),
                "between_graphs_ms": _number(timing.between_ms),
                "graph_ms": {str(index): ms for index, ms in timing.graph_ms.items()},
                "gap_ms": {str(index): ms for index, ms in timing.gap_ms.items()},
            }
            for text, timing in zip(inspection.inputs, inspection.timings, strict=True)
        ],
        "graphs": [
            {
                "index": graph.index,
                "input": graph.input_set + 1,
                "function": inspection.function(graph.compile_id)[0],
                "ops": len(graph.ops),
                "op_counts": graph.op_counts(),
                "ms": _number(graph.ms),
            }
            for graph in inspection.graphs
        ],
        "breaks": [_break(item) for item in inspection.breaks],
        "recompilations": [{**asdict(item), "input": item.input_set + 1} for item in inspection.recompilations],
        "remarks": [
            {"kind": item.kind, **_place(item.line), "text": item.text, "advice": item.advice}
            for item in inspection.remarks
        ],
        "failure": inspection.failure or None,
        "doubt": inspection.doubt or None,
        "max_breaks": max_breaks,
        "exit_status": inspection.exit_status(max_breaks),
        "summary": summary(inspection),
    }


def summary(inspection: Inspection) -> str:
    """The whole inspection in one line; graphs and times are those of the first input set."""
    first = inspection.timings[0]
    graphs = [graph for graph in inspection.graphs if graph.input_set == 0]
    ops = sum(len(graph.ops) for graph in graphs)
    words = [f"{count(len(graphs), 'graph')} with {count(ops, 'op')}", count(len(inspection.breaks), "break")]
    if len(inspection.inputs) > 1:
        words.append(f"{count(len(inspection.recompilations), 'recompilation')} over {len(inspection.inputs)} inputs")
    elif inspection.recompilations:
        words.append(count(len(inspection.recompilations), "recompilation"))
    times = f"eager {milliseconds(first.eager_ms)}"
    if not math.isnan(first.compiled_ms):
        times += f", captured {milliseconds(first.compiled_ms)}" if inspection.backend == "eager" else (
            f", {inspection.backend} {milliseconds(first.compiled_ms)}"
        )  # fmt: skip
        times += f", of which {milliseconds(first.between_ms)} outside the graphs"
    return f"{', '.join(words)}; {times}"


def count(number: int, word: str) -> str:
    """`1 graph`, `2 graphs`."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def milliseconds(value: float) -> str:
    """With three figures; a dash where it is not known."""
    if math.isnan(value):
        return "-"
    return f"{value:.3f} ms" if value < 1 else f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"  # noqa: PLR2004


def _break(item: GraphBreak) -> dict[str, Any]:
    return {
        **_place(item.line),
        "function": item.function,
        "underline": item.underline,
        "category": item.category.value,
        "title": item.title,
        "reasons": item.reasons,
        "advice": asdict(item.advice),
        "whole_function_uncompiled": item.whole_function,
        "splits": item.splits,
        "input": item.input_set + 1,
        "gaps": item.gaps,
        "gap_ms": _number(item.gap_ms),
    }


def _place(line: SourceLine) -> dict[str, Any]:
    return {"file": line.file, "line": line.line, "source": line.text}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
