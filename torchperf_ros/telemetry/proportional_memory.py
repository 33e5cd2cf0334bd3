"""Proportional set size: what a process really costs, with pages that several share divided among them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

_FIELD = b"Pss:"
_KIB = 1024


class ProportionalMemory:
    """PSS by process id, read seldom: the kernel walks every page for it (5 ms for a process with torch).

    One process is read at a time, at most once in `every_s` seconds each; in between the last value holds.
    """

    def __init__(self, proc: Path = Path("/proc"), every_s: float = 10.0) -> None:
        """Take the folder of processes, and how seldom each is read."""
        self._proc, self._every_s = proc, every_s
        self._read: dict[int, tuple[float, int]] = {}

    def sample(self, pids: Iterable[int], now_s: float) -> Mapping[int, int]:
        """Bytes by process id, of those that could be read so far. Reads at most one, the one due for longest.

        Args:
            pids: the processes that there are; others are forgotten.
            now_s: monotonic time.
        """
        wanted = list(pids)
        self._read = {pid: self._read[pid] for pid in wanted if pid in self._read}
        due = min(wanted, key=lambda pid: self._read.get(pid, (-1.0, 0))[0], default=None)
        if due is not None and (due not in self._read or now_s - self._read[due][0] >= self._every_s):
            self._read[due] = (now_s, self._pss_bytes(due))
        return {pid: size for pid, (_, size) in self._read.items() if size}

    def _pss_bytes(self, pid: int) -> int:
        """Of one process; 0 where the kernel does not tell, or not us."""
        try:
            lines = (self._proc / str(pid) / "smaps_rollup").read_bytes().splitlines()
        except OSError:  # it has ended, belongs to another user, or the kernel is older than 4.14
            return 0
        return next((int(line.split()[1]) * _KIB for line in lines if line.startswith(_FIELD)), 0)
