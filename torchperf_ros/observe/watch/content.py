"""What a stage's inputs and outputs hold: frozen, black or empty ones count like any other frames.

A camera's picture is looked at by its parts: 8 x 8 of them, of 8 x 8 points each.
"""

import contextlib
import math
import re
import struct
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput, TorchperfError
from torchperf_ros.api.messages import decode, has_header
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.observe.telemetry.rows import FrameRecord
from torchperf_ros.observe.watch.series_detector import Judged, Signal, SignalRule, alert, since
from torchperf_ros.workers.frame_ring import InputBytes

_ACROSS: Final = 8  # parts in each direction, and points of a part
_SIDE: Final = _ACROSS * _ACROSS
_ENCODING: Final = re.compile(r"(mono|rgba?|bgra?|bayer_[a-z]{4})(8|16)|(8[us]|16u|32f)c(\d*)")
_CHANNELS: Final = {"rgb": 3, "bgr": 3, "rgba": 4, "bgra": 4}
_KINDS: Final = {"8": "u1", "8u": "u1", "8s": "u1", "16": "u2", "16u": "u2", "32f": "f4"}
# How many bytes a pixel takes, and which of them is its brightness.
_LUMA: Final = {
    "yuv422": (2, 1),
    "uyvy": (2, 1),
    "yuv422_yuy2": (2, 0),
    "yuyv": (2, 0),
    "nv12": (1, 0),
    "nv21": (1, 0),
    "nv24": (1, 0),
}
_BLACK, _WHITE = 0.08, 0.98  # of the full scale
_DARK: Final = 16 / 255  # nothing that is brighter: a night has its lamps
_FLAT: Final = 0.02  # of the full scale, between the 2nd and the 98th percentile
_SATURATED: Final = 0.8  # of the points
# Between neighbouring pixels: the mean square of their difference over twice the variance of the part. It
# is 1 for noise, and at most 0.15 in pictures of a drive.
_UNLIKE: Final = 0.5
# standard deviation of noise, of the full scale: what a high gain at night stays below
_LOUD: Final = 0.035
_NOISY: Final = 0.7  # of the parts that are not flat
_HALF: Final = 0.5
_LIVE: Final = 0.7  # of the last looks, in which a part that stands now has changed
_FORGETS: Final = 0.8  # what a look leaves of the weight of those before
_STANDS_S, _STANDS_LOOKS = 3.0, 4
_LEAST_PARTS: Final = _SIDE // 8
# of the other parts move on: what freezes does so at once, what comes to rest does not
_TOGETHER: Final = 0.8
# of a part's points: where a JPEG's blocks lie across the border of what stands
_BORDER: Final = 1 / _ACROSS
_NEVER_S, _NEARLY_ALL = 10.0, 0.9


class Picture(NamedTuple):
    """Points of a picture.

    Attributes:
        values: [64, 64], brightness: the sum of the colours.
        beside: the same of the pixel to the right, in a Bayer pattern of the next one of the same colour.
        scale: the largest value that there can be; of 16 bits and floats the largest that there is.
        is_light: whether the values are brightness at all, not depth.
    """

    values: NDArray[Any]
    beside: NDArray[Any]
    scale: float
    is_light: bool = True


class FrozenParts(NamedTuple):
    """The parts of a picture that have frozen: their share of it, their extent in words, and since when."""

    share: float
    where: str
    since_ns: int


# rosbags builds these dataclasses at run time
def raw_picture(message: Any) -> Picture | None:  # noqa: ANN401
    """Points of a `sensor_msgs/msg/Image`; None if its encoding or size is not usable."""
    encoding = str(message.encoding).lower()
    height, width, step = int(message.height), int(message.width), int(message.step)
    known = _ENCODING.fullmatch(encoding)
    if encoding in _LUMA:
        kind, is_light, apart = "u1", True, 1
        pixel, first = _LUMA[encoding]
        colours = 1
    elif known is not None:
        name, bits, channels = known.group(1) or "", known.group(2) or known.group(3), known.group(4)
        kind = _KINDS[bits]
        is_light = bool(name) or kind == "u1"
        apart = 2 if name.startswith("bayer") else 1
        pixel, first = int(channels or 1) if not name else _CHANNELS.get(name, 1), 0
        colours = min(pixel, 3)  # the fourth is how opaque it is
    else:
        return None
    size = int(kind[1])
    data = np.asarray(message.data)
    if not height or step % size or not 0 < width * pixel * size <= step or len(data) < height * step:
        return None
    rows = data[: height * step].reshape(height, step).view((">" if message.is_bigendian else "<") + kind)
    values, beside = _points(rows, width, pixel, range(first, first + colours), apart)
    scale = 255.0 * colours if kind == "u1" else float(values.max()) or 1.0
    return Picture(values, beside, scale, is_light)


def compressed_picture(message: Any, *, whole: bool = False) -> Picture | None:  # noqa: ANN401
    """The same of a `sensor_msgs/msg/CompressedImage`.

    A JPEG is decoded at an eighth of its size, or as a `whole`.
    """
    from torchperf_ros.api.pixels import (
        compressed_pixels,
    )  # Pillow's 10 MiB, which most recorders never need

    try:
        pixels = compressed_pixels(message, least=None if whole else (_SIDE, _SIDE)).array
    except BadInput:
        return None
    height, width, colours = pixels.shape
    return Picture(*_points(pixels.reshape(height, -1), width, colours, range(colours), 1), 255.0 * colours)


def _points(
    rows: NDArray[Any], width: int, pixel: int, colours: range, apart: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    at = np.arange(_SIDE)
    columns = at * width // _SIDE
    columns = np.concatenate([columns, np.minimum(columns + apart, width - 1)]) * pixel
    rows = rows[at * len(rows) // _SIDE]
    kind = np.float64 if rows.dtype.kind == "f" else np.int32
    points = np.stack([rows[:, columns + colour] for colour in colours]).sum(axis=0, dtype=kind)
    if kind is np.float64:
        points = np.nan_to_num(points, posinf=0.0, neginf=0.0)  # no depth is known there
    return points[:, :_SIDE], points[:, _SIDE:]


def _by_part(points: NDArray[Any]) -> NDArray[Any]:
    """[64 parts, 64 points]."""
    return points.reshape(_ACROSS, _ACROSS, _ACROSS, _ACROSS).swapaxes(1, 2).reshape(_SIDE, _SIDE)


def blindness(picture: Picture) -> str:
    """Why nothing can be seen.

    `black`, `white`, `saturated`, `featureless` or `noise`; empty where something can.
    """
    points, scale = picture.values, picture.scale
    ranks = [round(share * (points.size - 1)) for share in (0.02, 0.98, 0.998)]
    low, high, highest = (float(value) / scale for value in np.partition(points, ranks, axis=None)[ranks])
    if not picture.is_light:  # a wall is as far away everywhere
        return "" if high > low else "featureless" if high else "black"
    if highest >= _WHITE and float((points >= _WHITE * scale).mean()) >= _SATURATED:
        return "white" if float(points.mean()) >= _WHITE * scale else "saturated"
    if highest <= _DARK:
        return "black"
    if high - low <= _FLAT:
        return "black" if high <= _BLACK else "featureless"
    return "noise" if _is_noise(picture) else ""


def _is_noise(picture: Picture) -> bool:
    """Whether pixels have nothing to do with their neighbours, nearly everywhere."""
    squares = ((picture.values - picture.beside) / picture.scale) ** 2
    if float(squares.mean()) < _HALF * _NOISY * _LOUD**2:  # as in most pictures: the rest takes longer
        return False
    parts = _by_part(picture.values / picture.scale)
    variances = parts.var(axis=1)
    noise = (_by_part(squares).mean(axis=1) >= _UNLIKE * 2 * variances) & (variances >= _LOUD**2)
    shows = np.ptp(parts, axis=1) > _FLAT
    if shows.mean() < _HALF or noise[shows].mean() < _NOISY:
        return False
    _, counts = np.unique(picture.values, return_counts=True)
    return bool(
        counts.max() < _HALF * picture.values.size
    )  # not single points on a ground, as of an event camera


class Stillness:
    """Follows which parts of the pictures stand.

    Whose points have all been exactly the same, look after look.

    A sensor has noise, so that parts of a vehicle's surroundings at rest change, too. What never changes is
    no fault (a bonnet, black bars), nor is what comes to rest bit by bit (a decoded video), or what is
    overexposed.

    Attributes:
        standing: what has frozen, as of the last look; None where nothing has.
    """

    def __init__(self) -> None:
        self.standing: FrozenParts | None = None
        self._values: NDArray[Any] | None = None
        self._detail: NDArray[Any] | None = None
        self._sure = False
        self._live = np.zeros(
            _SIDE
        )  # in which share of the looks each part has changed, before it began to stand
        self._stood = np.zeros(_SIDE, np.int64)  # looks since it changed
        self._since_ns = np.zeros(_SIDE, np.int64)

    def look(
        self, picture: Picture, now_ns: int, whole: Callable[[], Picture | None] | None = None
    ) -> None:
        """Compare with the picture of the look before.

        `whole` gives it in more detail, where it is a small one.
        """
        before, self._values = self._values, picture.values
        if before is None:
            self._since_ns[:] = now_ns
            return
        changed = _by_part(before != picture.values).any(axis=1)
        faded = self._live * _FORGETS**self._stood
        self._live = np.where(changed, 1 - _FORGETS * (1 - faded), self._live)
        self._stood = np.where(changed, 0, self._stood + 1)
        self._since_ns[changed] = now_ns
        shows = np.ptp(_by_part(picture.values), axis=1) > _FLAT * picture.scale
        self.standing = self._judge(shows, now_ns)
        if self.standing is None:
            self._detail, self._sure = None, False
        elif whole is not None and not self._sure:
            self._make_sure(whole())
            self.standing = self._judge(shows, now_ns) if self._sure else None

    def _make_sure(self, picture: Picture | None) -> None:
        """A small picture has little noise: its parts count as live only if more of it stands as well."""
        if picture is None:
            return
        if self._detail is not None:
            changed = _by_part(self._detail != picture.values).mean(axis=1)
            self._live[changed > _BORDER] = 1 - _FORGETS  # as after the first change
            self._sure = True
        self._detail = picture.values

    def _judge(self, shows: NDArray[np.bool_], now_ns: int) -> FrozenParts | None:
        parts, least_s = frozen_at_once(shows, self._live, self._stood), _STANDS_S
        if not parts.any():
            parts, least_s = never_changed(shows, self._live), _NEVER_S
        if not parts.any() or self._stood[parts].min() < _STANDS_LOOKS:
            return None
        since_ns = int(self._since_ns[parts].max())
        if now_ns - since_ns < least_s * NS_PER_S:
            return None
        down, across = np.divmod(np.flatnonzero(parts), _ACROSS)
        return FrozenParts(float(parts.mean()), f"x {_extent(across)}, y {_extent(down)} %", since_ns)


def frozen_at_once(shows: NDArray[np.bool_], live: NDArray[Any], stood: NDArray[Any]) -> NDArray[np.bool_]:
    """The parts that changed all the time and stand since the same look.

    None where they are few, or others rest, too.

    All have the shape [64]: whether something can be seen in a part, in which share of the looks it changed
    before it stood, and for how many looks it stands.
    """
    lively = shows & (live >= _LIVE)
    stands = lively & (stood > 0)
    if not stands.any():
        return stands
    together = stands & (np.abs(stood - np.median(stood[stands])) <= 1)
    others = stood[lively & ~together]
    others_move = len(others) <= _LEAST_PARTS or float((others == 0).mean()) >= _TOGETHER
    return together if int(together.sum()) >= _LEAST_PARTS and others_move else np.zeros_like(stands)


def never_changed(shows: NDArray[np.bool_], live: NDArray[Any]) -> NDArray[np.bool_]:
    """The parts that have never changed, if they are nearly all of a picture; none otherwise."""
    never = shows & (live == 0)
    enough = int(never.sum()) >= max(2 * _LEAST_PARTS, _NEARLY_ALL * int(shows.sum()))
    return never if enough else np.zeros_like(never)


def _extent(places: NDArray[Any]) -> str:
    return f"{100 * places.min() // _ACROSS} to {100 * (places.max() + 1) // _ACROSS}"


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
