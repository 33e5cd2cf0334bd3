"""The services `~/profile`, `~/snapshot`, `~/record` and `~/swap`, and how commands ask for them."""

import contextlib
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rclpy
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParametersAtomically
from rclpy.node import Node
from std_srvs.srv import Trigger

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.errors import ConfigError, TorchperfError
from torchperf_ros.node.alert_publisher import AlertPublisher
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.incident_folder import CaptureRule
from torchperf_ros.workers.process_setup import step_back
from torchperf_ros.workers.worker_pool import Log

_FIRST_MINUTE_NS = 60 * NS_PER_S


class CaptureServices:
    """Answers at once, as the thread that answers also receives the frames.

    The log and `/diagnostics` say the rest.
    """

    def __init__(
        self,
        node: Node,
        stages: Callable[[], Sequence[Stage]],
        log: Log,
        alert_publisher: AlertPublisher,
    ) -> None:
        """Offer the services, and take captures when alerts are published that are worth it.

        `stages` gives those that are configured.
        """
        self._stages = stages
        self._log = log
        self._alert_publisher = alert_publisher
        self._rule = CaptureRule()
        alert_publisher.published = self.published
        self._services = [
            node.create_service(
                Trigger, f"~/{name}", lambda _, response, kind=kind: self._answer(kind, response)
            )
            for name, kind in (("profile", "profile"), ("snapshot", "memory"))
        ] + [node.create_service(Trigger, "~/record", self._record)]

    def published(self, anomaly: Alert) -> None:
        """Take evidence of a published alert if it is worth it and another worker can answer meanwhile."""
        stages = {stage.config.name: stage for stage in self._stages()}
        now_ns = monotonic_ns()
        wanted = self._rule.wanted(anomaly, stages, now_ns)
        if wanted is None:
            return
        name, kind = wanted
        pool = stages[name].pool
        try:
            if kind == "profile" and stages[name].config.stream:
                raise ConfigError("its other streams need all workers; ask for one by the service")
            reported = pool.capture.ask(kind, pool.workers, settled_at_ns=now_ns)
        except ConfigError as error:
            ready_ns = [
                worker.ready_at_ns for worker in pool.workers if worker is not None and worker.ready_at_ns
            ]
            if (
                ready_ns and now_ns - min(ready_ns) > _FIRST_MINUTE_NS
            ):  # before, no worker can be spared, as ever
                self._log("info", f"{anomaly.name}: no {kind} is taken now: {error}")
        else:
            self._rule.taken(name, kind, now_ns)
            self._log("info", f"{reported}, as {anomaly.name}")

    def _answer(self, kind: str, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        reported = []
        for stage in self._stages():
            if stage.place:  # the streams of a stage share its workers
                continue
            try:
                reported.append(stage.pool.capture.ask(kind, stage.pool.workers))
                response.success = True
            except ConfigError as error:
                reported.append(str(error))
        reported.append("`evidence` on /diagnostics says where it is" if response.success else "")
        response.message = "; ".join(filter(None, reported)) or "no stage is configured"
        return response

    def _record(self, _request: Any, response: Any) -> Any:  # noqa: ANN401
        """Names the folder, which is there when the incident is complete."""
        response.message = self._alert_publisher.record("recorded", "asked for by service")
        response.success = bool(response.message)
        if not response.success:
            response.message = f"nothing is recorded: {self._alert_publisher.why_no_record()}"
        return response


# One parameter, `<stage>.<tier>` with the package's path as its value, starts a swap.
#
# Without parameters the service says how the last one went: `successful`, and in `reason`
# `swapping: ...` while it goes on, `done`, or why not.
SERVICE = SetParametersAtomically
GOES_ON = "swapping"
_POLL_S = 0.5
_DISCOVERY_S = 15.0


class SwapService:
    """Answers at once, as the thread that answers also receives the frames.

    Another one looks at the package.
    """

    def __init__(self, node: Node, stages: Callable[[], Sequence[Stage]]) -> None:
        """Offer the service; `stages` gives those that are configured."""
        self._stages = stages
        # no stage of a configuration that has ended is kept alive
        self._last: weakref.ref[Stage] | None = None
        self._looking: threading.Thread | None = None
        self._refused = ""  # why the last one did not begin
        self._service = node.create_service(SERVICE, "~/swap", self._answer)

    def _answer(self, request: Any, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        try:
            if request.parameters:
                self._start(request.parameters)
            response.result.successful, response.result.reason = self._state()
        except ConfigError as error:
            response.result.successful, response.result.reason = False, str(error)
        return response

    def _state(self) -> tuple[bool, str]:
        if self._looking is not None and self._looking.is_alive():
            return False, f"{GOES_ON}: the package is looked at"
        if self._refused:
            return False, self._refused
        stage = None if self._last is None else self._last()
        if stage is None or stage not in self._stages():
            return False, "nothing was swapped since the node was configured"
        done, how = stage.pool.rolling_update.swap_state
        return done, how

    def _start(self, parameters: Sequence[Any]) -> None:
        stage_name, _, tier = parameters[0].name.partition(".")
        package = parameters[0].value.string_value
        stages = {stage.config.name: stage for stage in self._stages()}
        if len(parameters) != 1 or not package:
            raise ConfigError(
                "one parameter `<stage>.<tier>` with the package's path as a string starts a swap"
            )
        if stage_name not in stages:
            raise ConfigError(
                f"stage {stage_name!r} is not there; the node has {', '.join(stages) or 'none configured'}"
            )
        if self._looking is not None and self._looking.is_alive():
            raise ConfigError("the package of another swap is looked at just now; try again later")
        stage, self._refused = stages[stage_name], ""
        self._looking = threading.Thread(
            target=self._begin, args=(stage, tier, package), name="swap", daemon=True
        )
        self._looking.start()

    def _begin(self, stage: Stage, tier: str, package: str) -> None:
        step_back()
        self._last = weakref.ref(stage)
        try:
            if why := stage.pool.why_no_room():
                raise ConfigError(f"a swap takes one more worker, for which there is no memory: {why}")
            stage.pool.rolling_update.swap(tier, package)
        except ConfigError as error:
            self._refused = str(error)
        except Exception as error:  # the thread's boundary: who asked hears of it
            self._refused = (
                f"an error in the node: {type(error).__name__}: {error}\n{traceback.format_exc()}"
            )


class ServiceFailed(TorchperfError):
    """The node is not there, refuses, or takes too long; the message says which, and why."""


@contextlib.contextmanager
def _asking(kind: Any, node_name: str, service: str, timeout_s: float) -> Iterator[Callable[[Any], Any]]:  # noqa: ANN401
    """A node of our own that asks a running one.

    Gives a function of a request that returns the response.
    """
    name, give_up_at = f"{node_name.rstrip('/')}/{service}", time.monotonic() + timeout_s
    rclpy.init()
    node = rclpy.create_node("torchperf_client")
    try:
        client = node.create_client(kind, name)
        if not client.wait_for_service(min(timeout_s, _DISCOVERY_S)):
            raise ServiceFailed(
                f"no node offers {name}; is it running, in this ROS_DOMAIN_ID, under this name?"
            )

        def ask(request: Any) -> Any:  # noqa: ANN401 - rclpy's
            future = client.call_async(request)
            rclpy.spin_until_future_complete(
                node, future, timeout_sec=max(0.0, give_up_at - time.monotonic())
            )
            if not future.done():
                raise ServiceFailed(f"{name} has not finished in time; /diagnostics says how far it is")
            return future.result()

        yield ask
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


def trigger(node_name: str, service: str, timeout_s: float) -> str:
    """Call the `record`, `profile` or `snapshot` of a node, for example `/perf`; returns what it says.

    Raises:
        ServiceFailed: there is no such node, it refuses, or it takes too long.
    """
    with _asking(Trigger, node_name, service, timeout_s) as ask:
        response = ask(Trigger.Request())
    if not response.success:
        raise ServiceFailed(response.message)
    return str(response.message)


def swap(
    node_name: str, stage: str, tier: str, package: str, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Have a node swap a package in.

    A `.pt2` file by its path as the node sees it; `say` hears how it goes.

    Raises:
        ServiceFailed: there is no such node, it refuses, or it takes too long; everything is as it was.
    """
    value = ParameterValue(type=ParameterType.PARAMETER_STRING, string_value=package)
    with _asking(SERVICE, node_name, "swap", timeout_s) as ask:
        result = ask(SERVICE.Request(parameters=[Parameter(name=f"{stage}.{tier}", value=value)])).result
        while result.reason.startswith(GOES_ON):
            say(result.reason)
            time.sleep(_POLL_S)
            result = ask(SERVICE.Request()).result
    if not result.successful:
        raise ServiceFailed(result.reason)


def set_parameters(node_name: str, values: Mapping[str, Any], timeout_s: float) -> None:
    """Change a node's parameters, given by names such as `perception.candidate`: all of them or none.

    Raises:
        ServiceFailed: there is no such node, it refuses, or it takes too long.
    """
    parameters = [rclpy.Parameter(name, value=value).to_parameter_msg() for name, value in values.items()]
    with _asking(SERVICE, node_name, "set_parameters_atomically", timeout_s) as ask:
        result = ask(SERVICE.Request(parameters=parameters)).result
    if not result.successful:
        raise ServiceFailed(result.reason)
