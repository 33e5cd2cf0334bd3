"""What reading a message of a log costs, beside the readers of `rosbags` and of the `mcap` package.

Three logs of the same raw images: one with checksums, one without, one in SQLite. The readers take turns over each; the
time of a message is that of one step of the iteration, the file in the page cache.
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from mcap.reader import make_reader
from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bare_stage import write_images
from benchmarks.rig.figures import distribution
from benchmarks.rig.report import Report, say
from torchperf_ros.logs.log_reader import LogReader

_EPILOG = """\
examples:
  ./run bench log_reading
  ./run bench log_reading --frames 60 --size 640x480 --json log_reading.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--frames", type=int, default=120, help="of each log (default 120)")
    parser.add_argument("--size", default="1280x720", help="of the images, rgb8 (default 1280x720)")
    parser.add_argument("--turns", type=int, default=3, help="of each reader (default 3)")
    arguments = parser.parse_args()
    report = Report("log_reading", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_logs_") as folder:
        figures = {name: _turns(path, arguments) for name, path in _logs(Path(folder), arguments).items()}
    keys = ("count", "p50", "p90", "p99", "max")
    for name, readers in figures.items():
        rows = [[reader, *(times[key] for key in keys)] for reader, times in readers.items()]
        report.table(f"{name}: {arguments.size} rgb8, ms per message", ("reader", "messages", *keys[1:]), rows)
    report.finish({"ms_per_message": figures}, [])
    return 0


def _logs(folder: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    say(f"writing three logs of {arguments.frames} images")
    width, height = (int(word) for word in arguments.size.split("x"))
    first = folder / "with_checksums.mcap"
    write_images(first, arguments.frames, width, height)
    logs = {"MCAP with checksums": first}
    store = get_typestore(Stores.ROS2_JAZZY)
    for name, plugin in (("MCAP without checksums", StoragePlugin.MCAP), ("SQLite", StoragePlugin.SQLITE3)):
        path = folder / plugin.name.lower()
        with LogReader(first) as log, Writer(path, version=9, storage_plugin=plugin) as writer:
            connection = writer.add_connection("/image", "sensor_msgs/msg/Image", typestore=store)
            for message in log.messages():
                writer.write(connection, message.t_ns, message.data)
        logs[name] = path
    return logs


def _turns(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    readers: dict[str, Callable[[Path], Iterator[object]]] = {"LogReader": _ours, "rosbags": _rosbags}
    if path.suffix == ".mcap":
        readers["mcap"] = _mcap
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn, (name, read) in itertools.product(range(arguments.turns), readers.items()):
        if not turn:
            say(f"{path.name}: {name}")
        times[name] += _steps_ms(read(path))
    return {name: distribution(values) for name, values in times.items()}


def _steps_ms(messages: Iterable[object]) -> list[float]:
    steps = []
    begin_ns = time.perf_counter_ns()
    for _ in messages:
        now_ns = time.perf_counter_ns()
        steps.append((now_ns - begin_ns) / 1e6)
        begin_ns = time.perf_counter_ns()
    return steps[1:]  # the first is the opening, too


def _ours(path: Path) -> Iterator[object]:
    with LogReader(path) as log:
        yield from log.messages()


def _rosbags(path: Path) -> Iterator[object]:
    with AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as log:
        yield from log.messages()


def _mcap(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        yield from make_reader(file, validate_crcs=True).iter_messages()


if __name__ == "__main__":
    sys.exit(main())
