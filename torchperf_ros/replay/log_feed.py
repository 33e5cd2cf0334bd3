"""The messages of a log on their way to the stages that take them, and into the output."""

import contextlib
from collections.abc import Generator, Iterator, Mapping
from typing import Final

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader
from torchperf_ros.replay.output_log import OutputLog
from torchperf_ros.replay.read_ahead import ReadAhead
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_stages import ReplayStages
from torchperf_ros.supervise.realtime import step_back

_AHEAD_BYTES: Final = 64 << 20
_PERF: Final = ("latency", "latency_stages", "memory", "memory_stats", "anomaly")
_OWN: Final = frozenset({"/diagnostics", *(f"/perf/{name}" for name in _PERF)})


class LogFeed:
    """The part of a log that is to be replayed.

    Attributes:
        start_ns: time of the log at which it begins; 0 for an empty log.
        length_ns: how long it is, 0 if the log does not say.
        given: messages given to stages so far.
    """

    def __init__(self, reader: LogReader, options: ReplayOptions) -> None:
        """Take a log, and which part of it is wanted."""
        self._reader = reader
        self._options = options
        self.given = 0
        self.start_ns = _first_ns(reader) + round(options.start_s * NS_PER_S)
        self._end_ns: int | None = None
        if options.duration_s is not None:
            self._end_ns = self.start_ns + round(options.duration_s * NS_PER_S)
        self.length_ns = max(0, (self._end_ns or reader.end_ns) - self.start_ns)

    def connect(self, topics: Mapping[str, str], stages: ReplayStages, output: OutputLog | None) -> None:
        """Say where messages go.

        Args:
            topics: the log's topic by the stages' name for it, see `match_topics`.
            stages: who takes them.
            output: where those of `options.inputs` are copied.

        Raises:
            LogError: a topic that is to be copied is not in the log.
        """
        self._stages, self._output = stages, output
        self._takers = {
            log_topic: [source for name, of in topics.items() if of == log_topic for source in stages.inputs(name)]
            for log_topic in topics.values()
        }
        self._copied = frozenset() if output is None else self._to_copy()

    def _to_copy(self) -> frozenset[str]:
        wanted, own = self._options.inputs, self._stages.outputs | _OWN
        if wanted in {"all", "none"}:
            return frozenset(self._takers) - own if wanted == "all" else frozenset()
        names = frozenset(name.strip() for name in wanted.split(","))
        if unknown := sorted(names - set(self._reader.topics)):
            msg = f"--inputs: log {self._reader.path} has no topic {', '.join(unknown)}; give all, none or its topics"
            raise LogError(msg)
        if clashing := sorted(names & own):
            msg = f"--inputs: {', '.join(clashing)} is what the replay itself publishes, and the two would mix"
            raise LogError(msg)
        return names

    def messages(self) -> Generator[LogMessage, None, None]:
        """The messages that somebody takes, read ahead; to be closed.

        Raises:
            LogError: the log is damaged, or holds no message for a stage in this part of it.
        """
        ahead = ReadAhead(self._read(), lambda message: len(message.data), _AHEAD_BYTES)
        with contextlib.closing(ahead):
            yield from ahead
        if not self.given:
            topics = ", ".join(sorted(self._takers)) or "any topic"
            msg = f"log {self._reader.path}: has no message on {topics} in that time"
            raise LogError(msg)

    def _read(self) -> Iterator[LogMessage]:
        if self._options.pace == "real":
            step_back()  # this runs on the thread that reads ahead
        whole = self._options.start_s == 0.0 and self._end_ns is None
        wanted = frozenset(self._takers) | self._copied
        yield from self._reader.messages(wanted, None if whole else self.start_ns, self._end_ns)

    def give(self, message: LogMessage) -> None:
        """Copy a message and hand it to whoever takes it.

        Raises:
            OSError: the output cannot be written.
        """
        if self._output is not None and message.topic in self._copied:
            self._output.write(message.topic, message.type_name, message.data, message.t_ns)
        if (sources := self._takers.get(message.topic)) is not None:
            self.given += 1
            self._stages.offer(sources, message.data)


def _first_ns(reader: LogReader) -> int:
    """When the log begins, also where it does not say; 0 if it is empty."""
    return reader.start_ns or next((message.t_ns for message in reader.messages()), 0)
