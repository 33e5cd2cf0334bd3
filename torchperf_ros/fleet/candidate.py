"""Another version of a stage's model: a YAML file of the stage's parameters that differ."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import BASE, StageConfig, stage_config
from torchperf_ros.settings.files import exposed_at, read_bounded
from torchperf_ros.settings.params_file import params_of, ros_yaml

# What a candidate may change.
#
# How outputs come about. What others rely on (topics, budget, fallbacks, the names of the tiers) is
# the stage's.
CHANGES: Final = (
    "adapter",
    "options",
    "engine",
    "compile_mode",
    "precision",
    "channels_last",
    "parts",
    "packages",
    "shapes",
    "common_shapes",
)
_VERSION: Final = "version"
# A candidate has a few lines, the parameter file with all comments 22 kB.
#
# A node reads it on the thread that receives frames, where someone sets the parameter: 1 to 2 ms
# for a few lines, 25 ms for all parameters (by hand).
_MOST_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Candidate:
    """A version of a stage's model, checked.

    Attributes:
        changes: the fields of the stage's configuration that are this version's own.
    """

    version: str
    config: StageConfig
    changes: Mapping[str, Any]


def read_candidate(path: Path, stage: str, values: Mapping[str, Any]) -> Candidate:
    """Read the file of a candidate of this stage, by names without the stage's; `values` are its own.

    It may also be a parameter file, such as `torchperf tune` writes: what it says of the stage counts, its
    name is the version.

    Raises:
        ConfigError: it cannot be read, or others can change it: it names the code that runs. Or it changes
            nothing, or what it may not change, or a value is not allowed.
    """
    where = f"candidate {path}"
    try:
        data = read_bounded(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); it has to be a YAML file"
        ) from error
    if why := exposed_at(path):
        raise ConfigError(f"{where}: is not taken, as it says which code runs: {why}")
    found = ros_yaml(data, where)
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{where}: is no mapping of parameters, such as `adapter: module:Class`")
    given = {str(name): value for name, value in found.items()}
    if any(isinstance(value, Mapping) and "ros__parameters" in str(value) for value in given.values()):
        own = {
            name.partition(".")[2]: v
            for name, v in params_of(found, path).items()
            if name.startswith(f"{stage}.")
        }
        given = {name: value for name, value in own.items() if name in CHANGES or value != values.get(name)}
    return candidate_of(str(given.pop(_VERSION, path.stem)), given, stage, values, where)


def candidate_of(
    version: str, given: Mapping[str, Any], stage: str, values: Mapping[str, Any], where: str
) -> Candidate:
    """The version of this name that differs from the stage's own `values` by what is `given`.

    Errors name `where`.

    Raises:
        ConfigError: it changes nothing, or what it may not change, or a value is not allowed.
    """
    if wrong := sorted(given.keys() - set(CHANGES)):
        raise ConfigError(
            f"{where}: {', '.join(wrong)} cannot be changed; a candidate changes {', '.join(CHANGES)}"
        )
    own = {name: as_parameter(name, value) for name, value in given.items()}
    try:
        before, config = stage_config(stage, values), stage_config(stage, {**values, **own})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    changes = {
        field.name: getattr(config, field.name)
        for field in fields(StageConfig)
        if getattr(config, field.name) != getattr(before, field.name)
    }
    if version == BASE:
        raise ConfigError(
            f"{where}: its version is called {BASE}, as the stage's own is; give it another name"
        )
    if not changes:
        raise ConfigError(
            f"{where}: is what stage {stage} runs already; it has to change one of {', '.join(CHANGES)}"
        )
    return Candidate(version, config, changes)


def as_parameter(name: str, value: object) -> object:
    """A value as the parameter has it: `options` as text; of lists also one that is not in a list."""
    if name == "options" and isinstance(value, Mapping):
        return json.dumps(dict(value))
    return (
        [value] if name in {"precision", "packages", "common_shapes"} and isinstance(value, str) else value
    )
