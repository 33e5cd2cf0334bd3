"""The page that reports and comparisons are.

Sections of blocks and figures, in one file that needs no network.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_TEMPLATE: Final = Path(__file__).with_name("page.html")

# A part of a section, with its `kind`, as `page.html` draws it.
Block = dict[str, Any]
# Of a table: a text, or a text with how it looks, as `page.html` draws it.
Cell = str | dict[str, Any]


def number_cell(text: str, value: float = math.nan) -> Cell:
    """A cell that stands on the right; a table that can be sorted goes by `value`."""
    return {"text": text, "css": "n", **({"value": f"{value:.6g}"} if math.isfinite(value) else {})}


def table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], **look: Any) -> Block:  # noqa: ANN401
    """A table; the head of a column of numbers stands on the right, too. `look`: see `page.html`."""
    first = rows[0] if rows else [""] * len(heads)
    styles = ["n" if isinstance(cell, dict) and cell.get("css") == "n" else "" for cell in first]
    return {"kind": "table", "head": list(zip(heads, styles, strict=True)), "rows": rows, **look}


class Page:
    """Sections and figures on their way into `page.html`, which reports and comparisons share."""

    def __init__(self) -> None:
        self.top: list[Block] = []
        self._sections: list[dict[str, Any]] = []
        self._figures: list[str] = []

    def section(
        self, title: str, blocks: Sequence[Block | None], anchor: str = "", subtitle: str = ""
    ) -> None:
        """Append a section; blocks that are None are left out."""
        shown = [block for block in blocks if block]
        self._sections.append({"title": title, "blocks": shown, "id": anchor, "subtitle": subtitle})

    def plots(self, *pictures: tuple[str, Any]) -> Block:
        """A block of plotly figures, or of words in their place, with titles; several stand side by side."""
        shown = []
        for title, figure in pictures:
            if isinstance(figure, str):
                shown.append((title, "", figure))
                continue
            shown.append((title, f"figure{len(self._figures)}", ""))
            figure.update_layout(template=None)
            text = json.dumps(figure.to_plotly_json(), separators=(",", ":"), allow_nan=False)
            self._figures.append(f'"{shown[-1][1]}":{text}'.replace("</", "<\\/"))
        return {"kind": "plots", "plots": shown}

    def render(self, title: str, subtitle: str, footer: str, links: Sequence[tuple[str, str]] = ()) -> str:
        """The page; `links` are names and places."""
        import jinja2
        from plotly.offline import get_plotlyjs

        template = jinja2.Environment(autoescape=True).from_string(_TEMPLATE.read_text(encoding="utf-8"))
        return template.render(
            title=title,
            subtitle=f"{subtitle} In a picture: drag to zoom, double-click to go back.",
            links=links,
            top=self.top,
            sections=self._sections,
            footer=footer,
            plotly=get_plotlyjs(),
            figures="{" + ",".join(self._figures) + "}",
        )
