"""Message types by name: CDR bytes to objects and back, without rclpy.

The `rosbags` type store knows the common packages; other types are read from the `.msg` files of
installed packages (a sourced ROS 2, or message wheels under `sys.prefix`).
"""

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from rosbags.interfaces import Nodetype
from rosbags.interfaces.typing import Typesdict
from rosbags.serde import SerdeError
from rosbags.typesys import Stores, TypesysError, get_types_from_idl, get_types_from_msg, get_typestore
from rosbags.typesys.store import Typestore

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput, UnknownMessageType

_PARTS = 3  # package/msg/Name
_LENGTH_BYTES: Final = 4  # of a list
_TEXTS: Final = ("string", "wstring")
_BYTES: Final = {"octet": "uint8", "byte": "uint8", "char": "uint8"}
_DIRECTIVE: Final = re.compile(r"^[ \t]*#[^\n]*", re.MULTILINE)  # `#include`, `#ifndef`


@functools.cache
def _store() -> Typestore:
    return get_typestore(Stores.ROS2_JAZZY)


def _share_folders() -> Iterator[Path]:
    prefixes = [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    return (Path(prefix) / "share" for prefix in prefixes if prefix)


def full_name(name: str) -> str:
    """`sensor_msgs/Image` and `sensor_msgs/msg/Image` both as the latter.

    Raises:
        UnknownMessageType: the name does not have the form `package/msg/Name`.
    """
    parts = name.split("/")
    if len(parts) == _PARTS - 1:
        parts.insert(1, "msg")
    if len(parts) != _PARTS or parts[1] != "msg" or not all(parts):
        raise UnknownMessageType(
            f"message type {name!r} does not have the form package/msg/Name, for example"
            " sensor_msgs/msg/Image"
        )
    return "/".join(parts)


def message_class(name: str) -> Any:  # noqa: ANN401 - rosbags builds these dataclasses at run time
    """The dataclass of a message type such as `nav_msgs/msg/Path`, to build messages with.

    Raises:
        UnknownMessageType: the type store does not know it and no installed package has it.
    """
    return _store().types[_known(name)]


def header(stamp_ns: int, frame_id: str) -> Any:  # noqa: ANN401
    """A `std_msgs/msg/Header` of this ROS time in ns, 0 for none, and this coordinate frame."""
    stamp = message_class("builtin_interfaces/msg/Time")(*divmod(stamp_ns, NS_PER_S))
    return message_class("std_msgs/msg/Header")(stamp, frame_id)


def stamp_ns_of(message_header: Any) -> int:  # noqa: ANN401
    """The stamp of a `std_msgs/msg/Header` in ns."""
    return int(message_header.stamp.sec) * NS_PER_S + int(message_header.stamp.nanosec)


def _known(name: str) -> str:
    """The full name of a type; the store has it from now on, and every type that it contains."""
    store = _store()
    if name in store.fielddefs or (name := full_name(name)) in store.fielddefs:
        return name
    package, _, short = name.split("/")
    for share in _share_folders():
        files = (share / package / "msg" / f"{short}{suffix}" for suffix in (".msg", ".idl"))
        if path := next((file for file in files if file.is_file()), None):
            try:
                text = path.read_text(encoding="utf-8")
                parsed = types_of_idl(text) if path.suffix == ".idl" else types_of_msg(text, name)
            except (TypesysError, OSError, UnicodeDecodeError) as error:
                raise UnknownMessageType(
                    f"message type {name!r} cannot be read from {path}: {error}"
                ) from error
            types = {key: value for key, value in parsed.items() if key not in store.fielddefs}
            for needed in (needed for _, fields in types.values() for needed in referenced(fields)):
                if needed not in types:
                    _known(needed)
            store.register(types)
            return name
    raise UnknownMessageType(
        f"message type {name!r} is unknown: no {package}/msg/{short}.msg in an installed package; install"
        f" {package}"
    )


def types_of_msg(text: str, name: str) -> Typesdict:
    """The types that a definition in a `.msg` file holds.

    A `TypesysError` where it cannot be understood.
    """
    return _with_wide_texts(get_types_from_msg(text, name))


def types_of_idl(text: str) -> Typesdict:
    """The same of an `.idl` file, as ROS writes them.

    With lines for a preprocessor, which name other files.
    """
    return _with_wide_texts(get_types_from_idl(_DIRECTIVE.sub("", text.replace("\r\n", "\n"))))


def _with_wide_texts(types: Typesdict) -> Typesdict:
    """The types with each `wstring` as what it is in CDR bytes: a list of its UTF-16 units."""

    def readable(field: Any) -> Any:  # noqa: ANN401 - a field's type as rosbags describes it
        kind, of = field
        if kind is Nodetype.BASE and of[0] == "wstring":
            return Nodetype.SEQUENCE, ((Nodetype.BASE, ("uint16", 0)), 0)
        if kind in {Nodetype.ARRAY, Nodetype.SEQUENCE} and readable(of[0]) != of[0]:
            raise TypesysError("a list of wstring is not supported")
        return field

    return {
        name: (constants, [(f, readable(of)) for f, of in fields])
        for name, (constants, fields) in types.items()
    }


def accept_any_text(store: Typestore, name: str) -> None:
    """Have the code that reads a type, and what it contains, take texts as rclpy does.

    rosbags wants UTF-8 with a NUL at the end, and refuses the whole message. ROS takes what there is up to
    the first NUL, also nothing at all, and puts a replacement character for each byte that is no UTF-8.
    """
    text = b""

    def check(data: bytes | memoryview, at: int, size: int, *, cdr: bool) -> None:
        nonlocal text
        if at < 0 or at + 4 + size > len(data):
            raise SerdeError(f"Invalid string length {size} at offset {at}.")
        text = bytes(data[at + 4 : at + 4 + size]).partition(b"\0")[0]

    class Text:
        """Stands where the generated code has `bytes`: the text that was checked just before."""

        def __init__(self, _: object) -> None: ...

        def decode(self) -> str:
            return text.decode(errors="replace")

    for reader in (store.get_msgdef(name).deserialize_cdr_le, store.get_msgdef(name).deserialize_cdr_be):
        reader.__globals__.update(check_string=check, bytes=Text)
    for needed in referenced(store.fielddefs[name][1]):
        accept_any_text(store, needed)


@functools.cache
def _reads_any_text(name: str) -> None:
    accept_any_text(_store(), name)


def referenced(fields: Iterable[Any]) -> Iterator[str]:
    """Names of the message types among a type's fields."""
    for _, field in fields:
        entry = field[1][0] if field[0].name in {"ARRAY", "SEQUENCE"} else field
        if entry[0].name == "NAME":
            yield str(entry[1])


# rosbags builds these dataclasses at run time
def empty_message(name: str, /, **own: object) -> Any:  # noqa: ANN401
    """A message with numbers 0, texts and lists empty but for its `own` fields.

    Rotations turn nothing, as in ROS.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    name = _known(name)
    fields: Any = _store().fielddefs[name][1]
    values = {field: _empty(kind, of) for field, (kind, of) in fields if field not in own}
    if name == "geometry_msgs/msg/Quaternion":
        values["w"] = 1.0
    return message_class(name)(**values | own)


def _empty(kind: Any, of: Any) -> object:  # noqa: ANN401 - a field's type as rosbags describes it
    import numpy as np  # not at the top: the command line's help needs none of it

    if kind.name == "NAME":
        return empty_message(of)
    if kind.name == "BASE":
        return "" if of[0] in _TEXTS else np.zeros(1, _BYTES.get(of[0], of[0])).item()
    (entry, entry_of), length = of
    count = length if kind.name == "ARRAY" else 0
    if entry.name == "BASE" and entry_of[0] not in _TEXTS:
        return np.zeros(count, _BYTES.get(entry_of[0], entry_of[0]))
    return [_empty(entry, entry_of) for _ in range(count)]


def field_types(name: str) -> dict[str, str]:
    """The fields of a message type.

    Of each its message type, of a list that of its elements; "" for plain values.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    fields = _store().fielddefs[_known(name)][1]
    return {field[0]: next(referenced([field]), "") for field in fields}


def typestore(names: Iterable[str]) -> Typestore:
    """A type store that knows these types, for reading and writing logs.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    for name in names:
        _known(name)
    return _store()


def register(types: Typesdict) -> None:
    """Make types known that only a log defines, as `rosbags` parses them.

    Those that are known stay as they are.
    """
    store = _store()
    store.register({name: definition for name, definition in types.items() if name not in store.fielddefs})


def warm_up(name: str) -> None:
    """Generate the code that reads and writes a type; else the first message would wait for it.

    Raises:
        UnknownMessageType: see `message_class`.
    """
    _reads_any_text(_known(name))  # and of all types that it contains
    _lists(name)


@functools.cache
def has_header(name: str) -> bool:
    """Whether the type begins with a `std_msgs/msg/Header`: then its stamp can be read from the bytes."""
    fields = _store().fielddefs[_known(name)][1]
    return bool(fields) and fields[0][1][1] == "std_msgs/msg/Header"


def bytes_before_header(name: str) -> int | None:
    """How many bytes of CDR lie before the first header.

    A list's length, as in a `MarkerArray`; None: it has none.
    """
    if has_header(name):
        return 0
    fields = _store().fielddefs[_known(name)][1]
    first: Any = fields[0][1] if fields else (None, None)
    kind, what = first
    is_list = kind is Nodetype.SEQUENCE and what[0][0] is Nodetype.NAME
    return _LENGTH_BYTES if is_list and has_header(what[0][1]) else None


def decode(data: bytes | memoryview, name: str) -> Any:  # noqa: ANN401
    """Decode CDR bytes; arrays are numpy views on `data`, which must outlive the message.

    Raises:
        BadInput: the bytes are not a message of this type.
        UnknownMessageType: see `message_class`.
    """
    name = _known(name)
    _reads_any_text(name)
    try:
        return _store().deserialize_cdr(data, name)
    except Exception as error:
        # rosbags' generated readers raise on garbage: struct.error, IndexError,
        # UnicodeError, ...
        raise BadInput(
            f"not a {name}: {len(data)} bytes that do not decode ({type(error).__name__}: {error})"
        ) from error


def encode(message: object, name: str) -> memoryview:
    """Encode a message object as little-endian CDR bytes.

    Raises:
        TypeError: a list of numbers is not what its field holds; the text names the field and both.
    """
    name = _known(name)
    _check_lists(message, name)
    return _store().serialize_cdr(message, name)


def _check_lists(message: Any, name: str) -> None:  # noqa: ANN401
    """Pass a message whose lists of numbers have the types of their fields, or at least the same bytes.

    The generated writers copy an array's bytes and ignore its type: int32 in a list of float32 would be
    published as other numbers.
    """
    for field, held, empty in _lists(name):
        given = getattr(message, field)
        if held:
            for each in given if isinstance(given, list) else [given]:
                _check_lists(each, held)
        elif (
            getattr(given, "dtype", None) is not empty.dtype
            or given.shape != (empty.size or given.size,)
            or not given.data.contiguous
        ):
            _check_list(given, empty, f"{name}.{field}")


def _check_list(given: Any, empty: Any, field: str) -> None:  # noqa: ANN401
    import numpy as np  # not at the top: the command line's help needs none of it

    sizes, wanted = list(np.shape(given)), empty.dtype
    same_bytes = (
        isinstance(given, np.ndarray) and given.itemsize == wanted.itemsize and given.data.contiguous
    )
    if not same_bytes or sizes != [empty.size or given.size] or (given.view(wanted) != given).any():
        raise TypeError(
            f"{field} is {getattr(given, 'dtype', type(given).__name__)} {sizes}; it has to be a contiguous"
            f" numpy array of {wanted} [{empty.size or 'any number'}]"
        )


@functools.cache
def _lists(name: str) -> list[tuple[str, str, Any]]:
    """The fields of a type that hold lists of numbers, or messages with such lists.

    Of each its name, the type of its messages, and the list when it is empty, or zero if its length is fixed.
    """
    empty = empty_message(name)
    return [
        (field, held, getattr(empty, field))
        for field, held in field_types(name).items()
        if (_lists(held) if held else hasattr(getattr(empty, field), "dtype"))
    ]
