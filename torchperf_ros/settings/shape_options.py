"""How inputs of varying size are run: the parameters of a stage's shape policy, checked."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from torchperf_ros.api.errors import ConfigError

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
        policy: exact (the example's shape and the common ones), bucket (the dynamic dimensions are rounded
            up to a width, padded, run, and cropped back) or dynamic (one engine for the declared ranges).
        bucket_width: sizes are rounded up to multiples of it, but never beyond the declared range.
        common: shapes that are prepared as they are, whatever the policy; one shape per input each.
    """

    policy: str = "exact"
    bucket_width: int = 32
    common: tuple[Shapes, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the worker's setup, a package's manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ShapeOptions":
        """What `as_dict` gave, after JSON has made lists of its tuples."""
        common = tuple(tuple(tuple(shape) for shape in shapes) for shapes in values.get("common", ()))
        return cls(**{**values, "common": common})

    def check_inputs(self, example: Shapes) -> None:
        """Compare the common shapes with the model's inputs.

        Raises:
            ConfigError: another number of inputs or dimensions.
        """
        for shapes in self.common:
            if [len(shape) for shape in shapes] != [len(shape) for shape in example]:
                raise ConfigError(
                    f"parameter common_shapes: {format_shapes(shapes)!r} does not fit the model's inputs;"
                    f" it has to be like {format_shapes(example)!r}"
                )


def parse_shapes(text: str, prefix: str = "") -> Shapes:
    """The shapes in "1x3x256x448" or "1x10x50 1x10", one per input.

    Raises:
        ConfigError: names the text and what is allowed.
    """
    words = text.split()
    if not words or not all(_SHAPE.fullmatch(word) for word in words):
        raise ConfigError(
            f"parameter {prefix}common_shapes: {text!r} is not allowed; it has to be sizes of at least 1"
            " joined by x, one word per input, for example '1x3x256x448' or '1x10x50 1x10'"
        )
    return tuple(tuple(int(size) for size in word.split("x")) for word in words)


def format_shapes(shapes: Sequence[Sequence[int]]) -> str:
    """Shapes as `parse_shapes` reads them; an input without dimensions is "scalar"."""
    return " ".join("x".join(str(size) for size in shape) or "scalar" for shape in shapes)
