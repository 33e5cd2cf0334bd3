"""What a model keeps between calls, as its build gave it.

Checks, warm-up and calibration leave nothing behind.
"""

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torchperf_ros.engines.outputs import numbers_of

_NEVER_CHANGES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_ABSENT: Final = object()
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))


class KeptState:
    """Copies of a model's buffers and of its modules' own attributes.

    Weights are not copied, no forward changes them.

    What Python cannot copy, as an object of a library in C, stays as it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in _buffers_of(module)
        ]
        self._own = {id(each): each for each in (*model.modules(), *model.parameters(), *model.buffers())}
        memo = dict(self._own)
        # A script keeps its attributes in C++, where only buffers can be reached; a lazy module becomes
        # another one.
        self._attributes = [
            (module, {name: _copied(value, memo) for name, value in _attributes_of(module)})
            for module in model.modules()
            if not isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))
        ]

    def restore(self) -> list[str]:
        """Put back what has changed; the names of those buffers and attributes.

        A buffer keeps its memory, which compiled code and captured graphs know.
        """
        changed, memo = list(self._changed()), dict(self._own)
        with torch.no_grad():
            for module, name, original, saved in changed:
                if saved is _ABSENT:
                    delattr(module, name)
                elif original is not None and original.shape == saved.shape:
                    setattr(module, name, original.copy_(saved))
                else:
                    setattr(module, name, _copied(saved, memo))
        return list(dict.fromkeys(name for _, name, _, _ in changed))

    @property
    def has_changed(self) -> bool:
        return any(True for _ in self._changed())

    def _changed(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor | None, Any]]:
        for module, name, original, saved in self._buffers:
            if not _same(getattr(module, name, None), saved):
                yield module, name, original, saved
        for module, attributes in self._attributes:
            new = [name for name, _ in _attributes_of(module) if name not in attributes]
            for name, saved in [*attributes.items(), *((name, _ABSENT) for name in new)]:
                if not _same(vars(module).get(name, _ABSENT), saved):
                    yield module, name, None, saved


def _buffers_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    found = module._buffers.items()  # with those that are None, which `named_buffers` leaves out
    return ((name, buffer) for name, buffer in found if buffer is None or not is_lazy(buffer))


def _attributes_of(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE]


def _copied(value: Any, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - an attribute may be anything
    if isinstance(value, torch.Tensor):  # one that a gradient leads to cannot be deep-copied
        return memo.setdefault(id(value), value.detach().clone())
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # a library's object may refuse in any way
        return value


# one a kind, PLR0911 - one a kind
def _same(now: Any, saved: Any, seen: frozenset[int] = frozenset()) -> bool:  # noqa: ANN401, PLR0911
    """Whether a value is as its copy; of an object that hides what it holds, that is taken for granted."""
    if now is saved or id(saved) in seen:
        return True
    if type(now) is not type(saved):
        return False
    if isinstance(now, _NEVER_CHANGES):
        return bool(now == saved)
    seen |= {id(saved)}
    if isinstance(now, torch.Tensor):
        alike = now.shape == saved.shape and now.dtype == saved.dtype and now.layout == saved.layout
        pairs = zip(numbers_of(now), numbers_of(saved), strict=True) if alike else ()
        return alike and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    if isinstance(now, np.ndarray) and not now.dtype.hasobject:
        return now.dtype == saved.dtype and np.array_equal(now, saved)
    if isinstance(now, (list, tuple, deque)):
        return len(now) == len(saved) and all(_same(a, b, seen) for a, b in zip(now, saved, strict=True))
    if isinstance(now, dict):
        return list(now) == list(saved) and all(_same(now[key], saved[key], seen) for key in now)
    try:
        return _same(_parts_of(now), _parts_of(saved), seen)
    except Exception:  # it hides its content
        return True


def _parts_of(value: Any) -> list[Any]:  # noqa: ANN401
    """What an object would be made of again, as `copy` and `pickle` ask for it; of a global one its name."""
    return [list(part) if isinstance(part, Iterator) else part for part in value.__reduce_ex__(4)]
