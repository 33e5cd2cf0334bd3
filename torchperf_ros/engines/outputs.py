"""The outputs of a model, of any type: their tensors and plain values, and a description for messages."""

import contextlib
import copy
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MemberDescriptorType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchperf_ros.api.errors import TorchperfError

_DEEPEST: Final = 12  # nests of nests; deeper ones are reported as unchecked
_PLAIN_VALUES: Final = (bool, int, float, complex, str, bytes, type(None))
_ROWS: Final = (tuple, list, set, frozenset, deque)
_NUMBERS: Final = "biufc"  # kinds of arrays that hold numbers


# a model may return anything
def leaves_in(outputs: Any, within: tuple[int, ...] = ()) -> Iterator[Any]:  # noqa: ANN401
    """Every value in a nest, in order.

    Tensors, arrays, plain values, and objects in which nothing can be found.

    A nest is a tuple, list, set, mapping, dataclass, namespace, or any object with attributes; `within` are
    those that it is in, as one may hold itself.
    """
    if isinstance(outputs, (torch.Tensor, np.ndarray, np.generic, *_PLAIN_VALUES)):
        yield outputs
    elif id(outputs) in within:
        return
    elif len(within) < _DEEPEST and (inner := _held_by(outputs)) is not None:
        for value in inner:
            yield from leaves_in(value, (*within, id(outputs)))
    else:
        yield outputs


def _held_by(value: Any) -> Collection[Any] | None:  # noqa: ANN401
    if isinstance(value, (*_ROWS, Drawn)):
        return value.values if isinstance(value, Drawn) else value
    if isinstance(value, Mapping):
        return value.values()
    held = _attributes(value)
    return held.values() if held else None


def _attributes(value: Any) -> dict[str, Any]:  # noqa: ANN401
    """The attributes of an object that holds results.

    None of code, and none of modules, which hold weights.
    """
    if isinstance(value, (torch.nn.Module, type, ModuleType, Iterator)) or callable(value):
        return {}
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        if "__slots__" in vars(kind):
            # Private slots have other names there, and `__weakref__`, which attrs adds, holds no result.
            found |= {
                name: getattr(value, name)
                for name, slot in vars(kind).items()
                if isinstance(slot, MemberDescriptorType) and hasattr(value, name)
            }
    found |= getattr(value, "__dict__", {})
    return {
        name: held
        for name, held in found.items()
        if not isinstance(held, torch.nn.Module) and not callable(held)
    }


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401 - a model may return anything
    """Every tensor in a nest, see `leaves_in`, in order; arrays of numbers as tensors."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
        return
    if isinstance(outputs, (dict, tuple, list)):  # what most models give, in every frame
        for value in outputs.values() if isinstance(outputs, dict) else outputs:
            yield from tensors_in(value)
        return
    for leaf in leaves_in(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMBERS:
            yield torch.from_numpy(np.ascontiguousarray(leaf, leaf.dtype.newbyteorder("=")))


def hidden_in(outputs: Any) -> str:  # noqa: ANN401 - a model may return anything
    """The part of outputs that cannot be looked into, in words.

    "" where everything can be, and numbers are there.
    """
    has_numbers = False
    for leaf in leaves_in(outputs):
        is_number = isinstance(leaf, (torch.Tensor, np.number, int, float, complex))
        is_number |= isinstance(leaf, np.ndarray) and leaf.dtype.kind in _NUMBERS
        if not is_number and not isinstance(leaf, (np.bool_, *_PLAIN_VALUES)):
            return f"in {described(leaf)} no tensor, array or number can be found"
        has_numbers |= is_number
    return "" if has_numbers else f"there is no tensor, array or number in {described(outputs)}"


def numbers_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The dense tensors of real numbers that hold a tensor's values, for every kind and layout."""
    if hasattr(tensor, "__tensor_flatten__"):  # a class of tensors that is made of others
        for name in tensor.__tensor_flatten__()[0]:
            yield from numbers_of(getattr(tensor, name))
    elif tensor.is_nested:
        for part in tensor.unbind():
            yield from numbers_of(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor.coalesce().indices(), *numbers_of(tensor.coalesce().values()))
    elif tensor.layout in {torch.sparse_csr, torch.sparse_bsr}:
        yield from (tensor.crow_indices(), tensor.col_indices(), *numbers_of(tensor.values()))
    elif tensor.layout is not torch.strided:
        yield from (tensor.ccol_indices(), tensor.row_indices(), *numbers_of(tensor.values()))
    elif tensor.is_quantized:
        yield tensor.dequantize()
    elif tensor.is_complex():
        yield torch.view_as_real(tensor.resolve_conj())
    elif tensor.is_floating_point() and tensor.element_size() == 1:  # float8, which has no arithmetic
        yield tensor.float()
    else:
        yield tensor


class Drawn(Iterator[Any]):
    """What a model's generator gives, drawn once.

    `values` can be checked before `postprocess` iterates over them.
    """

    def __init__(self, lazy: Iterator[Any]) -> None:
        self.values = [drawn(value) for value in lazy]
        self._next = iter(self.values)

    def __next__(self) -> Any:  # noqa: ANN401 - what the model gives
        return next(self._next)


def drawn(outputs: Any) -> Any:  # noqa: ANN401 - a model may return anything
    """The outputs with every generator among them drawn, also those in tuples, lists and dicts."""
    if isinstance(outputs, Iterator) and not isinstance(outputs, Drawn):
        return Drawn(outputs)
    return pytree.tree_map(lambda leaf: Drawn(leaf) if isinstance(leaf, Iterator) else leaf, outputs)


def holds_lazy(outputs: Any) -> bool:  # noqa: ANN401 - a model may return anything
    return any(isinstance(leaf, Iterator) for leaf in pytree.tree_leaves(outputs))


class _Values(TorchFunctionMode):
    """Notes where Python code takes numbers out of tensors. A tensor in an `if` picks a branch, no number."""

    READS: Final = frozenset({"item", "tolist", "numpy", "__array__", "__int__", "__index__"})
    found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.found |= getattr(func, "__name__", "") in self.READS
        return func(*args, **(kwargs or {}))


class SeesOperations(TorchDispatchMode):
    """A mode without the compiler: to keep that away, torch would import it, 73 MiB and a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Sizes(SeesOperations):
    """Notes operations whose results have as many elements as their inputs' values say: masks, `nonzero`."""

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.found |= torch.Tag.dynamic_output_shape in func.tags
        return func(*args, **(kwargs or {}))


def sizes_follow_values(run: Callable[[], Any]) -> bool:
    """Whether the sizes of a model's outputs may follow from values, as of a detector's boxes."""
    # A model may not run while its operations are looked at. What was found until then counts.
    with contextlib.suppress(Exception), _Values() as values, _Sizes() as sizes:
        drawn(run())
    return bool(values.found or sizes.found)


def mapped(outputs: Any, act: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - a model may return anything
    """The outputs in nests of their own, with what `act` makes of each tensor, array and plain value in them.

    It also gets an object that hides what it holds.
    """
    if isinstance(outputs, Drawn):
        return Drawn(mapped(value, act) for value in outputs.values)
    if isinstance(outputs, _ROWS):
        make = type(outputs)._make if hasattr(outputs, "_make") else type(outputs)
        return make([mapped(value, act) for value in outputs])
    is_leaf = isinstance(outputs, (torch.Tensor, np.ndarray, np.generic, *_PLAIN_VALUES))
    is_mapping = isinstance(outputs, MutableMapping)
    held = {} if is_leaf else outputs if is_mapping else _attributes(outputs)
    if not held and not is_mapping:
        return act(outputs)
    return _with(outputs, {name: mapped(value, act) for name, value in held.items()})


def split(outputs: Any, sizes: Sequence[int]) -> list[Any]:  # noqa: ANN401 - a model may return anything
    """The outputs of inputs that were concatenated along dimension 0, each with its own share.

    Tensors and arrays anywhere in a nest are divided along dimension 0; plain values are everyone's.

    Raises:
        TorchperfError: a tensor or array has another dimension 0, or an object hides what it holds.
    """
    ends = list(itertools.accumulate(sizes))

    def share(leaf: Any, begin: int, end: int) -> Any:  # noqa: ANN401
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            length = 0 if isinstance(leaf, torch.Tensor) and leaf.is_nested else len(leaf.shape[:1])
            if not length or leaf.shape[0] != ends[-1]:
                raise TorchperfError(
                    f"an output is {described(leaf)}; to be divided among the frames of a run its dimension 0"
                    f" has to be {ends[-1]}, as of the inputs"
                )
            return leaf[begin:end]
        if not isinstance(leaf, (np.generic, *_PLAIN_VALUES)):
            raise TorchperfError(
                f"an output is {described(leaf)}, which cannot be divided among the frames"
            )
        return leaf

    return [
        mapped(outputs, functools.partial(share, begin=end - size, end=end))
        for size, end in zip(sizes, ends, strict=True)
    ]


def in_new_memory(outputs: Any) -> Any:  # noqa: ANN401 - a model may return anything
    """Copies of outputs whose memory the next run writes to, in nests that nothing else holds."""
    return mapped(outputs, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else copy.copy(leaf))


def _with(nest: Any, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - a model may return anything
    """A copy of a mapping, or of an object with attributes, that holds these values."""
    changed = copy.copy(nest)
    for name, value in values.items():
        if isinstance(nest, MutableMapping):
            changed[name] = value
        else:
            # also of a frozen dataclass
            object.__setattr__(changed, name, value)
    return changed


def flat_numbers(outputs: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The numbers in outputs, in order, as float64 on the CPU.

    Those of every tensor, and plain ones with a point.
    """
    found = list[torch.Tensor]()
    for leaf in leaves_in(outputs):
        if isinstance(
            leaf, (float, complex)
        ):  # one that follows from the inputs is as near as a tensor would be
            found.append(torch.tensor([leaf.real, leaf.imag], dtype=torch.float64))
        for tensor in tensors_in(leaf) if isinstance(leaf, (torch.Tensor, np.ndarray)) else ():
            found += [part.to("cpu", torch.float64) for part in numbers_of(tensor.detach())]
    return found


def shapes_of(tensors: Iterable[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def signature_of(tensor: torch.Tensor) -> str:
    """Type and shape, for example `float32 1x3x256x448`."""
    if tensor.is_nested:
        return f"{str(tensor.dtype).removeprefix('torch.')} nested {tensor.size(0)}"
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def described(value: Any) -> str:  # noqa: ANN401 - a model may return anything
    """What something is, for a message: `a dict with keys 'boxes', 'scores'`."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(map(described, value))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor {signature_of(value)}"
    name = type(value).__name__.replace("__msg__", "/msg/")
    keys = f" with keys {', '.join(map(repr, value))}" if isinstance(value, dict) else ""
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}{keys}"


def layout_of(outputs: Any) -> str:  # noqa: ANN401
    """Nesting, types, shapes and plain values of outputs, the same for outputs that can be compared."""
    if isinstance(outputs, torch.Tensor):
        return signature_of(outputs)
    if isinstance(outputs, Mapping):
        return f"{{{', '.join(f'{key!r}: {layout_of(value)}' for key, value in outputs.items())}}}"
    if isinstance(outputs, (tuple, list, Drawn)):
        inner = ", ".join(map(layout_of, outputs.values if isinstance(outputs, Drawn) else outputs))
        return f"({inner})" if isinstance(outputs, tuple) else f"[{inner}]"
    if isinstance(outputs, (np.generic, *_PLAIN_VALUES)):
        return type(outputs).__name__ if isinstance(outputs, (float, complex)) else repr(outputs)
    inner = ", ".join(f"{name}={layout_of(value)}" for name, value in sorted(_attributes(outputs).items()))
    return type(outputs).__name__ + (f"({inner})" if inner else "")
