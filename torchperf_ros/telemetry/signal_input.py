"""When a stage's frames come in: their rate, its jitter, their age, and whether they have stopped."""

import math
from statistics import fmean, median

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.telemetry.record_stream import FrameRecord
from torchperf_ros.telemetry.signal_series import Signal, SignalRule, number

_STOPPED_S = 3.0
_STOPPED_INTERVALS = 5.0
_STOPPED_AFTER = 10  # frames that make an input one that comes regularly
_SAID_FOR_S = 300.0
_FEWEST_INTERVALS = 3


class InputSignals:
    """The receipt of one stage's trigger. Frames that were dropped count, too: they leave gaps in the numbers."""

    def __init__(self, stage: str, topic: str, budget_ms: float) -> None:
        """Name the stage and its trigger's topic."""
        self._stage = stage
        self._topic = topic
        self._rate = Signal(SignalRule("input rate", "input rate", "Hz", "both", 0.5, 0.2))
        self._jitter = Signal(SignalRule("jitter of the input", "jitter", "ms", "up", 5.0, 1.0, confirm_s=5))
        self._age = Signal(SignalRule("age at receipt", "age", "ms", "up", max(5.0, 0.1 * budget_ms), 0.3))
        self._last: tuple[int, int] | None = None  # seq and receipt of the last frame,
        self._before: tuple[int, int] | None = None  # and of the last one of the second before
        self._frames = 0
        self._intervals_ms: list[float] = []
        self._ages_ms: list[float] = []

    def frame(self, record: FrameRecord) -> None:
        """Take a frame."""
        now = (record.seq, record.received_ns)
        if self._last is None or record.seq <= self._last[0]:  # the first, or of a stage that was configured again
            self._before = None
        elif record.seq == self._last[0] + 1:
            self._intervals_ms.append((record.received_ns - self._last[1]) / NS_PER_MS)
        self._last = now
        self._before = self._before or now
        self._frames += 1
        if math.isfinite(record.age_ms):
            self._ages_ms.append(record.age_ms)

    def second(self, now_ns: int, *, active: bool) -> tuple[dict[str, float], list[Anomaly]]:
        """What came in the last second, and what is unusual about it.

        Args:
            now_ns: monotonic time, as `received_ns`.
            active: whether the node takes frames at all at present.
        """
        values = {"rate_hz": self._rate_hz(), "jitter_ms": self._jitter_ms(), "age_ms": math.nan}
        if self._ages_ms:
            values["age_ms"] = median(self._ages_ms)
        self._intervals_ms, self._ages_ms = [], []
        if not active:
            self._last = self._before = None
            self._frames = 0
            return values, []
        time_s = now_ns / NS_PER_S
        signals = {"rate_hz": self._rate, "jitter_ms": self._jitter, "age_ms": self._age}
        found = [signal.update(time_s, values[name]) for name, signal in signals.items()]
        findings = [departure.finding(self._stage, f" ({self._topic})") for departure in found if departure is not None]
        return values, findings + self._stopped(now_ns)

    def _rate_hz(self) -> float:
        """Frames received per second, from the last one of the second before to the last one."""
        before, last = self._before, self._last
        self._before = last
        if before is None or last is None or last[1] <= before[1]:
            return math.nan
        return (last[0] - before[0]) * NS_PER_S / (last[1] - before[1])

    def _jitter_ms(self) -> float:
        """Mean distance of the intervals from their median."""
        intervals = self._intervals_ms
        if len(intervals) < _FEWEST_INTERVALS:
            return math.nan
        middle = median(intervals)
        return fmean(abs(interval - middle) for interval in intervals)

    def _stopped(self, now_ns: int) -> list[Anomaly]:
        usual_hz = self._rate.usual
        if self._last is None or self._frames < _STOPPED_AFTER or not usual_hz > 0:
            return []
        silent_s = (now_ns - self._last[1]) / NS_PER_S
        if not max(_STOPPED_S, _STOPPED_INTERVALS / usual_hz) <= silent_s < _SAID_FOR_S:
            return []
        text = f"nothing on {self._topic} for {silent_s:.0f} s, usually {number(usual_hz)} Hz"
        values = {
            "value": "0", "baseline": number(usual_hz), "unit": "Hz", "score": "1.00", "kind": "level",
            "since": f"{silent_s:.0f}",
        }  # fmt: skip
        return [Anomaly(Level.ERROR, f"{self._stage}: input stopped", text, values)]
