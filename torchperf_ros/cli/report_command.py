"""`torchperf report`: the command line; it stands here because `--live` listens, everything else needs no ROS."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchperf_ros.cli.top_command import node_name

if TYPE_CHECKING:
    from torchperf_ros.runs.run_log import RunLog

_BAD_INPUT = 2


def report(
    logs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="rosbag2 folders, .mcap, .db3, .bag or .jsonl files, what a replay's --json or --parquet wrote,"
            " or folders of evidence."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    live: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="Listen to a running node for so long, too.")
    ] = 0.0,
    node: Annotated[
        str | None,
        typer.Option(callback=node_name, help="Only this node; default: all in a log, /perf with --live."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the records that a node writes, and stop.")
    ] = False,
) -> None:
    """How the models did, as one page to open, keep and send: it needs no network.

    Latency against its budget, tiers and health over time; where the time goes;
    memory and its trend; anomalies; the worst frames with the images they were
    computed from, if the log has them. What a log does not hold is said, not
    guessed. Several logs are put side by side. Record one with:

        ros2 bag record -e '/perf/.*|/diagnostics|/camera/image_raw'

    Example: torchperf report monday/ tuesday.mcap -o week.html

    Exit status: 0, or 2 for a log that cannot be used.
    """
    from torchperf_ros.frame.errors import TorchperfError

    if schema:
        from torchperf_ros.recorder.record_log import schema as record_schema

        typer.echo(record_schema(), nl=False)
        return
    if not logs and not live:
        _fail("name a log, or --live SECONDS")
    if output.is_dir() or not output.resolve().parent.is_dir():
        _fail(f"--output {output}: has to be a file in a folder that exists")
    for library in ("plotly", "jinja2"):
        if importlib.util.find_spec(library) is None:
            _fail(f"{library} is not installed: `pip install 'torchperf_ros[analysis]'`")
    if live and importlib.util.find_spec("rclpy") is None:
        _fail("rclpy is not installed: source a ROS 2 installation, or `pip install torchperf_ros[ros]`")
    try:
        size_bytes = _write(logs or [], output, live, node)
    except (TorchperfError, OSError) as error:
        _fail(str(error))
    typer.echo(f"wrote {output}, {size_bytes / 1e6:.1f} MB")


def _write(logs: list[Path], output: Path, live: float, node: str | None) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from torchperf_ros.runs.report.report_page import write_report
    from torchperf_ros.runs.run_log_source import read_runs

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def task(name: str) -> Callable[[int, int], None]:
            number = bar.add_task(name, total=None)
            return lambda done, total: bar.update(number, completed=done, total=total)

        runs: list[RunLog] = []
        for log in logs:
            runs += read_runs(log, task(f"reading {log.name}"), node)
        if live:
            from torchperf_ros.top.listener import listen_for

            runs.append(listen_for(node or "/perf", live, task(f"listening to {node or '/perf'}")))
        drawing = bar.add_task("drawing", total=None)
        return write_report(runs, output, lambda text: bar.update(drawing, description=text))


def _fail(text: str) -> None:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(_BAD_INPUT)
