"""Compare two runs as a command asks for it: read, compare, show, write."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from torchperf_ros.core.errors import ConfigError, TorchperfError

if TYPE_CHECKING:
    from rich.console import Console

    from torchperf_ros.analysis.regress_compare import Comparison
    from torchperf_ros.analysis.regress_run import RunFrames
    from torchperf_ros.analysis.regress_verdict import Rules

BAD_INPUT: Final = 2
PLAIN_WIDTH: Final = 180
_LEAST_RESAMPLES: Final = 200
_BAD: Final = "bold red"
_OF_INPUT_FOLDERS: Final = (
    ".parquet", ".jsonl", ".mcap", ".mcap.zstd", ".db3", ".db3.zstd", ".bag", "metadata.yaml", "summary.json",
)  # fmt: skip
"""Files of a run's or a log's folder; a verdict may be written beside them, and over an older one."""


@dataclass(frozen=True)
class RegressRequest:
    """The options of every command that compares two runs."""

    min_effect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STAGE.]METRIC=CHANGE",
            help="The smallest change that matters: p99=3%, p50=2%,0.2ms (the larger counts), perception.miss=1pp.",
        ),
    ] = None
    min_effects: Annotated[
        Path | None, typer.Option(help="The same in a YAML file: {p99: 3%, perception: {miss: 1pp}}.")
    ] = None
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STAGE.]METRIC=VALUE",
            help="The highest value that the new run may have, whatever the base was: miss=1%, perception.p99=40ms.",
        ),
    ] = None
    limits: Annotated[
        Path | None, typer.Option(help="The same in a YAML file: {miss: 1%, perception: {p99: 40ms}}.")
    ] = None
    skip: Annotated[list[str] | None, typer.Option(metavar="METRIC", help="Do not look at this metric.")] = None
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="Of the intervals; 1 less the rate of false alarms.")
    ] = 0.95
    correction: Annotated[
        str, typer.Option(help="For the number of comparisons: holm, bh (Benjamini-Hochberg) or none.")
    ] = "holm"
    resamples: Annotated[
        int, typer.Option(min=_LEAST_RESAMPLES, max=100_000, help="Of the block bootstrap, for each run.")
    ] = 2000
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap: the same seed, the same verdict.")] = 0
    across_machines: Annotated[
        bool, typer.Option("--across-machines", help="Compare runs of different machines all the same.")
    ] = False
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail, too, where there is not enough data, or a stage is in one run only.")
    ] = False
    markdown: Annotated[Path | None, typer.Option(help="Write the verdict to this file, for a pull request.")] = None
    html: Annotated[Path | None, typer.Option(help="Write a page with the distributions to this file.")] = None
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None

    def check(self, *inputs: Path) -> None:
        """See that everything can be done, before anything is.

        Args:
            inputs: the runs, which no output may replace.

        Raises:
            ConfigError: an option has a value that is not allowed.
        """
        from torchperf_ros.analysis.regress_metric import METRICS
        from torchperf_ros.analysis.regress_verdict import CORRECTIONS

        if self.correction not in CORRECTIONS:
            msg = f"--correction {self.correction!r}: has to be one of {', '.join(CORRECTIONS)}"
            raise ConfigError(msg)
        for key in self.skip or ():
            if key not in METRICS:
                msg = f"--skip {key!r}: no such metric; there are: {', '.join(METRICS)}"
                raise ConfigError(msg)
        self._check_outputs([*inputs, *filter(None, (self.min_effects, self.limits))])

    def rules(self) -> "Rules":
        """How verdicts are reached.

        Raises:
            ConfigError: a margin or a limit is none.
        """
        from torchperf_ros.analysis.regress_effect import MinEffects
        from torchperf_ros.analysis.regress_limit import Limits
        from torchperf_ros.analysis.regress_verdict import Rules

        return Rules(
            MinEffects(self.min_effect or (), self.min_effects), 1 - self.confidence, self.correction,
            frozenset(self.skip or ()), Limits(self.limit or (), self.limits),
        )  # fmt: skip

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


def with_request(command: Callable[..., int]) -> Callable[..., None]:
    """Make a command of a function: the options of `RegressRequest` take the place of its `request`.

    What it returns becomes the exit status; an error of ours, one line and the status 2.
    """
    names = [option.name for option in fields(RegressRequest)]

    @functools.wraps(command)
    def run(**given: Any) -> None:  # noqa: ANN401 - whatever the command takes
        request = RegressRequest(**{name: given.pop(name) for name in names})
        try:
            status = command(**given, request=request)
        except (TorchperfError, OSError) as error:
            fail(str(error))
        raise typer.Exit(status)

    own = inspect.signature(command)
    taken = [parameter for name, parameter in own.parameters.items() if name != "request"]
    options = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
               for one in fields(RegressRequest)]  # fmt: skip
    run.__signature__ = own.replace(parameters=[*taken, *options])  # type: ignore[attr-defined]
    return run


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
        TorchperfError: a run cannot be read, they cannot be compared, or an output cannot be written.
    """
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from torchperf_ros.analysis.regress_compare import compare
    from torchperf_ros.analysis.regress_run import load_run
    from torchperf_ros.analysis.regress_stage import Resampling

    request.check(base, new)
    rules = request.rules()
    resampling = Resampling(request.resamples, request.seed, rules.alpha, _curve() if request.html else ())
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    shown = Console(stderr=True)
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:

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

        with _writing("--markdown", request.markdown):
            request.markdown.write_text(markdown(comparison, request.confidence), encoding="utf-8")
    if request.html:
        from torchperf_ros.analysis.regress_page import write_page

        with _writing("--html", request.html):
            write_page(comparison, request.confidence, request.html)
    if request.json:
        from torchperf_ros.analysis.regress_json import write_json

        with _writing("--json", request.json):
            write_json(comparison, status, rules, request.json)
    return status


@contextlib.contextmanager
def _writing(flag: str, path: Path) -> Iterator[None]:
    """Say which file it is that cannot be written: a full disk does not."""
    try:
        yield
    except OSError as error:
        msg = f"{flag} {path}: cannot be written: {error.strerror or error}"
        raise ConfigError(msg) from error


def fail(text: str) -> NoReturn:
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

    styles = {Verdict.WORSE: _BAD, Verdict.BETTER: "green", Verdict.NOT_ENOUGH: "yellow",
              Verdict.INFORMATIVE: "dim"}  # fmt: skip
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, column in enumerate(text.COLUMNS):
        title = f"{request.confidence:.0%} {column}" if "interval" in column else column
        table.add_column(title, justify="left" if number in {0, len(text.COLUMNS) - 1} else "right")
    for finding, row in zip(comparison.findings, text.rows(comparison.findings), strict=True):
        table.add_row(*map(escape, row), style=_BAD if finding.breaks_limit else styles.get(finding.verdict, ""))
    console.print(table)
    for line in (*text.remarks(comparison), *text.sizes(comparison)):
        console.print(f"- {line}", highlight=False, markup=False, soft_wrap=True)
    bad = comparison.with_verdict(Verdict.WORSE) or comparison.broken_limits
    style = _BAD if bad else "bold yellow" if text.conspicuous(comparison) else "bold"
    console.print(text.headline(comparison), style=style, highlight=False, markup=False, soft_wrap=True)
