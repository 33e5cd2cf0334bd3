"""What a stage published beside golden outputs: which frames differ, where first, and where most."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.replay.golden.message_comparison import Difference, compare_messages
from torchperf_ros.replay.golden.message_rule import Rules
from torchperf_ros.replay.golden.text_columns import text_columns
from torchperf_ros.replay.replay_result import PublishedFrame

_OUTPUT: Final = "the output"
_MOST_FIELDS: Final = 12


@dataclass(frozen=True)
class FrameDifference:
    """A frame whose output is not as the golden one: the frame's number and stamp, and the fields that differ."""

    seq: int
    stamp_ns: int
    differences: tuple[Difference, ...]


@dataclass(frozen=True)
class StageComparison:
    """A stage's outputs beside golden ones.

    Attributes:
        stage: its name.
        frames: how many frames were compared, those that only one side has among them.
        differing: the frames that differ, by stamp.
    """

    stage: str
    frames: int
    differing: tuple[FrameDifference, ...]

    def text(self) -> list[str]:
        """For people: how many frames differ, the first difference, and the worst one of each field."""
        count, first = len(self.differing), self.differing[0]
        some = first.differences[0]
        others = len(first.differences) - 1
        more = f", with {others} more field{'s' if others > 1 else ''}" if others else ""
        return [
            f"{self.stage}: {count} of {self.frames} frames differ",
            f"  first in frame {_frame(first)}{more}:",
            f"    {some.path} is {_short(some.value)}, golden {_short(some.golden)}{_distance(some)}",
            "  by field, the worst of each:",
            *text_columns(list(self._worst()), "    "),
        ]

    def _worst(self) -> Iterator[tuple[str, ...]]:
        """A row for each field that differs, in the order in which they come."""
        fields: dict[str, list[tuple[FrameDifference, Difference]]] = {}
        for frame in self.differing:
            for difference in frame.differences:
                fields.setdefault(difference.field, []).append((frame, difference))
        yield "field", "frames", "is", "golden", "off by", "allowed", "in frame"
        for name, found in list(fields.items())[:_MOST_FIELDS]:
            frame, worst = max(found, key=lambda pair: -1.0 if math.isnan(pair[1].error) else pair[1].error)
            frames = len({id(frame) for frame, _ in found})
            numbers = [f"{worst.error:.4g}", f"{worst.allowed:.4g}"] if not math.isnan(worst.error) else ["", ""]
            yield name, str(frames), _short(worst.value), _short(worst.golden), *numbers, _frame(frame)
        if len(fields) > _MOST_FIELDS:
            yield f"and {len(fields) - _MOST_FIELDS} more", *[""] * 6


def compare_frames(
    stage: str, frames: Sequence[PublishedFrame], golden: Sequence[PublishedFrame], rules: Rules
) -> StageComparison:
    """Compare what a stage published with golden outputs.

    Frames belong together if their stamps are equal; of several with the same stamp the first, the second, and so on.

    Raises:
        ComparisonError: see `compare_messages`.
    """
    mine, theirs = _by_stamp(frames), _by_stamp(golden)
    differing = []
    for key in sorted({*mine, *theirs}):
        frame, wanted = mine.get(key), theirs.get(key)
        found = tuple(_differences(frame, wanted, rules))
        if found:
            some = frame or wanted
            assert some is not None  # the key is from one of the two
            differing.append(FrameDifference(some.seq, some.stamp_ns, found))
    return StageComparison(stage, len({*mine, *theirs}), tuple(differing))


def _by_stamp(frames: Sequence[PublishedFrame]) -> dict[tuple[int, int], PublishedFrame]:
    counts: dict[int, int] = {}
    found = {}
    for frame in frames:
        nth = counts[frame.stamp_ns] = counts.get(frame.stamp_ns, -1) + 1
        found[frame.stamp_ns, nth] = frame
    return found


def _differences(frame: PublishedFrame | None, golden: PublishedFrame | None, rules: Rules) -> Iterator[Difference]:
    if frame is None or golden is None:
        yield Difference(_OUTPUT, "published" if frame else "none", "published" if golden else "none")
    elif frame.type_name != golden.type_name:
        yield Difference(_OUTPUT, frame.type_name, golden.type_name)
    elif frame.data != golden.data:
        yield from compare_messages(frame.message, golden.message, rules)


def _frame(frame: FrameDifference) -> str:
    seconds, nanoseconds = divmod(frame.stamp_ns, NS_PER_S)
    return f"seq {frame.seq}, stamp {seconds}.{nanoseconds:09d}"


def _distance(difference: Difference) -> str:
    if math.isnan(difference.error):
        return ""
    return f": off by {difference.error:.4g}, allowed {difference.allowed:.4g}"


def _short(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
