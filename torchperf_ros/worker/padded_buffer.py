"""Places of fixed size that hold smaller inputs, with zeros around them."""

from collections.abc import Sequence

import torch

from torchperf_ros.core.shape_options import Shapes

_MOST_BYTES = 256 << 20


class PaddedBuffer:
    """One input of a bucket: what was last copied in, then zeros (False) up to the bucket's size.

    Attributes:
        tensor: of the bucket's shape; the same memory at every frame.
    """

    def __init__(self, shape: tuple[int, ...], like: torch.Tensor) -> None:
        """Allocate zeros.

        Args:
            shape: the bucket's.
            like: gives type, device and memory layout.
        """
        layout = memory_format_of(like)
        self.tensor = torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout).zero_()
        self._held = shape

    def hold(self, source: torch.Tensor) -> torch.Tensor:
        """Copy an input in; only what the last one covered and this one does not is zeroed.

        Args:
            source: no larger than the buffer in any dimension, from any device, in any layout.

        Returns:
            The whole buffer, valid until the next call.
        """
        target = self.tensor
        for dim, (before, now) in enumerate(zip(self._held, source.shape, strict=True)):
            if now < before:
                target.narrow(dim, now, before - now).zero_()
            if now < target.shape[dim]:
                target = target.narrow(dim, 0, now)
        self._held = tuple(source.shape)
        target.copy_(source, non_blocking=True)
        return self.tensor


class PaddedBuffers:
    """The buffers of all buckets; the longest unused are given up where all are too large."""

    def __init__(self, example: tuple[torch.Tensor, ...], most_bytes: int = _MOST_BYTES) -> None:
        """Take the example inputs, which the buffers are like, and how much memory they may take."""
        self._example = example
        self._most_bytes = most_bytes
        self._sets: dict[Shapes, tuple[PaddedBuffer, ...]] = {}

    def hold(self, bucket: Shapes, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Copy inputs into the buffers of a bucket, which are made at its first use.

        Returns:
            Tensors of the bucket's shapes, valid until the bucket's next use.
        """
        buffers = self._sets.pop(bucket, None) or self._made(bucket)
        self._sets[bucket] = buffers  # the one that was used last stands at the end
        return tuple([buffer.hold(tensor) for buffer, tensor in zip(buffers, inputs, strict=True)])

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        return sum(buffer.tensor.nbytes for buffers in self._sets.values() for buffer in buffers)

    def _made(self, bucket: Shapes) -> tuple[PaddedBuffer, ...]:
        buffers = tuple(PaddedBuffer(shape, like) for shape, like in zip(bucket, self._example, strict=True))
        room = self._most_bytes - sum(buffer.tensor.nbytes for buffer in buffers)
        while self._sets and self.size_bytes > room:
            del self._sets[next(iter(self._sets))]
        return buffers


def is_laid_out_like(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether code that was compiled for buffers made here, `like` another tensor, runs this one as it is.

    Compilers guard on type, strides (also of dimensions of size 1) and on being made under inference mode.
    """
    usual = torch.empty(tensor.shape, device="meta", memory_format=memory_format_of(like)).stride()
    return tensor.dtype is like.dtype and tensor.stride() == usual and tensor.is_inference()


def memory_format_of(like: torch.Tensor) -> torch.memory_format:
    """Channels last where the tensor is laid out so and not in the usual order; contiguous for every other."""
    layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = layouts.get(like.dim(), torch.contiguous_format)
    return layout if like.is_contiguous(memory_format=layout) and not like.is_contiguous() else torch.contiguous_format
