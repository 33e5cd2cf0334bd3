"""How a log is to be replayed.

The options of `torchperf replay`, and the node's parameters as a replay uses them.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.settings.config import (
    NODE_PARAMETERS,
    NodeConfig,
    StageConfig,
    node_config,
    stage_config,
    stage_parameters,
)
from torchperf_ros.settings.params_file import config_of, params_of_file, read_yaml
from torchperf_ros.workers import process_setup
from torchperf_ros.workers.process_setup import keep_freed_memory

PACES: Final = ("real", "fast", "virtual")
NO_DEADLINE_MS: Final = 24 * 3_600_000.0
_LONGEST_RUN_MS = 600_000.0
_EVIDENCE: Final = "parameters.json"
_BLACK_BOX: Final = "black_box"
# Parameters of where and how a node is operated; what a replay comes to does not depend on them.
_OF_THE_PLACE = (
    "autostart",
    "metrics_port",
    "metrics_address",
    "cache_dir",
    "package_dirs",
    "cache_mib",
    "evidence_dir",
    "evidence_mib",
    "recorder",
    "record_mib",
    "watch",
    "start_timeout_s",
    "emergency",
)


class ReplayError(TorchperfError):
    """A log cannot be replayed with these parameters; the message says why and what would do."""


@dataclass(frozen=True)
class ReplayOptions:
    """What `torchperf replay` takes besides the log.

    Attributes:
        remap: topic of the log by topic of a stage, for example `{"image": "/camera/front"}`.
        pace: `real`: 30 Hz is 30 Hz, and deadlines count; `fast`: every frame is answered, one after the
            other, without a deadline; `virtual`: deadlines count on a clock that steps through the log.
        overrides: parameters that replace those of the file, for example `{"perception.engine": "eager"}`.
    """

    params: Path | None = None  # a ROS 2 parameter file like `config/perception.yaml`; None: every default
    remap: Mapping[str, str] = field(default_factory=dict)
    pace: str = "fast"
    step_times: str = "log"  # for `virtual`: where durations come from: `log`, or a file (see `StepTimes`)
    seed: int = 0  # of all random numbers
    start_s: float = 0.0
    duration_s: float | None = None
    # input topics to copy into the output: `all`, `none`, or names with commas between
    inputs: str = "none"
    output: Path | None = None  # MCAP to write, None for none
    overrides: Mapping[str, object] = field(default_factory=dict)


def recording_in(log: Path) -> Path:
    """The recording in an incident's folder, beside whose records it lies; any other path itself."""
    black_box = log / _BLACK_BOX
    return black_box if black_box.is_dir() else log


def read_config(options: ReplayOptions, log: Path | None = None) -> NodeConfig:
    """The parameters, as the node would have them.

    Those of a file, if the options name one; else those that the log's folder holds, an incident's; else
    every default.

    Raises:
        ConfigError: the file cannot be used, or a value is not allowed.
    """
    if options.pace not in PACES:
        raise ConfigError(f"pace {options.pace!r} is not there; it has to be one of: {', '.join(PACES)}")
    if options.step_times != "log" and options.pace != "virtual":
        raise ConfigError(
            f"step times {options.step_times}: are for pace virtual; at {options.pace} runs take what they"
            " take"
        )
    values: Mapping[str, object] = {}
    if options.params is not None:
        values = params_of_file(options.params)
    elif log is not None and (log / _EVIDENCE).is_file():
        found = read_yaml(log / _EVIDENCE, "parameters")
        values = found if isinstance(found, Mapping) else {}
    config = config_of({**values, **options.overrides})
    known = {p.name for p in NODE_PARAMETERS}
    known |= {
        f"{stage.name}.{p.name}"
        for stage in (*config.stages, *config.whole_stages)
        for p in stage_parameters(stage.name, [scene.name for scene in stage.scenes])
    }
    if unknown := sorted(set(options.overrides) - known):
        stages = ", ".join(stage.name for stage in config.whole_stages)
        what = "it has to be one of the node's, or STAGE.PARAMETER with a stage of"
        raise ConfigError(
            f"parameter {unknown[0]}: is not there; {what} {stages}; see config/perception.yaml"
        )
    return config


def paced(config: NodeConfig, pace: str) -> NodeConfig:
    """The parameters for a pace.

    Nothing is compiled meanwhile: all frames are to be run by the same engine.

    `fast` has no deadline, and so no use for a second worker or priorities; a model may take ten minutes
    for a frame. `virtual` is to come to the same on any machine: eager, whose arithmetic varies least, on
    one thread.
    """
    config = replace(config, compile_missing=False)
    if pace == "virtual":
        stages = [replace(stage, engine="eager") for stage in config.stages]
        return replace(config, stages=tuple(stages), worker_threads=1)
    if pace == "fast":
        stages = [
            replace(
                stage,
                budget_ms=NO_DEADLINE_MS,
                budget_from="receipt",
                backup="none",
                hang_ms=_LONGEST_RUN_MS,
                budget_least_ms=0.0,
                scenes=tuple(replace(scene, budget_ms=0.0) for scene in stage.scenes),
                priority=0,
            )
            for stage in config.stages
        ]
        return replace(config, stages=tuple(stages))
    return config


def prefer_this_process(config: NodeConfig) -> str:
    """Set this process up for deadlines, as the node does with its own.

    Which scheduling it got, in words.
    """
    keep_freed_memory(max(stage.max_frame_bytes for stage in config.stages))
    return process_setup.prefer_this_process(config.realtime_priority)


def params_hash(config: NodeConfig) -> str:
    """SHA-256 of the parameters that a replay's outputs depend on.

    Only values other than the defaults count: a parameter that a new version of this package adds changes
    no hash.
    """
    needed = {stage.name: {"adapter": stage.adapter, "output": stage.output} for stage in config.stages}
    whole = {
        stage.name: {"adapter": stage.adapter, "output": stage.output} for stage in config.whole_stages
    }
    plain = node_config({"stages": list(whole)}, whole)
    values = {
        key: value
        for key, value in _changed(config, plain).items()
        if key not in {*_OF_THE_PLACE, "stages"}
    }
    values["stages"] = [
        {
            "name": stage.name,
            **needed[stage.name],
            **_changed(stage, _plain_stage(stage, needed[stage.name])),
        }
        for stage in config.stages
    ]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=_plain).encode()).hexdigest()


def _plain_stage(stage: StageConfig, needed: Mapping[str, str]) -> StageConfig:
    return replace(stage_config(stage.stage, needed), name=stage.name)


def _plain(value: object) -> object:
    """As JSON can have it; a set's order is another in each process."""
    return sorted(value) if isinstance(value, frozenset) else str(value)


def _changed(config: Any, plain: Any) -> dict[str, Any]:  # noqa: ANN401 - any two dataclasses of one kind
    values, defaults = dataclasses.asdict(config), dataclasses.asdict(plain)
    return {key: value for key, value in values.items() if value != defaults[key]}
