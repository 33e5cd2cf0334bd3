"""The curve as a table, as CSV and as JSON, and whether it reached its targets."""

import csv
import io
import json
import math
from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

from torchperf_ros.analysis.chain_curve import AUTO, Curve, CurvePoint
from torchperf_ros.core.engine_choice import EAGER

_SLOWER = 1.05
_LONGEST = 30
_TIMES_AT_LONGEST = 5.3


@dataclass(frozen=True)
class Target:
    """A figure to reach.

    Attributes:
        wanted: in words.
        found: the figure, in words.
        met: whether it was reached; None where it was not measured.
    """

    wanted: str
    found: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In one or two words."""
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def curve_targets(curve: Curve) -> list[Target]:
    """`auto` against eager at every length, and at 30 operations."""
    autos = [curve.at(length, AUTO) for length in curve.lengths]
    worst = min(autos, key=lambda point: point.times_eager)
    never_slower = Target(
        f"{AUTO} at most {_SLOWER - 1:.0%} slower than eager at any n",
        f"{worst.times_eager:.2f} at n = {worst.length}, its least",
        worst.times_eager >= 1 / _SLOWER,
    )
    wanted = f"{AUTO} at least {_TIMES_AT_LONGEST} times eager at n = {_LONGEST}, batch sizes changing"
    if _LONGEST not in curve.lengths:
        return [never_slower, Target(wanted, f"n = {_LONGEST} was left out", None)]
    longest = curve.at(_LONGEST, AUTO)
    reached = longest.times_eager >= _TIMES_AT_LONGEST
    return [never_slower, Target(wanted, f"{longest.times_eager:.2f}, by {longest.runs}", reached)]


def curve_tables(curve: Curve) -> list[Table]:
    """How many times faster than eager, with the published ratio beside; and what a call and a compilation take."""
    compiled = [engine for engine in curve.engines if engine != EAGER]
    ratios = Table(title="times eager, published ratio (on a GPU) in brackets", title_justify="left")
    costs = Table(title="median µs per call, and s to compile", title_justify="left")
    for table, engines in ((ratios, compiled), (costs, [engine for engine in curve.engines if engine != AUTO])):
        table.add_column("n", justify="right")
        for engine in engines:
            table.add_column(engine, justify="right")
    ratios.add_column(f"{AUTO} is")
    for length in curve.lengths:
        points = {engine: curve.at(length, engine) for engine in curve.engines}
        ratios.add_row(str(length), *(_ratio(points[engine]) for engine in compiled), points[AUTO].runs)
        costs.add_row(str(length), *(_cost(points[engine]) for engine in curve.engines if engine != AUTO))
    return [ratios, costs]


def curve_csv(curve: Curve) -> str:
    """One line for each length and engine; empty where there is no figure."""
    text = io.StringIO()
    rows = [_plain(point) for point in curve.points]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def curve_json(curve: Curve, machine: dict[str, object], seconds: float) -> str:
    """Everything, with the machine and the verdict."""
    report = {
        "machine": machine,
        "seconds": seconds,
        "points": [_plain(point) for point in curve.points],
        "targets": [{**asdict(target), "verdict": target.verdict} for target in curve_targets(curve)],
    }
    return json.dumps(report, indent=2) + "\n"


def _plain(point: CurvePoint) -> dict[str, object]:
    return {name: _rounded(value) for name, value in asdict(point).items()}


def _rounded(value: object) -> object:
    if not isinstance(value, float):
        return value
    return round(value, 4) if math.isfinite(value) else None


def _ratio(point: CurvePoint) -> Text:
    if point.error:
        return Text("failed", "red")
    text = Text(f"{point.times_eager:.2f}", "red" if point.times_eager < 1 / _SLOWER else "green3")
    return text.append(f" ({point.reference:.2f})", "grey62") if point.reference is not None else text


def _cost(point: CurvePoint) -> Text:
    if point.error:
        return Text("failed", "red")
    text = Text(f"{point.median_us:.1f}")
    return text if point.engine == EAGER else text.append(f" {point.compile_s:6.1f} s", "grey62")
