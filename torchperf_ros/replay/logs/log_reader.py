"""A recorded log of any format as a stream of CDR messages in the order in which they were received.

Here are which files belong to a log and of what kind they are, the message types that a log defines
compared with those known here, and the reading itself. ROS 1 messages are converted to CDR.
"""

import contextlib
import errno
import functools
import heapq
import math
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path, PurePath
from typing import Any, Final, NamedTuple

from rosbags.interfaces.typing import FieldDesc, Typesdict
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from torchperf_ros.api import messages as message_types
from torchperf_ros.api.cdr import header_stamp_ns
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput, ConfigError, TorchperfError, UnknownMessageType
from torchperf_ros.api.text import listed
from torchperf_ros.replay.logs.chunked_files import (
    MCAP_MAGIC,
    ROS1_MAGIC,
    ZSTD_MAGIC,
    ChunkedFile,
    McapFile,
    Ros1Bag,
    unpacked_message,
)
from torchperf_ros.replay.logs.db3_file import DB3_MAGIC, Db3File
from torchperf_ros.replay.logs.log_storage import (
    DAY_NS,
    Channel,
    LogError,
    LogFindings,
    LogNotes,
    Part,
    RawMessage,
    Stamps,
    is_odd,
    set_aside,
    unpacked_file,
)
from torchperf_ros.settings.params_file import read_yaml

__all__ = ["LogError", "LogFindings", "LogMessage", "LogReader", "LogTopic"]

# What the kinds of files are, and the bytes that they begin with.
_KINDS: Final = {
    ".mcap": ("an MCAP file", MCAP_MAGIC),
    ".db3": ("a database of SQLite", DB3_MAGIC),
    ".bag": ("a ROS 1 bag of version 2.0", ROS1_MAGIC),
    ".zstd": ("a file compressed by zstd", ZSTD_MAGIC),
}
# Gets how much of how much of a log's time is done, in ns; of 0 where its length is not known.
Progress = Callable[[int, int], None]
Say = Callable[[str], None]
SUFFIXES: Final = (".mcap", ".db3", ".bag", ".mcap.zstd", ".db3.zstd", ".bag.active")
METADATA: Final = "metadata.yaml"


def log_files(path: Path, notes: LogNotes) -> list[Path]:
    """The files of a log, in order.

    A folder's are those that its `metadata.yaml` names; without a usable one, the files of the only kind
    that is there. What was unpacked or reindexed beside its origin is read once.

    Raises:
        LogError: there is nothing that could be read, or files that cannot belong to one log.
    """
    if not path.exists():
        raise LogError(f"log {path}: does not exist")
    if not path.is_dir():
        return [path]
    inside = sorted(
        file
        for file in path.iterdir()
        if file.name.endswith(SUFFIXES)
        and not (file.suffix in {".zstd", ".active"} and file.with_suffix("").exists())
    )
    named, trouble = _named(path / METADATA)
    if there := [file for file in named if file.is_file()]:
        if missing := sorted({file.name for file in named} - {file.name for file in there}):
            notes.note(f"log {path}: {METADATA} names files that are not there: {', '.join(missing)}")
        if more := sorted({file.name for file in inside} - {file.name for file in there}):
            notes.note(
                f"log {path}: {METADATA} does not name these files, which are left out: {', '.join(more)}"
            )
        return there
    if not inside:
        logs = sorted(found.name for found in path.iterdir() if (found / METADATA).is_file())
        hint = f"; name one of the logs in it: {', '.join(logs[:4])}" if logs else ""
        raise LogError(f"log {path}: {trouble}, and there is no .mcap, .db3 or .bag file in it{hint}")
    kinds = {
        next(suffix for suffix in _KINDS if suffix in file.suffixes): file.name for file in reversed(inside)
    }
    if len(kinds) > 1:
        shown = " and ".join(sorted(kinds.values()))
        raise LogError(
            f"log {path}: holds logs of different kinds, {shown}, and no {METADATA} says which; name one"
        )
    if kinds.keys() != {".bag"}:
        read = ", ".join(file.name for file in inside)
        notes.note(f"log {path}: {trouble}; the files in the folder are read: {read}")
    return inside


def _named(metadata: Path) -> tuple[list[Path], str]:
    """The files that a folder's metadata names; and why none of them may be there."""
    if not metadata.is_file():
        return [], f"has no {METADATA}"
    try:
        content: Any = read_yaml(metadata, "metadata")
        names = content["rosbag2_bagfile_information"]["relative_file_paths"]
        files = [*dict.fromkeys(metadata.parent / PurePath(str(name)).name for name in names)]
    except (ConfigError, KeyError, TypeError, IndexError):
        return [], f"its {METADATA} is not that of a rosbag2"
    return (
        files,
        f"of the files that its {METADATA} names none is there ({', '.join(file.name for file in files)})",
    )


def metadata_counts(path: Path) -> dict[str, int]:
    """How many messages each topic of a folder has, as its `metadata.yaml` says.

    Empty where it does not.
    """
    try:
        content: Any = read_yaml(path / METADATA, "metadata")
        topics = content["rosbag2_bagfile_information"]["topics_with_message_count"]
        return {str(one["topic_metadata"]["name"]): int(one["message_count"]) for one in topics}
    except (ConfigError, KeyError, TypeError, ValueError, IndexError, OSError):
        return {}


def is_log(path: Path) -> bool:
    """Whether a file is called like one of a log, or begins like one."""
    return path.name.endswith(SUFFIXES) or any(
        _begin(path).startswith(magic) for _, magic in _KINDS.values()
    )


def _begin(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(16)


def kind_of(path: Path, name: Path) -> str:
    """`.mcap`, `.db3`, `.bag` or `.zstd`.

    What a file says it is; errors call it `name`, where it was unpacked.

    Raises:
        LogError: it is no file, is empty, or its content is not that of a log.
        OSError: it cannot be read.
    """
    if not path.is_file():
        raise LogError(f"log {name}: is no file and no folder")
    if not (begin := _begin(path)):
        raise LogError(f"log {name}: is empty")
    for kind, (_, magic) in _KINDS.items():
        if begin.startswith(magic):
            return kind
    if (suffix := PurePath(path.name.removesuffix(".active")).suffix) in _KINDS:
        what, magic = _KINDS[suffix]
        msg = f"log {name}: is not {what}: it begins with {begin!r}, not with {magic!r}"
    else:
        known = "a rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag of version 2.0"
        msg = f"log {name}: is no log; it has to be {known}"
    raise LogError(msg)


_NAME: Final = re.compile(r"[A-Za-z]\w*/msg/[A-Za-z]\w*", re.ASCII)
_IDL_SEPARATOR: Final = "=" * 80 + "\n"
_BYTES: Final = {"byte": "uint8", "char": "uint8", "octet": "uint8"}


class LogType:
    """A type of a log.

    `own` is a store with its definition in the log, None if it has none that can be understood.

    `only_here`: whether no other definition than the log's is known on this machine.
    """

    def __init__(self, channel: Channel, path: Path, notes: LogNotes) -> None:
        """Understand the type of a channel of the log at `path`.

        If it is not known here, it is from now on.
        """
        self.name = channel.type_name
        self._begin = f"log {path}: topic {channel.topic}: {self.name}"
        self.own: Typestore | None = None
        if channel.definition:
            try:
                self.own = _understood(
                    self.name, channel.definition, channel.definition_format, channel.encoding
                )
            except Exception as error:  # rosbags' parser raises errors of many kinds
                why = f"{type(error).__name__}: {error}".splitlines()[0]
                notes.note(f"{self._begin}: its definition in the log cannot be understood ({why})")
        here = self._here()
        self.only_here = here is None and self.own is not None
        if here is not None:
            self._compare(channel, here, notes)
        elif self.own is not None:
            message_types.register(self.own.fielddefs)
        # Many nodes publish diagnostics, so that their stamps mix.
        is_one_nodes = not self.name.startswith("diagnostic_msgs/") and (here or self.own) is not None
        self.stamped = is_one_nodes and message_types.has_header(self.name)

    def converter(self) -> Callable[[bytes], bytes]:
        """What turns a ROS 1 message into CDR; it raises what rosbags raises for garbage.

        Raises:
            UnknownMessageType: neither the log nor this machine knows the type.
        """
        store, name = self.own or self._here(), self.name
        if store is None:
            raise UnknownMessageType(
                f"{self._begin} is defined neither in the log nor in an installed package"
            )
        return lambda data: bytes(store.ros1_to_cdr(data, name))

    def decode(self, data: bytes) -> Any:  # noqa: ANN401 - rosbags builds these dataclasses at run time
        """A message of this type, by the log's own definition if it has one.

        Raises:
            BadInput: the bytes are not a message of this type.
            UnknownMessageType: neither the log nor this machine knows the type.
        """
        if self.own is None:
            return message_types.decode(data, message_types.full_name(self.name))
        try:
            return self.own.deserialize_cdr(data, self.name)
        except Exception as error:  # rosbags' generated readers raise errors of many kinds
            raise BadInput(
                f"not a {self.name}: {len(data)} bytes that do not decode ({type(error).__name__}: {error})"
            ) from error

    def write_definitions(self, share: Path) -> None:
        """Write the type and those in it as `share/<package>/msg/<Name>.msg`, as packages have them."""
        if self.own is None:
            return
        for name in self.own.fielddefs:
            package, _, short = name.split("/")
            file = share / package / "msg" / f"{short}.msg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.own.gendefhash(name, {}, ros_version=2)[0], encoding="utf-8")

    def _here(self) -> Typestore | None:
        try:
            return message_types.typestore([self.name])
        except UnknownMessageType:
            return None

    def _compare(self, channel: Channel, here: Typestore, notes: LogNotes) -> None:
        """Note a definition that lays out other bytes.

        Where the log has none, a hash that is another one.
        """
        ours = _hash(here, self.name)
        theirs = channel.digest or (_hash(self.own, self.name) if self.own is not None else "")
        if self.own is not None:
            differs = _layout(self.own, self.name) != _layout(here, self.name)
        else:
            differs = theirs.startswith("RIHS01_") and ours not in {"", theirs}
        if differs:
            notes.findings.types_differing += 1
            what = f"the log defines it in another way ({theirs}) than this machine ({ours})"
            notes.note(f"{self._begin}: {what}; its messages are passed on as they are, and may not decode")


@functools.lru_cache(maxsize=256)
def _understood(name: str, definition: str, definition_format: str, encoding: str) -> Typestore:
    """A definition as a store to read CDR with; types that it names and leaves out are those of ROS 2.

    It raises errors of many kinds, as the parser does.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a type")
    types: Typesdict = {}
    if definition_format == "ros2idl":
        for part in filter(None, definition.replace("\r\n", "\n").split(_IDL_SEPARATOR)):
            types.update(
                message_types.types_of_idl(part.partition("\n")[2] if part.startswith("IDL: ") else part)
            )
    else:
        types.update(message_types.types_of_msg(definition, name))
    if encoding == "ros1":
        types.pop("std_msgs/msg/Header", None)  # ROS 2's is taken, which has no `seq`
    known = get_typestore(Stores.ROS2_JAZZY).fielddefs
    waiting = list(types)
    while waiting:
        for needed in message_types.referenced(types[waiting.pop()][1]):
            if needed not in types and needed in known:
                types[needed] = known[needed]
                waiting.append(needed)
    store = get_typestore(Stores.EMPTY)
    store.register(types)
    message_types.accept_any_text(store, name)
    return store


def _hash(store: Typestore, name: str) -> str:
    try:
        return store.hash_rihs01(name)
    except (KeyError, ValueError, TypeError):  # a type with what the hash does not cover, such as wstring
        return ""


def _layout(store: Typestore, name: str) -> tuple[object, ...]:
    def of(field: FieldDesc) -> object:
        kind, what = field
        if isinstance(what, str):
            return _layout(store, what)
        first, second = what
        if isinstance(first, str):
            return _BYTES.get(first, first)
        return kind.name, of(first), second if kind.name == "ARRAY" else 0

    return tuple(of(field) for _, field in store.fielddefs[name][1])


_ENCODINGS: Final = ("cdr", "ros1")
_STATIC: Final = "/tf_static"  # kept, also where a log does not say so
_LONG_S: Final = 60.0
_Entry = tuple[float, RawMessage | None]
_STORAGES: Final[Mapping[str, type[ChunkedFile | Db3File]]] = {
    ".mcap": McapFile,
    ".db3": Db3File,
    ".bag": Ros1Bag,
}


class LogMessage(NamedTuple):
    topic: str  # where it was published
    type_name: str  # for example `sensor_msgs/msg/Image`
    data: bytes  # CDR bytes; those of a ROS 1 log converted
    t_ns: int  # when it was received, ns since the epoch


@dataclass(frozen=True)
class LogTopic:
    name: str  # for example `/tf_static`
    # as `tf2_msgs/msg/TFMessage`; of two types, that of most messages: the others are left out
    type_name: str
    count: int = -1  # messages that the log says it has, -1: it does not say
    # whether its publisher kept messages for later subscribers (transient local)
    latched: bool = False


class LogReader(contextlib.AbstractContextManager["LogReader"]):
    """Reads a rosbag2 folder, an `.mcap` or `.db3` file, or a ROS 1 `.bag`.

    Memory does not grow with the log.

    What is damaged is left out, noted, and counted in `findings`; stamps are left as they are. One chunk of
    the log is held at a time, or several where they overlap in time.

    It has `topics` by name, `start_ns` and `end_ns` of its first and last message as far as the log says
    so, 0 otherwise, and `count` messages, -1 if it does not say.
    """

    def __init__(self, path: Path, say: Say = lambda _: None) -> None:
        """Open a log; `say` takes a line on each thing that is wrong with it and can be done without.

        Raises:
            LogError: it does not exist, is no log, or nothing of it can be read.
        """
        self.path = path
        self._notes = LogNotes(say)
        self._types: dict[tuple[str, str, str], LogType] = {}
        self._undecodable = 0  # messages that were read and are none of their type
        with contextlib.ExitStack() as files, self._guarded():
            self._storages = self._open(files)
            self._channels = self._readable()
            self._files = files.pop_all()
        spans = [storage for storage in self._storages if storage.end_ns]
        self.start_ns = min((storage.start_ns for storage in spans), default=0)
        self.end_ns = max((storage.end_ns for storage in spans), default=0)
        self._counts = {
            channel: count for storage in self._storages for channel, count in storage.counts.items()
        }
        if is_odd(self.start_ns, self.end_ns):
            with self._guarded():
                found = (span for storage in self._storages for span in storage.spans(DAY_NS))
                self.start_ns, self.end_ns, aside = set_aside(path, found, self._notes)
            for span in aside:
                for channel in span.channels:  # which of several it is of is not known
                    known = len(span.channels) == 1
                    self._counts[channel] = self._counts[channel] - span.messages if known else -1
        self.topics = self._summed()
        self._compare_metadata()
        self.count = _sum([topic.count for topic in self.topics.values()])

    @property
    def findings(self) -> LogFindings:
        return self._notes.findings

    def messages(
        self, topics: Collection[str] | None = None, start_ns: int | None = None, end_ns: int | None = None
    ) -> Iterator[LogMessage]:
        """Messages of these topics, or of all, with `start_ns <= t_ns < end_ns`, in the order of their time.

        Where damage leaves them out of order, it is noted and counted in `findings`.

        Raises:
            LogError: the log is damaged here, and nothing after it can be read.
        """
        with self._guarded():
            wanted = [channel for channel in self._channels if topics is None or channel.topic in topics]
            converters = {
                channel: convert for channel in wanted if (convert := self._converter(channel)) is not None
            }
            span_ns = self._span_ns(start_ns, end_ns)
            read = Counter[Channel]()
            stamps = {channel: Stamps() for channel in converters if self._type(channel).stamped}
            parts = [part for storage in self._storages for part in storage.parts(converters, *span_ns)]
            self.findings.out_of_order = 0
            latest_ns, noted_s = -math.inf, _LONG_S
            for t_ns, channel, raw in _in_order(parts):
                read[channel] += 1
                after_s = (t_ns - latest_ns) / NS_PER_S
                if after_s < 0:
                    self.findings.out_of_order += 1
                    if self.findings.out_of_order == 1:
                        self._notes.note(
                            f"log {self.path}: not in the order of time: a message on {channel.topic} was"
                            f" received {-after_s:.3f} s before the one that it follows; further ones are"
                            " only counted"
                        )
                elif noted_s < after_s < math.inf:  # of many, few are noted; before anybody waits for them
                    noted_s = 2 * after_s
                    until = f"until that of {t_ns} ns on {channel.topic}"
                    self._notes.note(f"log {self.path}: no message is read for {after_s:,.3f} s, {until}")
                latest_ns = t_ns
                try:
                    data = converters[channel](raw)
                except (
                    Exception
                ) as error:  # garbage leads rosbags to struct.error, AssertionError, UnicodeError, ...
                    why = f"it is left out ({type(error).__name__}: {error})"
                    what = (
                        f"topic {channel.topic}: the message of {t_ns} ns is no {channel.type_name}; {why}"
                    )
                    self._undecodable += self._notes.lost(
                        self.path, (channel.topic, t_ns), what, messages=1
                    )
                    continue
                if channel in stamps:
                    stamps[channel].add(header_stamp_ns(data), t_ns)
                yield LogMessage(channel.topic, channel.type_name, data, t_ns)
            for channel, odd in stamps.items():
                if what := str(odd):
                    self._notes.note(
                        f"log {self.path}: topic {channel.topic}: odd among {read[channel]:,} stamps: {what}"
                    )
            if start_ns is None and end_ns is None:
                self._compare_counts(converters, read)

    def part(
        self, topics: Collection[str], start_ns: int | None, end_ns: int | None
    ) -> Iterator[LogMessage]:
        """The same of a part of the log, before it what publishers kept until then for later subscribers.

        That is the newest message of each latched topic, and of `/tf_static`, which many publish, each one.
        """
        kept: dict[object, LogMessage] = {}
        if start_ns is not None:
            latched = [name for name in topics if self.topics[name].latched]
            for message in self.messages(latched, None, start_ns):
                key = message.data if message.topic == _STATIC else message.topic
                kept[key] = message._replace(t_ns=start_ns)
        for message in self.messages(topics, start_ns, end_ns):
            yield from kept.values()
            kept.clear()
            yield message

    def _span_ns(self, start_ns: int | None, end_ns: int | None) -> tuple[float, float]:
        """From when to when messages are read: all, or what is asked for, and never what is set aside."""
        first, last = (self.start_ns, self.end_ns + 1) if self.findings.set_aside else (-math.inf, math.inf)
        return max(first, -math.inf if start_ns is None else start_ns), min(
            last, math.inf if end_ns is None else end_ns
        )

    def _compare_counts(self, channels: Collection[Channel], read: Mapping[Channel, int]) -> None:
        """Note where a whole reading gave fewer messages than the file says that it has."""
        stated = {channel: self._counts[channel] for channel in channels if self._counts[channel] >= 0}
        missing = {
            channel: count - read[channel] for channel, count in stated.items() if count > read[channel]
        }
        # of these, some rows of a database have been noted one by one
        lost = sum(missing.values()) - (self.findings.messages_lost - self._undecodable)
        if lost > 0:
            shown = [
                f"{count:,} of {stated[channel]:,} on {channel.topic}" for channel, count in missing.items()
            ]
            self._notes.note(
                f"log {self.path}: of the messages that it says it has, lost are: {listed(shown)}"
            )
            self.findings.messages_lost += lost

    def _compare_metadata(self) -> None:
        """Note where a folder's metadata says that it has other numbers of messages than its files."""
        known = {name: topic.count for name, topic in self.topics.items()}
        differing = [
            f"{name} {count:,} instead of {known.get(name, 0):,}"
            for name, count in metadata_counts(self.path).items()
            if count != known.get(name, 0) >= 0
        ]
        if differing and not self.findings.set_aside:
            self._notes.note(
                f"log {self.path}: its metadata says that it has messages on {listed(differing)}"
            )

    # rosbags builds these dataclasses at run time
    def decode(self, message: LogMessage) -> Any:  # noqa: ANN401
        """A message of this log, decoded by the log's own definition of its type, else by the one known here.

        Raises:
            BadInput: the bytes are not a message of this type.
            UnknownMessageType: neither the log nor this machine knows the type.
        """
        key = (message.topic, message.type_name)
        channel = next(channel for channel in self._channels if (channel.topic, channel.type_name) == key)
        return self._type(channel).decode(message.data)

    def write_definitions(self, topics: Collection[str], prefix: Path) -> bool:
        """Write what only this log knows of these topics' types as `.msg` files.

        Returns whether there was anything.

        Processes that have `prefix` in `AMENT_PREFIX_PATH` find them there, as they find installed
        packages.
        """
        types = (self._type(channel) for channel in self._channels if channel.topic in topics)
        unknown = [found for found in types if found.only_here]
        for found in unknown:
            found.write_definitions(prefix / "share")
        return bool(unknown)

    def close(self) -> None:
        self._files.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, files: contextlib.ExitStack) -> list[ChunkedFile | Db3File]:
        storages: list[ChunkedFile | Db3File] = []
        errors: list[LogError] = []
        for path in log_files(self.path, self._notes):
            try:
                with self._guarded(path):
                    file, kind = path, kind_of(path, path)
                    if kind == ".zstd":
                        folder = Path(
                            files.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_log_"))
                        )
                        file = unpacked_file(path, folder, self._notes)
                        kind = kind_of(file, path)
                    storages.append(_STORAGES[kind](path, self._notes, file))
                files.callback(storages[-1].close)
            except LogError as error:
                if getattr(error.__cause__, "errno", None) == errno.EMFILE:  # which is not the file's fault
                    raise
                errors.append(error)
        if not storages:
            raise errors[0]
        for left_out in errors:
            self._notes.note(f"{left_out}; the other files are read")
        return storages

    def _readable(self) -> list[Channel]:
        channels = [channel for storage in self._storages for channel in storage.counts]
        readable = [channel for channel in channels if channel.encoding in _ENCODINGS]
        if others := [channel for channel in channels if channel not in readable]:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            what = f"topic {others[0].topic}{more}: serialized as {others[0].encoding!r}"
            msg = f"log {self.path}: {what}; it has to be 'cdr'"
            if not readable:
                raise LogError(msg)
            self._notes.note(f"{msg}; left out")
        return readable

    def _summed(self) -> dict[str, LogTopic]:
        found: dict[str, dict[str, int]] = {}
        latched = {one.topic for one in self._channels if one.latched or one.topic == _STATIC}
        for channel in self._channels:
            types, name = found.setdefault(channel.topic, {}), channel.type_name
            types[name] = _sum([types.get(name, 0), self._counts[channel]])
        topics = {}
        for topic, types in sorted(found.items()):
            most = max(types, key=lambda name: types[name])
            if len(types) > 1:
                shown = ", ".join(f"{name} ({count} messages)" for name, count in types.items())
                why = f"more than one type: {shown}; only {most} is read"
                self._notes.note(f"log {self.path}: topic {topic} has {why}")
            topics[topic] = LogTopic(topic, most, types[most], topic in latched)
        self._channels = [one for one in self._channels if topics[one.topic].type_name == one.type_name]
        return topics

    def _type(self, channel: Channel) -> LogType:
        key = (channel.type_name, channel.definition, channel.digest)
        if key not in self._types:
            self._types[key] = LogType(channel, self.path, self._notes)
        return self._types[key]

    def _converter(self, channel: Channel) -> Callable[[bytes], bytes] | None:
        """What makes CDR of a channel's messages.

        None, which is noted, for a ROS 1 topic of an unknown type.
        """
        found = self._type(channel)
        try:
            return unpacked_message if channel.encoding == "cdr" else found.converter()
        except UnknownMessageType as error:
            self._notes.note(f"{error}; its messages are left out")
            return None

    @contextlib.contextmanager
    def _guarded(self, path: Path | None = None) -> Iterator[None]:
        """Turns every error that a damaged file leads to into a `LogError`."""
        try:
            yield
        except TorchperfError:
            raise
        except OSError as error:
            raise LogError(
                f"log {error.filename or path or self.path}: cannot be read: {error.strerror or error}"
            ) from error
        except Exception as error:
            raise LogError(
                f"log {path or self.path}: cannot be read: it is damaged ({type(error).__name__}: {error})"
            ) from error


def _sum(counts: Collection[int]) -> int:
    return -1 if -1 in counts else sum(counts)


def _in_order(parts: Iterable[Part]) -> Iterator[RawMessage]:
    """The messages of all parts in the order of their time; each part's messages are in order already.

    A part is opened when its time comes: before that its begin stands for it.
    """

    def opened(start_ns: float, read: Callable[[], Iterator[RawMessage]]) -> Iterator[_Entry]:
        yield start_ns, None
        for message in read():
            yield message.t_ns, message
            del message  # the next one is read without it

    ordered = (opened(*part) for part in sorted(parts, key=itemgetter(0)))
    for _, message in heapq.merge(*ordered, key=itemgetter(0)):
        if message is not None:
            yield message
