"""What keeps a stage from its most accurate tiers: memory that is short, and actions upon alerts.

Among these is one that a stage finds in its own times: answers that take longer and longer.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import islice
from statistics import median
from typing import Final, NamedTuple

import numpy as np

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.settings.stage_options import DRIFT
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.alert_rules import change_alert
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.trend import theil_sen_slope
from torchperf_ros.stage.turn import Turn
from torchperf_ros.workers.worker_pool import Log

# Of the memory's limit: from here on it is short.
MEMORY_SHARE: Final = 0.7
# Below this part of the share there is room again.
_RELAX: Final = 0.9


class MemoryGuard:
    """Decides how many of the most accurate tiers are left out while memory is short.

    Attributes:
        left_out: tiers that are left out, 0 while there is room.
        tight: whether memory is short: then nothing is compiled either.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self.tight = False

    def update(self, used_share: float, tiers: int) -> None:
        """Take a sample, about once a second.

        One of the `tiers` fewer while short, one more while there is room again.

        It is short where `used_share` (memory in use over its limit, NaN where unknown) is above
        `MEMORY_SHARE`. The cheapest tier is never left out.
        """
        if used_share > MEMORY_SHARE:
            self.tight = True
            self.left_out = min(self.left_out + 1, tiers - 1)
        elif used_share < _RELAX * MEMORY_SHARE:
            self.tight = False
            self.left_out = max(self.left_out - 1, 0)


_AHEAD_S = 4.0  # how far the trend is drawn out: an action takes a second, and the next look another
_SPANS = (3, 6, 12, 24)  # points that a trend is drawn through, one a second: fast and slow ramps
_LEAST_GROWTH = 0.04  # of the time, over these points: less may be chance with 30 frames a second
_SURE = 3.0  # the growth, in standard deviations of what the line leaves over
_FEWEST = 8  # frames of a point
_WORST_OF = 30  # points whose worst frames say how far a frame may lie above the median
_MOST_FRAMES = 2048


class _Point(NamedTuple):
    """A second: its time, the median of its frames, and the second longest as a multiple of that."""

    time_s: float
    median_ms: float
    worst: float


class DriftWatch:
    """Draws a line through the medians of the last seconds.

    Where it leads past the time left, there is an alert.

    The second longest frame of a second stands for how far frames lie above the median: a single stall is
    no drift.

    Attributes:
        frames: those that wait to be judged, each with its tier and its time in ms.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self.frames: deque[tuple[int, float]] = deque(maxlen=_MOST_FRAMES)
        self._points: deque[_Point] = deque(maxlen=_WORST_OF)
        self._tier = -1

    def add(self, tier: int, took_ms: float) -> None:
        """A frame's own result on this tier took so long from hand-over to publish.

        On the stage's thread.
        """
        self.frames.append((tier, took_ms))

    def answered(self, turn: Turn, answer: Answer) -> None:
        """Take the time of a frame that was answered with its own result."""
        if turn.result is not None:
            self.add(answer.tier, answer.total_ms - answer.wait_ms)

    def step(self, now_ns: int, fresh_ms: float) -> Alert | None:
        """Judge what came since the last call, about a second ago.

        A frame has `fresh_ms` until it leaves.
        """
        if len(self.frames) < _FEWEST:
            return None
        frames = [self.frames.popleft() for _ in range(len(self.frames))]
        ((tier, count),) = Counter(tier for tier, _ in frames).most_common(1)
        if tier != self._tier:
            self._tier = tier
            self._points.clear()
        if count < _FEWEST:
            return None
        times = sorted(took_ms for of, took_ms in frames if of == tier)
        middle = median(times)
        self._points.append(_Point(now_ns / NS_PER_S, middle, times[-2] / middle if middle > 0 else 1.0))
        worst = max(point.worst for point in self._points)
        slope = max((self._slope(span) for span in _SPANS if span <= len(self._points)), default=0.0)
        soon_ms = (middle + _AHEAD_S * slope) * worst
        if slope <= 0.0 or soon_ms <= fresh_ms:
            return None
        text = (
            f"p50 {middle:.1f} ms grows by {slope:.2f} ms a second; in {_AHEAD_S:g} s frames take"
            f" {soon_ms:.1f} ms"
        )
        values = {"value": f"{middle:.3f}", "baseline": f"{fresh_ms:.3f}", "unit": "ms", "kind": "trend"}
        return Alert(Level.WARN, f"{self._stage}: drift", f"{text}, and have {fresh_ms:.1f}", values)

    def _slope(self, span: int) -> float:
        """In ms a second over the last points; 0 where they do not grow for certain."""
        points = list(islice(self._points, len(self._points) - span, None))
        times_s, medians_ms = np.array([(point.time_s, point.median_ms) for point in points]).T
        slope = theil_sen_slope(times_s, medians_ms)
        growth = slope * (times_s[-1] - times_s[0])
        left_over = np.std(medians_ms - slope * times_s)
        return slope if growth >= max(_LEAST_GROWTH * medians_ms[0], _SURE * left_over) else 0.0


class TierLimits:
    """Applies them to the ladders of the version that serves.

    Attributes:
        memory: see `MemoryGuard`.
        actions: what is done about alerts, see `AlertActions`.
        drift: watches for answers that take longer and longer; None where no action asks for it.
    """

    def __init__(self, config: StageConfig, tell: Callable[[Alert], None], log: Log) -> None:
        self.memory = MemoryGuard()
        self.actions = AlertActions(config)
        self.drift = DriftWatch(config.name) if self.actions.asks_for(DRIFT) else None
        self._name, self._tell, self._log = config.name, tell, log

    def sample_memory(self, ladders: Sequence[TierLadder], used_share: float, suspect: str) -> None:
        """Take a sample of the memory in use; `suspect` says which worker took it, "" if none took much."""
        was_tight = self.memory.tight
        self.memory.update(used_share, max(len(ladder.tiers) for ladder in ladders))
        self.leave_out(ladders)
        if self.memory.tight and not was_tight:
            text = f"memory is short: {used_share:.0%} of the limit is in use, {MEMORY_SHARE:.0%} may be"
            text += f"; {suspect}" if suspect else ""
            text += "; lower tiers run, and nothing is compiled"
            self._log("warn", f"{self._name}: {text}")
            self._tell(change_alert(self._name, "model", text))

    def act(self, ladders: Sequence[TierLadder], now_ns: int, fresh_ms: float) -> None:
        """Once a second: do what follows from the alerts that were reported to `actions`.

        `fresh_ms`: the time that a frame has which did not wait.
        """
        if self.drift is not None and (alert := self.drift.step(now_ns, fresh_ms)) is not None:
            self.actions.report(alert, now_ns)
            self._tell(alert)
        for change in self.actions.step(now_ns):
            self._log("warn", f"{self._name}: {change}")
            self._tell(change_alert(self._name, "action", change))
        self.leave_out(ladders)

    def leave_out(self, ladders: Sequence[TierLadder]) -> None:
        """Leave tiers out for want of memory, or as an alert's action."""
        short, lower = self.memory.left_out, self.actions.lower_tiers
        for ladder in ladders:
            ladder.left_out = min(max(short, lower), len(ladder.tiers) - 1)
            ladder.why_left_out = "while memory is short" if short >= lower else "as an alert's action"
