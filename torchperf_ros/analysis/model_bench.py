"""Measures every case in a process of its own, so that cold start, memory and compile time are true."""

import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from torchperf_ros.analysis.bench_case import Case, Figures, Result
from torchperf_ros.core.errors import AdapterError
from torchperf_ros.supervise.compile_process import CompileProcess

_MODULE = "torchperf_ros.analysis.bench_case_main"
_POLL_S = 0.2


@dataclass(frozen=True)
class ModelBench:
    """What is to be measured.

    Attributes:
        adapter: `module:Class`.
        options: handed to the adapter.
        device: auto, cpu, cuda or cuda:N.
        tiers, batches, engines: every combination is a case.
        seconds: of timing, for each case.
        timeout_s: a case that takes longer is killed, with all that it spawned.
    """

    adapter: str
    options: Mapping[str, Any]
    device: str
    tiers: Sequence[str]
    batches: Sequence[int]
    engines: Sequence[str]
    seconds: float
    timeout_s: float

    @property
    def cases(self) -> list[Case]:
        """In the order in which they are measured: what is compared comes together."""
        return [Case(*words) for words in product(self.tiers, self.batches, self.engines)]

    def run(self, on_step: Callable[[Case, str], None]) -> Iterator[Result]:
        """Measure case by case.

        Args:
            on_step: told of each case what happens in it.

        Raises:
            AdapterError: the adapter or the device cannot be used at all.
        """
        for case in self.cases:
            yield self._measure(case, partial(on_step, case))

    def _measure(self, case: Case, on_step: Callable[[str], None]) -> Result:
        on_step("starting")
        job = {
            **vars(case), "adapter": self.adapter, "options": dict(self.options), "device": self.device,
            "seconds": self.seconds, "started_ns": time.monotonic_ns(),
        }  # fmt: skip
        stop_at = time.monotonic() + self.timeout_s
        with closing(CompileProcess(job, background=False, module=_MODULE)) as process:
            while time.monotonic() < stop_at:
                select.select([process.news], [], [], _POLL_S)
                messages = process.listen()
                if messages is None:
                    return Result(case, None, _last_line(process.death_reason()))
                for message in messages:
                    if message["kind"] == "step":
                        on_step(message["text"])
                    else:
                        return _result(case, message)
        return Result(case, None, f"not done after {self.timeout_s:g} s")


def _result(case: Case, message: dict[str, Any]) -> Result:
    if message["kind"] == "failed":
        raise AdapterError(message["text"])
    if message["kind"] == "error":
        return Result(case, None, message["text"].splitlines()[0])
    figures = message["figures"]
    return Result(case, Figures(**{**figures, "warm_up_ms": tuple(figures["warm_up_ms"])}))


def _last_line(text: str) -> str:
    """How it died, and the last that it printed, which is what an interpreter's traceback ends with."""
    first, *rest = text.splitlines() or ["the process ended without a word"]
    return f"{first}: {rest[-1]}" if rest else first
