"""How a tier is made ready to run: the engine, and what is done to the model before."""

from dataclasses import asdict, dataclass
from typing import Any

ENGINES = ("eager", "compile", "aoti")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "int8_weight", "int8_dynamic")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
DYNAMIC = ("auto", "always", "never")


@dataclass(frozen=True)
class BuildOptions:
    """One way to run a model; what a package is keyed by and what tuning searches.

    Attributes:
        engine: eager, compile (torch.compile) or aoti (torch.export and an AOTInductor package).
        mode: torch.compile's mode, for engine compile.
        dynamic: whether sizes may vary, for the compiled engines; auto: where the adapter declares dynamic dimensions.
        precision: fp32; tf32 (CUDA matrix products); bf16, fp16 (weights and inputs); int8_weight, int8_dynamic
            (torchao: linear layers' weights, or weights and activations).
        channels_last: memory layout of four-dimensional weights and inputs.
        fold_batch_norm: batch normalisation folded into the convolution before it.
        cuda_graphs: capture and replay CUDA graphs; static shapes, CUDA only.
    """

    engine: str = "eager"
    mode: str = "default"
    dynamic: str = "auto"
    precision: str = "fp32"
    channels_last: bool = False
    fold_batch_norm: bool = False
    cuda_graphs: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON: manifests, the worker's setup."""
        return asdict(self)

    @property
    def label(self) -> str:
        """A short name for tables: only what is not the default."""
        words = [self.engine]
        words += [self.mode] if self.engine == "compile" and self.mode != "default" else []
        words += [{"always": "dynamic", "never": "static"}[self.dynamic]] if self.dynamic != "auto" else []
        words += [self.precision] if self.precision != "fp32" else []
        words += [name for name in ("channels_last", "fold_batch_norm", "cuda_graphs") if getattr(self, name)]
        return " ".join(words)
