"""How a replay goes through the log's time: as it was, or as fast as the models allow; `virtual/` has a third way."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Final

from torchperf_ros.frame.clock import NS_PER_S, monotonic_ns
from torchperf_ros.logs.player import Pace, Tally
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_stages import ReplayStages
from torchperf_ros.stage.stage_actor import StageMachinery

_LOOK_S: Final = 0.2
_PATIENCE_S: Final = 10.0


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended; a second one does not wait.

    A frame that is given to a stage by halves is answered by nobody. Where Ctrl-C does not raise `KeyboardInterrupt`,
    or does so in another thread, this does nothing.

    Raises:
        KeyboardInterrupt: Ctrl-C has waited.
    """
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    held = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal held
        held = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if held:
        raise KeyboardInterrupt


class ReplayPace:
    """What decides when a message of the log is given to the stages; this one is `fast`, others differ from it.

    Every frame is answered before the next message is given: the outputs do not depend on how fast that goes.
    """

    threaded = True
    """Whether stages have threads of their own, as in the node. Else their pools have to settle, and the pace steps."""

    def __init__(self, start_ns: int) -> None:
        self._now_ns = start_ns

    def machinery(self, stage: int) -> StageMachinery:
        """What the stage of this index runs on."""
        return StageMachinery()

    @property
    def summary(self) -> dict[str, object]:
        """What the run's summary holds about the pace itself."""
        return {}

    def now(self) -> int:
        """The log's time in ns."""
        return self._now_ns

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let the stages do what they do before this time of the log, which is then `now`; here: all that they have.

        A stage whose last worker died has one again.
        """
        self.finish(stages, record)
        while not all(actor.pool.ready for actor in stages.actors):
            stages.check()
            time.sleep(_LOOK_S / 10)
        self._now_ns = t_ns

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let the stages answer what is left."""
        with record.answered:
            while record.pending > stages.unanswered:
                if not record.answered.wait(_LOOK_S):
                    stages.check()


class RealPace(ReplayPace):
    """30 Hz is 30 Hz: messages are given when they were received, and deadlines count."""

    def __init__(self, start_ns: int) -> None:
        """Begin at this time of the log, with its first message."""
        super().__init__(start_ns)
        self._pace: Pace | None = None
        self._tally = Tally()

    @property
    def summary(self) -> dict[str, object]:
        """Messages that were given more than 5 ms after their time: a busy machine, or a log that is slow to read."""
        return {"late_messages": self._tally.late, "worst_late_ms": self._tally.worst_late_ms}

    def now(self) -> int:
        """The log's time runs with the monotonic clock."""
        return self._now_ns if self._pace is None else self._pace.log_ns(monotonic_ns())

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
