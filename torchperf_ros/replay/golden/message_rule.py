"""What counts as the same message of a type.

Rules, and the comparison of two messages by them, field by field.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.messages import field_types
from torchperf_ros.api.pixels import compressed_pixels

_QUATERNION: Final = "geometry_msgs/msg/Quaternion"
_IMAGE: Final = "sensor_msgs/msg/Image"
_IMAGES: Final = (_IMAGE, "sensor_msgs/msg/CompressedImage")
_ENCODING: Final = re.compile(
    r"(?P<colour>rgb|bgr|rgba|bgra|mono|bayer_\w+)(8|16)|(8|16|32|64)(?P<kind>[USF])C(\d+)"
)
_TIMES: Final = frozenset({"builtin_interfaces/msg/Time", "builtin_interfaces/msg/Duration"})


class RuleError(TorchperfError):
    """A rule names a field that its message type does not have.

    The message says which, and what there is.
    """


class ComparisonError(TorchperfError):
    """Messages cannot be compared; the message says what would do."""


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the golden one.

    `absolute + relative * |golden|`, in the field's unit.
    """

    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Matched:
    """Elements of a list belong together if they are near each other, whatever their order.

    One without a partner is a difference.
    """

    # field of an element with `x`, `y` and, where there is one, `z`; for example `pose.position`
    position: str
    within: float  # the farthest that two may be apart, in the unit of the position
    same: tuple[str, ...] = ()  # fields in which two elements have to be equal to belong together


@dataclass(frozen=True)
class ImageTolerance:
    """How far the pixels of an image may be from those of the golden one.

    A `share` of them, 0 to 1, may differ.

    A pixel differs if one of its channels is off by more than `by`: of 255 for 8 bits, in mm or m for
    depths. None: whole numbers have to be equal, floating-point ones are allowed what others are, see
    `USUAL`.
    """

    share: float = 0.0
    by: float | None = None

    def limit(self, golden: NDArray[Any]) -> NDArray[np.float64]:
        """How far each number may be from the golden one."""
        if self.by is not None or golden.dtype.kind != "f":
            return np.full(golden.shape, self.by or 0.0)
        wanted = np.abs(golden.astype(np.float64))
        return np.where(np.isfinite(wanted), USUAL.absolute + USUAL.relative * wanted, 0.0)

    def words(self, golden: NDArray[Any]) -> str:
        """What a channel of a pixel may be off by, for people."""
        if self.by is None and golden.dtype.kind == "f":
            return f"{USUAL.absolute:.4g} + {USUAL.relative:.4g} of its value"
        return f"{self.by or 0.0:.4g}"


@dataclass(frozen=True)
class MessageRule:
    """What counts as the same message of a type.

    Paths are fields of the type with dots between, without indexes: `poses.pose.position`. A path stands
    for all that is below it. Where a type contains another one that has a rule, too, both count, and the
    outer one goes first.

    Attributes:
        ignore: fields that may be anything.
        tolerances: by path; the longest one that fits counts, `""` is every floating-point number of the
            type. Whole numbers have to be equal unless a path names them.
        angles: fields in rad that wrap: pi and -pi are the same.
        matched: lists whose elements are matched by position; others are compared in their order.
        images: an `Image` or `CompressedImage` below a path, `""` all of the type, and how far its pixels
            may be off.
    """

    ignore: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    angles: tuple[str, ...] = ()
    matched: Mapping[str, Matched] = field(default_factory=dict)
    images: Mapping[str, ImageTolerance] = field(default_factory=dict)


Rules = Mapping[str, MessageRule]
"""Rules by message type, for example `nav_msgs/msg/Path`."""

USUAL: Final = Tolerance(absolute=1e-3, relative=1e-3)
"""For floating-point numbers that no rule names.

A millimetre, or a thousandth; see `docs/testing.md` for why.
"""

BUILT_IN: Final[Rules] = MappingProxyType(
    {
        "visualization_msgs/msg/MarkerArray": MessageRule(
            matched={"markers": Matched("pose.position", within=0.5, same=("action", "type"))},
            ignore=("markers.id",),
        ),
        "visualization_msgs/msg/Marker": MessageRule(ignore=("lifetime",)),  # how long RViz shows it
        _IMAGE: MessageRule(images={"": ImageTolerance()}),  # compared by pixel
        "vision_msgs/msg/Detection2DArray": MessageRule(
            matched={"detections": Matched("bbox.center.position", within=20.0)},  # pixels
            tolerances={"detections.bbox": Tolerance(absolute=0.1, relative=1e-3)},
        ),
        "vision_msgs/msg/Detection3DArray": MessageRule(
            matched={"detections": Matched("bbox.center.position", 0.5)}
        ),
        "vision_msgs/msg/Pose2D": MessageRule(angles=("theta",)),
        "geometry_msgs/msg/Pose2D": MessageRule(angles=("theta",)),
    }
)
"""The rules that count unless others are given for the same type.

Types that are not here are compared by `USUAL`.
"""


def check_rules(rules: Rules) -> None:
    """See that rules name fields that are there: a misspelt one would let pass what it should not.

    Raises:
        RuleError: a field is not there.
        UnknownMessageType: a type is not known.
    """
    for type_name, rule in rules.items():
        for path in [*rule.ignore, *filter(None, rule.tolerances), *rule.angles]:
            _type_of(type_name, path, type_name)
        for path in filter(None, rule.images):
            if (kind := _type_of(type_name, path, type_name)) not in _IMAGES:
                raise RuleError(
                    f"rule for {type_name}: {path!r} is no image, but {kind or 'a plain value'}"
                )
        for path, matched in rule.matched.items():
            element = _type_of(type_name, path, type_name)
            for inner in (matched.position, *matched.same):
                _type_of(element, inner, type_name)


def _type_of(inside: str, path: str, rule: str) -> str:
    for name in path.split("."):
        fields = field_types(inside) if inside else {}
        if name not in fields:
            has = f"{inside} has: {', '.join(fields)}" if inside else "what is before it is a plain value"
            raise RuleError(f"rule for {rule}: {path!r} is no field, as there is no {name!r}; {has}")
        inside = fields[name]
    return inside


_EXACT: Final = Tolerance()
_Seen = tuple[tuple[MessageRule, str], ...]
"""A place in a message as the rules on the way to it see it.

The rule and its path, the outermost one first.
"""


@dataclass(frozen=True)
class Difference:
    """A field in which a message is not as the golden one.

    The `error` is how far they are apart, in the field's unit, s for a time; NaN for what has no distance.
    Of an image, of which `value` and `golden` are the worst pixels, it is the share of those that differ.
    """

    path: str  # with indexes, for example `markers[3].pose.position.x`
    value: object  # what is there; `none` for a part that only the other one has
    golden: object  # what should be
    error: float = math.nan
    allowed: float = math.nan  # how far they may be apart; NaN likewise
    told: tuple[str, str] | None = None  # the last two for people, where their numbers alone do not say it

    @property
    def field(self) -> str:
        """The path without the numbers of elements, for example `markers[].pose.position.x`."""
        return re.sub(r"\[\d+]", "[]", self.path)

    @property
    def shown(self) -> tuple[str, str]:
        """`error` and `allowed` for people; empty for what has no distance."""
        return self.told or (
            ("", "") if math.isnan(self.error) else (f"{self.error:.4g}", f"{self.allowed:.4g}")
        )


# any message
def compare_messages(message: Any, golden: Any, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    """Where a message is not as the golden one of the same type.

    Of each array of numbers only the worst element.

    NaN equals NaN. A quaternion and its negative are the same rotation.

    Raises:
        ComparisonError: elements are to be matched, and scipy is not installed.
    """
    yield from _values(message, golden, "", (), rules)


def _values(value: Any, golden: Any, path: str, seen: _Seen, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    if any(own in rule.ignore for rule, own in seen):
        return
    if hasattr(golden, "__msgtype__"):
        yield from _messages(value, golden, path, seen, rules)
    elif isinstance(golden, list):
        yield from _lists(value, golden, path, seen, rules)
    elif isinstance(golden, (bool, str)):
        if value != golden:
            yield Difference(path, value, golden)
    elif isinstance(golden, np.ndarray) and len(value) != len(golden):
        yield Difference(path, f"{len(value)} elements", f"{len(golden)} elements")
    elif not np.array_equal(value, golden):
        yield from _numbers(
            np.atleast_1d(value), np.atleast_1d(golden), path, seen, indexed=np.ndim(golden) > 0
        )


def _messages(message: Any, golden: Any, path: str, seen: _Seen, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    kind = golden.__msgtype__
    seen = (*seen, (rules.get(kind, MessageRule()), ""))
    sign = (
        -1.0
        if kind == _QUATERNION and sum(getattr(message, i) * getattr(golden, i) for i in "xyzw") < 0.0
        else None
    )
    found: list[Difference] = []
    names = [entry.name for entry in dataclasses.fields(golden) if not entry.name.startswith("__")]
    if (
        kind in _IMAGES
        and (allowed := _image_tolerance(seen)) is not None
        and _is_laid_out_alike(message, golden)
    ):
        names.remove("data")
        found += _images(message, golden, f"{path}.data" if path else "data", allowed)
    for name in names:
        value, wanted = getattr(message, name), getattr(golden, name)
        inside = tuple((rule, f"{own}.{name}" if own else name) for rule, own in seen)
        found += _values(
            sign * value if sign else value, wanted, f"{path}.{name}" if path else name, inside, rules
        )
    yield from _time(message, golden, path, found) if found and kind in _TIMES else found


def _time(message: Any, golden: Any, path: str, found: Sequence[Difference]) -> Iterator[Difference]:  # noqa: ANN401
    """One difference in s for those of a time's two fields, which both differ where a second ends in between."""
    mine, theirs = (item.sec * NS_PER_S + item.nanosec for item in (message, golden))
    allowed = sum(part.allowed / (NS_PER_S if part.path.endswith("nanosec") else 1) for part in found)
    error = abs(mine - theirs) / NS_PER_S
    if error > allowed:
        yield Difference(path, _seconds(mine), _seconds(theirs), error, allowed)


def _seconds(ns: int) -> str:
    return f"{'-' if ns < 0 else ''}{abs(ns) // NS_PER_S}.{abs(ns) % NS_PER_S:09d}"


def _longest(names: Iterable[str], path: str) -> str:
    """The longest path of these that stands for this one, too; "" if none does."""
    return max((name for name in names if name and f"{path}.".startswith(f"{name}.")), key=len, default="")


def _tolerance(seen: _Seen, *, whole: bool) -> Tolerance:
    for rule, path in seen:
        name = _longest(rule.tolerances, path)
        if name or ("" in rule.tolerances and not whole):
            return rule.tolerances[name]
    return _EXACT if whole else USUAL


def _numbers(
    values: NDArray[Any], golden: NDArray[Any], path: str, seen: _Seen, *, indexed: bool
) -> Iterator[Difference]:
    tolerance = _tolerance(seen, whole=golden.dtype.kind != "f")
    got, wanted = values.astype(np.float64), golden.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - wanted)
        if any(own in rule.angles for rule, own in seen):
            error = np.abs(np.remainder(error + math.pi, 2.0 * math.pi) - math.pi)
        allowed = tolerance.absolute + tolerance.relative * np.abs(wanted)
        fine = (values == golden) | (np.isnan(got) & np.isnan(wanted))
        if tolerance != _EXACT:  # whole numbers beyond 2**53 are only the same if they are equal
            fine |= error <= np.where(np.isfinite(allowed), allowed, 0.0)
        if fine.all():
            return
        excess = np.where(fine, -1.0, np.nan_to_num(error / allowed, nan=np.inf, posinf=np.inf))
    # where nothing is allowed, several exceed it infinitely: the worst one is farthest off
    worst = int(np.argmax(np.where(excess == excess.max(), np.nan_to_num(error, nan=np.inf), -1.0)))
    path = f"{path}[{worst}]" if indexed else path
    yield Difference(
        path, values[worst].item(), golden[worst].item(), float(error[worst]), float(allowed[worst])
    )


def _image_tolerance(seen: _Seen) -> ImageTolerance | None:
    data = [(rule, f"{path}.data" if path else "data") for rule, path in seen]
    if any(path in rule.ignore for rule, path in data):
        return None
    for rule, path in data:
        name = _longest(rule.images, path)
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
        apart = np.abs(got - wanted)
    apart[(mine == theirs) | (np.isnan(got) & np.isnan(wanted))] = 0.0
    limit = allowed.limit(theirs)
    off = (np.nan_to_num(apart, nan=np.inf, posinf=np.inf) - limit).max(axis=2, initial=-math.inf)
    if (share := float(np.mean(off > 0.0)) if off.size else 0.0) > allowed.share:
        at = np.unravel_index(np.argmax(off), off.shape)
        value, golden_value = (
            f"({', '.join(f'{channel:.6g}' for channel in array[at])})" for array in (mine, theirs)
        )
        where = f"{value} at row {at[0]}, column {at[1]}"
        told = (
            f"{100 * share:.4g} % of {off.size:,} {parts}",
            f"{100 * allowed.share:.4g} %, or any by {allowed.words(theirs)}",
        )
        yield Difference(path, where, golden_value, share, allowed.share, told)


def _pixels(message: Any) -> tuple[NDArray[Any], str]:  # noqa: ANN401
    """[rows, columns, channels] of an image, without padding, and what the first two count."""
    if message.__msgtype__ != _IMAGE:
        return compressed_pixels(message).rgb(), "pixels"
    rows = message.data.reshape(message.height, message.step)
    found = _ENCODING.fullmatch(message.encoding)
    if found is None:
        return rows[:, :, None], "bytes"
    colour, bits, more_bits, kind, count = found.groups()
    channels = int(count) if count else {"rgb": 3, "bgr": 3, "rgba": 4, "bgra": 4}.get(colour, 1)
    order = ">" if message.is_bigendian else "<"
    sample = np.dtype(
        f"{order}{ {'U': 'u', 'S': 'i', 'F': 'f'}[kind or 'U'] }{int(bits or more_bits) // 8}"
    )
    used = rows[:, : message.width * channels * sample.itemsize]
    return (
        np.ascontiguousarray(used).view(sample).reshape(message.height, message.width, channels),
        "pixels",
    )


def _lists(
    values: Sequence[Any], golden: Sequence[Any], path: str, seen: _Seen, rules: Rules
) -> Iterator[Difference]:
    matched = next((rule.matched[own] for rule, own in seen if own in rule.matched), None)
    if matched is not None:
        pairs = _pairs(values, golden, path, matched)
    elif len(values) == len(golden):
        pairs = {index: index for index in range(len(golden))}
    else:
        yield Difference(path, f"{len(values)} elements", f"{len(golden)} elements")
        return
    for index, partner in pairs.items():
        yield from _values(values[index], golden[partner], f"{path}[{index}]", seen, rules)
    if matched is not None:
        for index in sorted(set(range(len(values))) - set(pairs)):
            yield Difference(f"{path}[{index}]", _at(values[index], matched), "none")
        for index in sorted(set(range(len(golden))) - set(pairs.values())):
            yield Difference(f"{path}[{index}]", "none", _at(golden[index], matched))


def _pairs(values: Sequence[Any], golden: Sequence[Any], path: str, rule: Matched) -> dict[int, int]:
    """The golden element of each that has one.

    As many pairs as can be, and then those that are nearest together.
    """
    if not values or not golden:
        return {}
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        msg = f"{path} is matched by position, which needs scipy: `pip install 'torchperf_ros[analysis]'`"
        raise ComparisonError(msg) from error
    a, b = (np.array([_position(item, rule) for item in items]) for items in (values, golden))
    apart = a[:, None, :] - b[None, :, :]
    apart[np.isnan(a)[:, None, :] & np.isnan(b)[None, :, :]] = 0.0
    distance = np.linalg.norm(apart, axis=2)
    keys = [[[_get(item, name) for name in rule.same] for item in items] for items in (values, golden)]
    near = np.array([[mine == other for other in keys[1]] for mine in keys[0]]) & (distance <= rule.within)
    # more than all pairs together: one pair more is worth any distance
    cost = np.where(near, distance, (len(values) + 1) * (rule.within + 1.0))
    return {int(i): int(j) for i, j in zip(*linear_sum_assignment(cost), strict=True) if near[i, j]}


def _position(item: Any, rule: Matched) -> list[float]:  # noqa: ANN401
    at = _get(item, rule.position)
    return [float(getattr(at, axis)) for axis in "xyz" if hasattr(at, axis)]


def _get(item: Any, path: str) -> Any:  # noqa: ANN401
    return functools.reduce(getattr, path.split("."), item)


def _at(item: Any, rule: Matched) -> str:  # noqa: ANN401
    return f"one at ({', '.join(f'{axis:.4g}' for axis in _position(item, rule))})"
