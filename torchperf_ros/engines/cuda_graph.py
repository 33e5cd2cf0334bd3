"""A model captured as a CUDA graph, and replayed for inputs of the same shapes."""

from collections.abc import Callable
from typing import Any

import torch

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.engines.parity import Call, Inputs
from torchperf_ros.engines.stopwatch import no_garbage_collection

_CAPTURE_WARM_UP_RUNS = 3


class CaptureFailed(TorchperfError):
    """A model cannot be captured as a CUDA graph.

    This process has to end, and the next one to do without graphs.

    torch leaves the capture's stream as the current one, and its allocator counts a capture that never
    ends: later calls, such as `torch.cuda.empty_cache`, raise (pytorch/pytorch pull requests 180395 and
    190308).
    """


class GraphReplay:
    """Replays a model on inputs of the shapes that it was captured with.

    On others it calls the model itself.

    The outputs are the graph's own memory: the next call writes to them (CUDA graphs, PyTorch notes on CUDA
    semantics). A model that waits for the device, or changes what it does with the values of its inputs,
    cannot be captured.
    """

    def __init__(self, call: Call, example: Inputs) -> None:
        """Warm up and capture a model on the device, with the shapes of the example, or raise `CaptureFailed`."""
        self._call = call  # kept, as the graph holds only addresses of its weights and kernels
        self._inputs = tuple(tensor.clone() for tensor in example)
        self._replay, self._outputs = _capture(call, self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - a model may return anything
        """Outputs for inputs, which are copied into the graph's own."""
        pairs = list(zip(self._inputs, inputs, strict=True))
        if any(kept.shape != given.shape or kept.dtype != given.dtype for kept, given in pairs):
            return self._call(*inputs)
        for kept, given in pairs:
            kept.copy_(given, non_blocking=True)
        self._replay()
        return self._outputs


def _capture(call: Call, inputs: Inputs) -> tuple[Callable[[], object], Any]:
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
        with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = call(*inputs)
    except Exception as error:
        torch.cuda.set_stream(caller)
        raise CaptureFailed(
            f"it cannot be captured as a CUDA graph: {type(error).__name__}: {error}".splitlines()[0]
        ) from error
    return graph.replay, outputs
