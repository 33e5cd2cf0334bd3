"""Where things lie in a message's CDR bytes: alignment, texts and headers, for readers that need a few fields only."""

import struct

from torchperf_ros.frame.clock import NS_PER_S


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
    at = aligned(at, 4)
    end = at + 4 + int(struct.unpack_from(f"{order}I", message, at)[0])
    if end > len(message):
        raise struct.error(f"a text of {end - at - 4} bytes ends beyond the message's {len(message)}")
    return message[at + 4 : end].rstrip(b"\0"), end


def header_at(message: bytes, at: int, order: str) -> tuple[int, bytes, int]:
    """A `std_msgs/Header`: its stamp in ns, its `frame_id`, and where it ends.

    Raises:
        struct.error: the message ends before.
    """
    at = aligned(at, 4)
    seconds, nanoseconds = struct.unpack_from(f"{order}iI", message, at)
    frame_id, end = text_at(message, at + 8, order)
    return seconds * NS_PER_S + nanoseconds, frame_id, end
