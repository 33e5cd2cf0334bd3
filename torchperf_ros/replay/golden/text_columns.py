"""Columns in plain text, for messages of failed tests."""

from collections.abc import Sequence


def text_columns(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows as lines whose cells stand below each other; the last cell of a row may be of any length."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)] if rows else []
    return [
        indent + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
