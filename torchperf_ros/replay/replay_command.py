"""`torchperf replay`: the command line."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from torchperf_ros.replay.many.many_options import ManyOptions
    from torchperf_ros.replay.replay_options import ReplayOptions

_PARTIAL = 1
_BAD_INPUT = 2
_PLAIN_WIDTH = 120


def replay_command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    logs: Annotated[
        list[Path], typer.Argument(help="A rosbag2 folder, .mcap, .db3 or ROS 1 .bag; or several, or folders of such.")
    ],
    params: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The node's parameter file; default: that of the evidence, else none."),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A parameter in place of the file's, as YAML."),
    ] = None,
    maps: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="LOG:=STAGE", help="The log's topic for a stage's, as /camera/front:=image."),
    ] = None,
    pace: Annotated[
        str, typer.Option(help="fast: no deadlines; real: as it was; virtual: deadlines on a virtual clock.")
    ] = "fast",
    times: Annotated[
        str,
        typer.Option(metavar="log|FILE", help="For virtual: step times, of the log's own records, or of a file."),
    ] = "log",
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    start: Annotated[float, typer.Option(min=0.0, metavar="S", help="Seconds of the log to leave out.")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(min=0.001, metavar="S", help="Seconds of the log to replay; default: all.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="MCAP of outputs and /perf/* to write; for several logs a folder."),
    ] = None,
    inputs: Annotated[
        str, typer.Option(metavar="all|none|TOPICS", help="Topics of the log to copy into the MCAP, with commas.")
    ] = "none",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Summary and a row for each frame, as JSON.")
    ] = None,
    parquet_file: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="The same as Parquet, for long logs.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be replayed, and stop.")] = False,
    workers: Annotated[int, typer.Option(min=0, help="Several logs: so many at a time; 0: what fits.")] = 0,
    scheduler: Annotated[
        str, typer.Option(metavar="tcp://HOST:PORT", help="Several logs: a Dask cluster instead of this machine.")
    ] = "",
    retries: Annotated[int, typer.Option(min=0, help="Several logs: tries after a worker was lost.")] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Several logs: how long one may take; 0: as it needs.")
    ] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Several logs: also those that are done already.")] = False,
    keep_output: Annotated[
        bool, typer.Option("--keep-output", help="Several logs: an MCAP beside each one's results, too.")
    ] = False,
    dashboard: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Several logs: Dask's dashboard, for example :8787.")
    ] = "",
) -> None:
    """A log through the node's stages: the same workers as live, fed with its bytes.

    What comes out: each stage's outcomes and latencies here; outputs and /perf/*
    on the log's time line with -o; a row for each frame with --json or --parquet,
    for `torchperf regress` and `torchperf report`.

    A stage's input is the log's topic of the same name, else the only one of its
    type; --map says otherwise. Damage in a log is told and passed over.

    Several logs, or a folder of them, are replayed side by side, each with its
    results in a folder of -o (default: replays); what is done is kept, and the
    same command goes on where it stopped. A cluster's workers have to see logs
    and results under the same paths. Trust its scheduler: Dask sends pickles.

    Examples:
        torchperf replay drive.mcap -o out.mcap
        torchperf replay drive/ --pace real --params perception.yaml --json run.json
        torchperf replay incident/ --pace virtual --set perception.budget_ms=40
        torchperf replay logs/ --workers 2 -o results

    Exit status: 0, or 1 if it was interrupted or some of several logs failed
    (what was done is written), or 2 for input that cannot be used.
    """
    from torchperf_ros.core.errors import TorchperfError
    from torchperf_ros.replay.many.many import is_many
    from torchperf_ros.replay.many.many_options import ManyOptions
    from torchperf_ros.replay.replay_options import ReplayOptions
    from torchperf_ros.replay.topic_map import parse_maps

    try:
        options = ReplayOptions(
            params, parse_maps(maps or []), pace, times, seed, start, duration, inputs, output, _parameters(sets or [])
        )
        files = [file for file in (json_file, parquet_file) if file]
        if is_many(logs):
            folder = output or Path("replays")
            many = ManyOptions(folder, workers, scheduler, retries, timeout, fresh, keep_output, dashboard)
            status = _many(logs, options, many, files, dry_run=dry_run)
        else:
            several = {
                "--fresh": fresh,
                "--keep-output": keep_output,
                "--scheduler": scheduler,
                "--dashboard": dashboard,
            }
            _refuse_unused(options, [name for name, given in several.items() if given])
            status = 0 if _one(logs[0], options, files, dry_run=dry_run) else _PARTIAL
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from error
    raise typer.Exit(status)


def _refuse_unused(options: "ReplayOptions", of_several: list[str]) -> None:
    """Say so where an option would do nothing: whoever gave it expects something of it.

    Raises:
        ConfigError: there is one.
    """
    from torchperf_ros.core.errors import ConfigError

    msg = ""
    if of_several:
        msg = f"{of_several[0]}: is for several logs, or a folder of them; this is one log"
    elif options.inputs != "none" and options.output is None:
        msg = f"--inputs {options.inputs}: there is no output to copy them into; give -o OUT.mcap"
    if msg:
        raise ConfigError(msg)


def _many(logs: list[Path], options: "ReplayOptions", many: "ManyOptions", files: list[Path], *, dry_run: bool) -> int:
    """Replay several logs; the exit status.

    Raises:
        ConfigError: files were asked for, which several logs have one each of.
    """
    from rich.console import Console

    from torchperf_ros.core.errors import ConfigError
    from torchperf_ros.replay.many.many import plan_many, replay_many

    if files:
        msg = f"{files[0]}: several logs write run.parquet and summary.json, each to its own folder in -o"
        raise ConfigError(msg)
    shown = Console()
    if dry_run:
        for line in plan_many(logs, options, many):
            shown.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0
    return replay_many(logs, options, many, Console(stderr=True), shown).status


def _one(log: Path, options: "ReplayOptions", files: list[Path], *, dry_run: bool) -> bool:
    """Replay one log, show and write what it came to; whether that was all of it."""
    from rich.console import Console

    from torchperf_ros.core.errors import ConfigError
    from torchperf_ros.core.run_file import check_run_path, write_run
    from torchperf_ros.replay.replay import plan, replay
    from torchperf_ros.replay.replay_config import prefer_this_process, read_config
    from torchperf_ros.replay.replay_view import lines, progress_bar, stage_table

    told, shown = Console(stderr=True), Console()
    if not shown.is_terminal:
        shown = Console(width=_PLAIN_WIDTH)
    for file in files:
        check_run_path(file)
    if len({file.resolve() for file in files}) < len(files):
        msg = f"{files[0]}: is to be written twice; choose two files"
        raise ConfigError(msg)
    if dry_run:
        for line in plan(log, options):
            shown.print(line, highlight=False, markup=False, soft_wrap=True)
        return True
    if options.pace == "real":
        scheduling = prefer_this_process(read_config(options, log))
        if ":" in scheduling:
            sys.stderr.write(f"scheduling is {scheduling}\n")
    with progress_bar(log.name, told) as progress:
        result = replay(
            log, options, progress, lambda text: told.print(text, highlight=False, markup=False, soft_wrap=True)
        )
    for file in files:
        write_run(result.run, file)
    shown.print(stage_table(result))
    for line in lines(result):
        shown.print(line, highlight=False, markup=False, soft_wrap=True)
    written = [str(file) for file in (options.output, *files) if file]
    if written:
        shown.print(f"wrote {', '.join(written)}", highlight=False, markup=False, soft_wrap=True)
    return result.complete


def _parameters(texts: list[str]) -> dict[str, object]:
    """`--set` options by name; values as a parameter file would have them.

    Raises:
        ConfigError: one has no `=`, or its value is not YAML.
    """
    from torchperf_ros.core.errors import ConfigError
    from torchperf_ros.core.params_file import parse_value

    found: dict[str, object] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            msg = f"--set {text!r}: has to be NAME=VALUE, for example perception.budget_ms=40.0"
            raise ConfigError(msg)
        found[name] = parse_value(name, value)
    return found
