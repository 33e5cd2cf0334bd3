"""How inputs of varying size are run: the parameters of a stage's shape policy, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from torchperf_ros.frame.errors import ConfigError

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = tuple[Shape, ...]
"""One shape per input of a model."""

POLICIES = ("exact", "bucket", "dynamic")
MOST_SHAPES = 256
"""Of a tier: each is compiled and warmed up before the first frame, and may keep a buffer."""

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


@dataclass(frozen=True)
class ShapeOptions:
    """Which input shapes are prepared, and what is done with the others.

    Attributes:
        policy: exact (the example's shape and the common ones), bucket (the dynamic dimensions are rounded up to a
            width, padded, run, and cropped back) or dynamic (one engine for the declared ranges).
        bucket_width: sizes are rounded up to multiples of it, but never beyond the declared range.
        common: shapes that are prepared as they are, whatever the policy; one shape per input each.
        max_batch: a larger batch is run in chunks of at most this many; 0: never.
    """

    policy: str = "exact"
    bucket_width: int = 32
    common: tuple[Shapes, ...] = ()
    max_batch: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: names the value and what is allowed.
        """
        wrong = ""
        if self.policy not in POLICIES:
            wrong = f"shapes: {self.policy!r} is not allowed; it has to be one of: {', '.join(POLICIES)}"
        elif type(self.bucket_width) is not int or self.bucket_width < 1:
            wrong = f"bucket_width: {self.bucket_width!r} is not allowed; it has to be an int of at least 1"
        elif type(self.max_batch) is not int or self.max_batch < 0:
            wrong = f"max_batch: {self.max_batch!r} is not allowed; it has to be an int of at least 0 (0: no limit)"
        elif len(self.common) > MOST_SHAPES:
            wrong = f"common_shapes: {len(self.common)} shapes; at most {MOST_SHAPES} are prepared"
        for shapes in self.common:
            if any(type(size) is not int or size < 1 for shape in shapes for size in shape):
                wrong = f"common_shapes: {format_shapes(shapes)!r} is not allowed; sizes are ints of at least 1"
        if wrong:
            msg = f"parameter {wrong}"
            raise ConfigError(msg)

    @classmethod
    def parse(
        cls, policy: str, bucket_width: int, common_shapes: Sequence[str], max_batch: int, prefix: str = ""
    ) -> "ShapeOptions":
        """From the values of the parameters `shapes`, `bucket_width`, `common_shapes` and `max_batch`.

        Args:
            policy: see the class.
            bucket_width: see the class.
            common_shapes: each "1x3x256x448"; several inputs are separated by spaces; [''] is none.
            max_batch: see the class.
            prefix: of the parameters' names in messages, for example "perception.".

        Raises:
            ConfigError: names the parameter, the value, and what is allowed.
        """
        common = tuple(parse_shapes(text, prefix) for text in common_shapes if text.strip())
        try:
            return cls(policy, bucket_width, common, max_batch)
        except ConfigError as error:
            raise ConfigError(str(error).replace("parameter ", f"parameter {prefix}", 1)) from None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the worker's setup, a package's manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ShapeOptions":
        """What `as_dict` gave, after JSON has made lists of its tuples.

        Raises:
            ConfigError: a value that is not allowed, or a name that is none of the attributes.
        """
        unknown = sorted(set(values) - {"policy", "bucket_width", "common", "max_batch"})
        if unknown:
            msg = f"shape options {', '.join(unknown)}: unknown; allowed: policy, bucket_width, common, max_batch"
            raise ConfigError(msg)
        common = tuple(tuple(tuple(shape) for shape in shapes) for shapes in values.get("common", ()))
        return cls(**{**values, "common": common})

    def check_inputs(self, example: Shapes, prefix: str = "") -> None:
        """Compare the common shapes with the model's inputs.

        Raises:
            ConfigError: another number of inputs or dimensions.
        """
        for shapes in self.common:
            if [len(shape) for shape in shapes] != [len(shape) for shape in example]:
                msg = (
                    f"parameter {prefix}common_shapes: {format_shapes(shapes)!r} does not fit the model's inputs;"
                    f" it has to be like {format_shapes(example)!r}"
                )
                raise ConfigError(msg)


def parse_shapes(text: str, prefix: str = "") -> Shapes:
    """The shapes in "1x3x256x448" or "1x10x50 1x10", one per input.

    Raises:
        ConfigError: names the text and what is allowed.
    """
    words = text.split()
    if not words or not all(_SHAPE.fullmatch(word) for word in words):
        msg = (
            f"parameter {prefix}common_shapes: {text!r} is not allowed; it has to be sizes of at least 1 joined by x,"
            " one word per input, for example '1x3x256x448' or '1x10x50 1x10'"
        )
        raise ConfigError(msg)
    return tuple(tuple(int(size) for size in word.split("x")) for word in words)


def format_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as `parse_shapes` reads them; an input without dimensions is "scalar"."""
    return " ".join("x".join(str(size) for size in shape) or "scalar" for shape in shapes)
