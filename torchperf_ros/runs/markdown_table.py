"""A table in Markdown, as lines."""

from collections.abc import Iterable, Sequence


def markdown_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A heading and a table, words in the first column and numbers in the others.

    No lines where there are no rows.
    """
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    if not lines:
        return []
    rule = "|" + "|".join("---" if number == 0 else "---:" for number in range(len(columns))) + "|"
    return ["", f"## {title}", "", "| " + " | ".join(columns) + " |", rule, *lines]
