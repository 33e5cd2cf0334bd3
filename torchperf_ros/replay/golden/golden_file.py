"""Golden outputs.

What stages published on a log when all was well, in one MCAP file, and what differs from it now.
"""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from mcap.reader import make_reader

from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.replay.golden.message_rule import Difference, Rules, compare_messages
from torchperf_ros.replay.replay import PublishedFrame, ReplayResult, stamp_text, text_columns
from torchperf_ros.replay.replay_record import OutputLog

_ORIGIN: Final = "torchperf_golden"
_WORD: Final = (1 << 64) - 1
# MCAP's times have no sign, stamps have.
#
# A stamp before 1970 stands in `publish_time` as its two's complement.
_SIGN: Final = 1 << 63
_OUTPUT: Final = "the output"
# Begins a key of the metadata: the guard's verdicts on a stage's frames.
_CHECKS: Final = "checks of "
# Begins a key of the metadata: how many of a stage's frames had no answer.
_SUPERSEDED: Final = "superseded of "
# Begins a key of the metadata: by which engines a stage ran.
_ENGINES: Final = "engines of "
_MOST_FIELDS: Final = 12


class GoldenError(TorchperfError):
    """Golden outputs cannot be made, read or compared; the message says why and what would do."""


@dataclass(frozen=True)
class Golden:
    """Outputs to compare with, by stage, and what they were made from: hashes of log, parameters, models.

    `superseded`: by stage, how many frames had no answer, as a newer one came first.
    """

    origin: Mapping[str, str]
    frames: Mapping[str, tuple[PublishedFrame, ...]]
    superseded: Mapping[str, int] = field(default_factory=dict)
    # By stage: by which engine each tier ran. Outputs that agree may come from others.
    engines: Mapping[str, str] = field(default_factory=dict)

    def changed_since(self, other: "Golden") -> list[str]:
        """What these were made from that the others were not, for example `parameters`."""
        mine, theirs = self.origin, other.origin
        return [what for what in mine if mine[what] and theirs.get(what) and mine[what] != theirs[what]]

    def more_superseded_than(self, other: "Golden") -> list[str]:
        """A line for each stage of which more frames had no answer than there."""
        return [
            f"{stage}: {count} frames had no answer, as a newer one came first; in the golden run {before}"
            for stage, count in self.superseded.items()
            if count > (before := other.superseded.get(stage, 0))
        ]


def golden_of(result: ReplayResult, stages: Collection[str]) -> Golden:
    """What these stages published, as golden outputs.

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
        raise GoldenError(f"replay of {result.log} cannot be compared with golden outputs: {why}")
    summary = result.summary
    models = {f"model of {stage}": hashed for stage, hashed in summary["model"].items()}
    origin = {
        "log": summary["log"]["sha256"],
        "parameters": summary["params_sha256"],
        **models,
        "pace": summary["pace"],
        "seed": summary["seed"],
    }
    messages = {name: tuple(result.stage(name).messages) for name in stages}
    superseded = {name: count for name in stages if (count := result.stage(name).superseded)}
    engines = {name: str(text) for name, text in summary.get("engines", {}).items()}
    return Golden({what: str(value) for what, value in origin.items()}, messages, superseded, engines)


def write_golden(golden: Golden, path: Path) -> None:
    """Write golden outputs as an MCAP with message definitions: all of it, or nothing under this name.

    A topic is a stage, and messages are logged at their frame's stamp, so that they stand beside the log's
    in a viewer; at 0 if that is negative.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    checks = {
        f"{_CHECKS}{stage}": ",".join(frame.check for frame in frames)
        for stage, frames in golden.frames.items()
        if any(frame.check for frame in frames)
    }
    superseded = {f"{_SUPERSEDED}{stage}": str(count) for stage, count in golden.superseded.items()}
    engines = {f"{_ENGINES}{stage}": text for stage, text in golden.engines.items()}
    with OutputLog(path, metadata=(_ORIGIN, {**golden.origin, **checks, **superseded, **engines})) as file:
        for stage, frames in golden.frames.items():
            for frame in frames:
                stamp_ns = frame.stamp_ns
                file.write(
                    stage, frame.type_name, frame.data, max(0, stamp_ns), stamp_ns & _WORD, frame.seq
                )
        file.close()


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
        origin = next(
            (dict(found.metadata) for found in reader.iter_metadata() if found.name == _ORIGIN), None
        )
        for schema, channel, message in reader.iter_messages(log_time_order=False):
            stamp_ns = message.publish_time - ((message.publish_time & _SIGN) << 1)
            frame = PublishedFrame(message.sequence, stamp_ns, message.data, schema.name if schema else "")
            frames.setdefault(channel.topic, []).append(frame)
    except Exception as error:
        # mcap and the decompressors raise many kinds of errors on damage: struct.error, ZstdError,
        # OverflowError, ...
        raise GoldenError(
            f"golden file {path}: cannot be read ({type(error).__name__}: {error})"
        ) from error
    if origin is None:
        raise GoldenError(f"golden file {path}: is an MCAP that holds no golden outputs")
    for stage, found in frames.items():
        checks = origin.pop(f"{_CHECKS}{stage}", "").split(",")
        if len(checks) == len(found):
            frames[stage] = [
                frame._replace(check=check) for frame, check in zip(found, checks, strict=True)
            ]
    counts = {key: origin.pop(key) for key in list(origin) if key.startswith(_SUPERSEDED)}
    superseded = {
        key.removeprefix(_SUPERSEDED): int(count) for key, count in counts.items() if count.isdecimal()
    }
    engines = {
        name.removeprefix(_ENGINES): origin.pop(name) for name in list(origin) if name.startswith(_ENGINES)
    }
    return Golden(origin, {stage: tuple(found) for stage, found in frames.items()}, superseded, engines)


class GoldenComparison(NamedTuple):
    """A stage's outputs beside golden ones.

    Of `frames`, those that only one side has among them, which differ how.
    """

    stage: str
    frames: int
    differing: tuple[tuple[PublishedFrame, tuple[Difference, ...]], ...]

    def text(self) -> list[str]:
        """For people: how many frames differ, the first difference, and the worst one of each field."""
        first, differences = self.differing[0]
        some, others = differences[0], len(differences) - 1
        more = f", with {others} more field{'s' if others > 1 else ''}" if others else ""
        distance = ": off by {}, allowed {}".format(*some.shown) if some.shown[0] else ""
        return [
            f"{self.stage}: {len(self.differing)} of {self.frames} frames differ",
            f"  first in frame {_frame_text(first)}{more}:",
            f"    {some.path} is {_short(some.value)}, golden {_short(some.golden)}{distance}",
            "  by field, the worst of each:",
            *text_columns(list(self._worst()), "    "),
        ]

    def _worst(self) -> Iterator[tuple[str, ...]]:
        fields: dict[str, list[tuple[PublishedFrame, Difference]]] = {}
        for frame, differences in self.differing:
            for difference in differences:
                fields.setdefault(difference.field, []).append((frame, difference))
        yield "field", "frames", "is", "golden", "off by", "allowed", "in frame"
        for name, found in list(fields.items())[:_MOST_FIELDS]:
            frame, worst = max(found, key=lambda pair: -1.0 if math.isnan(pair[1].error) else pair[1].error)
            frames = len({id(frame) for frame, _ in found})
            yield (
                name,
                str(frames),
                _short(worst.value),
                _short(worst.golden),
                *worst.shown,
                _frame_text(frame),
            )
        if len(fields) > _MOST_FIELDS:
            yield f"and {len(fields) - _MOST_FIELDS} more", *[""] * 6


def compare_frames(
    stage: str, frames: Sequence[PublishedFrame], golden: Sequence[PublishedFrame], rules: Rules
) -> GoldenComparison:
    """Compare what a stage published with golden outputs.

    Frames belong together if their stamps are equal; of several with the same stamp the first, the second,
    and so on.
    """
    mine, theirs = _by_stamp(frames), _by_stamp(golden)
    both, differing = {**theirs, **mine}, []
    for key in sorted(both):
        if found := tuple(_differences(mine.get(key), theirs.get(key), rules)):
            differing.append((both[key], found))
    return GoldenComparison(stage, len(both), tuple(differing))


def _by_stamp(frames: Sequence[PublishedFrame]) -> dict[tuple[int, int], PublishedFrame]:
    """By stamp, and how many of the same stamp come before."""
    counts: dict[int, Iterator[int]] = defaultdict(itertools.count)
    return {(frame.stamp_ns, next(counts[frame.stamp_ns])): frame for frame in frames}


def _differences(
    frame: PublishedFrame | None, golden: PublishedFrame | None, rules: Rules
) -> Iterator[Difference]:
    if frame is None or golden is None:
        yield Difference(_OUTPUT, "published" if frame else "none", "published" if golden else "none")
    elif frame.check != golden.check:
        yield Difference("the guard's verdict", frame.check or "none", golden.check or "none")
    elif frame.type_name != golden.type_name:
        yield Difference(_OUTPUT, frame.type_name, golden.type_name)
    elif frame.data != golden.data:
        yield from compare_messages(frame.message, golden.message, rules)


def _frame_text(frame: PublishedFrame) -> str:
    return f"seq {frame.seq}, stamp {stamp_text(frame.stamp_ns)}"


def _short(value: object) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)
