"""One run of the curve: device, progress, measurement, and everything that is shown and written of it."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from torchperf_ros.analysis.chain_curve import THREADS, Curve, measure_curve, steps
from torchperf_ros.analysis.curve_report import curve_csv, curve_json, curve_tables, curve_targets
from torchperf_ros.analysis.machine import describe_machine, machine_line
from torchperf_ros.worker.device import choose_device


def run_curve(lengths: Sequence[int], device_name: str, seconds: float, folder: Path | None, console: Console) -> bool:
    """Measure, show, write; whether every target that was measured was reached.

    Args:
        lengths: numbers of operations, ascending.
        device_name: as `choose_device` takes it.
        seconds: timing, for each engine at each length.
        folder: for curve.csv, curve.json and curve.png; None: only the tables.
        console: where to show it.

    Raises:
        ConfigError: a device that is not there.
        OSError: a file cannot be written.
    """
    device = choose_device(device_name)
    machine = describe_machine(device, THREADS)  # before it is loaded by this
    with _progress(console, steps(lengths, device)) as on_step:
        curve = measure_curve(lengths, device, seconds=seconds, on_step=on_step)
    console.print(f"[grey62]{machine_line(machine)}[/]", highlight=False)
    for table in curve_tables(curve):
        console.print(table)
    for point in curve.points:
        if point.error and point.runs == point.engine:
            console.print(f"n = {point.length}, {point.engine}: {point.error}", style="red", markup=False)
    targets = curve_targets(curve)
    for target in targets:
        style = {"met": "green3", "missed": "red"}.get(target.verdict, "grey62")
        console.print(f"[{style}]{target.verdict}[/]: {target.wanted}: {target.found}", highlight=False)
    if folder is not None:
        _write(curve, machine, seconds, folder, console)
    return all(target.met is not False for target in targets)


def _write(curve: Curve, machine: dict[str, object], seconds: float, folder: Path, console: Console) -> None:
    (folder / "curve.csv").write_text(curve_csv(curve), encoding="utf-8")
    (folder / "curve.json").write_text(curve_json(curve, machine, seconds), encoding="utf-8")
    written = "curve.csv, curve.json"
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no picture: matplotlib is not installed; `pip install 'torchperf_ros[analysis]'`", markup=False)
    else:
        from torchperf_ros.analysis.curve_picture import save_curve

        save_curve(curve, machine_line(machine), folder / "curve.png")
        written += ", curve.png"
    console.print(f"{folder}: {written}", highlight=False, markup=False)


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def on_step(what: str) -> None:
            nonlocal begun
            progress.update(task, description=what, completed=begun)
            begun += 1

        yield on_step
