"""Lateness and overhead of what a node answered, in arms that took turns."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.rig.figures import distribution
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report

_STEPS: Final = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
_TITLES: Final = {"lateness_ms": "Lateness in ms; negative: before the deadline", "overhead_ms": "Overhead in ms"}
_SHOWN: Final = ("p50", "p99", "p99_9", "max")


def steps_ms(row: Row) -> float:
    """What the model's own steps took."""
    return sum(row[step] for step in _STEPS)


def lateness(rows: Sequence[Row]) -> dict[str, Any]:
    """Receipt to publish less the budget, of every row; the same less the model's own steps, of those on time."""
    fresh = [row for row in rows if row["outcome"] == 0]
    return {
        "lateness_ms": distribution([row["total_ms"] - row["budget_ms"] for row in rows]),
        "overhead_ms": distribution([row["total_ms"] - steps_ms(row) for row in fresh]),
        "not_on_time": len(rows) - len(fresh),
    }


def show_lateness(report: Report, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of each, with what `lateness` gives of each arm."""
    for key, title in _TITLES.items():
        report.table(
            title, ("", "frames", "not on time", "p50", "p99", "p99.9", "max"),
            [[arm, found[key]["count"], found["not_on_time"], *(found[key][name] for name in _SHOWN)]
             for arm, found in arms.items()],
        )  # fmt: skip
