"""What `torchperf inspect` looks at.

An adapter's tier or any callable, and one or more sets of inputs for it.
"""

import importlib
import importlib.util
import inspect
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.import_paths import look_here_after_python
from torchperf_ros.engines.built_tier import BuiltTier, Inputs, build_model
from torchperf_ros.engines.parity import random_like

_SEED = 0
_SPEC = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")


class InspectError(TorchperfError):
    """The model or its inputs cannot be made as asked; the message has the reason and what would be right."""


class InspectedModel(NamedTuple):
    """A callable and what it is called with: the usual input first, then what it may also meet."""

    name: str
    call: Callable[..., Any]
    input_sets: tuple[Inputs, ...]


def load_model(
    target: str, tier: str, options: dict[str, Any], inputs: list[str], device: torch.device
) -> InspectedModel:
    """Import `module:name` or `file.py:name` and make its inputs.

    It is an `Adapter` class, a module (class, instance or factory without arguments), or a function. Each of
    the `inputs` is a text with a size for each argument, like `1x3x224x224:float32 8:int64`. The first is the
    usual one; an adapter brings its own.

    Raises:
        InspectError: what is asked for is not there, or cannot be made.
    """
    torch.manual_seed(_SEED)  # weights made at random are the same each time
    what = f"TARGET {target!r}"
    try:
        found = _find(target)
        if isinstance(found, type) and issubclass(found, Adapter):
            what += f", tier {tier!r}, options {options}"
            return _adapter_model(f"{target} ({tier})", found(options, device), tier, inputs, device)
        call = _callable(found)
    except InspectError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: its error is why it cannot be loaded
        raise InspectError(f"{what}: {type(error).__name__}: {error}") from error
    if not inputs:
        example = "--input 1x3x224x224:float32, or --input '8x3 8:int64' for two arguments"
        raise InspectError(f"{target} needs its inputs: for example {example}")
    usual = tuple(_make(spec, None, device) for spec in inputs[0].split())
    sets = (usual, *(_like(text, usual, device) for text in inputs[1:]))
    return InspectedModel(
        target, call.eval().to(device) if isinstance(call, torch.nn.Module) else call, sets
    )


def shapes_text(inputs: Inputs) -> str:
    """`1x3x224x224:float32 4:int64`, as it can be given again."""
    return " ".join(
        f"{'x'.join(map(str, t.shape)) or 'scalar'}:{str(t.dtype).removeprefix('torch.')}" for t in inputs
    )


def _find(target: str) -> Any:  # noqa: ANN401 - what the user's module holds
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InspectError(
            f"TARGET {target!r} does not have the form module:callable or file.py:callable, e.g."
            " my_robot.model:Net"
        )
    path = Path(place).resolve()
    if not place.endswith(".py"):
        look_here_after_python(add=True)
        module = importlib.import_module(place)
    elif spec := importlib.util.spec_from_file_location(path.stem, path):
        sys.path.insert(
            0, str(path.parent)
        )  # for what it imports from beside itself, as `python file.py` does
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    try:
        found: Any = operator.attrgetter(name)(module)
    except AttributeError:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InspectError(
            f"TARGET {target!r}: {place} has no {name!r}; callables there:"
            f" {', '.join(names[:12]) or 'none'}"
        ) from None
    if not callable(found):
        raise InspectError(f"TARGET {target!r} is a {type(found).__name__}, which cannot be called")
    return found


def _callable(found: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The function itself; of a class or a factory without arguments, what it makes."""
    if isinstance(found, torch.nn.Module) or inspect.isbuiltin(found):
        return found
    parameters = inspect.signature(found).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not isinstance(found, type) and needed:
        return found  # type: ignore[no-any-return]
    made = found()
    if not callable(made):
        raise TypeError(f"it makes a {type(made).__name__}, which cannot be called")
    return made  # type: ignore[no-any-return]


def _adapter_model(
    name: str, adapter: Adapter, tier: str, inputs: list[str], device: torch.device
) -> InspectedModel:
    model, example = build_model(adapter, tier).to(device), adapter.example_inputs(tier)
    *others, usual = BuiltTier(model, example, adapter.dynamic_dims(), device).inputs_by_size()
    sets = (usual, *others, *(_like(text, example, device) for text in inputs))
    different = {shapes_text(one): one for one in reversed(sets)}
    return InspectedModel(name, model, tuple(reversed(different.values())))


def _like(text: str, example: Inputs, device: torch.device) -> Inputs:
    specs = text.split()
    if len(specs) != len(example):
        raise InspectError(
            f"--input {text!r} has {len(specs)} sizes, the model takes {len(example)} inputs:"
            f" for example --input {shapes_text(example)!r}"
        )
    return tuple(_make(spec, like, device) for spec, like in zip(specs, example, strict=True))


def _make(spec: str, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor of this size.

    Floats normal, integers 0 to 9, booleans at random; or of the values of another.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InspectError(
            f"input {spec!r} is not a size like 1x3x224x224, 1x3x224x224:float16 or scalar:int64"
        )
    dtype = getattr(torch, match[2], None) if match[2] else torch.float32 if like is None else like.dtype
    if not isinstance(dtype, torch.dtype):
        raise InspectError(
            f"input {spec!r}: {match[2]!r} is not a type of torch such as float32, float16, int64, uint8 or"
            " bool"
        )
    shape = () if match[1] == "scalar" else tuple(map(int, match[1].split("x")))
    if like is None or like.dtype is not dtype:
        like = (torch.zeros(10) if dtype.is_floating_point or dtype.is_complex else torch.arange(10)).to(
            dtype
        )
    return random_like(like, shape, torch.Generator().manual_seed(_SEED)).to(device)
