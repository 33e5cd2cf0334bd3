"""Small logs of every kind that tests write themselves: two topics, a message of each every 10 ms."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from mcap.writer import CompressionType, IndexType
from mcap.writer import Writer as McapWriter
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_typestore

ROS1 = get_typestore(Stores.ROS1_NOETIC)
ROS2 = get_typestore(Stores.ROS2_JAZZY)
TEXT = "std_msgs/msg/String"
NUMBERS = "std_msgs/msg/UInt8MultiArray"
START_NS = 1_700_000_000_000_000_000
STEP_NS = 10_000_000
MESSAGES = 40
SIZE = 600  # bytes of `/numbers`


def messages(store=ROS2, count: int = MESSAGES, size: int = SIZE) -> Iterator[tuple[str, str, int, object]]:
    """Topic, type, time and message; each tells its number, and no bytes of two are alike."""
    layout = store.types["std_msgs/msg/MultiArrayLayout"](dim=[], data_offset=0)
    random = np.random.default_rng(0)
    for number in range(count // 2):
        at_ns = START_NS + number * STEP_NS
        yield "/text", TEXT, at_ns, store.types[TEXT](data=f"message {number}")
        data = random.integers(0, 256, size, np.uint8)
        yield "/numbers", NUMBERS, at_ns + STEP_NS // 2, store.types[NUMBERS](layout=layout, data=data)


def cdr(count: int = MESSAGES, size: int = SIZE) -> list[tuple[str, str, bytes, int]]:
    """What a reader gives for these messages."""
    return [(t, k, bytes(ROS2.serialize_cdr(m, k)), at) for t, k, at, m in messages(count=count, size=size)]


def rosbag2(
    path: Path,
    storage: StoragePlugin = StoragePlugin.MCAP,
    mode: CompressionMode = CompressionMode.NONE,
    entries: list[tuple[str, str, bytes, int]] | None = None,
) -> Path:
    """A rosbag2 folder as rosbags writes it."""
    writer = Writer2(path, version=9, storage_plugin=storage)
    if mode is not CompressionMode.NONE:
        writer.set_compression(mode, CompressionFormat.ZSTD)
    with writer:
        connections = {}
        for topic, kind, data, at_ns in cdr() if entries is None else entries:
            key = (topic, kind)
            if key not in connections:
                connections[key] = writer.add_connection(topic, kind, typestore=ROS2)
            writer.write(connections[key], at_ns, data)
    return path


def mcap(
    path: Path,
    entries: list[tuple[str, str, bytes, int]] | None = None,
    *,
    chunk_bytes: int = 4000,
    compression: CompressionType = CompressionType.NONE,
    encoding: str = "cdr",
    definitions: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    chunking: bool = True,
    index: IndexType = IndexType.ALL,
    before_each: Callable[[McapWriter, int], None] = lambda writer, number: None,
    at_end: Callable[[McapWriter], None] = lambda writer: None,
) -> Path:
    """An `.mcap` file as the `mcap` package writes it, with checksums.

    The last two may do to it what others do.
    """
    with path.open("wb") as file:
        writer = McapWriter(file, chunk_bytes, compression, index_types=index, use_chunking=chunking)
        writer.start(profile="ros2")
        channels = {}
        for number, (topic, kind, data, at_ns) in enumerate(cdr() if entries is None else entries):
            if (topic, kind) not in channels:
                text = (definitions or {}).get(kind) or ROS2.generate_msgdef(kind, ros_version=2)[0]
                schema = writer.register_schema(kind, "ros2msg", text.encode())
                channels[topic, kind] = writer.register_channel(topic, encoding, schema, metadata or {})
            before_each(writer, number)
            writer.add_message(channels[topic, kind], at_ns, data, 0, number)
        at_end(writer)
        writer.finish()
    return path


def ros1_bag(
    path: Path,
    compression: Writer1.CompressionFormat | None = None,
    chunk_bytes: int = 4000,
    odd_ns: Mapping[int, int] | None = None,
) -> Path:
    """A ROS 1 bag of several chunks; `odd_ns`: other times of messages by their number."""
    writer = Writer1(path)
    if compression is not None:
        writer.set_compression(compression)
    writer.chunk_threshold = chunk_bytes
    with writer:
        connections = {}
        for number, (topic, kind, at_ns, message) in enumerate(messages(ROS1)):
            if topic not in connections:
                connections[topic] = writer.add_connection(
                    topic, kind, typestore=ROS1, latching=int(topic == "/text")
                )
            writer.write(
                connections[topic], (odd_ns or {}).get(number, at_ns), ROS1.serialize_ros1(message, kind)
            )
    return path


def storage_file(folder: Path) -> Path:
    """The file inside a rosbag2 folder."""
    (file,) = (path for path in folder.iterdir() if path.name != "metadata.yaml")
    return file


KINDS: dict[str, Callable[[Path], Path]] = {
    "rosbag2 mcap": lambda folder: rosbag2(folder / "log"),
    "rosbag2 mcap, chunks compressed": lambda folder: rosbag2(folder / "log", mode=CompressionMode.STORAGE),
    "rosbag2 sqlite3": lambda folder: rosbag2(folder / "log", StoragePlugin.SQLITE3),
    "rosbag2 sqlite3, file compressed": lambda folder: rosbag2(
        folder / "log", StoragePlugin.SQLITE3, CompressionMode.FILE
    ),
    "rosbag2 mcap, file compressed": lambda folder: rosbag2(folder / "log", mode=CompressionMode.FILE),
    "rosbag2 mcap, messages compressed": lambda folder: rosbag2(
        folder / "log", mode=CompressionMode.MESSAGE
    ),
    "mcap": lambda folder: mcap(folder / "log.mcap"),
    "mcap zstd": lambda folder: mcap(folder / "log.mcap", compression=CompressionType.ZSTD),
    "mcap lz4": lambda folder: mcap(folder / "log.mcap", compression=CompressionType.LZ4),
    "mcap without chunks": lambda folder: mcap(folder / "log.mcap", chunking=False),
    "mcap without indexes": lambda folder: mcap(folder / "log.mcap", index=IndexType.NONE),
    "db3": lambda folder: storage_file(rosbag2(folder / "log", StoragePlugin.SQLITE3)),
    "bag": lambda folder: ros1_bag(folder / "log.bag"),
    "bag bz2": lambda folder: ros1_bag(folder / "log.bag", Writer1.CompressionFormat.BZ2),
    "bag lz4": lambda folder: ros1_bag(folder / "log.bag", Writer1.CompressionFormat.LZ4),
}
"""Writers of sound logs, by what they write."""
