"""One cell of `torchperf bench model`: a tier, a batch size and an engine, and what was measured of it."""

from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from torchperf_ros.core.tier_ladder import Calibration

_COLD_RATIO = 1.5


@dataclass(frozen=True)
class Case:
    """What is measured in one process.

    Attributes:
        tier: of the adapter.
        batch: size of the first dimension.
        engine: eager, compile or aoti.
    """

    tier: str
    batch: int
    engine: str

    def __str__(self) -> str:
        """As progress and messages show it."""
        return f"{self.tier}, batch {self.batch}, {self.engine}"


@dataclass(frozen=True)
class Figures:
    """What a process measured of its case, times of the model alone, its inputs on the device.

    Attributes:
        cold_start_s: from the start of the process to the first answer: torch, weights, compiling, one call.
        compile_s, cache_hits: of that, compiling; and graphs that came out of the compiler's own cache.
        warm_up_ms: the first calls after that, in order.
        p50_ms, p95_ms, p99_ms, max_ms, samples: once warm.
        usual_p99_ms: p99 without isolated stalls of the machine.
        eager_p50_ms, eager_usual_p99_ms: of the same model in eager, measured in turns with the engine.
        reference_p50_ms, reference_batch: of eager with the adapter's own example, measured in turns with both.
        items_per_s: batch over the mean time.
        peak_mib: on CUDA most memory allocated, else largest resident size, up to the end of warming up.
        relative_l2, cosine, max_error: against eager on random inputs, see `Parity`.
        threads: CPU threads of the model.
    """

    cold_start_s: float
    compile_s: float
    cache_hits: int
    warm_up_ms: tuple[float, ...]
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float
    samples: int
    usual_p99_ms: float
    eager_p50_ms: float
    eager_usual_p99_ms: float
    reference_p50_ms: float
    reference_batch: int
    items_per_s: float
    peak_mib: float
    relative_l2: float
    cosine: float
    max_error: float
    threads: int

    @property
    def times_eager(self) -> float:
        """Eager's median over the engine's; above 1 is faster."""
        return self.eager_p50_ms / self.p50_ms

    @property
    def beside_eager(self) -> Calibration:
        """Median and p99 as shares of eager's, which the same process measured: comparable between processes."""
        return Calibration(self.p50_ms / self.eager_p50_ms, self.usual_p99_ms / self.eager_usual_p99_ms)

    def times_reference(self, batch: int) -> float:
        """Items per second at this batch size over those of the reference: comparable between processes."""
        return batch / self.p50_ms * self.reference_p50_ms / self.reference_batch

    @property
    def calls_to_warm(self) -> int:
        """Calls from the first one on that took over 1.5 times the median of the warm ones."""
        cold = takewhile(lambda ms: ms > _COLD_RATIO * self.p50_ms, self.warm_up_ms)
        return sum(1 for _ in cold)


@dataclass(frozen=True)
class Result:
    """A case, with its figures or the reason why there are none."""

    case: Case
    figures: Figures | None
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Flat, for a line of JSON."""
        figures = {} if self.figures is None else asdict(self.figures)
        if self.figures is not None:
            figures |= {"times_eager": self.figures.times_eager, "calls_to_warm": self.figures.calls_to_warm}
        return {**asdict(self.case), "error": self.error, **{name: _rounded(value) for name, value in figures.items()}}


def _rounded(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
