"""What a stage's inputs hold: frozen, black or empty ones look like any other to whoever only counts frames."""

import math
from dataclasses import dataclass

import numpy as np

from torchperf_ros.core.anomaly_rules import Anomaly, Level
from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import decode, has_header
from torchperf_ros.supervise.frame_ring import InputBytes
from torchperf_ros.telemetry.content_image import blindness, compressed_points, raw_points
from torchperf_ros.telemetry.signal_series import since

_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
_CLOUD = "sensor_msgs/msg/PointCloud2"
_SENSED = {_IMAGE, _COMPRESSED, _CLOUD}  # sensors that have noise: the same bytes twice are no measurement
_HEADER_END = 12  # CDR encapsulation and stamp
_SAMPLES = 4096  # bytes by which two messages are compared first
_LOOK_EVERY_NS = NS_PER_S // 2
_BLIND_LOOKS = 3
_FROZEN_S, _FROZEN_FRAMES = 1.0, 3
_STOOD_S, _STOOD_INTERVALS = 1.0, 5.0
_MOST_BYTES = 64 << 20
_POINTS = 2048


@dataclass(frozen=True)
class InputTopic:
    """An input from a topic."""

    topic: str
    type_name: str


class InputContent:
    """One input of one stage. Every message is compared by some bytes; two a second are decoded.

    Attributes:
        seen: what the last look found: `black`, `empty` and the like, `frozen` excepted; empty if all is well.
    """

    def __init__(self, stage: str, input_topic: InputTopic, *, trigger: bool) -> None:
        """Name the stage and the input; `trigger`: it is the one that the stage runs for."""
        self.seen = ""
        self._stage = stage
        self._input = input_topic
        self._suffix = "" if trigger else f" ({input_topic.topic})"
        self._sensed = input_topic.type_name in _SENSED
        self._stamped = has_header(input_topic.type_name)
        self._sample = b""
        self._first = b""  # the message since which all have been the same,
        self._same_since_ns = 0
        self._same = 0
        self._stamp_ns = 0
        self._stamp_since_ns = 0
        self._stamp_frames = 0
        self._usual_stamp_s = math.nan
        self._next_look_ns = 0
        self._looks = 0
        self._blind_since_ns = 0

    def take(self, item: InputBytes, now_ns: int) -> None:
        """Take what one frame was computed from; `now_ns`: monotonic time of its receipt."""
        if self._stamped:
            self._follow_stamp(item.stamp_ns, now_ns)
        if not self._sensed or self._stamp_frames:  # the message of the frame before once more: nothing new
            return
        self._compare(bytes(item.data), now_ns)
        if now_ns >= self._next_look_ns and len(item.data) <= _MOST_BYTES:
            self._next_look_ns = now_ns + _LOOK_EVERY_NS
            self._look(bytes(item.data), now_ns)

    def _follow_stamp(self, stamp_ns: int, now_ns: int) -> None:
        """How long the stamp has stood, and how long it usually does."""
        if stamp_ns == self._stamp_ns:
            self._stamp_frames += 1
            return
        if self._stamp_since_ns and self._stamp_ns:
            stood_s = (now_ns - self._stamp_since_ns) / NS_PER_S
            usual_s = self._usual_stamp_s
            self._usual_stamp_s = stood_s if math.isnan(usual_s) else usual_s + 0.05 * (stood_s - usual_s)
        self._stamp_ns, self._stamp_since_ns, self._stamp_frames = stamp_ns, now_ns, 0

    def _compare(self, data: bytes, now_ns: int) -> None:
        """Count how often the same bytes have come; a stamp that advances is left out of them."""
        sample = data[_HEADER_END :: max(1, len(data) // _SAMPLES)]
        if sample == self._sample and len(data) == len(self._first):
            self._same += 1
            return
        self._sample, self._first, self._same_since_ns, self._same = sample, data, now_ns, 1

    def _look(self, data: bytes, now_ns: int) -> None:
        """Decode a message and see whether there is anything in it."""
        if self._same > 1 and data[_HEADER_END:] != self._first[_HEADER_END:]:
            self._first, self._same_since_ns, self._same = data, now_ns, 1
        try:
            seen = self._judge(data)
        except TorchperfError:  # the worker says so of the frame, as `bad input`
            seen = ""
        if seen != self.seen:
            self.seen, self._looks, self._blind_since_ns = seen, 0, now_ns
        self._looks += 1

    def _judge(self, data: bytes) -> str:
        message = decode(data, self._input.type_name)
        if self._input.type_name == _CLOUD:
            return "empty" if _is_empty(message) else ""
        points = raw_points(message) if self._input.type_name == _IMAGE else compressed_points(message)
        return "" if points is None else blindness(points)

    def findings(self, now_ns: int) -> list[Anomaly]:
        """What is wrong at present, once a second."""
        return [*self._frozen(now_ns), *self._stood(now_ns), *self._blind(now_ns)]

    def _frozen(self, now_ns: int) -> list[Anomaly]:
        frozen_s = (now_ns - self._same_since_ns) / NS_PER_S
        if self._same < _FROZEN_FRAMES or frozen_s < _FROZEN_S or self._stamp_frames:
            return []
        text = f"{self._input.topic} is frozen: {self._same} messages with new stamps and equal data"
        return [self._finding("input frozen", Level.ERROR, text, self._same, 1, frozen_s)]

    def _stood(self, now_ns: int) -> list[Anomaly]:
        """A stamp that stands still, of an input whose stamps have advanced regularly before."""
        stood_s = (now_ns - self._stamp_since_ns) / NS_PER_S
        usual_s = self._usual_stamp_s
        if math.isnan(usual_s) or self._stamp_frames < _FROZEN_FRAMES:
            return []
        if stood_s < max(_STOOD_S, _STOOD_INTERVALS * usual_s):
            return []
        text = f"the stamp of {self._input.topic} stands still, usually there is a new one every {1e3 * usual_s:.0f} ms"
        return [self._finding("input stands still", Level.WARN, text, stood_s, usual_s, stood_s)]

    def _blind(self, now_ns: int) -> list[Anomaly]:
        if not self.seen or self._looks < _BLIND_LOOKS:
            return []
        since_s = (now_ns - self._blind_since_ns) / NS_PER_S
        noun = "point clouds" if self._input.type_name == _CLOUD else "images"
        level = Level.WARN if self.seen == "saturated" else Level.ERROR
        text = f"{noun} of {self._input.topic} are {self.seen}"
        return [self._finding(f"input {self.seen}", level, text, 1, 0, since_s)]

    def _finding(
        self, kind: str, level: Level, text: str, value: float, baseline: float, since_s: float
    ) -> Anomaly:  # fmt: skip
        values = {
            "topic": self._input.topic, "value": f"{value:.3g}", "baseline": f"{baseline:.3g}", "unit": "",
            "score": "1.00", "kind": "flat", "since": f"{since_s:.1f}",
        }  # fmt: skip
        return Anomaly(level, f"{self._stage}: {kind}{self._suffix}", f"{text}{since(since_s)}", values)


def _is_empty(cloud: object) -> bool:
    """Whether a `sensor_msgs/msg/PointCloud2` holds no point, or none that is a number."""
    count = int(cloud.width) * int(cloud.height)  # type: ignore[attr-defined]
    if not count:
        return True
    field = next((field for field in cloud.fields if field.name == "x"), None)  # type: ignore[attr-defined]
    kind = {7: "f4", 8: "f8"}.get(field.datatype, "") if field is not None else ""
    step, data = int(cloud.point_step), np.asarray(cloud.data)  # type: ignore[attr-defined]
    if not kind or step < int(kind[1]) or len(data) < count * step:
        return False
    order = ">" if cloud.is_bigendian else "<"  # type: ignore[attr-defined]
    rows = data[: count * step].reshape(count, step)[:: max(1, count // _POINTS)]
    start = int(field.offset)  # type: ignore[union-attr]
    values = np.ascontiguousarray(rows[:, start : start + int(kind[1])]).view(order + kind)
    return not bool(np.isfinite(values).any())
