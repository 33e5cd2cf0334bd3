"""`torchperf make-log`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

_BAD_INPUT = 2
_INTERRUPTED = 130
_LEAST_PX, _MOST_PX = 8, 8192


def make_log(  # noqa: PLR0913, PLR0917 - the options of the command
    output: Annotated[Path, typer.Argument(help="A file .mcap, .db3 or .bag, or, without a suffix, a rosbag2 folder.")],
    seconds: Annotated[float, typer.Option(min=0.01, help="How long the drive is.")] = 10.0,
    rate: Annotated[float, typer.Option(min=0.1, max=1000.0, help="Images per second; odometry has 30.")] = 30.0,
    size: Annotated[
        str, typer.Option(metavar="WxH", help=f"Of the images, {_LEAST_PX} to {_MOST_PX} pixels each way.")
    ] = "1280x720",
    compressed: Annotated[bool, typer.Option("--compressed", help="JPEG images instead of rgb8.")] = False,
    jitter_ms: Annotated[
        float, typer.Option(min=0.0, max=1000.0, help="Standard deviation of the time from stamp to receipt.")
    ] = 0.0,
    drop: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of messages that are lost.")] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND@S[:S]", help="What goes wrong, from which second on, for how long; again for more."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of delays and losses.")] = 1,
    format_: Annotated[
        str | None,
        typer.Option("--format", help="mcap, db3 or bag (ROS 1); default: as the name says, for a folder mcap."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a log that is there.")] = False,
) -> None:
    """Write a synthetic drive: a log for tests and demos, of any length.

    /camera/image_raw has sensor_msgs/Image, rgb8; with --compressed it is
    /camera/image_raw/compressed, with JPEG. /odom has nav_msgs/Odometry: 15 m/s
    straight ahead. /ground_truth/objects has visualization_msgs/MarkerArray: the
    cars, as cubes in base_link; `points` has the corners of each one's box in the
    image, in pixels. A ROS 1 bag has no markers.

    Faults: gap (no messages), zero-stamp, backward-stamp (1 s), jump-stamp
    (1 h), repeat-stamp, other-size (half), black, frozen, truncated (half of
    each image's bytes). Without a duration each lasts half a second.

    The same arguments give the same bytes. An rgb8 image of 1280x720 takes
    2.8 MB: 83 MB per second at 30 Hz.

    Example: torchperf make-log drive.mcap --seconds 60 --compressed
             --jitter-ms 2 --drop 0.01 --fault gap@20 --fault black@40:2

    Exit status: 0 if the log is written, 2 if it cannot be, 130 if
    interrupted; then nothing is left under its name.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from torchperf_ros.demo.make_log import DriveLog, fault_of, write_drive
    from torchperf_ros.frame.errors import TorchperfError

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    try:
        width, height = _size(size)
        faults = tuple(fault_of(text) for text in fault or [])
        drive = DriveLog(seconds, rate, width, height, compressed, jitter_ms, drop, faults, seed)
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(output.name, total=None)
            write_drive(
                output,
                drive,
                format_=format_,
                force=force,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except TorchperfError as error:
        _fail(str(error), _BAD_INPUT)
    except KeyboardInterrupt:
        _fail("interrupted; nothing was written", _INTERRUPTED)
    size_bytes = sum(f.stat().st_size for f in ([output] if output.is_file() else output.iterdir()))
    typer.echo(f"wrote {output}, {size_bytes / 1e6:.1f} MB")


def _size(text: str) -> tuple[int, int]:
    pixels = [int(side) for side in text.split("x")] if re.fullmatch(r"[0-9]{1,5}x[0-9]{1,5}", text) else []
    if not pixels or not _LEAST_PX <= min(pixels) <= max(pixels) <= _MOST_PX:
        least, most = f"{_LEAST_PX}x{_LEAST_PX}", f"{_MOST_PX}x{_MOST_PX}"
        _fail(f"--size {text!r} has to be like 1280x720, from {least} to {most}", _BAD_INPUT)
    return pixels[0], pixels[1]


def _fail(text: str, status: int) -> None:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(status)
