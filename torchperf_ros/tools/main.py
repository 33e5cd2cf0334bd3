"""The command `torchperf`.

Everything is imported by the command that needs it, so that `--help` is quick.
"""

import shutil
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from torchperf_ros import __version__
from torchperf_ros.fleet.rollout_command import rollout
from torchperf_ros.tools.anomalies_command import anomalies
from torchperf_ros.tools.compare_command import CompareCommand, compare
from torchperf_ros.tools.compile_command import cache, compile_tiers, evidence
from torchperf_ros.tools.drive_commands import (
    demo,
    doctor,
    drive,
    node,
    profile,
    record,
    snapshot,
    swap,
    top,
)
from torchperf_ros.tools.log_commands import make_log, play, report
from torchperf_ros.tools.model_commands import check, inspect, tune
from torchperf_ros.tools.replay_command import replay
from torchperf_ros.tools.shell import Command, CommandGroup
from torchperf_ros.train.train_command import train

_WIDE: Final = 80  # columns; in fewer, tables of options would cut off their names
_ANY_ARGUMENTS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_COMMANDS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "Drive": {
        "node": node,
        "demo": demo,
        "drive": drive,
        "top": top,
        "doctor": doctor,
        "record": record,
        "profile": profile,
        "snapshot": snapshot,
        "swap": swap,
    },
    "Model": {
        "check": check,
        "inspect": inspect,
        "tune": tune,
        "compile": compile_tiers,
        "cache": cache,
        "train": train,
    },
    "Logs": {
        "replay": replay,
        "play": play,
        "make-log": make_log,
        "report": report,
        "compare": compare,
        "anomalies": anomalies,
        "evidence": evidence,
    },
}

app = typer.Typer(
    name="torchperf",
    cls=CommandGroup,
    help="PyTorch perception and planning in a vehicle: an answer for every frame by its deadline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= _WIDE else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchperf_ros {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for _group, _commands in _COMMANDS.items():
    for _name, _function in _commands.items():
        app.command(
            _name,
            rich_help_panel=_group,
            cls=CompareCommand if _name == "compare" else Command,
            context_settings=_ANY_ARGUMENTS if _name == "node" else None,
        )(_function)
app.add_typer(rollout, name="rollout", rich_help_panel="Fleet")
