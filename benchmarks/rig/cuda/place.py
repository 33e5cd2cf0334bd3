"""Where a part of `bench cuda` runs, and what it finds."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from benchmarks.rig.report import Target
from torchperf_ros.engines.device import Device, Timing, choose_device

THREADS: Final = 1
MIB: Final = 1 << 20


@dataclass
class Found:
    """What a part found out.

    Attributes:
        tables: title, columns, rows.
        figures: the same by name, for JSON.
        wrong: what was not as it has to be, beside targets that were missed; empty: all was.
        targets: what figures have to be.
    """

    tables: list[tuple[str, Sequence[str], list[Sequence[object]]]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


class Place:
    """Where a part runs, and how long it may time.

    Parts build side by side; one that times does so alone.
    """

    def __init__(self, device: str, seconds: float, folder: Path, part: str = "") -> None:
        self.name, self.seconds, self.folder, self._part = device, seconds, folder, part
        self._turn = os.open(folder / "turn", os.O_RDWR | os.O_CREAT)
        self._depth = 0
        fcntl.flock(self._turn, fcntl.LOCK_SH)

    @property
    def is_cuda(self) -> bool:
        return self.name != "cpu"

    def device(self) -> Device:
        """The device, taken as a worker takes it."""
        return Device(choose_device(self.name), THREADS)

    def keep(self, found: Found) -> None:
        """Write what was found so far, which is there also if this part comes to no end."""
        text = json.dumps(asdict(found), default=str)
        part = self.folder / f"{self._part}.part"
        part.write_text(text, encoding="utf-8")
        part.rename(self.folder / f"{self._part}.json")

    @contextmanager
    def beside_builds(self) -> Iterator[None]:
        """Wait until no other part times; others may build meanwhile."""
        with open(self.folder / "clock", "w", encoding="utf-8") as clock:
            fcntl.flock(clock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other part runs; within such a block this is so already."""
        if not self._depth:
            fcntl.flock(self._turn, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.flock(self._turn, fcntl.LOCK_SH)

    def used_mib(self) -> float:
        """Memory of the device that is in use, by all processes; on the CPU that of this part's children (PSS)."""
        if not self.is_cuda:
            return sum(map(_pss, psutil.Process().children(recursive=True))) / MIB
        free, total = torch.cuda.mem_get_info(choose_device(self.name))
        return (total - free) / MIB


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has just ended
        return 0


def timed(title: str, timings: Mapping[str, Timing]) -> Found:
    """Candidates that were timed in turns, as a part's table."""
    figures = {
        name: {"p50_ms": t.median_ms, "p99_ms": t.p99_ms, "samples": len(t.times_ms)}
        for name, t in timings.items()
    }
    rows = [(name, *values.values()) for name, values in figures.items()]
    return Found([(title, ("", "p50 ms", "p99 ms", "samples"), rows)], figures)
