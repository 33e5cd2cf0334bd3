"""What holds memory and what grew: a window of tracemalloc, or of CUDA's allocator, and a look at the process."""

import gc
import os
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import psutil
import torch

from torchperf_ros.core.markdown_table import markdown_table

_WINDOW_S = 10.0
_STACK_DEPTH = 8
_CUDA_ENTRIES = 100_000
_ROWS = 25
_MIB = 1 << 20


class MemoryRecording:
    """Records for 10 s what is allocated and kept; writes `memory.md`, on CUDA also `cuda_memory.pickle`.

    The latter is what torch's viewer (docs.pytorch.org/memory_viz) reads, and nothing here ever loads it.
    """

    def __init__(self, device: torch.device, window_s: float = _WINDOW_S) -> None:
        """Take the worker's device."""
        self._cuda = device.type == "cuda"
        self._window_s = window_s

    def begin(self) -> None:
        """Start tracing (tracemalloc is off before: it makes every allocation slower), and count what there is."""
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=_CUDA_ENTRIES)
        self._rss_bytes = psutil.Process().memory_info().rss
        self._objects = _objects_by_type()
        tracemalloc.start(_STACK_DEPTH)
        self._before = tracemalloc.take_snapshot()
        self._began_s = time.monotonic()

    def frame_done(self) -> None:
        """Nothing: allocations are seen as they are made."""

    @property
    def full(self) -> bool:
        """Whether the window is over."""
        return time.monotonic() - self._began_s >= self._window_s

    def finish(self, folder: Path) -> str:
        """Compare, write, stop tracing; the line says how long the window was and what grew most."""
        window_s = time.monotonic() - self._began_s
        gc.collect()
        now = _objects_by_type()
        grown = [
            change for change in tracemalloc.take_snapshot().compare_to(self._before, "lineno") if change.size_diff > 0
        ]
        tracemalloc.stop()
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "cuda_memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            (folder / "cuda_memory.txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
        rss_bytes = psutil.Process().memory_info().rss
        summary = f"in {window_s:.1f} s: resident memory {_signed_mib(rss_bytes - self._rss_bytes)}"
        if grown:
            most = grown[0]
            where = f"{most.traceback[0].filename}:{most.traceback[0].lineno}"
            summary += f", Python's allocations most at {where} ({_signed_mib(most.size_diff)})"
        changed = Counter({name: count - self._objects[name] for name, count in now.items()})
        lines = [
            "# Memory of a worker",
            "",
            f"pid {os.getpid()}, {summary}.",
            "What was allocated before the window is not in the first table.",
            *markdown_table(
                f"Python's allocations of these {window_s:.1f} s that are still there",
                ("where", "MiB", "blocks"),
                [(str(c.traceback[0]), f"{c.size_diff / _MIB:.3f}", f"{c.count_diff:+d}") for c in grown[:_ROWS]],
            ),
            *markdown_table("Tensors alive", ("shape", "type", "device", "tensors", "MiB"), _tensors()),
            *markdown_table(
                "Objects by type, those that grew most first",
                ("type", "objects", "in the window"),
                [(name, str(now[name]), f"{change:+d}") for name, change in changed.most_common(_ROWS)],
            ),
            *_process_tables("This process", os.getpid()),
            *_process_tables("The node", os.getppid()),
            "",
        ]
        (folder / "memory.md").write_text("\n".join(lines), encoding="utf-8")
        return summary


def _objects_by_type() -> Counter[str]:
    """How many objects there are that the collector knows, by type."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def _tensors() -> list[tuple[str, ...]]:
    """Tensors by shape, type and device, largest sum first; views of one storage count its bytes once."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    storages = set()
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor):  # isinstance would ask objects that answer by computing something
            continue
        key = (str(list(each.shape)), str(each.dtype).removeprefix("torch."), str(each.device))
        counts[key] += 1
        storage = each.untyped_storage()
        if storage.device.type != "meta":  # a compiler's fake tensor stands for one, and has no memory
            sizes[key] += 0 if storage.data_ptr() in storages else storage.nbytes()
            storages.add(storage.data_ptr())
    return [(*key, str(counts[key]), f"{size / _MIB:.3f}") for key, size in sizes.most_common(_ROWS)]


def _process_tables(title: str, pid: int) -> list[str]:
    """What the kernel says of a process; a line that says why where it may not be read."""
    try:
        process = psutil.Process(pid)
        full = process.memory_full_info()
        maps = sorted(process.memory_maps(grouped=True), key=lambda each: -int(each.rss))
    except psutil.Error as error:
        return ["", f"## {title}", "", f"pid {pid} cannot be read: {error}"]
    whole = [(name, f"{getattr(full, name) / _MIB:.1f}") for name in ("rss", "pss", "uss", "shared", "swap", "vms")]
    rows = [(each.path, *(f"{size / _MIB:.1f}" for size in (each.rss, each.pss, each.private_dirty))) for each in maps]
    return [
        *markdown_table(f"{title}, pid {pid}", ("", "MiB"), whole),
        *markdown_table("Its largest mappings", ("what", "rss MiB", "pss MiB", "private dirty MiB"), rows[:_ROWS]),
    ]


def _signed_mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:+.2f} MiB"
