"""An input of a stage.

What a topic or the stage before gives goes to the mailbox, the guard or the scenes.
"""

from dataclasses import dataclass

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.stage.frame import Frame
from torchperf_ros.stage.stage_actor import StageActor


@dataclass
class StageInput:
    """One input of a stage: its topic as resolved, its message type, and whether that has a stamp.

    The index is that of the adapter's inputs; what scenes depend on has one below 0, see `StageActor.hear`.
    """

    stage: StageActor
    index: int
    topic: str
    type_name: str
    stamped: bool

    def receive(self, data: bytes | memoryview) -> None:
        """A message from a topic; of a trigger also the part of the stage's slot that holds it."""
        stamp_ns = header_stamp_ns(data) if self.stamped else 0
        if self.index == 0:
            self.stage.offer(data, stamp_ns, stamped=self.stamped)
        elif self.index < 0:
            self.stage.hear(self.index, bytes(data), stamp_ns)
        else:
            self.stage.offer_latest(self.index, bytes(data), stamp_ns)

    def hand_over(self, data: bytes | None, frame: Frame) -> None:
        """The output of the stage before, None if it has none for this frame.

        It keeps that frame's stamp.
        """
        if self.index == 0:
            why = "" if data is not None else "the stage before had nothing to hand over"
            self.stage.offer(data, frame.stamp_ns, stamped=False, upstream=frame, refusal=why)
        elif data is not None and self.index < 0:
            self.stage.hear(self.index, data, frame.stamp_ns)
        elif data is not None:
            self.stage.offer_latest(self.index, data, frame.stamp_ns)
