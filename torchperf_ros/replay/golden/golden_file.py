"""Golden outputs: what stages published on a log when all was well, in one MCAP file, and what differs from it now."""

import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mcap.reader import make_reader

from torchperf_ros.frame.errors import TorchperfError
from torchperf_ros.replay.golden.message_rule import Difference, Rules, compare_messages
from torchperf_ros.replay.output_log import McapOutput
from torchperf_ros.replay.replay_result import PublishedFrame, ReplayResult, StageResult, stamp_text, text_columns

_ORIGIN: Final = "torchperf_golden"
_WORD: Final = (1 << 64) - 1
_SIGN: Final = 1 << 63
"""MCAP's times have no sign, stamps have: a stamp before 1970 stands in `publish_time` as its two's complement."""
_OUTPUT: Final = "the output"
_MOST_FIELDS: Final = 12


class GoldenError(TorchperfError):
    """Golden outputs cannot be made, read or compared; the message says why and what would do."""


@dataclass(frozen=True)
class Golden:
    """Outputs to compare with.

    Attributes:
        origin: what they were made from, in words and hashes; see `origin_of`.
        frames: by stage.
    """

    origin: Mapping[str, str]
    frames: Mapping[str, tuple[PublishedFrame, ...]]

    def changes(self, result: ReplayResult) -> list[str]:
        """What the result was made from that the golden outputs were not, for example `parameters`."""
        now = origin_of(result)
        return [what for what in now if now[what] and self.origin.get(what) and now[what] != self.origin[what]]


def origin_of(result: ReplayResult) -> dict[str, str]:
    """What outputs were made from: `log`, `parameters`, `model of STAGE`, `pace` and `seed`."""
    summary = result.summary
    return {
        "log": str(summary["log"]["sha256"]),
        "parameters": str(summary["params_sha256"]),
        **{f"model of {stage}": str(hashed) for stage, hashed in summary["model"].items()},
        "pace": str(summary["pace"]),
        "seed": str(summary["seed"]),
    }


def golden_of(result: ReplayResult, stages: Collection[str]) -> Golden:
    """What these stages published, as golden outputs.

    Raises:
        GoldenError, ReplayError: see `published`.
    """
    return Golden(origin_of(result), {name: tuple(published(result, result.stage(name))) for name in stages})


def published(result: ReplayResult, stage: StageResult) -> Iterator[PublishedFrame]:
    """What a stage published, in order, with the frames that it was published for.

    Raises:
        GoldenError: the replay was interrupted, depends on the machine, or its outputs were not kept.
        ReplayError: its outputs were changed since.
    """
    why = ""
    if not result.complete:
        why = "it was interrupted"
    elif result.summary["pace"] == "real":
        why = "outputs with pace real depend on how fast this machine is: use fast or virtual"
    elif result.output is None:
        why = "its outputs were not kept: give it an output file"
    if why:
        msg = f"replay of {result.log} cannot be compared with golden outputs: {why}"
        raise GoldenError(msg)
    yield from stage.messages


def write_golden(golden: Golden, path: Path) -> None:
    """Write golden outputs as an MCAP with message definitions: all of it, or nothing under this name.

    A topic is a stage, and messages are logged at their frame's stamp, so that they stand beside the log's in a viewer;
    at 0 if that is negative.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with McapOutput(path) as file:
        file.add_metadata(_ORIGIN, dict(golden.origin))
        for stage, frames in golden.frames.items():
            for frame in frames:
                stamp_ns = frame.stamp_ns
                file.add(stage, frame.type_name, frame.data, max(0, stamp_ns), stamp_ns & _WORD, frame.seq)
        file.finish()


def read_golden(path: Path) -> Golden:
    """Read what `write_golden` wrote.

    Raises:
        GoldenError: it is damaged, or no golden file.
        OSError: it cannot be read.
    """
    frames: dict[str, list[PublishedFrame]] = {}
    content = path.read_bytes()
    try:
        reader = make_reader(io.BytesIO(content), validate_crcs=True)
        origin = next((dict(found.metadata) for found in reader.iter_metadata() if found.name == _ORIGIN), None)
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            stamp_ns = message.publish_time - ((message.publish_time & _SIGN) << 1)
            frame = PublishedFrame(message.sequence, stamp_ns, message.data, schema.name if schema else "")
            frames.setdefault(channel.topic, []).append(frame)
    except Exception as error:
        # mcap and the decompressors raise whatever damage leads them to: struct.error, ZstdError, OverflowError, ...
        msg = f"golden file {path}: cannot be read ({type(error).__name__}: {error})"
        raise GoldenError(msg) from error
    if origin is None:
        msg = f"golden file {path}: is an MCAP that holds no golden outputs"
        raise GoldenError(msg)
    return Golden(origin, {stage: tuple(found) for stage, found in frames.items()})


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
    return f"seq {frame.seq}, stamp {stamp_text(frame.stamp_ns)}"


def _distance(difference: Difference) -> str:
    if math.isnan(difference.error):
        return ""
    return f": off by {difference.error:.4g}, allowed {difference.allowed:.4g}"


def _short(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
