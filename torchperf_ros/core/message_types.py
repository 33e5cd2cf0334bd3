"""Message types by name: CDR bytes to objects and back, without rclpy.

The `rosbags` type store knows the common packages; other types are read from the `.msg` files of
installed packages (a sourced ROS 2, or message wheels under `sys.prefix`).
"""

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rosbags.interfaces.typing import Typesdict
from rosbags.typesys import Stores, TypesysError, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from torchperf_ros.core.errors import BadInput, UnknownMessageType

_PARTS = 3  # package/msg/Name


@functools.cache
def _store() -> Typestore:
    return get_typestore(Stores.ROS2_JAZZY)


def _share_folders() -> Iterator[Path]:
    for prefix in [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]:
        if prefix:
            yield Path(prefix) / "share"


def full_name(name: str) -> str:
    """`sensor_msgs/Image` and `sensor_msgs/msg/Image` both as the latter.

    Raises:
        UnknownMessageType: the name does not have the form `package/msg/Name`.
    """
    parts = name.split("/")
    if len(parts) == _PARTS - 1:
        parts.insert(1, "msg")
    if len(parts) != _PARTS or parts[1] != "msg" or not all(parts):
        msg = f"message type {name!r} does not have the form package/msg/Name, for example sensor_msgs/msg/Image"
        raise UnknownMessageType(msg)
    return "/".join(parts)


def message_class(name: str) -> Any:  # noqa: ANN401 - rosbags builds these dataclasses at run time
    """The dataclass of a message type, to build messages with.

    Args:
        name: for example `nav_msgs/msg/Path`.

    Raises:
        UnknownMessageType: the type store does not know it and no installed package has it.
    """
    name = full_name(name)
    _ensure(name)
    return _store().types[name]


def _ensure(name: str) -> None:
    """Make sure that the store has the type and every type that it contains."""
    store = _store()
    if name in store.fielddefs:
        return
    package, _, short = name.split("/")
    for share in _share_folders():
        path = share / package / "msg" / f"{short}.msg"
        if path.is_file():
            types = {key: value for key, value in _parse(path, name).items() if key not in store.fielddefs}
            for _, fields in types.values():
                for needed in referenced(fields):
                    if needed not in types:
                        _ensure(needed)
            store.register(types)
            return
    msg = f"message type {name!r} is unknown: no {package}/msg/{short}.msg in an installed package; install {package}"
    raise UnknownMessageType(msg)


def _parse(path: Path, name: str) -> Typesdict:
    try:
        return get_types_from_msg(path.read_text(encoding="utf-8"), name)
    except (TypesysError, OSError, UnicodeDecodeError) as error:
        msg = f"message type {name!r} cannot be read from {path}: {error}"
        raise UnknownMessageType(msg) from error


def referenced(fields: Iterable[Any]) -> Iterator[str]:
    """Names of the message types among a type's fields."""
    for _, field in fields:
        entry = field[1][0] if field[0].name in {"ARRAY", "SEQUENCE"} else field
        if entry[0].name == "NAME":
            yield str(entry[1])


def field_types(name: str) -> dict[str, str]:
    """The fields of a message type: of each its message type, of a list that of its elements; "" for plain values.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    name = full_name(name)
    _ensure(name)
    fields = _store().fielddefs[name][1]
    return {field[0]: next(referenced([field]), "") for field in fields}


def typestore(names: Iterable[str]) -> Typestore:
    """A type store that knows these types, for reading and writing logs.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    for name in names:
        _ensure(full_name(name))
    return _store()


def register(types: Typesdict) -> None:
    """Make types known that only a log defines; those that are known stay as they are.

    Args:
        types: definitions as `rosbags` parses them.
    """
    store = _store()
    store.register({name: definition for name, definition in types.items() if name not in store.fielddefs})


def warm_up(name: str) -> None:
    """Generate the code that reads and writes a type and all that it contains, which otherwise the first message pays.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    name = full_name(name)
    _ensure(name)
    _store().get_msgdef(name)
    for needed in referenced(_store().fielddefs[name][1]):
        warm_up(needed)


@functools.cache
def has_header(name: str) -> bool:
    """Whether the type's first field is a `std_msgs/msg/Header`, so that its stamp can be read from the bytes."""
    name = full_name(name)
    _ensure(name)
    fields = _store().fielddefs[name][1]
    return bool(fields) and fields[0][1][1] == "std_msgs/msg/Header"


def decode(data: bytes | memoryview, name: str) -> Any:  # noqa: ANN401
    """Decode CDR bytes; arrays are numpy views on `data`, which must outlive the message.

    Raises:
        BadInput: the bytes are not a message of this type.
        UnknownMessageType: see `message_class`.
    """
    _ensure(name)
    try:
        return _store().deserialize_cdr(data, name)
    except Exception as error:
        # rosbags' generated readers raise whatever garbage leads them to: struct.error, IndexError, UnicodeError, ...
        msg = f"not a {name}: {len(data)} bytes that do not decode ({type(error).__name__}: {error})"
        raise BadInput(msg) from error


def encode(message: object, name: str) -> memoryview:
    """Encode a message object as little-endian CDR bytes."""
    _ensure(name)
    return _store().serialize_cdr(message, name)
