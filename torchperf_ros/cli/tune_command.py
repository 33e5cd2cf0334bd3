"""The command `torchperf tune`. torch is loaded by the processes that try candidates, not here."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from torchperf_ros.config.build_options import ENGINES

_BAD_INPUT = 2
_WIDTH = 140
_MOST_BATCH = 1000


def tune_command(  # noqa: PLR0913, PLR0917 - one for each option
    adapter: Annotated[str | None, typer.Option(help="module:Class of the adapter to tune.")] = None,
    params: Annotated[
        Path | None, typer.Option(help="A node's parameter file instead; what is found is put into its parameters.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Stage of --params; or its name in the YAML; default: by the adapter.")
    ] = None,
    budget_ms: Annotated[
        float | None, typer.Option(help="The stage's budget, which the model's p99 must fit; default: as the node's.")
    ] = None,
    max_memory_mb: Annotated[float | None, typer.Option(help="Most memory of the process that runs it.")] = None,
    max_error: Annotated[float | None, typer.Option(help="Largest relative L2 distance from eager fp32.")] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="Only this tier; repeatable. The first is tuned, the rest checked.")
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(help="All tiers of the --adapter, most accurate first; default: full,medium,fast."),
    ] = None,
    options: Annotated[str | None, typer.Option(help="JSON object, handed to the adapter.")] = None,
    output_topic: Annotated[
        str | None, typer.Option(help="In the YAML; default: the stage's, or STAGE_output.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Only these engines, see docs/models.md; repeatable. Default: all that are installed."),
    ] = None,
    tables: Annotated[
        bool, typer.Option("--tables", help="Try each option by itself on the first tier, in place of a search.")
    ] = False,
    batch: Annotated[str, typer.Option(help="With --tables: batch sizes to try in each engine, as 1,2,4.")] = "",
    minutes: Annotated[float, typer.Option(help="For the whole search.")] = 10.0,
    timeout_s: Annotated[float, typer.Option(help="A candidate that takes longer is killed.")] = 180.0,
    seconds: Annotated[float, typer.Option(help="Measuring, for each candidate, and as long for eager.")] = 3.0,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Write the parameters, as YAML.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every figure.")] = None,
    state: Annotated[Path | None, typer.Option(help="Where results are kept; default: the cache folder.")] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Measure anew what is known.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be tried.")] = False,
) -> None:
    """Find how your model runs best on this machine, and write it as the node's parameters.

    Searches engine, mode, precision, layout, threads, buckets and CUDA graphs
    for the smallest p99 within the limits: one option after the other from the
    best so far, cheap ones first. Every candidate runs in a process of its own,
    is compared with eager fp32, and is timed in turns with it. What is hopeless
    is given up early; what crashes or hangs is noted. Results are kept: the same
    command goes on where the last one ended.

    The first tier is tuned, with three quarters of the time. What is best there
    is then checked on the others, which may only differ in precision.

    With --tables it tries each option by itself: whether the model bears it,
    what it gains and costs (start, compiling, memory), and why it is left out.

    Example: torchperf tune --adapter my_robot.segmenter:Segmenter --tiers full,fast --budget-ms 40 -o tuned.yaml

    Exit status: 0 if something fits the limits, 1 if not, 2 if the input cannot be used, 130 after Ctrl-C.
    """
    from rich.console import Console

    from torchperf_ros.frame.errors import ConfigError, TorchperfError
    from torchperf_ros.optimize.tune.ranking import Limits
    from torchperf_ros.optimize.tune.run import TuneRun
    from torchperf_ros.optimize.tune.target import target_of_adapter, target_of_file

    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    numbers = {"--budget-ms": budget_ms, "--max-memory-mb": max_memory_mb, "--max-error": max_error,
               "--minutes": minutes, "--timeout-s": timeout_s, "--seconds": seconds}  # fmt: skip
    try:
        for name, number in numbers.items():
            if number is not None and not 0 < number < math.inf:
                raise ConfigError(f"{name} {number:g} is not allowed; it has to be a number above 0")
        for name, path in {"--out": out, "--json": json_file, "--state": state}.items():
            if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
                raise ConfigError(f"{name} {path} cannot be written; it has to be a file in an existing folder")
        for name in engine or ():
            if name not in ENGINES:
                raise ConfigError(f"--engine {name!r} is not allowed; it has to be one of {', '.join(ENGINES)}")
        words = [word.strip() for word in batch.split(",") if batch]
        if not all(word.isdecimal() and 1 <= int(word) <= _MOST_BATCH for word in words) or (words and not tables):
            msg = f"--batch {batch!r} is not allowed; it has to be numbers from 1 to {_MOST_BATCH}, with --tables"
            raise ConfigError(msg)
        values = {"options": options, "output": output_topic, "budget_ms": budget_ms}
        if params is not None and (adapter, options, tiers) == (None, None, None):
            target = target_of_file(params, stage, values, device)
        elif adapter is not None and params is None:
            names = [name.strip() for name in (tiers or "full,medium,fast").split(",")]
            target = target_of_adapter(adapter, stage, names, values, device or "auto")
        else:
            msg = (
                "either --adapter module:Class, with --options and --tiers, or --params FILE, with --stage, says what"
                " to tune: one of the two"
            )
            raise ConfigError(msg)
        limits = Limits(target.stage.budget_ms, max_memory_mb or math.inf, max_error or math.inf)
        batches = [int(word) for word in words] if tables else None
        run = TuneRun(target.with_tiers(tier or ()), limits, engine, seconds, console, batches)
        run.open_state(state, resume=not no_resume)
        status = run.plan() if dry_run else run.search(minutes, timeout_s)
        if not dry_run:
            run.report(out, json_file)
    except (TorchperfError, OSError) as error:
        sys.stderr.write(f"torchperf: {error}\n")
        raise typer.Exit(_BAD_INPUT) from None
    raise typer.Exit(status)
