"""Runs of a made-up replay, for the tests of what compares runs."""

import importlib.util

import numpy as np
import pytest

from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.runs.run_log import run_of
from torchperf_ros.stage.frame_table import FRAME

_MISSING = [name for name in ("arch", "plotly") if importlib.util.find_spec(name) is None]
needs_libraries = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {_MISSING}")
"""They are looked for and not imported: that would take each process of the tests a second and more."""
STAMP_NS = 1_700_000_000_000_000_000
PERIOD_NS = 33_333_333
BUDGET_MS = 40.0


def autocorrelated(count, phi=0.5, seed=0):
    """AR(1) with variance 1."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count + 500) * np.sqrt(1 - phi**2)
    for at in range(1, len(values)):
        values[at] += phi * values[at - 1]
    return values[500:]


def latencies(count, seed=0, phi=0.3):
    """About 20 ms, with a skewed tail."""
    return 20.0 * np.exp(0.1 * autocorrelated(count, phi, seed))


def rows(total_ms, budget_ms=BUDGET_MS):
    """Rows of `FRAME`: what takes longer than the budget is late, and the last result held."""
    total_ms = np.asarray(total_ms, dtype=float)
    found = np.zeros(len(total_ms), dtype=FRAME)
    found["seq"] = np.arange(len(total_ms))
    found["stamp_ns"] = STAMP_NS + found["seq"] * PERIOD_NS
    found["t_ns"] = found["stamp_ns"] + 10_000_000
    found["total_ms"], found["budget_ms"] = total_ms, budget_ms
    late = total_ms > budget_ms
    found["outcome"] = np.where(late, Outcome.LATE, Outcome.ON_TIME)
    found["fallback"] = np.where(late, Fallback.HOLD_LAST, -1)
    found["output_hash"] = 1 + found["seq"]
    return found


def summary(*stages, **changes):
    """As a replay writes it."""
    return {
        "log": {"path": "logs/drive.mcap", "sha256": "aa" * 32},
        "params_sha256": "bb" * 32,
        "model": {stage: "cc" * 32 for stage in stages},
        "pace": "fast",
        "seed": 0,
        "commit": "0123456789abcdef",
        "machine": {
            "cpu": "Cortex-X9",
            "cores": 8,
            "memory_mib": 16384,
            "device": "cpu",
            "torch": "2.13.0",
            "python": "3.11.7",
            "fingerprint": "feedfeedfeedfeed",
        },
        "start_up_s": 2.0,
        "compile_s": None,
        "complete": True,
        "stages": [{"name": stage, "tiers": ["full"], "budget_ms": BUDGET_MS} for stage in stages],
        **changes,
    }


def run(total_ms, stage="perception", **changes):
    """A run of one stage."""
    return run_of(summary(stage, **changes), {stage: rows(total_ms)})
