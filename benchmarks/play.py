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

from benchmarks.rig.arguments import add_camera, arguments_of
from benchmarks.rig.bare_stage import IMAGE, image_cdr, write_log
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.world.road_scene import ODOMETRY_TYPE, odometry_cdr

_ODOMETRY_HZ: Final = 200
_SUMMARY: Final = re.compile(r"played ([\d,]+) messages in ([\d.]+) s, (?:(\d+) late|none later).* ([\d.]+) ms")
_EPILOG = """\
target: nothing is late on an otherwise idle machine

examples:
  ./run bench play
  ./run bench play --seconds 60 --busy 4 --json play.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the log (default 20)")
    parser.add_argument("--busy", type=int, default=4, help="processes for each core that keep it busy (default 4)")
    add_camera(parser)
    arguments = parser.parse_args()
    report = Report("play", arguments)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="torchperf_play_") as folder:
        for name in ("none", "zstd"):
            log = Path(folder) / f"{name}.mcap"
            say(f"writing {arguments.seconds:g} s, compression {name}")
            _write(log, arguments, compress=name == "zstd")
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


def _write(path: Path, arguments: argparse.Namespace, *, compress: bool) -> None:
    """Images of a gradient with some noise, which compress as those of a camera do: by a little."""
    width, height = (int(word) for word in arguments.size.split("x"))
    noise = np.random.default_rng(1).integers(0, 32, width * height * 3, dtype=np.uint8)
    image = image_cdr(width, height, noise + (np.arange(width * height * 3) // (3 * width) % 200).astype(np.uint8))
    times = [(round(n * NS_PER_S / arguments.rate), True) for n in range(round(arguments.seconds * arguments.rate))]
    times += [(n * NS_PER_S // _ODOMETRY_HZ, False) for n in range(round(arguments.seconds * _ODOMETRY_HZ))]
    messages = (
        ("/image", IMAGE, t_ns, image) if is_image else ("/odom", ODOMETRY_TYPE, t_ns, odometry_cdr(t_ns / NS_PER_S))
        for t_ns, is_image in sorted(times)
    )
    write_log(path, messages, compress=compress)


if __name__ == "__main__":
    sys.exit(main())
