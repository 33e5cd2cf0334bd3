"""The command `torchperf`. Everything is imported by the command that needs it, so that `--help` is quick."""

import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from torchperf_ros import __version__
from torchperf_ros.cli.anomalies_command import anomalies_command
from torchperf_ros.cli.check_command import check
from torchperf_ros.cli.compare_command import CompareCommand, compare_command
from torchperf_ros.cli.compile_command import cache_command, compile_command
from torchperf_ros.cli.inspect_command import inspect_command
from torchperf_ros.cli.make_log_command import make_log
from torchperf_ros.cli.node_commands import demo, node, profile, record, snapshot, swap
from torchperf_ros.cli.play_command import play_command
from torchperf_ros.cli.replay_command import replay_command
from torchperf_ros.cli.report_command import report
from torchperf_ros.cli.top_command import top
from torchperf_ros.cli.tune_command import tune_command

_WIDE: Final = 80  # columns; in fewer, tables of options would cut off their names
_BAD_INPUT: Final = 2
_ANY_ARGUMENTS: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
_GROUPS: Final = {
    "Drive": ("node", "demo", "top", "record", "profile", "snapshot", "swap"),
    "Model": ("check", "inspect", "tune", "compile", "cache"),
    "Logs": ("replay", "play", "make-log", "report", "compare", "anomalies"),
}
_COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "node": node, "demo": demo, "top": top, "record": record, "profile": profile, "snapshot": snapshot, "swap": swap,
    "check": check, "inspect": inspect_command, "tune": tune_command, "compile": compile_command,
    "cache": cache_command, "replay": replay_command, "play": play_command, "make-log": make_log, "report": report,
    "compare": compare_command, "anomalies": anomalies_command,
}  # fmt: skip
_MOVED: Final = {
    "check-model": "torchperf tune --tables",
    "bench": "./run bench curve in a checkout, and torchperf tune --tables --batch 1,2,4 for a model",
    "regress": "torchperf compare BASE NEW",
    "baseline": "torchperf compare --baseline NAME",
    "schema": "torchperf report --schema",
}


class _Commands(TyperGroup):
    """Says in whole sentences what its commands are for, in a narrow terminal, too."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's own copies of click's types
        whole = 1000
        for title, names in _GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(whole)) for name in names])


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


def _moved(context: typer.Context) -> None:
    name = context.info_name or ""
    sys.stderr.write(f"torchperf: {name} is now: {_MOVED[name]}\n")
    raise typer.Exit(_BAD_INPUT)


for _title, _names in _GROUPS.items():
    for _name in _names:
        app.command(
            _name,
            rich_help_panel=_title,
            cls=CompareCommand if _name == "compare" else None,
            context_settings=_ANY_ARGUMENTS if _name == "node" else None,
        )(_COMMANDS[_name])
for _name, _text in _MOVED.items():
    app.command(_name, hidden=True, help=f"It is now: {_text}", context_settings=_ANY_ARGUMENTS)(_moved)
