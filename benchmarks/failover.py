"""How long a stage is without fresh results when its worker is killed, or when a frame makes whoever runs it fail.

`kills`: for each kind of backup, the worker that computed the last output is killed by SIGKILL while it
runs a frame. Counted are the frames from then on to the first result of another process: answered by a
fallback (the last result, a stop), by the backup's own fresh result, or not at all; and the time from the
kill to that result's publication. Kills are as far apart as it takes for every worker to be back and to
have served for 5 s. The adapter is that of `frames`.

`frames`: every image is the same but for its first byte, which names the fault (see
`rig/poison_faults.py`): 0 for none. Each fault gets a stream of its own with one poisonous frame in it,
once every worker is back. Counted are, of the whole stream, the frames that were not answered from
themselves (by the runner or the standby), those that got no answer, and the lateness of every answer; and
the time from the poisonous frame's stamp to the next fresh answer.
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

from benchmarks.rig.arguments import add_backup, add_camera, add_device, add_some, add_stage, arguments_of
from benchmarks.rig.bench_stage import OURS
from benchmarks.rig.figures import distribution, share
from benchmarks.rig.frames import match
from benchmarks.rig.graph import Streaming
from benchmarks.rig.observer import Observer
from benchmarks.rig.poison_faults import FAULTS
from benchmarks.rig.report import Report, Target, say, shown
from torchperf_ros.api.outcome import Fallback

BACKUPS = ("none", "standby", "active")
_POISONED = "benchmarks.rig.poison_adapter:PoisonAdapter"
_INTO_MS = (5.0, 11.0)  # of a frame, from its stamp: within its inference
_LEAD_S = 1.5  # of a stream, before the kill
_TAIL_S = {"none": 12.0, "standby": 3.0, "active": 3.0}
_POISON_LEAD_S, _POISON_SETTLE_S = 1.0, 1.0
_EPILOG = """\
targets of kills: standby and active: at most 1 frame on a fallback; none: back in <= 3 s (from packages)
targets of frames, with a standby, on an otherwise idle machine: each fault costs at most 2 frames that are not fresh,
no frame is unanswered, 99.9 % are answered by the deadline and all by +1 ms

examples:
  ./run bench failover --parts kills --times 10 --backups standby,active
  ./run bench failover --parts frames --faults "hang,segfault,sleep in preprocess" --times 5 --backup none"""


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
        """Frames that got no fresh result, not even the backup's.

        NaN where none came back: nobody knows how many.
        """
        if math.isnan(self.outage_ms):
            return math.nan
        return self.unanswered + sum(
            count for kind, count in self.fallbacks.items() if kind != Fallback.BACKUP.word
        )


@dataclass
class Poisoned:
    """What one poisonous frame cost.

    Attributes:
        not_fresh: frames of the stream without a fresh answer.
        unanswered: frames for which nothing was published.
        back_ms: from the poisonous frame's stamp to the next fresh answer; NaN: none came.
        late_ms: of every answer, past its deadline.
    """

    not_fresh: int
    unanswered: int
    back_ms: float
    late_ms: list[float]


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
    add_some(parser, "--parts", ("kills", "frames"))
    parser.add_argument(
        "--times", type=int, default=3, help="for each kind of backup, and each fault (default 3)"
    )
    add_camera(parser)
    add_stage(parser, budget_ms=40.0)
    parser.add_argument(
        "--budget-from", choices=("stamp", "receipt"), default="stamp", help="default stamp"
    )
    add_device(parser)
    kills = parser.add_argument_group("kills")
    add_some(kills, "--backups", BACKUPS)
    kills.add_argument(
        "--settle",
        type=float,
        default=5.5,
        help="seconds from every worker's being ready to the stream (default 5.5)",
    )
    kills.add_argument("--seed", type=int, default=1, help="of the moments at which to kill (default 1)")
    frames = parser.add_argument_group("frames")
    add_some(frames, "--faults", FAULTS)
    frames.add_argument("--seconds", type=float, default=4.0, help="of each stream (default 4)")
    add_backup(frames)
    arguments = parser.parse_args()
    report = Report("failover", arguments)
    kills: dict[str, list[Failover]] = {}
    frames: dict[str, list[Poisoned]] = {}
    killed = arguments.backups if "kills" in arguments.parts else []
    poisoned = [arguments.backup] if "frames" in arguments.parts else []
    for backup in dict.fromkeys([*killed, *poisoned]):
        with Streaming(
            arguments, adapter=_POISONED, backup=backup, budget_from=arguments.budget_from
        ) as streaming:
            if backup in killed:
                kills[backup] = _failovers(streaming, arguments, backup)
            if backup in poisoned:
                frames = _poisons(streaming, arguments)
    figures, targets = dict[str, Any](), list[Target]()
    if kills:
        figures["kills"], targets = _show_kills(report, kills), kill_targets(kills)
    if frames:
        figures["frames"] = _show_frames(report, frames, arguments)
        targets += _frame_targets(frames, arguments.backup)
    report.finish(figures, targets)
    return 0


def _failovers(streaming: Streaming, arguments: argparse.Namespace, backup: str) -> list[Failover]:
    luck = random.Random(f"{arguments.seed}/{backup}")
    return [_failover(streaming, arguments, backup, number, luck) for number in range(arguments.times)]


def _failover(
    streaming: Streaming, arguments: argparse.Namespace, backup: str, number: int, luck: random.Random
) -> Failover:
    streaming.node.wait_ready()
    streaming.graph.observer.listen(arguments.settle)
    say(f"backup {backup}: kill {number + 1} of {arguments.times}")
    seen = streaming.seen
    seen.clear()
    killer = Killer(streaming.graph.observer, round(1e9 / arguments.rate), _LEAD_S, luck)
    sent = streaming.stream(_LEAD_S + _TAIL_S[backup], meanwhile=killer.look)
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
            found.unanswered = sum(
                hit_ns < stamp < last_ns and stamp not in answered for stamp in sent["stamps"]
            )
            break
        if not frame.fresh:
            found.fallbacks[Fallback(int(frame.row["fallback"])).word] += 1
    return found


def _show_kills(report: Report, found: dict[str, list[Failover]]) -> dict[str, Any]:
    figures, rows = {}, []
    for backup, kills in found.items():
        outage, on_fallback = (
            distribution([kill.outage_ms for kill in kills]),
            [kill.on_fallback for kill in kills],
        )
        kinds = sum((kill.fallbacks for kill in kills), Counter())
        figures[backup] = {
            "outage_ms": outage,
            "frames_on_fallback": on_fallback,
            "each": [asdict(kill) for kill in kills],
        }
        rows.append(
            [
                backup,
                outage["count"],
                outage["p50"],
                outage["max"],
                " ".join(map(shown, on_fallback)),
                ", ".join(f"{kind} {count}" for kind, count in kinds.items()) or "-",
                sum(kill.unanswered for kill in kills),
            ]
        )
    report.table(
        "From the kill of the running worker to the next fresh result of another process",
        (
            "backup",
            "came back",
            "p50 ms",
            "max ms",
            "frames on a fallback, each kill",
            "by fallback",
            "unanswered",
        ),
        rows,
    )
    return figures


def kill_targets(found: dict[str, list[Failover]]) -> list[Target]:
    """The worst of each backup.

    Of NumPy's maximum NaN is one, so that who never came back counts as worst.
    """
    targets = []
    for backup, kills in found.items():
        if backup == "none":
            worst_s = float(np.max([kill.outage_ms for kill in kills])) / 1e3
            targets.append(Target("no backup: back after", worst_s, "<=", 3.0, "s"))
        else:
            worst = float(np.max([kill.on_fallback for kill in kills]))
            targets.append(Target(f"{backup}: frames on a fallback, worst kill", worst, "<=", 1.0))
    return targets


def _poisons(streaming: Streaming, arguments: argparse.Namespace) -> dict[str, list[Poisoned]]:
    found: dict[str, list[Poisoned]] = {fault: [] for fault in arguments.faults}
    for number in range(arguments.times):
        for fault in arguments.faults:
            say(f"{fault}: {number + 1} of {arguments.times}")
            streaming.node.wait_ready()
            streaming.graph.observer.listen(_POISON_SETTLE_S)
            found[fault].append(_poison(streaming, arguments, fault))
    return found


def _poison(streaming: Streaming, arguments: argparse.Namespace, fault: str) -> Poisoned:
    seen = streaming.seen
    seen.clear()
    at = round(_POISON_LEAD_S * arguments.rate)
    stamps = streaming.stream(arguments.seconds, first_bytes={at: FAULTS.index(fault) + 1})["stamps"]
    frames = match(stamps, seen.rows, seen.outputs)
    fresh = {frame.stamp_ns: frame for frame in frames if frame.fresh}
    answered = {frame.stamp_ns for frame in frames if frame.output is not None}
    back = min((stamp for stamp in fresh if stamp > stamps[at]), default=None)
    return Poisoned(
        not_fresh=len(set(stamps) - set(fresh)),
        unanswered=len(set(stamps) - answered),
        back_ms=math.nan if back is None else (fresh[back].row.written_ns - stamps[at]) / 1e6,
        late_ms=[_late_ms(frame.row, arguments.budget_from) for frame in frames],
    )


def _late_ms(row: Any, budget_from: str) -> float:
    """Past the deadline, as the node counts it: from the receipt, or from the stamp."""
    age_ms = row["age_ms"] if budget_from == "stamp" else 0.0
    return row["total_ms"] + age_ms - row["budget_ms"]


def _show_frames(
    report: Report, found: dict[str, list[Poisoned]], arguments: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    figures = {
        fault: {
            "not_fresh": [each.not_fresh for each in cases],
            "unanswered": [each.unanswered for each in cases],
            "back_ms": [each.back_ms for each in cases],
            "lateness_ms": distribution([late for each in cases for late in each.late_ms]),
        }
        for fault, cases in found.items()
    }
    report.table(
        f"{arguments.size} at {arguments.rate:g} Hz, budget {arguments.budget_ms:g} ms from"
        f" {arguments.budget_from}, backup {arguments.backup}: each stream of {arguments.seconds:g} s has"
        " one frame that makes its worker ...",
        ("", "frames not fresh", "fresh again, ms", "unanswered", "lateness p99 ms", "max ms"),
        [
            [
                fault,
                " ".join(map(str, each["not_fresh"])),
                max(each["back_ms"]),
                sum(each["unanswered"]),
                each["lateness_ms"]["p99"],
                each["lateness_ms"]["max"],
            ]
            for fault, each in figures.items()
        ],
    )
    return figures


def _frame_targets(found: dict[str, list[Poisoned]], backup: str) -> list[Target]:
    cases = [each for cases in found.values() for each in cases]
    late = [ms for each in cases for ms in each.late_ms]
    targets = [
        Target("frames without an answer", float(sum(each.unanswered for each in cases)), "==", 0.0),
        Target(
            "answers by the deadline", 100 * share(sum(ms <= 0 for ms in late), len(late)), ">=", 99.9, "%"
        ),
        Target("answers by +1 ms", 100 * share(sum(ms <= 1 for ms in late), len(late)), ">=", 100.0, "%"),
    ]
    if backup != "none":
        worst = float(max(each.not_fresh for each in cases))
        targets.insert(0, Target("frames not fresh, the worst case", worst, "<=", 2.0))
    return targets


if __name__ == "__main__":
    sys.exit(main())
