"""Copies between host and CUDA device by way of page-locked memory that is allocated once and used again."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_SMALLEST_BYTES: Final = 4096  # a page is locked as a whole, and counting it so bounds the number of buffers, too
_Key = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Done(Protocol):
    """What tells when a copy is over; a `torch.cuda.Event`."""

    def record(self, stream: torch.cuda.Stream) -> None:
        """The copy has been queued on this stream."""

    def synchronize(self) -> None:
        """Wait for it."""


@dataclass(frozen=True)
class PinnedBuffer:
    """Page-locked host memory for one tensor.

    Attributes:
        tensor: of the shape, type and layout that was asked for.
        copied: recorded after each copy out of it; until then it must not be written to again.
    """

    tensor: Tensor
    copied: Done


class PinnedBuffers:
    """Buffers by place and shape; those that were used last are kept, up to a number of bytes."""

    def __init__(
        self,
        most_bytes: int = 256 << 20,
        *,
        allocate: Callable[[Tensor], Tensor] | None = None,
        event: Callable[[], Done] | None = None,
    ) -> None:
        """Start without any.

        Args:
            most_bytes: what all of them may hold; page-locked memory is lost to every other process.
            allocate: makes host memory like a tensor; None: page-locked.
            event: makes what tells that a copy is over; None: a CUDA event.
        """
        self._most_bytes = most_bytes
        self._allocate = allocate or _pinned_like
        self._event: Callable[[], Done] = event or torch.cuda.Event
        self._kept: OrderedDict[_Key, PinnedBuffer] = OrderedDict()
        self.bytes = 0

    def take(self, place: int, like: Tensor) -> PinnedBuffer | None:
        """The buffer for tensors like this one at this place, free to be written to; None if it would be too large.

        Args:
            place: index among the tensors of one frame; two of the same shape have a buffer each.
            like: shape, type and layout count.
        """
        key = (place, like.dtype, tuple(like.shape), like.stride())
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            found.copied.synchronize()  # over long ago, unless that frame was dropped
            return found
        size_bytes = _held_bytes(like)
        if size_bytes > self._most_bytes:
            return None
        while self.bytes + size_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)  # torch's allocator keeps it until a copy out of it is over
            self.bytes -= _held_bytes(oldest.tensor)
        with torch.inference_mode(mode=False):  # memory made inside that mode could not be written to outside of it
            self._kept[key] = made = PinnedBuffer(self._allocate(like), self._event())
        self.bytes += size_bytes
        return made


class PinnedCopy:
    """Copies of one stage: queued on its own stream, so that they wait for nobody else's work.

    Pageable memory makes the driver copy twice and the caller wait (CUDA programming guide, "Page-Locked Host
    Memory"). On the device, memory is fresh for each frame: torch's allocator gives the same blocks again without
    a call of the driver, and an adapter may keep a tensor for its history.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream, most_bytes: int = 256 << 20) -> None:
        """Take a CUDA device and the stage's stream; `most_bytes` of page-locked memory in each direction."""
        self._device = device
        self._stream = stream
        self._up, self._down = PinnedBuffers(most_bytes), PinnedBuffers(most_bytes)

    def to_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors on the device, without waiting for the copies; those there already are the same objects.

        Whatever is queued next on the caller's stream sees them complete. A tensor that is page-locked itself is copied
        from where it is, and must not be written to before the stream has come that far.
        """
        caller = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = tuple(self._upload(place, tensor) for place, tensor in enumerate(tensors))
        if caller != self._stream:
            caller.wait_stream(self._stream)
            for tensor, before in zip(moved, tensors, strict=True):
                if tensor is not before:
                    tensor.record_stream(caller)
        return moved

    def to_host(self, outputs: Any) -> Any:  # noqa: ANN401 - whatever a model returns
        """The same nest with its tensors in host memory, complete; valid until the next call, copy what you keep."""
        leaves, structure = pytree.tree_flatten(outputs)
        caller = torch.cuda.current_stream(self._device)
        if caller != self._stream:
            self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            found = [self._download(place, leaf) if _is_on_cuda(leaf) else leaf for place, leaf in enumerate(leaves)]
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()
        return pytree.tree_unflatten(found, structure)

    def _upload(self, place: int, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            buffer = self._up.take(place, tensor)
            if buffer is not None:
                buffer.tensor.copy_(tensor)
                there = buffer.tensor.to(self._device, non_blocking=True)
                buffer.copied.record(self._stream)
                return there
        return tensor.to(self._device, non_blocking=True)

    def _download(self, place: int, tensor: Tensor) -> Tensor:
        buffer = self._down.take(place, tensor)
        if buffer is None:
            return tensor.cpu()
        return buffer.tensor.copy_(tensor.detach(), non_blocking=True)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _held_bytes(tensor: Tensor) -> int:
    return max(tensor.nbytes, _SMALLEST_BYTES)


def _is_on_cuda(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda
