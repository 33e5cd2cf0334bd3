"""The command `torchperf`.

Everything is imported by the command that needs it, so that `--help` is quick.
"""

import importlib
import shutil
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer

from torchperf_ros import __version__
from torchperf_ros.tools.drive_commands import (
    demo,
    doctor,
    node,
    profile,
    record,
    snapshot,
    swap,
    top,
)
from torchperf_ros.tools.log_commands import (
    CompareCommand,
    anomalies,
    compare,
    make_log,
    play,
    replay,
    report,
)
from torchperf_ros.tools.model_commands import cache, check, compile_tiers, evidence, inspect, tune
from torchperf_ros.tools.shell import Command, CommandGroup

_WIDE: Final = 80  # columns; in fewer, tables of options would cut off their names
_ANY_ARGUMENTS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_COMMANDS: Final[dict[str, dict[str, Callable[..., Any]]]] = {
    "Drive": {
        "node": node,
        "demo": demo,
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

# The rooms above plug in by name: nothing here imports them, and a package without one of them has one command less.
_FROM_ABOVE: Final = {
    "Drive": {"drive": "torchperf_ros.world.drive_options:drive"},
    "Model": {"train": "torchperf_ros.train.train_command:train"},
}
_GROUPS_FROM_ABOVE: Final = {"Fleet": {"rollout": "torchperf_ros.fleet.rollout_command:rollout"}}

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


def _named(place: str) -> Any:  # noqa: ANN401 - a command, or a group of them
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


for _group, _commands in _COMMANDS.items():
    _above = {name: _named(place) for name, place in _FROM_ABOVE.get(_group, {}).items()}
    for _name, _function in {**_commands, **_above}.items():
        app.command(
            _name,
            rich_help_panel=_group,
            cls=CompareCommand if _name == "compare" else Command,
            context_settings=_ANY_ARGUMENTS if _name == "node" else None,
        )(_function)
for _group, _groups in _GROUPS_FROM_ABOVE.items():
    for _name, _place in _groups.items():
        app.add_typer(_named(_place), name=_name, rich_help_panel=_group)
