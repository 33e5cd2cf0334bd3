"""The checklist as a table in a terminal."""

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from torchperf_ros.analysis.checklist_row import Advice, Row
from torchperf_ros.analysis.machine import machine_line
from torchperf_ros.analysis.model_checklist import Checklist
from torchperf_ros.worker.stopwatch import Timing

_COLOURS = {
    Advice.TURN_ON: "bold green", Advice.KEEP: "green", Advice.TURN_OFF: "bold yellow", Advice.REFUSED: "red",
}  # fmt: skip


def show_checklist(
    checklist: Checklist, title: str, machine: dict[str, object], snippet: str, console: Console
) -> None:
    """Print the table, what all changes come to, and the parameters to change.

    Args:
        checklist: what was found.
        title: adapter and tier.
        machine: see `describe_machine`.
        snippet: YAML, "" where nothing is to change.
        console: 100 columns are enough.
    """
    console.print(Text(f"\n{title}", style="bold"))
    told = f"now: {checklist.now.label}"
    if checklist.running != checklist.now:
        told += f"; measured as {checklist.running.label}"
    console.print(Text(f"{told}; changes to the model measured in {checklist.base.engine}"))
    console.print(Text(machine_line(machine), style="dim"))
    console.print(_measured(checklist))
    console.print(Text("without -> with, in turns; parity: relative L2 from eager fp32", style="dim"))
    rest = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for row in checklist.rows:
        if not _is_measured(row):
            style = _COLOURS.get(row.advice, "dim")
            rest.add_row(Text(row.name), Text("on" if row.on else "-"), Text(row.verdict or row.why_not), style=style)
    if rest.row_count:
        console.print("\nNot measured, as it does not apply or cannot run:")
        console.print(rest)
    if not snippet:
        console.print("\nNothing to change.")
        return
    _show_changes(checklist, snippet, console)


def _show_changes(checklist: Checklist, snippet: str, console: Console) -> None:
    console.print("\nWhat to change, as a parameter file to give after yours (--params-file):\n")
    console.print(Syntax(snippet, "yaml", background_color="default"))
    if checklist.after is not None:
        line = (
            f"All changes to the model together: p50 {_ms(checklist.before.median_ms)} -> "
            f"{_ms(checklist.after.median_ms)} ms, p99 {_ms(checklist.before.p99_ms)} -> "
            f"{_ms(checklist.after.p99_ms)} ms, {checklist.gain}"
        )
        console.print(Text(line))
    console.print(Text("Measured on one tier: check the stage's other tiers, too.", style="dim"))


def _measured(checklist: Checklist) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("optimisation", no_wrap=True)
    table.add_column("now", no_wrap=True)
    for name in ("p50 ms", "p99 ms", "gain (95 %)", "parity"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in filter(_is_measured, checklist.rows):
        table.add_row(
            Text(row.name),
            Text("on" if row.on else "-"),
            Text(_pair(row.without, row.with_, "median_ms")),
            Text(_pair(row.without, row.with_, "p99_ms")),
            Text("" if row.gain is None else str(row.gain)),
            Text("" if row.parity is None else f"{row.parity.relative_l2:.1g}"),
            Text(row.verdict, style=_COLOURS.get(row.advice, "")),
        )
    return table


def _is_measured(row: Row) -> bool:
    return row.without is not None and row.with_ is not None


def _pair(without: Timing | None, with_: Timing | None, figure: str) -> str:
    if without is with_:
        return _ms(getattr(with_, figure))
    return f"{_ms(getattr(without, figure))} -> {_ms(getattr(with_, figure))}"


def _ms(value: float) -> str:
    """Three digits."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"  # noqa: PLR2004
