"""How a log is to be replayed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

PACES: Final = ("real", "fast", "virtual")


@dataclass(frozen=True)
class ReplayOptions:
    """What `torchperf replay` takes besides the log.

    Attributes:
        params: a ROS 2 parameter file like `config/perception.yaml`; None: every default.
        remap: topic of the log by topic of a stage, for example `{"image": "/camera/front"}`.
        pace: `real`: 30 Hz is 30 Hz, and deadlines count; `fast`: every frame is answered, one after the other,
            without a deadline; `virtual`: deadlines count on a clock that steps through the log.
        step_times: for `virtual`: where durations come from: `log`, or a file (see `StepTimes`).
        seed: of whatever is drawn at random.
        start_s, duration_s: which part of the log; None: to its end.
        inputs: input topics to copy into the output: `all`, `none`, or names with commas between.
        output: MCAP to write, None for none.
        overrides: parameters that replace those of the file, for example `{"perception.engine": "eager"}`.
    """

    params: Path | None = None
    remap: Mapping[str, str] = field(default_factory=dict)
    pace: str = "fast"
    step_times: str = "log"
    seed: int = 0
    start_s: float = 0.0
    duration_s: float | None = None
    inputs: str = "none"
    output: Path | None = None
    overrides: Mapping[str, object] = field(default_factory=dict)
