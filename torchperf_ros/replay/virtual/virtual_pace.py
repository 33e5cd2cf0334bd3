"""A replay on a virtual clock: it goes from one event to the next, however long the work in between really takes."""

from collections.abc import Sequence
from typing import Any

from torchperf_ros.core.clock import VirtualClock
from torchperf_ros.replay.held_interrupt import held_interrupt
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.replay_stages import ReplayStages, StageLife
from torchperf_ros.replay.virtual.step_times import StageTimes
from torchperf_ros.replay.virtual.virtual_crew import VirtualCrew
from torchperf_ros.replay.virtual.virtual_waiter import VirtualWaiter
from torchperf_ros.supervise.stage_machinery import StageMachinery


class VirtualPace:
    """Deadlines, mailboxes, ladders and fallbacks on a clock that reads the log's time.

    One thread does everything, in an order that only the log, the parameters, the times and the seed decide: of what
    is due at the same time, workers come before messages, and stages in their own order.
    """

    def __init__(self, start_ns: int, times: Sequence[StageTimes]) -> None:
        """Begin at this time of the log, with the times of each stage's runs."""
        self._clock = VirtualClock(start_ns)
        self._times = list(times)
        self._waiters = [VirtualWaiter() for _ in self._times]
        self._crews: dict[int, VirtualCrew] = {}

    def life(self, stage: int) -> StageLife:
        """Stand-ins for the stage's threads, processes and clock."""

        def crew(*arguments: Any) -> VirtualCrew:  # noqa: ANN401 - those of `Crew`
            self._crews[stage] = VirtualCrew(self._times[stage], self._clock, *arguments)
            return self._crews[stage]

        machinery = StageMachinery(self._clock, lambda: self._waiters[stage], crew)

        def settle() -> None:
            self._crews[stage].settle()

        return StageLife(machinery, self._clock, settle)

    def now(self) -> int:
        """The clock."""
        return self._clock()

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let happen what is due until then, one event after the other."""
        self._run(t_ns, stages, record)
        self._clock.reach(t_ns)

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let happen what is still to come, until every frame is answered."""
        self._run(None, stages, record)

    def _run(self, until_ns: int | None, stages: ReplayStages, record: ReplayRecord) -> None:
        while (next_ns := self._next_ns(stages, until_ns, record)) is not None:
            self._clock.reach(next_ns)
            with held_interrupt():
                self._step(self._clock(), stages)
            record.tick()

    def _step(self, now_ns: int, stages: ReplayStages) -> None:
        for stage, (actor, waiter) in enumerate(zip(stages.actors, self._waiters, strict=True)):
            if descriptors := waiter.ready(now_ns):
                actor.step(descriptors)
            self._crews[stage].step(now_ns)

    def _next_ns(self, stages: ReplayStages, until_ns: int | None, record: ReplayRecord) -> int | None:
        """When something is due; None: nothing is, up to then."""
        if until_ns is None and record.pending <= stages.unanswered:
            return None
        due = [waiter.next_ns for waiter in self._waiters] + [crew.next_ns for crew in self._crews.values()]
        next_ns = min((at_ns for at_ns in due if at_ns is not None), default=None)
        return None if next_ns is None or (until_ns is not None and next_ns > until_ns) else next_ns

    @property
    def summary(self) -> dict[str, object]:
        """Nothing."""
        return {}
