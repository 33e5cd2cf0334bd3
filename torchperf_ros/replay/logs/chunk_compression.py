"""Chunks of logs, unpacked: never to more bytes than they claim to have, and as far as they go if they are cut off."""

import bz2
from collections.abc import Callable, Mapping
from typing import Final

import lz4.frame  # type: ignore[import-untyped]
import zstandard

from torchperf_ros.replay.logs.log_storage import MAX_CHUNK_BYTES, Damaged

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def _zstd(data: bytes, limit: int) -> bytes:
    if zstandard.frame_content_size(data) == limit:  # in one go, without a window
        try:
            return zstandard.ZstdDecompressor().decompress(data)
        except zstandard.ZstdError:
            pass  # cut off: whatever there is
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        return reader.read(limit)


_UNPACK: Final[Mapping[str, Callable[[bytes, int], bytes]]] = {
    "": lambda data, limit: data[:limit],
    "none": lambda data, limit: data[:limit],
    "zstd": _zstd,
    "lz4": lambda data, limit: bytes(lz4.frame.LZ4FrameDecompressor().decompress(data, max_length=limit)),
    "bz2": lambda data, limit: bz2.BZ2Decompressor().decompress(data, max_length=limit),
}


def unpacked(compression: str, data: bytes, raw_bytes: int, *, whole: bool = True) -> bytes:
    """The bytes of a chunk.

    Args:
        compression: `zstd`, `lz4`, `bz2`, or `none` or empty.
        data: as in the file.
        raw_bytes: how many it claims to be.
        whole: False if `data` is cut off; then fewer bytes are fine.

    Raises:
        Damaged: it cannot be unpacked, or is shorter than it claims.
    """
    if compression not in _UNPACK:
        msg = f"it is compressed as {compression!r}; known are zstd, lz4, bz2"
        raise Damaged(msg)
    if raw_bytes > MAX_CHUNK_BYTES:
        msg = f"it claims to hold {raw_bytes:,} bytes"
        raise Damaged(msg)
    try:
        raw = _UNPACK[compression](data, raw_bytes)
    except Exception as error:  # each of the libraries has errors of its own, and garbage leads to any of them
        msg = f"it cannot be unpacked ({type(error).__name__}: {error})"
        raise Damaged(msg) from error
    if whole and len(raw) != raw_bytes:
        msg = f"it unpacks to {len(raw):,} bytes instead of {raw_bytes:,}"
        raise Damaged(msg)
    return raw


def unpacked_message(data: bytes) -> bytes:
    """A message that was compressed by itself, as rosbag2 does in its mode `message`.

    Raises:
        Damaged: it cannot be unpacked.
    """
    try:
        raw_bytes = zstandard.frame_content_size(data)
    except zstandard.ZstdError as error:
        msg = f"a message cannot be unpacked ({error})"
        raise Damaged(msg) from error
    known = raw_bytes >= 0
    return unpacked("zstd", data, raw_bytes if known else MAX_CHUNK_BYTES, whole=known)
