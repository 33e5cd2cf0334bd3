"""How a replay goes through the log's time: as it was, or as fast as the models allow."""

import time
from typing import Final, Protocol

from torchperf_ros.core.clock import NS_PER_S, monotonic_ns
from torchperf_ros.replay.pace import Pace
from torchperf_ros.replay.player import Tally
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_stages import ReplayStages, StageLife
from torchperf_ros.supervise.stage_machinery import StageMachinery

_LOOK_S: Final = 0.2
_PATIENCE_S: Final = 10.0


class ReplayPace(Protocol):
    """What decides when a message of the log is given to the stages."""

    def life(self, stage: int) -> StageLife:
        """What the stage of this index runs on."""

    def now(self) -> int:
        """The log's time in ns."""

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let the stages do what they do before this time of the log, which is then `now`."""

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let the stages answer what is left."""

    @property
    def summary(self) -> dict[str, object]:
        """What there is to say about the pace itself."""


class RealPace:
    """30 Hz is 30 Hz: messages are given when they were received, and deadlines count."""

    def __init__(self, start_ns: int) -> None:
        """Begin at this time of the log, with its first message."""
        self._start_ns = start_ns
        self._pace: Pace | None = None
        self._tally = Tally()

    def life(self, stage: int) -> StageLife:
        """As in the node, but for the clock of the ages."""
        return StageLife(StageMachinery(), self.now)

    def now(self) -> int:
        """The log's time runs with the monotonic clock."""
        return self._start_ns if self._pace is None else self._pace.log_ns(monotonic_ns())

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Wait until the message is due."""
        if self._pace is None:
            self._pace = Pace(t_ns, monotonic_ns())
        due_ns = self._pace.due_ns(t_ns)
        while (ahead_ns := due_ns - monotonic_ns()) > 0:
            time.sleep(min(ahead_ns / NS_PER_S, _LOOK_S))
            record.tick()
        self._tally.add(-ahead_ns)

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Wait for the last answers, which come by their deadlines."""
        longest_ms = sum(actor.config.budget_ms for actor in stages.actors)
        give_up_s = time.monotonic() + longest_ms / 1000 + _PATIENCE_S
        with record.answered:
            while record.pending > stages.unanswered and time.monotonic() < give_up_s:
                record.answered.wait(_LOOK_S)

    @property
    def summary(self) -> dict[str, object]:
        """Messages that were given more than 5 ms after their time: a busy machine, or a log that is slow to read."""
        return {"late_messages": self._tally.late, "worst_late_ms": self._tally.worst_late_ms}


class FastPace:
    """Every frame is answered before the next message is given: the outputs do not depend on how fast that goes."""

    def __init__(self, start_ns: int) -> None:
        """Begin at this time of the log."""
        self._now_ns = start_ns

    def life(self, stage: int) -> StageLife:
        """As in the node, but for the clock of the ages, which stands still while a frame is answered."""
        return StageLife(StageMachinery(), self.now)

    def now(self) -> int:
        """When the newest message was received."""
        return self._now_ns

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Wait until every stage has answered, and has a worker again if the last one died."""
        self._settle(stages, record)
        while not all(actor.crew.ready for actor in stages.actors):
            stages.check()
            time.sleep(_LOOK_S / 10)
        self._now_ns = t_ns

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Wait for the last answer."""
        self._settle(stages, record)

    def _settle(self, stages: ReplayStages, record: ReplayRecord) -> None:
        with record.answered:
            while record.pending > stages.unanswered:
                if not record.answered.wait(_LOOK_S):
                    stages.check()

    @property
    def summary(self) -> dict[str, object]:
        """Nothing."""
        return {}
