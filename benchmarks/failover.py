"""How long a stage is without fresh results when its running worker is killed, for each kind of backup.

The worker that computed the last output is killed by SIGKILL while it runs a frame. Counted are the frames from then
on to the first result of another process: answered by a fallback (the last result, a stop), by the backup's own fresh
result, or not at all; and the time from the kill to that result's publication. Kills are as far apart as it takes for
every worker to be back and to have served for 5 s.
"""

import argparse
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.rig.arguments import add_camera, add_device, add_stage, arguments_of
from benchmarks.rig.bench_stage import OURS
from benchmarks.rig.figures import distribution
from benchmarks.rig.frames import match
from benchmarks.rig.graph import Streaming
from benchmarks.rig.observer import Observer
from benchmarks.rig.report import Report, Target, say, shown
from torchperf_ros.frame.outcome import Fallback

BACKUPS = ("none", "standby", "active")
_INTO_MS = (5.0, 11.0)  # of a frame, from its stamp: within its inference
_TAIL_S = {"none": 12.0, "standby": 3.0, "active": 3.0}
_EPILOG = """\
targets: standby and active: at most 1 frame on a fallback; none: back in <= 3 s (from packages)

example:
  ./run bench failover --times 10 --backups standby,active"""


@dataclass
class Failover:
    """What followed one kill.

    Attributes:
        outage_ms: from the kill to the next fresh result of another process.
        fallbacks: frames answered by other means meanwhile, by kind of fallback.
        unanswered: frames sent meanwhile that were never answered.
    """

    outage_ms: float = math.nan
    fallbacks: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0

    @property
    def on_fallback(self) -> float:
        """Frames that got no fresh result, not even the backup's; NaN where none came back: nobody knows how many."""
        if math.isnan(self.outage_ms):
            return math.nan
        return self.unanswered + sum(count for kind, count in self.fallbacks.items() if kind != Fallback.BACKUP.word)


class Killer:
    """Kills the process that made the newest output, once, in the middle of an inference."""

    def __init__(self, observer: Observer, period_ns: int, after_s: float, luck: random.Random) -> None:
        """Strike `after_s` from now."""
        self._seen = observer.seen[OURS]
        self._period_ns = period_ns
        self._at = time.monotonic() + after_s
        self._into_ns = round(luck.uniform(*_INTO_MS) * 1e6)
        self.pid = 0
        self.killed_ns = 0

    def look(self) -> None:
        """To be called while listening."""
        if self.killed_ns or time.monotonic() < self._at or not self._seen.outputs:
            return
        newest = self._seen.outputs[-1]
        self.pid = int(newest.source.removeprefix("pid-"))
        strike_ns = newest.stamp_ns + self._into_ns
        while strike_ns < time.time_ns():
            strike_ns += self._period_ns
        time.sleep((strike_ns - time.time_ns()) / 1e9)
        os.kill(self.pid, signal.SIGKILL)
        self.killed_ns = time.time_ns()


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--times", type=int, default=5, help="kills for each kind of backup (default 5)")
    parser.add_argument("--backups", default=",".join(BACKUPS), help="default " + ",".join(BACKUPS))
    add_camera(parser)
    add_stage(parser)
    add_device(parser)
    parser.add_argument("--settle", type=float, default=5.5,
                        help="seconds from every worker's being ready to the stream (default 5.5)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=1, help="of the moments at which to kill (default 1)")
    arguments = parser.parse_args()
    report = Report("failover", arguments)
    found = {backup: _failovers(backup, arguments) for backup in arguments.backups.split(",")}
    _show(report, found)
    report.finish(_figures(found), _targets(found))
    return 0


def _failovers(backup: str, arguments: argparse.Namespace) -> list[Failover]:
    luck = random.Random(f"{arguments.seed}/{backup}")
    with Streaming(arguments, backup=backup) as streaming:
        return [_failover(streaming, arguments, backup, number, luck) for number in range(arguments.times)]


def _failover(
    streaming: Streaming, arguments: argparse.Namespace, backup: str, number: int, luck: random.Random
) -> Failover:
    streaming.node.wait_ready()
    streaming.graph.observer.listen(arguments.settle)
    say(f"backup {backup}: kill {number + 1} of {arguments.times}")
    seen = streaming.seen
    seen.clear()
    lead_s = 1.5
    killer = Killer(streaming.graph.observer, round(1e9 / arguments.rate), lead_s, luck)
    sent = streaming.stream(lead_s + _TAIL_S[backup], meanwhile=killer.look)
    found = Failover()
    frames = match(sent["stamps"], seen.rows, seen.outputs)
    answered = set()
    for frame in (frame for frame in frames if frame.row.written_ns > killer.killed_ns):
        answered.add(frame.stamp_ns)
        other = frame.output is not None and frame.output.source != f"pid-{killer.pid}"
        if frame.fresh and other:
            found.outage_ms = (frame.output.written_ns - killer.killed_ns) / 1e6
            if frame.row["fallback"] == Fallback.BACKUP:
                found.fallbacks[Fallback.BACKUP.word] += 1
            last_ns = frame.stamp_ns
            hit_ns = killer.killed_ns - round(_INTO_MS[1] * 1e6)
            found.unanswered = sum(hit_ns < stamp < last_ns and stamp not in answered for stamp in sent["stamps"])
            break
        if not frame.fresh:
            found.fallbacks[Fallback(int(frame.row["fallback"])).word] += 1
    return found


def _figures(found: dict[str, list[Failover]]) -> dict[str, Any]:
    return {
        backup: {
            "outage_ms": distribution([failover.outage_ms for failover in failovers]),
            "frames_on_fallback": [failover.on_fallback for failover in failovers],
            "each": [asdict(failover) for failover in failovers],
        }
        for backup, failovers in found.items()
    }


def _show(report: Report, found: dict[str, list[Failover]]) -> None:
    rows = []
    for backup, failovers in found.items():
        outage = distribution([failover.outage_ms for failover in failovers])
        kinds = sum((failover.fallbacks for failover in failovers), Counter())
        rows.append([
            backup, outage["count"], outage["p50"], outage["max"],
            " ".join(shown(failover.on_fallback) for failover in failovers),
            ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "-",
            sum(failover.unanswered for failover in failovers),
        ])  # fmt: skip
    report.table(
        "From the kill of the running worker to the next fresh result of another process",
        ("backup", "came back", "p50 ms", "max ms", "frames on a fallback, each kill", "by fallback", "unanswered"),
        rows,
    )


def _targets(found: dict[str, list[Failover]]) -> list[Target]:
    """The worst of each backup; of NumPy's maximum NaN is one, so that who never came back counts as worst."""
    targets = []
    for backup, failovers in found.items():
        if backup == "none":
            worst_s = float(np.max([failover.outage_ms for failover in failovers])) / 1e3
            targets.append(Target("no backup: back after", worst_s, "<=", 3.0, "s"))
        else:
            worst = float(np.max([failover.on_fallback for failover in failovers]))
            targets.append(Target(f"{backup}: frames on a fallback, worst kill", worst, "<=", 1.0))
    return targets


if __name__ == "__main__":
    sys.exit(main())
