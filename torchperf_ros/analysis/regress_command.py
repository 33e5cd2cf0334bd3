"""The command `torchperf regress`."""

from pathlib import Path
from typing import Annotated

import typer

from torchperf_ros.analysis.regress_request import RegressRequest, regress, with_request


@with_request
def regress_command(
    base: Annotated[Path, typer.Argument(help="The run that is the measure.")],
    new: Annotated[Path, typer.Argument(help="The run in question.")],
    request: RegressRequest,
) -> int:
    """Whether a run is worse than another, or only looks so.

    Compares latency (p50, p95, p99, longest), jitter, misses, fallbacks,
    dropped frames, outputs, memory, start-up and compile time. Frames that
    follow each other are alike, so the intervals come from a block bootstrap.
    A verdict is better, worse, equivalent, or not enough data, with the number
    of frames that would be; a limit holds whatever the verdict is. Both runs are
    what `torchperf replay --json` or `--parquet` wrote, records (.jsonl), or logs
    with a node's /perf topics.

    Metrics: p50, p95, p99, max, jitter, miss, fallback, dropped, outputs,
    memory_peak, memory_slope, start_up, compile. What decides, and how often it
    is wrong: docs/regression.md.

    Example: torchperf regress main.parquet branch.parquet --limit miss=1% --markdown verdict.md

    Exit status: 0 if nothing is worse, 1 if something is or breaks a limit (with
    --strict also if there is not enough data), 2 if the runs cannot be compared.
    """
    return regress(request, base, new)
