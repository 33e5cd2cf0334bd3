"""What torch alone gives by hand: a few lines around a model, as a user writes them who knows torch and not us.

All run on inputs that lie on the device. "torch's defaults" leaves tf32 on for convolutions, as torch does; else
fp32 is fp32.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from benchmarks.rig.report import say

Call = Callable[[], object]
FP32, TF32, FP16 = "fp32", "torch's defaults", "fp16 channels_last"
EAGER: Final = "eager"
_WARM_UPS: Final = 3
_REDUCED: Final = "compile reduce-overhead"


@dataclass(frozen=True)
class Candidate:
    """One way by hand: its precision, a call on inputs on the device, and the seconds that making it took."""

    precision: str
    call: Call
    made_s: float


def by_hand(
    model: nn.Module, image: torch.Tensor, precisions: Sequence[str], *, compiles: Sequence[str]
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Candidates by name, and why others could not be made. Call it under inference mode.

    Those of the precisions in `compiles` are compiled, too, which takes seconds.
    """
    found: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for precision in precisions:
        ways: dict[str, Callable[[nn.Module, torch.Tensor], Call]] = {EAGER: _eager}
        if image.is_cuda:
            ways["CUDA graph"] = _graph
        if precision in compiles:
            ways[_REDUCED] = _compiled
        prepared, given = _prepared(model, image, precision)
        for way, make in ways.items():
            name = f"by hand: {way}, {precision}"
            say(f"making {name}")
            _convolutions_in_tf32(precision == TF32)
            began = time.monotonic()
            try:
                call = make(prepared, given)
                for _ in range(_WARM_UPS):
                    call()
            except Exception as error:  # the compiler's boundary: the others are measured
                refused[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if way == EAGER and precision != FP16:
                call = partial(_switched, call, precision == TF32)
            found[name] = Candidate(precision, call, time.monotonic() - began)
    _convolutions_in_tf32(False)
    return found, refused


def best_of(p50_ms: Mapping[str, float], candidates: Mapping[str, Candidate], precision: str) -> str:
    """The name of the fastest candidate of a precision."""
    own = [name for name in p50_ms if name in candidates and candidates[name].precision == precision]
    return min(own, key=lambda name: p50_ms[name])


def _prepared(model: nn.Module, image: torch.Tensor, precision: str) -> tuple[nn.Module, torch.Tensor]:
    if precision != FP16:
        return model, image
    last = torch.channels_last
    with torch.inference_mode(mode=False):
        laid_out: Any = copy.deepcopy(model).half()
        return laid_out.to(memory_format=last), image.half().contiguous(memory_format=last)


def _convolutions_in_tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


def _switched(call: Call, allowed: bool) -> object:
    """A call that has torch's own setting for convolutions; kernels that are captured keep theirs."""
    torch.backends.cudnn.allow_tf32 = allowed
    outputs = call()
    torch.backends.cudnn.allow_tf32 = False
    return outputs


def _eager(model: nn.Module, image: torch.Tensor) -> Call:
    return partial(model, image)


def captured(model: nn.Module, image: torch.Tensor) -> Callable[[torch.Tensor], object]:
    """As the PyTorch notes on CUDA semantics show it: warm up on a side stream, capture, copy in, replay."""
    static = image.clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = model(static)

    def call(given: torch.Tensor) -> object:
        static.copy_(given)
        graph.replay()
        return outputs

    return call


def _graph(model: nn.Module, image: torch.Tensor) -> Call:
    return partial(captured(model, image), image)


def _compiled(model: nn.Module, image: torch.Tensor) -> Call:
    return partial(torch.compile(model, mode="reduce-overhead"), image)
