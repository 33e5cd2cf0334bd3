"""Batch normalisation folded into the convolution before it, where the two are provably neighbours."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_TRANSPOSED: Final = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def foldable_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Names of (convolution, batch normalisation) that may become one convolution.

    The proof is a symbolic trace (`torch.fx`): the normalisation reads the convolution's output, nothing else does,
    each of the two is called once, and neither is shared, hooked, parametrised, subclassed or in training mode. Where
    a model cannot be traced, as with control flow that depends on data, its children are tried, each for itself.

    Args:
        model: in eval mode; tracing runs the Python code of its `forward`, but computes nothing.
    """
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    pairs = [(conv, norm) for conv, norm in _neighbours(model, "") if _may_fold(model, conv, norm, names)]
    called = Counter(name for pair in pairs for name in pair)
    return [pair for pair in pairs if all(called[name] == 1 for name in pair)]


def fold(model: nn.Module) -> None:
    """Fold every pair of `foldable_pairs`, in place.

    With s = gamma / sqrt(variance + eps), weights become w s and biases (b - mean) s + beta (Jacob et al.,
    "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018, section 3.2).
    """
    for conv_name, norm_name in foldable_pairs(model):
        conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
        assert isinstance(conv, _CONVOLUTIONS)
        assert isinstance(norm, _NORMS)
        with torch.no_grad():
            fused = fuse_conv_bn_eval(conv, norm, transpose=isinstance(conv, _TRANSPOSED))
        _replace(model, conv_name, fused)
        _replace(model, norm_name, nn.Identity())


def _neighbours(module: nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """Pairs by qualified name, in the largest parts of the model that can be traced."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception:
        # The model's own code runs here, with stand-ins for tensors: whatever it raises, it cannot be traced.
        for name, child in module.named_children():
            yield from _neighbours(child, f"{prefix}{name}.")
        return
    calls = Counter(node.target for node in graph.nodes if node.op == "call_module")
    for node in graph.nodes:
        before = node.args[0] if node.op == "call_module" and len(node.args) == 1 else None
        if not isinstance(before, fx.Node) or before.op != "call_module" or len(before.users) != 1:
            continue
        if calls[before.target] == calls[node.target] == 1:
            yield f"{prefix}{before.target}", f"{prefix}{node.target}"


def _may_fold(model: nn.Module, conv_name: str, norm_name: str, names: Counter[int]) -> bool:
    conv, norm = model.get_submodule(conv_name), model.get_submodule(norm_name)
    if type(conv) not in _CONVOLUTIONS or type(norm) not in _NORMS or conv.training or norm.training:
        return False
    if not isinstance(norm.running_mean, torch.Tensor) or not isinstance(norm.running_var, torch.Tensor):
        return False  # it normalises by each batch's own statistics
    if isinstance(conv, _TRANSPOSED) and conv.groups != 1:
        return False  # fuse_conv_bn_eval scales the wrong axis of a grouped transposed weight
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in (conv, norm))
    parametrised = any(torch.nn.utils.parametrize.is_parametrized(module) for module in (conv, norm))
    return not hooked and not parametrised and names[id(conv)] == names[id(norm)] == 1


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
