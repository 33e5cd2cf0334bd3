"""The command `torchperf regress`."""

from pathlib import Path
from typing import Annotated

import typer

from torchperf_ros.analysis import regress_request as options
from torchperf_ros.core.errors import TorchperfError


def regress_command(  # noqa: PLR0913, PLR0917 - one for each option
    base: Annotated[Path, typer.Argument(help="The run that is the measure.")],
    new: Annotated[Path, typer.Argument(help="The run in question.")],
    min_effect: options.MinEffectOption = None,
    min_effects: options.MinEffectsOption = None,
    skip: options.SkipOption = None,
    confidence: options.ConfidenceOption = 0.95,
    correction: options.CorrectionOption = "holm",
    resamples: options.ResamplesOption = 2000,
    seed: options.SeedOption = 0,
    across_machines: options.AcrossMachinesOption = False,
    strict: options.StrictOption = False,
    markdown: options.MarkdownOption = None,
    html: options.HtmlOption = None,
    json: options.JsonOption = None,
) -> None:
    """Whether a run is worse than another, or only looks so.

    Compares latency (p50, p95, p99, longest), jitter, misses, fallbacks,
    dropped frames, outputs, memory, start-up and compile time. Frames that
    follow each other are alike, so the intervals come from a block bootstrap.
    A verdict is better, worse, equivalent, or not enough data, with the number
    of frames that would be. Both runs are what `torchperf replay --json` or
    `--parquet` wrote, records (.jsonl), or logs with a node's /perf topics.

    Metrics: p50, p95, p99, max, jitter, miss, fallback, dropped, outputs,
    memory_peak, memory_slope, start_up, compile. What decides, and how often it
    is wrong: docs/regression.md.

    Example: torchperf regress main.parquet branch.parquet --min-effect p99=3% --markdown verdict.md

    Exit status: 0 if nothing is worse, 1 if something is (with --strict also if
    there is not enough data), 2 if the runs cannot be compared.
    """
    request = options.RegressRequest(
        min_effect or (), min_effects, skip or (), confidence, correction, resamples, seed, across_machines, strict,
        markdown, html, json,
    )  # fmt: skip
    status = 0
    try:
        status = options.regress(request, base, new)
    except (TorchperfError, OSError) as error:
        options.fail(str(error))
    raise typer.Exit(status)
