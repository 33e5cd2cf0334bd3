"""Findings about a stage: what, how bad, and the numbers that go with it."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torchperf_ros.core.frame import Answer
from torchperf_ros.core.outcome import Outcome


class Level(enum.IntEnum):
    """The levels of `diagnostic_msgs/DiagnosticStatus`."""

    OK = 0
    WARN = 1
    ERROR = 2
    STALE = 3


@dataclass(frozen=True)
class Anomaly:
    """One finding: its name is `<stage>: <what>`; values are what a person would ask for next.

    Attributes:
        level, name, message, values: as in `diagnostic_msgs/DiagnosticStatus`.
        once: told as it is, always; otherwise a finding that comes again is the same event going on.
    """

    level: Level
    name: str
    message: str
    values: Mapping[str, str] = field(default_factory=dict)
    once: bool = False


class AnomalyRules:
    """What of a stage's answers and deaths is a finding, and how bad it is."""

    def __init__(self, stage: str) -> None:
        """Name the stage."""
        self._stage = stage

    def answered(self, answer: Answer, misses_in_a_row: int, sustained_misses: int) -> Anomaly | None:
        """A finding for an answered frame, None if it was on time or the stage still starts."""
        outcome = answer.outcome
        if outcome in {Outcome.ON_TIME, Outcome.STARTING}:
            return None
        what = {
            Outcome.BAD_INPUT: "bad input",
            Outcome.INVALID: "invalid output",
            Outcome.ERROR: "model error",
        }.get(outcome, "deadline missed")
        sustained = misses_in_a_row >= sustained_misses
        values = {
            "seq": str(answer.frame.seq),
            "outcome": outcome.word,
            "fallback": answer.fallback.word if answer.fallback is not None else "",
            "value": f"{answer.total_ms:.3f}",
            "baseline": f"{answer.budget_ms:.3f}",
            "total_ms": f"{answer.total_ms:.3f}",
            "budget_ms": f"{answer.budget_ms:.3f}",
            "misses_in_a_row": str(misses_in_a_row),
        }
        return self._finding(Level.ERROR if sustained else Level.WARN, what, answer.reason, values)

    def worker_died(self, reason: str, pid: int, restarts: int, lasting: bool) -> Anomaly:
        """A finding for a worker's death; `lasting` if it is one too many."""
        level = Level.ERROR if lasting else Level.WARN
        return self._finding(level, "worker died", reason, {"pid": str(pid), "restarts": str(restarts)})

    def worker_told(self, text: str) -> Anomaly:
        """A warning about a model: each is another one, so none is held back."""
        return replace(self._finding(Level.WARN, "model", text, {}), once=True)

    def _finding(self, level: Level, what: str, text: str, values: dict[str, str]) -> Anomaly:
        first_line, _, detail = text.partition("\n")
        if detail:
            values["detail"] = detail
        return Anomaly(level, f"{self._stage}: {what}", first_line, values)
