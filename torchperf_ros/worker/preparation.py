"""A worker's start: its process, its adapter and its tiers, up to the first frame."""

import contextlib
import faulthandler
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from torchperf_ros.api.adapter import Adapter, open_adapter
from torchperf_ros.api.errors import (
    AdapterError,
    BadInput,
    ConfigError,
    TorchperfError,
    UnknownMessageType,
    one_line,
)
from torchperf_ros.api.histories import work_for
from torchperf_ros.api.messages import full_name, warm_up
from torchperf_ros.engines.device import Device, choose_device, leave
from torchperf_ros.engines.engine import CaptureFailed
from torchperf_ros.engines.outputs import tensors_in
from torchperf_ros.worker.batching import find_batching
from torchperf_ros.worker.capture import step_into_background
from torchperf_ros.worker.reports import Reports, of_start, readable
from torchperf_ros.worker.session import Prepared, Session, output_message, seed_from
from torchperf_ros.worker.tier import InvalidOutput, OutputCheck, Tier
from torchperf_ros.worker.tier_loader import TierLoader
from torchperf_ros.workers.calibration import Batching, Calibration
from torchperf_ros.workers.control import Description, LastWords, Progress, Ready, unpack_message
from torchperf_ros.workers.package_cache import use_compiler_cache
from torchperf_ros.workers.process_setup import LARGEST_KEPT_BYTES, keep_freed_memory, set_nice
from torchperf_ros.workers.protocol import MAX_CONTROL_BYTES, STACK_FILE, STACK_SIGNAL
from torchperf_ros.workers.worker_setup import WorkerSetup

_PERMANENT = (AdapterError, ConfigError, UnknownMessageType, SystemExit)  # the adapter called exit()
_RINGS_AGAIN_S = 0.02
_T = TypeVar("_T")


def main(frames_fd: int, control_fd: int, result_fd: int, *ring_fds: int) -> int:
    """Set up, load, serve until the node is gone. Returns the exit status.

    Takes the sockets for frames and for everything else, where the setup waits, and the memory of results
    and of each stream's frames.
    """
    control = socket.socket(fileno=control_fd)
    setup: WorkerSetup = unpack_message(control.recv(MAX_CONTROL_BYTES), WorkerSetup)
    reports = Reports(control)
    try:
        come_forward, _lock = _set_up_process(setup)
        preparation = Preparation(setup, reports)
        prepared = preparation.load()
        frames = socket.socket(fileno=frames_fd)
        session = Session(setup, prepared, reports, control, frames, result_fd, *ring_fds)
        session.limited = TimeLimit(setup.hang_ms / 2).call
        ready = preparation.calibrate(prepared)
        come_forward()
        reports.say(ready)  # a frame may come from now on
        session.serve()
    except (Exception, SystemExit) as error:  # the process's boundary: the node shows this on /diagnostics
        text = str(error) if isinstance(error, TorchperfError) else of_start(error, setup.adapter)
        with contextlib.suppress(OSError):
            words = LastWords(
                text,
                isinstance(error, _PERMANENT),
                without_graphs=isinstance(error, CaptureFailed) and not error.is_known,
                out_of_memory=isinstance(error.__cause__, torch.OutOfMemoryError),
                found_out=isinstance(error, CaptureFailed),
            )
            reports.say(words)
        leave(1)
    return 0


def _set_up_process(setup: WorkerSetup) -> tuple[Callable[[], None], object]:
    """Signals, memory and priority, before anything is built.

    Returns what ends the low priority of the start, and a lock to keep while it compiles.
    """
    faulthandler.enable()  # a worker that dies by a signal leaves its stacks on stderr
    stacks = os.open(Path(os.environ["TMPDIR"], STACK_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)  # without the interpreter lock
    if setup.definitions:
        others = os.environ.get("AMENT_PREFIX_PATH", "")
        os.environ["AMENT_PREFIX_PATH"] = os.pathsep.join(filter(None, [setup.definitions, others]))
    keep_freed_memory(LARGEST_KEPT_BYTES, setup.kept_mib << 20)
    if setup.nice:
        set_nice(os.getpid(), setup.nice)
    come_forward = step_into_background() if setup.background else lambda: None
    lock = use_compiler_cache(setup.cache_dir, setup.cache_mib << 20) if setup.compiles else None
    return come_forward, lock


class Preparation:
    """Imports an adapter, builds its tiers, and measures them."""

    def __init__(self, setup: WorkerSetup, reports: Reports) -> None:
        self._setup, self._reports = setup, reports
        device = choose_device(setup.device, before=setup.device_before)
        self._device = Device(device, setup.threads, stream_priority=setup.stream_priority)

    def load(self) -> Prepared:
        """Import the adapter, report what it takes and gives, and build every tier."""
        setup, device = self._setup, self._device
        seed_from(setup.seed, "load")
        adapter = self._adapter_of(0)
        inputs = [(topic, full_name(name)) for topic, name in adapter.inputs.items()]
        output = full_name(adapter.output)
        for name in [*(name for _, name in inputs), output]:
            warm_up(name)
        observes = _overrides(adapter, "observe")
        scores = _overrides(adapter, "score_messages")
        self._reports.say(
            Description(tuple(inputs), output, observes, str(device.device), device.card, scores)
        )
        self._loader = TierLoader(
            adapter,
            setup,
            device,
            self._reports.alert,
            lambda key: self._reports.say(Progress("capturing" if key else "loading", key)),
        )
        tiers: dict[int, Tier] = {}
        with torch.inference_mode():
            for number, _ in self._each_tier("loading"):
                tiers[number] = self._loader.load(number)
        adapters = [adapter]
        for stream in range(1, len(setup.streams)):
            work_for(stream)
            seed_from(setup.seed, ("load", stream))
            adapters.append(self._adapter_of(stream, like=adapter))
        work_for(0)
        return Prepared(adapters, device, inputs, output, observes, _overrides(adapter, "scene"), tiers, {})

    def _adapter_of(self, stream: int, like: Adapter | None = None) -> Adapter:
        """The adapter of a stream.

        Raises:
            AdapterError: it does not take the option `stream`, or takes or gives something else than the
                first stream's, which it is to be `like`.
        """
        setup, on = self._setup, self._device.device
        try:
            adapter = open_adapter(setup.adapter, setup.options_of(stream), on)
        except Exception as error:
            if setup.streams and _opens(setup.adapter, setup.options, on):
                raise AdapterError(
                    f"adapter {setup.adapter} refuses the option 'stream', which names the stream that it"
                    f" is of, here {setup.streams[stream]!r}; it has to take it: {one_line(error)}"
                ) from error
            raise
        for name in ("inputs", "output", "anytime") if like is not None else ():
            own, first = getattr(adapter, name), getattr(like, name)
            if own != first or (name == "inputs" and list(own) != list(first)):
                raise AdapterError(
                    f"adapter {setup.adapter} has the {name} {own!r} for stream {setup.streams[stream]!r}"
                    f" and {first!r} for {setup.streams[0]!r}; they have to be the same"
                )
        return adapter

    def calibrate(self, prepared: Prepared) -> Ready:
        """Warm up and time every tier; returns what says that it is ready."""
        setup, adapter = self._setup, prepared.adapters[0]
        calibrations = list(setup.calibrations) or [Calibration(0.0, 0.0)] * len(setup.tiers)
        fixed_sizes = not adapter.dynamic_dims()
        with torch.inference_mode():
            for number, name in self._each_tier("warming up"):
                tier, example = prepared.tiers[number], adapter.example_inputs(name)
                known = calibrations[number] if setup.calibrations else None
                calibrations[number] = tier.calibrate(example, briefly=setup.background, known=known)
                outputs, _ = tier.run(example)
                of_values = fixed_sizes and tier.sizes_follow_values(example)
                check = OutputCheck(outputs, fixed_sizes=fixed_sizes, of_values=of_values)
                prepared.checks[number] = check
                _check_steps(tier, check, example)
                self._run_whole_frame(prepared, tier, check, example)
                state = self._loader.forget_runs(name, example)
                if state and len(prepared.adapters) > 1:
                    raise AdapterError(
                        f"tier {name}: the model keeps state between calls ({', '.join(state)}), which the"
                        " streams would share; keep it in the adapter, which each stream has for itself, or"
                        " give each camera a stage"
                    )
                if why := check.unchecked:
                    self._reports.warn(f"tier {name}: outputs are not checked for NaN and Inf: {why}")
        batching = self._batching(prepared) if setup.batch > 1 else Batching()
        if any(tier.facts.engine == "compile" for tier in prepared.tiers.values()):
            # from here on it would cost a frame its deadline
            torch.compiler.set_stance("fail_on_recompile")
        facts = tuple(prepared.facts(setup.tiers))
        return Ready(tuple(calibrations), facts, tuple(self._loader.missing), batching)

    def _batching(self, prepared: Prepared) -> Batching:
        """Whether and how fast one run answers several frames; says why not."""
        setup, adapter = self._setup, prepared.adapters[0]
        rests = setup.background and self._device.is_cuda
        with torch.inference_mode():
            found = find_batching(adapter, prepared.tiers, setup, self._reports, rests=rests)
            for number in prepared.tiers:
                name = setup.tiers[number]
                self._loader.forget_runs(name, adapter.example_inputs(name))
        return found

    def _run_whole_frame(
        self, prepared: Prepared, tier: Tier, check: OutputCheck, example: tuple[torch.Tensor, ...]
    ) -> None:
        """Do once what a frame does beside the model.

        On CUDA the first use of a kernel loads it, and a copy pins memory. Without messages to begin with
        it is upload, check and download; what fails here fails at a frame, too.
        """
        adapter = prepared.adapters[0]
        try:
            messages, inputs = adapter.example_messages(), tuple(tensor.cpu() for tensor in example)
            if not messages and not self._device.is_cuda:
                return
            if messages:
                inputs = adapter.preprocess(messages)
                adapter.forget()  # a history that it was put into
            outputs, _ = tier.run(inputs)
            check.check(outputs)
            if messages:
                output_message(adapter, outputs, messages, prepared.output)
            for tensor in tensors_in(outputs):
                tensor.cpu()
        except Exception as error:  # the user's adapter and model run here
            kind = "" if isinstance(error, TorchperfError) else f"{type(error).__name__}: "
            why = f"{kind}{readable(error).decode()}"
            self._reports.warn(f"tier {tier.facts.name}: its first whole frame, of examples, failed: {why}")

    def _each_tier(self, doing: str) -> Iterator[tuple[int, str]]:
        loaded = sorted(self._setup.loaded)
        for place, number in enumerate(loaded, start=1):
            tier = self._setup.tiers[number]
            self._reports.say(Progress(f"{doing} {tier} ({place} of {len(loaded)})"))
            yield number, tier


def _opens(path: str, options: dict[str, Any], device: torch.device) -> bool:
    """Whether the adapter can be made with these options."""
    with contextlib.suppress(Exception):
        open_adapter(path, options, device)
        return True
    return False


def _overrides(adapter: Adapter, method: str) -> bool:
    """Whether the adapter has its own; asked of the bound method, which one that wraps another passes on."""
    own, default = getattr(adapter, method), getattr(Adapter, method)
    return getattr(own, "__func__", None) is not default


def _check_steps(tier: Tier, check: OutputCheck, example: tuple[torch.Tensor, ...]) -> None:
    """Run an anytime model's steps once.

    Raises:
        AdapterError: there are none, or one gives something else than `forward`.
    """
    number = 0
    try:
        for number, (outputs, _) in enumerate(tier.steps(example), start=1):  # noqa: B007
            check.check(outputs)
    except InvalidOutput as error:
        raise AdapterError(f"tier {tier.facts.name}: step {number} of its example: {error}") from error
    if tier.is_anytime and not number:
        raise AdapterError(
            f"tier {tier.facts.name}: steps gave nothing; the last has to be what forward gives"
        )


class _Rings(BaseException):
    """The time is over. No `except Exception` on the way takes it for an error of its own."""


class TimeLimit:
    """Ends Python code of the main thread that takes too long, with `BadInput`.

    A message of 8 MB may list a million messages and texts, each of which costs the decoder microseconds.
    How many it lists shows only in the decoding, so the time is what is limited: half of `hang_ms`, after
    which the pool would kill the worker, and then the next one that gets this input.
    """

    def __init__(self, limit_ms: float) -> None:
        self._limit_ms = limit_ms
        self._is_on = False
        signal.signal(signal.SIGALRM, self._ring)

    def call(self, act: Callable[..., _T], *given: object) -> _T:
        """Call it; a `BadInput` when the time is over."""
        try:
            try:
                self._is_on = True
                # again and again, as an error that is raised in a finaliser is lost
                signal.setitimer(signal.ITIMER_REAL, self._limit_ms / 1e3, _RINGS_AGAIN_S)
                return act(*given)
            finally:
                self._stop()
        except _Rings as error:
            self._stop()  # it may have rung before the first one was through
            raise BadInput(
                f"decoding the inputs took longer than {self._limit_ms:.0f} ms, half of hang_ms: their"
                " lists are too long; max_frame_bytes limits what a message can hold"
            ) from error

    def _stop(self) -> None:
        self._is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_on:
            raise _Rings
