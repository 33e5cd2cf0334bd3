"""What tuning shows: progress with the best so far, a ranked table, and what it would try."""

import math
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from torchperf_ros.core.tune_ranking import Group, Limits, Ranking, Standing
from torchperf_ros.core.tune_space import Facts, Step
from torchperf_ros.core.tune_trial import MEASURED, Candidate, Trial

_COMPILE_GUESS_S = 30.0
_MANY = 1e6


class TuneView:
    """Progress on a console; a line for each trial that has ended stays."""

    def __init__(self, console: Console, at_most: int) -> None:
        """Show on this console; the first tier has at most so many trials."""
        self._console = console
        self._started_s = time.monotonic()
        self._task = ""
        self._best = ""
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._bar = self._progress.add_task("", total=at_most)

    def __enter__(self) -> "TuneView":
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the lines, and nothing else."""
        self._progress.stop()

    def trying(self, tier: str, step: Step) -> None:
        """A trial begins."""
        self._task = f"{tier}: {step.candidate.label}"
        self.says("starting")

    def says(self, text: str) -> None:
        """The trial says what it does."""
        self._progress.update(self._bar, description=f"{self._task}: {text}{self._best}")

    def ended(self, trial: Trial, ranking: Ranking, *, earlier: bool) -> None:
        """A trial is over, or was known from an earlier run."""
        self._progress.advance(self._bar)
        standing = next(one for one in ranking.standings if one.trial is trial)
        line = Text(f"{time.monotonic() - self._started_s:5.0f} s  {trial.tier}  ", style="dim")
        line.append(trial.candidate.label, style="default")
        if trial.outcome == MEASURED:
            line.append(f"  p99 {standing.p99_ms:.2f} ms, p50 {standing.p50_ms:.2f}")
        if standing.why:
            line.append(f"  {_first_line(standing.why)}")
        best = ranking.best
        if best is standing:
            line.append("  best so far", style="green")
        if best is not None:
            self._best = f" (best p99 {best.p99_ms:.2f} ms)"
        if earlier:
            line.append("  from an earlier run")
        self._console.print(line, soft_wrap=True)


def show_ranking(ranking: Ranking, title: str, limits: Limits, now: Candidate | None, console: Console) -> None:
    """The table of one tier: those within the limits, those over the budget, then what was given up or refused."""
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column("candidate", min_width=26)
    for name in ("p50 ms", "p99 ms", "max ms", "of eager", "compile s", "pays after", "MB", "rel. L2"):
        table.add_column(name, justify="right", no_wrap=True)
    group = Group.FITS
    shown = [standing for standing in ranking.standings if standing.group <= Group.OVER_BUDGET]
    for number, standing in enumerate(shown, start=1):
        if standing.group != group and number > 1:
            table.add_section()
        group = standing.group
        style = "green" if number == 1 and group is Group.FITS else "yellow" if group is Group.OVER_BUDGET else ""
        table.add_row(str(number), *_row(standing, now), style=style)
    console.print(table if shown else Text(f"{title}: nothing could be measured", style="bold red"))
    over = sum(standing.group is Group.OVER_BUDGET for standing in shown)
    if over:
        console.print(Text(f"{over} over the budget of {limits.budget_ms:g} ms", style="yellow"))
    for standing in ranking.standings[len(shown) :]:
        console.print(Text(f"  -  {standing.trial.candidate.label}: {_short(standing.why)}", style="dim"))
    if not shown:
        return
    fewest = min(s.trial.figures.samples for s in shown if s.trial.figures)
    notes = (
        f"Times are relative to eager fp32 in the same process, times its median over all trials,"
        f" {ranking.eager_ms:.2f} ms.",
        f"p99 leaves isolated stalls out (they are in max); p99s that differ by less than {100 * ranking.noise:.0f} %",
        "are a tie (noise) and decided by p50. 'pays after': frames until compiling is earned back.",
        f"At least {fewest} samples each.",
    )
    console.print(Text(" ".join(notes), style="dim"))


def show_plan(steps: Sequence[Step], known: Mapping[Candidate, Trial], facts: Facts, seconds: float, product: int,
              console: Console) -> None:  # fmt: skip
    """What would be tried and about how long it would take."""
    table = Table("part", "candidate", "about", show_edge=False, pad_edge=False)
    total_s = 0.0
    for step in steps:
        about_s = estimate_s(step.candidate, known, facts, seconds)
        total_s += about_s
        table.add_row(step.part, step.candidate.label, f"{about_s:.0f} s" if about_s else "is there")
    console.print(table)
    console.print(
        f"{len(steps)} trials of {product} combinations, about {total_s / 60:.0f} minutes. Each part starts from the"
        " best so far; shown is what comes if engine and nothing else gains.",
        highlight=False,
    )
    for name, why in facts.left_out.items():
        console.print(Text(f"left out: {name}: {why}", style="dim"))


def estimate_s(candidate: Candidate, known: Mapping[Candidate, Trial], facts: Facts, seconds: float) -> float:
    """Seconds that a trial will take; 0 if it is known."""
    if candidate in known:
        return 0.0
    compiled = [t.took_s for one, t in known.items() if one.options.engine != "eager" and t.outcome == MEASURED]
    eager_s = facts.load_s + 2 * seconds + 1.0
    if candidate.options.engine == "eager":
        return eager_s
    return max(compiled) if compiled else eager_s + _COMPILE_GUESS_S


def _row(standing: Standing, now: Candidate | None) -> list[str]:
    figures = standing.trial.figures
    assert figures is not None
    candidate = standing.trial.candidate
    return [
        f"{candidate.label}{' (now)' if candidate == now else ''}", f"{standing.p50_ms:.2f}", f"{standing.p99_ms:.2f}",
        f"{figures.max_ms * standing.p50_ms / figures.p50_ms:.1f}", f"{figures.p50_ms / figures.eager_p50_ms:.2f}",
        f"{figures.compile_s:.1f}" if figures.compile_s else "-", _frames(figures.break_even_frames),
        f"{figures.memory_mb:.0f}", f"{figures.relative_l2:.1e}" if figures.relative_l2 else "0",
    ]  # fmt: skip


def _frames(frames: float) -> str:
    if math.isinf(frames):
        return "never"
    if frames >= _MANY:
        return f"{frames / _MANY:.1f}M"
    return f"{math.ceil(frames):,}" if frames else "-"


def _first_line(text: str) -> str:
    return text.splitlines()[0]


def _short(text: str) -> str:
    """The first line and, where more was printed, the last one, which says what it came to."""
    lines = text.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
