"""What tuning shows at its end: one ranked table for each tier; and before, what it would try."""

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchperf_ros.optimize.tune.ranking import Group, Limits, Ranking, Standing
from torchperf_ros.optimize.tune.space import Step
from torchperf_ros.optimize.tune.trial import MEASURED, Candidate, Facts, Figures, Trial

_COMPILE_GUESS_S = 30.0
_MANY = 1e6
_TWICE = 2.0
_MS_PER_S = 1e3


def show_ranking(
    ranking: Ranking, title: str, limits: Limits, now: Candidate | None, usual_batch: int, console: Console
) -> None:
    """The table of one tier: those within the limits, over the budget, of other batches; then what failed, and why."""
    shown = [standing for standing in ranking.standings if standing.group <= Group.BATCH]
    batches = any(standing.group is Group.BATCH for standing in shown)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
                  padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    table.add_column("#", justify="right")
    table.add_column("candidate", min_width=26)
    names = ("p50 ms", "p99 ms", "max ms", "gain", "start s", "compile s", "pays after", "MB", "rel. L2")
    for name in (*names, *(["items/s"] if batches else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for number, standing in enumerate(shown, start=1):
        if number > 1 and standing.group != shown[number - 2].group:
            table.add_section()
        style = {Group.FITS: "green" if number == 1 else "", Group.OVER_BUDGET: "yellow"}.get(standing.group, "")
        row = _row(standing, now)
        if batches:
            row.append(f"{(standing.trial.candidate.batch or usual_batch) * _MS_PER_S / standing.p50_ms:,.0f}")
        table.add_row(str(number), *row, style=style)
    console.print(table if shown else Text(f"{title}: nothing could be measured", style="bold red"))
    over = sum(standing.group is Group.OVER_BUDGET for standing in shown)
    if over:
        console.print(Text(f"{over} over the budget of {limits.budget_ms:g} ms", style="yellow"))
    for standing in ranking.standings[len(shown) :]:
        console.print(Text(f"  -  {standing.trial.candidate.label}: {_short(standing.why)}", style="dim"))


def show_notes(ranking: Ranking, facts: Facts, console: Console) -> None:
    """What was left out, and what the columns of the table mean."""
    for name, why in facts.left_out.items():
        console.print(Text(f"  -  {name}: left out: {why}", style="dim"))
    fewest = min((s.trial.figures.samples for s in ranking.standings if s.trial.figures), default=0)
    notes = (
        f"gain: of eager fp32's p50 in the same process ({ranking.eager_ms:.2f} ms), worst..best part of it,"
        f" ~ none beyond the noise; p99: without isolated stalls, equal within {100 * ranking.noise:.0f} % (noise)."
        f" At least {fewest} samples each. docs/tuning.md says more."
    )
    console.print(Text(notes, style="dim"))


def show_plan(steps: Sequence[Step], known: Mapping[Candidate, Trial], facts: Facts, seconds: float,
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
        f"{len(steps)} trials, about {total_s / 60:.0f} minutes. A search starts each part from the best so far; shown"
        " is what comes if engine and nothing else gains.",
        highlight=False,
    )
    for name, why in facts.left_out.items():
        console.print(Text(f"left out: {name}: {why}", style="dim"))


def estimate_s(candidate: Candidate, known: Mapping[Candidate, Trial], facts: Facts, seconds: float) -> float:
    """Seconds that a trial will take; 0 if it is known."""
    if candidate in known:
        return 0.0
    eager_s = facts.load_s + 2 * seconds + 1.0
    if candidate.is_eager:
        return eager_s
    compiled = [t.took_s for one, t in known.items() if not one.is_eager and t.outcome == MEASURED]
    return max(compiled) if compiled else eager_s + _COMPILE_GUESS_S


def gain_text(figures: Figures) -> str:
    """In percent of eager's median, worst and best part; a multiple from twice the time on."""
    if figures.is_faster is None:
        return "~"
    share = figures.p50_ms / figures.eager_p50_ms
    if share >= _TWICE:
        return f"takes {share:.1f}x"
    saved, low, high = (round(100 * (1 - each)) for each in (share, figures.most_share, figures.least_share))
    return f"{saved:+d} % ({low}..{high})"


def _row(standing: Standing, now: Candidate | None) -> list[str]:
    figures = standing.trial.figures
    assert figures is not None
    candidate = standing.trial.candidate
    return [
        f"{candidate.label}{' (now)' if candidate == now else ''}", f"{standing.p50_ms:.2f}", f"{standing.p99_ms:.2f}",
        f"{figures.max_ms * standing.p50_ms / figures.p50_ms:.1f}",
        "" if candidate.batch else gain_text(figures), f"{figures.cold_start_s:.1f}",
        f"{figures.compile_s:.1f}" if figures.compile_s else "-",
        "-" if candidate.batch else _frames(figures.break_even_frames),
        f"{figures.memory_mb:.0f}", f"{figures.relative_l2:.1e}" if figures.relative_l2 else "0",
    ]  # fmt: skip


def _frames(frames: float) -> str:
    if math.isinf(frames):
        return "never"
    if frames >= _MANY:
        return f"{frames / _MANY:.1f}M"
    return f"{math.ceil(frames):,}" if frames else "-"


def _short(text: str) -> str:
    """The first line and, where more was printed, the last one, which says what it came to."""
    lines = text.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
