"""A stage's `options` (JSON from a parameter), read one by one with checks that name what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchperf_ros.core.errors import ConfigError


class OptionReader:
    """Takes options by name; `finish` refuses those that nobody asked for."""

    def __init__(self, owner: str, options: Mapping[str, Any]) -> None:
        """Read from a mapping that stays as it is.

        Args:
            owner: name of the adapter, for messages.
            options: names to JSON values.
        """
        self._owner = owner
        self._options = dict(options)
        self._asked: list[str] = []

    def flag(self, name: str, *, default: bool) -> bool:
        """A boolean option.

        Raises:
            ConfigError: it is neither true nor false.
        """
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._refusal(name, value, "true or false")
        return value

    def choice(self, name: str, *, default: str, allowed: Sequence[str]) -> str:
        """A word out of a list.

        Raises:
            ConfigError: it is not in the list.
        """
        value = self._take(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self._refusal(name, value, " or ".join(repr(word) for word in allowed))
        return value

    def text(self, name: str, *, default: str) -> str:
        """A non-empty string.

        Raises:
            ConfigError: it is empty or no string.
        """
        value = self._take(name, default)
        if not isinstance(value, str) or not value:
            raise self._refusal(name, value, "a non-empty string")
        return value

    def integer(self, name: str, *, default: int, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included.

        Raises:
            ConfigError: it is no whole number or out of range.
        """
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refusal(name, value, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, *, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`, both included.

        Raises:
            ConfigError: it is no number, NaN or out of range.
        """
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self._refusal(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def finish(self) -> None:
        """Call after the last option.

        Raises:
            ConfigError: there are options that nobody asked for.
        """
        for name, value in self._options.items():
            if name not in self._asked:
                msg = f"{self._owner}: option {name!r} (value {value!r}) is unknown; allowed: {', '.join(self._asked)}"
                raise ConfigError(msg)

    def _take(self, name: str, default: object) -> Any:  # noqa: ANN401 - JSON
        self._asked.append(name)
        return self._options.get(name, default)

    def _refusal(self, name: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._owner}: option {name!r} is {value!r}; allowed: {allowed}")
