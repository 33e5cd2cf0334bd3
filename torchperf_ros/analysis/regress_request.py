"""Compare two runs as a command asks for it: read, compare, show, write."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from torchperf_ros.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.analysis.regress_compare import Comparison
    from torchperf_ros.analysis.regress_run import RunFrames

BAD_INPUT: Final = 2
PLAIN_WIDTH: Final = 160
_LEAST_RESAMPLES: Final = 200
_OF_INPUT_FOLDERS: Final = (
    ".parquet", ".jsonl", ".mcap", ".mcap.zstd", ".db3", ".db3.zstd", ".bag", "metadata.yaml", "summary.json",
)  # fmt: skip
"""Files of a run's or a log's folder; a verdict may be written beside them, and over an older one."""

MinEffectOption = Annotated[
    list[str] | None,
    typer.Option(
        "--min-effect", metavar="[STAGE.]METRIC=CHANGE",
        help="The smallest change that matters: p99=3%, p50=2%,0.2ms (the larger counts), perception.miss=1pp.",
    ),
]  # fmt: skip
MinEffectsOption = Annotated[
    Path | None, typer.Option("--min-effects", help="The same in a YAML file: {p99: 3%, perception: {miss: 1pp}}.")
]
SkipOption = Annotated[list[str] | None, typer.Option("--skip", metavar="METRIC", help="Do not look at this metric.")]
ConfidenceOption = Annotated[
    float, typer.Option("--confidence", min=0.5, max=0.9999, help="Of the intervals; 1 less the rate of false alarms.")
]
CorrectionOption = Annotated[
    str, typer.Option("--correction", help="For the number of comparisons: holm, bh (Benjamini-Hochberg) or none.")
]
ResamplesOption = Annotated[
    int, typer.Option("--resamples", min=_LEAST_RESAMPLES, max=100_000, help="Of the block bootstrap, for each run.")
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap: the same seed, the same verdict.")]
AcrossMachinesOption = Annotated[
    bool, typer.Option("--across-machines", help="Compare runs of different machines all the same.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Fail, too, where there is not enough data, or a stage is in one run only.")
]
MarkdownOption = Annotated[
    Path | None, typer.Option("--markdown", help="Write the verdict to this file, for a pull request.")
]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write a page with the distributions to this file.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")]


@dataclass(frozen=True)
class RegressRequest:
    """What the options say; see their help."""

    min_effect: Sequence[str] = ()
    min_effects: Path | None = None
    skip: Sequence[str] = ()
    confidence: float = 0.95
    correction: str = "holm"
    resamples: int = 2000
    seed: int = 0
    across_machines: bool = False
    strict: bool = False
    markdown: Path | None = None
    html: Path | None = None
    json: Path | None = None

    def check(self, *inputs: Path) -> None:
        """See that everything can be done, before anything is.

        Args:
            inputs: the runs, which no output may replace.

        Raises:
            ConfigError: an option has a value that is not allowed.
        """
        from torchperf_ros.analysis.regress_effect import METRICS
        from torchperf_ros.analysis.regress_verdict import CORRECTIONS

        if self.correction not in CORRECTIONS:
            msg = f"--correction {self.correction!r}: has to be one of {', '.join(CORRECTIONS)}"
            raise ConfigError(msg)
        for key in self.skip:
            if key not in METRICS:
                msg = f"--skip {key!r}: no such metric; there are: {', '.join(METRICS)}"
                raise ConfigError(msg)
        self._check_outputs([*inputs, *([self.min_effects] if self.min_effects else [])])

    def _check_outputs(self, inputs: Sequence[Path]) -> None:
        seen: dict[str, Path] = {}
        for flag in ("markdown", "html", "json"):
            path: Path | None = getattr(self, flag)
            if path is None:
                continue
            if path.is_dir() or not path.absolute().parent.is_dir():
                msg = f"--{flag} {path}: needs a file name in an existing folder"
                raise ConfigError(msg)
            if hit := next((one for one in inputs if _is_of(path, one)), None):
                msg = f"--{flag} {path}: would replace the input {hit}; name another file"
                raise ConfigError(msg)
            if other := next((name for name, one in seen.items() if _same(path, one)), ""):
                msg = f"--{flag} {path}: is the file of --{other}, too; name another file"
                raise ConfigError(msg)
            seen[flag] = path


def _same(path: Path, other: Path) -> bool:
    """Whether two paths are one file, whatever links there are."""
    return path.resolve() == other.resolve() or (path.exists() and other.exists() and path.samefile(other))


def _is_of(path: Path, source: Path) -> bool:
    """Whether a file is an input, or one of those that an input folder is made of."""
    if not source.is_dir():
        return _same(path, source)
    inside = path.is_file() and path.resolve().is_relative_to(source.resolve())
    return inside and path.resolve().name.endswith(_OF_INPUT_FOLDERS)


def regress(request: RegressRequest, base: Path, new: Path, names: tuple[str, str] | None = None) -> int:
    """Compare two runs, show the verdict, write what was asked for; returns the exit status.

    Args:
        request: how.
        base: the run that is the measure.
        new: the run in question.
        names: what to call them instead of their paths.

    Raises:
        TorchperfError: a run cannot be read, or they cannot be compared.
        OSError: an output cannot be written.
    """
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from torchperf_ros.analysis.regress_compare import compare
    from torchperf_ros.analysis.regress_effect import MinEffects, read_min_effects
    from torchperf_ros.analysis.regress_run import load_run
    from torchperf_ros.analysis.regress_stage import Resampling
    from torchperf_ros.analysis.regress_verdict import Rules

    request.check(base, new)
    settings = [*(read_min_effects(request.min_effects) if request.min_effects else []), *request.min_effect]
    alpha = 1 - request.confidence
    rules = Rules(MinEffects(settings), alpha, request.correction, frozenset(request.skip))
    resampling = Resampling(request.resamples, request.seed, alpha, _curve() if request.html else ())
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def read(path: Path) -> "RunFrames":
            task = bar.add_task(f"reading {path.name}", total=None)
            return load_run(path, lambda done, total: bar.update(task, completed=done, total=total))

        runs = [read(path) for path in (base, new)]
        if names:
            runs = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
        task = bar.add_task("resampling", total=None)
        comparison = compare(
            runs[0], runs[1], rules, resampling, request.across_machines,
            lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    status = comparison.status(request.strict)
    console = Console()
    _show(comparison, request, console if console.is_terminal else Console(width=PLAIN_WIDTH))
    if request.markdown:
        from torchperf_ros.analysis.regress_text import markdown

        request.markdown.write_text(markdown(comparison, request.confidence), encoding="utf-8")
    if request.html:
        from torchperf_ros.analysis.regress_page import write_page

        write_page(comparison, request.confidence, request.html)
    if request.json:
        from torchperf_ros.analysis.regress_json import write_json

        write_json(comparison, status, rules, resampling, request.json)
    return status


def fail(text: str) -> None:
    """One line for what cannot be done, and the status 2."""
    sys.stderr.write(f"torchperf: {text}\n")
    raise typer.Exit(BAD_INPUT)


def _curve() -> tuple[float, ...]:
    """Quantiles for the picture; where it cannot be drawn, that is said before anything is computed."""
    import importlib.util

    if importlib.util.find_spec("plotly") is None:
        msg = "--html: plotly is not installed: `pip install torchperf_ros[analysis]`"
        raise ConfigError(msg)
    from torchperf_ros.analysis.regress_figures import CURVE

    return CURVE


def _show(comparison: "Comparison", request: RegressRequest, console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    from torchperf_ros.analysis import regress_text as text
    from torchperf_ros.analysis.regress_verdict import Verdict

    styles = {Verdict.WORSE: "bold red", Verdict.BETTER: "green", Verdict.NOT_ENOUGH: "yellow",
              Verdict.INFORMATIVE: "dim"}  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(text.COLUMNS):
        title = f"{request.confidence:.0%} {column}" if "interval" in column else column
        table.add_column(title, justify="left" if number in {0, len(text.COLUMNS) - 1} else "right")
    for finding, row in zip(comparison.findings, text.rows(comparison.findings), strict=True):
        table.add_row(*map(escape, row), style=styles.get(finding.verdict, ""))
    console.print(table)
    for line in (*text.remarks(comparison), *text.sizes(comparison)):
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)
    worse = comparison.with_verdict(Verdict.WORSE)
    console.print(text.headline(comparison), style="bold red" if worse else "bold", highlight=False, markup=False,
                  soft_wrap=True)  # fmt: skip
