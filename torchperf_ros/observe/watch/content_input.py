"""What a stage's inputs hold.

Frozen, black or empty ones look like any other to a program that only counts frames.
"""

import contextlib
import math
from typing import Any

import numpy as np

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import decode, has_header
from torchperf_ros.observe.watch.picture import Stillness, blindness, compressed_picture, raw_picture
from torchperf_ros.observe.watch.signals import alert, since
from torchperf_ros.workers.frame_ring import InputBytes

_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"
_CLOUD = "sensor_msgs/msg/PointCloud2"
_SENSED = {_IMAGE, _COMPRESSED, _CLOUD}  # sensors that have noise: the same bytes twice are no measurement
_HEADER_END = 12  # CDR encapsulation and stamp
# bytes by which two messages are compared first; each is a look into memory that is in no cache
_SAMPLES = 128
_LOOK_EVERY_NS = NS_PER_S // 2
_BLIND_LOOKS = 3
_FROZEN_S, _FROZEN_FRAMES = 1.0, 3
_STOOD_S, _STOOD_INTERVALS = 1.0, 5.0
_LAPSES_S = 5.0  # after the last message: what it showed is not known to be so any more
_MOST_BYTES = 64 << 20
_CLOUD_POINTS = 2048
# a JPEG at an eighth of its size that looks like noise is decoded as a whole as often
_NOISE_AGAIN_NS = 10 * NS_PER_S


class InputContent:
    """One input of one stage. Every message is compared by some bytes; two a second are decoded.

    Attributes:
        seen: what the last look found: `black`, `empty` and the like, `frozen` excepted; empty if all is
            well.
    """

    def __init__(self, stage: str, topic: str, type_name: str, *, trigger: bool) -> None:
        """Name the stage and the input; `trigger`: it is the one that the stage runs for."""
        self.seen = ""
        self._stage = stage
        self._topic, self._type_name = topic, type_name
        self._suffix = "" if trigger else f" ({topic})"
        self._sensed = type_name in _SENSED
        self._stamped = has_header(type_name)
        self._sample = b"", 0  # and the length of the whole
        self._second = b""  # a copy of the second of the messages that have been the same
        self._same_since_ns = 0
        self._same = 0
        self._stamp_ns = 0
        self._stamp_since_ns = 0
        self._stamp_frames = 0
        self._usual_stamp_s = math.nan
        self._next_look_ns = self._next_whole_ns = 0
        self._stillness = Stillness()
        self._looks = 0
        self._blind_since_ns = 0
        self._taken_ns = 0

    def take(self, item: InputBytes, now_ns: int) -> None:
        """Take what one frame was computed from; `now_ns`: monotonic time of its receipt."""
        self._taken_ns = now_ns
        if self._stamped:
            self._follow_stamp(item.stamp_ns, now_ns)
        if not self._sensed or self._stamp_frames:  # the message of the frame before once more: nothing new
            return
        self._compare(item.data, now_ns)
        if now_ns >= self._next_look_ns and len(item.data) <= _MOST_BYTES:
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
        """Decode a message and see whether there is anything in it."""
        if self._same > 1 and not _equal(data, self._second):
            self._second, self._same_since_ns, self._same = b"", now_ns, 1
        seen = ""
        with contextlib.suppress(TorchperfError):  # the worker says so of the frame, as `bad input`
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
        self._stillness.look(
            picture, now_ns, None if is_raw else lambda: compressed_picture(message, whole=True)
        )
        seen = blindness(picture)
        if is_raw or seen != "noise" or self.seen == "noise":
            return seen
        if now_ns < self._next_whole_ns:
            return ""
        self._next_whole_ns = now_ns + _NOISE_AGAIN_NS
        whole = compressed_picture(message, whole=True)
        return "" if whole is None else blindness(whole)

    def alerts(self, now_ns: int) -> list[Alert]:
        """What is wrong at present, once a second."""
        found: list[Alert] = []
        if now_ns - self._taken_ns > _LAPSES_S * NS_PER_S:
            return found
        topic = self._topic
        since_ns = (self._same_since_ns, self._stamp_since_ns, self._blind_since_ns)
        frozen_s, stood_s, blind_s = ((now_ns - began_ns) / NS_PER_S for began_ns in since_ns)
        if self._same >= _FROZEN_FRAMES and frozen_s >= _FROZEN_S and not self._stamp_frames:
            text = f"{topic} is frozen: {self._same} messages with new stamps and equal data"
            found.append(self._alert("input frozen", Level.ERROR, text, (self._same, 1), frozen_s))
        elif (standing := self._stillness.standing) is not None:
            text = f"{standing.share:.0%} of the picture of {topic} is frozen ({standing.where})"
            stands_s = (now_ns - standing.since_ns) / NS_PER_S
            found.append(self._alert("input frozen", Level.ERROR, text, (standing.share, 0), stands_s))
        # NaN where the stamp has never advanced: such an input does not stand still
        usual_s = self._usual_stamp_s
        if (
            self._stamp_frames >= _FROZEN_FRAMES
            and stood_s >= _STOOD_S
            and stood_s >= _STOOD_INTERVALS * usual_s
        ):
            text = (
                f"the stamp of {topic} stands still, usually there is a new one every"
                f" {1e3 * usual_s:.0f} ms"
            )
            found.append(self._alert("input stands still", Level.WARN, text, (stood_s, usual_s), stood_s))
        if self.seen and self._looks >= _BLIND_LOOKS:
            noun = "point clouds" if self._type_name == _CLOUD else "images"
            level = Level.WARN if self.seen == "saturated" else Level.ERROR
            text = f"{noun} of {topic} are {self.seen}"
            found.append(self._alert(f"input {self.seen}", level, text, (1, 0), blind_s))
        return found

    def _alert(
        self, kind: str, level: Level, text: str, now_and_usual: tuple[float, float], since_s: float
    ) -> Alert:
        name, (now, usual) = (
            f"{self._stage}: {kind}{self._suffix}",
            (f"{value:.3g}" for value in now_and_usual),
        )
        more = {"topic": self._topic}
        return alert(level, name, text + since(since_s), (now, usual, ""), "flat", since_s, more=more)


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
    kinds = [
        (field.offset, {7: "f4", 8: "f8"}.get(field.datatype))
        for field in cloud.fields
        if field.name == "x"
    ]
    if not count or not kinds or kinds[0][1] is None:
        return not count
    try:
        values = np.ndarray(count, order + kinds[0][1], cloud.data, kinds[0][0], cloud.point_step)
    except (TypeError, ValueError):  # it says that it holds more than it does
        return False
    return not np.isfinite(values[:: max(1, count // _CLOUD_POINTS)]).any()
