"""The commands on recorded logs that are one call each: play, make-log, report."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools import shell

_LEAST_PX, _MOST_PX = 8, 8192


def play(  # noqa: PLR0913, PLR0917 - options of a command line
    log: Annotated[Path, Argument(help="A rosbag2 folder, an .mcap or .db3 file, or a ROS 1 .bag.")],
    rate: Annotated[float, Option(min=0.01, max=100.0, help="How much faster than recorded.")] = 1.0,
    loop: Annotated[bool, Option("--loop", help="Begin again at the end, until Ctrl-C.")] = False,
    start: Annotated[float, Option(min=0.0, metavar="S", help="Leave out so much of the beginning.")] = 0.0,
    duration: Annotated[
        float | None, Option(min=0.0, metavar="S", help="Play so much; default: to its end.")
    ] = None,
    topics: Annotated[shell.Texts, Option(metavar="NAME[,NAME]", help="Play only these topics.")] = None,
    remap: Annotated[
        shell.Texts, Option(metavar="/A:=/B", help="Publish the log's /A as /B; repeatable.")
    ] = None,
    clock: Annotated[
        bool, Option("--clock", help="Publish the log's time on /clock, for use_sim_time.")
    ] = False,
    restamp: Annotated[
        bool, Option("--restamp", help="Stamp headers anew: now, or --clock's time.")
    ] = False,
    pause: Annotated[bool, Option("--pause", help="Begin with a pause: nothing goes out yet.")] = False,
    wait_for: Annotated[
        shell.Texts,
        Option(
            metavar="NODE|S",
            help="For a node until it is ready, 120 s at most; or S s at most for a subscriber on each.",
        ),
    ] = None,
) -> None:
    """Publish a log's messages onto their topics, as they were recorded.

    The bytes go out as they are, at the times at which they were received.
    Publishers are reliable, which serves every subscriber; /tf_static and what
    was latched is kept for later subscribers. Messages that go out more than
    5 ms after they are due are counted. Topics whose type is not installed here
    are left out, and named. What can be read of a broken log is played.

    In a terminal: space pauses and goes on, q ends.
    Services: /player/pause and /player/resume (std_srvs/Trigger).

    Example: torchperf play drive/ --clock --remap /camera/front:=/image

    Exit status: 0 played to its end, or to q or Ctrl-C; 1 a part of the log
    could not be read; 2 input that cannot be used.
    """
    shell.need("rclpy")
    from torchperf_ros.replay.logs.play import PlayOptions
    from torchperf_ros.replay.logs.play import play as publish

    chosen = frozenset(shell.words(",".join(topics or [])))
    names = shell.pairs("--remap", remap or (), ":=", "/A:=/B, the log's topic and its other name")
    numbers = [text for text in wait_for or () if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text)]
    nodes = [text for text in wait_for or () if text not in numbers]
    options = PlayOptions(
        rate=rate,
        loop=loop,
        start_s=start,
        duration_s=duration,
        topics=chosen or None,
        remap=names,
        clock=clock,
        restamp=restamp,
        paused=pause,
        subscribers_s=max(map(float, numbers), default=0.0),
        node=shell.node_name(nodes[-1]) if nodes else None,
    )
    with shell.progress_bars() as bars:
        status = publish(
            log, options, partial(shell.say, bars.console), shell.follow(bars, log.name, per_s=1e9)
        )
    raise typer.Exit(status)


def make_log(  # noqa: PLR0913, PLR0917 - one parameter for each option
    output: Annotated[
        Path, Argument(help="A .mcap, .db3 or .bag (ROS 1), or, without a suffix, a rosbag2 folder.")
    ],
    seconds: Annotated[float, Option(min=0.01, help="How long the drive is.")] = 10.0,
    size: Annotated[
        str, Option(metavar="WxH", help=f"Of images, {_LEAST_PX} to {_MOST_PX} px each way.")
    ] = "1280x720",
    compressed: Annotated[bool, Option("--compressed", help="JPEG images instead of rgb8.")] = False,
    cameras: Annotated[int, Option(min=1, max=8, help="Several: on /front/image, /left/image ...")] = 1,
    jitter_ms: Annotated[
        float, Option(min=0.0, max=1000.0, help="Standard deviation from stamp to receipt.")
    ] = 0.0,
    drop: Annotated[float, Option(min=0.0, max=1.0, help="Share of messages that are lost.")] = 0.0,
    fault: Annotated[
        shell.Texts, Option(metavar="KIND@S[:S]", help="From second S on, for S s; repeatable.")
    ] = None,
    force: shell.Force = False,
) -> None:
    """Write a synthetic drive: a log for tests and demos, of any length.

    /camera/image_raw has sensor_msgs/Image, rgb8; with --compressed it is
    /camera/image_raw/compressed, with JPEG. /odom has nav_msgs/Odometry: 15 m/s
    straight ahead. /ground_truth/objects has visualization_msgs/MarkerArray: the
    cars, as cubes in base_link; `points` has the corners of each one's box in the
    image, in pixels. A ROS 1 bag has no markers. Several cameras have the topics
    /front/image, /left/image, /right/image, /rear/image and so on, each with
    another part of the road.

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
    from torchperf_ros.tools.demo.make_log import DriveLog, fault_of, write_drive

    try:
        width, height = _size(size)
        faults = tuple(fault_of(text) for text in fault or [])
        drive = DriveLog(
            seconds,
            width=width,
            height=height,
            compressed=compressed,
            cameras=cameras,
            jitter_ms=jitter_ms,
            drop=drop,
            faults=faults,
        )
        with shell.progress_bars() as bars:
            write_drive(output, drive, force=force, progress=shell.follow(bars, output.name, 1e9))
    except KeyboardInterrupt:
        shell.fail("interrupted; nothing was written", 130)
    _wrote(
        output, sum(file.stat().st_size for file in ([output] if output.is_file() else output.iterdir()))
    )


def _size(text: str) -> tuple[int, int]:
    pixels = [int(side) for side in text.split("x")] if re.fullmatch(r"[0-9]{1,5}x[0-9]{1,5}", text) else []
    if not pixels or not _LEAST_PX <= min(pixels) <= max(pixels) <= _MOST_PX:
        least, most = f"{_LEAST_PX}x{_LEAST_PX}", f"{_MOST_PX}x{_MOST_PX}"
        raise ConfigError(f"--size {text!r} has to be like 1280x720, from {least} to {most}")
    return pixels[0], pixels[1]


def report(
    logs: Annotated[
        shell.Files, Argument(help="Logs, .jsonl records, runs of a replay, incidents' folders.")
    ] = None,
    output: Annotated[Path, Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    live: Annotated[
        float, Option(min=0.0, metavar="SECONDS", help="Listen to a running node for so long, too.")
    ] = 0.0,
    node: Annotated[
        shell.Text, shell.node_option("--node", "Default: all in a log, /perf with --live.")
    ] = None,
) -> None:
    """Show how the models did, on one page to open, keep and send: it needs no network.

    Latency against its budget, tiers and health over time; where the time goes;
    memory and its trend; anomalies; the worst frames with the images they were
    computed from, if the log has them. The page lists what a log lacks. Several
    logs are put side by side. Record one with:

        ros2 bag record -e '/perf/.*|/diagnostics|/camera/image_raw'

    Example: torchperf report monday/ tuesday.mcap -o week.html

    Exit status: 0, or 2 for a log that cannot be used.
    """
    if not logs and not live:
        shell.fail("name a log, or --live SECONDS")
    shell.check_outputs({"--output": output})
    shell.need("plotly", "jinja2")
    shell.need(*(["rclpy"] if live else []))
    from torchperf_ros.observe.runs.report import write_report
    from torchperf_ros.replay.input_pictures import input_pictures
    from torchperf_ros.replay.run_reading import read_runs

    with shell.progress_bars() as bars:
        runs = [
            run
            for log in logs or []
            for run in read_runs(log, shell.follow(bars, f"reading {log.name}"), node)
        ]
        if live:
            from torchperf_ros.observe.top import listen_for

            name = node or "/perf"
            runs.append(listen_for(name, live, shell.follow(bars, f"listening to {name}", per_s=1e3)))
        drawing = bars.add_task("drawing", total=None, at="")
        size_bytes = write_report(
            runs, output, lambda text: bars.update(drawing, description=text), input_pictures
        )
    _wrote(output, size_bytes)


def _wrote(path: Path, size_bytes: int) -> None:
    typer.echo(f"wrote {path}, {size_bytes / 1e6:.1f} MB")
