import functools
import linecache
import sys
from pathlib import Path

import pytest
import torch

from torchperf_ros.tools.inspection import Inspection, load_model
from torchperf_ros.tools.tune.trial import TrialFigures

SAMPLES = Path(__file__).with_name("graph_samples.py")


@pytest.fixture(autouse=True)
def same_path(monkeypatch):
    """What is loaded from a file has its folder put on the path."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="session")
def inspect_sample():
    """Inspect a sample with 8x8 floats, or the sizes given: once for all tests, and briefly."""
    cpu = torch.device("cpu")

    @functools.cache
    def inspect(name, *sizes):
        model = load_model(f"{SAMPLES}:{name}", "full", {}, list(sizes or ("8x8",)), cpu)
        inspection = Inspection(model, cpu)
        # earlier tests of this process may have raised the limits, as engines do
        with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
            inspection.run(progress=lambda text: None)
        return inspection

    return inspect


def breaking_line(name):
    """The number of the line in the sample that is marked as breaking."""
    lines = linecache.getlines(str(SAMPLES))
    start = next(n for n, line in enumerate(lines) if line.startswith((f"def {name}(", f"class {name}(")))
    return next(n for n, line in enumerate(lines[start:], start + 1) if "# breaks" in line)


def figures(ms, **changes):
    """Of a candidate that takes so long; eager takes 10 ms."""
    values = dict(
        p50_ms=ms,
        p95_ms=ms,
        p99_ms=ms,
        max_ms=99.0,
        eager_p50_ms=10.0,
        eager_p99_ms=11.0,
        least_share=ms / 10,
        most_share=ms / 10,
        samples=100,
        cold_start_s=1.0,
        compile_s=0.0,
        memory_mb=300.0,
        relative_l2=0.0,
        max_error=0.0,
    )
    return TrialFigures(**values | changes)
