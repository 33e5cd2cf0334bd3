"""The service `~/swap`: a tier's new package is tried in a new worker, and taken over while frames are answered."""

from collections.abc import Callable, Sequence
from typing import Any

from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParametersAtomically
from rclpy.node import Node

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.supervise.stage_actor import StageActor

SERVICE = SetParametersAtomically
"""One parameter, `<stage>.<tier>` with the package's path as its value, starts a swap. Without parameters the service
says how the last one went: `successful`, and in `reason` `swapping: ...` while it goes on, `done`, or why not."""
GOES_ON = "swapping"


class SwapService:
    """Answers at once, as the thread that answers also receives the frames."""

    def __init__(self, node: Node, stages: Callable[[], Sequence[StageActor]]) -> None:
        """Offer the service; `stages` gives those that are configured."""
        self._stages = stages
        self._last: StageActor | None = None
        self._service = node.create_service(SERVICE, "~/swap", self._answer)

    def _answer(self, request: Any, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        try:
            if request.parameters:
                self._start(request.parameters)
            if self._last is None:
                response.result.successful, response.result.reason = False, "nothing was swapped yet"
            else:
                response.result.successful, response.result.reason = self._last.crew.succession.swap_state
        except ConfigError as error:
            response.result.successful, response.result.reason = False, str(error)
        return response

    def _start(self, parameters: Sequence[Any]) -> None:
        stage_name, _, tier = parameters[0].name.partition(".")
        package = parameters[0].value.string_value
        stages = {stage.config.name: stage for stage in self._stages()}
        if len(parameters) != 1 or not package:
            msg = "one parameter `<stage>.<tier>` with the package's path as a string starts a swap"
            raise ConfigError(msg)
        if stage_name not in stages:
            msg = f"stage {stage_name!r} is not there; the node has {', '.join(stages) or 'none configured'}"
            raise ConfigError(msg)
        self._last = stages[stage_name]
        self._last.crew.succession.swap(tier, package)


def swap_request(stage: str, tier: str, package: str) -> Any:  # noqa: ANN401 - rclpy's
    """The request that starts a swap."""
    value = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=package)
    return SERVICE.Request(parameters=[Parameter(name=f"{stage}.{tier}", value=value)])
