"""What a stage's inputs and outputs hold: frozen, black or empty ones count like any other frames."""

import contextlib
import math
import struct
from collections.abc import Iterator
from statistics import fmean
from typing import Any, Final

import numpy as np

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import decode, has_header
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.telemetry.record_stream import FrameRecord
from torchperf_ros.observe.watch.picture import Stillness, blindness, compressed_picture, raw_picture
from torchperf_ros.observe.watch.series_detector import Judged, Signal, SignalRule, alert, since
from torchperf_ros.workers.frame_ring import InputBytes

_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
_CLOUD: Final = "sensor_msgs/msg/PointCloud2"
_MARKERS: Final = "visualization_msgs/msg/MarkerArray"
# Sensors that have noise: the same bytes twice are no measurement.
_SENSED: Final = {_IMAGE, _COMPRESSED, _CLOUD}
_HEADER_END: Final = 12  # CDR encapsulation and stamp
_LOOK_EVERY_NS: Final = NS_PER_S // 2
_MOST_INPUT_BYTES, _MOST_OUTPUT_BYTES = 64 << 20, 1 << 20
# Bytes by which two messages are compared first; each is a look into memory that is in no cache.
_SAMPLES, _OUTPUT_SAMPLES = 128, 4096
_BLIND_LOOKS: Final = 3
_FROZEN_S, _FROZEN_FRAMES = 1.0, 3
_STOOD_S, _STOOD_INTERVALS = 1.0, 5.0
_LAPSES_S: Final = 5.0  # after the last message: what it showed is not known to be so any more
# A JPEG at an eighth of its size that looks like noise is decoded as a whole as often.
_NOISE_AGAIN_NS: Final = 10 * NS_PER_S
_MOST_ITEMS: Final = 256
_SCORES: Final = frozenset({"score", "confidence", "probability"})
_DELETING: Final = frozenset({2, 3})  # actions of a marker that is no object
# A stretch is unusual from 10 s on, if it is three times as long as ever, and 30 s came before.
_LEAST_S, _FACTOR, _KNOWN_S = 10.0, 3.0, 30.0
_BREAK_S: Final = 3.0  # without an output of a model: nothing is known of the time between
_RULES: Final = {
    "objects": SignalRule("objects per output", "output", "", "both", 2.0, 0.5, confirm_s=10),
    "score": SignalRule("mean score of the outputs", "output", "", "both", 0.1, 0.15, confirm_s=10),
}


class InputContent:
    """One input of one stage. Every message is compared by some bytes; two a second are decoded.

    Attributes:
        seen: what the last look found: `black`, `empty` and the like, `frozen` excepted; empty if all is
            well.
    """

    def __init__(self, stage: str, topic: str, type_name: str, *, trigger: bool) -> None:
        """Name the stage and the input; `trigger`: it is the one that the stage runs for."""
        self.seen = ""
        self._stage, self._suffix = stage, "" if trigger else f" ({topic})"
        self._topic, self._type_name = topic, type_name
        self._sensed, self._stamped = type_name in _SENSED, has_header(type_name)
        self._sample = b"", 0  # and the length of the whole
        self._second = b""  # a copy of the second of the messages that have been the same
        self._same = self._stamp_frames = self._looks = 0
        self._same_since_ns = self._stamp_since_ns = self._blind_since_ns = 0
        self._stamp_ns = self._taken_ns = self._next_look_ns = self._next_whole_ns = 0
        self._usual_stamp_s = math.nan
        self._stillness = Stillness()

    def take(self, item: InputBytes, now_ns: int) -> None:
        """Take what one frame was computed from; `now_ns`: monotonic time of its receipt."""
        self._taken_ns = now_ns
        if self._stamped:
            self._follow_stamp(item.stamp_ns, now_ns)
        if not self._sensed or self._stamp_frames:  # the message of the frame before once more: nothing new
            return
        self._compare(item.data, now_ns)
        if now_ns >= self._next_look_ns and len(item.data) <= _MOST_INPUT_BYTES:
            self._next_look_ns = now_ns + _LOOK_EVERY_NS
            self._look(item.data, now_ns)

    def _follow_stamp(self, stamp_ns: int, now_ns: int) -> None:
        if stamp_ns == self._stamp_ns:
            self._stamp_frames += 1
            return
        if self._stamp_since_ns and self._stamp_ns:
            stood_s = (now_ns - self._stamp_since_ns) / NS_PER_S
            usual_s = self._usual_stamp_s
            self._usual_stamp_s = stood_s if math.isnan(usual_s) else usual_s + 0.05 * (stood_s - usual_s)
        self._stamp_ns, self._stamp_since_ns, self._stamp_frames = stamp_ns, now_ns, 0

    def _compare(self, data: bytes | memoryview, now_ns: int) -> None:
        """Count how often the same bytes have come; a stamp that advances is left out of them."""
        sample = bytes(data[_HEADER_END :: max(1, len(data) // _SAMPLES)]), len(data)
        if sample == self._sample:
            self._same += 1
            self._second = self._second or bytes(data)  # `data` may be a view on what is overwritten soon
        else:
            self._sample, self._second, self._same_since_ns, self._same = sample, b"", now_ns, 1

    def _look(self, data: bytes | memoryview, now_ns: int) -> None:
        if self._same > 1 and not _equal(data, self._second):
            self._second, self._same_since_ns, self._same = b"", now_ns, 1
        seen = ""
        with contextlib.suppress(TorchperfError):  # the frame is `bad input`, by its worker
            message = decode(data, self._type_name)
            if self._type_name == _CLOUD:
                seen = "empty" if _is_empty(message) else ""
            else:
                seen = self._blind(message, now_ns)
        if seen != self.seen:
            self.seen, self._looks, self._blind_since_ns = seen, 0, now_ns
        self._looks += 1

    def _blind(self, message: Any, now_ns: int) -> str:  # noqa: ANN401 - rosbags builds these at run time
        """Why an image shows nothing; empty if it shows something, or that cannot be known."""
        is_raw = self._type_name == _IMAGE
        picture = raw_picture(message) if is_raw else compressed_picture(message)
        if picture is None:
            return ""
        whole = None if is_raw else lambda: compressed_picture(message, whole=True)
        self._stillness.look(picture, now_ns, whole)
        seen = blindness(picture)
        if whole is None or seen != "noise" or self.seen == "noise":
            return seen
        if now_ns < self._next_whole_ns:
            return ""
        self._next_whole_ns = now_ns + _NOISE_AGAIN_NS
        found = whole()
        return "" if found is None else blindness(found)

    def second(self, now_ns: int) -> Judged:
        found: list[Alert] = []
        if now_ns - self._taken_ns > _LAPSES_S * NS_PER_S:
            return {}, found
        topic = self._topic
        since_ns = (self._same_since_ns, self._stamp_since_ns, self._blind_since_ns)
        frozen_s, stood_s, blind_s = ((now_ns - began_ns) / NS_PER_S for began_ns in since_ns)
        if self._same >= _FROZEN_FRAMES and frozen_s >= _FROZEN_S and not self._stamp_frames:
            text = f"{topic} is frozen: {self._same} messages with new stamps and equal data"
            found.append(self._alert("frozen", Level.ERROR, text, self._same, 1, frozen_s))
        elif (standing := self._stillness.standing) is not None:
            text = f"{standing.share:.0%} of the picture of {topic} is frozen ({standing.where})"
            stands_s = (now_ns - standing.since_ns) / NS_PER_S
            found.append(self._alert("frozen", Level.ERROR, text, standing.share, 0, stands_s))
        # NaN where the stamp has never advanced: such an input does not stand still.
        usual_s = self._usual_stamp_s
        stands = stood_s >= _STOOD_S and stood_s >= _STOOD_INTERVALS * usual_s
        if stands and self._stamp_frames >= _FROZEN_FRAMES:
            usual = f"usually there is a new one every {1e3 * usual_s:.0f} ms"
            text = f"the stamp of {topic} stands still, {usual}"
            found.append(self._alert("stands still", Level.WARN, text, stood_s, usual_s, stood_s))
        if self.seen and self._looks >= _BLIND_LOOKS:
            noun = "point clouds" if self._type_name == _CLOUD else "images"
            level = Level.WARN if self.seen == "saturated" else Level.ERROR
            found.append(self._alert(self.seen, level, f"{noun} of {topic} are {self.seen}", 1, 0, blind_s))
        return {}, found

    def _alert(
        self, kind: str, level: Level, text: str, value: float, usual: float, since_s: float
    ) -> Alert:
        name, numbers = f"{self._stage}: input {kind}{self._suffix}", (f"{value:.3g}", f"{usual:.3g}", "")
        more = {"topic": self._topic}
        return alert(level, name, text + since(since_s), numbers, "flat", since_s, more=more)


def _equal(one: bytes | memoryview, other: bytes) -> bool:
    """Whether two messages of one length hold the same behind their stamps."""
    words, end = max(0, len(one) - _HEADER_END) // 4, len(one) & ~3
    first, second = (
        np.frombuffer(data, np.uint32, words, _HEADER_END if words else 0) for data in (one, other)
    )
    return bool((first == second).all()) and one[end:] == other[end:]


def _is_empty(cloud: Any) -> bool:  # noqa: ANN401 - as above
    """Whether a `sensor_msgs/msg/PointCloud2` holds no point, or none that is a number."""
    count, order = cloud.width * cloud.height, ">" if cloud.is_bigendian else "<"
    place = next((field for field in cloud.fields if field.name == "x"), None)
    kind = None if place is None else {7: "f4", 8: "f8"}.get(place.datatype)
    if not count or place is None or kind is None:
        return not count
    try:
        values = np.ndarray(count, order + kind, cloud.data, place.offset, cloud.point_step)
    except (TypeError, ValueError):  # it says that it holds more than it does
        return False
    return not np.isfinite(values[:: max(1, count // 2048)]).any()


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
        """Seconds that it has been so, if that is unusual; else 0."""
        if not self._since_ns or self._since_ns - self._first_ns < _KNOWN_S * NS_PER_S:
            return 0.0
        lasted_s = (now_ns - self._since_ns) / NS_PER_S
        return lasted_s if lasted_s >= max(_LEAST_S, _FACTOR * self.longest_s) else 0.0


class OutputContent:
    """The outputs of one stage: how many things with what scores, and whether they change."""

    def __init__(self, stage: str, topic: str, type_name: str) -> None:
        self._stage, self._topic, self._type_name = stage, topic, type_name
        # by name and tier: each tier has an output of its own
        self._usual: dict[tuple[str, int], Signal] = {}
        # in this second, on the tier that ran last
        self._found: dict[str, list[float]] = {name: [] for name in _RULES}
        self._tier = self._next_look_ns = 0
        self._same, self._empty = Stretch(), Stretch()
        self._last: tuple[bytes, bytes] | None = None  # an output and the input that it came of

    def take(self, record: FrameRecord) -> None:
        """Take a frame: its own result only, nothing held, backed up or made."""
        now_ns, output = record.received_ns, record.payload
        if not self._type_name or output is None or now_ns < self._next_look_ns:
            return
        if record.row["outcome"] != Outcome.ON_TIME or len(output) > _MOST_OUTPUT_BYTES:
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
            self._found = {name: [] for name in _RULES}
        if not math.isnan(count):
            self._found["objects"].append(count)
        self._found["score"].extend(scores)
        self._empty.update(now_ns, is_so=count == 0)
        self._same.update(now_ns, is_so=self._has_frozen(record, output) and count != 0)

    def _has_frozen(self, record: FrameRecord, output: bytes) -> bool:
        """Whether the output is the one before, apart from its stamp, and its input another."""
        trigger = next((item.data for item in record.inputs if item.index == 0), b"")
        stamp = struct.pack("<iI", *divmod(int(record.row["stamp_ns"]), NS_PER_S))
        sample = bytes(trigger[_HEADER_END :: max(1, len(trigger) // _OUTPUT_SAMPLES)])
        last, self._last = self._last, (output.replace(stamp, b""), sample)
        return last is not None and self._last[0] == last[0] and self._last[1] != last[1]

    def second(self, now_ns: int) -> Judged:
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


def statistics_of(message: Any, type_name: str) -> tuple[float, list[float]]:  # noqa: ANN401 - made at run time
    """How many things a message holds, and their scores; NaN and none where it holds no list.

    Things are the elements of its first sequence of messages (of markers: those that are not deleted, whose
    score is their alpha); scores are numbers called score, confidence or probability anywhere in them.
    """
    if type_name == _MARKERS:
        markers = [marker for marker in message.markers if marker.action not in _DELETING]
        return float(len(markers)), [float(marker.color.a) for marker in markers[:_MOST_ITEMS]]
    items = next((value for value in vars(message).values() if isinstance(value, list)), None)
    if items is None or (items and not hasattr(items[0], "__dict__")):
        return math.nan, []
    return float(len(items)), [score for item in items[:_MOST_ITEMS] for score in _scores_in(item, 4)]


def _scores_in(item: Any, deepest: int) -> Iterator[float]:  # noqa: ANN401
    for name, value in vars(item).items():
        if name in _SCORES and isinstance(value, (float, int)) and math.isfinite(value):
            yield float(value)
        elif deepest:
            for part in value[:_MOST_ITEMS] if isinstance(value, list) else [value]:
                if hasattr(part, "__dict__"):  # a message, no number, text or array
                    yield from _scores_in(part, deepest - 1)
