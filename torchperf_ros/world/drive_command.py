"""`torchperf drive`: one drive, shown, and written down."""

import contextlib
import json
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from torchperf_ros.world.drive_page import write_page, write_picture
from torchperf_ros.world.latencies import FAULTS, Luck
from torchperf_ros.world.loop import ARMS, Drive, Driven, drive, parameters_of
from torchperf_ros.world.scenarios import SCENARIOS, describe, draw_scenario
from torchperf_ros.world.view import LiveView

_COLLISION: Final = 1


def list_choices(shown: Console) -> None:
    """Print scenarios, arms and faults."""
    for title, rows in (
        ("scenarios", [(name, *describe(name)) for name in SCENARIOS]),
        ("arms", list(ARMS.items())),
        ("faults", list(FAULTS.items())),
    ):
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1))
        for row in rows:
            table.add_row(*row)
        shown.print(table)


def run_drive(shown: Console, name: str, seed: int, by: tuple[str, int, str], output: Path | None, *, tui: bool) -> int:
    """Drive, show and write; the exit status.

    Args:
        shown: where.
        name: of the scenario.
        seed: of everything that is drawn.
        by: arm, load and faults.
        output: folder for what is written.
        tui: whether to show it in real time.

    Raises:
        ConfigError: there is no such scenario, arm, load or faults.
        OSError: something cannot be written.
    """
    arm, load, faults = by
    one = Drive(draw_scenario(name, seed), arm, load, faults, None if output is None else output / "drive.mcap")
    Luck(seed, load, faults)  # what it refuses is refused before anything is written or shown
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    what, _ = describe(name)
    with (
        LiveView(f"{name}: {what}; {arm}, load x{load}, faults {faults}", shown)
        if tui
        else contextlib.nullcontext() as view
    ):
        driven = drive(one) if view is None else drive(one, view.show)
    _print(shown, one, driven)
    if output is not None:
        _write(one, driven, output)
        shown.print(f"wrote drive.mcap, drive.yaml, drive.png, drive.html and drive.json to {output}", highlight=False)
    return _COLLISION if driven.score.collision else 0


def _print(shown: Console, one: Drive, driven: Driven) -> None:
    score = driven.score
    drawn = ", ".join(f"{name} {value:g}" for name, value in one.scenario.drawn.items())
    end = f"hit a {driven.world.seen.hit} at {3.6 * score.impact_ms:.1f} km/h" if score.collision else "no collision"
    shown.print(f"{one.scenario.name}, seed {one.scenario.seed}: {drawn}", highlight=False, soft_wrap=True)
    shown.print(
        f"{one.arm}: {end}; {driven.world.now_s:.1f} s, {score.progress_m:.0f} m, least time to collision"
        f" {score.min_ttc_s:.1f} s, hardest braking {score.hardest:.1f} m/s², {len(driven.injected)} faults",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    counts = ", ".join(f"{name} {count:,}" for name, count in driven.counts.items() if count)
    shown.print(f"frames and plans: {counts}", highlight=False, soft_wrap=True)


def _write(one: Drive, driven: Driven, folder: Path) -> None:
    write_picture([(one, driven)], folder / "drive.png")
    write_page(one, driven, folder / "drive.html")
    row = {"scenario": one.scenario.name, "seed": one.scenario.seed, "arm": one.arm, "load": one.load,
           "faults": one.faults, "drawn": one.scenario.drawn, **driven.row()}  # fmt: skip
    (folder / "drive.json").write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    parameters: dict[str, object] = {}
    for key, value in parameters_of(one).items():
        stage, dot, rest = key.partition(".")
        own = parameters.setdefault(stage, {}) if dot else parameters
        assert isinstance(own, dict)
        own[rest if dot else stage] = value
    text = json.dumps({"perf": {"ros__parameters": parameters}}, indent=2)  # JSON is YAML
    (folder / "drive.yaml").write_text(text + "\n", encoding="utf-8")
