"""Launch-bound chains.

So little arithmetic per operation that what one costs to start is nearly all there is.

A chain is n elementwise operations and a sum, on inputs of changing batch size. The curve says how many
times faster than eager each engine runs it, by n.
"""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from torchperf_ros.engines.device import Timing, time_interleaved
from torchperf_ros.engines.engine import GraphReplay
from torchperf_ros.engines.file_engines import build_package, load_package
from torchperf_ros.engines.parity import check
from torchperf_ros.workers.package_manifest import EAGER, choose_engine

Call = Callable[[torch.Tensor], torch.Tensor]

LENGTHS = (1, 5, 10, 15, 20, 25, 30)
"""The lengths of the published curve."""

STATIC, DYNAMIC, AOTI, GRAPHS, AUTO = "static", "dynamic", "aoti-dynamic", "graphs", "auto"
THREADS = 1
REFERENCE = {
    STATIC: dict(zip(LENGTHS, (0.35, 1.00, 2.35, 2.59, 3.78, 4.54, 5.32), strict=True)),
    DYNAMIC: dict(zip(LENGTHS, (0.22, 0.65, 1.34, 1.86, 2.27, 2.49, 3.38), strict=True)),
}
"""Times eager, as published for a GPU."""

BATCH_SIZES = range(4, 14)
_WIDTH = 16
_CALIBRATION_SHARE = 0.4
_US_PER_MS = 1e3

OPERATIONS: tuple[Call, ...] = (
    lambda x: x + 1.0,
    torch.sin,
    lambda x: x * 0.5,
    torch.cos,
    lambda x: x + 0.25,
    torch.relu,
    lambda x: x - 0.5,
    torch.exp,
    torch.sigmoid,
)
"""Elementwise and bounded, so that a chain of any length stays finite; a longer chain begins again."""


class _Chain(torch.nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self._length):
            x = OPERATIONS[index % len(OPERATIONS)](x)
        return x.sum()


def make_chain(length: int) -> torch.nn.Module:
    """`length` >= 1 operations and a sum: (batch, 16) -> scalar.

    Written out operation by operation, as a person would write a short one, so that eager does not pay for
    the loop. Each chain has code of its own: torch.compile keeps what it compiled by code, and looks
    through all of it at every call.
    """
    return torch.fx.symbolic_trace(_Chain(length)).eval()


def chain_inputs(device: torch.device) -> list[torch.Tensor]:
    """One input of each batch size, 4 to 13: the workload is a pass over all of them."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, _WIDTH, generator=generator).to(device) for size in BATCH_SIZES]


def chain_engines(device: torch.device) -> list[str]:
    """Names of the engines on this device, eager first."""
    return [EAGER, STATIC, DYNAMIC, AOTI, *([GRAPHS] if device.type == "cuda" else [])]


def build_chain(engine: str, length: int, device: torch.device, folder: Path) -> Call:
    """A chain, compiled for every batch size and checked against eager at every one.

    Call it under inference mode.

    `static` is one function with a specialisation for each size, behind torch.compile's own guards: what a
    model with static shapes costs where sizes change from call to call. `graphs` is a captured CUDA graph
    for each size.

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
    call = MAKERS[engine](make_chain(length), inputs, folder / f"chain_{length}.pt2")
    eager = make_chain(length).forward
    for x in inputs:
        check(eager(x), call(x), "fp32")
    return call


def _eager(chain: torch.nn.Module, _inputs: list[torch.Tensor], _path: Path) -> Call:
    return chain.forward  # without the hooks of Module.__call__, which no other engine has


def _static(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> Call:
    compiled = torch.compile(chain.forward, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=len(inputs)):
        for x in inputs:
            compiled(x)
    return compiled


def _dynamic(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> Call:
    compiled = torch.compile(chain.forward, dynamic=True)
    compiled(inputs[-1])
    return compiled


def _aoti(chain: torch.nn.Module, inputs: list[torch.Tensor], path: Path) -> Call:
    with torch.inference_mode(mode=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about torch's own code
        example = inputs[-1].clone()
        build_package(chain, (example,), {0: {0: (BATCH_SIZES[0], BATCH_SIZES[-1])}}, path)
    return load_package(path, example.device)


def _graphs(chain: torch.nn.Module, inputs: list[torch.Tensor], _path: Path) -> Call:
    captured = {x.shape[0]: GraphReplay(chain.forward, (x,)) for x in inputs}
    return lambda x: captured[x.shape[0]](x)


MAKERS: dict[str, Callable[[torch.nn.Module, list[torch.Tensor], Path], Call]] = {
    EAGER: _eager,
    STATIC: _static,
    DYNAMIC: _dynamic,
    AOTI: _aoti,
    GRAPHS: _graphs,
}


@dataclass(frozen=True)
class CurvePoint:
    """One engine at one length.

    Attributes:
        length: operations before the sum.
        engine: its name; `auto` is the engine that the project would choose.
        runs: the engine that ran: for `auto` the chosen one.
        median_us, p99_us: microseconds per call, over the batch sizes 4 to 13 alike; NaN where it could not
        be built.
        times_eager: eager's median over this one; above 1 is faster.
        reference: the published ratio, None where there is none.
        compile_s: seconds to compile and check; less where Inductor finds its work in its cache.
        error: why it could not be built, "" where it was.
    """

    length: int
    engine: str
    runs: str
    median_us: float
    p99_us: float
    times_eager: float
    reference: float | None
    compile_s: float
    error: str = ""


_Built = tuple[Call | None, float, str]
"""The engine, the seconds to build it, and why it could not be built."""


def measure_curve(
    lengths: Sequence[int], device: torch.device, *, seconds: float, on_step: Callable[[str], None]
) -> list[CurvePoint]:
    """Build every chain for every engine, let the project choose, then time all of them in turns.

    One thread, as a chain's tensors of 64 to 208 elements are never shared out to several. The choice is
    made from samples of its own; those that are reported come after. A call that is timed is a pass over
    the ten batch sizes.

    Args:
        lengths: ascending, each at least 1.
        device: where the chains run.
        seconds: for each engine at each length.
        on_step: takes a line that says what happens next.

    Returns:
        For each length a point for each engine, eager first and `auto` last.
    """
    engines = chain_engines(device)
    with (
        tempfile.TemporaryDirectory(prefix="torchperf_") as folder,
        torch.inference_mode(),
        _threads(THREADS),
    ):
        built: dict[tuple[int, str], _Built] = {}
        for length in lengths:
            for engine in engines:
                on_step(f"n = {length}: building {engine}")
                built[length, engine] = _build(engine, length, device, Path(folder))
        inputs = chain_inputs(device)
        passes = {key: _pass_over(inputs, call) for key, (call, *_) in built.items() if call is not None}
        on_step(f"calibrating: {len(passes)} candidates in turns")
        calibration = _time(passes, device, seconds * _CALIBRATION_SHARE)
        chosen = {
            length: choose_engine(
                {name: t.calibration() for (n, name), t in calibration.items() if n == length}
            )
            for length in lengths
        }
        passes |= {(length, AUTO): passes[length, engine] for length, engine in chosen.items()}
        on_step(f"timing: {len(passes)} candidates in turns")
        timings = _time(passes, device, seconds)
    points = []
    for length in lengths:
        eager_ms = timings[length, EAGER].median_ms
        for engine in (*engines, AUTO):
            runs = chosen[length] if engine == AUTO else engine
            points.append(
                _point(length, engine, runs, built[length, runs], timings.get((length, engine)), eager_ms)
            )
    return points


def _build(engine: str, length: int, device: torch.device, folder: Path) -> _Built:
    started = time.perf_counter()
    try:
        call = build_chain(engine, length, device, folder)
    except (
        Exception
    ) as error:  # whatever the compiler raises: the other engines are measured, and this one is named
        if engine == EAGER:
            raise
        return None, 0.0, f"{type(error).__name__}: {error}".splitlines()[0]
    return call, time.perf_counter() - started if engine != EAGER else 0.0, ""


def _pass_over(inputs: list[torch.Tensor], call: Call) -> Callable[[], None]:
    def run() -> None:
        for x in inputs:
            call(x)

    return run


def _time(
    passes: dict[tuple[int, str], Callable[[], None]], device: torch.device, seconds: float
) -> dict[tuple[int, str], Timing]:
    keys = {f"{engine} {length}": (length, engine) for length, engine in passes}
    found = time_interleaved({name: passes[key] for name, key in keys.items()}, device, seconds=seconds)
    return {keys[name]: timing for name, timing in found.items()}


def _point(  # one row: what was asked for, what ran, what came out
    length: int, engine: str, runs: str, built: _Built, timing: Timing | None, eager_ms: float
) -> CurvePoint:
    reference = REFERENCE.get(engine, {}).get(length)
    if timing is None:
        nan = float("nan")
        return CurvePoint(length, engine, runs, nan, nan, nan, reference, nan, built[2])
    per_call = _US_PER_MS / len(BATCH_SIZES)
    return CurvePoint(
        length,
        engine,
        runs,
        timing.median_ms * per_call,
        timing.p99_ms * per_call,
        eager_ms / timing.median_ms,
        reference,
        built[1],
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
