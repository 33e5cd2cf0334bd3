"""Where the seconds of a package's build go."""

import shlex
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Final
from unittest.mock import patch

import torch

_CODE: Final = "AotCodeCompiler.compile, all of it"
_OWN: Final = "torch itself"
_Popen: Final[Any] = subprocess.Popen
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
    """Time the steps of builds in this process: exports, processes, loading, comparing, timing.

    Each process that is waited for counts by its program and what it makes. What torch does itself while it compiles
    a package's code counts by the process that it starts next: the constants become bytes before `wrapper.o` and
    are written into theirs before `wrapper.so`. `on_step` is called after each step.
    """
    from torch._dynamo import utils
    from torch._inductor import codecache, cpu_vec_isa, package

    from torchperf_ros.engines import file_engines, package_build
    from torchperf_ros.engines.package import ENGINES

    times, before = BuildTimes(), _torchs(utils)
    behind_s = list[float]()  # while code is compiled: when its last process ended

    def timing(step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            if step == _CODE:
                behind_s.append(began)
            try:
                return call(*given, **named)
            finally:
                times.add(step, time.monotonic() - began)
                if step == _CODE:
                    times.add(f"{_OWN}, after the last process", time.monotonic() - behind_s.pop())
                on_step(times)

        return run

    class Process(_Popen):
        """One that is timed until it has been waited for."""

        def __init__(self, args: Any, *given: Any, **named: Any) -> None:
            self._began_s, self._step = time.monotonic(), _step_of(args)
            if behind_s:
                times.add(f"{_OWN}, before {self._step}", self._began_s - behind_s[-1])
                behind_s[-1] = self._began_s
            super().__init__(args, *given, **named)

        def wait(self, timeout: float | None = None) -> int:
            code = super().wait(timeout)
            if self._step:
                now_s = time.monotonic()
                times.add(self._step, now_s - self._began_s)
                self._step, behind_s[-1:] = "", [now_s] if behind_s else []
                on_step(times)
            return code

    with ExitStack() as stack:
        stack.enter_context(patch.object(subprocess, "Popen", Process))
        compiling = codecache.AotCodeCompiler.compile
        stack.enter_context(patch.object(codecache.AotCodeCompiler, "compile", timing(_CODE, compiling)))
        for owner, name, step in (
            (cpu_vec_isa, "valid_vec_isa_list", "which vector instructions there are"),
            (package, "package_aoti", "archive"),
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
        for engine in map(type, ENGINES.values()):
            if "convert" in vars(engine):
                step = f"engine {engine.name}, all of it"
                stack.enter_context(patch.object(engine, "convert", timing(step, vars(engine)["convert"])))
        yield times
    times.torchs = {name: took_s - before.get(name, 0.0) for name, took_s in _torchs(utils).items()}


def _torchs(utils: Any) -> dict[str, float]:
    """Seconds by function, as `torch._dynamo.utils.compile_times` has them."""
    return {name: float(sum(each)) for name, each in utils.compilation_time_metrics.items()}


def _step_of(command: str | Sequence[Any]) -> str:
    """The program and what it makes, by the end of the file's name: `g++: wrapper.o`, `python3: import torch`."""
    words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
    made = words[-1]
    if "-o" in words[:-1]:
        made = words[words.index("-o") + 1].rpartition("/")[2].partition(".")[2]
    elif "-c" in words[:-1]:
        code = words[words.index("-c") + 1].split("\n")
        made = next((line for line in code if line.startswith("import")), "-c")
    elif "/" in made:
        made = made.rpartition(".")[2]
    return f"{words[0].rpartition('/')[2]}: {made}"
