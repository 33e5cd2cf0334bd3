"""What a stage gives out: how many things with what scores, and whether it still changes with its inputs."""

import math
import struct
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import numpy as np

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import decode
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.telemetry.content_stretch import Stretch
from torchperf_ros.telemetry.record_stream import FrameRecord
from torchperf_ros.telemetry.signal_series import Signal, SignalRule, since

_LOOK_EVERY_NS = NS_PER_S // 2
_MOST_BYTES = 1 << 20
_MOST_ITEMS = 256
_SCORES = frozenset({"score", "confidence", "probability"})
_MARKERS = "visualization_msgs/msg/MarkerArray"
_DELETING = frozenset({2, 3})  # actions of a marker that is no object
_DEEPEST = 4
_HEADER_END, _SAMPLES = 12, 4096  # bytes of an input by which two are told apart
_STAMP = struct.Struct("<iI")


class OutputContent:
    """The outputs of one stage; two a second are decoded."""

    def __init__(self, stage: str, topic: str, type_name: str) -> None:
        """Name the stage, and its output's topic and type."""
        self._stage = stage
        self._topic = topic
        self._type_name = type_name
        self._count = Signal(SignalRule("objects per output", "output", "", "both", 2.0, 0.5, confirm_s=10))
        self._score = Signal(SignalRule("mean score of the outputs", "output", "", "both", 0.1, 0.15, confirm_s=10))
        self._next_look_ns = 0
        self._counts: list[float] = []
        self._scores: list[float] = []
        self._same, self._empty = Stretch(), Stretch()
        self._last: tuple[bytes, bytes] | None = None  # an output and the input that it came of

    def take(self, record: FrameRecord) -> None:
        """Take a frame: its own result only, nothing held, backed up or made."""
        now_ns = record.received_ns
        if record.outcome is not Outcome.ON_TIME or record.output is None or now_ns < self._next_look_ns:
            return
        if not self._type_name or len(record.output) > _MOST_BYTES:
            return
        self._next_look_ns = now_ns + _LOOK_EVERY_NS
        try:
            message = decode(record.output, self._type_name)
        except TorchperfError:  # an adapter's own way to encode; nothing can be said of it
            return
        count, scores = statistics_of(message, self._type_name)
        if not math.isnan(count):
            self._counts.append(count)
        self._scores += scores
        trigger = next((bytes(item.data) for item in record.inputs if item.index == 0), b"")
        self._empty.update(now_ns, is_so=count == 0)
        self._same.update(now_ns, is_so=self._has_frozen(record, trigger, count))

    def _has_frozen(self, record: FrameRecord, trigger: bytes, count: float) -> bool:
        """Whether the output is the one before, apart from its stamp, while what it comes from is another."""
        stamp = _STAMP.pack(*divmod(record.stamp_ns, NS_PER_S))
        now = ((record.output or b"").replace(stamp, b""), trigger[_HEADER_END :: max(1, len(trigger) // _SAMPLES)])
        last, self._last = self._last, now
        return last is not None and count != 0 and now[0] == last[0] and now[1] != last[1]

    def second(self, now_ns: int) -> tuple[dict[str, float], list[Anomaly]]:
        """Means over the last second, and what is unusual about them."""
        time_s = now_ns / NS_PER_S
        values = {
            "objects": fmean(self._counts) if self._counts else math.nan,
            "score": fmean(self._scores) if self._scores else math.nan,
        }
        self._counts, self._scores = [], []
        found = [self._count.update(time_s, values["objects"]), self._score.update(time_s, values["score"])]
        findings = [departure.finding(self._stage, f" ({self._topic})") for departure in found if departure is not None]
        if now_ns < self._next_look_ns + NS_PER_S:  # outputs still come
            findings += self._stretched(now_ns, self._same, "output frozen", "has not changed although its inputs have")
            findings += self._stretched(now_ns, self._empty, "output empty", "holds nothing any more")
        return values, findings

    def _stretched(self, now_ns: int, stretch: Stretch, kind: str, what: str) -> list[Anomaly]:
        lasted_s = stretch.unusual_s(now_ns)
        if not lasted_s:
            return []
        text = f"{self._topic} {what}{since(lasted_s)}; {stretch.longest_s:.1f} s at most before"
        values = {
            "value": f"{lasted_s:.1f}", "baseline": f"{stretch.longest_s:.1f}", "unit": "s", "score": "1.00",
            "kind": "flat", "since": f"{lasted_s:.0f}",
        }  # fmt: skip
        return [Anomaly(Level.WARN, f"{self._stage}: {kind}", text, values)]


def statistics_of(message: Any, type_name: str) -> tuple[float, list[float]]:  # noqa: ANN401 - made at run time
    """How many things a message holds, and their scores; NaN and none where it holds no sequence of messages.

    Things are the elements of its first sequence of messages (of markers: those that are not deleted, whose score
    is their alpha); scores are numbers called score, confidence or probability anywhere in them.
    """
    if type_name == _MARKERS:
        markers = [marker for marker in message.markers if marker.action not in _DELETING]
        return float(len(markers)), [float(marker.color.a) for marker in markers[:_MOST_ITEMS]]
    items = next((value for value in vars(message).values() if isinstance(value, list)), None)
    if items is None or (items and not hasattr(items[0], "__dict__")):
        return math.nan, []
    return float(len(items)), [score for item in items[:_MOST_ITEMS] for score in _scores_in(item, _DEEPEST)]


def _scores_in(item: Any, deepest: int) -> Iterator[float]:  # noqa: ANN401
    for name, value in vars(item).items():
        if name in _SCORES and isinstance(value, (float, int)) and math.isfinite(value):
            yield float(value)
        elif deepest and isinstance(value, list):
            for part in value[:_MOST_ITEMS]:
                if hasattr(part, "__dict__"):
                    yield from _scores_in(part, deepest - 1)
        elif deepest and hasattr(value, "__dict__") and not isinstance(value, np.ndarray):
            yield from _scores_in(value, deepest - 1)
