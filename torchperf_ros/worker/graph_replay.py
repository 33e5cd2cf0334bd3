"""A model captured as a CUDA graph: one launch per frame in place of one per kernel."""

from collections.abc import Callable
from typing import Any

import torch

_WARM_UP_RUNS = 3


class GraphReplay:
    """Replays a model on inputs of the shapes that it was captured with.

    The outputs are the graph's own memory: the next call writes to them (CUDA graphs, PyTorch notes on CUDA
    semantics). A model that waits for the device, or changes what it does with the values of its inputs, cannot be
    captured.
    """

    def __init__(self, call: Callable[..., Any], example: tuple[torch.Tensor, ...]) -> None:
        """Warm up and capture, on the current stream.

        Args:
            call: the model on the device.
            example: inputs on the device; their shapes are the graph's.

        Raises:
            RuntimeError: the model cannot be captured.
        """
        self._inputs = tuple(tensor.clone() for tensor in example)
        side = torch.cuda.Stream(example[0].device)
        side.wait_stream(torch.cuda.current_stream(example[0].device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                call(*self._inputs)
        torch.cuda.current_stream(example[0].device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = call(*self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> Any:  # noqa: ANN401 - whatever the model returns
        """Outputs for inputs of the captured shapes.

        Raises:
            RuntimeError: another shape or type.
        """
        for kept, given in zip(self._inputs, inputs, strict=True):
            if kept.shape != given.shape or kept.dtype != given.dtype:
                msg = f"a CUDA graph for {kept.dtype} {tuple(kept.shape)} got {given.dtype} {tuple(given.shape)}"
                raise RuntimeError(msg)
            kept.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs
