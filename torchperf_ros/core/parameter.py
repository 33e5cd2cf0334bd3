"""One ROS parameter: its type, default, range and description, and the check of a value."""

from dataclasses import dataclass
from typing import Any

from torchperf_ros.core.errors import ConfigError


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
        """Return the value, whole numbers as float where the parameter is one.

        Raises:
            ConfigError: wrong type, out of range, or not one of the choices.
        """
        name = f"{prefix}{self.name}"
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(self.default):
            msg = f"parameter {name}: {value!r} is a {type(value).__name__}; it has to be {self.allowed}"
            raise ConfigError(msg)
        one = self.default[0] if isinstance(self.default, list) else self.default
        for item in value if isinstance(value, list) else [value]:
            if type(item) is not type(one) or not self._allows(item):
                msg = f"parameter {name}: {value!r} is not allowed; it has to be {self.allowed}"
                raise ConfigError(msg)
        return value

    def _allows(self, item: Any) -> bool:  # noqa: ANN401
        if self.choices:
            return item in self.choices
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            # written so that NaN, which compares false, is refused
            return (self.minimum is None or item >= self.minimum) and (self.maximum is None or item <= self.maximum)
        return True

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return ("a list of: " if isinstance(self.default, list) else "one of: ") + ", ".join(self.choices)
        one, a = (self.default[0], "a list of") if isinstance(self.default, list) else (self.default, "a")
        span = "" if self.minimum is None else f" from {self.minimum} to {self.maximum}"
        return f"{a} {type(one).__name__}{span}"
