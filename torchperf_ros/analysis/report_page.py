"""The page of `torchperf report`: one file that needs no network, not larger than 8 MB."""

import html
import json
from collections.abc import Callable
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from torchperf_ros import __version__
from torchperf_ros.analysis.report_inputs import InputPicture, input_pictures
from torchperf_ros.analysis.report_overview import Overview, overview_html
from torchperf_ros.analysis.report_section import WORST, comparison, section, utc
from torchperf_ros.analysis.report_summary import worst_frames
from torchperf_ros.analysis.run_log import RunLog, RunLogError

MOST_BYTES = 8_000_000
_PAGE = Path(__file__).with_name("report_page.html")
_POINTS, _SIDE = 4000, 360
_LEAST_POINTS = 50


class ReportPage:
    """Figures and sections on their way into a page."""

    def __init__(self, points: int) -> None:
        """Draw so many points of a series at most."""
        self._points = points
        self._figures: list[str] = []

    def section(self, run: RunLog, number: int, pictures: dict[int, InputPicture], troubles: list[str]) -> str:
        """The HTML of a run."""
        return section(run, f"run{number}", self._add, pictures, troubles, self._points)

    def finish(self, runs: list[RunLog], sections: list[str], overview: Overview | None = None) -> str:
        """The page; with an overview, the runs are a few of those that it is of."""
        links = [f'<a href="#run{number}">{_escaped(run.name)}</a>' for number, run in enumerate(runs)]
        begin_ns = min((run.span_ns[0] for run in runs if run.span_ns[0]), default=0)
        navigation = f"<nav>{' '.join(links)}</nav>" if len(runs) > 1 else ""
        if overview is not None:
            anchors = {run.name: f"run{number}" for number, run in enumerate(runs)}
            title, count = overview.title, len({row.run for row in overview.rows})
            navigation = overview_html(overview, anchors, self._add)
        else:
            title, count = ", ".join(run.name for run in runs), len(runs)
            navigation += comparison(runs) if count > 1 else ""
        return Template(_PAGE.read_text(encoding="utf-8")).substitute(
            title=_escaped(f"How the models did: {title}"),
            subtitle=f"{count:,} {'log' if count == 1 else 'logs'}, from {utc(begin_ns)} on; all times are UTC."
            " In a picture: drag to zoom, double-click to go back.",
            navigation=navigation,
            sections="\n".join(sections),
            footer=f"torchperf report {__version__}. Long series are thinned so that the first, last, lowest and"
            " highest value of each stretch stay; every number is of all frames.",
            plotly=get_plotlyjs(),
            figures="{" + ",".join(self._figures) + "}",
        )

    def _add(self, figure: go.Figure) -> str:
        name = f"figure{len(self._figures)}"
        figure.update_layout(template=None)
        if figure.data and figure.data[0].type == "scatter" and figure.layout.xaxis.type is None:
            figure.update_xaxes(type="date")
        told = json.dumps(figure.to_plotly_json(), separators=(",", ":"), allow_nan=False)
        self._figures.append(f'"{name}":{told}'.replace("</", "<\\/"))
        return f'<div id="{name}" class="plot"></div>'


def write_report(
    runs: list[RunLog], path: Path, progress: Callable[[str], None], overview: Overview | None = None
) -> int:
    """Write the page; series are thinned, and pictures made smaller, until it fits. Returns its size in bytes.

    Args:
        runs: what to tell in detail.
        path: the file to write.
        progress: told what is done now.
        overview: of all runs, where these are only some.

    Raises:
        RunLogError: there is too much even so; fewer logs would do.
        OSError: the file cannot be written.
    """
    points, side = _POINTS, _SIDE
    while points >= _LEAST_POINTS:
        page = ReportPage(points)
        sections = []
        for number, run in enumerate(runs):
            progress(f"drawing {run.name}")
            pictures, why = _pictures(run, side)
            sections.append(page.section(run, number, pictures, [why] if why else []))
        data = page.finish(runs, sections, overview).encode()
        if len(data) <= MOST_BYTES:
            path.write_bytes(data)
            return len(data)
        points, side = points // 4, side // 2
    msg = f"{len(runs)} logs make a page of more than {MOST_BYTES // 1_000_000} MB; report on fewer at a time"
    raise RunLogError(msg)


def _pictures(run: RunLog, side: int) -> tuple[dict[int, InputPicture], str]:
    if not run.recordings:
        return {}, "no recorded inputs beside these figures, so the worst frames are shown without pictures"
    wanted: dict[int, int] = {}
    for stage in run.stages:
        for index in worst_frames(stage, WORST):
            if stamp_ns := int(stage.frames["stamp_ns"][index]):
                wanted[stamp_ns] = int(stage.frames["t_ns"][index])
    return input_pictures(run.recordings, wanted.items(), side)


def _escaped(text: str) -> str:
    return html.escape(text)
