"""What `torchperf inspect` looks at: an adapter's tier or any callable, and one or more sets of inputs for it."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.worker.adapter import Adapter
from torchperf_ros.worker.parity import random_inputs

Inputs = tuple[torch.Tensor, ...]

_SEED = 0
_SPEC = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_COMMON_DTYPES = "float32, float16, bfloat16, int64, int32, uint8, bool"
_INTEGERS_BELOW = 10


class InspectError(TorchperfError):
    """The model or its inputs cannot be made as asked; the message says why and what would be right."""


@dataclass(frozen=True)
class InspectedModel:
    """A callable and what it is called with.

    Attributes:
        name: as the user wrote it, with the tier where there is one.
        call: takes the inputs, returns whatever it returns.
        input_sets: the first is the usual input, the others are what it may also meet.
    """

    name: str
    call: Callable[..., Any]
    input_sets: tuple[Inputs, ...]


def load_model(
    target: str,
    tier: str,
    options: dict[str, Any],
    inputs: list[str],
    also: list[str],
    device: torch.device,
) -> InspectedModel:
    """Import `module:name` or `file.py:name` and make its inputs.

    Args:
        target: an `Adapter` class, a module (class, instance or factory without arguments), or a function.
        tier: which tier of an adapter.
        options: an adapter's options.
        inputs: for other callables, one text like `1x3x224x224:float32` for each argument.
        also: further input sets; each a text with the sizes of all arguments, separated by spaces.
        device: where model and inputs live.

    Raises:
        InspectError: what is asked for is not there, or cannot be made.
    """
    torch.manual_seed(_SEED)  # weights made at random are the same each time
    found = _find(target)
    if isinstance(found, type) and issubclass(found, Adapter):
        if inputs:
            msg = f"--input {inputs[0]}: an adapter brings its own example inputs; give other sizes by --also"
            raise InspectError(msg)
        return _adapter_model(target, found, tier, options, also, device)
    if not inputs:
        msg = f"{target} needs its inputs: --input once for each argument, for example --input 1x3x224x224:float32"
        raise InspectError(msg)
    example = tuple(_make(spec, None, device) for spec in inputs)
    sets = (example, *(_also(text, example, device) for text in also))
    call = _callable(target, found)
    return InspectedModel(target, call.eval().to(device) if isinstance(call, torch.nn.Module) else call, sets)


def shapes_text(inputs: Inputs) -> str:
    """`1x3x224x224:float32 4:int64`, as it can be given again."""
    return " ".join(f"{'x'.join(map(str, t.shape)) or 'scalar'}:{str(t.dtype).removeprefix('torch.')}" for t in inputs)


def _find(target: str) -> Any:  # noqa: ANN401 - whatever the user's module holds
    place, _, name = target.rpartition(":")
    if not place or not name:
        msg = f"TARGET {target!r} does not have the form module:callable or file.py:callable, e.g. my_robot.model:Net"
        raise InspectError(msg)
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    except InspectError:
        raise
    except Exception as error:
        # The user's module runs here: whatever it raises is the reason why it cannot be loaded.
        msg = f"TARGET {target!r}: importing {place} failed: {type(error).__name__}: {error}"
        raise InspectError(msg) from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            msg = f"TARGET {target!r}: {place} has no {part!r}; callables there: {', '.join(names[:12]) or 'none'}"
            raise InspectError(msg)
        found = getattr(found, part)
    if not callable(found):
        msg = f"TARGET {target!r} is a {type(found).__name__}, which cannot be called"
        raise InspectError(msg)
    return found


def _import_module(name: str) -> Any:  # noqa: ANN401
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:  # noqa: ANN401
    if not path.is_file():
        msg = f"TARGET: the file {path} does not exist"
        raise InspectError(msg)
    sys.path.insert(0, str(path.resolve().parent))  # for what it imports from beside itself, as `python file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        msg = f"TARGET: the file {path} is not a Python file"
        raise InspectError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _callable(target: str, found: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The function itself; of a class or a factory, what it makes."""
    if isinstance(found, torch.nn.Module):
        return found
    try:
        required = [
            parameter.name
            for parameter in inspect.signature(found).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(found).parameters.values())
    except ValueError:  # a builtin without a signature
        return found  # type: ignore[no-any-return]
    if not isinstance(found, type) and (required or takes_any):
        return found  # type: ignore[no-any-return]
    if required:
        msg = f"TARGET {target!r} takes {', '.join(required)}: give a function without arguments that makes the model"
        raise InspectError(msg)
    try:
        made = found()
    except Exception as error:
        msg = f"TARGET {target!r}: making it failed: {type(error).__name__}: {error}"
        raise InspectError(msg) from error
    if not callable(made):
        msg = f"TARGET {target!r} made a {type(made).__name__}, which cannot be called"
        raise InspectError(msg)
    return made  # type: ignore[no-any-return]


def _adapter_model(
    target: str, kind: type[Adapter], tier: str, options: dict[str, Any], also: list[str], device: torch.device
) -> InspectedModel:
    try:
        adapter = kind(options, device)
        model = adapter.build(tier).eval().to(device)
        example = adapter.example_inputs(tier)
        dims = adapter.dynamic_dims()
    except Exception as error:
        msg = f"TARGET {target!r}, tier {tier!r}, options {options}: {type(error).__name__}: {error}"
        raise InspectError(msg) from error
    drawn = []
    chosen: tuple[Callable[[tuple[int, int]], int], ...] = (min, max, _middle)
    for seed, choose in enumerate(chosen):
        sizes = {
            index: {dim: (choose(ends), choose(ends)) for dim, ends in by_dim.items()} for index, by_dim in dims.items()
        }
        drawn.append(random_inputs(example, seed, sizes))
    drawn += [_also(text, example, device) for text in also]
    sets, seen = [example], {shapes_text(example)}
    for inputs in drawn:
        if shapes_text(inputs) not in seen:
            seen.add(shapes_text(inputs))
            sets.append(inputs)
    return InspectedModel(f"{target} ({tier})", model, tuple(sets))


def _middle(ends: tuple[int, int]) -> int:
    return sum(ends) // 2


def _also(text: str, example: Inputs, device: torch.device) -> Inputs:
    specs = text.split()
    if len(specs) != len(example):
        msg = (
            f"--also {text!r} has {len(specs)} sizes, the model takes {len(example)} inputs:"
            f" for example --also {' '.join('x'.join(map(str, t.shape)) or 'scalar' for t in example)!r}"
        )
        raise InspectError(msg)
    return tuple(_make(spec, like, device) for spec, like in zip(specs, example, strict=True))


def _make(spec: str, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor of this size: floats normal, integers 0 to 9, booleans at random; or of the values of another."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        msg = f"input {spec!r} is not a size like 1x3x224x224, 1x3x224x224:float16 or scalar:int64"
        raise InspectError(msg)
    if match[2] is not None and match[2] not in _DTYPES:
        msg = f"input {spec!r}: {match[2]!r} is not a type of torch; common ones: {_COMMON_DTYPES}"
        raise InspectError(msg)
    shape = () if match[1] == "scalar" else tuple(map(int, match[1].split("x")))
    if like is not None and match[2] in (None, str(like.dtype).removeprefix("torch.")):
        if len(shape) == like.dim():
            return random_inputs((like,), _SEED, {0: {dim: (size, size) for dim, size in enumerate(shape)}})[0]
        return _random(shape, like.dtype, device)
    return _random(shape, _DTYPES[match[2] or "float32"], device)


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(device, dtype)
    below = 2 if dtype is torch.bool else _INTEGERS_BELOW
    return torch.randint(0, below, shape, generator=generator).to(device, dtype)
