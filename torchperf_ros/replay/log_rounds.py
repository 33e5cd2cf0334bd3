"""The part of a log that is played, once or again and again."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.errors import TorchperfError
from torchperf_ros.replay.logs.log_reader import LogError, LogMessage, LogReader, LogTopic

_SHOWN = 6


class PlayError(TorchperfError):
    """A log cannot be played as asked; the message says why and what would do."""


@dataclass(frozen=True)
class LogRounds:
    """Which messages of a log are played.

    Attributes:
        log: opened.
        topics: of the log, by name; a message of another type than its topic's is left out.
        start_s: so much of its beginning is left out.
        duration_s: so much of it is played; None: to its end.
        loop: whether to begin again at its end.
        say: told in one line what cannot be read.
    """

    log: LogReader
    topics: Mapping[str, LogTopic]
    start_s: float = 0.0
    duration_s: float | None = None
    loop: bool = False
    say: Callable[[str], None] = lambda _: None

    @property
    def span_ns(self) -> tuple[int, int]:
        """Begin and end of the part, in the log's time; equal where the log does not say."""
        begin_ns = self.log.start_ns + round(self.start_s * NS_PER_S)
        last_ns = max(self.log.end_ns, begin_ns)
        if self.duration_s is None:
            return begin_ns, last_ns
        return begin_ns, min(last_ns, begin_ns + round(self.duration_s * NS_PER_S))

    def messages(self) -> Iterator[LogMessage | None]:
        """The messages in the log's order; None between one round and the next.

        Raises:
            LogError: the log is damaged here; with `loop` it is told instead, and the log begins again.
            PlayError: there is no message to play.
        """
        begin_ns, end_ns = self.span_ns
        start_ns = begin_ns if self.start_s else None
        stop_ns = None if self.duration_s is None else begin_ns + round(self.duration_s * NS_PER_S)
        damage = ""
        while True:
            played = False
            try:
                for message in self.log.messages(self.topics.keys(), start_ns, stop_ns):
                    if message.type_name == self.topics[message.topic].type_name:
                        yield message
                        played = True
            except LogError as error:
                if not played or not self.loop:
                    raise
                if str(error) != damage:
                    damage = str(error)
                    self.say(f"each round ends here: {damage}")
            if not played:
                msg = f"log {self.log.path}: has no message of {_listed(self.topics)} in this part of it"
                raise PlayError(msg)
            if not self.loop:
                return
            yield None


def choose_topics(log: LogReader, names: Set[str] | None, renamed: Set[str] = frozenset()) -> dict[str, LogTopic]:
    """The topics of a log that have these names; None: all that have messages.

    Args:
        log: opened.
        names: topics that are wanted.
        renamed: topics that get another name; they have to be there, too.

    Raises:
        PlayError: one is not there, or there are none.
    """
    filled = {name: topic for name, topic in log.topics.items() if topic.count}
    unknown = sorted(((names or frozenset()) | renamed) - log.topics.keys())
    if unknown:
        msg = f"log {log.path}: has no topic {_listed(unknown)}; it has: {_listed(filled)}"
        raise PlayError(msg)
    chosen = filled if names is None else {name: log.topics[name] for name in sorted(names)}
    if not chosen:
        msg = f"log {log.path}: has no messages"
        raise PlayError(msg)
    return chosen


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return (", ".join(shown[:_SHOWN]) + more) or "nothing"
