"""Latencies as a model has them: autocorrelated, skewed, with spikes; and the same a little slower."""

import functools
from dataclasses import dataclass

import numpy as np

from torchperf_ros.frame.frame_table import FRAME
from torchperf_ros.runs.run_file import Run

STAGE = "perception"
_START_NS, _PERIOD_NS = 1_700_000_000_000_000_000, 33_333_333  # 30 Hz
_TYPICAL_MS = 20.0
_SPREAD = 0.1  # of the logarithm
_SPIKE_MS = 5.0
_TAIL_INDEX = 2.5  # of the spikes: their variance exists, their fourth moment does not
_CERTAIN = 2_000_000
_LATE_SHARE = 0.03
_WARM_UP = 2000


@dataclass(frozen=True)
class LatencyModel:
    """20 ms times the exponential of an AR(1), plus Pareto spikes.

    Attributes:
        phi: autocorrelation of successive frames before the spikes, 0 to 1.
        spikes: share of frames with one, 0 to 1.
    """

    phi: float
    spikes: float

    def draw(self, frames: int, random: np.random.Generator) -> np.ndarray:
        """Latencies in ms, shape (frames,)."""
        noise = random.standard_normal(frames + _WARM_UP)
        body = _TYPICAL_MS * np.exp(_SPREAD * _ar1(noise, self.phi)[_WARM_UP:])
        return body + (random.random(frames) < self.spikes) * _SPIKE_MS * (1 + random.pareto(_TAIL_INDEX, frames))

    def run(self, frames: int, random: np.random.Generator, slower: "Slower | None" = None) -> Run:
        """A run of one stage; 3 % of the frames of a run that is not slower are over the budget, in bursts."""
        p95, p97, p99 = _quantiles_ms(self.spikes)
        total_ms = self.draw(frames, random)
        if slower is not None:
            total_ms = slower.of(total_ms, p95, p99)
        return Run({"stages": [{"name": STAGE, "tiers": ["full"]}]}, {STAGE: _rows(total_ms, p97)})


@dataclass(frozen=True)
class Slower:
    """A change that moves the p99.

    Attributes:
        p99_share: by this share, 0.05 for 5 %.
        tail_only: by stretching what lies beyond the p95; otherwise every frame takes so much longer.
    """

    p99_share: float
    tail_only: bool

    def of(self, total_ms: np.ndarray, p95: float, p99: float) -> np.ndarray:
        if not self.tail_only:
            return total_ms * (1 + self.p99_share)
        stretch = (p99 * (1 + self.p99_share) - p95) / (p99 - p95)
        return np.where(total_ms > p95, p95 + (total_ms - p95) * stretch, total_ms)


@functools.cache
def _quantiles_ms(spikes: float) -> tuple[float, ...]:
    """The true p95, p97 and p99, from 2,000,000 frames, which need no memory of each other."""
    values = LatencyModel(0.0, spikes).draw(_CERTAIN, np.random.default_rng(1))
    return tuple(np.quantile(values, (0.95, 1 - _LATE_SHARE, 0.99)).tolist())


def _ar1(noise: np.ndarray, phi: float) -> np.ndarray:
    """Variance 1, once warmed up."""
    from scipy.signal import lfilter

    return lfilter([np.sqrt(1 - phi**2)], [1.0, -phi], noise)


def _rows(total_ms: np.ndarray, budget_ms: float) -> np.ndarray:
    late = total_ms > budget_ms
    rows = np.zeros(len(total_ms), dtype=FRAME)
    rows["seq"] = np.arange(len(total_ms))
    rows["stamp_ns"] = _START_NS + rows["seq"] * _PERIOD_NS
    rows["t_ns"] = rows["stamp_ns"] + np.round(total_ms * 1e6).astype(np.int64)
    rows["outcome"], rows["fallback"] = late, np.where(late, 1, -1)
    rows["total_ms"], rows["budget_ms"] = total_ms, budget_ms
    return rows
