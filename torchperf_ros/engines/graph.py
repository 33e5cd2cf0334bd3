"""CUDA graphs: a model's kernels captured once and replayed, and what is known of models that cannot be.

A capture that fails leaves torch unusable in its process, so the process has to end. What was found is kept beside
the packages, by the model's identity: the next process does not try again.
"""

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.built_tier import Call, Inputs
from torchperf_ros.engines.stopwatch import no_garbage_collection
from torchperf_ros.settings.files import make_private
from torchperf_ros.workers.package_cache import CAPTURE_FAILED, CAPTURING, PackageCache
from torchperf_ros.workers.package_manifest import Identity

_CAPTURE_WARM_UP_RUNS = 3
# One process may have been killed by somebody else at just that time.
_MOST_DEATHS = 2
_OF_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class CaptureFailed(TorchperfError):
    """A model cannot be captured as a CUDA graph.

    This process has to end, and the next one to do without graphs.

    torch leaves the capture's stream as the current one, and its allocator counts a capture that never
    ends: later calls, such as `torch.cuda.empty_cache`, raise (pytorch/pytorch pull requests 180395 and
    190308).

    Attributes:
        is_known: the next process finds it in the cache by itself.
    """

    is_known = False


class CaptureRecord:
    """What is known of capturing one model, on disk beside the packages."""

    def __init__(self, cache: PackageCache, identity: Identity) -> None:
        """Take the cache and what the model, as it is captured, is kept under."""
        self._folder, self._key = cache.folder, identity.key
        self._failed = self._folder / f"{self._key}{CAPTURE_FAILED}"

    def why_not(self) -> str:
        """Why it cannot be captured, as an earlier process has found out; empty: nothing is known."""
        with suppress(OSError):
            return self._failed.read_text(encoding="utf-8")
        deaths = [path for path in self._begun() if not psutil.pid_exists(int(path.name.split(".")[1]))]
        return (
            f"{len(deaths)} processes have died while they captured it"
            if len(deaths) >= _MOST_DEATHS
            else ""
        )

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Context in which the model is captured. Keeps that it failed, or that this process died of it."""
        begun = self._folder / f"{self._key}.{os.getpid()}{CAPTURING}"
        with suppress(OSError):  # a folder of somebody else's: nothing is kept
            make_private(self._folder)
            begun.touch()
        try:
            yield
        except CaptureFailed as error:
            # There may be enough memory the next time.
            if not isinstance(error.__cause__, torch.OutOfMemoryError):
                with suppress(OSError):
                    self._failed.write_text(str(error), encoding="utf-8")
                    error.is_known = True
            raise
        else:
            for path in self._begun():
                path.unlink(missing_ok=True)
        finally:
            with suppress(OSError):
                begun.unlink()

    def _begun(self) -> list[Path]:
        return list(self._folder.glob(f"{self._key}.*{CAPTURING}"))


class GraphReplay:
    """Replays a model on inputs of the shapes that it was captured with.

    On others it calls the model itself.

    The outputs are the graph's own memory: the next call writes to them (CUDA graphs, PyTorch notes on CUDA
    semantics). A model that waits for the device, or changes what it does with the values of its inputs,
    cannot be captured.
    """

    def __init__(self, call: Call, example: Inputs, record: CaptureRecord | None = None) -> None:
        """Warm up and capture a model with the shapes of the example, or raise `CaptureFailed`.

        The `record` keeps how that went.
        """
        self._call = call  # kept, as a graph holds only addresses of its weights and kernels
        self._record = record
        self._replays: dict[object, tuple[Inputs, Callable[[], object], Any]] = {}
        self._pool: Any = None
        self.capture(example)

    def capture(self, inputs: Inputs) -> None:
        """Have inputs of these shapes and types replayed from now on, too.

        All graphs share their memory, as one runs at a time.

        Raises:
            CaptureFailed: this process has to end.
        """
        key = _key(inputs)
        if key in self._replays:
            return
        kept = tuple(tensor.clone() for tensor in inputs)
        with self._record.trying() if self._record else nullcontext():
            graph, outputs = _capture(self._call, kept, self._pool)
        self._pool = graph.pool()
        self._replays[key] = kept, graph.replay, outputs

    def memory_bytes(self) -> int:
        """Device memory that the graphs hold for what they compute between inputs and outputs.

        The allocator counts it as free, but gives it to no other tensor.
        """
        segments = [
            each for each in torch.cuda.memory_snapshot() if each.get("segment_pool_id") == self._pool
        ]
        return sum(each["total_size"] - each["allocated_size"] for each in segments)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        captured = self._replays.get(_key(inputs))
        if captured is None:
            return self._call(*inputs)
        kept, replay, outputs = captured
        for own, given in zip(kept, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        replay()
        return outputs


def _key(inputs: Inputs) -> object:
    return tuple([(tensor.shape, tensor.dtype) for tensor in inputs])


def _capture(call: Call, inputs: Inputs, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:  # noqa: ANN401
    device = inputs[0].device
    caller, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(caller)
    with torch.cuda.stream(side):
        for _ in range(_CAPTURE_WARM_UP_RUNS):
            call(*inputs)
    caller.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # what the collector frees may call the driver, which ends a capture; so may other threads, hence
        # the mode
        with (
            no_garbage_collection(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            outputs = call(*inputs)
    except Exception as error:
        torch.cuda.set_stream(caller)
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CaptureFailed(f"it cannot be captured as a CUDA graph: {_place(error)}{text}") from error
    return graph, outputs


def _place(error: Exception) -> str:
    """The innermost line outside of torch that an error came through, which is the model's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OF_TORCH, "<")) and frame.filename != __file__
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}: " if frames else ""
