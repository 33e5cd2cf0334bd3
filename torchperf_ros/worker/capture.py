"""Captures: what a worker records of itself on demand, a profile or its memory, between frames and beside them."""

import contextlib
import gc
import os
import resource
import socket
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from torchperf_ros.api.errors import ProtocolError, TorchperfError
from torchperf_ros.api.text import markdown_table
from torchperf_ros.workers.incident_folder import open_incidents
from torchperf_ros.workers.process_setup import set_nice
from torchperf_ros.workers.protocol import MAX_CONTROL_BYTES, peer_pid, unpack_control

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
    """The worker's side of captures.

    Takes the node's commands between frames, records, writes, and answers where.

    Commands: `record` (what, evidence: the parameters of the folder) begins, `finish` ends and writes. The
    answers: `recording` (error: why not, or ""), `recorded` (there is enough) and `evidence` (what, path,
    summary, error). The node gives no frames to a worker between a command and its answer.
    """

    def __init__(
        self, control: socket.socket, say: Callable[..., None], stage: str, device: torch.device
    ) -> None:
        self._control, self._say, self._stage, self._device = control, say, stage, device
        self._recording: ProfileRecording | MemoryRecording | None = None
        self._what = ""
        self._evidence: dict[str, Any] = {}
        self._said_full = False

    def poll(self) -> None:
        """Obey what has come in; never waits. A failure is answered, and the worker serves on."""
        while True:
            try:
                data = self._control.recv(MAX_CONTROL_BYTES, socket.MSG_DONTWAIT)
            except (
                BlockingIOError,
                ConnectionError,
            ):  # nothing; or the node is gone, which ends the worker elsewhere
                break
            if not data:
                break
            self._obey(unpack_control(data))
        if self._recording is not None and self._recording.full and not self._said_full:
            self._said_full = True
            self._say("recorded", what=self._what)

    def mark(self, name: str) -> AbstractContextManager[object]:
        """A context that shows up under this name in what is recorded."""
        profiles = isinstance(self._recording, ProfileRecording)
        return torch.profiler.record_function(name) if profiles else _NOT_MARKED

    def frame_done(self) -> None:
        """A frame was run."""
        if isinstance(self._recording, ProfileRecording):
            self._recording.frame_done()

    def _obey(self, command: dict[str, Any]) -> None:
        come_forward = step_into_background()  # another worker answers meanwhile
        if command["kind"] == "record":
            self._begin(command["what"], command["evidence"])
        elif command["kind"] == "finish":
            self._finish()
        else:
            raise ProtocolError(f"unknown command {command['kind']!r}")
        come_forward()

    def _begin(self, what: str, evidence: dict[str, Any]) -> None:
        made: ProfileRecording | MemoryRecording = (
            ProfileRecording(self._stage, self._device)
            if what == "profile"
            else MemoryRecording(self._device, peer_pid(self._control))
        )
        error = ""
        try:
            made.begin()
        except Exception:  # a profiler that cannot start must not end a worker that can serve
            error = traceback.format_exc()
        self._what, self._evidence, self._said_full = what, evidence, False
        self._recording = None if error else made
        self._say("recording", what=what, error=error)

    def _finish(self) -> None:
        recording, self._recording = self._recording, None
        path = error = ""
        written: list[str] = []
        try:
            if recording is None:
                raise TorchperfError("nothing was being recorded")
            name = f"{self._what}-{self._stage}"
            path = str(
                open_incidents(**self._evidence).keep(name, lambda p: written.append(recording.finish(p)))
            )
        except TorchperfError as failed:
            error = str(failed)
        except Exception:  # likewise
            error = traceback.format_exc()
        summary = "" if error else written[0]
        self._say("evidence", what=self._what, path=path, summary=summary, error=error)


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
        """Load and prepare the profiler, without its remarks on that (they would go to the log as warnings)."""
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
        """Whether all frames of the window were run."""
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
    """What is allocated and kept within 10 s; writes `memory.md`, on CUDA also `cuda_memory.pickle`.

    The latter is what torch's viewer (docs.pytorch.org/memory_viz) reads, and nothing here ever loads it.
    """

    def __init__(self, device: torch.device, node_pid: int, window_s: float = _MEMORY_WINDOW_S) -> None:
        self._node_pid = node_pid
        self._cuda = device.type == "cuda"
        self._window_s = window_s

    def begin(self) -> None:
        """Start tracing (tracemalloc is off before.

        It makes every allocation slower), and count what there is.
        """
        if self._cuda:
            # stacks in C++ take minutes to write down, as each address is looked up
            torch.cuda.memory._record_memory_history(max_entries=_CUDA_ENTRIES, stacks="python")
        self._rss_bytes = psutil.Process().memory_info().rss
        self._objects = _objects_by_type()
        tracemalloc.start(_STACK_DEPTH)
        self._before = tracemalloc.take_snapshot()
        self._began_s = time.monotonic()

    @property
    def full(self) -> bool:
        """Whether the window is over."""
        return time.monotonic() - self._began_s >= self._window_s

    def finish(self, folder: Path) -> str:
        """Compare, write, stop tracing; the line gives the length of the window and what grew most."""
        window_s = time.monotonic() - self._began_s
        gc.collect()
        now = _objects_by_type()
        changes = tracemalloc.take_snapshot().compare_to(self._before, "lineno")
        grown = [change for change in changes if change.size_diff > 0]
        tracemalloc.stop()
        if self._cuda:
            torch.cuda.memory._dump_snapshot(str(folder / "cuda_memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
            (folder / "cuda_memory.txt").write_text(torch.cuda.memory_summary(), encoding="utf-8")
        rss_bytes = psutil.Process().memory_info().rss
        summary = f"in {window_s:.1f} s: resident memory {_signed_mib(rss_bytes - self._rss_bytes)}"
        if grown:
            summary += (
                f", Python's allocations most at {grown[0].traceback[0]}"
                f" ({_signed_mib(grown[0].size_diff)})"
            )
        changed = Counter({name: count - self._objects[name] for name, count in now.items()})
        lines = [
            f"# Memory of a worker\n\npid {os.getpid()}, {summary}.",
            "What was allocated before the window is not in the first table.",
            *markdown_table(
                f"Python's allocations of these {window_s:.1f} s that are still there",
                ("where", "MiB", "blocks"),
                [
                    (str(c.traceback[0]), f"{c.size_diff / _MIB:.3f}", f"{c.count_diff:+d}")
                    for c in grown[:_ROWS]
                ],
            ),
            *markdown_table("Tensors alive", ("shape", "type", "device", "tensors", "MiB"), _tensors()),
            *markdown_table(
                "Objects by type, those that grew most first",
                ("type", "objects", "in the window"),
                [(name, str(now[name]), f"{change:+d}") for name, change in changed.most_common(_ROWS)],
            ),
            *_process_tables("This process", os.getpid()),
            *_process_tables("The node", self._node_pid),
            "",
        ]
        (folder / "memory.md").write_text("\n".join(lines), encoding="utf-8")
        return summary


def _objects_by_type() -> Counter[str]:
    """How many objects there are that the collector knows, by type."""
    found: Counter[str] = Counter()
    for kind, count in Counter(map(type, gc.get_objects())).items():
        found[f"{kind.__module__}.{kind.__qualname__}"] += count
    return found


def _tensors() -> list[tuple[str, ...]]:
    """Tensors by shape, type and device, largest sum first; views of one storage count its bytes once."""
    counts: Counter[tuple[str, str, str]] = Counter()
    sizes: Counter[tuple[str, str, str]] = Counter()
    storages = set()
    for each in gc.get_objects():
        if not issubclass(
            type(each), torch.Tensor
        ):  # isinstance would ask objects that answer by computing something
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
    whole = [
        (name, f"{getattr(full, name) / _MIB:.1f}")
        for name in ("rss", "pss", "uss", "shared", "swap", "vms")
    ]
    rows = [
        (each.path, *(f"{size / _MIB:.1f}" for size in (each.rss, each.pss, each.private_dirty)))
        for each in maps
    ]
    return [
        *markdown_table(f"{title}, pid {pid}", ("", "MiB"), whole),
        *markdown_table(
            "Its largest mappings", ("what", "rss MiB", "pss MiB", "private dirty MiB"), rows[:_ROWS]
        ),
    ]


def _signed_mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:+.2f} MiB"
