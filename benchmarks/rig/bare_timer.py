"""How late a bare timer is on this machine, meanwhile: what no node can be better than.

`python -m benchmarks.rig.bare_timer` wakes every 5 ms and does nothing, under SCHED_FIFO where that is
permitted, above any node. When its standard input ends it prints the lateness of each wake-up in us as
JSON. On a virtual machine whose host takes its processors away for a while, that while is in here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.rig.figures import distribution
from torchperf_ros.workers.process_setup import die_with_parent

_EVERY_NS = 5_000_000
_PRIORITY = 80  # above cameras and nodes


class BareTimer:
    """The timer as a process beside a benchmark."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rig.bare_timer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def lateness_ms(self) -> dict[str, Any]:
        """End it; the distribution of its lateness in ms."""
        late_us, _ = self._process.communicate(b"")
        return distribution([us / 1e3 for us in json.loads(late_us)])


def main() -> None:
    """Wake up and note how late, until standard input ends."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: they are for the benchmark
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    late_us: list[int] = []
    due_ns = time.monotonic_ns()
    while not ended.is_set():
        due_ns += _EVERY_NS
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        late_ns = time.monotonic_ns() - due_ns
        late_us.append(late_ns // 1000)
        if late_ns > _EVERY_NS:  # it has slept over some: one late wake-up, not many
            due_ns += late_ns
    print(json.dumps(late_us))


if __name__ == "__main__":
    main()
