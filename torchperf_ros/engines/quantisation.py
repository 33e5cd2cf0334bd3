"""Quantisation to int8.

What is done to a model, and how much of it the compiled graph then really runs in int8.

A compiler that does not know a quantised pattern dequantises and goes on in fp32, without a word. So what
is built is looked at afterwards: the calls in the C++ that AOTInductor has compiled, the nodes of ONNX
Runtime's optimised graph.
"""

import importlib.util
import logging
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import nn

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.engines.parity import Inputs
from torchperf_ros.settings.build_options import INT8_STATIC

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
    if importlib.util.find_spec("torchao") is None:
        return (
            "torchao is not installed: `pip install torchao`, or `pip install"
            " 'torchperf_ros[quantization]'`"
        )
    return ""


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
    config = {"int8_weight": Int8WeightOnlyConfig, "int8_dynamic": Int8DynamicActivationInt8WeightConfig}[
        precision
    ]
    quantize_(
        model, config(set_inductor_config=False)
    )  # it would change the compiler for every other model, too


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
    """How many layers of each kind an ONNX file computes in int8."""
    import onnx

    nodes = onnx.load(str(path), load_external_data=False).graph.node
    return Counter(_NODES[node.op_type] for node in nodes if node.op_type in _NODES)


def why_not_int8(precision: str, there: Counter[str]) -> str:
    """Why a precision has nothing to quantise in a model with these layers; empty: it has."""
    if precision == INT8_STATIC:
        return "" if there.total() else "the model has no convolution and no linear layer"
    static = f"; {INT8_STATIC} takes convolutions, too" if there.total() else ""
    return "" if there[LINEAR] else f"the model has no nn.Linear layer{static}"


def int8_share(there: Counter[str], left: Counter[str], int8: Counter[str]) -> dict[str, dict[str, int]]:
    """By kind of layer, how many the model has, how many are quantised (all but those left), how many run in int8."""
    return {
        kind: {"there": count, "quantised": count - left[kind], "int8": int8[kind]}
        for kind, count in there.items()
    }


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
