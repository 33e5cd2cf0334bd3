"""Golden outputs: what stages published on a log when all was well, and what they were made from, in one MCAP file."""

import io
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mcap.reader import make_reader
from mcap.writer import Writer

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.core.message_types import typestore
from torchperf_ros.replay.replay_error import ReplayError
from torchperf_ros.replay.replay_result import PublishedFrame, ReplayResult, StageResult

_ORIGIN: Final = "torchperf_golden"
_LIBRARY: Final = "torchperf_ros"
_ROS2: Final = 2
_WORD: Final = (1 << 64) - 1
_SIGN: Final = 1 << 63
"""MCAP's times have no sign, stamps have: a stamp before 1970 stands in `publish_time` as its two's complement."""


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
        return [what for what in now if what in self.origin and now[what] != self.origin[what]]


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
        GoldenError: see `published`.
    """
    return Golden(origin_of(result), {name: tuple(published(result, result.stage(name))) for name in stages})


def published(result: ReplayResult, stage: StageResult) -> Iterator[PublishedFrame]:
    """What a stage published, in order, with the frames that it was published for.

    Raises:
        GoldenError: the replay was interrupted, depends on the machine, or its outputs were not kept or were changed.
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
    try:
        yield from stage.messages
    except ReplayError as error:
        raise GoldenError(str(error)) from error


def write_golden(golden: Golden, path: Path) -> None:
    """Write golden outputs as an MCAP with message definitions: all of it, or nothing under this name.

    A topic is a stage, and messages are logged at their frame's stamp, so that they stand beside the log's in a viewer;
    at 0 if that is negative.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            _write(golden, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write(golden: Golden, file: Any) -> None:  # noqa: ANN401 - mcap takes any binary file
    writer: Any = Writer(file)  # its own types are partial
    writer.start(profile="ros2", library=_LIBRARY)
    writer.add_metadata(_ORIGIN, dict(golden.origin))
    schemas: dict[str, int] = {}
    for stage, frames in golden.frames.items():
        channels: dict[str, int] = {}
        for frame in frames:
            name = frame.type_name
            if name not in schemas:
                text, _ = typestore({name}).generate_msgdef(name, ros_version=_ROS2)
                schemas[name] = writer.register_schema(name, "ros2msg", text.encode())
            if name not in channels:
                channels[name] = writer.register_channel(stage, "cdr", schemas[name])
            writer.add_message(
                channels[name], log_time=max(0, frame.stamp_ns), publish_time=frame.stamp_ns & _WORD, data=frame.data,
                sequence=frame.seq,
            )  # fmt: skip
    writer.finish()


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
