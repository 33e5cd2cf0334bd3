"""The command `torchperf`. Everything is imported by the command that needs it, so that `--help` is quick."""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from torchperf_ros.analysis.anomalies_command import anomalies_command
from torchperf_ros.analysis.baseline_command import app as baseline
from torchperf_ros.analysis.bench_command import app as bench
from torchperf_ros.analysis.check_model_command import check_model
from torchperf_ros.analysis.compile_command import cache_command, compile_command
from torchperf_ros.analysis.inspect_command import inspect_command
from torchperf_ros.analysis.regress_command import regress_command
from torchperf_ros.analysis.tune_command import tune_command
from torchperf_ros.core.build_options import ENGINES
from torchperf_ros.demo.make_log_command import make_log
from torchperf_ros.replay.replay_command import replay_command
from torchperf_ros.ros.play_command import play_command
from torchperf_ros.ros.report_command import report
from torchperf_ros.ros.top_command import top

_WIDE = 80  # columns; in fewer, tables of options would cut off their names


class _Commands(TyperGroup):
    """Says in whole sentences what its commands are for, in a narrow terminal, too."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own copies of click's types
        whole = 1000
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands[name].get_short_help_str(whole)) for name in self.commands])


app = typer.Typer(
    name="torchperf",
    cls=_Commands,
    help="PyTorch perception and planning in a vehicle: an answer for every frame by its deadline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _WIDE else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench, name="bench", cls=_Commands)
app.add_typer(baseline, name="baseline", cls=_Commands)
app.command("anomalies")(anomalies_command)
app.command("check-model")(check_model)
app.command("compile")(compile_command)
app.command("cache")(cache_command)
app.command("inspect")(inspect_command)
app.command("tune")(tune_command)
app.command("top")(top)
app.command("report")(report)
app.command("make-log")(make_log)
app.command("regress")(regress_command)
app.command("replay")(replay_command)
app.command("play")(play_command)

_BAD_INPUT = 2


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def node(context: typer.Context) -> None:
    """Run the node; takes ROS arguments.

    Example: torchperf node --ros-args -r image:=/camera/image_raw --params-file perception.yaml
    """
    _need_rclpy()
    from torchperf_ros.ros.main import main

    raise typer.Exit(main(context.args) or 0)


@app.command()
def swap(
    stage: Annotated[str, typer.Argument(help="For example perception.")],
    tier: Annotated[str, typer.Argument(help="For example full.")],
    package: Annotated[
        Path, typer.Argument(help="The .pt2 file, with the manifest that `torchperf compile -o` wrote.")
    ],
    node_name: Annotated[str, typer.Option("--node", help="The node, with its namespace.")] = "/perf",
    timeout_s: Annotated[float, typer.Option(min=1.0, help="How long to wait.")] = 120.0,
) -> None:
    """Put a new package into a running node, without missing a frame.

    A new worker loads it beside those that serve, checks it, and measures it.
    If all is well the new worker takes over and the others are replaced;
    otherwise nothing changes and the reason is printed.

    Example: torchperf swap perception full build/full.pt2

    Exit status: 0 if the package runs, 1 if it does not, 2 if the input cannot be used.
    """
    _need_rclpy()
    if not package.is_file():
        _fail(f"package {package} is not there", _BAD_INPUT)
    from torchperf_ros.ros.swap_client import SwapFailed
    from torchperf_ros.ros.swap_client import swap as ask

    told: list[str] = []

    def tell(text: str) -> None:
        if told[-1:] != [text]:
            told.append(text)
            typer.echo(text)

    try:
        ask(node_name, stage, tier, str(package.resolve()), timeout_s, tell)
    except SwapFailed as error:
        _fail(f"{stage} {tier} runs what it ran before: {error}", 1)
    typer.echo(f"{stage} {tier} runs {package}; to keep it after a restart, name it in {stage}.packages")


@app.command()
def demo(
    log: Annotated[
        Path | None,
        typer.Option(help="Play this rosbag2 (folder, .mcap, .db3) or ROS 1 .bag instead of the drawn road."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to drive; a shorter log is played again.")] = 20.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.1, max=240.0, help="Images per second; default: as recorded, 30 for the drawn road."),
    ] = None,
    sabotage: Annotated[
        bool,
        typer.Option(
            "--sabotage",
            help="Make workers stall, hold the GIL, hang, raise, emit NaN and die by SIGKILL and SIGSEGV meanwhile.",
        ),
    ] = False,
    engine: Annotated[
        str,
        typer.Option(help=f"{', '.join(ENGINES)}; what is not compiled yet is compiled meanwhile, in the background."),
    ] = "eager",
    no_tui: Annotated[bool, typer.Option("--no-tui", help="Plain lines instead of the live view.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="Write the view's last picture to this file.")] = None,
) -> None:
    """Drive on this machine: the node, with both reference stages, and a camera.

    A live view shows each stage's health, tier and latency, one column per
    frame, and what goes wrong. The end is a summary: what was answered, what
    was sabotaged, and how the frames that it hit were answered.

    Exit status: 0 if every started frame was answered by its deadline + 5 ms,
    1 if one was not, 2 if the log cannot be played.
    """
    _need_rclpy()
    if engine not in ENGINES:
        _fail(f"--engine {engine!r} is not there; it has to be one of: {', '.join(ENGINES)}", _BAD_INPUT)
    from rich.console import Console

    from torchperf_ros.core.errors import TorchperfError
    from torchperf_ros.demo.drive import Drive, DriveError, DriveOptions

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    tui = console.is_terminal and not no_tui
    try:
        status = Drive(DriveOptions(log, seconds, rate, sabotage, engine, tui, json_file, svg_file), console).run()
    except DriveError as error:
        _fail(str(error), 1)
    except (TorchperfError, OSError) as error:
        _fail(str(error), _BAD_INPUT)
    raise typer.Exit(status)


@app.command("schema")
def print_schema() -> None:
    """Print the JSON schema of the records that a node writes.

    Example: torchperf schema > records.schema.json
    """
    from torchperf_ros.telemetry.record_log import schema

    typer.echo(schema(), nl=False)


def _need_rclpy() -> None:
    if importlib.util.find_spec("rclpy") is None:
        _fail("rclpy is not installed: source a ROS 2 installation, or `pip install torchperf_ros[ros]`", _BAD_INPUT)


def _fail(text: str, status: int) -> None:
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(status)


if __name__ == "__main__":
    app()
