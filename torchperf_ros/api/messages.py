"""Message types by name: CDR bytes to objects and back, without rclpy.

The `rosbags` type store knows the common packages; other types are read from the `.msg` files of
installed packages (a sourced ROS 2, or message wheels under `sys.prefix`).
"""

import functools
import os
import re
import reprlib
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
    prefixes = filter(None, [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix])
    files = (
        Path(prefix, "share", package, "msg", f"{short}{suffix}")
        for prefix in prefixes
        for suffix in (".msg", ".idl")
    )
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise UnknownMessageType(
            f"message type {name!r} is unknown: no {package}/msg/{short}.msg in an installed package; install"
            f" {package}, or source the workspace that has it"
        )
    try:
        text = path.read_text(encoding="utf-8")
        parsed = types_of_idl(text) if path.suffix == ".idl" else types_of_msg(text, name)
    except (TypesysError, OSError, UnicodeDecodeError) as error:
        raise UnknownMessageType(f"message type {name!r} cannot be read from {path}: {error}") from error
    types = {key: value for key, value in parsed.items() if key not in store.fielddefs}
    for _, fields in types.values():
        for needed in set(referenced(fields)) - types.keys():
            _known(needed)
    store.register(types)
    return name


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
        # rosbags knows the type in an `.idl` file. In a `.msg` file it takes it for one of the package.
        if (kind is Nodetype.BASE and of[0] == "wstring") or (
            kind is Nodetype.NAME and of.endswith("/msg/wstring")
        ):
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
    _unchecked(_known(name))


@functools.cache
def has_header(name: str) -> bool:
    """Whether the type begins with a `std_msgs/msg/Header`: then its stamp can be read from the bytes."""
    fields = _store().fielddefs[_known(name)][1]
    return bool(fields) and fields[0][1][1] == "std_msgs/msg/Header"


def bytes_before_header(name: str) -> int | None:
    """How many bytes of CDR lie before the first header.

    A list's length, as in a `MarkerArray`; None: it has none.
    """
    first: Any = next(iter(_store().fielddefs[_known(name)][1]), None)
    if first is None or has_header(name):
        return None if first is None else 0
    held = field_types(name)[first[0]] if first[1][0] is Nodetype.SEQUENCE else ""
    return _LENGTH_BYTES if held and has_header(held) else None


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
        TypeError: a field cannot hold its value; the text names both, and what it has to be.
    """
    name = _known(name)
    try:
        _check_fields(message, name)
        return _store().serialize_cdr(message, name)
    except Exception as error:  # the generated writers raise struct.error, AttributeError, ...
        raise TypeError(_fault(message, name, name) or str(error)) from error


def _fault(message: Any, name: str, where: str) -> str:  # noqa: ANN401
    """What is wrong with the first field of a message, or of one inside it, that cannot be written alone.

    "" if there is none.
    """
    for field, held in field_types(name).items():
        alone = empty_message(name)
        value: Any = getattr(message, field, None)
        form = ", a contiguous numpy array" if hasattr(getattr(alone, field), "dtype") else ""
        try:
            setattr(alone, field, value)
            _check_fields(alone, name)
            _store().serialize_cdr(alone, name)
        except Exception:
            is_list = isinstance(value, (list, tuple))
            parts = (
                _fault(part, held, f"{where}.{field}" + f"[{number}]" * is_list)
                for number, part in enumerate(value if is_list else [value])
                if held and all(hasattr(part, one) for one in field_types(held))
            )
            given = getattr(value, "__msgtype__", f"{reprlib.repr(value)} ({type(value).__name__})")
            if getattr(value, "shape", ()):
                given = f"{value.dtype} {list(value.shape)}"
            wanted = next(  # as ROS writes it, for example `float32[<=3]`
                words[0]
                for words in map(str.split, _store().generate_msgdef(name, 2)[0].splitlines())
                if words[1:] == [field]
            )
            return next(filter(None, parts), f"{where}.{field} is {given}; it has to be {wanted}{form}")
    return ""


def _check_fields(message: Any, name: str) -> None:  # noqa: ANN401
    """Pass a message whose fields are right that the generated writers take as they come.

    They copy an array's bytes and ignore its type: int32 in a list of float32 would be published as other
    numbers. They take anything for a bool, and texts and lists of any length.
    """
    for field, held, empty, most in _unchecked(name):
        given = getattr(message, field)
        if held:
            for each in given if isinstance(given, (list, tuple)) else [given]:
                _check_fields(each, held)
        elif (
            given is not True
            and given is not False
            and (
                getattr(given, "dtype", None) is not getattr(empty, "dtype", name)
                or given.shape != (empty.size or given.size,)
                or not given.data.contiguous
                or most
            )
            and not _fits(given, empty, most)
        ):
            raise TypeError(field)


def _fits(given: Any, empty: Any, most: int) -> bool:  # noqa: ANN401
    """Whether it is what its field holds, within its bound; of a list of numbers the same bytes will do."""
    import numpy as np  # not at the top: the command line's help needs none of it

    if empty is False:
        return given in (True, False)
    if (wanted := getattr(empty, "dtype", None)) is None:  # writers take a text for a list of texts
        return isinstance(given, str) is isinstance(empty, str) and (
            not most or len(given.encode() if isinstance(given, str) else given) <= most
        )
    return (
        isinstance(given, np.ndarray)
        and given.itemsize == wanted.itemsize
        and given.shape == (empty.size or given.size,)
        and given.data.contiguous
        and bool(given.dtype == wanted or (given.view(wanted) == given).all())
        and not 0 < most < given.size
    )


@functools.cache
def _unchecked(name: str) -> list[tuple[str, str, Any, int]]:
    """The fields of a type, and of those in it, that hold lists of numbers, a bool, or what has a bound.

    Of each its name, the type of its messages, its value when it is empty, and its bound.
    """
    empty, found = empty_message(name), []
    fields: Any = _store().fielddefs[name][1]
    for field, (kind, of) in fields:
        value, held = getattr(empty, field), field_types(name)[field]
        most = of[1] if kind in {Nodetype.BASE, Nodetype.SEQUENCE} else 0
        if held and _unchecked(held):
            found.append((field, held, value, 0))
        if most or value is False or hasattr(value, "dtype") or (value == [] and not held):
            found.append((field, "", value, most))
    return found
