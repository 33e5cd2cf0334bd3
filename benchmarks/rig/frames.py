"""What became of each image that the camera sent.

The record and the output that answered it, and how late it was.
"""

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.rig.figures import distribution, share
from benchmarks.rig.observer import Output, Row
from benchmarks.rig.report import Report
from torchperf_ros.api.outcome import Fallback, Outcome

_STEPS: Final = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
_TITLES: Final = {
    "lateness_ms": "Lateness in ms; negative: before the deadline",
    "overhead_ms": "Overhead in ms",
}
_SHOWN: Final = ("p50", "p99", "p99_9", "max")
_NS_PER_MS = 1e6
_RECENT_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class AnsweredFrame:
    """A frame with the record of its answer, and the output that was published for it, None if nothing was."""

    stamp_ns: int
    row: Row
    output: Output | None

    @property
    def arrival_after_ms(self) -> float:
        """From the stamp to the arrival of the output at the onlooker; NaN if there was none."""
        return math.nan if self.output is None else (self.output.received_ns - self.stamp_ns) / _NS_PER_MS

    @property
    def fresh(self) -> bool:
        """Whether the answer was computed from this very frame, by the runner or the backup."""
        return math.isnan(self.row["fallback"]) or self.row["fallback"] == Fallback.BACKUP


def match(stamps_ns: Sequence[int], rows: Sequence[Row], outputs: Sequence[Output]) -> list[AnsweredFrame]:
    """Records with the images and outputs that they belong to.

    A record says how long ago its frame was stamped, and is written right after the frame's output: so the
    image is the one whose stamp is nearest to that time, and the output the last one written before the
    record.
    """
    written = [output.written_ns for output in outputs]
    answered = []
    for row in rows:
        since_stamp_ms = row["age_ms"] + row["total_ms"]
        stamp_ns = _nearest(stamps_ns, row.written_ns - round(since_stamp_ms * _NS_PER_MS))
        place = bisect.bisect_right(written, row.written_ns) - 1
        published = row["fallback"] != Fallback.NONE and place >= 0
        answered.append(AnsweredFrame(stamp_ns, row, outputs[place] if published else None))
    return answered


def _nearest(stamps_ns: Sequence[int], at_ns: int) -> int:
    place = bisect.bisect_left(stamps_ns, at_ns)
    return min(stamps_ns[max(0, place - 1) : place + 1], key=lambda stamp_ns: abs(stamp_ns - at_ns))


def frame_figures(
    frames: Sequence[AnsweredFrame], sent: int, received: int, started: int
) -> dict[str, Any]:
    """Figures of frames that were sent, received by the node, started, and answered.

    See `benchmarks/deadline.py`.
    """
    own_ms = [frame.row["lateness_ms"] for frame in frames]
    from_stamp_ms = [frame.arrival_after_ms - frame.row["budget_ms"] for frame in frames]
    from_receipt_ms = [
        late_ms - frame.row["age_ms"] for late_ms, frame in zip(from_stamp_ms, frames, strict=True)
    ]
    fallbacks = Counter(_word(Fallback, frame.row["fallback"]) for frame in frames)
    fallbacks.pop("", None)
    return {
        "sent": sent,
        "received": received,
        "started": started,
        "answered": len(frames),
        "answered_share_of_started": share(len(frames), started),
        "answered_share_of_sent": share(len(frames), sent),
        "by_deadline_share": share(sum(late_ms <= 0 for late_ms in own_ms), started),
        "by_deadline_plus_1_ms_share": share(sum(late_ms <= 1 for late_ms in own_ms), started),
        "seen_by_deadline_plus_1_ms_share": share(
            sum(late_ms <= 1 for late_ms in from_receipt_ms), started
        ),
        "seen_within_budget_of_stamp_share_of_sent": share(
            sum(late_ms <= 0 for late_ms in from_stamp_ms), sent
        ),
        "fresh_share_of_sent": share(sum(frame.fresh for frame in frames), sent),
        "not_finite_published": sum(
            frame.output is not None and not frame.output.finite for frame in frames
        ),
        "lateness_ms": distribution(own_ms),
        "seen_lateness_ms": distribution(from_receipt_ms),
        "seen_lateness_from_stamp_ms": distribution(from_stamp_ms),
        "age_at_receipt_ms": distribution([frame.row["age_ms"] for frame in frames]),
        "outcomes": dict(Counter(_word(Outcome, frame.row["outcome"]) for frame in frames)),
        "fallbacks": dict(fallbacks),
        "tiers": {str(int(tier)): count for tier, count in sorted(_tiers(frames).items())},
    }


def latest(
    frames: Sequence[AnsweredFrame], faults: Sequence[dict[str, Any]], count: int = 10
) -> list[dict[str, Any]]:
    """The frames that were answered last after their deadline, at most `count`, worst first.

    What there is to explain.

    Args:
        frames: of one stream.
        faults: what was injected meanwhile, as in the journal.
        count: how many.
    """
    late = sorted((frame for frame in frames if _late_ms(frame) > 0), key=_late_ms, reverse=True)
    return [
        {
            "at_s": (frame.stamp_ns - frames[0].stamp_ns) / 1e9,
            "late_ms": _late_ms(frame),
            **{label: frame.row[label] for label in ("age_ms", "wait_ms", "tier", "inference_ms")},
            "outcome": _word(Outcome, frame.row["outcome"]),
            "fallback": _word(Fallback, frame.row["fallback"]),
            "faults_ms_before": [
                f"{fault['kind']} {(frame.stamp_ns - fault['stamp_ns']) / _NS_PER_MS:.0f}"
                for fault in faults
                if 0 <= frame.stamp_ns - fault["stamp_ns"] < _RECENT_NS
            ],
        }
        for frame in late[:count]
    ]


def _late_ms(frame: AnsweredFrame) -> float:
    return frame.row["lateness_ms"]


def _tiers(frames: Sequence[AnsweredFrame]) -> Counter[float]:
    return Counter(frame.row["tier"] for frame in frames if not math.isnan(frame.row["tier"]))


def _word(kind: Any, value: float) -> str:
    return "" if math.isnan(value) else kind(int(value)).word


def steps_ms(row: Row) -> float:
    """What the model's own steps took."""
    return sum(row[step] for step in _STEPS)


def lateness(rows: Sequence[Row]) -> dict[str, Any]:
    """Receipt to publish less the budget, of every row.

    The same less the model's own steps, of those on time.
    """
    fresh = [row for row in rows if row["outcome"] == 0]
    return {
        "lateness_ms": distribution([row["lateness_ms"] for row in rows]),
        "overhead_ms": distribution([row["total_ms"] - steps_ms(row) for row in fresh]),
        "not_on_time": len(rows) - len(fresh),
    }


def show_lateness(report: Report, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of each, with what `lateness` gives of each arm."""
    for key, title in _TITLES.items():
        report.table(
            title,
            ("", "frames", "not on time", "p50", "p99", "p99.9", "max"),
            [
                [arm, found[key]["count"], found["not_on_time"], *(found[key][name] for name in _SHOWN)]
                for arm, found in arms.items()
            ],
        )
