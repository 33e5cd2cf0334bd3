"""How two messages of a type are compared: what may differ, by how much, and which elements belong together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import field_types


class RuleError(TorchperfError):
    """A rule names a field that its message type does not have; the message says which, and what there is."""


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
