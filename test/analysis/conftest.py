import linecache
import sys
from pathlib import Path

import pytest
import torch

from torchperf_ros.analysis.bench_case import Figures
from torchperf_ros.analysis.chain_curve import REFERENCE, Curve, CurvePoint
from torchperf_ros.analysis.inspected_model import load_model
from torchperf_ros.analysis.inspection import Inspector

SAMPLES = Path(__file__).with_name("graph_samples.py")


@pytest.fixture
def inspect_sample(monkeypatch):
    """Inspect a sample with 8x8 floats, or the sizes given, without taking long to measure."""
    monkeypatch.setattr("torchperf_ros.analysis.graph_capture._SECONDS", 0.0)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def inspect(name, *sizes, backend="eager"):
        first, *others = sizes or ("8x8",)
        cpu = torch.device("cpu")
        model = load_model(f"{SAMPLES}:{name}", "full", {}, [first], list(others), cpu)
        return Inspector(model, backend, cpu, progress=lambda text: None).run()

    return inspect


def breaking_line(name):
    """The number of the line in the sample that is marked as breaking."""
    lines = linecache.getlines(str(SAMPLES))
    start = next(n for n, line in enumerate(lines) if line.startswith((f"def {name}(", f"class {name}(")))
    return next(n for n, line in enumerate(lines[start:], start + 1) if "# breaks" in line)


@pytest.fixture
def make_curve():
    """A curve in which `auto` runs aoti-dynamic, as many times faster than eager at each length as is said."""

    def point(length, engine, times, error):
        us = float("nan") if error else 2.0 * length / times
        reference = REFERENCE.get(engine, {}).get(length)
        runs = "aoti-dynamic" if engine == "auto" else engine
        return CurvePoint(length, engine, runs, us, 2 * us, times, reference, 9.5, error)

    def make(auto, lengths=(1, 30), failed=""):
        return Curve(
            tuple(
                point(length, engine, times, "CppCompileError: no compiler" if engine == failed else "")
                for length, ratio in zip(lengths, auto, strict=True)
                for engine, times in {
                    "eager": 1.0, "static": 0.5, "dynamic": 0.8, "aoti-dynamic": ratio, "auto": ratio,
                }.items()
            )
        )  # fmt: skip

    return make


@pytest.fixture
def make_figures():
    """Figures of an engine that is warm at once and as fast as eager, where nothing else is said."""

    def make(p50_ms=10.0, eager_p50_ms=10.0, **changes):
        return Figures(
            **{
                "cold_start_s": 2.0, "compile_s": 0.0, "cache_hits": 0, "warm_up_ms": (p50_ms,) * 30, "p50_ms": p50_ms,
                "p95_ms": 1.1 * p50_ms, "p99_ms": 1.2 * p50_ms, "max_ms": 2 * p50_ms, "samples": 100,
                "usual_p99_ms": 1.2 * p50_ms, "eager_p50_ms": eager_p50_ms, "eager_usual_p99_ms": 1.2 * eager_p50_ms,
                "reference_p50_ms": eager_p50_ms, "reference_batch": 1,
                "items_per_s": 1000 / p50_ms, "peak_mib": 300.0, "relative_l2": 0.0, "cosine": 1.0, "max_error": 0.0,
                "threads": 1, **changes,
            }
        )  # fmt: skip

    return make
