"""How stages are wired: which of their inputs take a topic, and which what another stage publishes."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_actions import find_circles
from torchperf_ros.stage.frame import Frame
from torchperf_ros.stage.stage import Stage


@dataclass
class StageInput:
    """One input of a stage: its topic as resolved, its message type, and whether that has a stamp.

    The index is that of the adapter's inputs; those of scenes and guard have one below 0, see `Stage.hear`.
    """

    stage: Stage
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


class Wiring:
    """The inputs of stages, each with what it takes.

    Attributes:
        published: whole names of the topics that the stages publish.
        from_topics: the inputs that no other stage's output is for.
        followers: by stage, the inputs that take its output inside the node.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        inputs: Sequence[Sequence[StageInput]],
        whole_name: Callable[[str], str],
    ) -> None:
        """Wire these stages, whose `inputs` are in the same order; `whole_name` makes a topic's whole name.

        Raises:
            ConfigError: two stages publish one topic, or two streams of a stage have one trigger.
        """
        made_by = _makers(stages, whole_name)
        _refuse_one_topic((source for sources in inputs for source in sources), whole_name)
        self.published = frozenset(made_by)
        self.from_topics: list[StageInput] = []
        self.followers: list[list[StageInput]] = [[] for _ in stages]
        for index, sources in enumerate(inputs):
            for source in sources:
                maker = made_by.get(whole_name(source.topic), index)
                (self.from_topics if maker == index else self.followers[maker]).append(source)
        find_circles(
            {
                stage.actions: {taker.stage.actions for taker in takers}
                for stage, takers in zip(stages, self.followers, strict=True)
            }
        )


def _makers(stages: Sequence[Stage], whole_name: Callable[[str], str]) -> dict[str, int]:
    """Which of the stages publishes a topic, by the topic's whole name.

    Raises:
        ConfigError: two stages, or streams, publish one; names both and the topic.
    """
    found: dict[str, int] = {}
    for index, stage in enumerate(stages):
        topic = whole_name(stage.config.output)
        other = stages[found.setdefault(topic, index)]
        if other is not stage:
            what = f"{other.config.name} and {stage.config.name} both publish {topic}"
            raise ConfigError(f"parameter {stage.config.name}.output: {what}; each has a topic of its own")
    return found


def _refuse_one_topic(inputs: Iterable[StageInput], whole_name: Callable[[str], str]) -> None:
    """See that no two streams of a stage have one trigger, by the whole names of their topics.

    Raises:
        ConfigError: two have; names both and the topic.
    """
    seen: dict[tuple[str, str], str] = {}
    for one in inputs:
        config = one.stage.config
        if one.index == 0 and config.stream:
            topic = whole_name(one.topic)
            other = seen.setdefault((config.stage, topic), config.stream)
            if other != config.stream:
                what = f"{other} and {config.stream} both take {topic}; each stream has a topic of its own"
                raise ConfigError(f"parameter {config.stage}.streams: {what}")


def beside(stages: Sequence[Stage], config: StageConfig) -> Stage | None:
    """Of these the first stream of the stage that this configuration is of; None where it is the first."""
    return next((one for one in stages if config.stream and one.config.stage == config.stage), None)
