"""A drive in a terminal: the road from above, the vehicle at the left, and how it is doing."""

import math
import time
from typing import Final

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from torchperf_ros.world.vehicles import LENGTH_M, REAR_M, WIDTH_M
from torchperf_ros.world.world import World

_BEHIND_M, _BESIDE_M = 25.0, 9.0
_COLUMN_M, _ROW_M = 1.25, 1.0
_ROWS: Final = int(2 * _BESIDE_M / _ROW_M) + 1
_GLYPHS: Final = {"car": ("█", "cyan"), "pedestrian": ("●", "bold magenta"), "wall": ("▒", "bright_black")}
_WARN_S: Final = 1.5


class TopView:
    """Draws a world, seen from above and from its vehicle: ahead is to the right."""

    def __init__(self, title: str, columns: int) -> None:
        """Draw this many columns of 1.25 m."""
        self._title, self._columns = title, columns

    def picture(self, world: World) -> Group:
        """The moment."""
        cells = [[(" ", "")] * self._columns for _ in range(_ROWS)]
        vehicle = world.vehicle
        cosine, sine = math.cos(vehicle.yaw), math.sin(vehicle.yaw)

        def put(x: float, y: float, glyph: tuple[str, str]) -> None:
            ahead, left = (
                (x - vehicle.x) * cosine + (y - vehicle.y) * sine,
                (y - vehicle.y) * cosine - (x - vehicle.x) * sine,
            )
            column, row = round((ahead + _BEHIND_M) / _COLUMN_M), round((_BESIDE_M - left) / _ROW_M)
            if 0 <= column < self._columns and 0 <= row < _ROWS:
                cells[row][column] = glyph

        along = world.progress_m + np.arange(-_BEHIND_M, self._columns * _COLUMN_M, _COLUMN_M)
        edges = (*world.scenario.road, -world.scenario.road[1] / 3, world.scenario.road[1] / 3)
        for number, edge in enumerate(edges):
            glyph = ("─", "bright_black") if number < 2 else ("╌", "bright_black")  # noqa: PLR2004 - the road's own edges
            for x, y, _ in world.scenario.lane.at(along, edge).tolist():
                put(x, y, glyph)
        for x, y in world.vehicle.followed.tolist():
            put(x, y, ("·", "green"))
        for body, box in zip(world.bodies, world.boxes.tolist(), strict=True):
            self._fill(put, box, _GLYPHS[body.kind])
        ahead = 0.5 * LENGTH_M - REAR_M
        own = [vehicle.x + ahead * cosine, vehicle.y + ahead * sine, vehicle.yaw, 0.0, 0.0, LENGTH_M, WIDTH_M]
        self._fill(put, own, ("█", "bold red" if world.seen.hit else "bold green"))
        rows = [Text.assemble(*row) for row in cells]
        return Group(Text(self._title, style="bold"), *rows, self._status(world))

    @staticmethod
    def _fill(put, box: list[float], glyph: tuple[str, str]) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        x, y, yaw, *_, length, width = box
        for along in np.arange(-length / 2, length / 2 + 0.1, min(1.0, length)):
            for beside in np.arange(-width / 2, width / 2 + 0.1, min(0.9, width)):
                put(
                    x + along * math.cos(yaw) - beside * math.sin(yaw),
                    y + along * math.sin(yaw) + beside * math.cos(yaw),
                    glyph,
                )

    def _status(self, world: World) -> Text:
        vehicle, ttc_s = world.vehicle, world.ttc_s
        shown = "-" if math.isinf(ttc_s) else f"{ttc_s:.1f} s"
        text = Text(f"{world.now_s:5.1f} s   {vehicle.speed * 3.6:5.1f} km/h   {vehicle.acceleration:+5.1f} m/s²   ")
        text.append(f"time to collision {shown}", style="bold red" if ttc_s < _WARN_S else "")
        if world.seen.hit:
            text.append(f"   hit a {world.seen.hit} at {world.seen.impact_ms * 3.6:.0f} km/h", style="bold red")
        return text


class LiveView:
    """A `TopView` that is redrawn in real time; a context."""

    def __init__(self, title: str, shown: Console) -> None:
        """Draw in this terminal."""
        self._view = TopView(title, max(40, shown.width - 1))
        self._live = Live(console=shown, auto_refresh=False)
        self._begun_s = 0.0

    def __enter__(self) -> "LiveView":
        self._live.__enter__()
        return self

    def __exit__(self, *stopped: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, world: World) -> None:
        """Draw the moment when it is time for it."""
        self._begun_s = self._begun_s or time.monotonic() - world.now_s
        time.sleep(max(0.0, self._begun_s + world.now_s - time.monotonic()))
        self._live.update(self._view.picture(world), refresh=True)
