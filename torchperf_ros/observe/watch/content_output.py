"""What a stage gives out.

How many things with what scores, and whether it still changes with its inputs.
"""

import math
import struct
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import decode
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.telemetry.record_stream import FrameRecord
from torchperf_ros.observe.watch.signals import Signal, SignalRule, alert, since

_LOOK_EVERY_NS = NS_PER_S // 2
_MOST_BYTES = 1 << 20
_MOST_ITEMS = 256
_SCORES = frozenset({"score", "confidence", "probability"})
_MARKERS = "visualization_msgs/msg/MarkerArray"
_DELETING = frozenset({2, 3})  # actions of a marker that is no object
_DEEPEST = 4
_HEADER_END, _SAMPLES = 12, 4096  # bytes of an input by which two are compared
_STAMP = struct.Struct("<iI")
_LEAST_S, _FACTOR = 10.0, 3.0
_KNOWN_S = 30.0
_BREAK_S = 3.0  # without an output of a model: nothing is known of the time between
_RULES = {
    "objects": SignalRule("objects per output", "output", "", "both", 2.0, 0.5, confirm_s=10),
    "score": SignalRule("mean score of the outputs", "output", "", "both", 0.1, 0.15, confirm_s=10),
}


class Stretch:
    """How long something has been so without a break, and whether that is longer than it ever was."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # the longest stretch that is over
        self._first_ns = self._since_ns = self._last_ns = 0

    def update(self, now_ns: int, *, is_so: bool) -> None:
        self._first_ns = self._first_ns or now_ns
        if self._since_ns and now_ns - self._last_ns > _BREAK_S * NS_PER_S:
            self._since_ns = 0
        self._last_ns = now_ns
        if is_so:
            self._since_ns = self._since_ns or now_ns
        elif self._since_ns:
            self.longest_s = max(self.longest_s, (now_ns - self._since_ns) / NS_PER_S)
            self._since_ns = 0

    def unusual_s(self, now_ns: int) -> float:
        """Seconds that it has been so, if that is 10 s, three times as long as ever, and 30 s came before.

        Else 0.
        """
        if not self._since_ns or self._since_ns - self._first_ns < _KNOWN_S * NS_PER_S:
            return 0.0
        lasted_s = (now_ns - self._since_ns) / NS_PER_S
        return lasted_s if lasted_s >= max(_LEAST_S, _FACTOR * self.longest_s) else 0.0


class OutputContent:
    """The outputs of one stage; two a second are decoded."""

    def __init__(self, stage: str, topic: str, type_name: str) -> None:
        self._stage = stage
        self._topic = topic
        self._type_name = type_name
        self._usual: dict[
            tuple[str, int], Signal
        ] = {}  # by name and tier: each tier has an output of its own
        # in this second, on the tier that ran last
        self._found: dict[str, list[float]] = {name: [] for name in _RULES}
        self._tier = 0
        self._next_look_ns = 0
        self._same, self._empty = Stretch(), Stretch()
        self._last: tuple[bytes, bytes] | None = None  # an output and the input that it came of

    def take(self, record: FrameRecord) -> None:
        """Take a frame: its own result only, nothing held, backed up or made."""
        now_ns, output = record.received_ns, record.payload
        if not self._type_name or output is None or now_ns < self._next_look_ns:
            return
        if record.row["outcome"] != Outcome.ON_TIME or len(output) > _MOST_BYTES:
            return
        self._next_look_ns = now_ns + _LOOK_EVERY_NS
        try:
            message = decode(output, self._type_name)
        except TorchperfError:  # an adapter's own way to encode, which cannot be judged
            return
        count, scores = statistics_of(message, self._type_name)
        tier = int(record.row["tier"])
        if tier != self._tier:
            self._tier = tier
            for found in self._found.values():
                found.clear()
        if not math.isnan(count):
            self._found["objects"].append(count)
        self._found["score"].extend(scores)
        trigger = next((item.data for item in record.inputs if item.index == 0), b"")
        self._empty.update(now_ns, is_so=count == 0)
        self._same.update(now_ns, is_so=self._has_frozen(record, trigger, count))

    def _has_frozen(self, record: FrameRecord, trigger: bytes | memoryview, count: float) -> bool:
        """Whether the output is the one before, apart from its stamp, while what it comes from is another."""
        stamp = _STAMP.pack(*divmod(int(record.row["stamp_ns"]), NS_PER_S))
        sample = bytes(trigger[_HEADER_END :: max(1, len(trigger) // _SAMPLES)])
        now = ((record.payload or b"").replace(stamp, b""), sample)
        last, self._last = self._last, now
        return last is not None and count != 0 and now[0] == last[0] and now[1] != last[1]

    def second(self, now_ns: int) -> tuple[dict[str, float], list[Alert]]:
        """Means over the last second, and what is unusual about them."""
        values, alerts = {}, []
        for name, found in self._found.items():
            values[name] = fmean(found) if found else math.nan
            found.clear()
            signal = self._usual.setdefault((name, self._tier), Signal(_RULES[name]))
            if signal.update(now_ns / NS_PER_S, values[name]):
                alerts.append(signal.alert(self._stage, f" ({self._topic})"))
        outputs_come = now_ns < self._next_look_ns + NS_PER_S
        for stretch, kind, what in (
            (self._same, "output frozen", "has not changed although its inputs have"),
            (self._empty, "output empty", "holds nothing any more"),
        ):
            if outputs_come and (lasted_s := stretch.unusual_s(now_ns)):
                text = f"{self._topic} {what}{since(lasted_s)}; {stretch.longest_s:.1f} s at most before"
                numbers = (f"{lasted_s:.1f}", f"{stretch.longest_s:.1f}", "s")
                alerts.append(alert(Level.WARN, f"{self._stage}: {kind}", text, numbers, "flat", lasted_s))
        return values, alerts


# made at run time
def statistics_of(message: Any, type_name: str) -> tuple[float, list[float]]:  # noqa: ANN401
    """How many things a message holds, and their scores.

    NaN and none where it holds no sequence of messages.

    Things are the elements of its first sequence of messages (of markers: those that are not deleted, whose
    score is their alpha); scores are numbers called score, confidence or probability anywhere in them.
    """
    if type_name == _MARKERS:
        markers = [marker for marker in message.markers if marker.action not in _DELETING]
        return float(len(markers)), [float(marker.color.a) for marker in markers[:_MOST_ITEMS]]
    items = next((value for value in vars(message).values() if isinstance(value, list)), None)
    if items is None or (items and not hasattr(items[0], "__dict__")):
        return math.nan, []
    return float(len(items)), [
        score for item in items[:_MOST_ITEMS] for score in _scores_in(item, _DEEPEST)
    ]


def _scores_in(item: Any, deepest: int) -> Iterator[float]:  # noqa: ANN401
    for name, value in vars(item).items():
        if name in _SCORES and isinstance(value, (float, int)) and math.isfinite(value):
            yield float(value)
        elif deepest:
            for part in value[:_MOST_ITEMS] if isinstance(value, list) else [value]:
                if hasattr(part, "__dict__"):  # a message, no number, text or array
                    yield from _scores_in(part, deepest - 1)
