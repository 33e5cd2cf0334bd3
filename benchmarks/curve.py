"""Launch-bound chains: how many times faster than eager each engine is.

A chain of n elementwise operations and a sum on inputs of changing batch size, (4..13, 16): in eager;
static and dynamic (torch.compile); aoti-dynamic (an AOTInductor package); CUDA graphs where there is CUDA;
and auto, the engine that the project chooses from a calibration of its own. Compiling takes minutes the
first time, less where Inductor's cache holds the chains.
"""

import argparse
import csv
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.rig.arguments import arguments_of, callers_path
from benchmarks.rig.chains import (
    AOTI,
    AUTO,
    DYNAMIC,
    GRAPHS,
    LENGTHS,
    REFERENCE,
    STATIC,
    THREADS,
    CurvePoint,
    measure_curve,
)
from benchmarks.rig.report import Report, Target, plain, say, shown
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.device import choose_device
from torchperf_ros.workers.package_manifest import EAGER

_MOST = 1000
_LONGEST = 30
_TIMES_AT_LONGEST = 5.3
_NEVER_SLOWER = 1 / 1.05
_SIZE_INCHES = (8.0, 5.0)
_DOTS_PER_INCH = 150
_COLOURS = {
    EAGER: "#52514e",
    STATIC: "#2a78d6",
    DYNAMIC: "#eda100",
    AOTI: "#1baf7a",
    GRAPHS: "#4a3aa7",
    AUTO: "#e34948",
}
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_EPILOG = f"""\
targets: auto at most 5 % slower than eager at any n, at least {_TIMES_AT_LONGEST} times as fast at n = {_LONGEST}
exit status: 0 if they are met, 1 if one is missed, 2 if the input cannot be used

examples:
  ./run bench curve
  ./run bench curve --n 1,10,30 --seconds 0.3 -o curve       # writes curve/curve.csv and curve/curve.png"""


def main() -> int:
    arguments = _arguments()
    report = Report("curve", arguments)
    curve = measure_curve(arguments.n, arguments.chosen_device, seconds=arguments.seconds, on_step=say)
    _show(report, curve)
    if arguments.output is not None:
        _write(report, curve, arguments.output)
    targets = curve_targets(curve)
    report.finish({"points": [asdict(point) for point in curve]}, targets)
    return 0 if all(target.met for target in targets) else 1


def curve_targets(curve: Sequence[CurvePoint]) -> list[Target]:
    """`auto` against eager at every length and, where it was measured, at 30 operations."""
    autos = {point.length: point for point in curve if point.engine == AUTO}
    least = min(autos.values(), key=lambda point: point.times_eager)
    targets = [
        Target(
            f"{AUTO}, times eager at the least (n = {least.length})", least.times_eager, ">=", _NEVER_SLOWER
        )
    ]
    if longest := autos.get(_LONGEST):
        what = f"{AUTO}, times eager at n = {_LONGEST} (by {longest.runs})"
        targets.append(Target(what, longest.times_eager, ">=", _TIMES_AT_LONGEST))
    return targets


def _arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--n", type=_lengths, default=list(LENGTHS), help="operations, with commas between")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="for which each engine at each n is timed (1)"
    )
    parser.add_argument(
        "--device", default="auto", help="auto (CUDA where there is one), cpu, cuda or cuda:N"
    )
    parser.add_argument(
        "-o", "--output", type=callers_path, help="folder for curve.csv and curve.png; made if missing"
    )
    arguments = parser.parse_args()
    try:
        arguments.chosen_device = choose_device(arguments.device)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError, RuntimeError) as error:  # torch names a device that it does not know
        parser.error(str(error))
    return arguments


def _lengths(text: str) -> list[int]:
    lengths = sorted({int(word) for word in text.split(",")})
    if lengths[0] < 1 or lengths[-1] > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 1 to {_MOST}, with commas between")
    return lengths


def _show(report: Report, curve: Sequence[CurvePoint]) -> None:
    at = {(point.length, point.engine): point for point in curve}
    lengths, engines = (
        sorted({length for length, _ in at}),
        list(dict.fromkeys(point.engine for point in curve)),
    )
    compiled = [engine for engine in engines if engine != EAGER]
    rows = [(n, *(_ratio(at[n, engine]) for engine in compiled), at[n, AUTO].runs) for n in lengths]
    report.table(
        "Times eager, published ratio (on a GPU) in brackets", ("n", *compiled, f"{AUTO} is"), rows
    )
    timed = [engine for engine in engines if engine != AUTO]
    rows = [(n, *(at[n, engine].median_us for engine in timed)) for n in lengths]
    report.table("Median us per call", ("n", *timed), rows)
    rows = [(n, *(at[n, engine].compile_s for engine in timed[1:])) for n in lengths]
    report.table("Seconds to compile", ("n", *timed[1:]), rows)
    for point in curve:
        if point.error and point.runs == point.engine:
            report.text(f"n = {point.length}, {point.engine}: {point.error}")


def _ratio(point: CurvePoint) -> str:
    published = "" if point.reference is None else f" ({point.reference:.2f})"
    return "failed" if point.error else f"{point.times_eager:.2f}{published}"


def _write(report: Report, curve: Sequence[CurvePoint], folder: Path) -> None:
    with open(folder / "curve.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(curve[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(plain(asdict(point)) for point in curve)
    if importlib.util.find_spec("matplotlib") is None:
        report.text("no picture: matplotlib is not installed; `pip install 'torchperf_ros[analysis]'`")
        return
    found = report.machine
    words = [found["cpu"], f"{found['cores']} cores, threads {THREADS}, torch {found['torch']}"]
    save_curve(curve, ", ".join(map(shown, words)), folder / "curve.png")


def save_curve(curve: Sequence[CurvePoint], machine: str, path: Path) -> None:
    """Draw times eager over n, the published ratios dashed, and write a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1.0, color=_COLOURS[EAGER], linewidth=1)
    axes.annotate(
        "eager",
        (1.0, 1.0),
        (-4, 4),
        textcoords="offset points",
        ha="right",
        xycoords=("axes fraction", "data"),
        color=_COLOURS[EAGER],
        fontsize="small",
    )
    for engine in dict.fromkeys(point.engine for point in curve):
        if engine != EAGER:
            _draw(
                axes, {point.length: point.times_eager for point in curve if point.engine == engine}, engine
            )
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in _TICKS if low <= tick <= high], [])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(sorted({point.length for point in curve}))
    axes.set_xlabel("elementwise operations in the chain, then a sum; inputs (4..13, 16)")
    axes.set_ylabel("times eager")
    axes.grid(axis="y", color="#e4e3df", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("Launch-bound chains: how many times faster than eager", loc="left", fontweight="bold")
    axes.legend(frameon=False, fontsize="small", ncols=2)
    figure.supxlabel(machine, fontsize="x-small", color="#52514e", x=0.01, ha="left")
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _draw(axes: Any, ratios: Mapping[int, float], engine: str) -> None:
    colour, lengths = _COLOURS[engine], list(ratios)
    if engine == AUTO:  # a ring around the engine that was chosen
        axes.plot(
            lengths,
            list(ratios.values()),
            "o",
            label="auto (the engine chosen)",
            color=colour,
            markersize=11,
            markerfacecolor="none",
            markeredgewidth=1.6,
        )
        return
    axes.plot(lengths, list(ratios.values()), "o-", label=engine, color=colour, markersize=5, linewidth=1.8)
    reference = {
        length: REFERENCE[engine][length] for length in lengths if length in REFERENCE.get(engine, {})
    }
    if reference:
        axes.plot(
            list(reference),
            list(reference.values()),
            "--",
            color=colour,
            linewidth=1.2,
            alpha=0.7,
            label=f"{engine}, published (GPU)",
        )


if __name__ == "__main__":
    sys.exit(main())
