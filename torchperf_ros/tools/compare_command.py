"""The command `torchperf compare`: runs against runs."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools.shell import Command, File, Files, check_outputs, console, fail, need, say

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
_STORE: Final = "a baseline is a run's file: keep a copy of it, and name it as BASE"
# Options that the command no longer has, and what to write instead.
_GONE: Final = {
    "--baseline": "a baseline is a run's file: `torchperf compare BASE NEW`",
    **dict.fromkeys(("--save", "--commit", "--replace", "--list", "--dir"), _STORE),
    "--min-effect": "`--margin PERCENT` sets the change of p50 and p99 that matters",
    "--limit": "`--max-miss PERCENT` limits the misses; other figures are in --json",
    "--skip": "p50, p99, misses, lower tiers and outputs are judged; other figures are in --json",
    "--confidence": "all verdicts together have a chance of 5 % of a false alarm",
    "--resamples": "it is fixed at 1,000",
    "--seed": "it is fixed: the same runs have the same verdict",
}


class CompareCommand(Command):
    """Takes several files after `--base` or `--new`, which is what a shell makes of `--base a*.parquet`."""

    # typer's own copy of click's type
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Repeat an option before each of its files; name what replaces an option of older versions."""
        spread: list[str] = []
        flag = ""
        for word in args:
            name = word.partition("=")[0]
            if name in _GONE:
                fail(f"{name}: there is no such option any more; {_GONE[name]}")
            if word.startswith("-") and word != "-":
                flag = word if word in {"--base", "--new"} else ""
            spread += [word] if not flag else [] if word == flag else [flag, word]
        return super().parse_args(ctx, spread)


def compare(  # noqa: PLR0913, PLR0917 - one for each option
    runs: Annotated[
        Files, Argument(metavar="[BASE NEW]", help="The baseline, and the run to judge.")
    ] = None,
    base: Annotated[Files, Option(metavar="RUN...", help="Several runs as the baseline.")] = None,
    new: Annotated[Files, Option(metavar="RUN...", help="Several runs to judge.")] = None,
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
    markdown: Annotated[File, Option(help="Write the verdict to this file, for a pull request.")] = None,
    html: Annotated[File, Option(help="Write a page with the distributions to this file.")] = None,
    json: Annotated[File, Option(help="Write all figures to this file.")] = None,
) -> None:
    """Judge whether runs are worse than others.

    Judges p50 and p99 latency, misses, lower tiers and outputs of each stage;
    with three runs a side also jitter, fallbacks, dropped frames, memory,
    start-up and compile time, which are shown otherwise. A verdict is better,
    worse, equivalent, or not enough data, with the number of frames that would
    be. A run is what `torchperf replay --json` or `--parquet` wrote, records
    (.jsonl), or a log with a node's /perf topics. A baseline is such a file.

    What decides, and how often it is wrong: docs/testing.md#comparing-runs.

    Example: torchperf compare main.parquet branch.parquet --max-miss 1 --markdown verdict.md

    Example: torchperf compare --base main*.parquet --new branch*.parquet

    Exit status: 0 if nothing is worse, 1 if something is or misses are over
    their limit (with --strict also if a run lacks a stage), 2 if the runs cannot
    be compared, 3 if there is not enough data for any metric (with --strict: for
    one).
    """
    need("scipy", "arch", *(("plotly", "jinja2") if html else ()))
    from torchperf_ros.observe.runs import verdict as text
    from torchperf_ros.observe.runs.comparison import compare as judge
    from torchperf_ros.replay.run_reading import load_run

    sides = _sides(runs or [], base or [], new or [])
    outputs = {"--markdown": markdown, "--html": html, "--json": json}
    check_outputs(outputs, sides[0] + sides[1], _OF_INPUT_FOLDERS)
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
    if markdown:
        _write("--markdown", markdown, text.markdown(found))
    if html:
        from torchperf_ros.observe.runs.verdict import verdict_page

        _write("--html", html, verdict_page(found))
    if json:
        _write("--json", json, text.to_json(found, status))
    raise typer.Exit(status)


def _sides(runs: list[Path], base: list[Path], new: list[Path]) -> tuple[list[Path], list[Path]]:
    if base and new and not runs:
        return base, new
    if base or new:
        fail("name both sides: `compare BASE NEW`, or `compare --base RUN... --new RUN...`")
    if len(runs) != 2:  # noqa: PLR2004
        fail("name two runs, `compare BASE NEW`, or several: `--base RUN... --new RUN...`")
    return runs[:1], runs[1:]


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error


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
