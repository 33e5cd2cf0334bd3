"""Figures as people read them: shares in percent, lists of words, tables for terminals and in Markdown."""

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


def percent(share: float, decimals: int = 1) -> str:
    """A share (0 to 1) in percent, rounded down: 100 % stands only for all."""
    scale = 10.0**decimals
    return f"{math.floor(share * 100 * scale + _ROUNDING) / scale:.{decimals}f}%"


def listed(words: Collection[str], most: int = 8) -> str:
    """The first of some words, and how many more there are."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return (", ".join(itertools.islice(words, most)) + more) or "none"


def console_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], styles: Iterable[str] = ()
) -> "Table":
    """A table for a terminal; columns whose heads begin with `>` hold numbers and stand on the right.

    `styles`: rich's, one for each row; none is plain. Cells are texts, not markup.
    """
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(
            head.removeprefix(">"),
            justify="right" if head.startswith(">") else "left",
            overflow="fold",  # in a narrow terminal nothing of a cell is cut off
        )
    for row, style in zip_longest(rows, styles, fillvalue=""):
        table.add_row(*map(escape, row), style=str(style))
    return table


def markdown_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A heading, if there is a title, and a table: words in the first column and numbers in the others.

    No lines where there are no rows.
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(columns))) + "|"
    heading = ["", f"## {title}", ""] if title else []
    return [*heading, "| " + " | ".join(columns) + " |", rule, *lines]
