"""Counters of `/diagnostics` that should stand still: restarts of workers, recompilations, frames of new sizes."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from torchperf_ros.core.anomaly_rules import Anomaly, Level


@dataclass(frozen=True)
class _Rule:
    """So many in so many seconds are told."""

    key: str
    kind: str
    least: int
    within_s: float
    text: str


_RULES = (
    _Rule("restarts", "restarts", 3, 300.0, "workers were restarted"),
    _Rule("recompiles", "recompilation", 1, 10.0, "frames would have been compiled for again, eager answered"),
    _Rule("misses", "recompilation", 10, 60.0, "frames had sizes that nothing was prepared for, eager answered"),
    _Rule("engine_errors", "model error", 3, 60.0, "calls failed in the engine, eager answered"),
)


class CounterSignals:
    """The counters of one stage."""

    def __init__(self, stage: str, tiers: list[str]) -> None:
        """Name the stage and its tiers."""
        self._stage = stage
        self._tiers = tiers
        self._totals: dict[str, int] = {}
        self._rises: dict[str, deque[tuple[float, int]]] = {rule.key: deque() for rule in _RULES}

    def status(self, time_s: float, values: Mapping[str, str]) -> None:
        """Take the stage's values on `/diagnostics`."""
        self._count(time_s, "restarts", "restarts", values)
        for rule in _RULES[1:]:
            for tier in self._tiers:
                self._count(time_s, rule.key, f"tier_{tier}_{rule.key}", values)

    def _count(self, time_s: float, key: str, name: str, values: Mapping[str, str]) -> None:
        try:
            total = int(values[name])
        except (KeyError, ValueError):  # it is not said before a worker is ready
            return
        rise = total - self._totals.get(name, total)
        self._totals[name] = total
        if rise > 0:
            self._rises[key].append((time_s, rise))

    def second(self, time_s: float) -> tuple[dict[str, float], list[Anomaly]]:
        """How much each has risen in its span of time, and what of it is too much."""
        values, findings = {}, []
        for rule in _RULES:
            rises = self._rises[rule.key]
            while rises and rises[0][0] <= time_s - rule.within_s:
                rises.popleft()
            count = sum(rise for _, rise in rises)
            values[rule.key] = float(count)
            if count >= rule.least:
                text = f"{count} {rule.text}, in the last {rule.within_s:.0f} s"
                said = {
                    "value": str(count), "baseline": "0", "unit": "", "score": "1.00", "kind": "level",
                    "since": f"{time_s - rises[0][0]:.0f}",
                }  # fmt: skip
                findings.append(Anomaly(Level.WARN, f"{self._stage}: {rule.kind}", text, said))
        return values, findings
