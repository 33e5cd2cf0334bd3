"""An alert: a detected problem, as `/perf/anomaly` publishes it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Level(enum.IntEnum):
    """The levels of `diagnostic_msgs/DiagnosticStatus`."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Alert:
    """One problem: its name is `<stage>: <what>`; values are what a person would ask for next.

    Attributes:
        level, name, message, values: as in `diagnostic_msgs/DiagnosticStatus`.
    """

    level: Level
    name: str
    message: str
    values: Mapping[str, str] = field(default_factory=dict)
    once: bool = False  # always published; otherwise an alert that comes again is the same event going on
    logged: bool = False  # a line on the terminal has it already, with more detail
