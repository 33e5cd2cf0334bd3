"""What is done to a tier's model before an engine runs it: precision, memory layout, folded batch normalisation.

Nothing here says whether the result is still good: that is measured, see `parity`.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.core.build_options import PRECISIONS, BuildOptions
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.worker import batch_norm_fold, int8_weights

_CPU_INFO: Final = Path("/proc/cpuinfo")
_HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_INSTRUCTIONS: Final = {
    # x86 and Arm, as Linux names them
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
_TF32_CAPABILITY: Final = (8, 0)  # Ampere, the first with tf32 (CUDA programming guide, compute capabilities)
_IMAGE_RANK: Final = 4


def transform(model: nn.Module, options: BuildOptions, device: torch.device) -> nn.Module:
    """The model as the options want it, for the same inputs and with outputs of the same types.

    The model itself stays as it is, as the reference; only what is changed is a copy, and if nothing is, the very same
    object comes back. The result has the model's own signature (inputs are cast and laid out by a hook before
    `forward`, outputs cast back by one after it), so it is exported and compiled like the model. Engine, sizes
    and CUDA graphs are the engine's to do, and tf32 is a matter of the process, see `matrix_precision`.

    Args:
        model: in eval mode, as the adapter built it.
        options: precision, channels_last and fold_batch_norm are read.
        device: where it will run.

    Raises:
        ConfigError: an unknown precision, or one that needs torchao where that is not installed.
    """
    if options.precision not in PRECISIONS:
        msg = f"parameter precision: {options.precision!r} is not allowed; it has to be {', '.join(PRECISIONS)}"
        raise ConfigError(msg)
    fold = options.fold_batch_norm and bool(batch_norm_fold.foldable_pairs(model))
    int8 = options.precision in int8_weights.INT8_PRECISIONS and _has_linear(model)
    half = _HALF.get(options.precision)
    half = half if half not in _float_types(model) and _float_types(model) else None
    images = options.channels_last and not _why_not_channels_last(model)
    if not (fold or int8 or half or images):
        return model.to(device)
    changed = copy.deepcopy(model)
    if fold:
        batch_norm_fold.fold(changed)
    if int8:
        int8_weights.quantize(changed, options.precision)
    if half or images:
        _convert(changed, half, images=images)
    return changed.to(device)


def applies(model: nn.Module, options: BuildOptions, device: torch.device) -> str:
    """Why the options change nothing here, or nothing for the better; empty: they apply.

    Args:
        model: in eval mode, as the adapter built it.
        options: what is asked about; the first reason counts.
        device: where it would run.
    """
    reasons = [_why_not_precision(model, options.precision, device)]
    if options.channels_last:
        reasons.append(_why_not_channels_last(model))
    if options.fold_batch_norm and not batch_norm_fold.foldable_pairs(model):
        reasons.append("no convolution followed by batch normalisation")
    if options.cuda_graphs and device.type != "cuda":
        reasons.append("CUDA only")
    return next(filter(None, reasons), "")


@contextmanager
def matrix_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Matrix products and convolutions of fp32 tensors on CUDA: in tf32 for tf32, otherwise in fp32 proper.

    A setting of the process, and by torch's own default different for the two (products fp32, convolutions tf32),
    so the reference and each tier run and compile inside of this. On the CPU it does nothing.
    """
    if device.type != "cuda":
        yield
        return
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True)
class _CastInputs:
    """Hook before `forward`: floating inputs to the model's type, images to its layout."""

    dtype: torch.dtype | None
    images: bool

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(pytree.tree_map_only(torch.Tensor, self._cast, value) for value in inputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if self.images and tensor.dim() == _IMAGE_RANK:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor


@dataclass(frozen=True)
class _CastOutputs:
    """Hook after `forward`: back to the type and, as adapters may `view` them, to the layout that they had."""

    reduced: torch.dtype | None
    original: torch.dtype
    images: bool

    def __call__(self, model: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> Any:  # noqa: ANN401
        return pytree.tree_map_only(torch.Tensor, self._cast, outputs)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.reduced is not None and tensor.dtype is self.reduced:
            tensor = tensor.to(self.original)
        return tensor.contiguous() if self.images and tensor.dim() == _IMAGE_RANK else tensor


def _convert(model: nn.Module, half: torch.dtype | None, *, images: bool) -> None:
    original = next(iter(_float_types(model)), torch.float32)
    if half:
        model.to(half)
    if images:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's overloads
    model.register_forward_pre_hook(_CastInputs(half, images))
    model.register_forward_hook(_CastOutputs(half, original, images))


def _float_types(model: nn.Module) -> dict[torch.dtype, None]:
    """Floating types of the weights, in order of appearance."""
    return {parameter.dtype: None for parameter in model.parameters() if parameter.is_floating_point()}


def _has_linear(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Linear) for module in model.modules())


def _why_not_channels_last(model: nn.Module) -> str:
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    if not convolutions:
        return "no two-dimensional convolution"
    weights = [m.weight for m in convolutions if not m.weight.is_contiguous()]  # those of 1x1 are as good as both
    if weights and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
        return "the model does so itself"
    return ""


def _why_not_precision(model: nn.Module, precision: str, device: torch.device) -> str:
    if precision == "tf32":
        if device.type != "cuda":
            return "CUDA only"
        return "" if torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY else "this GPU has no tf32"
    if precision in int8_weights.INT8_PRECISIONS:
        return int8_weights.missing() if _has_linear(model) else "no nn.Linear layer"
    return _why_not_half(model, precision, device) if precision in _HALF else ""


def _why_not_half(model: nn.Module, precision: str, device: torch.device) -> str:
    if not _float_types(model):
        return "no floating-point weights"
    if _HALF[precision] in _float_types(model):
        return f"the model is {precision} already"
    if device.type == "cuda":
        slow = precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return "this GPU has no bf16 instructions; it would run, but slowly" if slow else ""
    known = _CPU_INSTRUCTIONS[precision]
    if cpu_flags().isdisjoint(known):
        return f"this CPU has no {precision} instructions ({' / '.join(known)}); it would run, but slowly"
    return ""


def cpu_flags() -> frozenset[str]:
    """What `/proc/cpuinfo` lists for the first processor: `flags` on x86, `Features` on Arm."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(found, "").split())
