"""The command `torchperf compare`: runs against runs."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from torchperf_ros.tools.shell import (
    Command,
    Files,
    console,
    fail,
    files_by_suffix,
    need,
    outputs_option,
    say,
    write_output,
)

if TYPE_CHECKING:
    from torchperf_ros.observe.runs.comparison import Comparison

_PLAIN_WIDTH: Final = 180
_PERCENT: Final = 100.0
# Files of a run's or a log's folder; a verdict may be written beside them, and over an older one.
_OF_INPUT_FOLDERS: Final = (
    ".parquet",
    ".jsonl",
    ".mcap",
    ".mcap.zstd",
    ".db3",
    ".db3.zstd",
    ".bag",
    "metadata.yaml",
    "summary.json",
)


class CompareCommand(Command):
    """Takes several files after `--new`, which is what a shell makes of `--new a*.parquet`."""

    # typer's own copy of click's type
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Repeat `--new` before each of its files; `--base`, which may stand there, adds nothing."""
        spread: list[str] = []
        is_new = False
        for word in args:
            is_flag = word.startswith("-") and word != "-"
            is_new = word == "--new" if is_flag else is_new
            if not is_flag:
                spread += ["--new", word] if is_new else [word]
            elif word not in {"--new", "--base"}:
                spread.append(word)
        return super().parse_args(ctx, spread)


def compare(
    runs: Annotated[
        Files, Argument(metavar="[BASE NEW]", help="The baseline, and the run to judge.")
    ] = None,
    new: Annotated[
        Files, Option(metavar="RUN...", help="Several runs to judge; all before are the baseline.")
    ] = None,
    margin: Annotated[
        float | None,
        Option(
            min=0.0, max=1000.0, metavar="PERCENT", help="Change of p50, p99 that matters; default 2, 3."
        ),
    ] = None,
    max_miss: Annotated[
        float | None,
        Option(min=0.0, max=100.0, metavar="PERCENT", help="Fail if a stage of NEW misses more frames."),
    ] = None,
    across_machines: Annotated[
        bool, Option("--across-machines", help="Also compare runs of different machines.")
    ] = False,
    strict: Annotated[
        bool, Option("--strict", help="Fail without enough data, or for a stage in one run only.")
    ] = False,
    output: Annotated[
        Files,
        outputs_option(
            "Write the verdict (.md), a page with the distributions (.html), all figures (.json).",
        ),
    ] = None,
) -> None:
    """Judge whether runs are worse than others.

    Judges p50 and p99 latency, misses, lower tiers and outputs of each stage;
    with three runs a side also jitter, fallbacks, dropped frames, memory,
    start-up and compile time, which are shown otherwise. A verdict is better,
    worse, equivalent, or not enough data, with the number of frames that would
    be. A run is what `torchperf replay -o` wrote (.json, .parquet), records
    (.jsonl), or a log with a node's /perf topics. A baseline is such a file.

    What decides, and how often it is wrong: docs/testing.md#comparing-runs.

    Example: torchperf compare main.parquet branch.parquet --max-miss 1 -o verdict.md

    Example: torchperf compare main*.parquet --new branch*.parquet

    Exit status: 0 if nothing is worse, 1 if something is or misses are over
    their limit (with --strict also if a run lacks a stage), 2 if the runs cannot
    be compared, 3 if there is not enough data for any metric (with --strict: for
    one).
    """
    sides = _sides(runs or [], new or [])
    files = files_by_suffix(
        output, ".md", ".html", ".json", inputs=sides[0] + sides[1], kept=_OF_INPUT_FOLDERS
    )
    need("scipy", "arch", *(("plotly", "jinja2") if ".html" in files else ()))
    from torchperf_ros.observe.runs import verdict as text
    from torchperf_ros.observe.runs.comparison import compare as judge
    from torchperf_ros.replay.run_reading import load_run

    with console(stderr=True).status("reading") as shown:
        logs = [[load_run(path) for path in side] for side in sides]
        found = judge(
            *logs,
            margin=None if margin is None else margin / _PERCENT,
            max_miss=math.nan if max_miss is None else max_miss,
            across_machines=across_machines,
            progress=shown.update,
        )
    _show(found)
    status = found.status(strict)
    if ".md" in files:
        write_output(files[".md"], text.markdown(found))
    if ".html" in files:
        from torchperf_ros.observe.runs.verdict import verdict_page

        write_output(files[".html"], verdict_page(found))
    if ".json" in files:
        write_output(files[".json"], text.to_json(found, status))
    raise typer.Exit(status)


def _sides(runs: list[Path], new: list[Path]) -> tuple[list[Path], list[Path]]:
    if runs and new:
        return runs, new
    if len(runs) != 2:  # noqa: PLR2004
        fail("name two runs, `compare BASE NEW`, or several: `compare BASE... --new NEW...`")
    return runs[:1], runs[1:]


def _show(comparison: "Comparison") -> None:
    from torchperf_ros.api.text import console_table
    from torchperf_ros.observe.runs import verdict as text
    from torchperf_ros.observe.runs.changes import Judgement

    shown, bad = console(_PLAIN_WIDTH), "bold red"
    looks = {
        Judgement.WORSE: bad,
        Judgement.BETTER: "green",
        Judgement.NOT_ENOUGH: "yellow",
        Judgement.INFORMATIVE: "dim",
    }
    first, *numbers, last = text.COLUMNS
    heads = (first, *(f">{name}" for name in numbers), last)
    styles = [bad if one.breaks_limit else looks.get(one.verdict, "") for one in comparison.changes]
    shown.print(console_table(heads, text.rows(comparison.changes), styles))
    for line in (*text.remarks(comparison), *text.samples(comparison)):
        say(shown, f"- {line}")
    worse = comparison.with_verdict(Judgement.WORSE) or comparison.broken_limits
    style = bad if worse else "bold yellow" if text.conspicuous(comparison) else "bold"
    say(shown, text.headline(comparison), style)
