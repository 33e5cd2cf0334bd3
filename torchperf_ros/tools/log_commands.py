"""The commands on recorded logs and on runs: replay, play, make-log, report, compare, anomalies.

Each imports what it needs when it runs.
"""

import csv
import io
import math
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.text import console_table, percent
from torchperf_ros.tools import shell
from torchperf_ros.tools.shell import (
    Command,
    File,
    Files,
    Texts,
    check_outputs,
    console,
    fail,
    files_by_suffix,
    need,
    outputs_option,
    say,
    write_output,
)

if TYPE_CHECKING:
    from rich.table import Table

    from torchperf_ros.observe.runs.comparison import Comparison
    from torchperf_ros.replay.batch_tasks import BatchOptions
    from torchperf_ros.replay.replay import ReplayResult
    from torchperf_ros.replay.replay_options import ReplayOptions


_PARTIAL = 1
_GOOD = {
    "on_time",
    "partial",
    "late",
    "starting",
}  # outcomes of frames that the model has answered, or will
_PLAIN_WIDTH = 120
_OF_LOGS = (".mcap", ".db3", ".bag", ".zstd", ".yaml")  # what no output may replace in a log's folder
_IN_ONE_LOG = (
    "metadata.yaml",
    "black_box",
)  # what a folder holds that is a log, and none to search for logs
_WORST = 5


def replay(  # noqa: PLR0913, PLR0917 - one parameter for each option
    logs: Annotated[
        list[Path], Argument(help="rosbag2 folder, .mcap, .db3 or .bag; several, or folders of such.")
    ],
    params: Annotated[
        File, Option(metavar="FILE", help="Parameter file; default: of the incident, or none.")
    ] = None,
    sets: Annotated[
        Texts, Option("--set", metavar="NAME=VALUE", help="A parameter, in place of the file's.")
    ] = None,
    maps: Annotated[
        Texts, Option("--map", metavar="LOG:=STAGE", help="The log's topic for a stage's.")
    ] = None,
    pace: Annotated[
        str, Option(help="fast: no deadlines; real: as it was; virtual: on a virtual clock.")
    ] = "fast",
    times: Annotated[
        str, Option(metavar="log|FILE", help="For virtual: step times of the log, or of a file.")
    ] = "log",
    seed: Annotated[int, Option(help="Seed of the models' random numbers and of drawn times.")] = 0,
    start: Annotated[float, Option(min=0.0, metavar="S", help="Seconds of the log to leave out.")] = 0.0,
    duration: Annotated[
        float | None, Option(min=0.001, metavar="S", help="Seconds to replay; default: all.")
    ] = None,
    output: Annotated[
        Files,
        shell.outputs_option(
            "Outputs and /perf/*, MCAP (several logs: a folder); FILE.json, FILE.parquet: summary and a"
            " row for each frame.",
        ),
    ] = None,
    inputs: Annotated[
        str, Option(metavar="all|none|TOPICS", help="Topics to copy into the MCAP.")
    ] = "none",
    dry_run: shell.DryRun = False,
    parallel: Annotated[
        str,
        Option(
            metavar="N|tcp://HOST:PORT",
            help="Several logs: so many at a time here, 0: what fits; or on a Dask cluster.",
        ),
    ] = "0",
) -> None:
    """A log through the node's stages: the same workers as live, fed with its bytes.

    What comes out: each stage's outcomes and latencies here; outputs and /perf/*
    on the log's time line with -o OUT.mcap; a row for each frame with -o RUN.json or
    RUN.parquet, for `torchperf compare` and `torchperf report`.

    A stage's input is the log's topic of the same name, else the only one of its
    type; --map says otherwise. Damage in a log is shown and passed over.

    Several logs, or a folder of them, are replayed side by side, each with its
    results in a folder of -o (default: replays); what is done is kept, and the
    same command goes on where it stopped. A cluster's workers have to see logs
    and results under the same paths. Trust its scheduler: Dask sends pickles.

    Examples:
        torchperf replay drive.mcap -o out.mcap
        torchperf replay drive/ --pace real --params perception.yaml -o run.json
        torchperf replay incident/ --pace virtual --set perception.budget_ms=40
        torchperf replay logs/ --parallel 2 -o results

    Exit status: 0, or 1 if it was interrupted, a stage's every frame failed, more than a tenth of its
    frames had no answer, or some of several logs did so (what was done is written), or 2 for input that
    cannot be used.
    """
    if len(logs) == 1 and (logs[0].is_file() or any((logs[0] / name).exists() for name in _IN_ONE_LOG)):
        from torchperf_ros.workers.fork_server import start_base

        start_base()  # it imports torch while this process imports the rest
    with shell.console(stderr=True).status("loading"):
        from torchperf_ros.replay.batch_tasks import is_batch
        from torchperf_ros.replay.replay_options import ReplayOptions
        from torchperf_ros.settings.params_file import parse_value

    form = "LOG_TOPIC:=STAGE_TOPIC, for example /camera/front:=image"
    remap = shell.pairs("--map", maps or (), ":=", form, turned=True)
    named = shell.files_by_suffix(output, "", ".json", ".parquet", inputs=logs, kept=_OF_LOGS)
    target = named.pop("", None)
    own = shell.pairs("--set", sets or (), "=", "NAME=VALUE, for example perception.budget_ms=40.0")
    options = ReplayOptions(
        params,
        remap,
        pace,
        times,
        seed,
        start,
        duration,
        inputs,
        target,
        {name: parse_value(name, value) for name, value in own.items()},
    )
    signal.signal(signal.SIGTERM, _end_as_ctrl_c)
    files = list(named.values())
    scheduler = "" if parallel.isdecimal() else parallel
    if is_batch(logs):
        from torchperf_ros.replay.batch_tasks import BatchOptions

        at_once = 0 if scheduler else int(parallel)
        batch = BatchOptions(target or Path("replays"), at_once, scheduler)
        raise typer.Exit(_many(logs, options, batch, files, dry_run))
    if scheduler:
        raise ConfigError(
            "--parallel: an address is for several logs, or a folder of them; this is one log"
        )
    raise typer.Exit(0 if _one(logs[0], options, files, dry_run=dry_run) else _PARTIAL)


def _end_as_ctrl_c(number: int, frame: FrameType | None) -> None:
    on_ctrl_c = signal.getsignal(signal.SIGINT)  # which holds it while a frame is given to a stage
    (on_ctrl_c if callable(on_ctrl_c) else signal.default_int_handler)(number, frame)


def _many(
    logs: list[Path], options: "ReplayOptions", batch: "BatchOptions", files: list[Path], dry_run: bool
) -> int:
    from torchperf_ros.replay.batch import plan_batch, replay_batch

    if files:
        raise ConfigError(
            f"{files[0]}: several logs, or a folder to search for them, write run.parquet and summary.json,"
            " each to its own folder in -o; of one log in a folder without metadata.yaml name the file"
        )
    if options.inputs != "none":
        raise ConfigError(f"--inputs {options.inputs}: is for one log; of several no output is kept")
    shown = shell.console()
    if dry_run:
        for line in plan_batch(logs, options, batch):
            shell.say(shown, line)
        return 0
    shell.need("dask", "distributed", "pyarrow", "cryptography")
    return replay_batch(logs, options, batch, shell.progress_bars(), shown)


def _one(log: Path, options: "ReplayOptions", files: list[Path], *, dry_run: bool) -> bool:
    errors, shown = shell.console(stderr=True), shell.console(_PLAIN_WIDTH)
    with errors.status("loading"):
        from torchperf_ros.observe.runs.run_log import check_run_path, write_run
        from torchperf_ros.replay.replay import plan
        from torchperf_ros.replay.replay import replay as play_back
        from torchperf_ros.replay.replay_options import prefer_this_process, read_config
    if options.inputs != "none" and options.output is None:
        raise ConfigError(
            f"--inputs {options.inputs}: there is no output to copy them into; give -o OUT.mcap"
        )
    for file in files:
        check_run_path(file)
    if dry_run:
        for line in plan(log, options):
            shell.say(shown, line)
        return True
    if options.pace == "real":
        scheduling = prefer_this_process(read_config(options, log))
        if ":" in scheduling:
            sys.stderr.write(f"scheduling is {scheduling}\n")
    with shell.progress_bars() as bars:
        result = play_back(
            log, options, shell.follow(bars, log.name, per_s=1e9), lambda text: shell.say(errors, text)
        )
    for file in files:
        write_run(result.run, file)
    shell.say(shown, f"{result.log}, times in ms")
    shown.print(_stage_table(result))
    for line in _lines(result):
        shell.say(shown, line)
    if written := [str(file) for file in (options.output, *files) if file]:
        shell.say(shown, f"wrote {', '.join(written)}")
    failed = [
        stage.name
        for stage in result.stages.values()
        if stage.outcomes and not _GOOD & stage.outcomes.keys()
    ]
    if failed:
        shell.fail(
            f"{' and '.join(failed)}: no frame was answered by the model; the first reasons are above",
            _PARTIAL,
        )
    if slow := [stage.name for stage in result.stages.values() if stage.too_many_superseded]:
        shell.fail(
            f"{' and '.join(slow)}: more than a tenth of the frames had no answer, see `dropped`", _PARTIAL
        )
    return result.complete


def _stage_table(result: "ReplayResult") -> "Table":
    def counts(found: Mapping[str, int], plain: str = "") -> str:
        return ", ".join(
            f"{count:,} {word}" for word, count in Counter(found).most_common() if word != plain
        )

    timed, rows = result.summary["pace"] != "fast", list[list[str]]()
    for stage in result.stages.values():
        used = Counter(int(tier) for tier in stage.frames["tier"] if tier >= 0)  # which gave results
        tiers = [f"{stage.tiers[t]} {percent(n / len(stage.frames), 0)}" for t, n in used.most_common()]
        came, guard = len(stage.frames) + stage.superseded, counts(stage.checks, "accept")
        notes = [counts(stage.outcomes, "on_time"), counts(stage.fallbacks), guard and f"guard: {guard}"]
        rows.append(
            [
                stage.name,
                f"{len(stage.frames):,}",
                percent(stage.outcomes["on_time"] / came) if came else "-",
                *(f"{value:.1f}" for value in (stage.p50_ms, stage.p99_ms, stage.max_ms)),
                *([f"{stage.budget_ms:g}"] if timed else []),
                f"{stage.superseded:,}",
                ", ".join(tiers) or "-",
                "; ".join(filter(None, notes)) or "-",
            ]
        )
    heads = ("stage", ">frames", ">on time", ">p50", ">p99", ">max", *([">budget"] if timed else []))
    return console_table((*heads, ">dropped", "tiers", "not on time"), rows)


def _lines(result: "ReplayResult") -> Iterator[str]:
    from torchperf_ros.stage.frame_table import flow_of

    summary = result.summary
    log_s, took_s = summary["log"]["duration_s"], summary["took_s"]
    speed = (
        f", {log_s / took_s:.1f} times as fast as it was"
        if took_s and log_s and summary["pace"] != "real"
        else ""
    )
    yield (
        f"{log_s:.1f} s of log in {took_s:.1f} s{speed}; workers were ready after"
        f" {summary['start_up_s']:.1f} s"
    )
    if summary["pace"] == "fast" and any(_GOOD & stage.outcomes.keys() for stage in result.stages.values()):
        yield "every frame had all the time that it needed; with --pace real or virtual deadlines count"
    if summary.get("late_messages"):
        yield (
            f"{summary['late_messages']:,} messages were given late, up to"
            f" {summary['worst_late_ms']:.1f} ms"
        )
    for stage in result.stages.values():
        if stage.incomplete:
            which = ", ".join(f"{topic} in {count:,}" for topic, count in stage.missing.items())
            of = f"{stage.incomplete:,} of {len(stage.frames):,} frames"
            yield f"{stage.name}: {of} had a synchronised input missing: {which}"
        if stage.superseded:
            yield f"{stage.name}: {flow_of(stage.frames, stage.superseded).words}"
        frames: dict[str, list[int]] = {}
        for seq, reason in stage.reasons.items():
            frames.setdefault(reason.partition("\n")[0] or "no reason was given", []).append(seq)
        for reason, seqs in list(frames.items())[:_WORST]:
            more = f" and {len(seqs) - 1:,} more" if len(seqs) > 1 else ""
            yield f"{stage.name} frame {seqs[0]}{more}: {reason}"
        if left := sum(len(seqs) for seqs in list(frames.values())[_WORST:]):
            yield f"{stage.name}: {left:,} more for other reasons, see -o RUN.json"
    if result.anomalies:
        count = len(result.anomalies)
        yield (
            f"{count:,} {'anomaly' if count == 1 else 'anomalies'}, the first:"
            f" {result.anomalies[0][1].name}"
        )


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
    from torchperf_ros.replay.run_reading import input_pictures, read_runs

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


_WIDTH_OF_CHANGES: Final = 180
_PERCENT: Final = 100.0
# Files of a run's or a log's folder; a verdict may be written beside them, and over an older one.
_OF_INPUT_FOLDERS: Final = (
    ".parquet",
    ".jsonl",
    ".mcap",
    ".mcap.zstd",
    ".db3",
    ".db3.zstd",
    ".bag",
    "metadata.yaml",
    "summary.json",
)


class CompareCommand(Command):
    """Takes several files after `--new`, which is what a shell makes of `--new a*.parquet`."""

    # typer's own copy of click's type
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Repeat `--new` before each of its files; `--base`, which may stand there, adds nothing."""
        spread: list[str] = []
        is_new = False
        for word in args:
            is_flag = word.startswith("-") and word != "-"
            is_new = word == "--new" if is_flag else is_new
            if not is_flag:
                spread += ["--new", word] if is_new else [word]
            elif word not in {"--new", "--base"}:
                spread.append(word)
        return super().parse_args(ctx, spread)


def compare(
    runs: Annotated[
        Files, Argument(metavar="[BASE NEW]", help="The baseline, and the run to judge.")
    ] = None,
    new: Annotated[
        Files, Option(metavar="RUN...", help="Several runs to judge; all before are the baseline.")
    ] = None,
    margin: Annotated[
        float | None,
        Option(
            min=0.0, max=1000.0, metavar="PERCENT", help="Change of p50, p99 that matters; default 2, 3."
        ),
    ] = None,
    max_miss: Annotated[
        float | None,
        Option(min=0.0, max=100.0, metavar="PERCENT", help="Fail if a stage of NEW misses more frames."),
    ] = None,
    across_machines: Annotated[
        bool, Option("--across-machines", help="Also compare runs of different machines.")
    ] = False,
    strict: Annotated[
        bool, Option("--strict", help="Fail without enough data, or for a stage in one run only.")
    ] = False,
    output: Annotated[
        Files,
        outputs_option(
            "Write the verdict (.md), a page with the distributions (.html), all figures (.json).",
        ),
    ] = None,
) -> None:
    """Judge whether runs are worse than others.

    Judges p50 and p99 latency, misses, lower tiers and outputs of each stage;
    with three runs a side also jitter, fallbacks, dropped frames, memory,
    start-up and compile time, which are shown otherwise. A verdict is better,
    worse, equivalent, or not enough data, with the number of frames that would
    be. A run is what `torchperf replay -o` wrote (.json, .parquet), records
    (.jsonl), or a log with a node's /perf topics. A baseline is such a file.

    What decides, and how often it is wrong: docs/testing.md#comparing-runs.

    Example: torchperf compare main.parquet branch.parquet --max-miss 1 -o verdict.md

    Example: torchperf compare main*.parquet --new branch*.parquet

    Exit status: 0 if nothing is worse, 1 if something is or misses are over
    their limit (with --strict also if a run lacks a stage), 2 if the runs cannot
    be compared, 3 if there is not enough data for any metric (with --strict: for
    one).
    """
    sides = _sides(runs or [], new or [])
    files = files_by_suffix(
        output, ".md", ".html", ".json", inputs=sides[0] + sides[1], kept=_OF_INPUT_FOLDERS
    )
    need("scipy", "arch", *(("plotly", "jinja2") if ".html" in files else ()))
    from torchperf_ros.observe.runs import comparison as text
    from torchperf_ros.replay.run_reading import load_run

    with console(stderr=True).status("reading") as shown:
        logs = [[load_run(path) for path in side] for side in sides]
        found = text.compare(
            *logs,
            margin=None if margin is None else margin / _PERCENT,
            max_miss=math.nan if max_miss is None else max_miss,
            across_machines=across_machines,
            progress=shown.update,
        )
    _show(found)
    status = found.status(strict)
    if ".md" in files:
        write_output(files[".md"], text.markdown(found))
    if ".html" in files:
        write_output(files[".html"], text.verdict_page(found))
    if ".json" in files:
        write_output(files[".json"], text.to_json(found, status))
    raise typer.Exit(status)


def _sides(runs: list[Path], new: list[Path]) -> tuple[list[Path], list[Path]]:
    if runs and new:
        return runs, new
    if len(runs) != 2:  # noqa: PLR2004
        fail("name two runs, `compare BASE NEW`, or several: `compare BASE... --new NEW...`")
    return runs[:1], runs[1:]


def _show(comparison: "Comparison") -> None:
    from torchperf_ros.observe.runs import comparison as text
    from torchperf_ros.observe.runs.changes import STYLES, Judgement

    shown, bad = console(_WIDTH_OF_CHANGES), STYLES[Judgement.WORSE]
    first, *numbers, last = text.COLUMNS
    heads = (first, *(f">{name}" for name in numbers), last)
    styles = [bad if one.breaks_limit else STYLES.get(one.verdict, "") for one in comparison.changes]
    shown.print(console_table(heads, text.rows(comparison.changes), styles))
    for line in (*text.remarks(comparison), *text.samples(comparison)):
        say(shown, f"- {line}")
    worse = comparison.with_verdict(Judgement.WORSE) or comparison.broken_limits
    style = bad if worse else "bold yellow" if text.conspicuous(comparison) else "bold"
    say(shown, text.headline(comparison), style)


_MISSING = {"", "nan", "na", "n/a", "null", "none", "-", "?"}
Sample = tuple[str, str, float, float]  # time and value as they were written, and as numbers


def anomalies(
    file: Annotated[Path, Argument(help="A CSV file of timestamp,value rows, or a run of replay.")],
    output: Annotated[
        File, Option("--output", "-o", help="Default: FILE.anomalies.csv; -: stdout.")
    ] = None,
    caution: Annotated[
        float | None, Option(min=1.0, max=4.0, help="Surprise; default 1, of a run 1.4.")
    ] = None,
    stage: Annotated[str, Option(help="Of a run: whose latency; default: the last stage's.")] = "",
) -> None:
    """Score every row of a time series from 0 (usual) to 1 (unlike anything before it).

    The output has each row again: timestamp,value,anomaly_score; 0.5 and more is an anomaly.

    Example: torchperf anomalies run.parquet --stage perception -o - | head
    """
    from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, THRESHOLD, SeriesDetector

    is_run, target = file.suffix in {".json", ".parquet"}, output or file.with_suffix(".anomalies.csv")
    to_stdout = target == Path("-")
    if not file.is_file():
        fail(f"{file}: is no file; name a CSV file or a run")
    check_outputs({"--output": None if to_stdout else target}, [file])
    samples = _run_samples(file, stage) if is_run else _csv_samples(file)
    detector = SeriesDetector(caution=caution or (FRAME_CAUTION if is_run else 1.0))
    scores = [detector.update(time, value).score for _, _, time, value in samples]
    out, heads = io.StringIO(), ("timestamp", "value", "anomaly_score")
    rows = ((*one[:2], f"{score:.6f}") for one, score in zip(samples, scores, strict=True))
    csv.writer(out, lineterminator="\n").writerows([heads, *rows])
    try:
        if to_stdout:
            sys.stdout.write(out.getvalue())
            sys.stdout.flush()
        else:
            write_output(target, out.getvalue())
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    found = sum(score >= THRESHOLD for score in scores)
    sys.stderr.write(f"{file}: {len(samples):,} rows; {found:,} score {THRESHOLD} and more; in {target}\n")


def _csv_samples(path: Path) -> list[Sample]:
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    reader = csv.reader(lines, delimiter=max(",;\t", key="".join(lines).count))
    samples: list[Sample] = []
    at: tuple[int, int] | None = None
    for fields in filter(None, reader):
        if at is None and not samples and not any(re.match(r"\s*[-+.]?\d", field) for field in fields):
            names = [name.strip().lower() for name in fields]
            time = names.index("timestamp") if "timestamp" in names else 0
            at = time, names.index("value") if "value" in names else int(time == 0)
            continue
        try:
            samples.append(_sample(*(fields[column] for column in at or (0, 1))))
        except (IndexError, ValueError):
            right = "a row is timestamp,value: an ISO time or a number, and a number, NaN or nothing"
            fail(f"{path}:{reader.line_num}: {','.join(fields)!r}: {right}")
    return samples or fail(f"{path}: has no rows; a row is timestamp,value")


def _sample(written: str, text: str) -> Sample:
    try:
        time = float(written)
    except ValueError:
        # Python 3.10 reads neither a Z nor fractions of other than 3 or 6 digits.
        iso = re.sub(r"[zZ]$", "+00:00", written.strip().replace("/", "-"))
        date = datetime.fromisoformat(re.sub(r"\.(\d+)", lambda m: "." + m[1][:6].ljust(6, "0"), iso))
        time = (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()
    if not math.isfinite(time):
        raise ValueError(written)
    return written, text, time, math.nan if text.strip().lower() in _MISSING else float(text)


def _run_samples(path: Path, stage: str) -> list[Sample]:
    from torchperf_ros.observe.runs.run_log import read_run

    frames = read_run(path).frames
    name = stage or list(frames)[-1]
    if name not in frames or not len(frames[name]):
        fail(f"{path}: has no frames of stage {name!r}; its stages: {', '.join(frames)}")
    pairs = zip((frames[name]["t_ns"] / 1e9).tolist(), frames[name]["total_ms"].tolist(), strict=True)
    return [(f"{at:.6f}", f"{ms:.3f}", at, ms) for at, ms in pairs]
