"""Where things lie in a message's CDR bytes.

Alignment, texts and headers, for readers that need a few fields only.
"""

import struct

from torchperf_ros.api.clock import NS_PER_S

_COUNT = {order: struct.Struct(f"{order}I") for order in "<>"}
_HEADER = {order: struct.Struct(f"{order}iII") for order in "<>"}
_HEADER_BEGIN, _HEADER_END = 4, 12  # after the CDR encapsulation: sec (4 bytes), nanosec (4)
_STAMP = (struct.Struct(">iI"), struct.Struct("<iI"))
_LEAST_SECONDS, _MOST_SECONDS = -(2**31), 2**31 - 1  # of `builtin_interfaces/Time`


def header_stamp_ns(data: bytes | memoryview, before: int = 0) -> int:
    """`header.stamp` of a CDR message whose first field is a `std_msgs/Header`, in ns.

    0 if too short to have one.

    `before`: bytes that come before the header.
    """
    if len(data) < _HEADER_END + before:
        return 0
    seconds, nanoseconds = _STAMP[data[1] & 1].unpack_from(data, _HEADER_BEGIN + before)
    return int(seconds * NS_PER_S + nanoseconds)


def restamped(data: bytes, stamp_ns: int) -> bytes:
    """The same message with another `header.stamp`, in ns; its first field is a `std_msgs/Header`.

    A message that is too short to have one, or a time that a stamp cannot hold (past 2038), leaves it as it
    is: the very same `data`.
    """
    seconds, nanoseconds = divmod(stamp_ns, NS_PER_S)
    if len(data) < _HEADER_END or not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        return data
    stamp = _STAMP[data[1] & 1].pack(seconds, nanoseconds)
    view = memoryview(data)
    return b"".join([view[:_HEADER_BEGIN], stamp, view[_HEADER_END:]])


def aligned(at: int, size: int) -> int:
    """The next multiple of `size`, counted from the end of the encapsulation's 4 bytes."""
    return at + (4 - at) % size


def byte_order(message: bytes) -> str:
    """`<` or `>`, for `struct` and numpy.

    Raises:
        IndexError: the message is empty.
    """
    return "<" if message[1] & 1 else ">"


def text_at(message: bytes, at: int, order: str) -> tuple[bytes, int]:
    """A text without its NUL, and where it ends.

    Raises:
        struct.error: the message ends before.
    """
    begin = at + 4 + -at % 4
    end = begin + _COUNT[order].unpack_from(message, begin - 4)[0]
    if end > len(message):
        raise struct.error(f"a text of {end - begin} bytes ends beyond the message's {len(message)}")
    return message[begin:end].rstrip(b"\0"), end


def header_at(message: bytes, at: int, order: str) -> tuple[int, bytes, int]:
    """A `std_msgs/Header`: its stamp in ns, its `frame_id`, and where it ends.

    The stamp is -1 if it is no time: its seconds are negative, or its nanoseconds a second or more.

    Raises:
        struct.error: the message ends before.
    """
    begin = at + 12 + -at % 4
    seconds, nanoseconds, length = _HEADER[order].unpack_from(message, begin - 12)
    if begin + length > len(message):
        raise struct.error(f"a frame_id of {length} bytes ends beyond the message's {len(message)}")
    stamp_ns = seconds * NS_PER_S + nanoseconds if seconds >= 0 and nanoseconds < NS_PER_S else -1
    return stamp_ns, message[begin : begin + length].rstrip(b"\0"), begin + length
