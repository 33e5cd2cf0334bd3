"""Asks a running node for a swap and waits until it is done: what `torchperf swap` does."""

import time
from collections.abc import Callable
from typing import Any

import rclpy
from rclpy.node import Node

from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.ros.swap_service import GOES_ON, SERVICE, swap_request

_POLL_S = 0.5
_DISCOVERY_S = 15.0


class SwapFailed(TorchperfError):
    """The package was not taken over; the message says why, and everything is as it was."""


def swap(node_name: str, stage: str, tier: str, package: str, timeout_s: float, told: Callable[[str], None]) -> None:
    """Have a node swap a package in.

    Args:
        node_name: for example `/perf`.
        stage: its name.
        tier: its name.
        package: path of the `.pt2` file, as the node sees it.
        timeout_s: how long to wait.
        told: hears how it goes.

    Raises:
        SwapFailed: there is no such node, it refuses, or it takes too long.
    """
    rclpy.init()
    node = rclpy.create_node("torchperf_swap")
    try:
        client = node.create_client(SERVICE, f"{node_name.rstrip('/')}/swap")
        give_up_at = time.monotonic() + timeout_s
        if not client.wait_for_service(min(timeout_s, _DISCOVERY_S)):
            msg = f"no node offers {client.srv_name}; is it running, in this ROS_DOMAIN_ID, under this name?"
            raise SwapFailed(msg)
        result = _call(node, client, swap_request(stage, tier, package), give_up_at)
        while result.reason.startswith(GOES_ON):
            told(result.reason)
            time.sleep(_POLL_S)
            result = _call(node, client, SERVICE.Request(), give_up_at)
        if not result.successful:
            raise SwapFailed(result.reason)
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


def _call(node: Node, client: Any, request: Any, give_up_at: float) -> Any:  # noqa: ANN401 - rclpy's
    future = client.call_async(request)
    rclpy.spin_until_future_complete(node, future, timeout_sec=max(0.0, give_up_at - time.monotonic()))
    if not future.done():
        msg = f"{client.srv_name} has not finished in time; /diagnostics says how far it is"
        raise SwapFailed(msg)
    return future.result().result
