"""Captures: what a worker records of itself on demand, a profile or its memory."""

import contextlib
import gc
import os
import resource
import socket
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.outputs import numbers_of
from torchperf_ros.workers.control import (
    COMMANDS,
    BeginCapture,
    CaptureBegan,
    CaptureDone,
    CaptureFull,
    Report,
    unpack_message,
)
from torchperf_ros.workers.incident_folder import EvidenceLimits, open_incidents
from torchperf_ros.workers.process_setup import set_nice
from torchperf_ros.workers.protocol import MAX_CONTROL_BYTES, peer_pid

_NOT_MARKED = contextlib.nullcontext()
_RLIMIT_NICE_0 = 20
_BACKGROUND_NICE = 5
_WARM_UP_FRAMES = 4  # back in service after a pause: their caches are cold
_PROFILED_FRAMES = 10
_MEMORY_WINDOW_S = 10.0
_STACK_DEPTH = 8
_CUDA_ENTRIES = 100_000
_ROWS = 25
_MIB = 1 << 20
_US_PER_MS = 1e3
_SIZES = ("rss", "pss", "uss", "shared", "swap", "vms")
_STEPS = (
    "decode",
    "observe",
    "preprocess",
    "inference",
    "postprocess",
)  # marks inside of a frame's, `<stage>/<tier>`


def step_into_background() -> Callable[[], None]:
    """Lower this process's priority below the worker that serves; returns what makes it what it was again.

    Only where the way back is permitted: to root, or with an RLIMIT_NICE that allows nice 0 (20).
    """
    if os.geteuid() != 0 and resource.getrlimit(resource.RLIMIT_NICE)[0] < _RLIMIT_NICE_0:
        return lambda: None
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    set_nice(os.getpid(), nice + _BACKGROUND_NICE)
    return lambda: set_nice(os.getpid(), nice)


class CaptureTaker:
    """The worker's side of captures, see `workers/capture.py`.

    Takes the node's commands between frames, records, writes, and answers where. The node gives no frames
    to a worker between a command and its answer.
    """

    def __init__(
        self, control: socket.socket, say: Callable[[Report], None], stage: str, device: torch.device
    ) -> None:
        self._control, self._say, self._stage, self._device = control, say, stage, device
        self._recording: ProfileRecording | MemoryRecording | None = None
        self._profile: ProfileRecording | None = None
        self._asked = BeginCapture("", EvidenceLimits("", 1))
        self._is_full = False

    def poll(self) -> None:
        """Obey what has come in; never waits. A failure is answered, and the worker serves on."""
        # nothing has come; or the node is gone, which ends the worker elsewhere
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._control.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT):
                command = unpack_message(data, *COMMANDS)
                come_forward = step_into_background()  # another worker answers meanwhile
                if isinstance(command, BeginCapture):
                    self._begin(command)
                else:
                    self._end()
                come_forward()
        if self._recording is not None and self._recording.full and not self._is_full:
            self._is_full = True
            self._say(CaptureFull(self._asked.what))

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A context that shows up under this name in what is recorded."""
        return _NOT_MARKED if self._profile is None else torch.profiler.record_function(name)

    def frame_done(self) -> None:
        if self._profile is not None:
            self._profile.frame_done()

    def _begin(self, asked: BeginCapture) -> None:
        self._asked, self._is_full, error = asked, False, ""
        try:
            if asked.what == "profile":
                self._recording = self._profile = ProfileRecording(self._stage, self._device)
            else:
                self._recording = MemoryRecording(self._device, peer_pid(self._control))
            self._recording.begin()
        except Exception:  # a profiler that cannot start must not end a worker that can serve
            self._recording = self._profile = None
            error = traceback.format_exc()
        self._say(CaptureBegan(asked.what, error))

    def _end(self) -> None:
        recording, self._recording, self._profile = self._recording, None, None
        what, path, summary, error = self._asked.what, "", "", ""
        try:
            if recording is None:
                raise TorchperfError("nothing was being recorded")
            written: list[str] = []
            incidents = open_incidents(**asdict(self._asked.evidence))
            path = str(
                incidents.keep(f"{what}-{self._stage}", lambda part: written.append(recording.finish(part)))
            )
            summary = written[0]
        except TorchperfError as failed:
            error = str(failed)
        except Exception:  # likewise
            error = traceback.format_exc()
        self._say(CaptureDone(what, path, summary, error))


class ProfileRecording:
    """A window of frames under torch.profiler.

    Writes `trace.json.gz` (for ui.perfetto.dev) and `profile.txt`.

    The latter is torch's own table of operators, which has the marks of a frame and its steps as well.

    The profiler's own schedule would prepare (1.6 s the first time, on two busy cores) and parse between
    two frames; here both happen in `begin` and `finish`, while the worker takes no frames, and between
    frames only what takes 0.1 to 0.3 ms.
    """

    def __init__(self, stage: str, device: torch.device) -> None:
        self._stage, self._device = stage, device
        self._action = ProfilerAction.WARMUP
        self._frames = 0

    def begin(self) -> None:
        """Load and prepare the profiler, without its remarks, which would go to the log as warnings."""
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if self._device.type == "cuda" else []),
        ]
        self._profile = profile(
            activities=activities, schedule=lambda _: self._action, record_shapes=True, acc_events=False
        )
        self._profile.start()

    def frame_done(self) -> None:
        """Count it; what was run from the last warm-up frame on is recorded."""
        self._frames += 1
        if self._frames >= _WARM_UP_FRAMES:
            self._action = ProfilerAction.RECORD
            self._profile.step()

    @property
    def full(self) -> bool:
        return self._frames >= _WARM_UP_FRAMES + _PROFILED_FRAMES

    def finish(self, folder: Path) -> str:
        """Stop and write; the line gives the time of a frame, and where most of it went."""
        self._profile.stop()
        self._profile.export_chrome_trace(str(folder / "trace.json.gz"))
        averages = self._profile.key_averages()
        summary = _summary(self._stage, averages)
        columns = ["cpu_time_total", *(["self_device_time_total"] if self._device.type == "cuda" else [])]
        tables = [averages.table(sort_by=column, row_limit=_ROWS) for column in columns]
        (folder / "profile.txt").write_text("\n\n".join([summary, *tables]), encoding="utf-8")
        return summary


def _summary(stage: str, averages: Iterable[Any]) -> str:
    """One line: the time of a frame in the window, and the step and the operator that took most of it."""
    found = [each for each in averages if each.device_type.name == "CPU"]
    frames = [each for each in found if each.key.startswith(f"{stage}/")]
    steps = [each for each in found if each.key in _STEPS]
    operators = [each for each in found if each.key.startswith("aten::")]
    count = sum(each.count for each in frames)
    if not count:
        return "no frame came while the profiler ran"
    per_frame = count * _US_PER_MS
    words = [f"{count} frames of {sum(each.cpu_time_total for each in frames) / per_frame:.2f} ms"]
    if steps:
        most = max(steps, key=attrgetter("cpu_time_total"))
        words.append(f"most of it in {most.key} ({most.cpu_time_total / per_frame:.2f} ms)")
    if operators:
        most = max(operators, key=attrgetter("self_cpu_time_total"))
        words.append(
            f"most in {most.key} ({most.self_cpu_time_total / per_frame:.2f} ms, {most.count} calls in all)"
        )
    return ", ".join(words)


class MemoryRecording:
    """What is allocated and kept within 10 s; writes `memory.txt`, on CUDA also `cuda_memory.pickle`.

    The latter is what torch's viewer (docs.pytorch.org/memory_viz) reads, and nothing here ever loads it.
    """

    def __init__(self, device: torch.device, node_pid: int, window_s: float = _MEMORY_WINDOW_S) -> None:
        self._node_pid = node_pid
        self._cuda = device.type == "cuda"
        self._window_s = window_s

    def begin(self) -> None:
        """Start tracing, which is off otherwise as it slows down every allocation."""
        if self._cuda:
            # stacks in C++ take minutes to write down, as each address is looked up
            torch.cuda.memory._record_memory_history(max_entries=_CUDA_ENTRIES, stacks="python")
        self._rss_bytes = psutil.Process().memory_info().rss
        tracemalloc.start(_STACK_DEPTH)
        self._before = tracemalloc.take_snapshot()
        self._began_s = time.monotonic()

    @property
    def full(self) -> bool:
        return time.monotonic() - self._began_s >= self._window_s

    def finish(self, folder: Path) -> str:
        """Compare, write, stop tracing; the line gives the length of the window and what grew most."""
        window_s = time.monotonic() - self._began_s
        gc.collect()
        changes = tracemalloc.take_snapshot().compare_to(self._before, "lineno")
        grown = [change for change in changes if change.size_diff > 0]
        tracemalloc.stop()
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "cuda_memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            (folder / "cuda_memory.txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
        rss_bytes = psutil.Process().memory_info().rss - self._rss_bytes
        summary = f"in {window_s:.1f} s: resident memory {rss_bytes / _MIB:+.2f} MiB"
        if grown:
            most = grown[0]
            place, size = most.traceback[0], most.size_diff / _MIB
            summary += f", Python's allocations most at {place} ({size:+.2f} MiB)"
        lines = [
            f"Memory of a worker, pid {os.getpid()}: {summary}",
            f"\nPython's allocations of these {window_s:.1f} s that are still there:",
            *map(str, grown[:_ROWS]),
            "\nTensors alive, MiB, count, shape, type, device:",
            *_tensors(),
            *_process_lines("This process", os.getpid()),
            *_process_lines("The node", self._node_pid),
        ]
        (folder / "memory.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
        return summary


def _tensors() -> Iterator[str]:
    """Tensors by shape, type and device, largest sum first; views of one storage count its bytes once."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    storages = set()
    for each in gc.get_objects():
        # `isinstance` would ask objects that answer by computing something
        if not issubclass(type(each), torch.Tensor):
            continue
        shape = f"nested {each.size(0)}" if each.is_nested else list(each.shape)
        key = f"{shape} {str(each.dtype).removeprefix('torch.')} {each.device}"
        counts[key] += 1
        if hasattr(each, "__tensor_flatten__"):  # it is made of others, which are found by themselves
            continue
        for part in (each,) if each.layout is torch.strided else numbers_of(each):
            storage = part.untyped_storage()
            if storage.device.type != "meta":  # a compiler's fake tensor stands for one, and has no memory
                sizes[key] += 0 if storage.data_ptr() in storages else storage.nbytes()
                storages.add(storage.data_ptr())
    return (f"{size / _MIB:12.3f} {counts[key]:6d}  {key}" for key, size in sizes.most_common(_ROWS))


def _process_lines(title: str, pid: int) -> Iterator[str]:
    """What the kernel says of a process; a line that says why where it may not be read."""
    try:
        process = psutil.Process(pid)
        full = process.memory_full_info()
        maps = sorted(process.memory_maps(grouped=True), key=lambda each: -int(each.rss))
    except psutil.Error as error:
        yield f"\n{title}, pid {pid}, cannot be read: {error}"
        return
    sizes = ", ".join(f"{name} {getattr(full, name) / _MIB:.1f}" for name in _SIZES)
    yield f"\n{title}, pid {pid}, MiB: {sizes}; its largest mappings, rss, pss, private dirty:"
    for each in maps[:_ROWS]:
        rss, pss, dirty = each.rss / _MIB, each.pss / _MIB, each.private_dirty / _MIB
        yield f"{rss:10.1f} {pss:10.1f} {dirty:10.1f}  {each.path}"
