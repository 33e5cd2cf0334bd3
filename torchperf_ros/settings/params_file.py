"""The node's parameters out of a ROS 2 parameter file.

The node and the commands read it by this one reader.

A value is what ROS makes of it: `4e1` and `1.` are numbers, `1:40` is a text, `yes` is true. Beyond what
ROS reads, anchors and merges (`<<`) are allowed; a name that is set twice in one document is refused.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import (
    NODE_PARAMETERS,
    NodeConfig,
    describe_foreign,
    node_config,
    of_stage,
    refuse_unknown,
)

NODE = "perf"
_VALUES = "ros__parameters"
EXAMPLE = f"/**/{NODE}: {{{_VALUES}: {{stages: [perception]}}}}"
_ANY_NODE = frozenset({"*", "**"})
_MOST_VALUES = 100_000  # anchors within anchors make thousands of values of a few lines
_TRUTH = {
    word: word in {"y", "yes", "true", "on"}
    for word in ("y", "yes", "true", "on", "n", "no", "false", "off")
}
_INTEGER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_NOT_FINITE = re.compile(r"[+-]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)|[+-]?(?i:inf|infinity|nan)")
_INT64 = range(-(1 << 63), 1 << 63)


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
        ConfigError: the file cannot be read, is no parameter file, or two namespaces have a node with other
            values.
    """
    what = f"parameter file {path}"
    return params_of(ros_yaml(_content(path, "parameter file"), what), path)


def params_of(content: object, path: Path) -> dict[str, Any]:
    what = f"parameter file {path}"
    entries = _entries(content, NODE, what)
    if not entries:
        raise ConfigError(f"{what}: has no entry for the node {NODE!r}; it has to be like {EXAMPLE}")
    own: dict[str, str] = {}  # the entry of one certain node that a value is of
    values: dict[str, Any] = {}
    for node, given in entries.items():
        for name, value in given.items() if "*" not in node else ():
            other = own.setdefault(name, node)
            if values.get(name, value) != value and other != node:
                raise ConfigError(
                    f"{what}: {name} differs between {other} and {node}; leave one of the two in the file"
                )
            values[name] = value
        values |= given
    return values


def params_for_ros(path: Path, node: str) -> str:
    """The entries for nodes of this name, and for any node, as a parameter file that `rcl` reads alike.

    "": none.

    Raises:
        ConfigError: the file cannot be read, or is no parameter file.
    """
    what = f"parameter file {path}"
    entries = _entries(ros_yaml(_content(path, "parameter file"), what), node, what)
    return (
        json.dumps({name: {_VALUES: values} for name, values in entries.items() if values})
        if entries
        else ""
    )


def _content(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: cannot be read ({error.strerror}); it has to be a YAML file"
        ) from error


def read_yaml(path: Path, what: str) -> object:
    """What a YAML file that is no parameter file holds; messages begin with `what`, for example `metadata`.

    Raises:
        ConfigError: it cannot be read, or is not YAML.
    """
    from ruamel.yaml import YAML  # only this needs it
    from ruamel.yaml.error import YAMLError

    data = _content(path, what)
    reader = YAML(typ="safe", pure=True)
    reader.version = (1, 1)
    try:
        return reader.load(_text(data, f"{what} {path}"))
    except (
        YAMLError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:  # as a tag or a date that does not fit
        raise ConfigError(f"{what} {path}: is not YAML: {' '.join(str(error).split())}") from error


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{what}: cannot be read (not UTF-8); it has to be a YAML file") from error


def parse_value(name: str, text: str) -> object:
    """One parameter's value as a parameter file would have it; a mapping stays text, as `options` is text.

    Raises:
        ConfigError: it is not YAML.
    """
    value = ros_yaml(text.encode(), f"parameter {name}: {text!r}")
    return text if isinstance(value, Mapping) or value is None else value


def ros_yaml(data: bytes, what: str) -> object:
    """What YAML holds as ROS reads it: mappings by text, lists, and scalars; None where there is no value.

    Of several documents the later one wins. Messages begin with `what`.

    Raises:
        ConfigError: it is not YAML, or sets a name twice.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    text = _text(data, what)
    try:
        return _Documents(YAML(typ="safe", pure=True).parse(text), what).read()
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
        if "\t" in line[: len(line) - len(line.lstrip())]:
            raise ConfigError(
                f"{what}: line {mark.line + 1} begins with a tab; indent it with spaces"
            ) from error
        problem = " ".join(str(error.problem or error.context).split())
        raise ConfigError(f"{what}: is not YAML: {where}: {problem}") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}: is not YAML: {' '.join(str(error).split())}") from error


class _Documents:
    """Builds values from the events of a YAML parser.

    The parser's own constructor has other numbers than ROS, and keeps no trace of quotes.
    """

    def __init__(self, events: Iterable[Any], what: str) -> None:
        self._events = iter(events)
        self._what = what
        self._anchored: dict[str, tuple[object, int]] = {}
        self._values = 0

    def read(self) -> object:
        from ruamel.yaml import events as kinds

        found: object = None
        for event in self._events:
            if isinstance(event, kinds.DocumentStartEvent):
                self._anchored.clear()
            elif not isinstance(
                event, (kinds.StreamStartEvent, kinds.StreamEndEvent, kinds.DocumentEndEvent)
            ):
                found = _later_wins(found, self._value(event))
        return found

    # the parser has no common type for what has an anchor
    def _value(self, event: Any) -> object:  # noqa: ANN401
        from ruamel.yaml import events as kinds

        line = event.start_mark.line + 1
        before = self._values
        if isinstance(event, kinds.AliasEvent):
            if event.anchor not in self._anchored:
                raise ConfigError(
                    f"{self._what}: line {line}: *{event.anchor} has no &{event.anchor} above it"
                )
            value, size = self._anchored[event.anchor]
            self._count(size)
            return value
        if isinstance(event, kinds.ScalarEvent):
            self._count(1)
            value = _scalar(event.value, event.style, str(event.tag or ""))
        elif isinstance(event, kinds.SequenceStartEvent):
            value = [self._value(one) for one in iter(self._next, None)]
        else:
            value = self._mapping()
        if event.anchor:
            self._anchored[event.anchor] = value, self._values - before
        return value

    def _count(self, values: int) -> None:
        self._values += values
        if self._values > _MOST_VALUES:
            raise ConfigError(f"{self._what}: has more than {_MOST_VALUES} values, which cannot be meant")

    def _next(self) -> Any:  # noqa: ANN401
        """The next event; None at the end of a list or a mapping."""
        from ruamel.yaml import events as kinds

        event = next(self._events)
        return None if isinstance(event, (kinds.SequenceEndEvent, kinds.MappingEndEvent)) else event

    def _mapping(self) -> dict[str, object]:
        from ruamel.yaml import events as kinds

        own: dict[str, object] = {}
        merged: dict[str, object] = {}
        for event in iter(self._next, None):
            line = event.start_mark.line + 1
            if not isinstance(event, kinds.ScalarEvent):
                raise ConfigError(
                    f"{self._what}: line {line}: a list or a mapping stands where a name belongs"
                )
            key, value = event.value, self._value(next(self._events))
            if key == "<<" and not event.style:
                for one in value if isinstance(value, list) else [value]:
                    if not isinstance(one, dict):
                        raise ConfigError(f"{self._what}: line {line}: << merges mappings, not {one!r}")
                    merged = {**one, **merged}
            else:
                self._set(own, key, value, line)
        return {**merged, **own}

    def _set(self, own: dict[str, object], key: str, value: object, line: int) -> None:
        """Set a name once; mappings of one name are put together, as ROS does it."""
        before = own.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            own[key] = both = dict(before)
            for name, inner in value.items():
                self._set(both, name, inner, line)
        elif key in own:
            raise ConfigError(
                f"{self._what}: line {line} sets {key} again; leave one of the two in the file"
            )
        else:
            own[key] = value


def _later_wins(before: object, later: object) -> object:
    if not isinstance(before, dict) or not isinstance(later, dict):
        return before if later is None else later
    return {**before, **{name: _later_wins(before.get(name), value) for name, value in later.items()}}


def _scalar(text: str, style: str | None, tag: str) -> object:
    """What `rcl_yaml_param_parser` makes of a scalar; None for one without a value, which that refuses."""
    if style in {"'", '"'} or tag == "tag:yaml.org,2002:str":
        return text
    if text in {word for lower in _TRUTH for word in (lower, lower.capitalize(), lower.upper())}:
        return _TRUTH[text.lower()]
    if _INTEGER.fullmatch(text):
        sign, digits = (-1 if text[0] == "-" else 1), text.lstrip("+-")
        is_octal = digits.startswith("0") and len(digits) > 1 and digits[1] not in "xX"
        whole = sign * int(digits, 8 if is_octal else 0)
        return whole if whole in _INT64 else float(whole)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if _DECIMAL.fullmatch(text) and math.isfinite(
        number := float(text)
    ):  # one that is too large is a text in ROS, too
        return number
    return text or None


def config_of(values: Mapping[str, Any]) -> NodeConfig:
    """The configuration that parameters by dotted name make; what they leave out has its default.

    Names of other nodes are warned about.

    Raises:
        ConfigError: a value is not allowed.
    """
    names = values.get("stages", NODE_PARAMETERS[0].default)
    names = [str(name) for name in names] if isinstance(names, list) else []
    if foreign := describe_foreign(refuse_unknown(values, names)):
        logging.getLogger(__name__).warning(foreign)
    return node_config(values, {name: of_stage(values, name) for name in names})


def _entries(content: object, node: str, what: str) -> dict[str, dict[str, Any]]:
    """The values by dotted name under every name that stands for the node.

    `/perf`, `/**`, `/**/perf`, `/robot/perf`.

    Raises:
        ConfigError: they do not stand below `ros__parameters`, or are none that ROS has.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path, values in _of_node(content, "", {node, *_ANY_NODE}, what):
        for name, value in _flat(values, ""):
            _check_kind(name, value, what)
            entries.setdefault(path, {})[name] = value
        entries.setdefault(path, {})
    return entries


def _of_node(
    content: object, path: str, names: set[str], what: str
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(content, Mapping):
        return
    is_node = path.rpartition("/")[2] in names
    for key, value in content.items():
        if key == _VALUES:
            if is_node and isinstance(value, Mapping):
                yield path, value
        elif re.sub("[^a-z]", "", key.lower()) in {"rosparameters", "rosparameter", "rosparams"}:
            raise ConfigError(f"{what}: {key} has to be {_VALUES}, with two underscores, as in {EXAMPLE}")
        elif is_node and not isinstance(value, Mapping):
            name = path.strip("/")
            raise ConfigError(
                f"{what}: {key} stands directly below {name}; it belongs below {_VALUES}, as in {EXAMPLE}"
            )
        else:
            yield from _of_node(value, f"{path}/{key.strip('/')}", names, what)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check_kind(name: str, value: object, what: str) -> None:
    """See that ROS has such a parameter.

    Raises:
        ConfigError: it has not.
    """
    if not all(name.split(".")):
        raise ConfigError(f"{what}: parameter {name!r}: a part of its name is empty")
    if value is None:
        raise ConfigError(f"{what}: parameter {name}: has no value; write one, or '' for an empty text")
    kinds = {type(one) for one in value} if isinstance(value, list) else {type(value)}
    if len(kinds) > 1 or not kinds <= {bool, int, float, str}:
        allowed = "it has to be a text, a number, true or false, or a list of one of these kinds"
        raise ConfigError(f"{what}: parameter {name}: {value!r} is not allowed; {allowed}")
