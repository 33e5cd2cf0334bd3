"""Where a model runs: device choice, streams, step timing, memory, and errors that a process cannot survive."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.worker.pinned_copy import PinnedCopy

_NS_PER_MS = 1e6
_MEMORY_STATISTICS = {
    "allocated": "allocated_bytes.all.current",
    "peak": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "inactive_split": "inactive_split_bytes.all.current",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}


def choose_device(wanted: str) -> torch.device:
    """`auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: a CUDA device that this machine does not have.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            msg = f"parameter device: {wanted!r} is not there; torch {torch.__version__} sees {count} CUDA devices"
            raise ConfigError(msg)
        device = torch.device("cuda", device.index or 0)
    return device


class Device:
    """The device of a worker with its own stream, so that its copies and kernels wait for nobody else's."""

    def __init__(self, device: torch.device, threads: int) -> None:
        """Take the device; `threads` CPU threads for a model's operators, 0: all cores but one."""
        self.device = device
        cores = torch.get_num_threads() if threads else max(1, torch.get_num_threads() - 1)
        torch.set_num_threads(threads or cores)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # fp32 is what it says; torch's own default is tf32 in convolutions, which is a precision of its own here
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._copies = PinnedCopy(device, self._stream)

    @property
    def is_cuda(self) -> bool:
        """Whether this is a CUDA device."""
        return self._stream is not None

    def on_stream(self) -> AbstractContextManager[object]:
        """Context in which work goes to the worker's own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def to_device(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Move inputs that are not there yet, on the worker's own stream and without waiting; see `PinnedCopy`."""
        return self._copies.to_device(tensors) if self.is_cuda else tensors

    def to_host(self, outputs: Any) -> Any:  # noqa: ANN401 - whatever a model returns
        """Outputs in host memory, complete; from CUDA valid until the next call. On the CPU, the very same."""
        return self._copies.to_host(outputs) if self.is_cuda else outputs

    @contextmanager
    def timed(self) -> Iterator[list[int]]:
        """Time a block, on CUDA by events, else by the clock; the list then holds one value in ns."""
        took_ns: list[int] = []
        if self._stream is None:
            started = time.perf_counter_ns()
            yield took_ns
            took_ns.append(time.perf_counter_ns() - started)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        yield took_ns
        end.record(self._stream)
        end.synchronize()
        took_ns.append(round(begin.elapsed_time(end) * _NS_PER_MS))

    def empty_cache(self) -> None:
        """Give the allocator's unused blocks back to the device."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory_bytes(self) -> dict[str, int]:
        """Device memory, without waiting for the device; empty on the CPU, where the node reads the process's own.

        In bytes: `allocated` now and at its `peak`, `reserved`, `inactive_split` (free parts of blocks in use, which
        other sizes cannot have), `free` and `total` of the device. Counts: `retries` (the cache was emptied to get
        memory) and `ooms` (there was none even so).
        """
        if not self.is_cuda:
            return {}
        free, total = torch.cuda.mem_get_info(self.device)
        statistics = torch.cuda.memory_stats(self.device)
        return {
            **{name: int(statistics.get(key, 0)) for name, key in _MEMORY_STATISTICS.items()},
            "free": free,
            "total": total,
        }

    def is_lost(self, error: Exception) -> bool:
        """Whether after this error the CUDA context is gone (a sticky error), so that only a new process helps.

        Sticky errors are returned by every later call (CUDA runtime API, "error handling"); running out of memory is
        not one of them.
        """
        if not self.is_cuda or not isinstance(error, RuntimeError) or isinstance(error, torch.cuda.OutOfMemoryError):
            return False
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return True
        return False
