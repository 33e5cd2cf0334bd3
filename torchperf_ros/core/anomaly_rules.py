"""Events worth a message on `/perf/anomaly`: what, how bad, and at most once per cooldown."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchperf_ros.core.clock import NS_PER_S
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
    """One event: its name is `<stage>: <what>`; values are what a person would ask for next."""

    level: Level
    name: str
    message: str
    values: Mapping[str, str] = field(default_factory=dict)


class AnomalyRules:
    """Turns answers and deaths of one stage into anomalies, each kind at most once per cooldown.

    A kind that grows worse (WARN to ERROR) is told at once. What the cooldown held back is counted and told with the
    next event of its kind.
    """

    def __init__(self, stage: str, cooldown_s: float = 5.0) -> None:
        """Name the stage; hold a kind back for `cooldown_s` after it was told."""
        self._stage = stage
        self._cooldown_ns = round(cooldown_s * NS_PER_S)
        self._told: dict[str, tuple[int, Level]] = {}
        self._held_back: dict[str, int] = {}

    def answered(self, answer: Answer, misses_in_a_row: int, sustained_misses: int) -> Anomaly | None:
        """An anomaly for an answered frame, if there is one to tell."""
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
            "total_ms": f"{answer.total_ms:.3f}",
            "budget_ms": f"{answer.budget_ms:.3f}",
            "misses_in_a_row": str(misses_in_a_row),
        }
        return self._tell(Level.ERROR if sustained else Level.WARN, what, answer.reason, values, answer.published_ns)

    def worker_died(self, reason: str, pid: int, restarts: int, lasting: bool, now_ns: int) -> Anomaly | None:
        """An anomaly for a worker's death; `lasting` if it is one too many."""
        level = Level.ERROR if lasting else Level.WARN
        return self._tell(level, "worker died", reason, {"pid": str(pid), "restarts": str(restarts)}, now_ns)

    def worker_told(self, text: str) -> Anomaly:
        """A warning about a model: each is another one, so none is held back."""
        first_line, _, detail = text.partition("\n")
        return Anomaly(Level.WARN, f"{self._stage}: model", first_line, {"detail": detail} if detail else {})

    def _tell(self, level: Level, what: str, message: str, values: dict[str, str], now_ns: int) -> Anomaly | None:
        told_ns, told_level = self._told.get(what, (now_ns - self._cooldown_ns, Level.OK))
        if now_ns - told_ns < self._cooldown_ns and level <= told_level:
            self._held_back[what] = self._held_back.get(what, 0) + 1
            return None
        self._told[what] = (now_ns, level)
        values["held_back"] = str(self._held_back.pop(what, 0))
        first_line, _, detail = message.partition("\n")
        if detail:
            values["detail"] = detail
        return Anomaly(level, f"{self._stage}: {what}", first_line, values)
