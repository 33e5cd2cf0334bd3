"""The captured graphs as an SVG: a column for each input that made new ones, boxes of ops, and breaks between them."""

from collections.abc import Iterator
from html import escape
from itertools import groupby

from torchperf_ros.analysis.graph_breaks import GraphBreak
from torchperf_ros.analysis.graph_capture import BEFORE_FIRST, Graph
from torchperf_ros.analysis.inspection import Inspection
from torchperf_ros.analysis.inspection_report import count, milliseconds, summary

_COLUMN = 420
_MARGIN = 24
_PAD = 12
_CHIP_HEIGHT = 20
_CHIP_STEP = 26
_CHARACTER = 6.7  # width of a monospace character at 11 px
_GAP = 22
_BREAK_HEIGHT = 62
_MOST_CHIPS = 40
_MOST_COLUMNS = 6
_MOST_CHARACTERS = 54
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2933 } .mono { font: 11px ui-monospace, monospace }
.title { font-size: 15px; font-weight: 600 } .head { font-weight: 600 } .dim { fill: #66727f }
.graph { fill: #f4f7fa; stroke: #9fb1c4 } .chip { fill: #dbe9f9; stroke: #a9c4e4 }
.break { fill: #fdecea; stroke: #c62828; stroke-dasharray: 5 3 } .red { fill: #b71c1c; font-weight: 600 }
.flow { stroke: #66727f; stroke-width: 1.5; fill: none }
"""


def draw(inspection: Inspection) -> str:
    """The whole picture; loads nothing from anywhere."""
    sets = sorted({graph.input_set for graph in inspection.graphs} | {item.input_set for item in inspection.breaks})
    columns = [_Column(inspection, which, place) for place, which in enumerate(sets[:_MOST_COLUMNS])]
    width = _MARGIN * 2 + max(1, len(columns)) * _COLUMN + max(0, len(columns) - 1) * _MARGIN
    width = max(width, _MARGIN * 2 + round(len(summary(inspection)) * _CHARACTER))
    height = max((column.bottom for column in columns), default=100) + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(_MARGIN, 34, inspection.name, "title"),
        _text(_MARGIN, 54, summary(inspection), "dim"),
    ]
    for column in columns:
        lines += column.lines
    return "\n".join([*lines, "</svg>", ""])


class _Column:
    """Graphs and breaks that one input set made, from top to bottom in the order in which they run."""

    def __init__(self, inspection: Inspection, which: int, place: int) -> None:
        self.lines: list[str] = []
        self._inspection = inspection
        self._left = _MARGIN + place * (_COLUMN + _MARGIN)
        self.bottom = 84
        text = f"input {which + 1}: {inspection.inputs[which]}"
        self.lines.append(_text(self._left, self.bottom, _cut(text), "head"))
        self.bottom += 10
        graphs = [graph for graph in inspection.graphs if graph.input_set == which]
        captured = {graph.index for graph in inspection.graphs}
        gap_ms = inspection.timings[which].gap_ms
        breaks = list(enumerate(inspection.breaks, 1))
        for number, item in breaks:
            if item.input_set == which and not captured & set(item.gaps):
                self._break(number, item, gap_ms.get(BEFORE_FIRST, float("nan")))
        for graph in graphs:
            self._graph(graph)
            for number, item in breaks:
                if graph.index in item.gaps:
                    self._break(number, item, gap_ms.get(graph.index, float("nan")))
        if not graphs:
            self.lines.append(_text(self._left, self.bottom + 20, "no new graph", "dim"))
            self.bottom += 30

    def _graph(self, graph: Graph) -> None:
        name = self._inspection.function(graph.compile_id)[0]
        chips, chips_height = self._chips(graph)
        height = 30 + chips_height + _PAD
        self._flow()
        top = self.bottom
        self.lines.append(
            f'<rect class="graph" x="{self._left}" y="{top}" width="{_COLUMN}" height="{height}" rx="6"/>'
        )
        head = f"graph {graph.index} · {name} · {count(len(graph.ops), 'op')}"
        self.lines.append(_text(self._left + _PAD, top + 20, _cut(head), "head"))
        self.lines.append(_text(self._left + _COLUMN - _PAD, top + 20, milliseconds(graph.ms), "dim", end=True))
        self.lines += chips
        self.bottom += height

    def _chips(self, graph: Graph) -> tuple[list[str], int]:
        lines, x, y = [], self._left + _PAD, self.bottom + _GAP + 32
        top = y
        for text in _chip_texts(graph):
            width = round(len(text) * _CHARACTER) + 14
            if x + width > self._left + _COLUMN - _PAD and x > self._left + _PAD:
                x, y = self._left + _PAD, y + _CHIP_STEP
            lines.append(f'<rect class="chip" x="{x}" y="{y}" width="{width}" height="{_CHIP_HEIGHT}" rx="4"/>')
            lines.append(_text(x + 7, y + 14, text, "mono"))
            x += width + 6
        return lines, y + _CHIP_HEIGHT - top

    def _break(self, number: int, item: GraphBreak, gap_ms: float) -> None:
        self._flow()
        top = self.bottom
        self.lines.append("<g>")
        self.lines.append(f"<title>{escape(item.reasons[0])}</title>")
        box = f'x="{self._left}" y="{top}" width="{_COLUMN}" height="{_BREAK_HEIGHT}"'
        self.lines.append(f'<rect class="break" {box} rx="6"/>')
        self.lines.append(_text(self._left + _PAD, top + 19, f"break {number}: {item.category.value}", "red"))
        self.lines.append(_text(self._left + _COLUMN - _PAD, top + 19, milliseconds(gap_ms), "dim", end=True))
        file = item.line.file.rpartition("/")[2]
        self.lines.append(_text(self._left + _PAD, top + 36, f"{file}:{item.line.line} in {item.function}", "dim"))
        self.lines.append(_text(self._left + _PAD, top + 52, _cut(item.line.text), "mono"))
        self.lines.append("</g>")
        self.bottom += _BREAK_HEIGHT

    def _flow(self) -> None:
        x = self._left + _COLUMN // 2
        self.lines.append(f'<path class="flow" d="M{x} {self.bottom + 3} v{_GAP - 6} m-4 -5 l4 5 l4 -5"/>')
        self.bottom += _GAP


def _chip_texts(graph: Graph) -> Iterator[str]:
    """Op names in order, runs of the same one together; what is too much is counted."""
    runs = [(name, len(list(run))) for name, run in groupby(op.name for op in graph.ops)]
    for name, times in runs[:_MOST_CHIPS]:
        yield f"{name} ×{times}" if times > 1 else name
    if len(runs) > _MOST_CHIPS:
        yield f"… {sum(times for _, times in runs[_MOST_CHIPS:])} more ops"


def _text(x: float, y: float, text: str, kind: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(text)}</text>'


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
