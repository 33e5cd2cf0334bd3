"""The commands `torchperf baseline save|list|show|delete|compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchperf_ros.analysis import regress_request as options
from torchperf_ros.core.errors import TorchperfError

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.analysis.baseline_store import Baseline

app = typer.Typer(
    no_args_is_help=True,
    help="Runs that others are measured against, keyed by commit, machine, model and log.",
)

DirOption = Annotated[
    Path | None, typer.Option("--dir", help="Where baselines lie; default: the user's state folder (XDG_STATE_HOME).")
]
_SHORT = 12
_TO_THE_SECOND = 19


@app.command()
def save(
    run: Annotated[Path, typer.Argument(help="What `torchperf replay --json` or `--parquet` wrote.")],
    name: Annotated[str, typer.Option(help="Of the baseline; default: made of commit, log, machine and model.")] = "",
    commit: Annotated[str, typer.Option(help="What the code was; default: what the run says.")] = "",
    replace: Annotated[bool, typer.Option("--replace", help="A baseline of this name gives way.")] = False,
    folder: DirOption = None,
) -> None:
    """Keep a run, to measure others against it.

    Example: torchperf baseline save main.parquet --name main --replace

    Exit status: 0, or 2 if it cannot be kept.
    """
    from torchperf_ros.analysis.baseline_store import BaselineStore

    try:
        kept = BaselineStore(folder).save(run, name, commit, replace)
    except (TorchperfError, OSError) as error:
        options.fail(str(error))
    typer.echo(f"saved {kept.name} in {kept.run.parent}")


@app.command("list")
def list_baselines(folder: DirOption = None) -> None:
    """What baselines there are, the newest first.

    Example: torchperf baseline list

    Exit status: 0, or 2 if one cannot be read.
    """
    from rich.table import Table

    from torchperf_ros.analysis.baseline_store import BaselineStore

    store = BaselineStore(folder)
    try:
        found = store.all()
    except (TorchperfError, OSError) as error:
        options.fail(str(error))
    if not found:
        typer.echo(f"no baselines in {store.folder}")
        return
    table = Table("name", "saved", "commit", "log", "machine", "frames", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for one in found:
        frames = ", ".join(f"{stage} {count:,}" for stage, count in one.frames.items())
        machine = " ".join(filter(None, [one.cpu, one.fingerprint[:_SHORT]])) or "-"
        table.add_row(
            one.name, one.saved_at[:_TO_THE_SECOND], one.commit[:_SHORT] or "-", one.log or "-", machine, frames
        )
    _console().print(table)


@app.command()
def show(name: Annotated[str, typer.Argument(help="Of the baseline.")], folder: DirOption = None) -> None:
    """What a baseline is a run of, and its figures.

    Example: torchperf baseline show main

    Exit status: 0, or 2 if there is none of this name.
    """
    from torchperf_ros.analysis.baseline_store import BaselineStore

    try:
        _show(BaselineStore(folder).get(name))
    except (TorchperfError, OSError) as error:
        options.fail(str(error))


@app.command()
def delete(
    name: Annotated[str, typer.Argument(help="Of the baseline.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted, and leave it.")] = False,
    folder: DirOption = None,
) -> None:
    """Delete a baseline, without asking.

    Example: torchperf baseline delete main

    Exit status: 0, or 2 if there is none of this name.
    """
    from torchperf_ros.analysis.baseline_store import BaselineStore

    try:
        place = BaselineStore(folder).delete(name, dry_run)
    except (TorchperfError, OSError) as error:
        options.fail(str(error))
    typer.echo(f"{'would delete' if dry_run else 'deleted'} {name} in {place}")


@app.command()
@options.with_request
def compare(
    new: Annotated[Path, typer.Argument(help="The run in question.")],
    request: options.RegressRequest,
    to: Annotated[
        str, typer.Option(help="Compare with this baseline; default: that of the same log and machine.")
    ] = "",
    folder: DirOption = None,
) -> int:
    """Whether a run is worse than its baseline.

    The baseline is the one of the same log on the same machine; of several, one
    of the same model, then of the same parameters, then the newest. The rest is
    as with `torchperf regress`.

    Example: torchperf baseline compare branch.parquet --to main --html verdict.html

    Exit status: 0 if nothing is worse, 1 if something is or breaks a limit (with
    --strict also if there is not enough data), 2 if there is no baseline or it
    cannot be compared.
    """
    from torchperf_ros.analysis.baseline_store import BaselineStore
    from torchperf_ros.analysis.regress_run import load_run

    request.check(new)
    store = BaselineStore(folder)
    baseline = store.get(to) if to else store.best_for(load_run(new), request.across_machines)
    typer.echo(f"baseline: {baseline.name}, saved {baseline.saved_at[:_TO_THE_SECOND]} UTC", err=True)
    return options.regress(request, baseline.run, new, (f"baseline {baseline.name}", str(new)))


def _show(one: "Baseline") -> None:
    from rich.table import Table

    from torchperf_ros.analysis.regress_run import load_run
    from torchperf_ros.analysis.regress_text import number
    from torchperf_ros.core.percent import percent
    from torchperf_ros.core.quantiles import Quantiles

    told = {
        "baseline": one.name, "saved": f"{one.saved_at[:_TO_THE_SECOND]} UTC", "file": str(one.run),
        "commit": one.commit or "not told",
        "log": f"{one.log or 'not told'} {one.log_sha256[:_SHORT]}",
        "machine": f"{one.cpu or 'not told'} {one.fingerprint}", "parameters": one.params_sha256[:_SHORT] or "not told",
        **{f"model of {stage}": value[:_SHORT] or "not told" for stage, value in one.model.items()},
    }  # fmt: skip
    console = _console()
    for key, value in told.items():
        console.print(f"{key}: {value}", highlight=False, markup=False, soft_wrap=True)
    table = Table("stage", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("frames", "p50 ms", "p95 ms", "p99 ms", "longest ms", "on time"):
        table.add_column(column, justify="right")
    for stage in load_run(one.run).stages.values():
        found = Quantiles.of(stage.total_ms)
        on_time = percent(1.0 - float(stage.missed.mean()), 2) if len(stage) else "-"
        table.add_row(stage.name, f"{len(stage):,}", *(number(value) for _, value in found.items()), on_time)
    console.print(table)


def _console() -> "Console":
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=options.PLAIN_WIDTH)
