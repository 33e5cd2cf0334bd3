"""Message types as a log defines them, compared with those known here.

ROS 1 messages converted to CDR by them.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rosbags.interfaces.typing import FieldDesc, Typesdict
from rosbags.typesys import Stores, get_typestore
from rosbags.typesys.store import Typestore

from torchperf_ros.api import messages as message_types
from torchperf_ros.api.errors import BadInput, UnknownMessageType
from torchperf_ros.replay.logs.log_storage import Channel, LogNotes

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
