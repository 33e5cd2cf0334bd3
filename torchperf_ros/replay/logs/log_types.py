"""Message types as a log defines them, compared with those known here; ROS 1 messages converted to CDR by them."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rosbags.interfaces.typing import FieldDesc, Typesdict
from rosbags.typesys import Stores, get_types_from_idl, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from torchperf_ros.core import message_types
from torchperf_ros.core.errors import BadInput, UnknownMessageType
from torchperf_ros.replay.logs.log_notes import LogNotes
from torchperf_ros.replay.logs.log_storage import Channel

_NAME: Final = re.compile(r"[A-Za-z]\w*/msg/[A-Za-z]\w*", re.ASCII)
_HEADER: Final = "std_msgs/msg/Header"
_IDL_SEPARATOR: Final = "=" * 80 + "\n"
_BYTES: Final = {"byte": "uint8", "char": "uint8", "octet": "uint8"}


def ros2_name(type_name: str) -> str:
    """`sensor_msgs/Image`, as ROS 1 writes it, as `sensor_msgs/msg/Image`; other names stay as they are."""
    package, slash, name = type_name.partition("/")
    return f"{package}/msg/{name}" if slash and "/" not in name else type_name


class LogType:
    """A type of a log.

    Attributes:
        name: for example `sensor_msgs/msg/Image`.
        own: a store with its definition in the log, None if the log has none that can be understood.
        only_here: whether no other definition than the log's is known on this machine.
    """

    def __init__(self, channel: Channel, path: Path, notes: LogNotes) -> None:
        """Understand a channel's type; if it is not known here, it is from now on.

        Args:
            channel: whose type.
            path: the log, for what is said.
            notes: told of a type that is another one here, or not what its hash says.
        """
        self.name = ros2_name(channel.type_name)
        self._begin = f"log {path}: topic {channel.topic}: {self.name}"
        self.own, own_hash = self._parsed(channel, notes)
        here = self._here()
        self.only_here = here is None and self.own is not None
        if here is None and self.own is not None:
            message_types.register(self.own.fielddefs)
            here = self._here()
        self._compare(channel, own_hash, here, notes)

    def converter(self) -> Callable[[bytes], bytes]:
        """What turns a ROS 1 message into CDR; it raises what rosbags raises for garbage.

        Raises:
            UnknownMessageType: neither the log nor this machine knows the type.
        """
        store, name = self.own or self._here(), self.name
        if store is None:
            msg = f"{self._begin} is defined neither in the log nor in an installed package"
            raise UnknownMessageType(msg)
        return lambda data: bytes(store.ros1_to_cdr(data, name))

    def decode(self, data: bytes) -> Any:  # noqa: ANN401 - rosbags builds these dataclasses at run time
        """A message of this type, by the log's own definition if it has one.

        Raises:
            BadInput: the bytes are not a message of this type.
            UnknownMessageType: nobody knows the type.
        """
        if self.own is None:
            return message_types.decode(data, message_types.full_name(self.name))
        try:
            return self.own.deserialize_cdr(data, self.name)
        except Exception as error:  # rosbags' generated readers raise whatever garbage leads them to
            msg = f"not a {self.name}: {len(data)} bytes that do not decode ({type(error).__name__}: {error})"
            raise BadInput(msg) from error

    def write_definitions(self, share: Path) -> None:
        """Write the type and those in it as `share/<package>/msg/<Name>.msg`, as installed packages have them."""
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

    def _parsed(self, channel: Channel, notes: LogNotes) -> tuple[Typestore | None, str]:
        """The log's definition and its hash: MD5 of ROS 1, RIHS01 of ROS 2."""
        if not channel.definition:
            return None, ""
        try:
            store, digest = _understood(self.name, channel.definition, channel.definition_format, channel.encoding)
        except Exception as error:  # a stranger's text; rosbags' parser raises whatever it leads to
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            notes.tell(f"{self._begin}: its definition in the log cannot be understood ({why})")
            return None, ""
        return store, digest

    def _compare(self, channel: Channel, own_hash: str, here: Typestore | None, notes: LogNotes) -> None:
        ours = _hash(here, self.name) if here is not None else ""
        comparable = channel.digest.startswith("RIHS01_") or (channel.encoding == "ros1" and channel.digest not in "*")
        if self.own is not None and here is not None and _layout(self.own, self.name) != _layout(here, self.name):
            what = f"the log defines it in another way ({channel.digest or own_hash}) than this machine ({ours})"
        elif comparable and own_hash and channel.digest != own_hash:
            what = f"its hash in the log, {channel.digest}, is not that of its definition there, {own_hash}"
        elif comparable and not own_hash and ours and channel.encoding != "ros1" and channel.digest != ours:
            what = f"its hash in the log, {channel.digest}, is not that of its definition here, {ours}"
        else:
            return
        notes.findings.types_differing += 1
        notes.tell(f"{self._begin}: {what}; its messages are passed on as they are, and may not decode")


@functools.lru_cache(maxsize=256)
def _understood(name: str, definition: str, definition_format: str, encoding: str) -> tuple[Typestore, str]:
    """A definition as a store to read CDR with, and its hash; raises whatever its text leads the parser to."""
    types = _types_of(name, definition, definition_format)
    if encoding != "ros1":
        store = _store_of(types, Stores.ROS2_JAZZY)
        digest = store.hash_rihs01(name)
    else:
        digest = _store_of(types, Stores.ROS1_NOETIC).generate_msgdef(name)[1]
        types.pop(_HEADER, None)  # ROS 2's is taken, which has no `seq`
        store = _store_of(types, Stores.ROS2_JAZZY)
    store.get_msgdef(name)
    return store, digest


def _hash(store: Typestore, name: str) -> str:
    try:
        return store.hash_rihs01(name)
    except (KeyError, ValueError, TypeError):  # a type with what the hash does not cover, such as wstring
        return ""


def _types_of(name: str, definition: str, definition_format: str) -> Typesdict:
    if not _NAME.fullmatch(name):
        msg = f"{name!r} is no name of a type"
        raise ValueError(msg)
    if definition_format != "ros2idl":
        return get_types_from_msg(definition, name)
    types: Typesdict = {}
    for part in filter(None, definition.split(_IDL_SEPARATOR)):
        types.update(get_types_from_idl(part.partition("\n")[2] if part.startswith("IDL: ") else part))
    return types


def _store_of(types: Typesdict, base: Stores) -> Typestore:
    """A store of these types; those that a definition names and leaves out are taken from `base`."""
    known = get_typestore(base).fielddefs
    types, waiting = dict(types), list(types)
    while waiting:
        for name in message_types.referenced(types[waiting.pop()][1]):
            if name not in types and name in known:
                types[name] = known[name]
                waiting.append(name)
    store = get_typestore(Stores.EMPTY)
    store.register(types)
    return store


def _layout(store: Typestore, name: str) -> tuple[object, ...]:
    """How a type is laid out in bytes, whatever its fields are called."""

    def of(field: FieldDesc) -> object:
        kind, what = field
        if isinstance(what, str):
            return _layout(store, what)
        first, second = what
        if isinstance(first, str):
            return _BYTES.get(first, first)
        return kind.name, of(first), second if kind.name == "ARRAY" else 0

    return tuple(of(field) for _, field in store.fielddefs[name][1])
