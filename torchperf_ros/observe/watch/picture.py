"""What a camera's picture shows, by its parts: 8 x 8 of them, of 8 x 8 points each."""

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput

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
