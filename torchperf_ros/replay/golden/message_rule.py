"""What counts as the same message of a type: rules, and the comparison of two messages by them, field by field."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.config.message_types import field_types
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import TorchperfError

_QUATERNION: Final = "geometry_msgs/msg/Quaternion"
_TIMES: Final = frozenset({"builtin_interfaces/msg/Time", "builtin_interfaces/msg/Duration"})


class RuleError(TorchperfError):
    """A rule names a field that its message type does not have; the message says which, and what there is."""


class ComparisonError(TorchperfError):
    """Messages cannot be compared; the message says what would do."""


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the golden one: `absolute + relative * |golden|`, in the field's unit."""

    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Matched:
    """Elements of a list belong together if they are near each other, whatever their order.

    Attributes:
        position: field of an element with `x`, `y` and, where there is one, `z`; for example `pose.position`.
        within: the farthest that two may be apart, in the unit of the position. One without a partner is a difference.
        same: fields in which two elements have to be equal to belong together.
    """

    position: str
    within: float
    same: tuple[str, ...] = ()


@dataclass(frozen=True)
class MessageRule:
    """What counts as the same message of a type.

    Paths are fields of the type with dots between, without indexes: `poses.pose.position`. A path stands for all that
    is below it. Where a type contains another one that has a rule, too, both count, and the outer one goes first.

    Attributes:
        ignore: fields that may be anything.
        tolerances: by path; the longest one that fits counts, `""` is every floating-point number of the type. Whole
            numbers have to be equal unless a path names them.
        angles: fields in rad that wrap: pi and -pi are the same.
        matched: lists whose elements are matched by position; others are compared in their order.
    """

    ignore: tuple[str, ...] = ()
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    angles: tuple[str, ...] = ()
    matched: Mapping[str, Matched] = field(default_factory=dict)


Rules = Mapping[str, MessageRule]
"""Rules by message type, for example `nav_msgs/msg/Path`."""

USUAL: Final = Tolerance(absolute=1e-3, relative=1e-3)
"""For floating-point numbers that no rule names: a millimetre, or a thousandth; see `docs/testing.md` for why."""

BUILT_IN: Final[Rules] = MappingProxyType(
    {
        "visualization_msgs/msg/MarkerArray": MessageRule(
            matched={"markers": Matched("pose.position", within=0.5, same=("action", "type"))}, ignore=("markers.id",)
        ),
        "visualization_msgs/msg/Marker": MessageRule(ignore=("lifetime",)),  # how long RViz shows it
        "vision_msgs/msg/Detection2DArray": MessageRule(
            matched={"detections": Matched("bbox.center.position", within=20.0)},  # pixels
            tolerances={"detections.bbox": Tolerance(absolute=0.1, relative=1e-3)},
        ),
        "vision_msgs/msg/Detection3DArray": MessageRule(
            matched={"detections": Matched("bbox.center.position", within=0.5)}
        ),
        "vision_msgs/msg/Pose2D": MessageRule(angles=("theta",)),
        "geometry_msgs/msg/Pose2D": MessageRule(angles=("theta",)),
    }
)
"""The rules that count unless others are given for the same type; types that are not here are compared by `USUAL`."""


def check_rules(rules: Rules) -> None:
    """See that rules name fields that are there: a misspelt one would let pass what it should not.

    Raises:
        RuleError: a field is not there.
        UnknownMessageType: a type is not known.
    """
    for type_name, rule in rules.items():
        for path in [*rule.ignore, *filter(None, rule.tolerances), *rule.angles]:
            _type_of(type_name, path, type_name)
        for path, matched in rule.matched.items():
            element = _type_of(type_name, path, type_name)
            for inner in (matched.position, *matched.same):
                _type_of(element, inner, type_name)


def _type_of(inside: str, path: str, rule: str) -> str:
    """The message type of a field, "" for a plain value."""
    for name in path.split("."):
        fields = field_types(inside) if inside else {}
        if name not in fields:
            has = f"{inside} has: {', '.join(fields)}" if inside else "what is before it is a plain value"
            msg = f"rule for {rule}: {path!r} is no field, as there is no {name!r}; {has}"
            raise RuleError(msg)
        inside = fields[name]
    return inside


_EXACT: Final = Tolerance()
_NO_RULE: Final = MessageRule()


@dataclass(frozen=True)
class Difference:
    """A field in which a message is not as the golden one.

    Attributes:
        path: with indexes, for example `markers[3].pose.position.x`.
        value, golden: what is there, and what should be; `none` for a part that only one of them has.
        error: how far they are apart, in the field's unit, s for a time; NaN for what has no distance.
        allowed: how far they may be apart; NaN likewise.
    """

    path: str
    value: object
    golden: object
    error: float = math.nan
    allowed: float = math.nan

    @property
    def field(self) -> str:
        """The path without the numbers of elements, for example `markers[].pose.position.x`."""
        return re.sub(r"\[\d+]", "[]", self.path)


@dataclass(frozen=True)
class _Place:
    """Where in a message: its path, and the same seen from each rule on the way, the outermost rule first."""

    path: str
    seen_from: tuple[tuple[MessageRule, str], ...]

    def field(self, name: str) -> "_Place":
        def down(path: str) -> str:
            return f"{path}.{name}" if path else name

        return _Place(down(self.path), tuple((rule, down(path)) for rule, path in self.seen_from))

    def element(self, index: int) -> "_Place":
        return _Place(f"{self.path}[{index}]", self.seen_from)

    def within(self, rule: MessageRule) -> "_Place":
        return _Place(self.path, (*self.seen_from, (rule, "")))

    @property
    def ignored(self) -> bool:
        return any(path in rule.ignore for rule, path in self.seen_from)

    @property
    def wraps(self) -> bool:
        return any(path in rule.angles for rule, path in self.seen_from)

    @property
    def matched(self) -> Matched | None:
        return next((rule.matched[path] for rule, path in self.seen_from if path in rule.matched), None)

    def tolerance(self, whole: bool) -> Tolerance:
        for rule, path in self.seen_from:
            named = [name for name in rule.tolerances if name and f"{path}.".startswith(f"{name}.")]
            if named:
                return rule.tolerances[max(named, key=len)]
            if "" in rule.tolerances and not whole:
                return rule.tolerances[""]
        return _EXACT if whole else USUAL


def compare_messages(message: Any, golden: Any, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401 - any message
    """Where a message is not as the golden one of the same type; of each array of numbers only the worst element.

    NaN equals NaN. A quaternion and its negative are the same rotation.

    Raises:
        ComparisonError: elements are to be matched, and scipy is not installed.
    """
    yield from _messages(message, golden, _Place("", ()), rules)


def _messages(message: Any, golden: Any, place: _Place, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    kind = golden.__msgtype__
    place = place.within(rules.get(kind, _NO_RULE))
    sign = -1.0 if kind == _QUATERNION and _dot(message, golden) < 0.0 else 1.0
    found: list[Difference] = []
    for name in _fields(golden):
        value, wanted = getattr(message, name), getattr(golden, name)
        found += _values(value * sign if sign < 0 else value, wanted, place.field(name), rules)
    yield from _time(message, golden, place, found) if found and kind in _TIMES else found


def _time(message: Any, golden: Any, place: _Place, found: Sequence[Difference]) -> Iterator[Difference]:  # noqa: ANN401
    """One difference in s for those of a time's two fields, which both differ where a second ends in between."""
    mine, theirs = (item.sec * NS_PER_S + item.nanosec for item in (message, golden))
    allowed = sum(part.allowed / (NS_PER_S if part.path.endswith("nanosec") else 1) for part in found)
    error = abs(mine - theirs) / NS_PER_S
    if error > allowed:
        yield Difference(place.path, _seconds(mine), _seconds(theirs), error, allowed)


def _seconds(ns: int) -> str:
    whole, rest = divmod(abs(ns), NS_PER_S)
    return f"{'-' if ns < 0 else ''}{whole}.{rest:09d}"


def _fields(message: Any) -> list[str]:  # noqa: ANN401
    return [entry.name for entry in dataclasses.fields(message) if not entry.name.startswith("__")]


def _dot(a: Any, b: Any) -> float:  # noqa: ANN401
    return float(a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w)


def _values(value: Any, golden: Any, place: _Place, rules: Rules) -> Iterator[Difference]:  # noqa: ANN401
    if place.ignored:
        return
    if hasattr(golden, "__msgtype__"):
        yield from _messages(value, golden, place, rules)
    elif isinstance(golden, np.ndarray):
        yield from _arrays(value, golden, place)
    elif isinstance(golden, list):
        yield from _lists(value, golden, place, rules)
    elif isinstance(golden, (bool, str)):
        if value != golden:
            yield Difference(place.path, value, golden)
    elif value != golden:
        for found in _arrays(np.asarray([value]), np.asarray([golden]), place):
            yield dataclasses.replace(found, path=place.path)


def _arrays(values: NDArray[Any], golden: NDArray[Any], place: _Place) -> Iterator[Difference]:
    """The worst element, by how many times more it is off than allowed."""
    if len(values) != len(golden):
        yield Difference(place.path, f"{len(values)} elements", f"{len(golden)} elements")
        return
    tolerance = place.tolerance(whole=golden.dtype.kind != "f")
    got, wanted = values.astype(np.float64), golden.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got - wanted)
        if place.wraps:
            error = np.abs(np.remainder(error + math.pi, 2.0 * math.pi) - math.pi)
        allowed = tolerance.absolute + tolerance.relative * np.abs(wanted)
        fine = (values == golden) | (np.isnan(got) & np.isnan(wanted))
        if tolerance != _EXACT:  # whole numbers beyond 2**53 are only the same if they are equal
            fine |= error <= np.where(np.isfinite(allowed), allowed, 0.0)
        if fine.all():
            return
        excess = np.where(fine, -1.0, np.nan_to_num(error / allowed, nan=np.inf))
    worst = int(np.argmax(excess))
    if np.isinf(excess[worst]):  # nothing is allowed: the one that is farthest off
        worst = int(np.argmax(np.where(np.isinf(excess), np.nan_to_num(error, nan=np.inf), -1.0)))
    path = place.element(worst).path
    yield Difference(path, values[worst].item(), golden[worst].item(), float(error[worst]), float(allowed[worst]))


def _lists(values: Sequence[Any], golden: Sequence[Any], place: _Place, rules: Rules) -> Iterator[Difference]:
    if place.matched is None:
        if len(values) != len(golden):
            yield Difference(place.path, f"{len(values)} elements", f"{len(golden)} elements")
            return
        pairs = [(index, index) for index in range(len(golden))]
    else:
        pairs = _pairs(values, golden, place, place.matched)
    mine, theirs = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    for index, partner in pairs:
        yield from _values(values[index], golden[partner], place.element(index), rules)
    if place.matched is not None:
        for index in sorted(set(range(len(values))) - mine):
            yield Difference(place.element(index).path, _at(values[index], place.matched), "none")
        for index in sorted(set(range(len(golden))) - theirs):
            yield Difference(place.element(index).path, "none", _at(golden[index], place.matched))


def _pairs(values: Sequence[Any], golden: Sequence[Any], place: _Place, rule: Matched) -> list[tuple[int, int]]:
    """Which value belongs to which golden one: as many pairs as can be, and then those that are nearest together."""
    if not values or not golden:
        return []
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        msg = f"{place.path} is matched by position, which needs scipy: `pip install 'torchperf_ros[analysis]'`"
        raise ComparisonError(msg) from error
    a, b = (np.array([_position(item, rule) for item in items]) for items in (values, golden))
    apart = a[:, None, :] - b[None, :, :]
    apart[np.isnan(a)[:, None, :] & np.isnan(b)[None, :, :]] = 0.0
    distance = np.linalg.norm(apart, axis=2)
    keys = [[[_get(item, name) for name in rule.same] for item in items] for items in (values, golden)]
    alike = np.array([[mine == other for other in keys[1]] for mine in keys[0]])
    near = alike & (distance <= rule.within)
    # more than all pairs together: one pair more is worth any distance
    cost = np.where(near, distance, (len(values) + 1) * (rule.within + 1.0))
    return [(int(i), int(j)) for i, j in zip(*linear_sum_assignment(cost), strict=True) if near[i, j]]


def _position(item: Any, rule: Matched) -> list[float]:  # noqa: ANN401
    at = _get(item, rule.position)
    return [float(getattr(at, axis)) for axis in "xyz" if hasattr(at, axis)]


def _get(item: Any, path: str) -> Any:  # noqa: ANN401
    return functools.reduce(getattr, path.split("."), item)


def _at(item: Any, rule: Matched) -> str:  # noqa: ANN401
    return f"one at ({', '.join(f'{axis:.4g}' for axis in _position(item, rule))})"
