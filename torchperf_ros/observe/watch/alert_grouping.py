"""Alerts in, events out.

One cause is one event, published when it begins, grows worse, goes on for long, and ends.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.settings.stage_options import ALERTS, alert_kind

_MOST_WAITING, _MOST_OPEN = 1024, 256
_QUIET_S: Final = 10  # an event is over when nothing was found for this long
_REMIND_NS: Final = 60 * NS_PER_S  # what goes on is published again after this long
_GROUP_NS: Final = 5 * NS_PER_S  # what is found within this long after an event began belongs to it
_PATIENCE_NS: Final = 20 * NS_PER_S


@dataclass
class _Open:
    """Something that goes on: found `count` times, `unpublished` of them since it was published."""

    anomaly: Alert
    place: int  # of its kind: what explains others stands before what it explains
    event: int
    began_ns: int
    seen_ns: int
    published_ns: int = 0
    published_level: Level = Level.OK
    count: int = 0
    unpublished: int = 0


class AlertGrouping:
    """Collects alerts from any thread, and once a second turns them into what is published.

    Attributes:
        lost: alerts that came faster than they were collected, or when too many were open.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._waiting: deque[tuple[int, Alert]] = deque()
        self._open: dict[str, _Open] = {}
        self._events = 0
        self._event_began_ns: int | None = None

    def report(self, anomaly: Alert, now_ns: int) -> None:
        """Take one alert; what lasts is reported again and again, and ends by not being reported."""
        if len(self._waiting) >= _MOST_WAITING:
            self.lost += 1
            return
        self._waiting.append((now_ns, anomaly))

    def _ranked(self) -> list[_Open]:
        """What goes on now, what explains others first."""
        return sorted(self._open.values(), key=lambda entry: (entry.place, -entry.anomaly.level))

    @property
    def open(self) -> list[Alert]:
        """What goes on now, what explains others first, each with its worst level."""
        return [entry.anomaly for entry in self._ranked()]

    def tick(self, now_ns: int) -> list[list[Alert]]:
        """What there is to publish now: a list of messages, each with the statuses that belong together.

        Besides the alert's own, the values hold `event` (equal for what belongs together), `since_s`
        (seconds before now that it began), `count` and `held_back` (alerts in all, and since it was last
        published), and `also` (what else goes on).
        """
        once: list[Alert] = []
        while self._waiting:
            found_ns, anomaly = self._waiting.popleft()
            if anomaly.once:
                once.append(anomaly)
            else:
                self._take(anomaly, found_ns)
        begun = [entry for entry in self._ranked() if entry.anomaly.level > entry.published_level]
        reminded = [
            entry
            for entry in self._open.values()
            if entry.unpublished > 0 and entry.published_ns <= now_ns - _REMIND_NS and entry not in begun
        ]
        messages = [[self._published(entry, now_ns) for entry in begun]] if begun else []
        messages += [[self._published(entry, now_ns)] for entry in reminded]
        return messages + [[anomaly] for anomaly in (*once, *self._over(now_ns))]

    def _take(self, anomaly: Alert, found_ns: int) -> None:
        entry = self._open.get(anomaly.name)
        if entry is None:
            if len(self._open) >= _MOST_OPEN:
                self.lost += 1
                return
            kind = alert_kind(anomaly.name)
            place = ALERTS.index(kind) if kind else len(ALERTS)
            entry = _Open(anomaly, place, self._event(found_ns), found_ns, found_ns)
            self._open[anomaly.name] = entry
        worst = max(entry.anomaly.level, anomaly.level)
        entry.anomaly, entry.seen_ns = replace(anomaly, level=worst), found_ns
        entry.count += 1
        entry.unpublished += 1

    def _event(self, found_ns: int) -> int:
        """The number of the event of something new: the last one if that began a moment ago."""
        if self._event_began_ns is None or found_ns - self._event_began_ns > _GROUP_NS:
            self._events += 1
            self._event_began_ns = found_ns
        return self._events

    def _published(self, entry: _Open, now_ns: int) -> Alert:
        values = {
            **entry.anomaly.values,
            "event": str(entry.event),
            "also": "; ".join(other.anomaly.name for other in self._ranked() if other is not entry),
            "count": str(entry.count),
            "since_s": f"{max(0, now_ns - entry.began_ns) / NS_PER_S:.1f}",
            "held_back": str(max(0, entry.unpublished - 1)),
        }
        entry.published_ns, entry.published_level, entry.unpublished = now_ns, entry.anomaly.level, 0
        return replace(entry.anomaly, values=values)

    def _over(self, now_ns: int) -> Iterator[Alert]:
        for name, entry in list(self._open.items()):
            if now_ns - entry.seen_ns < _QUIET_S * NS_PER_S:
                continue
            del self._open[name]
            lasted_s = (entry.seen_ns - entry.began_ns) / NS_PER_S
            times = "once" if entry.count == 1 else f"{entry.count} times in {lasted_s:.1f} s"
            values = {"event": str(entry.event), "lasted_s": f"{lasted_s:.1f}", "count": str(entry.count)}
            yield Alert(Level.OK, name, f"over: found {times}, not in the last {_QUIET_S} s", values)


class LastAlerts:
    """The alerts of the recorder's last look: a busy machine leaves it no time for up to 20 s."""

    def __init__(self) -> None:
        self._found: Sequence[Alert] = ()
        self._found_ns = 0

    def update(self, found: Sequence[Alert], now_ns: int, *, looked: bool) -> Sequence[Alert]:
        """What goes on now, at this monotonic time, by what the recorder has found since the last call.

        Where it has `looked` since then, what it did not find again is over.
        """
        if found or looked:
            self._found, self._found_ns = found, now_ns
        return self._found if now_ns - self._found_ns <= _PATIENCE_NS else ()
