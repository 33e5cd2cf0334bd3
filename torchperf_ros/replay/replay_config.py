"""The node's parameters as a replay uses them."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from torchperf_ros.core.config import NodeConfig
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.parameter_tables import NODE_PARAMETERS, STAGE_PARAMETERS
from torchperf_ros.core.params_file import config_of, params_of_file, read_yaml
from torchperf_ros.replay.replay_options import PACES, ReplayOptions
from torchperf_ros.supervise import realtime

_NO_DEADLINE_MS = 24 * 3_600_000.0
_LONGEST_RUN_MS = 600_000.0
_EVIDENCE: Final = "parameters.json"
_OF_THE_PLACE = (
    "autostart", "metrics_port", "metrics_address", "cache_dir", "cache_mib", "evidence_dir", "evidence_mib",
    "evidence_count", "recorder", "record_dir", "record_mib", "watch", "start_timeout_s",
)  # fmt: skip
"""Parameters of where and how a node is operated; what a replay comes to does not depend on them."""


def read_config(options: ReplayOptions, log: Path | None = None) -> NodeConfig:
    """The parameters, as the node would have them.

    Those of a file, if one is named; else those that a folder of evidence holds; else every default.

    Args:
        options: which file, and what replaces its values.
        log: what is to be replayed.

    Raises:
        ConfigError: the file cannot be used, or a value is not allowed.
    """
    if options.pace not in PACES:
        msg = f"pace {options.pace!r} is not there; it has to be one of: {', '.join(PACES)}"
        raise ConfigError(msg)
    if options.step_times != "log" and options.pace != "virtual":
        msg = f"step times {options.step_times}: are for pace virtual; at {options.pace} runs take what they take"
        raise ConfigError(msg)
    values: Mapping[str, object] = {}
    if options.params is not None:
        values = params_of_file(options.params)
    elif log is not None and (log / _EVIDENCE).is_file():
        found = read_yaml(log / _EVIDENCE, "parameters")
        values = found if isinstance(found, Mapping) else {}
    config = config_of({**values, **options.overrides})
    known = {p.name for p in NODE_PARAMETERS}
    known |= {f"{stage.name}.{p.name}" for stage in config.stages for p in STAGE_PARAMETERS}
    if unknown := sorted(set(options.overrides) - known):
        msg = (
            f"parameter {unknown[0]}: is not there; it has to be one of the node's, or STAGE.PARAMETER with a stage of"
        )
        raise ConfigError(f"{msg} {', '.join(stage.name for stage in config.stages)}; see config/perception.yaml")
    return config


def paced(config: NodeConfig, pace: str) -> NodeConfig:
    """The parameters for a pace. Nothing is compiled meanwhile: all frames are to be run by the same engine.

    `fast` has no deadline, and so no use for a second worker; a model may take ten minutes for a frame. `virtual` is to
    come to the same on any machine: eager, whose arithmetic varies least, on one thread.
    """
    config = replace(config, compile_missing=False)
    if pace == "virtual":
        stages = [replace(stage, engine="eager") for stage in config.stages]
        return replace(config, stages=tuple(stages), worker_threads=1)
    if pace == "fast":
        stages = [
            replace(stage, budget_ms=_NO_DEADLINE_MS, budget_from="receipt", backup="none", hang_ms=_LONGEST_RUN_MS)
            for stage in config.stages
        ]
        return replace(config, stages=tuple(stages))
    return config


def prefer_this_process(config: NodeConfig) -> str:
    """Set this process up for deadlines, as the node does with its own; which scheduling it got, in words."""
    realtime.keep_freed_memory(max(stage.max_frame_bytes for stage in config.stages))
    return realtime.prefer_this_process(config.realtime_priority)


def params_hash(config: NodeConfig) -> str:
    """SHA-256 of every parameter that what the stages do depends on."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in _OF_THE_PLACE}
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
