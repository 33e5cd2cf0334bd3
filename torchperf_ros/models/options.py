"""A stage's `options` (JSON from a parameter), read one by one with checks that name what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchperf_ros.frame.errors import ConfigError


class OptionReader:
    """Takes options by name; `finish` refuses those that nobody asked for.

    Every method raises `ConfigError` for a value that is not allowed; the message names the option, the value and what
    is allowed.
    """

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        """Read JSON values by name from a mapping that stays as it is; messages name its owner, an adapter."""
        self._owner, self._options = owner, dict(options)
        self._asked: list[str] = []

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean option."""
        value = self._take(name, default)
        return bool(self._checked(name, value, isinstance(value, bool), "true or false"))

    def choice(self, name: str, *, default: str, allowed: Sequence[str]) -> str:
        """A word out of a list."""
        value = self._take(name, default)
        listed = " or ".join(repr(word) for word in allowed)
        return str(self._checked(name, value, isinstance(value, str) and value in allowed, listed))

    def text(self, name: str, *, default: str) -> str:
        """A non-empty string."""
        value = self._take(name, default)
        return str(self._checked(name, value, isinstance(value, str) and bool(value), "a non-empty string"))

    def integer(self, name: str, *, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        value = self._take(name, default)
        allowed = type(value) is int and low <= value <= high  # not a boolean
        return int(self._checked(name, value, allowed, f"a whole number from {low} to {high}"))

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`, both included; NaN is none."""
        value = self._take(name, default)
        allowed = type(value) in {int, float} and low <= value <= high
        return float(self._checked(name, value, allowed, f"a number from {low:g} to {high:g}"))

    def mapping(self, name: str) -> dict[str, Any]:
        """A JSON object, empty by default."""
        value = self._take(name, {})
        return dict(self._checked(name, value, isinstance(value, dict), "an object such as {}"))

    def finish(self) -> None:
        """Call after the last option; refuses options that nobody asked for."""
        for name, value in self._options.items():
            if name not in self._asked:
                msg = f"{self._owner}: option {name!r} (value {value!r}) is unknown; allowed: {', '.join(self._asked)}"
                raise ConfigError(msg)

    def _take(self, name: str, default: object) -> Any:  # noqa: ANN401 - JSON
        self._asked.append(name)
        return self._options.get(name, default)

    def _checked(self, name: str, value: Any, is_allowed: bool, allowed: str) -> Any:  # noqa: ANN401
        if not is_allowed:
            msg = f"{self._owner}: option {name!r} is {value!r}; allowed: {allowed}"
            raise ConfigError(msg)
        return value
