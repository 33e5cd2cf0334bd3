"""Linear layers with int8 weights, by torchao: the one place that imports it."""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchperf_ros.core.errors import ConfigError

INT8_PRECISIONS = ("int8_weight", "int8_dynamic")


def missing() -> str:
    """Why int8 cannot be used here, and what to do; empty where torchao is installed."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed: `pip install torchao`, or `pip install 'torchperf_ros[quantization]'`"
    return ""


def quantize(model: nn.Module, precision: str) -> None:
    """Make the weights of its `nn.Linear` layers int8, one scale per output, in place.

    Args:
        model: in eval mode.
        precision: int8_weight (multiplied in the input's type), or int8_dynamic (inputs rounded to int8, too, with a
            scale per row that is found at run time).

    Raises:
        ConfigError: torchao is not installed.
    """
    if reason := missing():
        msg = f"parameter precision: {precision!r} cannot be used: {reason}"
        raise ConfigError(msg)
    quantize_linear, config = _torchao(precision)
    quantize_linear(model, config)


def _torchao(precision: str) -> tuple[Any, Any]:
    with _quiet("torchao", "torch.utils._pytree"):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    config = {"int8_weight": Int8WeightOnlyConfig, "int8_dynamic": Int8DynamicActivationInt8WeightConfig}[precision]
    return quantize_, config(set_inductor_config=False)  # it would change the compiler for every other model, too


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """While torchao is imported: it warns of kernels for other machines, which nobody here can do anything about."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
