"""The page of `torchperf regress`: one file that needs no network."""

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from torchperf_ros import __version__
from torchperf_ros.analysis import regress_figures as figures
from torchperf_ros.analysis.regress_compare import Comparison
from torchperf_ros.analysis.regress_metric import P50, P95, P99
from torchperf_ros.analysis.regress_stage import SHARES, StageComparison
from torchperf_ros.analysis.regress_text import COLUMNS, conspicuous, headline, remarks, rows, sizes
from torchperf_ros.analysis.regress_verdict import Finding, Verdict

_PAGE: Final = Path(__file__).with_name("report_page.html")
_CLASS: Final = {Verdict.WORSE: "bad", Verdict.BETTER: "good"}
_MACHINE: Final = ("cpu", "cores", "memory_mib", "device", "torch")


def write_page(comparison: Comparison, confidence: float, path: Path) -> None:
    """Write the page.

    Args:
        comparison: what to show.
        confidence: of the intervals, 0 to 1.
        path: the file to write.

    Raises:
        OSError: it cannot be written.
    """
    page = _Page(comparison, confidence)
    bad = comparison.with_verdict(Verdict.WORSE) or comparison.broken_limits or conspicuous(comparison)
    parts = [
        f'<div class="card"><p><b class="{"bad" if bad else "good"}">{_text(headline(comparison))}</b></p>'
        f"{''.join(f'<p>{_text(line)}</p>' for line in sizes(comparison))}</div>",
        page.notes(),
        *(page.stage(stage) for stage in comparison.stages),
        page.whole(),
        page.runs(),
    ]
    path.write_text(
        Template(_PAGE.read_text(encoding="utf-8")).substitute(
            title=_text(f"{Path(comparison.new.name).name} against {Path(comparison.base.name).name}"),
            subtitle=f"Two runs compared; intervals are of {confidence:.0%}. In a picture: drag to zoom, double-click"
            " to go back.",
            navigation="",
            sections="\n".join(parts),
            footer=f"torchperf regress {__version__}. Long series are thinned so that no spike is lost; every number is"
            " of all frames.",
            plotly=get_plotlyjs(),
            figures="{" + ",".join(page.figures) + "}",
        ),
        encoding="utf-8",
    )


class _Page:
    def __init__(self, comparison: Comparison, confidence: float) -> None:
        self._comparison, self._confidence = comparison, confidence
        self.figures: list[str] = []

    def stage(self, stage: StageComparison) -> str:
        base, new = (run.stages[stage.name] for run in (self._comparison.base, self._comparison.new))
        findings = [one for one in self._comparison.findings if one.estimate.stage == stage.name]
        parts = [f"<section><h2>{_text(stage.name)}</h2>", self._table(findings)]
        pictures = [("Latency: how many frames took longer", figures.exceedance(base, new))]
        if curve := _whole_curve(stage, findings):
            margin = next((one.margin for one in findings if one.estimate.metric is P99), math.nan)
            pictures.append(("Each quantile: new less base", figures.difference(curve, margin)))
        cards = "".join(f'<div class="card"><h4>{title}</h4>{self._add(figure)}</div>' for title, figure in pictures)
        parts.append(f'<div class="pair">{cards}</div>')
        parts.append(f'<div class="card"><h4>Latency over time</h4>{self._add(figures.over_time(base, new))}</div>')
        return "\n".join([*parts, "</section>"])

    def whole(self) -> str:
        findings = [one for one in self._comparison.findings if not one.estimate.stage]
        if not findings:
            return ""
        runs = self._comparison.base, self._comparison.new
        parts = ["<section><h2>The whole run</h2>", self._table(findings)]
        if any(len(run.memory_s) for run in runs):
            picture = figures.memory(*((run.memory_s, run.memory_mib) for run in runs))
            parts.append(f'<div class="card"><h4>Memory of the workers</h4>{self._add(picture)}</div>')
        return "\n".join([*parts, "</section>"])

    def notes(self) -> str:
        items = "".join(f"<li>{_text(line)}</li>" for line in remarks(self._comparison))
        return f'<div class="note"><b>What to know</b><ul>{items}</ul></div>' if items else ""

    def runs(self) -> str:
        told = []
        for word, run in (("base", self._comparison.base), ("new", self._comparison.new)):
            machine = ", ".join(str(run.fact("machine", key)) for key in _MACHINE if run.fact("machine", key))
            cells = (word, run.name, run.fact("commit") or "-", run.fact("log", "path") or "-", machine or "-")
            told.append("".join(f'<td class="text">{_text(str(cell))}</td>' for cell in cells))
        head = "".join(f"<th>{name}</th>" for name in ("run", "file", "commit", "log", "machine"))
        lines = "".join(f"<tr>{cells}</tr>" for cells in told)
        return (
            f'<section><h2>The runs</h2><div class="card scroll"><table><tr>{head}</tr>{lines}</table></div></section>'
        )

    def _table(self, findings: Sequence[Finding]) -> str:
        names = [f"{self._confidence:.0%} {name}" if "interval" in name else name for name in COLUMNS]
        last = len(names) - 1
        head = "".join(f'<th class="{"n" if 0 < at < last else ""}">{name}</th>' for at, name in enumerate(names))
        lines = []
        for finding, row in zip(findings, rows(findings), strict=True):
            css = _CLASS.get(finding.verdict, "")
            cells = "".join(f'<td class="n">{_text(cell)}</td>' for cell in row[1:-1])
            verdict = f'<span class="tag {css}">{_text(row[-1])}</span>' if css else _text(row[-1])
            if finding.breaks_limit or finding.conspicuous:
                verdict = f'<b class="bad">{_text(row[-1])}</b>'
            metric = finding.estimate.metric
            lines.append(f"<tr><td>{metric.title} [{metric.unit}]</td>{cells}<td>{verdict}</td></tr>")
        return f'<div class="card scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'

    def _add(self, figure: go.Figure) -> str:
        name = f"figure{len(self.figures)}"
        figure.update_layout(template=None)
        told = json.dumps(figure.to_plotly_json(), separators=(",", ":"), allow_nan=False)
        self.figures.append(f'"{name}":{told}'.replace("</", "<\\/"))
        return f'<div id="{name}" class="plot"></div>'


def _whole_curve(stage: StageComparison, findings: Sequence[Finding]) -> figures.Bounds:
    """The quantiles that were drawn for the picture, and between them those of the verdicts."""
    found = {share: (share, middle, low, high) for share, middle, low, high in stage.curve}
    keys = {metric.key: share for metric, share in zip((P50, P95, P99), SHARES, strict=True)}
    for one in (finding.estimate for finding in findings):
        if one.metric.key in keys and one.interval is not None:
            share = keys[one.metric.key]
            found[share] = (share, one.difference, one.interval.low, one.interval.high)
    return tuple(found[share] for share in sorted(found))


def _text(text: str) -> str:
    return html.escape(text)
