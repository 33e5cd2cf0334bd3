"""The node's stages without the node: wired to each other and to a log."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Final

from torchperf_ros.config.config import NodeConfig, StageConfig
from torchperf_ros.config.message_types import has_header
from torchperf_ros.frame.frame import Frame
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.replay.replay_options import ReplayError
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.stage.right_of_way import set_right_of_way
from torchperf_ros.stage.stage_actor import StageActor, StagePorts
from torchperf_ros.stage.stage_input import StageInput
from torchperf_ros.workers.worker_setup import worker_setup

if TYPE_CHECKING:
    from torchperf_ros.replay.paces import ReplayPace

_POLL_S: Final = 0.005
_COMPILING_TAKES: Final = 10  # times as long as loading


class ReplayStages:
    """Starts the stages of a configuration, and hands one's outputs to the next as the node does.

    Its `actors` are in the order of the parameters; `takers` are the inputs that take a topic of the log, see
    `connect`; `outputs` are the topics that the stages publish; `start_up_s` is how long it took until all was ready.
    """

    def __init__(
        self, config: NodeConfig, pace: "ReplayPace", record: ReplayRecord, say: Callable[[str], None],
        seed: int, definitions: str,
    ) -> None:  # fmt: skip
        """Make the stages, which run on what the `pace` has; `say` gets what workers print and what becomes of them.

        `seed`: of what models draw at random. `definitions`: a prefix whose `share` holds message types beside those
        that are installed.
        """
        self._config, self._pace, self._record, self._say = config, pace, record, say
        self._own = {"identify": True, "compile_first": True, "definitions": definitions, "seed": seed}
        self.actors = [self._actor(index, stage) for index, stage in enumerate(config.stages)]
        set_right_of_way(self.actors, config, None if pace.threaded else 0)  # at `virtual` on any machine alike
        self.outputs = frozenset(record.topics)
        self.takers: dict[str, list[StageInput]] = {}
        self.start_up_s = self._started_s = 0.0
        self._followers: list[list[StageInput]] = [[] for _ in self.actors]
        self._from_log: list[StageInput] = []

    def _actor(self, index: int, stage: StageConfig) -> StageActor:
        ports = StagePorts(
            publish=lambda payload: self._record.publish(index, payload),
            hand_on=partial(self._hand_on, index),
            answered=partial(self._record.answer, index),
            anomaly=self._record.found,
            log=self._log,
        )
        setup = {**worker_setup(stage, self._config), **self._own}
        return StageActor(stage, setup, ports, self._pace.now, self._pace.machinery(index))

    def _log(self, severity: str, text: str) -> None:
        """Say what is wrong; of what ends a worker before it is ready only the first line, as the error has all."""
        if severity != "info":
            self._say(text if self.start_up_s else text.partition("\n")[0])

    def _hand_on(self, index: int, payload: bytes | None, frame: Frame) -> None:
        for follower in self._followers[index]:
            if follower.index == 0:
                self._record.offered()
            follower.hand_over(payload, frame)

    def start(self) -> None:
        """Start the workers."""
        self._started_s = time.monotonic()
        for actor in self.actors:  # without threads the pace calls their `step`
            (actor.start if self._pace.threaded else actor.pool.start)()

    def wanted(self) -> list[StageInput]:
        """Wait until each stage has described itself; returns what they want of a log.

        Models are loaded meanwhile, and for longer: whether the log fits is known before, see `settle`.

        Raises:
            ReplayError: a stage cannot run.
        """
        made_by = {absolute(actor.config.output): index for index, actor in enumerate(self.actors)}
        for index, actor in enumerate(self.actors):
            self._wait(actor, lambda actor: actor.pool.description is not None)
            assert actor.pool.description is not None
            self._record.types[index] = actor.pool.description.output
            for number, topic, type_name in actor.inputs:
                source = StageInput(actor, number, topic, type_name, has_header(type_name))
                maker = made_by.get(absolute(topic))
                if maker is not None and maker != index:
                    self._followers[maker].append(source)
                else:
                    self._from_log.append(source)
        return self._from_log

    def connect(self, topics: Mapping[str, str]) -> None:
        """Take messages of the log; `topics` has the log's topic by the stages' name, see `match_topics`."""
        for source in self._from_log:
            if source.topic in topics:
                self.takers.setdefault(topics[source.topic], []).append(source)

    def settle(self) -> None:
        """Wait until every worker is ready, the standbys included, and let the stages take frames.

        Raises:
            ReplayError: a stage cannot run.
        """
        for actor in self.actors:
            if not self._pace.threaded:
                actor.pool.settle()
            # the standby, too: it can step in from the first frame on
            self._wait(actor, lambda actor: all(w is not None and w.usable for w in actor.pool.workers))
        self.start_up_s = time.monotonic() - self._started_s
        for actor in self.actors:
            worker = next(worker for worker in actor.pool.workers if worker is not None)
            if worker.missing:
                tiers = ", ".join(worker.missing)
                why = "in eager, as there is no package; `torchperf compile` makes them"
                self._say(f"{actor.config.name}: {tiers} {why}")
            actor.activate()

    def _wait(self, actor: StageActor, condition: Callable[[StageActor], bool]) -> None:
        pool, name = actor.pool, actor.config.name
        patience_s = self._config.start_timeout_s * (_COMPILING_TAKES if actor.config.engine == "compile" else 1)
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
        """Frames that nobody will answer: superseded and stale ones, and those that are lost."""
        return self.lost + sum(actor.mailbox.superseded + actor.mailbox.stale for actor in self.actors)

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
        """End the workers, all at once."""
        with ThreadPoolExecutor(len(self.actors)) as pool:
            list(pool.map(StageActor.stop, self.actors))
