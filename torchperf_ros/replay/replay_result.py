"""What a replay came to, as objects: for tests, reports and files."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.frame_table import output_hash
from torchperf_ros.core.message_types import decode
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.run_file import Run
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.replay.replay_error import ReplayError


class PublishedFrame(NamedTuple):
    """What a stage published for a frame: the frame's number and `header.stamp`, the CDR bytes and their type."""

    seq: int
    stamp_ns: int
    data: bytes
    type_name: str

    @property
    def message(self) -> Any:  # noqa: ANN401 - a rosbags message
        """Decoded by `rosbags`; arrays are numpy views."""
        return decode(self.data, self.type_name)


@dataclass(frozen=True)
class StageResult:
    """What became of one stage's frames.

    Attributes:
        name, tiers, output_topic, output_type, budget_ms: of the stage.
        frames: answered frames, rows of `FRAME`.
        received, superseded, stale: frames that came, and those that were never started.
        anomalies: findings about this stage, with the time of the log in ns.
        reasons: why a frame was not on time, by its `seq`.
        output: the MCAP that holds what it published, None if none was written.
    """

    name: str
    tiers: tuple[str, ...]
    output_topic: str
    output_type: str
    budget_ms: float
    frames: NDArray[np.void]
    received: int
    superseded: int
    stale: int
    anomalies: tuple[tuple[int, Anomaly], ...]
    reasons: Mapping[int, str]
    output: Path | None

    @property
    def miss_ratio(self) -> float:
        """Share of the answered frames that were not on time, 0 to 1; NaN without frames."""
        return float(np.mean(self.frames["outcome"] != Outcome.ON_TIME)) if len(self.frames) else float("nan")

    def quantile_ms(self, share: float) -> float:
        """Latency, receipt to publish, that this share (0 to 1) of the frames did not exceed; NaN without frames."""
        return float(np.quantile(self.frames["total_ms"], share)) if len(self.frames) else float("nan")

    @property
    def p50_ms(self) -> float:
        """Median latency."""
        return self.quantile_ms(0.5)

    @property
    def p95_ms(self) -> float:
        """95th percentile of the latency."""
        return self.quantile_ms(0.95)

    @property
    def p99_ms(self) -> float:
        """99th percentile of the latency."""
        return self.quantile_ms(0.99)

    @property
    def max_ms(self) -> float:
        """Longest latency."""
        return self.quantile_ms(1.0)

    @property
    def outcomes(self) -> Counter[str]:
        """How many frames ended how, by word."""
        values, counts = np.unique(self.frames["outcome"], return_counts=True)
        return Counter({Outcome(value).word: int(count) for value, count in zip(values, counts, strict=True)})

    @property
    def fallbacks(self) -> Counter[str]:
        """What was published instead of frames' own results how often, by word."""
        values, counts = np.unique(self.frames["fallback"], return_counts=True)
        pairs = zip(values, counts, strict=True)
        return Counter({Fallback(value).word: int(count) for value, count in pairs if value >= 0})

    @property
    def messages(self) -> Iterator[PublishedFrame]:
        """What the stage published, in order, read from the output MCAP as it is asked for.

        Raises:
            ReplayError: its messages were not kept, or are no longer there.
        """
        if self.output is None:
            msg = f"stage {self.name}: its messages were not kept; replay with an output file"
            raise ReplayError(msg)
        with LogReader(self.output) as log:
            messages = log.messages({self.output_topic})
            for frame in self.frames[self.frames["output_hash"] != 0]:
                found, seq = next(messages, None), int(frame["seq"])
                if found is None or output_hash(found.data) != frame["output_hash"]:
                    msg = f"{self.output}: is not what stage {self.name} published for frame {seq}; replay again"
                    raise ReplayError(msg)
                yield PublishedFrame(seq, int(frame["stamp_ns"]), found.data, found.type_name)


@dataclass(frozen=True)
class ReplayResult:
    """A whole replay.

    Attributes:
        log: what was replayed.
        stages: by name, in the order of the parameters.
        anomalies: every finding, with the time of the log in ns.
        summary: what `--json` writes beside the frames; a JSON object.
        output: the MCAP, None if none was written.
        complete: False if it was interrupted.
    """

    log: Path
    stages: Mapping[str, StageResult]
    anomalies: tuple[tuple[int, Anomaly], ...]
    summary: Mapping[str, Any]
    output: Path | None
    complete: bool = True

    def stage(self, name: str) -> StageResult:
        """One stage's result.

        Raises:
            KeyError: there is no such stage; the message names those that there are.
        """
        if name not in self.stages:
            msg = f"no stage {name!r}; there are: {', '.join(self.stages)}"
            raise KeyError(msg)
        return self.stages[name]

    @property
    def run(self) -> Run:
        """For `write_run`."""
        return Run(self.summary, {name: stage.frames for name, stage in self.stages.items()})
