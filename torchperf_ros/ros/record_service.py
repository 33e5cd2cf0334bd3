"""The service `~/record`: the last seconds and the next are written, with all that is known."""

from typing import Any

from rclpy.node import Node
from std_srvs.srv import Trigger

from torchperf_ros.ros.announcer import Announcer


class RecordService:
    """Answers at once with the folder, which is there when the incident is complete."""

    def __init__(self, node: Node, announcer: Announcer) -> None:
        """Offer the service."""
        self._announcer = announcer
        self._service = node.create_service(Trigger, "~/record", self._answer)

    def _answer(self, request: Any, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        response.message = self._announcer.record("recorded", "asked for by service")
        response.success = bool(response.message)
        if not response.success:
            response.message = "nothing is recorded: parameter recorder is false, or the node is not configured"
        return response
