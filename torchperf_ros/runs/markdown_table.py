"""A table in Markdown, as lines."""

from collections.abc import Iterable, Sequence


def markdown_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A heading and a table, numbers to the right; no lines at all where there are no rows.

    Args:
        title: of the section.
        columns: heads; the first column holds words, the others numbers.
        rows: one cell per column.
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(columns))) + "|"
    return ["", f"## {title}", "", "| " + " | ".join(columns) + " |", rule, *lines]
