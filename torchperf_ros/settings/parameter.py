"""One ROS parameter, and how the fields of a frozen dataclass declare theirs."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torchperf_ros.api.errors import ConfigError

_PARAMETERS, _NESTED = "parameters", "nested"
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "empty"}


@dataclass(frozen=True)
class Parameter:
    """One ROS parameter.

    Attributes:
        name: relative to the node, or to the stage.
        default: also gives the type: bool, int, float, str, list of str, list of int.
        description: for `ros2 param describe`, with the unit.
        minimum, maximum: closed range for numbers.
        choices: the words allowed, for str and list of str.
        live: may be changed while the node is configured.
    """

    name: str
    default: Any
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    live: bool = False

    def check(self, value: Any, prefix: str = "") -> Any:  # noqa: ANN401 - the value of any parameter
        """Return the value, whole numbers as float where the parameter is one, or as the word that they are.

        Raises:
            ConfigError: wrong type, out of range, or not one of the choices.
        """
        name = f"{prefix}{self.name}"
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if type(value) is int and str(value) in self.choices:
            value = str(value)
        if type(value) is not type(self.default):
            raise ConfigError(f"parameter {name}: {value!r} is {_kind(value)}; it has to be {self.allowed}")
        one = self.default[0] if isinstance(self.default, list) else self.default
        for item in value if isinstance(value, list) else [value]:
            if type(item) is not type(one) or not self._allows(item):
                raise ConfigError(
                    f"parameter {name}: {value!r} is not allowed; it has to be {self.allowed}"
                )
        return value

    def _allows(self, item: Any) -> bool:  # noqa: ANN401
        if self.choices:
            return item in self.choices
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            # written so that NaN, which compares false, is refused
            return (self.minimum is None or item >= self.minimum) and (
                self.maximum is None or item <= self.maximum
            )
        return True

    @property
    def allowed(self) -> str:
        if self.choices:
            numbers = [choice for choice in self.choices if choice.isdecimal()]
            words = ", ".join(choice or "''" for choice in self.choices if choice not in numbers)
            if numbers:
                words += f", {numbers[0]} to {numbers[-1]}"
            return ("a list of: " if isinstance(self.default, list) else "one of: ") + words
        one, each = (
            (self.default[0], "a list, each ") if isinstance(self.default, list) else (self.default, "")
        )
        span = "" if self.minimum is None else f" from {self.minimum} to {self.maximum}"
        return f"{each}{_kind(one)}{span}"


def _kind(value: object) -> str:
    kind = type(value)
    return _KINDS.get(kind, f"a {kind.__name__}")


def param(default: Any, description: str, *rest: Any, then: tuple[Parameter, ...] = (), **more: Any) -> Any:  # noqa: ANN401
    """A field declared in ROS as a parameter of its name, and `then` others that make up its value."""
    return field(metadata={_PARAMETERS: (Parameter("", default, description, *rest, **more), *then)})


def nested(kind: type) -> Any:  # noqa: ANN401
    """A field of a dataclass of its own, whose fields are declared as parameters `FIELD.NAME`."""
    return field(metadata={_PARAMETERS: declared(kind), _NESTED: True})


@functools.cache
def declared(kind: type) -> tuple[Parameter, ...]:
    return tuple(
        replace(parameter, name=f"{one.name}." * (_NESTED in one.metadata) + (parameter.name or one.name))
        for one in fields(kind)
        for parameter in one.metadata.get(_PARAMETERS, ())
    )


def check_all(
    parameters: Iterable[Parameter], values: Mapping[str, Any], prefix: str = "", below: str = ""
) -> dict[str, Any]:
    """The checked values by name; they stand in `values` by `below` and the name, or have the default.

    Raises:
        ConfigError: see `Parameter.check`.
    """
    return {
        p.name: p.check(values.get(f"{below}{p.name}", p.default), f"{prefix}{below}") for p in parameters
    }


def one_each(given: Sequence[str], tiers: Sequence[str], name: str) -> tuple[str, ...]:
    """A value for each tier; a single one counts for all.

    Raises:
        ConfigError: there are fewer or more.
    """
    allowed = f"it has to have 1, or {len(tiers)}, one per tier"
    require(len(given) in {1, len(tiers)}, f"{name}: {given!r} has {len(given)} entries; {allowed}")
    return tuple(given) * (len(tiers) if len(given) == 1 else 1)


def numbers_by_word(
    where: str, given: Sequence[str], spans: Mapping[str, tuple[float, float, str]], form: str
) -> dict[str, float]:
    """The numbers in a line such as `slop 40 wait 15`, whose words have a span and a unit each.

    Raises:
        ConfigError: begins with `where`, names the word, and says what is allowed, or the `form`.
    """
    words, numbers = given[::2], given[1::2]
    require(len(words) == len(numbers), f"{where} is not allowed; {form}")
    found: dict[str, float] = {}
    for word, text in zip(words, numbers, strict=True):
        require(word in spans, f"{where}: {word!r} is not allowed; {form}")
        require(word not in found, f"{where}: {word} stands there twice")
        least, most, unit = spans[word]
        try:
            found[word] = float(text)
        except ValueError:
            found[word] = float("nan")
        # written so that NaN, which compares false, is refused
        allowed = f"it has to be from {least:g} to {most:g} {unit}"
        require(least <= found[word] <= most, f"{where}: {word} {text} is not allowed; {allowed}")
    return found


def require(holds: object, text: str) -> None:
    """Pass where something holds.

    Raises:
        ConfigError: it does not; `text` names the parameter, its value, and what is allowed.
    """
    if not holds:
        raise ConfigError(f"parameter {text}")
