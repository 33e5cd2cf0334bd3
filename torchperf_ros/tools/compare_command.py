"""The command `torchperf compare`.

Runs against runs or against a baseline, and the baselines themselves.
"""

from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.tools.shell import Command, File, Files, Texts, check_outputs, console, fail, need, say

if TYPE_CHECKING:
    from torchperf_ros.observe.runs.compare.baselines import BaselineStore
    from torchperf_ros.observe.runs.compare.comparison import Comparison
    from torchperf_ros.observe.runs.compare.verdict import Rules
    from torchperf_ros.observe.runs.run_log import RunLog

_PLAIN_WIDTH: Final = 180
_MIN_EFFECT: Final = (
    "The smallest change that matters: p99=3%, p50=2%,0.2ms (the larger counts), perception.miss=1pp."
)
_LIMIT: Final = (
    "The highest value that the new run may have, whatever the base was: miss=1%, perception.p99=40ms."
)
_SHORT: Final = 12
_TO_THE_SECOND: Final = 19
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
"""Files of a run's or a log's folder; a verdict may be written beside them, and over an older one."""


class CompareCommand(Command):
    """Takes what a shell makes of `--base a*.parquet`.

    Several files after one option, up to the next option.
    """

    # typer's own copy of click's type
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Repeat the option before each of its files."""
        spread: list[str] = []
        flag = ""
        for word in args:
            if word.startswith("-") and word != "-":
                flag = word if word in {"--base", "--new"} else ""
            spread += [word] if not flag else [] if word == flag else [flag, word]
        return super().parse_args(ctx, spread)


def compare(  # noqa: PLR0913, PLR0917 - one for each option
    runs: Annotated[
        Files, Argument(metavar="[BASE] [NEW]", help="The measure, and the run in question.")
    ] = None,
    base: Annotated[Files, Option(metavar="RUN...", help="Several runs that are the measure.")] = None,
    new: Annotated[Files, Option(metavar="RUN...", help="Several runs in question.")] = None,
    baseline: Annotated[
        str, Option(metavar="NAME", help="Compare with this; auto: of the same log and machine.")
    ] = "",
    save: Annotated[str, Option(metavar="NAME", help="Keep as a baseline of this name.")] = "",
    commit: Annotated[str, Option(help="With --save, what the code was; default: what the run says.")] = "",
    replace: Annotated[
        bool, Option("--replace", help="With --save, a baseline of this name gives way.")
    ] = False,
    list_all: Annotated[
        bool, Option("--list", help="Show what baselines there are, the newest first.")
    ] = False,
    folder: Annotated[
        File, Option("--dir", help="Where baselines lie; default: in XDG_STATE_HOME.")
    ] = None,
    min_effect: Annotated[Texts, Option(metavar="[STAGE.]METRIC=CHANGE", help=_MIN_EFFECT)] = None,
    limit: Annotated[Texts, Option(metavar="[STAGE.]METRIC=VALUE", help=_LIMIT)] = None,
    skip: Annotated[Texts, Option(metavar="METRIC", help="Do not look at this metric.")] = None,
    confidence: Annotated[
        float, Option(min=0.5, max=0.9999, help="Of intervals; 1 less the false alarms.")
    ] = 0.95,
    resamples: Annotated[
        int, Option(min=200, max=100_000, help="Of the block bootstrap, for each side.")
    ] = 2000,
    seed: Annotated[int, Option(min=0, help="Of the bootstrap: the same seed, the same verdict.")] = 0,
    across_machines: Annotated[
        bool, Option("--across-machines", help="Also runs of different machines.")
    ] = False,
    strict: Annotated[
        bool, Option("--strict", help="Fail without enough data, or a stage in one run only.")
    ] = False,
    markdown: Annotated[File, Option(help="Write the verdict to this file, for a pull request.")] = None,
    html: Annotated[File, Option(help="Write a page with the distributions to this file.")] = None,
    json: Annotated[File, Option(help="Write all figures to this file.")] = None,
) -> None:
    """Whether runs are worse than others, or only look so.

    Compares latency (p50, p95, p99, longest), jitter, misses, fallbacks, dropped
    frames, lower tiers, outputs, memory, start-up and compile time. Three runs a
    side judge all of them; one run each judges what its frames can. A verdict is
    better, worse, equivalent, or not enough data, with the number of frames that
    would be; a limit holds whatever the verdict is. A run is what `torchperf
    replay --json` or `--parquet` wrote, records (.jsonl), or a log with a node's
    /perf topics. One run alone is compared with its baseline.

    Metrics: p50, p95, p99, max, jitter, miss, fallback, dropped, lower_tier,
    outputs, memory_peak, memory_slope, start_up, compile. What decides, and how
    often it is wrong: docs/testing.md#comparing-runs.

    Example: torchperf compare main.parquet branch.parquet --limit miss=1% --markdown verdict.md

    Example: torchperf compare --base main*.parquet --new branch*.parquet

    Example: torchperf compare main.parquet --save main; torchperf compare branch.parquet --baseline main

    Exit status: 0 if nothing is worse, 1 if something is or breaks a limit (with
    --strict also if a run lacks a stage), 2 if the runs cannot be compared, 3 if
    there is not enough data for any metric (with --strict: for one).
    """
    from torchperf_ros.observe.runs.compare.baselines import BaselineStore

    store = BaselineStore(folder)
    if list_all:
        _list(store)
        return
    if save:
        kept = store.save(
            [*(runs or ()), *(new or ())] or fail("--save: name a run"), save, commit, replace
        )
        typer.echo(f"saved {kept.name} in {kept.runs[0].parent}")
        return
    need("scipy", "arch", *(("plotly", "jinja2") if html else ()))
    from torchperf_ros.observe.runs.compare import verdict_text as text
    from torchperf_ros.observe.runs.compare.verdict import METRICS, Rules, read_limits, read_margins

    if unknown := [key for key in skip or () if key not in METRICS]:
        fail(f"--skip {unknown[0]!r}: no such metric; there are: {', '.join(METRICS)}")
    sides = _sides(runs or [], base or [], new or [], baseline)
    check_outputs(
        {"--markdown": markdown, "--html": html, "--json": json}, sides[0] + sides[1], _OF_INPUT_FOLDERS
    )
    rules = Rules(
        read_margins(min_effect or ()),
        read_limits(limit or ()),
        1 - confidence,
        frozenset(skip or ()),
        resamples,
        seed,
    )
    found = _compare(sides, store, "" if sides[0] else baseline or "auto", rules, across_machines)
    _show(found)
    status = found.status(strict)
    if markdown:
        _write("--markdown", markdown, text.markdown(found))
    if html:
        from torchperf_ros.observe.runs.compare.verdict_page import verdict_page

        _write("--html", html, verdict_page(found))
    if json:
        _write("--json", json, text.to_json(found, status))
    raise typer.Exit(status)


def _sides(
    runs: list[Path], base: list[Path], new: list[Path], baseline: str
) -> tuple[list[Path], list[Path]]:
    if baseline and not base:
        if bool(runs) == bool(new):
            fail("name the runs that are compared with the baseline: `compare NEW --baseline NAME`")
        return [], runs or new
    if base and new and not runs and not baseline:
        return base, new
    if base or new:
        fail("name both sides: `compare BASE NEW`, or `compare --base RUN... --new RUN...`")
    if len(runs) not in {1, 2}:
        fail(
            "name two runs, one to be compared with its baseline, or several: `--base RUN... --new RUN...`"
        )
    return runs[:-1], runs[-1:]


def _compare(
    sides: tuple[list[Path], list[Path]],
    store: "BaselineStore",
    baseline: str,
    rules: "Rules",
    across_machines: bool,
) -> "Comparison":
    from torchperf_ros.observe.runs.compare.baselines import AUTO
    from torchperf_ros.observe.runs.compare.comparison import compare as judge
    from torchperf_ros.observe.runs.run_log_source import load_run

    with console(stderr=True).status("reading") as shown:

        def read(path: Path) -> "RunLog":
            shown.update(f"reading {path.name}")
            return load_run(path)

        if baseline and baseline != AUTO:
            store.get(baseline)
        base, new = ([read(path) for path in side] for side in sides)
        if baseline:
            one = store.best_for(new[0], across_machines) if baseline == AUTO else store.get(baseline)
            typer.echo(f"baseline: {one.name}, saved {one.card['saved_at'][:_TO_THE_SECOND]} UTC", err=True)
            base = [changed(read(path), name=f"baseline {one.name}") for path in one.runs]
        return judge(base, new, rules, across_machines, shown.update)


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error


def _show(comparison: "Comparison") -> None:
    from rich.markup import escape
    from rich.table import Table

    from torchperf_ros.observe.runs.compare import verdict_text as text
    from torchperf_ros.observe.runs.compare.verdict import Verdict

    shown, bad = console(_PLAIN_WIDTH), "bold red"
    styles = {
        Verdict.WORSE: bad,
        Verdict.BETTER: "green",
        Verdict.NOT_ENOUGH: "yellow",
        Verdict.INFORMATIVE: "dim",
    }
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    heads = text.columns(comparison)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number in {0, len(heads) - 1} else "right")
    for finding, row in zip(comparison.findings, text.rows(comparison.findings), strict=True):
        table.add_row(
            *map(escape, row), style=bad if finding.breaks_limit else styles.get(finding.verdict, "")
        )
    shown.print(table)
    for line in (*text.remarks(comparison), *text.samples(comparison)):
        say(shown, f"- {line}")
    worse = comparison.with_verdict(Verdict.WORSE) or comparison.broken_limits
    style = bad if worse else "bold yellow" if text.conspicuous(comparison) else "bold"
    say(shown, text.headline(comparison), style)


def _list(store: "BaselineStore") -> None:
    from rich.table import Table

    found = store.all()
    if not found:
        typer.echo(f"no baselines in {store.folder}")
        return
    table = Table(
        "name",
        "saved",
        "commit",
        "log",
        "machine",
        "runs",
        "frames",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for one in found:
        card = one.card
        frames = ", ".join(f"{stage} {count:,}" for stage, count in card["frames"].items())
        machine = " ".join(filter(None, [card["cpu"], card["fingerprint"][:_SHORT]])) or "-"
        table.add_row(
            one.name,
            card["saved_at"][:_TO_THE_SECOND],
            card["commit"][:_SHORT] or "-",
            card["log"] or "-",
            machine,
            str(len(one.runs)),
            frames,
        )
    console(_PLAIN_WIDTH).print(table)
