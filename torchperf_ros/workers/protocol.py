"""What node and worker say to each other: fixed structs for frames, small JSON objects for everything else.

Two `SOCK_SEQPACKET` sockets per worker keep message borders. Payloads are in shared memory: the frame's in
the stage's ring, the result's in the worker's own area. Every message starts with the version; lengths are
checked on both sides. No pickle.
"""

import contextlib
import json
import signal
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torchperf_ros.api.errors import ProtocolError

VERSION = 7
MAX_CONTROL_BYTES = 65_536
_MAX_TEXT = 8_000
_CUT_TO = (2_000, 500, 125)
STACK_SIGNAL = signal.SIGUSR1
# A worker that gets this signal appends its stacks to this file in its TMPDIR, even if its model
# hangs.
STACK_FILE = "stacks.txt"


OBSERVE: Final = 1
# What a worker is asked to do with a frame, or both; numbers, as an enum's operators take
# microseconds.
RUN: Final = 2

# Node to worker: a request is about to follow, stay awake for it. None has to follow.
SOON: Final = b"soon"


_REQUEST = struct.Struct("<HHIQQQQIIH")
SHAPES_BYTES: Final = 48
_RESPONSE = struct.Struct(f"<HHIQQ4qIhHH{SHAPES_BYTES}s")
RESPONSE_BYTES: Final = _RESPONSE.size


REQUEST_BYTES: Final = _REQUEST.size


class Request(NamedTuple):
    """Node to worker: the frame at `offset` of the ring, `length` bytes.

    For RUN: the tier, and the monotonic time in ns by which the answer has to leave, 0 if no
    answer waits for it. For OBSERVE: how many started frames this worker was not given since the last one
    that it observed. An anytime model ends after step `last_step`, 0: when it is done, or its frame is
    answered. `stream` is the index of the one that the frame is of. One packet may hold several requests:
    a batch.
    """

    kind: int
    tier: int
    seq: int
    offset: int
    length: int
    leave_ns: int = 0
    missed: int = 0
    last_step: int = 0
    stream: int = 0

    def pack(self) -> bytes:
        """As bytes."""
        return _REQUEST.pack(VERSION, *self)


@dataclass(slots=True)
class Response:
    """Worker to node, for RUN.

    Outcome index, and the length of the result (or of the reason) in the worker's area.

    Step times are in ns, -1 where the step was not reached. `step` is how far an anytime model has come, 0
    for others; `scene` the index of the one that the adapter named, -1: none. `shapes` has those of the
    model's inputs, like `1x3x480x640 1x6`, with zeros up to `SHAPES_BYTES`; empty where preprocessing gave
    none. `stream` is the frame's; `place` says which of the area's places holds the result.
    """

    outcome: int
    tier: int
    seq: int
    length: int
    decode_ns: int
    preprocess_ns: int
    inference_ns: int
    postprocess_ns: int
    step: int = 0
    scene: int = -1
    stream: int = 0
    place: int = 0
    shapes: bytes = b""

    def pack(self) -> bytes:
        """As bytes."""
        return _RESPONSE.pack(
            VERSION,
            self.outcome,
            self.tier,
            self.seq,
            self.length,
            self.decode_ns,
            self.preprocess_ns,
            self.inference_ns,
            self.postprocess_ns,
            self.step,
            self.scene,
            self.stream,
            self.place,
            self.shapes,
        )


def shapes_text(shapes: Iterable[Sequence[int]]) -> bytes:
    """Shapes as `Response` has them; what does not fit is cut, and ends in dots."""
    text = " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes).encode()
    return text if len(text) <= SHAPES_BYTES else text[: SHAPES_BYTES - 3] + b"..."


def peer_pid(node: socket.socket) -> int:
    """The process that made this socket pair.

    The node, also where a fork server stands between it and the worker.
    """
    credentials = struct.Struct("3i")  # pid, uid, gid, see unix(7)
    return int(
        credentials.unpack(node.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[0]
    )


def _unpack(layout: struct.Struct, data: bytes, what: str) -> tuple[Any, ...]:
    """The fields of a message behind its version; another length or version is a `ProtocolError`."""
    if len(data) != layout.size:
        raise ProtocolError(f"{what} of {len(data)} bytes; version {VERSION} has {layout.size}")
    version, *fields = layout.unpack(data)
    if version != VERSION:
        raise ProtocolError(f"{what} of version {version}; this side speaks version {VERSION}")
    return tuple(fields)


def unpack_request(data: bytes) -> Request:
    """Parse a request; raises `ProtocolError` for another length or version."""
    return Request(*_unpack(_REQUEST, data, "request"))


def unpack_requests(data: bytes) -> list[Request]:
    """Parse a packet, of one request or those of a batch; raises `ProtocolError` as `unpack_request`."""
    if len(data) <= REQUEST_BYTES:
        return [unpack_request(data)]
    begins = range(0, len(data), REQUEST_BYTES)
    return [unpack_request(data[begin : begin + REQUEST_BYTES]) for begin in begins]


def unpack_response(data: bytes) -> Response:
    """Parse a response; raises `ProtocolError` for another length or version."""
    response = Response(*_unpack(_RESPONSE, data, "response"))
    response.shapes = response.shapes.rstrip(b"\0")
    return response


def pack_control(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A control message as bytes; long texts keep their end, where a traceback says what happened."""
    short = {key: value[-_MAX_TEXT:] if isinstance(value, str) else value for key, value in fields.items()}
    text = json.dumps({"version": VERSION, "kind": kind, **short}, ensure_ascii=False)
    data = text.encode(errors="replace")
    if len(data) > MAX_CONTROL_BYTES:
        raise ProtocolError(f"control message {kind!r} of {len(data)} bytes; at most {MAX_CONTROL_BYTES}")
    return data


def pack_report(kind: str, **fields: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """A control message for people, as bytes.

    Texts anywhere in it are cut, shorter and shorter, until it fits.
    """
    for most in _CUT_TO:
        with contextlib.suppress(ProtocolError):
            return pack_control(kind, **fields)
        fields = _cut(fields, most)
    return pack_control(kind, **fields)


def _cut(value: Any, most: int) -> Any:  # noqa: ANN401 - any JSON value
    match value:
        case str() if len(value) > most:
            return f"...{value[-most:]}"
        case dict():
            return {key: _cut(each, most) for key, each in value.items()}
        case list() | tuple():
            return [_cut(each, most) for each in value]
        case _:
            return value


def unpack_control(data: bytes) -> dict[str, Any]:
    """Parse a control message.

    Raises:
        ProtocolError: not JSON, no kind, or another version.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"control message of {len(data)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict) or message.get("version") != VERSION or "kind" not in message:
        raise ProtocolError(
            f"control message without kind or of another version than {VERSION}: {str(message)[:100]}"
        )
    return message
