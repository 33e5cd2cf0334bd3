"""What counts as the same message of a type.

Rules, and the comparison of two messages by them, field by field.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import field_types
from torchperf_ros.api.pixels import pixels

_QUATERNION: Final = "geometry_msgs/msg/Quaternion"
_IMAGE: Final = "sensor_msgs/msg/Image"
_IMAGES: Final = (_IMAGE, "sensor_msgs/msg/CompressedImage")
# Encodings whose pixels are compared; decoding others could hide a difference, as in an alpha
# channel.
_PLAIN: Final = frozenset({"rgb8", "bgr8", "8UC3", "mono8", "8UC1", "mono16", "16UC1", "32FC1"})
_MARKERS: Final = "visualization_msgs/msg/MarkerArray"
# Where the elements of a list lie that has no order.
#
# A score that differs in the last digit may put two boxes the other way round.
_POSITIONS: Final = {
    _MARKERS: "pose.position",
    "vision_msgs/msg/Detection2DArray": "bbox.center.position",
    "vision_msgs/msg/Detection3DArray": "bbox.center.position",
}
_TIMES: Final = frozenset({"builtin_interfaces/msg/Time", "builtin_interfaces/msg/Duration"})


class RuleError(TorchperfError):
    """A rule names a field that its message type does not have.

    The message names the field, and those that the type has.
    """


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the golden one.

    `absolute + relative * |golden|`, in the field's unit.
    """

    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class ImageTolerance:
    """How many pixels of an image may differ from the golden one.

    A `share` of them, 0 to 1, may differ. A pixel differs if one of its channels is off by more than `by`:
    of 255 for 8 bits, in mm or m for depths. None: whole numbers have to be equal, floating-point ones are
    allowed what others are, see `USUAL`.
    """

    share: float = 0.0
    by: float | None = None


@dataclass(frozen=True)
class MessageRule:
    """What counts as the same message of a type.

    Paths are fields of the type with dots between, without indexes: `poses.pose.position`. A path stands
    for all that is below it. Where a type contains another one that has a rule, too, both count, and the
    outer one goes first.

    Attributes:
        ignore: fields that may be anything.
        tolerances: by path; the longest one that fits counts, `""` is every floating-point number of the
            type. Whole numbers have to be equal unless a path names them. Of a time they are in s.
        images: an `Image` or `CompressedImage` below a path, `""` all of the type, and how many pixels may
            differ.
    """

    ignore: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    images: Mapping[str, ImageTolerance] = field(default_factory=dict)


# Rules by message type, for example `nav_msgs/msg/Path`.
Rules = Mapping[str, MessageRule]

# For floating-point numbers that no rule names.
#
# A millimetre, or a thousandth; see `docs/testing.md` for why.
USUAL: Final = Tolerance(absolute=1e-3, relative=1e-3)

# The rules that count unless others are given for the same type.
#
# Types that are not here are compared by `USUAL`.
BUILT_IN: Final[Rules] = MappingProxyType(
    {
        _MARKERS: MessageRule(ignore=("markers.id",)),
        # how long RViz shows a marker
        "visualization_msgs/msg/Marker": MessageRule(ignore=("lifetime",)),
        _IMAGE: MessageRule(images={"": ImageTolerance()}),  # compared by pixel
        "vision_msgs/msg/Detection2DArray": MessageRule(  # in pixels
            tolerances={"detections.bbox": Tolerance(absolute=0.1, relative=1e-3)},
        ),
    }
)


def check_rules(rules: Rules) -> None:
    """Check that the fields of all rules exist: a misspelt one would let pass what it should not.

    Raises:
        RuleError: a field does not exist.
        UnknownMessageType: a type is not known.
    """
    for type_name, rule in rules.items():
        for path in [*rule.ignore, *filter(None, rule.tolerances)]:
            _type_of(type_name, path)
        for path in filter(None, rule.images):
            if (kind := _type_of(type_name, path)) not in _IMAGES:
                raise RuleError(
                    f"rule for {type_name}: {path!r} is no image, but {kind or 'a plain value'}"
                )


def _type_of(type_name: str, path: str) -> str:
    inside = type_name
    for name in path.split("."):
        fields = field_types(inside) if inside else {}
        if name not in fields:
            has = f"{inside} has: {', '.join(fields)}" if inside else "what is before it is a plain value"
            raise RuleError(f"rule for {type_name}: {path!r} is no field, as there is no {name!r}; {has}")
        inside = fields[name]
    return inside


# The rules of the types that a value lies in, the outer one first, each with the value's path in
# the type.
_Seen = tuple[tuple[MessageRule, str], ...]
_EXACT: Final = Tolerance()


@dataclass(frozen=True)
class Difference:
    path: str  # for example `markers[0].pose.position.x`
    value: object
    golden: object
    error: float = math.nan  # how far it is off, in the field's unit; NaN for what has no distance
    allowed: float = math.nan
    words: tuple[str, str] = ("", "")  # `error` and `allowed` for people, where numbers are not enough

    @property
    def field(self) -> str:
        """The path without the numbers of elements, for example `markers[].pose.position.x`."""
        return re.sub(r"\[\d+]", "[]", self.path)

    @property
    def shown(self) -> tuple[str, str]:
        """`error` and `allowed` for people; empty for what has no distance."""
        if self.words[0] or math.isnan(self.error):
            return self.words
        return f"{self.error:.4g}", f"{self.allowed:.4g}"


# any message
def compare_messages(message: Any, golden: Any, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    """Where a message is not as the golden one of the same type.

    Of each array of numbers only the worst element. NaN equals NaN. A quaternion and its negative are the
    same rotation. Markers and detections have no order.
    """
    yield from _values(message, golden, "", (), rules)


def _values(value: Any, golden: Any, path: str, seen: _Seen, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    if any(own in rule.ignore for rule, own in seen):
        return
    if hasattr(golden, "__msgtype__"):
        yield from _messages(value, golden, path, seen, rules)
    elif isinstance(golden, (list, np.ndarray)) and len(value) != len(golden):
        yield Difference(path, f"{len(value)} elements", f"{len(golden)} elements")
    elif isinstance(golden, list):
        for index, (one, other) in enumerate(zip(value, golden, strict=True)):
            yield from _values(one, other, f"{path}[{index}]", seen, rules)
    elif isinstance(golden, (bool, str)):
        if value != golden:
            yield Difference(path, value, golden)
    elif not np.array_equal(value, golden):
        yield from _numbers(value, golden, path, seen)


def _messages(message: Any, golden: Any, path: str, seen: _Seen, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    kind = golden.__msgtype__
    if kind in _TIMES:
        yield from _times(message, golden, path, seen)
        return
    seen = (*seen, (rules.get(kind, MessageRule()), ""))
    names = [entry.name for entry in dataclasses.fields(golden) if not entry.name.startswith("__")]
    parts = "xyzw" if kind == _QUATERNION else ""
    is_negative = sum(getattr(message, part) * getattr(golden, part) for part in parts) < 0.0
    for name in names:
        inside = tuple((rule, f"{own}.{name}" if own else name) for rule, own in seen)
        below = f"{path}.{name}" if path else name
        is_image = name == "data" and kind in _IMAGES and _is_laid_out_alike(message, golden)
        if is_image and (allowed := _image_tolerance(inside, seen)) is not None:
            yield from _images(message, golden, below, allowed)
            continue
        value, wanted = getattr(message, name), getattr(golden, name)
        if kind in _POSITIONS and isinstance(wanted, list) and len(value) == len(wanted):
            value = _as_in_golden(value, wanted, _POSITIONS[kind])
        yield from _values(-value if is_negative else value, wanted, below, inside, rules)


def _as_in_golden(values: list[Any], golden: list[Any], position: str) -> list[Any]:
    """Elements in the golden order: each golden one takes the nearest of its kind that is left."""

    def place(item: Any) -> tuple[tuple[int, int], tuple[float, ...]]:  # noqa: ANN401
        at = functools.reduce(getattr, position.split("."), item)
        return (getattr(item, "action", 0), getattr(item, "type", 0)), (at.x, at.y, getattr(at, "z", 0.0))

    left, ordered = [(place(item), item) for item in values], []
    for wanted_kind, wanted_at in map(place, golden):
        apart = [(kind != wanted_kind, math.dist(at, wanted_at)) for (kind, at), _ in left]
        ordered.append(left.pop(apart.index(min(apart)))[1])
    return ordered


def _times(message: Any, golden: Any, path: str, seen: _Seen) -> Iterator[Difference]:  # noqa: ANN401
    """One difference in s: of a time's two fields both differ where a second ends in between."""
    mine, theirs = (item.sec * NS_PER_S + item.nanosec for item in (message, golden))
    tolerance, error = _tolerance(seen, whole=True), abs(mine - theirs) / NS_PER_S
    allowed = tolerance.absolute + tolerance.relative * abs(theirs) / NS_PER_S
    if error > allowed:
        yield Difference(path, _seconds(mine), _seconds(theirs), error, allowed)


def _seconds(ns: int) -> str:
    return f"{'-' if ns < 0 else ''}{abs(ns) // NS_PER_S}.{abs(ns) % NS_PER_S:09d}"


def _longest(names: Iterable[str], path: str) -> str:
    return max((name for name in names if name and f"{path}.".startswith(f"{name}.")), key=len, default="")


def _tolerance(seen: _Seen, *, whole: bool) -> Tolerance:
    for rule, path in seen:
        name = _longest(rule.tolerances, path)
        if name or ("" in rule.tolerances and not whole):
            return rule.tolerances[name]
    return _EXACT if whole else USUAL


def _numbers(value: Any, golden: Any, path: str, seen: _Seen) -> Iterator[Difference]:  # noqa: ANN401
    values, wanted = np.atleast_1d(value), np.atleast_1d(golden)
    tolerance = _tolerance(seen, whole=wanted.dtype.kind != "f")
    got, aim = values.astype(np.float64), wanted.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - aim)
        allowed = tolerance.absolute + tolerance.relative * np.abs(aim)
        fine = (values == wanted) | (np.isnan(got) & np.isnan(aim))
        if tolerance != _EXACT:  # whole numbers beyond 2**53 are only the same if they are equal
            fine |= error <= np.where(np.isfinite(allowed), allowed, 0.0)
        excess = np.where(fine, -1.0, np.nan_to_num(error / allowed, nan=np.inf, posinf=np.inf))
    if fine.all():
        return
    # where nothing is allowed, several exceed it infinitely: the worst one is farthest off
    worst = int(np.argmax(np.where(excess == excess.max(), np.nan_to_num(error, nan=np.inf), -1.0)))
    at = f"{path}[{worst}]" if np.ndim(golden) else path
    numbers = float(error[worst]), float(allowed[worst])
    yield Difference(at, values[worst].item(), wanted[worst].item(), *numbers)


def _image_tolerance(data: _Seen, message: _Seen) -> ImageTolerance | None:
    """The rule for the pixels of a message; None where its bytes are compared like any others."""
    for (rule, path), (_, own) in zip(data, message, strict=True):
        if path in rule.ignore:
            return None
        name = _longest(rule.images, own)
        if name in rule.images:
            return rule.images[name]
        if _longest(rule.tolerances, path):
            return None
    return None


def _is_laid_out_alike(message: Any, golden: Any) -> bool:  # noqa: ANN401
    if golden.__msgtype__ != _IMAGE:
        return True
    layouts = [
        (of.height, of.width, of.encoding, of.is_bigendian, of.step, len(of.data))
        for of in (message, golden)
    ]
    return layouts[0] == layouts[1] and len(golden.data) == golden.height * golden.step


def _images(message: Any, golden: Any, path: str, allowed: ImageTolerance) -> Iterator[Difference]:  # noqa: ANN401
    (mine, parts), (theirs, _) = _pixels(message), _pixels(golden)
    if mine.shape != theirs.shape:
        is_now, was = (f"{array.shape[1]} x {array.shape[0]} pixels" for array in (mine, theirs))
        yield Difference(path, is_now, was)
        return
    got, wanted = mine.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.nan_to_num(np.abs(got - wanted), nan=np.inf, posinf=np.inf)
    apart[(mine == theirs) | (np.isnan(got) & np.isnan(wanted))] = 0.0
    limit, limit_words = np.zeros(1), f"{allowed.by or 0.0:.4g}"
    if allowed.by is None and theirs.dtype.kind == "f":
        limit = USUAL.absolute + USUAL.relative * np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
        limit_words = f"{USUAL.absolute:.4g} + {USUAL.relative:.4g} of its value"
    elif allowed.by is not None:
        limit = np.full(1, allowed.by)
    worst = (apart - limit).max(axis=2, initial=-math.inf)
    if (share := float(np.mean(worst > 0.0)) if worst.size else 0.0) > allowed.share:
        row, column = np.unravel_index(np.argmax(worst), worst.shape)
        value, golden_value = (
            f"({', '.join(f'{channel:.6g}' for channel in array[row, column])})" for array in (mine, theirs)
        )
        words = (
            f"{100 * share:.4g} % of {worst.size:,} {parts}",
            f"{100 * allowed.share:.4g} %, or any by {limit_words}",
        )
        where = f"{value} at row {row}, column {column}"
        yield Difference(path, where, golden_value, share, allowed.share, words)


def _pixels(message: Any) -> tuple[NDArray[Any], str]:  # noqa: ANN401
    """[rows, columns, channels] of an image, and what the first two count."""
    if message.__msgtype__ != _IMAGE or message.encoding in _PLAIN:
        return pixels(message), "pixels"
    return message.data.reshape(message.height, message.step, 1), "bytes"
