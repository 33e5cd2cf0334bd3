"""The services `~/profile` and `~/snapshot`: what a worker does, what holds its memory; events ask for them, too."""

from collections.abc import Callable, Sequence
from typing import Any

from rclpy.node import Node
from std_srvs.srv import Trigger

from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.clock import monotonic_ns
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.evidence_rule import EvidenceRule
from torchperf_ros.supervise.stage_actor import StageActor

Log = Callable[[str, str], None]


class EvidenceServices:
    """Answers at once, as the thread that answers also receives the frames; the log and `/diagnostics` say the rest."""

    def __init__(self, node: Node, stages: Callable[[], Sequence[StageActor]], log: Log) -> None:
        """Offer the services; `stages` gives those that are configured."""
        self._stages = stages
        self._log = log
        self._rule = EvidenceRule()
        self._services = [
            node.create_service(Trigger, f"~/{name}", lambda _, response, kind=kind: self._answer(kind, response))
            for name, kind in (("profile", "profile"), ("snapshot", "memory"))
        ]

    def told(self, anomaly: Anomaly) -> None:
        """An event was told: take evidence if it is worth it, and if another worker can answer meanwhile."""
        stages = {stage.config.name: stage for stage in self._stages()}
        now_ns = monotonic_ns()
        wanted = self._rule.wanted(anomaly, stages, now_ns)
        if wanted is None:
            return
        name, kind = wanted
        crew = stages[name].crew
        try:
            said = crew.inquiry.ask(kind, crew.workers, settled_at_ns=now_ns)
        except ConfigError as error:
            self._log("info", f"no {kind} is taken now although {anomaly.name}: {error}")
        else:
            self._rule.taken(name, kind, now_ns)
            self._log("info", f"{said}, as {anomaly.name}")

    def _answer(self, kind: str, response: Any) -> Any:  # noqa: ANN401 - rclpy's
        said = []
        for stage in self._stages():
            try:
                said.append(stage.crew.inquiry.ask(kind, stage.crew.workers))
                response.success = True
            except ConfigError as error:
                said.append(str(error))
        said.append("`evidence` on /diagnostics says where it is" if response.success else "")
        response.message = "; ".join(filter(None, said)) or "no stage is configured"
        return response
