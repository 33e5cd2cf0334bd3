"""What is left of a drive: a page, with pictures of it."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from torchperf_ros.observe.runs.page import Block, Page, number_cell, table
from torchperf_ros.world.loop import ARMS, Drive, Driven
from torchperf_ros.world.scenarios import describe
from torchperf_ros.world.vehicles import LENGTH_M, REAR_M, WIDTH_M
from torchperf_ros.world.world import Moment

_CORNERS = np.array([[0.5, 0.5], [0.5, -0.5], [-0.5, -0.5], [-0.5, 0.5], [0.5, 0.5]])
OURS, _OTHERS, WALL, HIT = "#00704f", "#0072b2", "#8a8f96", "#b32d00"


def write_page(one: Drive, driven: Driven, path: Path) -> None:
    """The drive as one HTML file that needs no network."""
    import plotly.graph_objects as go

    score, trace, page = driven.score, driven.world.trace, Page()
    what, source = describe(one.scenario.name)
    hit = "bad" if score.collision else "good"
    page.top.append(
        {
            "kind": "tiles",
            "tiles": [
                (f"{3.6 * score.impact_ms:.0f} km/h" if score.collision else "none", "collision", hit),
                (f"{score.min_ttc_s:.1f} s", "least time to collision (at most 3)", ""),
                (f"{score.progress_m:.0f} m", "progress", ""),
                (f"{score.hardest:.1f} m/s²", "hardest braking", ""),
                (len(driven.injected), "faults injected", ""),
                *(
                    [("latched", f"the emergency lane, after {driven.latch}", "bad")]
                    if driven.latch
                    else []
                ),
            ],
        }
    )
    road = go.Figure()
    for edge in one.scenario.road:
        points = one.scenario.lane.at(np.arange(-20.0, driven.world.progress_m + 60.0, 2.0), edge)
        road.add_scatter(
            x=points[:, 0].round(2).tolist(),
            y=points[:, 1].round(2).tolist(),
            mode="lines",
            line={"color": WALL},
            hoverinfo="skip",
            showlegend=False,
        )
    for index in range(0, len(trace), 20):
        for colour, outline in outlines(driven, trace[index]):
            road.add_scatter(
                x=outline[:, 0].round(2).tolist(),
                y=outline[:, 1].round(2).tolist(),
                fill="toself",
                mode="lines",
                line={"color": colour, "width": 1},
                opacity=0.5,
                showlegend=False,
                name=f"{trace[index].at_s:.1f} s",
            )
    own = [moment.vehicle[0] for moment in trace]
    road.update_layout(
        height=280, xaxis={"title": "m", "range": [min(own) - 40, max(own) + 60]}, yaxis={"title": "m"}
    )
    at_s = [moment.at_s for moment in trace]
    speed = _line(at_s, [3.6 * moment.vehicle[3] for moment in trace], "km/h", OURS)
    ttc = _line(at_s, [min(moment.ttc_s, 3.0) for moment in trace], "s", HIT)
    for stamp_ns, kind in driven.injected:
        speed.add_vline(
            x=(stamp_ns - driven.world.start_ns) / 1e9,
            line={"dash": "dot", "width": 1},
            annotation_text=kind,
            annotation_textangle=-90,
            annotation_font_size=9,
            annotation_position="bottom left",
        )
    page.section(
        "From above, once a second: green is this vehicle, red where it hit something, blue the others",
        [page.plots(("", road))],
    )
    page.section(
        "Speed and time to collision",
        [page.plots(("Speed, and the faults", speed), ("Time to collision", ttc))],
    )
    page.section("Parameters", [_table(one.scenario.drawn), {"kind": "soft", "text": f"{what}; {source}"}])
    page.section("Plans", [_table(driven.counts), {"kind": "soft", "text": f"{one.arm}: {ARMS[one.arm]}"}])
    footer = f"torchperf drive --scenario {one.scenario.name} --seed {one.scenario.seed} --arm {one.arm}"
    footer += f" --load {one.load} --faults {one.faults}"
    for option, value in (("times", one.times), ("restart-ms", one.restart_ms)):
        footer += f" --{option} {value}" if value is not None else ""
    path.write_text(page.render(title_of(one, driven), f"{what}.", footer), encoding="utf-8")


def outlines(driven: Driven, moment: Moment) -> list[tuple[str, Any]]:
    """Colour and corners of everybody; the vehicle comes last."""
    kinds = [WALL if body.kind == "wall" else _OTHERS for body in driven.world.bodies]
    x, y, yaw, _ = moment.vehicle
    ahead = 0.5 * LENGTH_M - REAR_M
    own = (x + ahead * math.cos(yaw), y + ahead * math.sin(yaw), yaw, 0.0, 0.0, LENGTH_M, WIDTH_M)
    last = driven.score.collision and moment is driven.world.trace[-1]
    outlines = []
    for colour, box in [*zip(kinds, moment.boxes.tolist(), strict=True), (HIT if last else OURS, own)]:
        corners, (cosine, sine) = _CORNERS * box[5:], (math.cos(box[2]), math.sin(box[2]))
        outlines.append((colour, corners @ np.array([[cosine, sine], [-sine, cosine]]) + box[:2]))
    return outlines


# plotly has no types
def _line(at_s: list[float], values: list[Any], unit: str, colour: str) -> Any:  # noqa: ANN401
    import plotly.graph_objects as go

    rounded = [None if value is None else round(value, 2) for value in values]
    figure = go.Figure(
        go.Scatter(x=at_s, y=rounded, mode="lines", line={"color": colour}, showlegend=False)
    )
    figure.update_layout(height=300, xaxis={"title": "s"}, yaxis={"title": unit, "rangemode": "tozero"})
    return figure


def _table(values: dict[str, Any]) -> Block:
    return table(("", ""), [[name, number_cell(f"{value:g}")] for name, value in values.items()])


def title_of(one: Drive, driven: Driven) -> str:
    name = (
        f"{one.scenario.name}, seed {one.scenario.seed}, {one.arm}, load x{one.load}, faults {one.faults}"
    )
    return f"{name}: {ended(driven)}"


def ended(driven: Driven) -> str:
    if not driven.score.collision:
        return "no collision"
    return f"hit a {driven.world.seen.hit} at {3.6 * driven.score.impact_ms:.1f} km/h"
