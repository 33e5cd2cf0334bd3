"""How much of the processor other programs took meanwhile: the first thing to know about a deadline that was missed."""

import math
import os
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_NOT_BUSY: Final = (3, 4)  # idle and iowait, among user, nice, system, idle, iowait, irq, softirq, steal
_FIELDS: Final = 8


class ProcessorShare:
    """Compares the machine's busy time with that of this process and of the children that it has waited for."""

    def __init__(self, stat: Path = _STAT) -> None:
        """Begin now.

        Args:
            stat: where the kernel counts.
        """
        self._stat = stat
        self._start = self._read()

    def of_others(self) -> float:
        """Share of the machine's processor time since the start that others were busy for, 0 to 1; NaN if unknown.

        Right only after the children have ended and were waited for.
        """
        now = self._read()
        total_s, busy_s, own_s = (end - start for start, end in zip(self._start, now, strict=True))
        return min(max(busy_s - own_s, 0.0) / total_s, 1.0) if total_s > 0 else math.nan

    def _read(self) -> tuple[float, float, float]:
        """Seconds of all processors so far: all, busy, and busy for this process and its children."""
        try:
            ticks = [
                int(word) for word in self._stat.read_text(encoding="ascii").split("\n", 1)[0].split()[1:][:_FIELDS]
            ]
        except (OSError, ValueError):
            ticks = []
        per_s = os.sysconf("SC_CLK_TCK")
        busy = sum(tick for field, tick in enumerate(ticks) if field not in _NOT_BUSY)
        return sum(ticks) / per_s, busy / per_s, sum(os.times()[:4])
