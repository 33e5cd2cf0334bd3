"""The node's stages without the node, wired to each other and to a log.

And how they go through the log's time.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final

from torchperf_ros.api.clock import NS_PER_S, monotonic_ns
from torchperf_ros.api.messages import has_header
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.replay.logs.player import Pace, Tally
from torchperf_ros.replay.replay_options import ReplayError
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.settings.config import NodeConfig, StageConfig
from torchperf_ros.stage.frame import Frame
from torchperf_ros.stage.hooks import StageMachinery, StagePorts
from torchperf_ros.stage.right_of_way import set_right_of_way
from torchperf_ros.stage.stage import Stage
from torchperf_ros.stage.wiring import StageInput, Wiring, beside
from torchperf_ros.workers.worker_setup import worker_setup

_POLL_S: Final = 0.005
_COMPILING_TAKES: Final = 10  # times as long as loading
_LOOK_S: Final = 0.2
_PATIENCE_S: Final = 10.0


class ReplayStages:
    """Starts the stages of a configuration, and hands one's outputs to the next as the node does.

    Its `actors` are in the order of the parameters; `takers` are the inputs that take a topic of the log,
    see `connect`; `outputs` are the topics that the stages publish; `start_up_s` is how long it took until
    all was ready.
    """

    def __init__(
        self,
        config: NodeConfig,
        pace: "ReplayPace",
        record: ReplayRecord,
        say: Callable[[str], None],
        seed: int,
        definitions: str,
    ) -> None:
        """Make the stages, which run on what the `pace` has.

        `say` gets what workers print and what becomes of them.

        `seed`: of what models draw at random. `definitions`: a prefix whose `share` holds message types
        beside those that are installed.
        """
        self._config, self._pace, self._record, self._say = config, pace, record, say
        self._definitions, self._seed = definitions, seed
        self._setups = {stage.name: worker_setup(stage, config) for stage in config.whole_stages}
        self.actors: list[Stage] = []
        for index, stage in enumerate(config.stages):
            self.actors.append(self._actor(index, stage))
        set_right_of_way(
            self.actors, config, None if pace.threaded else 0
        )  # at `virtual` on any machine alike
        self.outputs = frozenset(record.topics)
        self.takers: dict[str, list[StageInput]] = {}
        self.start_up_s = self._started_s = 0.0
        self._followers: list[list[StageInput]] = [[] for _ in self.actors]
        self._from_log: list[StageInput] = []

    def _actor(self, index: int, stage: StageConfig) -> Stage:
        ports = StagePorts(
            publish=lambda payload: self._record.publish(index, payload),
            hand_on=partial(self._hand_on, index),
            answered=partial(self._record.answer, index),
            anomaly=self._record.found,
            log=self._log,
        )
        setup = replace(
            self._setups[stage.stage],
            identify=True,
            compile_first=True,
            definitions=self._definitions,
            seed=self._seed,
        )
        first = beside(self.actors, stage)
        return Stage(stage, setup, ports, self._pace.now, self._pace.machinery(index), first)

    def _log(self, severity: str, text: str) -> None:
        """Say what is wrong.

        Of what ends a worker before it is ready only the first line, as the error has all.
        """
        if severity != "info":
            self._say(text if self.start_up_s else text.partition("\n")[0])

    def _hand_on(self, index: int, payload: bytes | None, frame: Frame) -> None:
        for follower in self._followers[index]:
            if follower.index == 0:
                self._record.offered()
            follower.hand_over(payload, frame)

    def start(self) -> None:
        self._started_s = time.monotonic()
        for actor in self.actors:  # without threads the pace calls their `step`
            if self._pace.threaded:
                actor.start()
            elif not actor.place:
                actor.pool.start()

    def wanted(self) -> list[StageInput]:
        """Wait until each stage has described itself; returns what they want of a log.

        Models are loaded meanwhile, and for longer: whether the log fits is known before, see `settle`.

        Raises:
            ReplayError: a stage cannot run.
        """
        every = []
        for index, actor in enumerate(self.actors):
            self._wait(actor, lambda actor: actor.pool.description is not None)
            assert actor.pool.description is not None
            self._record.types[index] = actor.pool.description.output
            every.append([StageInput(actor, *one, has_header(one[-1])) for one in actor.inputs])
        wiring = Wiring(self.actors, every, absolute)
        self._followers, self._from_log = wiring.followers, wiring.from_topics
        return self._from_log

    def connect(self, topics: Mapping[str, str]) -> None:
        """Take messages of the log.

        `topics` has the log's topic by the stages' name, see `match_topics`.
        """
        for source in self._from_log:
            if source.topic in topics:
                self.takers.setdefault(topics[source.topic], []).append(source)

    def settle(self) -> None:
        """Wait until every worker is ready, the standbys included, and let the stages take frames.

        Raises:
            ReplayError: a stage cannot run.
        """
        for actor in self.actors:
            if not (self._pace.threaded or actor.place):
                pool: Any = actor.pool  # the virtual clock's
                pool.settle()
            # the standby, too: it can step in from the first frame on
            self._wait(actor, lambda actor: all(w is not None and w.usable for w in actor.pool.workers))
        self.start_up_s = time.monotonic() - self._started_s
        for actor in self.actors:
            worker = next(worker for worker in actor.pool.workers if worker is not None)
            if worker.reported.missing and not actor.place:
                tiers = ", ".join(worker.reported.missing)
                why = "in eager, as there is no package; `torchperf compile` makes them"
                self._say(f"{actor.config.name}: {tiers} {why}")
            actor.activate()

    def _wait(self, actor: Stage, condition: Callable[[Stage], bool]) -> None:
        pool, name = actor.pool, actor.config.name
        patience_s = self._config.start_timeout_s * (
            _COMPILING_TAKES if actor.config.engine == "compile" else 1
        )
        give_up_s = time.monotonic() + patience_s * actor.config.workers
        while not condition(actor):
            if pool.gave_up or time.monotonic() > give_up_s:
                why = pool.last_error or f"it is not ready ({pool.progress})"
                raise ReplayError(f"stage {name} cannot run: {why}")
            time.sleep(_POLL_S)

    def offer(self, topic: str, data: bytes) -> bool:
        """Give a message of the log to the stages that take its topic; whether there are any."""
        sources = self.takers.get(topic, ())
        for source in sources:
            if source.index == 0:
                self._record.offered()
            source.receive(data)
        return bool(sources)

    @property
    def unanswered(self) -> int:
        """Frames that get no answer: superseded ones, and those that are lost."""
        return self.lost + sum(actor.mailbox.superseded for actor in self.actors)

    @property
    def input_waits(self) -> list[int]:
        """Until when frames wait for synchronised inputs, by the clock of these, and others behind them."""
        found = [(actor.inputs_until_ns, actor.mailbox.waiting) for actor in self.actors]
        return [
            until_ns for until_ns, behind in found if until_ns for _ in range(1 if behind is None else 2)
        ]

    @property
    def lost(self) -> int:
        """Frames that an error of ours has cost."""
        return sum(actor.statistics.counters.internal_errors for actor in self.actors)

    def check(self) -> None:
        """Ask whether every stage can still answer.

        Raises:
            ReplayError: the workers of one died too often in a row.
        """
        for actor in self.actors:
            if actor.pool.gave_up:
                raise ReplayError(f"stage {actor.config.name} cannot run any more: {actor.pool.last_error}")

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.actors)) as pool:
            list(pool.map(Stage.stop, self.actors))


class ReplayPace:
    """What decides when a message of the log is given to the stages.

    This one is `fast`, others differ from it.

    Every frame is answered before the next message is given: the outputs do not depend on how fast that
    goes.
    """

    # Whether stages have threads of their own, as in the node.
    #
    # Else their pools have to settle, and the pace steps.
    threaded = True

    def __init__(self, start_ns: int) -> None:
        self._now_ns = start_ns

    def machinery(self, stage: int) -> StageMachinery:
        """What the stage of this index runs on; a frame waits for synchronised inputs by the log's time."""
        return StageMachinery(input_clock=self.now)

    @property
    def summary(self) -> dict[str, object]:
        return {}

    def now(self) -> int:
        return self._now_ns

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        """Let the stages do what they do before this time of the log, which is then `now`.

        Here: all that they have.

        A frame that waits for synchronised inputs may have to see the next message first. A stage whose
        last worker died has one again.
        """
        self._answer(stages, record, t_ns)
        while not all(actor.pool.ready for actor in stages.actors):
            stages.check()
            time.sleep(_LOOK_S / 10)
        self._now_ns = t_ns

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        self._answer(stages, record, None)

    def _answer(self, stages: ReplayStages, record: ReplayRecord, until_ns: int | None) -> None:
        """Let the stages answer, but for frames that wait for inputs beyond this time of the log."""
        while True:
            with record.answered:
                while record.pending > stages.unanswered + len(waits := stages.input_waits):
                    if not record.answered.wait(_LOOK_S):
                        stages.check()
            if not waits or (until_ns is not None and min(waits) > until_ns):
                return
            self._now_ns = max(self._now_ns, min(waits))
            for actor in stages.actors:
                actor.inputs_are_over()


class RealPace(ReplayPace):
    """30 Hz is 30 Hz: messages are given when they were received, and deadlines count."""

    def __init__(self, start_ns: int) -> None:
        super().__init__(start_ns)
        self._pace: Pace | None = None
        self._tally = Tally()

    def machinery(self, stage: int) -> StageMachinery:
        return StageMachinery()

    @property
    def summary(self) -> dict[str, object]:
        """Messages that were given more than 5 ms after their time.

        A busy machine, or a log that is slow to read.
        """
        return {"late_messages": self._tally.late, "worst_late_ms": self._tally.worst_late_ms}

    def now(self) -> int:
        return self._now_ns if self._pace is None else self._pace.log_ns(monotonic_ns())

    def reach(self, t_ns: int, stages: ReplayStages, record: ReplayRecord) -> None:
        if self._pace is None:
            self._pace = Pace(t_ns, monotonic_ns())
        due_ns = self._pace.due_ns(t_ns)
        while (ahead_ns := due_ns - monotonic_ns()) > 0:
            time.sleep(min(ahead_ns / NS_PER_S, _LOOK_S))
            record.tick()
        self._tally.add(-ahead_ns)

    def finish(self, stages: ReplayStages, record: ReplayRecord) -> None:
        longest_ms = sum(actor.config.budget_ms for actor in stages.actors)
        give_up_s = time.monotonic() + longest_ms / 1000 + _PATIENCE_S
        with record.answered:
            while record.pending > stages.unanswered and time.monotonic() < give_up_s:
                record.answered.wait(_LOOK_S)
