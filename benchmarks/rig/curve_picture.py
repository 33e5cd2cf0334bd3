"""The curve of launch-bound chains as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.rig.chains import AOTI, AUTO, DYNAMIC, GRAPHS, REFERENCE, STATIC, CurvePoint
from torchperf_ros.packages.engine_choice import EAGER

_SIZE_INCHES = (8.0, 5.0)
_DOTS_PER_INCH = 150
_COLOURS = {
    EAGER: "#52514e", STATIC: "#2a78d6", DYNAMIC: "#eda100", AOTI: "#1baf7a", GRAPHS: "#4a3aa7", AUTO: "#e34948",
}  # fmt: skip
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def save_curve(curve: Sequence[CurvePoint], machine: str, path: Path) -> None:
    """Draw times eager over n, the published ratios dashed, and write a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.axhline(1.0, color=_COLOURS[EAGER], linewidth=1)
    axes.annotate("eager", (1.0, 1.0), (-4, 4), textcoords="offset points", ha="right",
                  xycoords=("axes fraction", "data"), color=_COLOURS[EAGER], fontsize="small")  # fmt: skip
    for engine in dict.fromkeys(point.engine for point in curve):
        if engine != EAGER:
            _draw(axes, {point.length: point.times_eager for point in curve if point.engine == engine}, engine)
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


def _draw(axes: Axes, ratios: Mapping[int, float], engine: str) -> None:
    colour, lengths = _COLOURS[engine], list(ratios)
    if engine == AUTO:  # a ring around the engine that was chosen
        axes.plot(lengths, list(ratios.values()), "o", label="auto (the engine chosen)", color=colour, markersize=11,
                  markerfacecolor="none", markeredgewidth=1.6)  # fmt: skip
        return
    axes.plot(lengths, list(ratios.values()), "o-", label=engine, color=colour, markersize=5, linewidth=1.8)
    reference = {length: REFERENCE[engine][length] for length in lengths if length in REFERENCE.get(engine, {})}
    if reference:
        axes.plot(list(reference), list(reference.values()), "--", color=colour, linewidth=1.2, alpha=0.7,
                  label=f"{engine}, published (GPU)")  # fmt: skip
