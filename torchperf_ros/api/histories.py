"""The last N samples of something as one tensor, and the rules for their stamps.

Next, repeat, or a new start.
"""

import enum
import weakref

import torch

from torchperf_ros.api.errors import AdapterError, ConfigError

_LIVE: "weakref.WeakSet[HistoryBuffer]" = weakref.WeakSet()  # every history of this process
_at_work = 0


def history_bytes() -> int:
    """Bytes of every history of this process."""
    return sum(buffer.nbytes for buffer in _LIVE)


def work_for(stream: int) -> None:
    """From now on the adapter of this stream is at work: histories that are made are its own."""
    global _at_work  # noqa: PLW0603 - a process has one loop, which runs one adapter at a time
    _at_work = stream


def skip_in_histories(samples: int) -> None:
    """Leave a gap of so many samples in every history of the stream at work."""
    for buffer in _own_histories():
        buffer.skip(samples)


def clear_histories() -> None:
    """Empty every history of the stream at work."""
    for buffer in _own_histories():
        buffer.clear()


def _own_histories() -> "list[HistoryBuffer]":
    return [buffer for buffer in _LIVE if buffer.stream == _at_work]


class StampVerdict(enum.Enum):
    """What a sample's stamp means for a history: FIRST, NEXT and UNSTAMPED (0 or less) are appended.

    Attributes:
        REPEATED: the last stamp again; ignored.
        OLDER: older than the last by at most the tolerance, so out of order; ignored.
        GAP: newer than the last by more than the largest gap; the history starts anew with it.
        JUMPED_BACK: older than the last by more than the tolerance, as after a log's loop or a clock's
            reset; the history starts anew with it.
    """

    FIRST = "first"
    NEXT = "next"
    UNSTAMPED = "unstamped"
    REPEATED = "repeated"
    OLDER = "older"
    GAP = "gap"
    JUMPED_BACK = "jumped_back"


class HistoryBuffer:
    """A ring of N rows on the CPU that is allocated once and never grows.

    Rows are copies: they keep neither the sample's memory nor its autograd graph alive. NaN and Inf are
    stored as they are; what they mean is the caller's to decide before it appends. Each stamp is judged by
    that of the last sample that was kept and had one. Not thread-safe: one adapter owns it.

    Attributes:
        capacity: number of rows N.
        stream: the number of the stream whose adapter owns it.
    """

    def __init__(
        self,
        capacity: int,
        row_shape: tuple[int, ...],
        *,
        max_gap_ns: int,
        tolerance_ns: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate everything that the buffer will ever need.

        Args:
            capacity: number of rows N, at least 1.
            row_shape: shape of one sample; `()` for scalars.
            max_gap_ns: largest step forward in ns that still continues the history, at least 1.
            tolerance_ns: largest step backward in ns that counts as out of order rather than a jump, at
                least 0.
            dtype: element type of the samples.

        Raises:
            ConfigError: a value is out of range.
        """
        if capacity < 1 or any(size < 1 for size in row_shape):
            raise ConfigError(
                f"capacity is {capacity}, row_shape is {row_shape}; allowed: 1 row and more, sizes of 1 and"
                " more"
            )
        if max_gap_ns < 1 or tolerance_ns < 0:
            raise ConfigError(
                f"max_gap_ns is {max_gap_ns}, tolerance_ns is {tolerance_ns}; allowed: 1 ns and more, 0 ns"
                " and more"
            )
        self.capacity, self.stream = capacity, _at_work
        self._row_shape = tuple(row_shape)
        self._max_gap_ns, self._tolerance_ns = max_gap_ns, tolerance_ns
        self._last_ns: int | None = None
        # Plain tensors even under inference_mode, whose tensors could not be written outside of it.
        with torch.inference_mode(mode=False):
            self._ring = torch.zeros((capacity, *row_shape), dtype=dtype)
            self._window = torch.zeros((capacity, *row_shape), dtype=dtype)
            self._mask = torch.zeros(capacity, dtype=torch.bool)
            self._holds = torch.zeros(capacity, dtype=torch.bool)
        self._next = 0  # the row that the next sample takes: the oldest; rows without a sample are zero
        _LIVE.add(self)

    def __len__(self) -> int:
        """Number of rows that hold a sample, 0 to `capacity`."""
        return int(self._holds.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the buffer holds; the same from the first call to the last."""
        return sum(part.nbytes for part in (self._ring, self._window, self._mask, self._holds))

    def append(self, sample: torch.Tensor, stamp_ns: int) -> StampVerdict:
        """Copy one sample in, on any device, unless its stamp is ignored.

        First forget the others after a jump.

        Returns:
            What its stamp in ns means, 0 where there is none; it becomes the last one unless it is ignored.

        Raises:
            AdapterError: the sample's shape or dtype is not the row's; the history is as before.
        """
        if tuple(sample.shape) != self._row_shape or sample.dtype != self._ring.dtype:
            raise AdapterError(
                f"history takes rows of shape {self._row_shape} and {self._ring.dtype}, "
                f"got {tuple(sample.shape)} and {sample.dtype}"
            )
        verdict = self._judge(stamp_ns)
        if verdict in {StampVerdict.REPEATED, StampVerdict.OLDER}:
            return verdict
        if verdict in {StampVerdict.GAP, StampVerdict.JUMPED_BACK}:
            self.clear()
        if verdict is not StampVerdict.UNSTAMPED:
            self._last_ns = stamp_ns
        self._ring[self._next].copy_(sample.detach())
        self._advance(holds=True)
        return verdict

    def _judge(self, stamp_ns: int) -> StampVerdict:
        if stamp_ns <= 0:
            return StampVerdict.UNSTAMPED
        if self._last_ns is None:
            return StampVerdict.FIRST
        step_ns = stamp_ns - self._last_ns
        if step_ns > self._max_gap_ns:
            return StampVerdict.GAP
        if step_ns > 0:
            return StampVerdict.NEXT
        if step_ns == 0:
            return StampVerdict.REPEATED
        return StampVerdict.OLDER if step_ns >= -self._tolerance_ns else StampVerdict.JUMPED_BACK

    def skip(self, samples: int) -> None:
        """Leave a gap: so many rows that are zero and masked out."""
        for _ in range(min(samples, self.capacity)):
            self._ring[self._next].zero_()
            self._advance(holds=False)

    def _advance(self, *, holds: bool) -> None:
        self._holds[self._next] = holds
        self._next = (self._next + 1) % self.capacity

    def window(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows [N, *row_shape], the newest last, and a mask [N], True where a row holds a sample.

        On the CPU.

        Rows without a sample, the leading ones while it fills and gaps, are zero. Both tensors belong to
        the buffer and are written again by the next call: copy what has to outlast it.
        """
        for whole, ring in ((self._window, self._ring), (self._mask, self._holds)):
            older = self.capacity - self._next
            whole[:older].copy_(ring[self._next :])
            whole[older:].copy_(ring[: self._next])
        return self._window, self._mask

    def clear(self) -> None:
        """Forget every row and the last stamp."""
        self._last_ns = None
        self._next = 0
        self._ring.zero_()
        self._holds.zero_()
