"""The node's parameters in ROS: declared from `settings/config.py`, read once, changed live where allowed."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy.exceptions import ParameterNotDeclaredException
from rclpy.node import Node
from rclpy.parameter import Parameter as RosParameter

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import (
    NODE_PARAMETERS,
    NodeConfig,
    node_config,
    of_stage,
    refuse_unknown,
    stage_parameters,
)
from torchperf_ros.settings.parameter import Parameter
from torchperf_ros.settings.stage_options import given_names, is_of_stream, scene_parameters


def _descriptor(parameter: Parameter) -> ParameterDescriptor:
    # Typed dynamically, so that a value of another type reaches our own check, which names what is allowed.
    descriptor = ParameterDescriptor(
        description=parameter.description,
        type=RosParameter.Type.from_parameter_value(parameter.default).value,
        dynamic_typing=True,
        additional_constraints=parameter.allowed
        + ("" if parameter.live else "; read-only while configured"),
    )
    if parameter.minimum is not None and isinstance(parameter.default, float):
        descriptor.floating_point_range = [
            FloatingPointRange(from_value=parameter.minimum, to_value=parameter.maximum)
        ]
    elif parameter.minimum is not None and isinstance(parameter.default, int):
        span = IntegerRange(from_value=int(parameter.minimum), to_value=int(parameter.maximum or 0))
        descriptor.integer_range = [span]
    return descriptor


class NodeParameters:
    """Declares, reads and guards every parameter of the node."""

    def __init__(self, node: Node) -> None:
        """Declare everything; values from the command line and the parameter file are taken.

        `given` are the names that got one, `foreign` those that this node does not have, see
        `refuse_unknown`.

        Raises:
            ConfigError: a value that is not allowed.
        """
        # while true, only live parameters may change: `check` raises a `ConfigError` where the
        self.configured = False
        # node cannot take a change, `change` takes it
        self.check: Callable[[NodeConfig], None] = lambda _: None
        self.change: Callable[[NodeConfig], None] = lambda _: None
        self._node = node
        self._known: dict[str, Parameter] = {}
        self._given = node._parameter_overrides
        for name in [name for name, one in self._given.items() if one.value is None]:
            self._given[name] = RosParameter(
                name, value=[]
            )  # rcl has no type for an empty list, and hands over none
        self._declare("", NODE_PARAMETERS)
        self._stages = [str(name) for name in self._value("stages")]
        for stage in dict.fromkeys(self._stages):  # a name that stands there twice is refused by `_read`
            self._declare(f"{stage}.", stage_parameters(stage))
            self._declare(f"{stage}.", scene_parameters(self._value(f"{stage}.scenes")))
            self._declare_of_streams(stage)
        given = {name: _plain(one.value) for name, one in self._given.items()}
        self.foreign = refuse_unknown(given, self._stages)
        self.given = given.keys() - self.foreign.keys()
        self.config = self._read()
        node.add_on_set_parameters_callback(self._check_change)
        if hasattr(
            node, "add_pre_set_parameters_callback"
        ):  # Humble keeps the integer, which counts as well
            node.add_pre_set_parameters_callback(self._whole_numbers_as_numbers)

    def _declare_of_streams(self, stage: str) -> None:
        """What streams are given of their own; all else follows the stage's parameters, live changes too."""
        for stream in dict.fromkeys(given_names(self._value(f"{stage}.streams"))):
            prefix = f"{stage}.{stream}."
            own = (one for one in stage_parameters(stage) if f"{prefix}{one.name}" in self._given)
            self._declare(
                prefix, [one for one in own if is_of_stream(stage, f"{stream}.{one.name}", [stream])]
            )

    def _declare(self, prefix: str, parameters: Iterable[Parameter]) -> None:
        for parameter in parameters:
            name = f"{prefix}{parameter.name}"
            self._known[name] = parameter
            try:
                declared = self._node.declare_parameter(name, parameter.default, _descriptor(parameter))
            except (
                Exception
            ) as error:  # rclpy has several types for "this override does not fit the descriptor"
                if name in self._given:  # our own check says it in fewer words
                    parameter.check(_plain(self._given[name].value), prefix)
                raise ConfigError(f"parameter {name}: {error}; it has to be {parameter.allowed}") from error
            value = parameter.check(_plain(declared.value), prefix)
            kind = RosParameter.Type.from_parameter_value(parameter.default)
            if (
                declared.type_ != kind
            ):  # a whole number for a number; an empty list, which shows no type of its own
                self._node.set_parameters([RosParameter(name, kind, value)])

    def _value(self, name: str) -> Any:  # noqa: ANN401
        return _plain(self._node.get_parameter(name).value)

    def _read(self, changed: dict[str, Any] | None = None) -> NodeConfig:
        values = {name: self._value(name) for name in self._known} | (changed or {})
        return node_config(values, {stage: of_stage(values, stage) for stage in self._stages})

    def refresh(self) -> NodeConfig:
        """Read everything anew, as `configure` does.

        Raises:
            ConfigError: values that do not go together.
        """
        self.config = self._read()
        return self.config

    def of_stage(self, stage: str) -> dict[str, Any]:
        """A stage's own parameters as they are now, by name without the stage's."""
        return of_stage(
            {name: self._value(name) for name in self._known if name.startswith(f"{stage}.")}, stage
        )

    def _whole_numbers_as_numbers(self, changes: list[RosParameter]) -> list[RosParameter]:
        """30 for 30.0, as everybody types it: tools show it as what it is, and rclpy checks its range.

        Raises:
            ParameterNotDeclaredException: there is no such parameter. rclpy's own would name none.
        """
        for change in changes:
            if not self._node.has_parameter(change.name):
                alike = difflib.get_close_matches(change.name, self._known, cutoff=0.0)
                raise ParameterNotDeclaredException(
                    f"{change.name}; the closest names are {', '.join(alike)}"
                )
        return [
            (
                RosParameter(change.name, value=float(change.value))
                if type(change.value) is int
                and (known := self._known.get(change.name))
                and type(known.default) is float
                else change
            )
            for change in changes
        ]

    def _check_change(self, changes: list[RosParameter]) -> SetParametersResult:
        known = {change.name: _plain(change.value) for change in changes if change.name in self._known}
        try:
            for name, value in known.items():
                if value != self._value(name):  # equal where a file of all parameters is loaded
                    self._check_may_change(name)
            config = self._read(known)
            if self.configured and known:
                self.check(config)
        except ConfigError as error:
            return SetParametersResult(successful=False, reason=str(error))
        if self.configured and known:
            self.config = config
            self.change(config)
        return SetParametersResult(successful=True)

    def _check_may_change(self, name: str) -> None:
        if self.configured and not self._known[name].live:
            raise ConfigError(
                f"parameter {name}: is read-only while the node is configured; clean up first"
            )
        if name == "stages" or name.endswith((".scenes", ".streams")):
            raise ConfigError(
                f"parameter {name}: is read from the parameter file at start; start the node anew"
            )


def plain_values(node: Node) -> dict[str, Any]:
    """Every parameter of the node by name, as JSON has it."""
    return {
        one.name: _plain(one.value)
        for one in node.get_parameters(sorted(node.list_parameters([], 0).names))
    }


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Arrays as lists.

    Rclpy gives `array.array` for numbers that came by service, and a tuple for texts.
    """
    return list(value) if not isinstance(value, (str, bytes)) and hasattr(value, "__iter__") else value
