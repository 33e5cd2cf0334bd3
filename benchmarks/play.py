"""Whether a played log keeps its time, on an idle machine and on one whose cores are busy.

A log of images and of odometry at 200 Hz, not compressed and compressed, is played by `torchperf play` to nobody. What
goes out more than 5 ms after it is due is late. Then the same while other processes keep every core busy several times
over.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from mcap.writer import CompressionType, Writer

from benchmarks.rig.arguments import add_camera, arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.message_types import encode, message_class, typestore
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.world.road_scene import ODOMETRY_TYPE, odometry_cdr

_IMAGE: Final = "sensor_msgs/msg/Image"
_START_NS: Final = 1_700_000_000 * NS_PER_S
_ODOMETRY_HZ: Final = 200
_SUMMARY: Final = re.compile(r"played ([\d,]+) messages in ([\d.]+) s, (?:(\d+) late|none later).* ([\d.]+) ms")
_EPILOG = """\
target: nothing is late on an otherwise idle machine

examples:
  ./run bench play
  ./run bench play --seconds 60 --busy 4 --json play.json"""


def main() -> int:
    """Measure, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the log (default 20)")
    parser.add_argument("--busy", type=int, default=4, help="processes for each core that keep it busy (default 4)")
    add_camera(parser)
    arguments = parser.parse_args()
    report = Report("play", arguments)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torchperf_play_") as folder:
        for name, compression in (("none", CompressionType.NONE), ("zstd", CompressionType.ZSTD)):
            log = Path(folder) / f"{name}.mcap"
            say(f"writing {arguments.seconds:g} s, compression {name}")
            _write(log, arguments, compression)
            for busy in dict.fromkeys((0, arguments.busy)):
                say(f"playing it with {busy} busy processes for each core")
                with _busy(busy * (psutil.cpu_count() or 1)):
                    figures[f"{name}, {busy} busy processes a core"] = _play(log)
    keys = ("messages", "took_s", "late", "worst_late_ms")
    report.table(
        f"{arguments.size} rgb8 at {arguments.rate:g} Hz and odometry at {_ODOMETRY_HZ} Hz",
        ("compression and load", "messages", "took s", "late", "latest ms"),
        [[name, *(row[key] for key in keys)] for name, row in figures.items()],
    )
    idle = [row["late"] for name, row in figures.items() if ", 0 busy" in name]
    report.finish(figures, [Target("late messages, idle machine", sum(idle), "==", 0)])
    return 0


def _play(log: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchperf_ros.cli", "play", str(log), "--clock"]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    found = _SUMMARY.search(said)
    assert found, said
    messages, took_s, late, worst_ms = found.groups()
    return {
        "messages": int(messages.replace(",", "")),
        "took_s": float(took_s),
        "late": int(late or 0),
        "worst_late_ms": float(worst_ms),
    }


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-m", "benchmarks.rig.busy"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _write(path: Path, arguments: argparse.Namespace, compression: CompressionType) -> None:
    """Images of a gradient with some noise, which compress as those of a camera do: by a little."""
    width, height = (int(word) for word in arguments.size.split("x"))
    store = typestore({_IMAGE, ODOMETRY_TYPE})
    noise = np.random.default_rng(1).integers(0, 32, width * height * 3, dtype=np.uint8)
    pixels = noise + (np.arange(width * height * 3) // (3 * width) % 200).astype(np.uint8)
    messages = [(round(n * NS_PER_S / arguments.rate), True) for n in range(round(arguments.seconds * arguments.rate))]
    messages += [(n * NS_PER_S // _ODOMETRY_HZ, False) for n in range(round(arguments.seconds * _ODOMETRY_HZ))]
    with path.open("wb") as file:
        writer = Writer(file, compression=compression)
        writer.start(profile="ros2")
        channels = {}
        for name, topic in ((_IMAGE, "/image"), (ODOMETRY_TYPE, "/odom")):
            text, _ = store.generate_msgdef(name, ros_version=2)
            channels[name] = writer.register_channel(
                topic, "cdr", writer.register_schema(name, "ros2msg", text.encode())
            )
        for t_ns, is_image in sorted(messages):
            data = _image_cdr(t_ns, width, height, pixels) if is_image else bytes(odometry_cdr(t_ns / NS_PER_S))
            channel = channels[_IMAGE if is_image else ODOMETRY_TYPE]
            writer.add_message(channel, _START_NS + t_ns, data, _START_NS + t_ns)
        writer.finish()


def _image_cdr(t_ns: int, width: int, height: int, pixels: np.ndarray) -> bytes:
    seconds, nanoseconds = divmod(_START_NS + t_ns, NS_PER_S)
    stamp = message_class("builtin_interfaces/msg/Time")(sec=seconds, nanosec=nanoseconds)
    image = message_class(_IMAGE)(
        header=message_class("std_msgs/msg/Header")(stamp=stamp, frame_id="camera"), height=height, width=width,
        encoding="rgb8", is_bigendian=0, step=3 * width, data=pixels,
    )  # fmt: skip
    return bytes(encode(image, _IMAGE))


if __name__ == "__main__":
    sys.exit(main())
