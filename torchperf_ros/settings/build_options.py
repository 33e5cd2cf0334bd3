"""How a tier is made ready to run: the engine, what is done to the model before, and inputs of varying size."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

from torchperf_ros.api.errors import AdapterError, ConfigError

# Engines whose models are built ahead of time into a file, a package, and how its name ends.
PACKAGE_SUFFIXES = {"aoti": ".pt2", "onnxruntime": ".onnx", "openvino": ".blob", "tensorrt": ".pt2"}

# Engines that need a library besides torch, and the names under which pip may know it.
DISTRIBUTIONS = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "openvino": ("openvino",),
    "tensorrt": ("torch-tensorrt",),
}

# Eager inside of CUDA graphs, one for each size.
GRAPH = "graph"
ENGINES = ("eager", GRAPH, "compile", *PACKAGE_SUFFIXES)
# In place of an engine: the fastest of those that are installed, measured.
AUTO = "auto"

ENGINE_CHOICES = (AUTO, *ENGINES)
# The engine that takes parts of a model.
OF_PARTS = "compile"

INT8_STATIC = "int8_static"
INT8_PRECISIONS = ("int8_weight", "int8_dynamic", INT8_STATIC)
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", *INT8_PRECISIONS)
# The one that runs int8_static; eager would only compute as if, and no faster.
STATIC_ENGINE = "aoti"
# The mode of torch.compile that captures CUDA graphs, and takes seconds to compile.
GRAPH_MODE = "reduce-overhead"
COMPILE_MODES = ("default", GRAPH_MODE, "max-autotune", "max-autotune-no-cudagraphs")
# What an engine may lose against eager fp32 of the task's metric, of whose best value is 1.
#
# MLPerf Inference takes a quantised detector that keeps 99 % of fp32's mean average precision; this
# is half that loss.
MOST_LOSS: Final = 0.005
_WITHOUT_GRAPHS = {GRAPH_MODE: "default", "max-autotune": "max-autotune-no-cudagraphs"}


def version_of(distribution: str) -> str:
    """The version of an installed distribution, without importing it; "" where it is not installed."""
    import importlib.metadata  # which the node, that reads options too, has no use for at its start

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def installed(distributions: Iterable[str]) -> str:
    """The first of these that is installed, with its version, for example `openvino 2026.4.1`.

    "" where none is.
    """
    return next((f"{name} {version}" for name in distributions if (version := version_of(name))), "")


@dataclass(frozen=True)
class BuildOptions:
    """One way to run a model; what a package is keyed by and what tuning searches.

    Attributes:
        engine: eager, graph (eager in a CUDA graph), compile (torch.compile), one that runs packages, or auto.
        mode: torch.compile's mode, for engine compile.
        dynamic: whether sizes may vary; auto: where the adapter declares dynamic dimensions; never.
        precision: fp32; tf32 (CUDA matrix products); bf16, fp16 (weights and inputs); int8_weight,
            int8_dynamic (torchao: linear layers' weights, or weights and activations); int8_static
            (convolutions and linear layers, activations by ranges that the adapter's own inputs show; CPU,
            `STATIC_ENGINE`).
        channels_last: memory layout of four-dimensional weights and inputs.
        cuda_graphs: what another engine has made is captured, too; static shapes, CUDA only.
        parts: the part of the model that engine compile compiles: paths of modules with commas between; "": the
            whole.
    """

    engine: str = "eager"
    mode: str = "default"
    dynamic: str = "auto"
    precision: str = "fp32"
    channels_last: bool = False
    cuda_graphs: bool = False
    parts: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: manifests, the worker's setup."""
        return asdict(self)

    def as_identity(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "parts"}

    def with_engine(self, engine: str) -> "BuildOptions":
        return replace(self, engine=engine, parts=self.parts if engine == OF_PARTS else "")

    def without_graphs(self) -> "BuildOptions":
        """The same without CUDA graphs, which some modes of torch.compile capture as well."""
        mode = _WITHOUT_GRAPHS.get(self.mode, self.mode) if self.engine == "compile" else self.mode
        engine = "eager" if self.engine == GRAPH else self.engine
        return replace(self, engine=engine, mode=mode, cuda_graphs=False)

    @property
    def is_captured(self) -> bool:
        """Whether CUDA graphs of ours run it; torch.compile captures its own."""
        return self.engine == GRAPH or (self.cuda_graphs and self.engine != OF_PARTS)

    @property
    def label(self) -> str:
        """A short name for tables: only what is not the default."""
        words = [self.engine]
        words += [self.mode] if self.engine == "compile" and self.mode != "default" else []
        words += ["static"] if self.dynamic == "never" else []
        words += [self.precision] if self.precision != "fp32" else []
        words += [name for name in ("channels_last", "cuda_graphs") if getattr(self, name)]
        words += [f"parts {self.parts}"] if self.parts else []
        return " ".join(words)


Shape: TypeAlias = tuple[int, ...]
# One shape per input of a model.
Shapes: TypeAlias = tuple[Shape, ...]

EXACT, BUCKET = "exact", "bucket"
POLICIES = (EXACT, BUCKET, "dynamic")
_WIDEST = 65_536
# Of a tier: each is compiled and warmed up before the first frame, and may keep a buffer.
MOST_SHAPES = 256

_SHAPE = re.compile(r"[1-9][0-9]*(x[1-9][0-9]*)*")


@dataclass(frozen=True)
class ShapeOptions:
    """Which input shapes are prepared, and what is done with the others.

    Attributes:
        policy: exact (the example's shape and the common ones), bucket (the dynamic dimensions are rounded
            up to a width and padded, and the adapter cuts the outputs) or dynamic (one engine for the
            declared ranges).
        bucket_width: sizes are rounded up to multiples of it, but never beyond the declared range.
        common: shapes that are prepared as they are under every policy; one shape per input each.
    """

    policy: str = EXACT
    bucket_width: int = 32
    common: tuple[Shapes, ...] = ()

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


def parse_policy(text: str, prefix: str = "") -> tuple[str, int]:
    """The policy in "exact", "dynamic", "bucket" or "bucket 64", and the width of its buckets.

    Raises:
        ConfigError: names the text and what is allowed.
    """
    policy, _, width = text.partition(" ")
    given = int(width) if policy == BUCKET and re.fullmatch(r"[1-9][0-9]{0,5}", width) else 0
    if policy not in POLICIES or (width and not 1 <= given <= _WIDEST):
        raise ConfigError(
            f"parameter {prefix}shapes: {text!r} is not allowed; it has to be one of: {', '.join(POLICIES)}, or"
            f" bucket WIDTH, a width from 1 to {_WIDEST}, such as bucket 64"
        )
    return policy, given or ShapeOptions.bucket_width


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


# An input's index and one of its dimensions.
Place = tuple[int, int]


@dataclass(frozen=True)
class Axis:
    """A size that varies from `low` to `high`.

    One dimension, in every input that declares it with this range.
    """

    low: int
    high: int
    places: tuple[Place, ...]

    def __str__(self) -> str:
        where = ", ".join(f"dimension {dim} of input {index}" for index, dim in self.places)
        return f"{where} ({self.low} to {self.high})"

    def size_in(self, shapes: Shapes) -> int:
        """Its size in shapes that agree on it."""
        index, dim = self.places[0]
        return shapes[index][dim]


def axes_of(dynamic_dims: Mapping[int, Mapping[int, tuple[int, int]]], example: Shapes) -> tuple[Axis, ...]:
    """The axes that an adapter declares, input index -> {dimension.

    (min, max)}, for example inputs of these shapes.

    Raises:
        AdapterError: no such input or dimension, an empty range, or an example outside of it.
    """
    places: dict[tuple[int, int, int], list[Place]] = {}
    for index, dims in dynamic_dims.items():
        for dim, (low, high) in dims.items():
            if not 0 <= index < len(example) or not -len(example[index]) <= dim < len(example[index]):
                raise AdapterError(
                    f"dynamic_dims: dimension {dim} of input {index} does not exist in"
                    f" {format_shapes(example)!r}"
                )
            size = example[index][dim]
            if not 1 <= low <= size <= high:
                raise AdapterError(
                    f"dynamic_dims: range {low} to {high} of dimension {dim} of input {index}; it has to be"
                    f" at least 1 and hold the example's size, {size}"
                )
            dim %= len(example[index])  # noqa: PLW2901 - counted from the end, as torch allows
            places.setdefault((dim, low, high), []).append((index, dim))
    return tuple(Axis(low, high, tuple(where)) for (_, low, high), where in places.items())


def round_up(size: int, width: int, high: int) -> int:
    """The smallest multiple of `width` that holds `size`, but at most `high`."""
    return min(-(-size // width) * width, high)


def bucket_sizes(low: int, high: int, width: int) -> tuple[int, ...]:
    """What the sizes of a range are rounded up to: 100 to 200 by 32 is 128, 160, 192, 200."""
    return (*range(round_up(low, width, high), high, width), high)


def bucket_shapes(example: Shapes, axes: Sequence[Axis], width: int) -> tuple[Shapes, ...]:
    """Every combination of the axes' buckets, other sizes as in the example.

    A `ConfigError` if they are too many.
    """
    ranges = [(axis.low, axis.high) for axis in axes]
    if (count := bucket_count(ranges, width)) > MOST_SHAPES:
        enough = bucket_width(ranges, MOST_SHAPES)
        raise ConfigError(
            f"parameter shapes: bucket {width} makes {count} buckets of {'; '.join(map(str, axes))}; at most"
            f" {MOST_SHAPES} are prepared: {enough} makes {bucket_count(ranges, enough)}, or use the policy"
            " dynamic"
        )
    every = itertools.product(*(bucket_sizes(axis.low, axis.high, width) for axis in axes))
    return tuple(with_sizes(example, axes, sizes) for sizes in every)


def bucket_count(ranges: Iterable[tuple[int, int]], width: int) -> int:
    # the lengths of ranges, which may be huge, and not of lists
    return math.prod(1 + len(range(round_up(low, width, high), high, width)) for low, high in ranges)


def bucket_width(ranges: Sequence[tuple[int, int]], most: int) -> int:
    """The smallest power of two that makes at most so many buckets of all ranges together."""
    return next(
        width for width in (1 << n for n in itertools.count()) if bucket_count(ranges, width) <= most
    )


def with_sizes(example: Shapes, axes: Sequence[Axis], sizes: Sequence[int]) -> Shapes:
    """The example's shapes with one size per axis."""
    shapes = [list(shape) for shape in example]
    for axis, size in zip(axes, sizes, strict=True):
        for index, dim in axis.places:
            shapes[index][dim] = size
    return tuple(tuple(shape) for shape in shapes)


def within(shapes: Shapes, axes: Sequence[Axis], example: Shapes) -> bool:
    """Whether the shapes are the example's but for the axes, each in its range and the same everywhere."""
    if [len(shape) for shape in shapes] != [len(shape) for shape in example]:
        return False
    sizes = [axis.size_in(shapes) for axis in axes]
    in_range = all(axis.low <= size <= axis.high for axis, size in zip(axes, sizes, strict=True))
    return in_range and with_sizes(example, axes, sizes) == shapes


def bucket_of(shapes: Shapes, axes: Sequence[Axis], width: int) -> Shapes:
    """The bucket of shapes that are `within` the axes."""
    return with_sizes(shapes, axes, [round_up(axis.size_in(shapes), width, axis.high) for axis in axes])


def smallest_in_bucket(bucket: Shapes, axes: Sequence[Axis], width: int) -> Shapes:
    """The smallest shapes that are rounded up to a bucket: those that are padded most."""
    before = [(axis.size_in(bucket) - 1) // width * width for axis in axes]
    return with_sizes(
        bucket, axes, [max(axis.low, size + 1) for axis, size in zip(axes, before, strict=True)]
    )
