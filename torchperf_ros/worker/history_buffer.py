"""The last N samples of something as one tensor: fixed bytes, oldest first, with a mask while filling."""

import weakref

import torch

from torchperf_ros.core.errors import AdapterError, ConfigError
from torchperf_ros.core.history import GapRule, StampVerdict

_LIVE: "weakref.WeakSet[HistoryBuffer]" = weakref.WeakSet()


def history_bytes() -> int:
    """Bytes of every history in this process."""
    return sum(buffer.nbytes for buffer in _LIVE)


class HistoryBuffer:
    """A ring of N rows on the CPU that is allocated once and never grows.

    Rows are copies: they keep neither the sample's memory nor its autograd graph alive. NaN and Inf are stored
    as they are; what they mean is the caller's to decide before it appends. Not thread-safe: one adapter owns it.
    """

    def __init__(
        self,
        capacity: int,
        row_shape: tuple[int, ...],
        *,
        rule: GapRule,
        dtype: torch.dtype = torch.float32,
        source: torch.device | None = None,
    ) -> None:
        """Allocate everything that the buffer will ever need.

        Args:
            capacity: number of rows N, at least 1.
            row_shape: shape of one sample; `()` for scalars.
            rule: judges the stamps; used by this buffer alone.
            dtype: element type of the samples.
            source: device that the samples come from. With CUDA the rows are pinned, so that a sample is copied
                without blocking; `window` waits for the copies.

        Raises:
            ConfigError: the capacity or the shape is not allowed.
        """
        if capacity < 1:
            msg = f"capacity is {capacity}; allowed: 1 row and more"
            raise ConfigError(msg)
        if any(size < 1 for size in row_shape):
            msg = f"row_shape is {row_shape}; allowed: sizes of 1 and more"
            raise ConfigError(msg)
        self._row_shape = tuple(row_shape)
        self._rule = rule
        pinned = source is not None and source.type == "cuda"
        # Plain tensors even under inference_mode, whose tensors could not be written outside of it.
        with torch.inference_mode(mode=False):
            self._ring = torch.zeros((capacity, *row_shape), dtype=dtype, pin_memory=pinned)
            self._window = torch.zeros((capacity, *row_shape), dtype=dtype, pin_memory=pinned)
            self._mask = torch.zeros(capacity, dtype=torch.bool, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None
        self._next = 0
        self._filled = 0
        _LIVE.add(self)

    def __len__(self) -> int:
        """Number of rows that hold a sample, 0 to `capacity`."""
        return self._filled

    @property
    def capacity(self) -> int:
        """Number of rows N."""
        return self._ring.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the buffer holds; the same from the first call to the last."""
        return sum(part.nbytes for part in (self._ring, self._window, self._mask))

    @property
    def rule(self) -> GapRule:
        """The rule that judges the stamps, with its counts."""
        return self._rule

    def append(self, sample: torch.Tensor, stamp_ns: int) -> StampVerdict:
        """Copy one sample in, unless the rule ignores its stamp; forget the older ones first if the rule says so.

        Args:
            sample: tensor of the row's shape and dtype, on any device.
            stamp_ns: its stamp in ns, 0 where it has none.

        Returns:
            What the rule decided.

        Raises:
            AdapterError: the sample's shape or dtype is not the row's; the history is as before.
        """
        if tuple(sample.shape) != self._row_shape or sample.dtype != self._ring.dtype:
            msg = (
                f"history takes rows of shape {self._row_shape} and {self._ring.dtype}, "
                f"got {tuple(sample.shape)} and {sample.dtype}"
            )
            raise AdapterError(msg)
        verdict = self._rule.judge(stamp_ns)
        if verdict.ignores:
            return verdict
        if verdict.resets:
            self._empty()
        self._ring[self._next].copy_(sample.detach(), non_blocking=self._copied is not None)
        if self._copied is not None and sample.is_cuda:
            self._copied.record(torch.cuda.current_stream(sample.device))
        self._next = (self._next + 1) % self.capacity
        self._filled = min(self._filled + 1, self.capacity)
        return verdict

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows oldest first, the newest last; while filling, leading rows are zero and masked out.

        Both tensors belong to the buffer and are written again by the next call: copy what has to outlast it.

        Returns:
            rows [N, *row_shape] and mask [N] bool, True where a row holds a sample; on the CPU.
        """
        if self._copied is not None:
            self._copied.synchronize()
        empty = self.capacity - self._filled
        self._window[:empty].zero_()
        oldest = (self._next - self._filled) % self.capacity
        until_end = min(self._filled, self.capacity - oldest)
        self._window[empty : empty + until_end].copy_(self._ring[oldest : oldest + until_end])
        self._window[empty + until_end :].copy_(self._ring[: self._filled - until_end])
        self._mask[:empty] = False
        self._mask[empty:] = True
        return self._window, self._mask

    def clear(self) -> None:
        """Forget every row and the last stamp; the rule's counts stay."""
        self._empty()
        self._rule.forget()

    def _empty(self) -> None:
        self._next = 0
        self._filled = 0
