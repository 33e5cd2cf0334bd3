"""What is done to a tier's model before an engine runs it: precision, memory layout, quantisation to int8.

Whether the result is still good is measured, see `parity`. A compiler that does not know a quantised pattern
dequantises and goes on in fp32, in silence. So what is built is looked at afterwards: the calls in the C++ that
AOTInductor has compiled, the nodes of ONNX Runtime's optimised graph.
"""

import copy
import importlib.util
import logging
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.parity import Inputs
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
    there = all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
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
    # Weights of 1x1 are as good as both.
    weights = [m.weight for m in convolutions if not m.weight.is_contiguous()]
    there = weights and all(one.is_contiguous(memory_format=torch.channels_last) for one in weights)
    return "the model does so itself" if there else ""


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
    why = f"this CPU has no {precision} instructions ({' / '.join(known)}); it would run, but slowly"
    return why if cpu_flags().isdisjoint(known) else ""


def cpu_flags() -> frozenset[str]:
    """What `/proc/cpuinfo` lists for the first processor: `flags` on x86, `Features` on Arm."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(found, "").split())


CONVOLUTION, LINEAR = "convolutions", "linear layers"
# Operators of an exported graph, and of which kind of layer they are.
_LAYERS: Final = {
    **dict.fromkeys((f"conv{kind}" for kind in ("1d", "2d", "3d", "olution")), CONVOLUTION),
    **dict.fromkeys((f"conv_transpose{size}d" for size in (1, 2, 3)), CONVOLUTION),
    "linear": LINEAR,
}

_KERNELS: Final = {"qconv": CONVOLUTION, "qlinear": LINEAR, "int_mm": LINEAR, "weight_int8pack_mm": LINEAR}
_KERNEL: Final = re.compile(rf"\baoti_torch_[a-z]+__({'|'.join(_KERNELS)})\w*\(")  # aoti_torch/c/shim_cpu.h
# Operators of ONNX and of ONNX Runtime's own that compute in int8.
_NODES: Final = {
    **dict.fromkeys(("QLinearConv", "ConvInteger"), CONVOLUTION),
    **dict.fromkeys(
        ("QLinearMatMul", "QGemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"), LINEAR
    ),
}


def why_no_int8() -> str:
    """Why torchao's int8 cannot be used here, and what to do; empty where it is installed."""
    install = "`pip install torchao`, or `pip install 'torchperf_ros[quantization]'`"
    return f"torchao is not installed: {install}" if importlib.util.find_spec("torchao") is None else ""


def quantise_linear(model: nn.Module, precision: str) -> None:
    """Make the weights of its `nn.Linear` layers int8, one scale per output, in place.

    int8_weight multiplies in the input's type; int8_dynamic rounds inputs to int8, too, with a scale per
    row.
    """
    _check_torchao(precision)
    with quiet_log("torchao", "torch.utils._pytree"):  # it warns of kernels for other machines
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            quantize_,
        )
    kinds = {"int8_weight": Int8WeightOnlyConfig, "int8_dynamic": Int8DynamicActivationInt8WeightConfig}
    # Otherwise it would change the compiler for every other model, too.
    quantize_(model, kinds[precision](set_inductor_config=False))


def quantise_static(graph: torch.fx.GraphModule, calibration: Sequence[Inputs]) -> torch.fx.GraphModule:
    """An exported graph with int8 convolutions and linear layers, weights by channel, activations by tensor.

    The ranges of activations are those that the calibration inputs give (a histogram's, by the least
    squared error). Other products stay as they are: torchao would quantise them, too, those of coordinates
    among them.
    """
    _check_torchao(INT8_STATIC)
    from torch._inductor import config as inductor

    before = inductor.pre_grad_custom_pass
    with quiet_log("torchao", "torch.utils._pytree"):
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    inductor.pre_grad_custom_pass = before  # for attention; it would run for every other model, too
    config, quantizer = x86.get_default_x86_inductor_quantization_config(), x86.X86InductorQuantizer()
    quantizer.set_module_type_qconfig(nn.Conv2d, config).set_module_type_qconfig(nn.Linear, config)
    quantizer.set_function_type_qconfig(nn.functional.conv1d, config)
    with warnings.catch_warnings(), torch.no_grad():  # of torch, about how it is used
        warnings.simplefilter("ignore")
        prepared = prepare_pt2e(graph, quantizer)
        for inputs in calibration:
            prepared(*inputs)
        converted: torch.fx.GraphModule = convert_pt2e(prepared)
    return converted


def layers_of(graph: torch.fx.Graph) -> Counter[str]:
    """How many convolutions and linear layers an exported graph has that are not quantised, by kind."""
    found: Counter[str] = Counter()
    for node in graph.nodes:
        kind = _LAYERS.get(str(node.target).removeprefix("aten.").partition(".")[0])
        if kind and not str(getattr(node.args[1], "target", "")).startswith("quantized_decomposed."):
            found[kind] += 1
    return found


def int8_in_package(path: Path) -> Counter[str]:
    """How many layers of each kind a `.pt2` package runs in int8: the kernels that its C++ calls."""
    found: Counter[str] = Counter()
    with zipfile.ZipFile(path) as package:
        for name in package.namelist():
            if name.endswith(".cpp"):
                found.update(_KERNELS[kernel] for kernel in _KERNEL.findall(package.read(name).decode()))
    return found


def int8_in_onnx(path: Path) -> Counter[str]:
    import onnx

    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return Counter(_NODES[node.op_type] for node in nodes if node.op_type in _NODES)


def why_not_int8(precision: str, there: Counter[str]) -> str:
    """Why a precision has nothing to quantise in a model with these layers; empty: it has."""
    if precision == INT8_STATIC:
        return "" if there.total() else "the model has no convolution and no linear layer"
    static = f"; {INT8_STATIC} takes convolutions, too" if there.total() else ""
    return "" if there[LINEAR] else f"the model has no nn.Linear layer{static}"


def _check_torchao(precision: str) -> None:
    if reason := why_no_int8():
        raise ConfigError(f"parameter precision: {precision!r} cannot be used: {reason}")


@contextmanager
def quiet_log(*names: str) -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
