"""Where the seconds of a package's build go."""

import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final
from unittest.mock import patch

import torch

_COMPILER: Final = "C++"
_MOST_OF_TORCH: Final = 12


@dataclass
class BuildTimes:
    """Seconds and calls by step, of all packages that were built meanwhile.

    Attributes:
        torchs: seconds by function, of those that torch times itself.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    torchs: dict[str, float] = field(default_factory=dict)

    def add(self, step: str, seconds: float) -> None:
        self.seconds[step] += seconds
        self.calls[step] += 1

    def rows(self, whole_s: float) -> list[tuple[str, int, float, float]]:
        """Step, calls, seconds, and the share of the whole."""
        found = [(step, self.calls[step], took_s) for step, took_s in _longest_first(self.seconds)]
        # Those lie within one another, and within the steps above.
        own = _longest_first(self.torchs)[:_MOST_OF_TORCH]
        found += [(f"torch times {name}", 0, took_s) for name, took_s in own if took_s]
        return [(*row, row[2] / whole_s) for row in found]


def _longest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda each: -each[1])


@contextmanager
def build_times(on_step: Callable[[BuildTimes], None] = lambda _: None) -> Iterator[BuildTimes]:
    """Time the steps of builds in this process: exports, compilers, loading, comparing, timing.

    `on_step` is called after each.
    """
    from torch._dynamo import utils
    from torch._inductor import cpp_builder

    from torchperf_ros.engines import file_engines, package_build, package_engine

    times, before = BuildTimes(), _torchs(utils)

    def timing(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return call(*given, **named)
            finally:
                times.add(_step_of(given) if step == _COMPILER else step, time.monotonic() - began)
                on_step(times)

        return run

    with ExitStack() as stack:
        for owner, name, step in (
            (cpp_builder, "run_compile_cmd", _COMPILER),
            (torch._inductor, "aoti_compile_and_package", "AOTInductor, all of it"),
            (torch.export, "export", "export"),
            (file_engines, "load_package", "loading"),
            (file_engines, "time_interleaved", "timing variants"),
            (package_build, "check_engine", "comparing with eager"),
            (package_build, "time_interleaved", "timing"),
            (package_build, "compare", "choosing"),
        ):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, timing(step, getattr(owner, name))))
        for engine in package_engine.PackageEngine.__subclasses__():
            if "convert" in vars(engine):
                step = f"engine {engine.name}, all of it"
                stack.enter_context(patch.object(engine, "convert", timing(step, vars(engine)["convert"])))
        yield times
    times.torchs = {name: took_s - before.get(name, 0.0) for name, took_s in _torchs(utils).items()}


def _torchs(utils: Any) -> dict[str, float]:
    """Seconds by function, as `torch._dynamo.utils.compile_times` has them."""
    return {name: float(sum(each)) for name, each in utils.compilation_time_metrics.items()}


def _step_of(given: tuple[Any, ...]) -> str:
    """What a command of the C++ compiler makes, by the end of the file's name: `C++: wrapper.o`."""
    words = shlex.split(given[0])
    made = words[words.index("-o") + 1] if "-o" in words[:-1] else words[-1]
    return f"C++: {made.rpartition('/')[2].partition('.')[2]}"
