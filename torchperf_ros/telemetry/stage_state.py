"""What is known about one stage of a running drive: its answered frames, and what it says on `/diagnostics`."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from torchperf_ros.core.outcome import Fallback, Outcome

RECENT_FRAMES: Final = 4096
FAR_LATE_MS: Final = 5.0
_MATCH_NS: Final = 8_000_000
_RATE_FRAMES: Final = 64
_AT_WORK: Final = ("idle", "busy")


@dataclass(frozen=True)
class SeenFrame:
    """One answered frame, from `/perf/latency_stages`.

    Attributes:
        stamp_ns: `header.stamp` of its trigger, as far as it can be told from outside; 0 if unknown.
        outcome: how it ended.
        fallback: what was published instead of its result, None if nothing had to be.
        tier: index of the tier, -1 if unknown.
        total_ms: receipt to publish.
        budget_ms: its budget.
        published_ns: when it was answered; 0 if unknown.
    """

    stamp_ns: int
    outcome: Outcome
    fallback: Fallback | None
    tier: int
    total_ms: float
    budget_ms: float
    published_ns: int = 0

    @property
    def lateness_ms(self) -> float:
        """How far past its deadline it was answered; negative: before it."""
        return self.total_ms - self.budget_ms

    @property
    def answer(self) -> str:
        """How it was answered, in words."""
        words = self.outcome.word if self.fallback is None else f"{self.outcome.word} → {self.fallback.word}"
        return words.replace("_", " ")


@dataclass
class StageState:
    """What is known about one stage.

    Attributes:
        name: of the stage.
        values: keys and values of its newest status on `/diagnostics`.
        recent: its last answered frames.
        records: answered frames seen, all of them.
        worst_ms: largest lateness of all answers but those of a starting stage; negative: before the deadline.
        far_late: those of them that were answered later than `FAR_LATE_MS` after their deadline.
    """

    name: str
    values: dict[str, str] = field(default_factory=dict)
    recent: deque[SeenFrame] = field(default_factory=lambda: deque(maxlen=RECENT_FRAMES))
    records: int = 0
    worst_ms: float = -math.inf
    far_late: int = 0

    def add(self, record: SeenFrame) -> None:
        """Take an answered frame."""
        self.recent.append(record)
        self.records += 1
        if record.outcome is not Outcome.STARTING:
            self.worst_ms = max(self.worst_ms, record.lateness_ms)
            self.far_late += record.lateness_ms > FAR_LATE_MS

    def nearest(self, stamp_ns: int) -> SeenFrame | None:
        """The recent frame whose stamp is nearest to this one, None if none is within 8 ms."""
        near = min(self.recent, key=lambda record: abs(record.stamp_ns - stamp_ns), default=None)
        return near if near is not None and abs(near.stamp_ns - stamp_ns) <= _MATCH_NS else None

    def count(self, key: str) -> int | None:
        """A counter from the diagnostics, None if it is not told."""
        try:
            return int(float(self.values[key]))
        except (KeyError, ValueError, OverflowError):
            return None

    @property
    def rate_hz(self) -> float:
        """Answers per second, over the last ones; NaN if unknown or if no input comes."""
        times = [record.published_ns for record in list(self.recent)[-_RATE_FRAMES:] if record.published_ns]
        moving = len(times) > 1 and self.health != "WAITING"
        return (len(times) - 1) / (times[-1] - times[0]) * 1e9 if moving and times[-1] > times[0] else math.nan

    @property
    def health(self) -> str:
        """`NOMINAL` and so on, empty if not told yet."""
        return self.values.get("health", "").upper()

    @property
    def tier(self) -> str:
        """Name of the tier in use, empty if not told."""
        names = [name.strip() for name in self.values.get("tiers", "").split(",")]
        tier = self.values.get("tier", "")
        return names[int(tier)] if tier.isdigit() and int(tier) < len(names) and names[int(tier)] else tier

    @property
    def complete(self) -> bool:
        """Whether each of its workers can answer."""
        states = [value for key, value in self.values.items() if key.startswith("worker_") and key.endswith("_state")]
        return bool(states) and all(state in _AT_WORK for state in states)

    @property
    def unanswered(self) -> int | None:
        """Started frames without an answer: received, neither superseded nor stale, not answered; None if not told."""
        counts = [self.count(key) for key in ("frames", "superseded", "stale", "answered")]
        if any(count is None for count in counts):
            return None
        frames, superseded, stale, answered = (count or 0 for count in counts)
        return frames - superseded - stale - answered
