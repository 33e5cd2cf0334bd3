"""Where a stage's answers go: functions that whoever owns the stage passes in (the ROS node, a replay, a test)."""

from collections.abc import Callable
from dataclasses import dataclass

from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.frame import Answer, Frame
from torchperf_ros.supervise.crew import Log


@dataclass
class StagePorts:
    """Where a stage's answers go. All but `log` are called on the stage's thread, `publish` first.

    Attributes:
        publish: the output's CDR bytes.
        hand_on: output bytes (None: there is nothing) with their frame, to the next stage inside the node. A held
            output comes with the stamp of the frame that it was computed from.
        answered: the record of a frame.
        anomaly: an event for `/perf/anomaly`.
        log: severity and text; also called on the crew's thread.
    """

    publish: Callable[[bytes], None]
    hand_on: Callable[[bytes | None, Frame], None]
    answered: Callable[[Answer], None]
    anomaly: Callable[[Anomaly], None]
    log: Log
