"""The pictures of README and docs: how they are taken."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.pictures import screenshot


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_given_a_page_longer_than_the_picture_when_taken_then_no_scroll_bar_is_in_it(
    tmp_path: Path,
) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<body style='margin:0; background:white'><div style='height:9000px'></div>", encoding="utf-8"
    )
    screenshot(page, tmp_path / "report.png")
    with Image.open(tmp_path / "report.png") as picture:
        assert np.asarray(picture.convert("L")).min() == 255
