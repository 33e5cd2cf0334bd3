"""The node's parameters out of a ROS 2 parameter file, for tools that run without a node."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torchperf_ros.config.config import NODE_PARAMETERS, NodeConfig, node_config, of_stage, refuse_unknown
from torchperf_ros.frame.errors import ConfigError

_NODE = "perf"
_VALUES = "ros__parameters"
EXAMPLE = f"/**/{_NODE}: {{{_VALUES}: {{stages: [perception]}}}}"


def read_params_file(path: Path) -> NodeConfig:
    """Read what concerns the node `perf` in any namespace; what the file leaves out has its default.

    Raises:
        ConfigError: the file cannot be read, is no parameter file, or a value is not allowed.
    """
    return config_of(params_of_file(path))


def params_of_file(path: Path) -> dict[str, Any]:
    """The parameters of the node `perf` in any namespace, by dotted name, unchecked.

    Later entries win, as in ROS; parameters of stages may be nested or dotted.

    Raises:
        ConfigError: the file cannot be read, or is no parameter file.
    """
    return params_of(read_yaml(path, "parameter file"), path)


def params_of(content: object, path: Path) -> dict[str, Any]:
    """The same of what the file was found to hold."""
    entries = list(_of_node(content, ""))
    if not entries:
        raise ConfigError(f"parameter file {path}: has no entry for the node {_NODE!r}; it has to be like {EXAMPLE}")
    return {name: value for own in entries for name, value in _flat(own, "")}


def read_yaml(path: Path, what: str) -> object:
    """What a YAML file holds; messages begin with `what`, for example `parameter file`.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read ({error.strerror}); it has to be a YAML file") from error
    return yaml_of(data, f"{what} {path}")


def yaml_of(data: bytes, what: str) -> object:
    """What the bytes of a YAML file hold; messages begin with `what`.

    Raises:
        ConfigError: they are not YAML.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: cannot be read (not UTF-8); it has to be a YAML file") from error
    return _yaml(text, what)


def parse_value(name: str, text: str) -> object:
    """One parameter's value as a parameter file would have it; a mapping stays text, as `options` is text.

    Raises:
        ConfigError: it is not YAML.
    """
    value = _yaml(text, f"parameter {name}: {text!r}")
    return text if isinstance(value, Mapping) or value is None else value


def _yaml(text: str, what: str) -> object:
    from ruamel.yaml import YAML  # only this needs it
    from ruamel.yaml.error import YAMLError

    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)  # what ROS reads: `yes` and `on` are true
    try:
        return reader.load(text)
    except (YAMLError, ValueError, AttributeError, RecursionError) as error:  # as a tag or a date that does not fit
        raise ConfigError(f"{what}: is not YAML: {' '.join(str(error).split())}") from error


def config_of(values: Mapping[str, Any]) -> NodeConfig:
    """The configuration that parameters by dotted name make; what they leave out has its default.

    Raises:
        ConfigError: a value is not allowed.
    """
    names = values.get("stages", NODE_PARAMETERS[0].default)
    names = [str(name) for name in names] if isinstance(names, list) else []
    refuse_unknown(values, names)
    return node_config(values, {name: of_stage(values, name) for name in names})


def _of_node(content: object, path: str) -> Iterator[Mapping[str, Any]]:
    """The values under every name that stands for the node: `perf`, `/perf`, `/**`, `/**/perf`, `/robot/perf`."""
    if not isinstance(content, Mapping):
        return
    for key, value in content.items():
        if key == _VALUES and isinstance(value, Mapping) and path.rpartition("/")[2] in (_NODE, "**"):
            yield value
        elif key != _VALUES:
            yield from _of_node(value, f"{path}/{key}")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
