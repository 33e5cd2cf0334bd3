"""Where things lie in a message's CDR bytes.

Alignment, texts and headers, for readers that need a few fields only.
"""

import struct

from torchperf_ros.frame.clock import NS_PER_S

_COUNT = {order: struct.Struct(f"{order}I") for order in "<>"}
_HEADER = {order: struct.Struct(f"{order}iII") for order in "<>"}


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
