"""How a benchmark shows its figures and what they were measured on.

A table with the targets beside them, and JSON.
"""

import argparse
import json
import math
import operator
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.rig.bare_timer import BareTimer
from torchperf_ros.observe.telemetry.machine import ProcessorShare, machine_now, version_of

_STARTED = time.monotonic()
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, "==": operator.eq}


@dataclass(frozen=True)
class Target:
    """What a figure has to be.

    Attributes:
        what: the figure in words.
        value: measured.
        relation: `<=`, `>=`, `<` or `==`.
        limit: what it is compared with.
        unit: of both.
    """

    what: str
    value: float
    relation: str
    limit: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it holds; a figure that was not measured does not."""
        return not math.isnan(self.value) and bool(_HOLDS[self.relation](self.value, self.limit))


Part = Callable[[argparse.Namespace, "Report"], tuple[dict[str, Any], list[Target]]]
"""A part of a benchmark: it measures, shows tables, and returns figures and targets."""


class Report:
    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        """Look at the machine before anything is started; takes a second."""
        parameters = {key: value for key, value in vars(arguments).items() if key != "json"}
        self.machine = machine()
        self._content: dict[str, Any] = {
            "benchmark": name,
            "machine": self.machine,
            "parameters": parameters,
        }
        self._file: Path | None = arguments.json
        self._console = Console(width=None if sys.stdout.isatty() else 140)
        self._others, self._timer = ProcessorShare(), BareTimer()
        found = self.machine
        say(
            f"{name}: {found['cpu']}, {found['cores']} cores; load {found['load_average'][0]}, "
            f"others use {found['others_cpu_percent']:.0f} % of the machine"
        )

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table; numbers are shown with the digits that matter."""
        table = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(shown(value) for value in row))
        self._console.print(table)

    def text(self, text: str) -> None:
        """Print a line as it is."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def finish_parts(self, arguments: argparse.Namespace, parts: Mapping[str, Part]) -> None:
        """Measure the parts that `--parts` names, each of which shows its tables, and `finish`."""
        figures: dict[str, Any] = {}
        targets: list[Target] = []
        for name in arguments.parts:
            figures[name], own = parts[name](arguments, self)
            targets += own
        self.finish(figures, targets)

    def finish(self, figures: Mapping[str, Any], targets: Sequence[Target]) -> None:
        """Print how the figures compare with the targets and write the JSON file, if one is wanted."""
        found = self._content["machine"]
        others, stolen = (100 * share for share in self._others.taken())
        found |= {"others_cpu_percent_meanwhile": others, "stolen_percent_meanwhile": stolen}
        timer = found["bare_timer_late_ms"] = self._timer.lateness_ms()
        self.text(
            f"Meanwhile, other processes used {others:.1f} % of the machine, its host took {stolen:.1f} %,"
            f" and a bare real-time timer was late by {timer['p99']:.2f} ms (p99), {timer['p99_9']:.2f}"
            f" (p99.9), {timer['max']:.2f} (max): what no node can be better than."
        )
        if targets:
            self.table(
                "Targets",
                ("figure", "measured", "target", ""),
                [
                    (
                        t.what,
                        f"{shown(t.value)} {t.unit}",
                        f"{t.relation} {shown(t.limit)} {t.unit}",
                        "[green]met[/]" if t.met else "[red]missed[/]",
                    )
                    for t in targets
                ],
            )
        self._content["targets"] = [{**asdict(target), "met": target.met} for target in targets]
        self.keep(figures)
        if self._file:
            say(f"written to {self._file}")

    def keep(self, figures: Mapping[str, Any]) -> None:
        """Write the JSON file, if one is wanted, with the figures so far: whole, or as it was."""
        self._content["figures"] = figures
        if self._file:
            text = json.dumps(plain(self._content), indent=1, allow_nan=False)
            is_special = self._file.exists() and not self._file.is_file()  # /dev/stdout
            part = self._file if is_special else self._file.with_name(f".{self._file.name}.{os.getpid()}")
            part.write_text(text + "\n", encoding="utf-8")
            if not is_special:
                part.rename(self._file)


def machine() -> dict[str, object]:
    """The machine, the versions of ROS, and how busy others keep it (takes a second)."""
    return {
        **machine_now(),
        "rclpy": version_of("rclpy"),
        "fastdds": version_of("ros-fastdds"),
        "fifo_permitted": _fifo_permitted(),
        "others_cpu_percent": psutil.cpu_percent(interval=1.0),
    }


def _fifo_permitted() -> bool:
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, parameters)
    return True


def shown(value: object) -> str:
    """A value for people: four significant digits, a dash for what is not known."""
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return (
            f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3f}"
        )
    return "-" if value is None else str(value)


def plain(value: Any) -> Any:
    """The same as JSON allows it: NaN and infinities as null, paths as text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, bool, type(None))) else str(value)


def say(text: str) -> None:
    """Progress, on standard error."""
    print(f"[{time.monotonic() - _STARTED:6.1f} s] {text}", file=sys.stderr, flush=True)
