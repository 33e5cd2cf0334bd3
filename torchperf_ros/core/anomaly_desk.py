"""Findings in, events out: one cause is one event, told when it begins, grows worse, goes on for long, and is over."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S

_MOST_WAITING = 1024
_MOST_OPEN = 256
_CAUSES_FIRST = (
    "worker died", "model error", "invalid output", "temperature", "gpu", "memory", "load", "restarts", "input",
    "bad input", "recompilation", "tier", "output", "age", "jitter", "drops", "latency", "misses", "deadline missed",
)  # fmt: skip
"""What stands first when several things are found in the same second: what explains others before what they explain."""


@dataclass(frozen=True)
class DeskRules:
    """When events begin, are repeated and end, in seconds.

    Attributes:
        quiet_s: an event is over when nothing was found for this long.
        remind_s: what goes on is told again after this long.
        group_s: what is found within this long after an event began belongs to it.
    """

    quiet_s: float = 10.0
    remind_s: float = 60.0
    group_s: float = 5.0


@dataclass
class _Open:
    """Something that goes on: found `count` times, `untold` of them since it was told."""

    anomaly: Anomaly
    event: int
    began_ns: int
    seen_ns: int
    told_ns: int = 0
    told_level: Level = Level.OK
    count: int = 0
    untold: int = 0


class AnomalyDesk:
    """Collects findings from any thread, and once a second turns them into what is published.

    Attributes:
        lost: findings that came faster than they were collected, or when too many were open.
    """

    def __init__(self, rules: DeskRules | None = None) -> None:
        """Start with nothing open."""
        self.lost = 0
        self._rules = rules or DeskRules()
        self._waiting: deque[tuple[int, Anomaly]] = deque()
        self._open: dict[str, _Open] = {}
        self._events = 0
        self._event_began_ns: int | None = None

    def report(self, anomaly: Anomaly, now_ns: int) -> None:
        """Take one finding; what lasts is reported again and again, and ends by not being reported."""
        if len(self._waiting) >= _MOST_WAITING:
            self.lost += 1
            return
        self._waiting.append((now_ns, anomaly))

    @property
    def open(self) -> dict[str, Level]:
        """What goes on now, by name, with its worst level."""
        return {name: entry.anomaly.level for name, entry in self._open.items()}

    def tick(self, now_ns: int) -> list[list[Anomaly]]:
        """What there is to publish now: a list of messages, each with the statuses that belong together.

        Besides what the finding says, the values hold `event` (equal for what belongs together), `since_s` (seconds
        before now that it began), `count` and `held_back` (findings in all, and since the last time it was told), and
        `also` (what else goes on).
        """
        once: list[Anomaly] = []
        while self._waiting:
            found_ns, anomaly = self._waiting.popleft()
            if anomaly.once:
                once.append(anomaly)
            else:
                self._take(anomaly, found_ns)
        begun = [entry for entry in self._open.values() if entry.anomaly.level > entry.told_level]
        reminded = [entry for entry in self._open.values() if entry not in begun and self._due(entry, now_ns)]
        messages = [[self._told(entry, now_ns) for entry in sorted(begun, key=_rank)]] if begun else []
        messages += [[self._told(entry, now_ns)] for entry in reminded]
        messages += [[anomaly] for anomaly in once]
        messages += [[anomaly] for anomaly in self._over(now_ns)]
        return messages

    def _take(self, anomaly: Anomaly, found_ns: int) -> None:
        entry = self._open.get(anomaly.name)
        if entry is None:
            if len(self._open) >= _MOST_OPEN:
                self.lost += 1
                return
            entry = self._open[anomaly.name] = _Open(anomaly, self._event(found_ns), found_ns, found_ns)
        worst = max(entry.anomaly.level, anomaly.level)
        entry.anomaly, entry.seen_ns = replace(anomaly, level=worst), found_ns
        entry.count += 1
        entry.untold += 1

    def _event(self, found_ns: int) -> int:
        """The number of the event that something new belongs to: the last one if that began a moment ago."""
        group_ns = self._rules.group_s * NS_PER_S
        if self._event_began_ns is None or found_ns - self._event_began_ns > group_ns:
            self._events += 1
            self._event_began_ns = found_ns
        return self._events

    def _due(self, entry: _Open, now_ns: int) -> bool:
        return entry.untold > 0 and now_ns - entry.told_ns >= self._rules.remind_s * NS_PER_S

    def _told(self, entry: _Open, now_ns: int) -> Anomaly:
        also = [other.anomaly.name for other in sorted(self._open.values(), key=_rank) if other is not entry]
        values = {
            **entry.anomaly.values,
            "event": str(entry.event),
            "since_s": f"{max(0, now_ns - entry.began_ns) / NS_PER_S:.1f}",
            "count": str(entry.count),
            "held_back": str(max(0, entry.untold - 1)),
            "also": "; ".join(also),
        }
        entry.told_ns, entry.told_level, entry.untold = now_ns, entry.anomaly.level, 0
        return replace(entry.anomaly, values=values)

    def _over(self, now_ns: int) -> Iterator[Anomaly]:
        quiet_ns = self._rules.quiet_s * NS_PER_S
        for name, entry in list(self._open.items()):
            if now_ns - entry.seen_ns < quiet_ns:
                continue
            del self._open[name]
            lasted_s = (entry.seen_ns - entry.began_ns) / NS_PER_S
            times = "once" if entry.count == 1 else f"{entry.count} times in {lasted_s:.1f} s"
            values = {"event": str(entry.event), "lasted_s": f"{lasted_s:.1f}", "count": str(entry.count)}
            yield Anomaly(Level.OK, name, f"over: found {times}, not in the last {self._rules.quiet_s:g} s", values)


def _rank(entry: _Open) -> tuple[int, int]:
    kind = entry.anomaly.name.partition(": ")[2]
    first = next((rank for rank, word in enumerate(_CAUSES_FIRST) if kind.startswith(word)), len(_CAUSES_FIRST))
    return first, -entry.anomaly.level
