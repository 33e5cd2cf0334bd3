"""How a tier is made ready to run: the engine, and what is done to the model before."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

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
