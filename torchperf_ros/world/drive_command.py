"""`torchperf drive`: one drive, shown, in a terminal in real time, and written down with pictures."""

import contextlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.observe.runs.report import Block, Page, number_cell, table
from torchperf_ros.tools.shell import say
from torchperf_ros.world.latencies import FAULTS, RATED, usual_times
from torchperf_ros.world.loop import (
    ARMS,
    NAIVE_ARMS,
    OWN_ARMS,
    Drive,
    Driven,
    Workers,
    drive,
    parameters_of,
)
from torchperf_ros.world.scenarios import SCENARIOS, TRAFFIC, describe
from torchperf_ros.world.vehicles import LENGTH_M, REAR_M, WIDTH_M
from torchperf_ros.world.world import Moment, World

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
    for moment in [*trace[:-1:20], trace[-1]]:  # the last one, as it may be where something was hit
        for colour, outline in outlines(driven, moment):
            road.add_scatter(
                x=outline[:, 0].round(2).tolist(),
                y=outline[:, 1].round(2).tolist(),
                fill="toself",
                mode="lines",
                line={"color": colour, "width": 1},
                opacity=0.5,
                showlegend=False,
                name=f"{moment.at_s:.1f} s",
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
    for colour, shape in [*zip(kinds, moment.boxes.tolist(), strict=True), (HIT if last else OURS, own)]:
        corners, (cosine, sine) = _CORNERS * shape[5:], (math.cos(shape[2]), math.sin(shape[2]))
        outlines.append((colour, corners @ np.array([[cosine, sine], [-sine, cosine]]) + shape[:2]))
    return outlines


# plotly has no types
def _line(at_s: list[float], values: list[float], unit: str, colour: str) -> Any:  # noqa: ANN401
    import plotly.graph_objects as go

    shown = [round(value, 2) for value in values]
    figure = go.Figure(go.Scatter(x=at_s, y=shown, mode="lines", line={"color": colour}, showlegend=False))
    return figure.update_layout(
        height=300, xaxis={"title": "s"}, yaxis={"title": unit, "rangemode": "tozero"}
    )


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


_COLLISION: Final = 1
_BEHIND_M, _BESIDE_M = 25.0, 9.0  # of the view
_COLUMN_M, _ROW_M = 1.25, 1.0
_ROWS: Final = int(2 * _BESIDE_M / _ROW_M) + 1
_GLYPHS: Final = {"car": ("█", "cyan"), "pedestrian": ("●", "bold magenta"), "wall": ("▒", "bright_black")}
_WARN_S: Final = 1.5
_LOG: Final = "drive.mcap"
_TEST: Final = '''\
"""{title}, {when}: {end}."""

from pathlib import Path

import pytest

from torchperf_ros.world.loop import Drive, drive
from torchperf_ros.world.scenarios import draw_scenario


def test_the_vehicle_hits_nothing():
    """The same drive in the closed loop, with the code of today."""
    driven = drive(Drive(draw_scenario("{name}", {seed}), "{arm}", {load}, "{faults}"{options}))
    assert not driven.score.collision, f"hit a {{driven.world.seen.hit}}"


@pytest.mark.fieldlog("drive.mcap")
def test_plans_are_as_they_were(replay, golden):
    """What the stages make of what the sensors sent; `pytest --refresh-golden` writes the golden plans."""
    golden.check(replay(params="drive.yaml", pace="virtual"{step_times}), "planning")
'''


def list_choices(shown: Console) -> None:
    for title, rows in (
        ("scenarios", [(name, *describe(name)) for name in (*SCENARIOS, *TRAFFIC)]),
        ("arms", list(ARMS.items())),
        ("faults", list(FAULTS.items())),
        ("faults by rate, as KIND=NUMBER a minute", list(RATED.items())),
    ):
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_header=False, padding=(0, 1))
        for row in rows:
            table.add_row(*row)
        shown.print(table)


def run_drive(shown: Console, one: Drive, output: Path | None, *, tui: bool) -> int:
    """Drive, show and write; the exit status.

    Args:
        shown: where.
        one: what, and by whom; what it writes is for `output` to say.
        output: folder for what is written.
        tui: whether to show it in real time.

    Raises:
        ConfigError: load, faults or times cannot be used, or the folder cannot be written.
        OSError: something else cannot be written.
    """
    one.luck()  # what it refuses is refused before anything is written or shown
    if output is not None:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--output {output}: cannot be made: {error.strerror or error}") from error
        if not os.access(output, os.W_OK | os.X_OK):
            raise ConfigError(f"--output {output}: nothing can be written there; name a folder of yours")
        one = _into(one, output)
    name = one.scenario.name
    title = f"{name}: {describe(name)[0]}; {one.arm}, load x{one.load}, faults {one.faults}"
    with LiveView(title, shown) if tui else contextlib.nullcontext() as view:
        driven = drive(one) if view is None else drive(one, view.show)
    _print(shown, one, driven)
    if output is not None:
        written = _write(one, driven, output)
        say(shown, f"wrote {_LOG}, {', '.join(written)} to {output}")
    return _COLLISION if driven.score.collision else 0


def _into(one: Drive, folder: Path) -> Drive:
    """The same, with its log in the folder, and a copy of its times beside it, which its test needs."""
    if one.times is not None:
        copy = folder / f"times{one.times.suffix}"
        if one.times.is_dir():
            raise ConfigError(
                f"--times {one.times}: is a folder; with -o, name one file of it, of which a copy is kept"
            )
        if one.times.resolve() != copy.resolve():
            shutil.copyfile(one.times, copy)
        one = replace(one, times=copy)
    return replace(one, output=folder / _LOG)


def write_drive(one: Drive, folder: Path, workers: Workers | None = None) -> None:
    """Drive once more, and write all of it; an `OSError` where something cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    one = _into(one, folder)
    _write(one, drive(one, workers=workers), folder)


def _print(shown: Console, one: Drive, driven: Driven) -> None:
    score = driven.score
    drawn = ", ".join(f"{name} {value:g}" for name, value in one.scenario.drawn.items())
    say(shown, f"{one.scenario.name}, seed {one.scenario.seed}: {drawn}")
    say(
        shown,
        f"{one.arm}: {ended(driven)}; {driven.world.now_s:.1f} s, {score.progress_m:.0f} m, least time to"
        f" collision {score.min_ttc_s:.1f} s, hardest braking {score.hardest:.1f} m/s²,"
        f" {len(driven.injected)} faults",
    )
    counts = ", ".join(f"{name} {count:,}" for name, count in driven.counts.items() if count)
    say(shown, f"frames and plans: {counts}")
    if driven.latch:
        say(shown, f"the emergency lane latched after {driven.latch}")


def _write(one: Drive, driven: Driven, folder: Path) -> list[str]:
    """Names of the files: page, figures, parameters of the stages, the test, and what that needs."""
    scenario = one.scenario
    write_page(one, driven, folder / "drive.html")
    row = {
        "scenario": scenario.name,
        "seed": scenario.seed,
        "arm": one.arm,
        "load": one.load,
        "goes_wrong": one.faults,
        "times": None if one.times is None else one.times.name,
        "restart_ms": one.restart_ms,
        "drawn": scenario.drawn,
        **driven.row(),
    }
    (folder / "drive.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    own = one if one.arm in OWN_ARMS else replace(one, arm="full")  # the arm that is tested
    parameters: dict[str, Any] = {}
    for key, value in parameters_of(own).items():
        *stage, name = key.split(".", 1)
        (parameters.setdefault(stage[0], {}) if stage else parameters)[name] = value
    text = json.dumps({"perf": {"ros__parameters": parameters}}, indent=2)  # JSON is YAML
    (folder / "drive.yaml").write_text(text + "\n", encoding="utf-8")
    test = folder / f"test_{scenario.name}_{scenario.seed}_{one.arm}.py"
    when = f"load x{one.load}, faults {one.faults}"
    names = ["drive.html", "drive.json", "drive.yaml", test.name]
    options = step_times = ""
    if one.times is not None:
        options = f', times=Path(__file__).with_name("{one.times.name}")'
    if own is not one:  # only our own logs say how long a run took
        table = one.times
        if table is None:
            table = folder / "step_times.yaml"
            table.write_text(json.dumps(usual_times(one.load), indent=1) + "\n", encoding="utf-8")
            names.append(table.name)
        step_times = f', step_times="{table.name}"'
    # How long a naive node takes says nothing of the arm that is tested in its place.
    options += "" if one.restart_ms is None or one.arm in NAIVE_ARMS else f", restart_ms={one.restart_ms}"
    test.write_text(
        _TEST.format(
            title=f"{scenario.name}, seed {scenario.seed}, {one.arm}",
            when=when,
            end=ended(driven),
            step_times=step_times,
            name=scenario.name,
            seed=scenario.seed,
            arm=own.arm,
            load=one.load,
            faults=one.faults,
            options=options,
        ),
        encoding="utf-8",
    )
    return names


class LiveView(Live):
    """A world in real time, seen from above and from its vehicle: ahead is to the right."""

    def __init__(self, title: str, shown: Console) -> None:
        super().__init__(console=shown, auto_refresh=False)
        self._title, self._columns, self._begun_s = title, max(40, shown.width - 1), 0.0

    def show(self, world: World) -> None:
        self._begun_s = self._begun_s or time.monotonic() - world.now_s
        time.sleep(max(0.0, self._begun_s + world.now_s - time.monotonic()))
        self.update(self._picture(world), refresh=True)

    def _picture(self, world: World) -> Group:
        cells = [[(" ", "")] * self._columns for _ in range(_ROWS)]
        vehicle = world.vehicle
        cosine, sine = math.cos(vehicle.yaw), math.sin(vehicle.yaw)

        def put(x: float, y: float, glyph: tuple[str, str]) -> None:
            dx, dy = x - vehicle.x, y - vehicle.y
            column = round((dx * cosine + dy * sine + _BEHIND_M) / _COLUMN_M)
            row = round((_BESIDE_M - dy * cosine + dx * sine) / _ROW_M)
            if 0 <= column < self._columns and 0 <= row < _ROWS:
                cells[row][column] = glyph

        along = world.progress_m + np.arange(-_BEHIND_M, self._columns * _COLUMN_M, _COLUMN_M)
        road = world.scenario.road
        for edge, line in ((road[0], "─"), (road[1], "─"), (-road[1] / 3, "╌"), (road[1] / 3, "╌")):
            for x, y, _ in world.scenario.lane.at(along, edge).tolist():
                put(x, y, (line, "bright_black"))
        for x, y in world.vehicle.followed.tolist():
            put(x, y, ("·", "green"))
        for body, place in zip(world.bodies, world.boxes.tolist(), strict=True):
            _fill(put, place, _GLYPHS[body.kind])
        _fill(put, vehicle.box, ("█", "bold red" if world.seen.hit else "bold green"))
        rows = [Text.assemble(*row) for row in cells]
        return Group(Text(self._title, style="bold"), *rows, _status(world))


def _fill(
    put: Callable[[float, float, tuple[str, str]], None], box: Sequence[float], glyph: tuple[str, str]
) -> None:
    x, y, yaw, *_, length, width = box
    for along in np.arange(-length / 2, length / 2 + 0.1, min(1.0, length)):
        for beside in np.arange(-width / 2, width / 2 + 0.1, min(0.9, width)):
            cosine, sine = math.cos(yaw), math.sin(yaw)
            put(x + along * cosine - beside * sine, y + along * sine + beside * cosine, glyph)


def _status(world: World) -> Text:
    vehicle, ttc_s = world.vehicle, world.ttc_s
    shown = "-" if math.isinf(ttc_s) else f"{ttc_s:.1f} s"
    text = Text(
        f"{world.now_s:5.1f} s   {vehicle.speed * 3.6:5.1f} km/h   {vehicle.acceleration:+5.1f} m/s²   "
    )
    text.append(f"time to collision {shown}", style="bold red" if ttc_s < _WARN_S else "")
    if world.seen.hit:
        text.append(f"   hit a {world.seen.hit} at {world.seen.impact_ms * 3.6:.0f} km/h", style="bold red")
    return text
