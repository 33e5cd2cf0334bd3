"""The ways to run a chain that the curve compares."""

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from torchperf_ros.analysis.chain import BATCH_SIZES, chain_inputs, make_chain
from torchperf_ros.core.engine_choice import EAGER
from torchperf_ros.worker.graph_replay import GraphReplay
from torchperf_ros.worker.package import build_package, load_package
from torchperf_ros.worker.parity import check

ChainCall = Callable[[torch.Tensor], torch.Tensor]

STATIC, DYNAMIC, AOTI, GRAPHS = "static", "dynamic", "aoti-dynamic", "graphs"


def chain_engines(device: torch.device) -> list[str]:
    """Names of the engines on this device, eager first."""
    return [EAGER, STATIC, DYNAMIC, AOTI, *([GRAPHS] if device.type == "cuda" else [])]


def build_chain(engine: str, length: int, device: torch.device, folder: Path) -> ChainCall:
    """A chain, compiled for every batch size and checked against eager at every one. Call it under inference mode.

    `static` is one function with a specialisation for each size, behind torch.compile's own guards: what a model
    with static shapes costs where sizes change from call to call. `graphs` is a captured CUDA graph for each size.

    Args:
        engine: out of `chain_engines`.
        length: operations before the sum.
        device: where it runs.
        folder: where a package is kept.

    Raises:
        ParityError: the engine does not compute what eager does.
        Exception: whatever torch raises where it cannot compile here.
    """
    inputs = chain_inputs(device)
    call = _MAKERS[engine](make_chain(length), inputs, folder / f"chain_{length}.pt2")
    eager = make_chain(length).forward
    for x in inputs:
        check(eager(x), call(x), "fp32")
    return call


def _eager(chain: torch.nn.Module, _inputs: list[torch.Tensor], _path: Path) -> ChainCall:
    return chain.forward  # without the hooks of Module.__call__, which no other engine has


def _static(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> ChainCall:
    compiled = torch.compile(chain.forward, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=len(inputs)):
        for x in inputs:
            compiled(x)
    return compiled


def _dynamic(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> ChainCall:
    compiled = torch.compile(chain.forward, dynamic=True)
    compiled(inputs[-1])
    return compiled


def _aoti(chain: torch.nn.Module, inputs: list[torch.Tensor], path: Path) -> ChainCall:
    with torch.inference_mode(mode=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch's own code
        example = inputs[-1].clone()
        build_package(chain, (example,), {0: {0: (BATCH_SIZES[0], BATCH_SIZES[-1])}}, path)
    return load_package(path, example.device)


def _graphs(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> ChainCall:
    captured = {x.shape[0]: GraphReplay(chain.forward, (x,)) for x in inputs}
    return lambda x: captured[x.shape[0]](x)


_MAKERS: dict[str, Callable[[torch.nn.Module, list[torch.Tensor], Path], ChainCall]] = {
    EAGER: _eager,
    STATIC: _static,
    DYNAMIC: _dynamic,
    AOTI: _aoti,
    GRAPHS: _graphs,
}
