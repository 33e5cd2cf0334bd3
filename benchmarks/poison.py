"""What a frame costs that makes whoever runs it fail: how many frames are not fresh, and how late the answers are.

Every image is the same but for its first byte, which names the fault (see `rig/poison_adapter.py`): 0 for none. Each
fault gets a stream of its own with one poisonous frame in it, once every worker is back. Counted are, of the whole
stream, the frames that were not answered from themselves (by the runner or the standby), those that got no answer, and
the lateness of every answer; and the time from the poisonous frame's stamp to the next fresh answer.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.rig.arguments import add_backup, add_camera, add_stage, arguments_of
from benchmarks.rig.figures import distribution
from benchmarks.rig.frames import match
from benchmarks.rig.graph import Streaming
from benchmarks.rig.poison_adapter import FAULTS
from benchmarks.rig.report import Report, Target, say

_ADAPTER = "benchmarks.rig.poison_adapter:PoisonAdapter"
_LEAD_S, _SETTLE_S = 1.0, 1.0
_EPILOG = """\
targets, with a standby, on an otherwise idle machine: each fault costs at most 2 frames that are not fresh, no frame is
unanswered, 99.9 % are answered by the deadline and all by +1 ms

examples:
  ./run bench poison
  ./run bench poison --faults "hang,segfault,sleep in preprocess" --times 5
  ./run bench poison --backup none"""


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


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--faults", default=",".join(FAULTS), help=f"default all: {', '.join(FAULTS)}")
    parser.add_argument("--times", type=int, default=1, help="poisonous frames of each fault (default 1)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each stream (default 4)")
    parser.add_argument("--budget-from", choices=("stamp", "receipt"), default="stamp", help="default stamp")
    add_camera(parser)
    add_stage(parser, model_ms=5.0, budget_ms=40.0)
    add_backup(parser)
    arguments = parser.parse_args()
    faults = [fault.strip() for fault in arguments.faults.split(",")]
    if unknown := sorted(set(faults) - set(FAULTS)):
        parser.error(f"--faults: {unknown[0]!r} is unknown; there are {', '.join(FAULTS)}")
    report = Report("poison", arguments)
    found = _measure(arguments, faults)
    _show(report, found, arguments)
    report.finish(_figures(found), _targets(found, arguments.backup))
    return 0


def _measure(arguments: argparse.Namespace, faults: list[str]) -> dict[str, list[Poisoned]]:
    found: dict[str, list[Poisoned]] = {fault: [] for fault in faults}
    with Streaming(arguments, adapter=_ADAPTER, budget_from=arguments.budget_from) as streaming:
        for number in range(arguments.times):
            for fault in faults:
                say(f"{fault}: {number + 1} of {arguments.times}")
                streaming.node.wait_ready()
                streaming.graph.observer.listen(_SETTLE_S)
                found[fault].append(_poison(streaming, arguments, fault))
    return found


def _poison(streaming: Streaming, arguments: argparse.Namespace, fault: str) -> Poisoned:
    seen = streaming.seen
    seen.clear()
    at = round(_LEAD_S * arguments.rate)
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


def _figures(found: dict[str, list[Poisoned]]) -> dict[str, Any]:
    return {
        fault: {
            "not_fresh": [each.not_fresh for each in cases],
            "unanswered": [each.unanswered for each in cases],
            "back_ms": [each.back_ms for each in cases],
            "lateness_ms": distribution([late for each in cases for late in each.late_ms]),
        }
        for fault, cases in found.items()
    }


def _show(report: Report, found: dict[str, list[Poisoned]], arguments: argparse.Namespace) -> None:
    rows = []
    for fault, cases in found.items():
        late = distribution([late for each in cases for late in each.late_ms])
        rows.append([
            fault, " ".join(str(each.not_fresh) for each in cases), max(each.back_ms for each in cases),
            sum(each.unanswered for each in cases), late["p99"], late["max"],
        ])  # fmt: skip
    report.table(
        f"{arguments.size} at {arguments.rate:g} Hz, budget {arguments.budget_ms:g} ms from {arguments.budget_from}, "
        f"backup {arguments.backup}: each stream of {arguments.seconds:g} s has one frame that makes its worker ...",
        ("", "frames not fresh", "fresh again, ms", "unanswered", "lateness p99 ms", "max ms"),
        rows,
    )


def _targets(found: dict[str, list[Poisoned]], backup: str) -> list[Target]:
    cases = [each for cases in found.values() for each in cases]
    late = [ms for each in cases for ms in each.late_ms]
    targets = [
        Target("frames without an answer", float(sum(each.unanswered for each in cases)), "==", 0.0),
        Target("answers by the deadline", 100 * sum(ms <= 0 for ms in late) / len(late), ">=", 99.9, "%"),
        Target("answers by +1 ms", 100 * sum(ms <= 1 for ms in late) / len(late), ">=", 100.0, "%"),
    ]
    if backup != "none":
        worst = float(max(each.not_fresh for each in cases))
        targets.insert(0, Target("frames not fresh, the worst case", worst, "<=", 2.0))
    return targets


if __name__ == "__main__":
    sys.exit(main())
