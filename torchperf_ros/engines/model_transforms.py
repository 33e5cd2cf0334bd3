"""What is done to a tier's model before an engine runs it: precision and memory layout.

Whether the result is still good is measured, see `parity`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.parity import Inputs
from torchperf_ros.engines.quantisation import quantise_linear, why_no_int8
from torchperf_ros.settings.build_options import INT8_PRECISIONS, INT8_STATIC, PRECISIONS, BuildOptions

_CPU_INFO: Final = Path("/proc/cpuinfo")
_HALF: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_INSTRUCTIONS: Final = {
    # x86 and Arm, as Linux names them
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "asimdhp"),
}
_TF32_CAPABILITY: Final = (
    8,
    0,
)  # Ampere, the first with tf32 (CUDA programming guide, compute capabilities)
_IMAGE_RANK: Final = 4


def transform(model: nn.Module, options: BuildOptions, device: torch.device, example: Inputs) -> nn.Module:
    """The model as the options want it, for the same inputs and with outputs of the same types.

    In another floating-point type, a copy of the model answers the example inputs once: that shows its own
    types.

    The model itself stays as it is, as the reference; only what is changed is a copy, and if nothing is,
    the very same object comes back. The result has the model's own signature (inputs are cast and laid out
    by a hook before `forward`, outputs cast back by one after it), so it is exported and compiled like the
    model. Of the options precision and channels_last are read; tf32 is a matter of the process, see
    `matrix_precision`, and int8_static of the engines that have it.

    Raises:
        ConfigError: an unknown precision, or one that needs torchao where that is not installed.
    """
    if options.precision not in PRECISIONS:
        raise ConfigError(
            f"parameter precision: {options.precision!r} is not allowed; it has to be"
            f" {', '.join(PRECISIONS)}"
        )
    int8 = options.precision in {*INT8_PRECISIONS} - {INT8_STATIC} and _has(model, nn.Linear)
    half = _HALF.get(options.precision)
    half = half if half not in _float_types(model) and _float_types(model) else None
    images = options.channels_last and not _why_not_channels_last(model)
    if not (int8 or half or images):
        return _moved(model, device)
    changed = copy.deepcopy(model)
    if int8:
        quantise_linear(changed, options.precision)
    if half or images:
        _convert(changed, half, _output_types(model, example) if half else {}, images=images)
    return _moved(changed, device)


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on the device.

    Where all of it is there, untouched: exported weights in int8 cannot be moved at all.
    """
    there = all(tensor.device == device for tensor in chain(model.parameters(), model.buffers()))
    return model if there else model.to(device)


def applies(model: nn.Module, options: BuildOptions, device: torch.device) -> str:
    """The first reason why the options change nothing here, or nothing for the better.

    Empty: they apply.
    """
    reasons = [_why_not_precision(model, options.precision, device)]
    if options.channels_last:
        reasons.append(_why_not_channels_last(model))
    if options.cuda_graphs and device.type != "cuda":
        reasons.append("CUDA only")
    return next(filter(None, reasons), "")


@contextmanager
def matrix_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Matrix products and convolutions of fp32 tensors on CUDA: in tf32 for tf32, otherwise in fp32 proper.

    A setting of the process, and by torch's own default different for the two (products fp32, convolutions
    tf32), so the reference and each tier run and compile inside of this. On the CPU it does nothing.
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


def in_precision(call: Callable[..., Any], precision: str, device: torch.device) -> Callable[..., Any]:
    """The call inside of `matrix_precision`; on the CPU the very same, whose time nothing adds to."""
    return matrix_precision(precision, device)(call) if device.type == "cuda" else call


def _convert(
    model: nn.Module, half: torch.dtype | None, types: dict[int, torch.dtype], *, images: bool
) -> None:
    """Cast inputs to the model's type and images to its layout before `forward`, and outputs back after it.

    Outputs get the layout that they had, too, as adapters may `view` them. `types` are theirs, by place in
    the nest; an output that the example did not have gets the type of the weights.
    """
    weights = next(iter(_float_types(model)), torch.float32)
    if half:
        model.to(half)
    if images:
        # missing in torch's overloads
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def cast_input(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.to(half) if half and tensor.is_floating_point() else tensor
        laid_out = images and tensor.dim() == _IMAGE_RANK
        return tensor.contiguous(memory_format=torch.channels_last) if laid_out else tensor

    def cast_output(index: int, leaf: Any) -> Any:  # noqa: ANN401 - a model may return anything
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = leaf.to(types.get(index, weights)) if half and leaf.is_floating_point() else leaf
        return tensor.contiguous() if images and tensor.dim() == _IMAGE_RANK else tensor

    def cast_outputs(_: nn.Module, __: Any, outputs: Any) -> Any:  # noqa: ANN401
        leaves, nest = pytree.tree_flatten(outputs)
        return pytree.tree_unflatten([cast_output(*place) for place in enumerate(leaves)], nest)

    model.register_forward_pre_hook(
        lambda _, inputs: pytree.tree_map_only(torch.Tensor, cast_input, inputs)
    )
    model.register_forward_hook(cast_outputs)


def _output_types(model: nn.Module, example: Inputs) -> dict[int, torch.dtype]:
    """The types of the model's output tensors by place in their nest.

    A model may change itself and its inputs.
    """
    with torch.inference_mode():
        outputs = copy.deepcopy(model)(*(tensor.clone() for tensor in example))
    leaves = enumerate(pytree.tree_leaves(outputs))
    return {index: leaf.dtype for index, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _float_types(model: nn.Module) -> dict[torch.dtype, None]:
    return {parameter.dtype: None for parameter in model.parameters() if parameter.is_floating_point()}


def _has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def _why_not_channels_last(model: nn.Module) -> str:
    convolutions = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    if not convolutions:
        return "no two-dimensional convolution"
    # those of 1x1 are as good as both
    weights = [m.weight for m in convolutions if not m.weight.is_contiguous()]
    if weights and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights):
        return "the model does so itself"
    return ""


def _why_not_precision(model: nn.Module, precision: str, device: torch.device) -> str:
    if precision == "tf32":
        has = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY
        return "" if has else "this GPU has no tf32" if device.type == "cuda" else "CUDA only"
    if precision in INT8_PRECISIONS:
        static = precision == INT8_STATIC
        kinds, what = ((nn.Conv1d, nn.Conv2d), " and no convolution") if static else ((), "")
        layers = why_no_int8() if _has(model, nn.Linear, *kinds) else f"no nn.Linear layer{what}"
        return "CPU only" if static and device.type != "cpu" else layers
    if precision not in _HALF or _HALF[precision] in _float_types(model):
        return f"the model is {precision} already" if precision in _HALF else ""
    if not _float_types(model):
        return "no floating-point weights"
    return why_slow(precision, device)


def why_slow(precision: str, device: torch.device) -> str:
    """Why bf16 or fp16 would run, but slowly: the device has no instructions for it; "" where it has."""
    if device.type == "cuda":
        slow = precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False)
        return "this GPU has no bf16 instructions; it would run, but slowly" if slow else ""
    known = _CPU_INSTRUCTIONS[precision]
    slow = cpu_flags().isdisjoint(known)
    return (
        f"this CPU has no {precision} instructions ({' / '.join(known)}); it would run, but slowly"
        if slow
        else ""
    )


def cpu_flags() -> frozenset[str]:
    """What `/proc/cpuinfo` lists for the first processor: `flags` on x86, `Features` on Arm."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(found, "").split())
