"""The node's stages without the node: wired to each other and to a log."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torchperf_ros.core.config import NodeConfig, StageConfig
from torchperf_ros.core.frame import Frame
from torchperf_ros.core.message_types import has_header
from torchperf_ros.replay.replay_error import ReplayError
from torchperf_ros.replay.replay_record import ReplayRecord
from torchperf_ros.replay.topic_map import Wanted, absolute
from torchperf_ros.supervise.stage_actor import StageActor
from torchperf_ros.supervise.stage_input import StageInput
from torchperf_ros.supervise.stage_machinery import StageMachinery
from torchperf_ros.supervise.stage_ports import StagePorts
from torchperf_ros.supervise.worker_setup import worker_setup

_POLL_S: Final = 0.02
_COMPILING_TAKES: Final = 10  # times as long as loading


@dataclass(frozen=True)
class StageLife:
    """What a stage of a replay runs on: see `StageActor` for the first two.

    Attributes:
        machinery: the clock among it.
        ros_now: gives the log's time in ns.
        settle: waits until its workers are ready; who replays then calls `step`. None: the stage has a thread for that.
    """

    machinery: StageMachinery
    ros_now: Callable[[], int]
    settle: Callable[[], None] | None = None


class ReplayStages:
    """Starts the stages of a configuration, and hands one's outputs to the next as the node does.

    Attributes:
        actors: in the order of the parameters.
        start_up_s: how long it took until every worker was ready.
    """

    def __init__(
        self,
        config: NodeConfig,
        life: Callable[[int], StageLife],
        record: ReplayRecord,
        say: Callable[[str], None],
        seed: int,
        definitions: str,
    ) -> None:
        """Make the stages.

        Args:
            config: the parameters.
            life: what the stage of an index runs on.
            record: what is kept of what they do.
            say: told what workers say and what becomes of them.
            seed: of what models draw at random.
            definitions: a prefix whose `share` holds message types beside those that are installed.
        """
        self._seed = seed
        self._definitions = definitions
        self.start_up_s = 0.0
        self._config = config
        self._record = record
        self._say = say
        self._lives = [life(index) for index in range(len(config.stages))]
        pairs = zip(config.stages, self._lives, strict=True)
        self.actors = [self._actor(index, stage, own) for index, (stage, own) in enumerate(pairs)]
        self._followers: list[list[StageInput]] = [[] for _ in self.actors]
        self._by_topic: dict[str, list[StageInput]] = {}

    def _actor(self, index: int, stage: StageConfig, life: StageLife) -> StageActor:
        ports = StagePorts(
            publish=lambda payload: self._record.publish(index, payload),
            hand_on=lambda payload, frame: self._hand_on(index, payload, frame),
            answered=lambda answer: self._record.answer(index, answer),
            anomaly=self._record.found,
            log=lambda severity, text: None if severity == "info" else self._say(text),
        )
        own = {"identify": True, "compile_first": True, "definitions": self._definitions, "seed": self._seed}
        return StageActor(stage, {**worker_setup(stage, self._config), **own}, ports, life.ros_now, life.machinery)

    def _hand_on(self, index: int, payload: bytes | None, frame: Frame) -> None:
        for follower in self._followers[index]:
            if follower.index == 0:
                self._record.offered()
            follower.hand_over(payload, frame)

    def start(self) -> list[Wanted]:
        """Start the workers and wait until all are ready; returns what the stages want of a log.

        Raises:
            ReplayError: a stage cannot run.
        """
        started_s = time.monotonic()
        for actor, life in zip(self.actors, self._lives, strict=True):
            if life.settle is None:
                actor.start()
            else:
                actor.crew.start()
        for actor, life in zip(self.actors, self._lives, strict=True):
            if life.settle is not None:
                life.settle()
            self._wait_until_ready(actor)
        self.start_up_s = time.monotonic() - started_s
        for index, actor in enumerate(self.actors):
            assert actor.crew.description is not None  # it is ready
            self._record.types[index] = actor.crew.description.output
            self._tell_engines(actor)
            actor.activate()
        return self._wire()

    def _wait_until_ready(self, actor: StageActor) -> None:
        """Wait for every worker of a stage, the standby included: it can step in from the first frame on."""
        crew, name = actor.crew, actor.config.name
        patience_s = self._config.start_timeout_s * (_COMPILING_TAKES if actor.config.engine == "compile" else 1)
        give_up_s = time.monotonic() + patience_s * actor.config.workers
        while not all(worker is not None and worker.usable for worker in crew.workers):
            if crew.gave_up or time.monotonic() > give_up_s:
                why = crew.last_error or f"it is not ready ({crew.progress})"
                msg = f"stage {name} cannot run: {why}"
                raise ReplayError(msg)
            time.sleep(_POLL_S)

    def _tell_engines(self, actor: StageActor) -> None:
        """Say which tiers do not run by the engine that was asked for."""
        worker = next(worker for worker in actor.crew.workers if worker is not None)
        if worker.missing:
            tiers = ", ".join(worker.missing)
            self._say(f"{actor.config.name}: {tiers} in eager, as there is no package; `torchperf compile` makes them")

    def _wire(self) -> list[Wanted]:
        made_by = {absolute(actor.config.output): index for index, actor in enumerate(self.actors)}
        wanted = []
        for index, actor in enumerate(self.actors):
            assert actor.crew.description is not None
            for number, (topic, type_name) in enumerate(actor.crew.description.inputs):
                source = StageInput(actor, number, topic, type_name, has_header(type_name))
                maker = made_by.get(absolute(topic))
                if maker is not None and maker != index:
                    self._followers[maker].append(source)
                else:
                    self._by_topic.setdefault(topic, []).append(source)
                    wanted.append(Wanted(actor.config.name, topic, type_name, needed=number == 0))
        return wanted

    def inputs(self, topic: str) -> list[StageInput]:
        """Who takes a topic, by the name that the adapters have for it."""
        return self._by_topic[topic]

    def offer(self, sources: list[StageInput], data: bytes) -> None:
        """Give a message of the log to the stages that take it."""
        for source in sources:
            if source.index == 0:
                self._record.offered()
            source.receive(data)

    @property
    def outputs(self) -> frozenset[str]:
        """The topics that the stages publish."""
        return frozenset(absolute(actor.config.output) for actor in self.actors)

    @property
    def unanswered(self) -> int:
        """Frames that nobody will answer: superseded and stale ones, and those that are lost."""
        return self.lost + sum(actor.mailbox.superseded + actor.mailbox.stale for actor in self.actors)

    @property
    def lost(self) -> int:
        """Frames that an error of ours has cost."""
        return sum(actor.journal.statistics.internal_errors for actor in self.actors)

    def check(self) -> None:
        """Ask whether every stage can still answer.

        Raises:
            ReplayError: the workers of one died too often in a row.
        """
        for actor in self.actors:
            if actor.crew.gave_up:
                msg = f"stage {actor.config.name} cannot run any more: {actor.crew.last_error}"
                raise ReplayError(msg)

    def deactivate(self) -> None:
        """Take no more frames; what has begun is still answered."""
        for actor in self.actors:
            actor.deactivate()

    def stop(self) -> None:
        """End the workers, all at once."""
        threads = [threading.Thread(target=actor.stop) for actor in self.actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
