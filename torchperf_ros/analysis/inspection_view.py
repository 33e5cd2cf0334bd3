"""An inspection on the terminal: breaks with their source and what to write instead, graphs, inputs, remarks."""

import os
from collections.abc import Iterator

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchperf_ros.analysis.graph_breaks import GraphBreak
from torchperf_ros.analysis.inspection import Inspection
from torchperf_ros.analysis.inspection_report import count, milliseconds, summary
from torchperf_ros.analysis.recompilations import Recompilation
from torchperf_ros.analysis.source_line import SourceLine

_MOST_OPS_SHOWN = 5
_MOST_GRAPHS_SHOWN = 20
_MOST_GUARDS_SHOWN = 2


def show(inspection: Inspection, console: Console, max_breaks: int | None) -> None:
    """Print it, most important first, the summary last."""
    console.print(Text(inspection.name, style="bold"))
    console.print(Text(f"torch {torch.__version__} · {inspection.device} · backend {inspection.backend}"))
    if inspection.backend == "eager":
        console.print(Text("captured graphs run op by op here; --backend inductor times compiled ones", style="dim"))
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
        words = f"{'PASS' if good else 'FAIL'}: {count(len(inspection.breaks), 'break')}, at most {max_breaks} allowed"
        console.print(Text(words, style="bold green" if good else "bold red"))


def _parts(inspection: Inspection) -> Iterator[RenderableType]:
    for number, item in enumerate(inspection.breaks, 1):
        yield _break(number, item, len(inspection.inputs))
    if inspection.graphs:
        yield _graphs(inspection)
    if len(inspection.inputs) > 1:
        yield _inputs(inspection)
    if inspection.recompilations:
        yield _recompilations(inspection)
    if inspection.remarks:
        yield _remarks(inspection)


def _break(number: int, item: GraphBreak, input_sets: int) -> Table:
    """Number, kind and cost; the line with its underline; why; what to write."""
    head = Text.assemble((f"break {number}  ", "bold red"), (item.category.value, "bold"))
    head.append(f"  {milliseconds(item.gap_ms)} outside the graphs" if item.gap_ms == item.gap_ms else "")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    grid.add_row("where", Text(f"{_short(item.line.file)}:{item.line.line} in {item.function}", style="cyan"))
    grid.add_row("", _source(item))
    grid.add_row("why", Text(f"{item.title}. {item.explanation}" if item.explanation else item.title))
    effects = []
    if item.whole_function:
        effects.append("the compiler leaves the whole function uncompiled")
    if len(item.splits) > 1:
        effects.append(f"splits {', '.join(item.splits)}")
    if input_sets > 1 and item.input_set:
        effects.append(f"first with input {item.input_set + 1}")
    if effects:
        grid.add_row("effect", "; ".join(effects))
    grid.add_row("instead", Text(item.advice.sentence))
    label = "" if item.advice.is_users else "for example"
    if label:
        grid.add_row("", Text(label, style="dim"))
    grid.add_row("", _difference(item))
    whole = Table.grid()
    whole.add_row(head)
    whole.add_row(Padding(grid, (0, 0, 0, 2)))
    return whole


def _source(item: GraphBreak) -> Text:
    text = Text(f"{item.line.text}\n", style="bold")
    if item.underline:
        text.append(item.underline, style="red")
    else:
        text.right_crop(1)
    return text


def _difference(item: GraphBreak) -> Text:
    text = Text()
    for sign, code, style in (("-", item.advice.before, "red"), ("+", item.advice.after, "green")):
        for line in code.splitlines():
            text.append(f"{sign} {line}\n", style=style)
    text.right_crop(1)
    return text


def _graphs(inspection: Inspection) -> Table:
    table = _table("graphs", "#", "input", "function", "ops", "most frequent", "ms", "then, ms")
    for graph in inspection.graphs[:_MOST_GRAPHS_SHOWN]:
        name = inspection.function(graph.compile_id)[0]
        counts = list(graph.op_counts().items())
        ops = ", ".join(f"{op} {n}" if n > 1 else op for op, n in counts[:_MOST_OPS_SHOWN])
        gap_ms = float("nan")
        if graph.input_set < len(inspection.timings):
            gap_ms = inspection.timings[graph.input_set].gap_ms.get(graph.index, gap_ms)
        more = ", …" if len(counts) > _MOST_OPS_SHOWN else ""
        table.add_row(
            str(graph.index), str(graph.input_set + 1), Text(name), str(len(graph.ops)), Text(ops + more),
            _plain(graph.ms), _plain(gap_ms),
        )  # fmt: skip
    if len(inspection.graphs) > _MOST_GRAPHS_SHOWN:
        table.caption = f"and {len(inspection.graphs) - _MOST_GRAPHS_SHOWN} more, see --json"
    return table


def _inputs(inspection: Inspection) -> Table:
    table = _table("inputs", "#", "sizes", "new graphs", "eager ms", "captured ms", "outside the graphs, ms")
    for index, (text, timing) in enumerate(zip(inspection.inputs, inspection.timings, strict=True)):
        new = sum(graph.input_set == index for graph in inspection.graphs)
        table.add_row(
            str(index + 1), Text(text), str(new), _plain(timing.eager_ms), _plain(timing.compiled_ms),
            _plain(timing.between_ms),
        )  # fmt: skip
    return table


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
        where = f"{items[0].function}\n{os.path.basename(file)}:{line}"
        table.add_row(inputs, Text(where), kind, text)
    return table


def _remarks(inspection: Inspection) -> Table:
    table = _table("remarks", "where", "what")
    for item in inspection.remarks:
        text = Text.assemble((f"{item.kind}: ", "bold"), item.text, (f"\n{item.advice}", "green"))
        table.add_row(_where(item.line), text)
    return table


def _where(line: SourceLine) -> Text:
    return Text(f"{os.path.basename(line.file)}:{line.line}", style="cyan")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        right = name in ("#", "ops", "input", "new graphs") or name.endswith("ms")
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "where", overflow="fold")
    return table


def _plain(value: float) -> str:
    return milliseconds(value).removesuffix(" ms")


def _short(file: str) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        relative = os.path.relpath(file)
    except ValueError:
        return file
    return relative if len(relative) < len(file) else file
