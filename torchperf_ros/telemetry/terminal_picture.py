"""What a terminal shows, as a picture for a document."""

import io
import re
from pathlib import Path

from rich.console import Console, RenderableType

_WEB_FONT = re.compile(r"@font-face \{.*?\}", re.DOTALL)  # a picture must not load anything from the network


def save_svg(shown: RenderableType, path: Path, title: str, width: int, height: int) -> None:
    """Write it to an SVG file, as a terminal of so many columns and rows would show it.

    Raises:
        OSError: the file cannot be written.
    """
    console = Console(
        record=True, width=width, height=height, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(shown)
    path.write_text(_WEB_FONT.sub("", console.export_svg(title=title)), encoding="utf-8")
