"""A drive in a terminal: the road from above, the vehicle at the left, and how it is doing."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchperf_ros.world.world import World

_BEHIND_M, _BESIDE_M = 25.0, 9.0
_COLUMN_M, _ROW_M = 1.25, 1.0
_ROWS: Final = int(2 * _BESIDE_M / _ROW_M) + 1
_GLYPHS: Final = {"car": ("█", "cyan"), "pedestrian": ("●", "bold magenta"), "wall": ("▒", "bright_black")}
_WARN_S: Final = 1.5


class LiveView(Live):
    """A world in real time, seen from above and from its vehicle: ahead is to the right."""

    def __init__(self, title: str, shown: Console) -> None:
        super().__init__(console=shown, auto_refresh=False)
        self._title, self._columns, self._begun_s = title, max(40, shown.width - 1), 0.0

    def show(self, world: World) -> None:
        """Draw the moment when it is time for it."""
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
        for body, box in zip(world.bodies, world.boxes.tolist(), strict=True):
            _fill(put, box, _GLYPHS[body.kind])
        _fill(put, vehicle.box, ("█", "bold red" if world.seen.hit else "bold green"))
        rows = [Text.assemble(*row) for row in cells]
        return Group(Text(self._title, style="bold"), *rows, _status(world))


def _fill(
    put: Callable[[float, float, tuple[str, str]], None], box: Sequence[float], glyph: tuple[str, str]
) -> None:  # fmt: skip
    x, y, yaw, *_, length, width = box
    for along in np.arange(-length / 2, length / 2 + 0.1, min(1.0, length)):
        for beside in np.arange(-width / 2, width / 2 + 0.1, min(0.9, width)):
            cosine, sine = math.cos(yaw), math.sin(yaw)
            put(x + along * cosine - beside * sine, y + along * sine + beside * cosine, glyph)


def _status(world: World) -> Text:
    vehicle, ttc_s = world.vehicle, world.ttc_s
    shown = "-" if math.isinf(ttc_s) else f"{ttc_s:.1f} s"
    text = Text(f"{world.now_s:5.1f} s   {vehicle.speed * 3.6:5.1f} km/h   {vehicle.acceleration:+5.1f} m/s²   ")
    text.append(f"time to collision {shown}", style="bold red" if ttc_s < _WARN_S else "")
    if world.seen.hit:
        text.append(f"   hit a {world.seen.hit} at {world.seen.impact_ms * 3.6:.0f} km/h", style="bold red")
    return text
