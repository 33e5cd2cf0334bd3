"""An inspection on the terminal and as JSON."""

import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchperf_ros.tools.inspect.graph_breaks import GraphBreak, SourceLine
from torchperf_ros.tools.inspect.inspection import Inspection, Recompilation

_MOST_GUARDS_SHOWN = 2


def summary(inspection: Inspection) -> str:
    """The whole inspection in one line; graphs are those of the first input set."""
    graphs = [graph for graph in inspection.graphs if graph.input_set == 0]
    words = [_count(len(graphs), "graph"), _count(len(inspection.breaks), "break")]
    if len(inspection.inputs) > 1 or inspection.recompilations:
        recompilations = _count(len(inspection.recompilations), "recompilation")
        words.append(f"{recompilations} over {_count(len(inspection.inputs), 'input')}")
    return ", ".join(words)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def as_json(inspection: Inspection, max_breaks: int | None) -> dict[str, Any]:
    def place(line: SourceLine) -> dict[str, Any]:
        return {"file": line.file, "line": line.line, "source": line.text}

    return {
        "target": inspection.target,
        "torch": torch.__version__,
        "device": str(inspection.device),
        "inputs": inspection.inputs,
        "graphs": [graph.input_set + 1 for graph in inspection.graphs],
        "breaks": [
            {
                **place(item.line),
                "function": item.function,
                "underline": item.underline,
                "category": item.kind.label,
                "title": item.title,
                "reasons": item.reasons,
                "advice": item.kind.advice,
                "whole_function_uncompiled": item.whole_function,
                "input": item.input_set + 1,
            }
            for item in inspection.breaks
        ],
        "recompilations": [
            {**asdict(item), "input": item.input_set + 1} for item in inspection.recompilations
        ],
        "failure": inspection.failure or None,
        "doubt": inspection.doubt or None,
        "max_breaks": max_breaks,
        "exit_status": inspection.exit_status(max_breaks),
        "summary": summary(inspection),
    }


def show(inspection: Inspection, console: Console, max_breaks: int | None) -> None:
    """Print it, most important first, the summary last."""
    console.print(Text(inspection.target, style="bold"))
    console.print(Text(f"torch {torch.__version__} · {inspection.device}"))
    for part in _parts(inspection):
        console.print()
        console.print(part)
    console.print()
    if inspection.failure:
        console.print(Text(f"FAILED: {inspection.failure}", style="bold red"))
    if inspection.doubt:
        console.print(Text(inspection.doubt, style="bold red"))
    console.print(Text(summary(inspection), style="bold"))
    if max_breaks is not None:
        good = inspection.exit_status(max_breaks) == 0
        words = (
            f"{'PASS' if good else 'FAIL'}: {_count(len(inspection.breaks), 'break')}, at most {max_breaks}"
            " allowed"
        )
        console.print(Text(words, style="bold green" if good else "bold red"))


def _parts(inspection: Inspection) -> Iterator[RenderableType]:
    for number, item in enumerate(inspection.breaks, 1):
        yield Text.assemble((f"break {number}  ", "bold red"), (item.kind.label, "bold"))
        yield Padding(_break(item, len(inspection.inputs)), (0, 0, 0, 2))
    if inspection.recompilations:
        yield _recompilations(inspection)


def _break(item: GraphBreak, input_sets: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    file = min(item.line.file, os.path.relpath(item.line.file), key=len)
    grid.add_row("where", Text(f"{file}:{item.line.line} in {item.function}", style="cyan"))
    grid.add_row("", Text.assemble((item.line.text, "bold"), (f"\n{item.underline}", "red")))
    grid.add_row("why", Text(f"{item.title}. {item.explanation}" if item.explanation else item.title))
    effects = []
    if item.whole_function:
        effects.append("the compiler leaves the whole function uncompiled")
    if input_sets > 1 and item.input_set:
        effects.append(f"first with input {item.input_set + 1}")
    if effects:
        grid.add_row("effect", Text("; ".join(effects)))
    grid.add_row("instead", Text(item.kind.advice))
    return grid


def _recompilations(inspection: Inspection) -> Table:
    table = _table("recompilations", "input", "function", "kind", "guard that failed, and what would help")
    explained: set[str] = set()
    groups: dict[tuple[str, int, str, str], list[Recompilation]] = {}
    for item in inspection.recompilations:
        groups.setdefault((item.file, item.line, item.kind, item.source), []).append(item)
    for (file, line, kind, source), items in groups.items():
        text = Text("\n".join(item.guard for item in items[:_MOST_GUARDS_SHOWN]))
        if len(items) > _MOST_GUARDS_SHOWN:
            text.append(f"\nand {len(items) - _MOST_GUARDS_SHOWN} more like it")
        if source:
            text.append(f"\n{source}", style="cyan")
        if kind not in explained:
            text.append(f"\n{items[0].advice}", style="green")
            explained.add(kind)
        inputs = ", ".join(dict.fromkeys(str(item.input_set + 1) for item in items))
        table.add_row(inputs, Text(f"{items[0].function}\n{os.path.basename(file)}:{line}"), kind, text)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name in ("#", "ops", "input", "new graphs")
        table.add_column(
            name, justify="right" if right else "left", no_wrap=name == "where", overflow="fold"
        )
    return table
