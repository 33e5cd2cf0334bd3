"""Figures as people read them: shares in percent, tables in Markdown."""

import math
from collections.abc import Iterable, Sequence

_ROUNDING = 1e-9  # 0.29 * 100 is 28.999999999999996


def percent(share: float, decimals: int = 1) -> str:
    """A share (0 to 1) in percent, rounded down: 100 % is said only of all."""
    scale = 10.0**decimals
    return f"{math.floor(share * 100 * scale + _ROUNDING) / scale:.{decimals}f}%"


def markdown_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A heading and a table, words in the first column and numbers in the others.

    No lines where there are no rows.
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(columns))) + "|"
    return ["", f"## {title}", "", "| " + " | ".join(columns) + " |", rule, *lines]
