"""The commands that run a node, look at one, or ask something of it.

Node, demo, top, swap, record and the like.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from torchperf_ros.tools.shell import (
    Files,
    JsonFile,
    NodeName,
    SvgFile,
    Text,
    check_outputs,
    console,
    fail,
    files_by_suffix,
    follow,
    need,
    node_option,
    outputs_option,
    progress_bars,
    write_output,
)

_PLAIN_HEIGHT = 30  # of a picture where there is no terminal
_ASK_S = 15.0
_SWAP_S = 120.0  # a worker loads the package, checks it and measures it


def node(context: typer.Context) -> None:
    """Run the node; takes ROS arguments.

    Example: torchperf node --ros-args -r image:=/camera/image_raw --params-file perception.yaml
    """
    need("rclpy")
    from torchperf_ros.node.main import main

    raise typer.Exit(main(context.args) or 0)


def swap(
    stage: Annotated[str, Argument(help="For example perception.")],
    tier: Annotated[str, Argument(help="For example full.")],
    package: Annotated[
        Path, Argument(help="The .pt2 file, with the manifest that `torchperf compile -o` wrote.")
    ],
    name: NodeName = "/perf",
) -> None:
    """Put a new package into a running node, without missing a frame.

    A new worker loads it beside those that serve, checks it, and measures it.
    If all is well the new worker takes over and the others are replaced;
    otherwise nothing changes and the reason is printed. The file lies below the
    cache folder, beside one of the node's packages, or below one of package_dirs.

    Example: torchperf swap perception full ~/packages/full.pt2

    Exit status: 0 if the package runs, 1 if it does not, 2 if the input cannot be used.
    """
    need("rclpy")
    if not package.is_file():
        fail(f"package {package} is not there")
    from torchperf_ros.node.services import ServiceFailed
    from torchperf_ros.node.services import swap as ask

    say = lru_cache(1)(typer.echo)  # not the same twice in a row
    try:
        ask(name, stage, tier, str(package.resolve()), _SWAP_S, say)
    except ServiceFailed as error:
        fail(f"{stage} {tier} runs what it ran before: {error}", 1)
    typer.echo(f"{stage} {tier} runs {package}; to keep it after a restart, name it in {stage}.packages")


def record(name: NodeName = "/perf") -> None:
    """Have a running node write the last seconds and the next to disk.

    The folder that it prints is complete when `torchperf report` can read it:
    after half of `black_box_s` seconds.

    Example: torchperf record --node /robot1/perf

    Exit status: 0 if it records, 1 if it cannot, and says why.
    """
    _ask(name, "record")


def profile(name: NodeName = "/perf") -> None:
    """Have a worker of each stage profiled for some frames, while the other answers.

    Example: torchperf profile

    Exit status: 0 if it begins, 1 if it cannot, and says why.
    """
    _ask(name, "profile")


def snapshot(name: NodeName = "/perf") -> None:
    """Have a worker of each stage write down what holds its memory, and what grew.

    Example: torchperf snapshot

    Exit status: 0 if it begins, 1 if it cannot, and says why.
    """
    _ask(name, "snapshot")


def _ask(name: str, service: str) -> None:
    need("rclpy")
    from torchperf_ros.node.services import ServiceFailed, trigger

    try:
        typer.echo(trigger(name, service, _ASK_S))
    except ServiceFailed as error:
        fail(str(error), 1)


def top(
    name: NodeName = "/perf",
    once: Annotated[bool, Option("--once", help="Print one picture after three reports, and end.")] = False,
    seconds: Annotated[
        float, Option(min=0.0, help="How long (with --once: at most); 0: until q or Ctrl-C.")
    ] = 0.0,
    svg_file: SvgFile = None,
) -> None:
    """Look at a running node, here or on another machine.

    Health, tier, latency, outcomes, fallbacks, memory and anomalies, from the
    node's topics and /diagnostics alone. It waits for a node that is not there
    yet, says when one falls silent, and goes on when it is back. Keys: q quits,
    p pauses. Without a terminal it prints plain lines.

    Example: ssh -t robot torchperf top --node /robot1/perf

    Exit status: 0; 1 if nothing was heard of the node; 2 for input that cannot be used.
    """
    need("rclpy")
    check_outputs({"--svg": svg_file})
    shown = console()
    if not shown.is_terminal:
        shown.height = _PLAIN_HEIGHT
    with console(stderr=True).status("loading ROS"):
        from torchperf_ros.observe.top import look

    raise typer.Exit(look(name, shown, once=once, seconds=seconds, svg_file=svg_file))


def doctor(
    log: Annotated[
        Path | None, Argument(help="A log or run, as `torchperf report` takes; default: listen.")
    ] = None,
    name: Annotated[Text, node_option("--node", "Default: /perf; of a log all that are in it.")] = None,
    seconds: Annotated[float, Option(min=1.0, max=3600.0, help="How long to listen.")] = 10.0,
    actuation: Annotated[
        str, Option(metavar="TOPIC", help="What a receiver publishes, with the outputs' stamps.")
    ] = "",
    json_file: JsonFile = None,
) -> None:
    """Why outputs are old: split stamp to actuation into its parts, and say what to change.

    Camera (stamp to publication), transport, queue in the node, decode, model,
    publication, arrival at another subscriber: p50 and p99 of each, and its
    share. Then the largest part, at most five pieces of advice, each with what
    to type and what it was derived from, and what the environment lacks.

    It subscribes to the stages' triggers and outputs beside the node, on the
    node's machine if it can be. A log has the node's own times only: camera and
    transport are one part there, and the environment is not looked at.

    Examples:
        torchperf doctor --node /robot1/perf --seconds 30
        torchperf doctor --actuation /cmd_path --json lag.json
        torchperf doctor drive.mcap

    Exit status: 0 nothing to mend, 1 something found, 2 input that cannot be used.
    """
    if log is not None and actuation:
        fail("--actuation: names a live topic; a log has only what the node published")
    if log is None:
        need("rclpy")
    check_outputs({"--json": json_file}, [log] if log else [])
    with console(stderr=True).status("loading"):
        from torchperf_ros.observe.doctor import as_json, examine_log, examine_node, show
        from torchperf_ros.replay.run_reading import read_runs
    with progress_bars() as bars:
        if log is not None:
            found = examine_log(log, read_runs(log, follow(bars, f"reading {log.name}"), name))
        else:
            name = name or "/perf"
            found = [
                examine_node(name, seconds, actuation, follow(bars, f"listening to {name}", per_s=1e3))
            ]
    for one in found:
        show(one, console())
    if json_file:
        write_output(json_file, json.dumps([as_json(one) for one in found], indent=2) + "\n")
    raise typer.Exit(max(one.status for one in found))


def demo(
    log: Annotated[Path | None, Option(help="Play this rosbag2 or ROS 1 .bag, not the drawn road.")] = None,
    seconds: Annotated[
        float, Option(min=1.0, help="How long to drive; a shorter log is played again.")
    ] = 20.0,
    cameras: Annotated[
        int, Option(min=1, max=8, help="Several: one model for all of them, with faults in the first.")
    ] = 1,
    sabotage: Annotated[
        bool, Option("--sabotage", help="Make workers stall, hang, raise, die and emit NaN.")
    ] = False,
    output: Annotated[
        Files,
        outputs_option("Write every figure (.json), the last picture (.svg)."),
    ] = None,
) -> None:
    """Drive on this machine: the node, with both reference stages, and a camera.

    In a terminal a live view shows each stage's health, tier and latency, one column per
    frame, and what goes wrong. The end is a summary: what was answered, what
    was sabotaged, how the frames that it hit were answered, and what to do next.

    Exit status: 0 if of each stage 99 % of the frames were answered, 95 % by
    their own result in time (with --sabotage 95 % and 85 %), and none later than
    1 ms after its deadline; 1 if not; 2 if the log cannot be played; 3 if not,
    and other programs took more than a tenth of the processor: no verdict.
    A bare timer runs beside the node: what it was late while an answer should
    have left is the machine's time and not the node's.
    """
    need("rclpy")
    if log is not None and cameras > 1:
        fail(
            f"--cameras {cameras}: the drive of a log has the one camera of the log; leave one of the two out"
        )
    files = files_by_suffix(output, ".json", ".svg")
    with console(stderr=True).status("loading ROS"):
        from torchperf_ros.tools.demo.drive import DemoDrive, DriveError, DriveOptions

    shown = console()
    options = DriveOptions(
        log, cameras, seconds, sabotage, shown.is_terminal, files.get(".json"), files.get(".svg")
    )
    try:
        status = DemoDrive(options, shown).run()
    except DriveError as error:
        fail(str(error), 1)
    raise typer.Exit(status)
