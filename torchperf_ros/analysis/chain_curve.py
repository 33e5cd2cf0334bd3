"""The curve of launch-bound chains: how many times faster than eager each engine is, by the number of operations."""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from torchperf_ros.analysis.chain import BATCH_SIZES, LENGTHS, chain_inputs
from torchperf_ros.analysis.chain_engines import DYNAMIC, STATIC, ChainCall, build_chain, chain_engines
from torchperf_ros.core.engine_choice import EAGER, choose_engine
from torchperf_ros.worker.stopwatch import Timing, time_interleaved

AUTO = "auto"
THREADS = 1
REFERENCE = {
    STATIC: dict(zip(LENGTHS, (0.35, 1.00, 2.35, 2.59, 3.78, 4.54, 5.32), strict=True)),
    DYNAMIC: dict(zip(LENGTHS, (0.22, 0.65, 1.34, 1.86, 2.27, 2.49, 3.38), strict=True)),
}
"""Times eager, as published for a GPU."""

_CALIBRATION_SHARE = 0.4
_US_PER_MS = 1e3


@dataclass(frozen=True)
class CurvePoint:
    """One engine at one length.

    Attributes:
        length: operations before the sum.
        engine: its name; `auto` is the engine that the project would choose.
        runs: the engine that ran: for `auto` the chosen one.
        median_us, p99_us: microseconds per call, over the batch sizes 4 to 13 alike; NaN where it could not be built.
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


@dataclass(frozen=True)
class Curve:
    """What was measured, in the order of lengths and engines."""

    points: tuple[CurvePoint, ...]

    def at(self, length: int, engine: str) -> CurvePoint:
        """The point of one engine at one length."""
        return next(point for point in self.points if (point.length, point.engine) == (length, engine))

    @property
    def lengths(self) -> list[int]:
        """Lengths that were measured, ascending."""
        return sorted({point.length for point in self.points})

    @property
    def engines(self) -> list[str]:
        """Engines that were measured, eager first and `auto` last."""
        return list(dict.fromkeys(point.engine for point in self.points))


@dataclass(frozen=True)
class _Built:
    call: ChainCall | None
    compile_s: float
    error: str = ""


def steps(lengths: Sequence[int], device: torch.device) -> int:
    """How often `measure_curve` calls `on_step`."""
    return len(lengths) * len(chain_engines(device)) + 2


def measure_curve(
    lengths: Sequence[int], device: torch.device, *, seconds: float, on_step: Callable[[str], None]
) -> Curve:
    """Build every chain for every engine, let the project choose, then time all of them in turns.

    One thread, as a chain's tensors of 64 to 208 elements are never shared out to several. The choice is made from
    samples of its own; those that are reported come after. A call that is timed is a pass over the ten batch sizes.

    Args:
        lengths: ascending, each at least 1.
        device: where the chains run.
        seconds: for each engine at each length.
        on_step: told what happens next.
    """
    engines = chain_engines(device)
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder, torch.inference_mode(), _threads(THREADS):
        built: dict[tuple[int, str], _Built] = {}
        for length in lengths:
            for engine in engines:
                on_step(f"n = {length}: building {engine}")
                built[length, engine] = _build(engine, length, device, Path(folder))
        inputs = chain_inputs(device)
        passes = {key: _pass_over(inputs, found.call) for key, found in built.items() if found.call is not None}
        on_step(f"calibrating: {len(passes)} candidates in turns")
        calibration = _time(passes, device, seconds * _CALIBRATION_SHARE)
        chosen = {
            length: choose_engine({name: t.calibration for (n, name), t in calibration.items() if n == length})
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
            points.append(_point(length, engine, runs, built[length, runs], timings.get((length, engine)), eager_ms))
    return Curve(tuple(points))


def _build(engine: str, length: int, device: torch.device, folder: Path) -> _Built:
    started = time.perf_counter()
    try:
        call = build_chain(engine, length, device, folder)
    except Exception as error:  # whatever the compiler raises: the other engines are measured, and this one is named
        if engine == EAGER:
            raise
        return _Built(None, 0.0, f"{type(error).__name__}: {error}".splitlines()[0])
    return _Built(call, time.perf_counter() - started if engine != EAGER else 0.0)


def _pass_over(inputs: list[torch.Tensor], call: ChainCall) -> Callable[[], None]:
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
        return CurvePoint(length, engine, runs, nan, nan, nan, reference, nan, built.error)
    per_call = _US_PER_MS / len(BATCH_SIZES)
    return CurvePoint(
        length, engine, runs, timing.median_ms * per_call, timing.p99_ms * per_call, eager_ms / timing.median_ms,
        reference, built.compile_s,
    )  # fmt: skip


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
