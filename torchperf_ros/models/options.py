"""A stage's `options` (JSON from a parameter), read one by one with checks that name what is wrong."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchperf_ros.api.errors import ConfigError


class OptionReader:
    """Takes options by name; `finish` refuses those that were not read.

    Every method raises `ConfigError` for a value that is not allowed; the message names the option, the
    value and what is allowed.
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        self._owner, self._options = owner, dict(options)
        self._options.pop("stream", None)  # the worker says which one the adapter is of
        self._asked: list[str] = []

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean option."""
        return bool(self._read(name, default, "true or false", lambda value: isinstance(value, bool)))

    def choice(self, name: str, *, default: str, allowed: Sequence[str]) -> str:
        """A word out of a list."""
        listed = " or ".join(repr(word) for word in allowed)
        return str(
            self._read(name, default, listed, lambda value: isinstance(value, str) and value in allowed)
        )

    def text(self, name: str, *, default: str) -> str:
        """A string, which is not empty where the default is not."""
        what = "a non-empty string" if default else "a string"
        return str(
            self._read(
                name, default, what, lambda value: isinstance(value, str) and (value != "" or not default)
            )
        )

    def integer(self, name: str, *, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included; a boolean is none."""
        text = f"a whole number from {low} to {high}"
        return int(
            self._read(name, default, text, lambda value: type(value) is int and low <= value <= high)
        )

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`, both included; NaN is none."""
        text = f"a number from {low:g} to {high:g}"
        return float(
            self._read(
                name, default, text, lambda value: type(value) in {int, float} and low <= value <= high
            )
        )

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object, empty by default."""
        return dict(self._read(name, {}, "an object such as {}", lambda value: isinstance(value, dict)))

    def finish(self) -> None:
        """Call after the last option; refuses options that were not read."""
        for name, value in self._options.items():
            if name not in self._asked:
                raise ConfigError(
                    f"{self._owner}: option {name!r} (value {value!r}) is unknown; allowed:"
                    f" {', '.join(self._asked)}"
                )

    def _read(self, name: str, default: object, allowed: str, is_allowed: Callable[[Any], bool]) -> Any:  # noqa: ANN401
        self._asked.append(name)
        value = self._options.get(name, default)
        if not is_allowed(value):
            raise ConfigError(f"{self._owner}: option {name!r} is {value!r}; allowed: {allowed}")
        return value
