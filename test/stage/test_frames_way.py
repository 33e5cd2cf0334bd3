"""The page on the frame's way names functions that are there, and sizes that are sent."""

import re
from pathlib import Path

import pytest

from torchperf_ros.workers.protocol import RUN, Request, Response

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WAY = PAGE[PAGE.index("## One frame") : PAGE.index("1. **Receive.**")]
PARTS = re.findall(r"`(\w+/\w+\.py)`\s+\(((?:`[\w.]+`(?:, )?\s*)+)", WAY)


@pytest.mark.parametrize(("file", "names"), PARTS)
def test_given_the_files_of_the_frames_way_when_read_then_they_have_the_functions_that_the_page_names(
    file, names
):
    code = (ROOT / "torchperf_ros" / file).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+)`", names):
        owner, _, function = name.rpartition(".")
        assert f"def {function}(" in code, f"{file}: {name}"
        assert f"class {owner}" in code, f"{file}: {name}"


def test_given_the_page_when_it_says_how_large_messages_are_then_they_are():
    assert [file for file, _ in PARTS] == [
        "stage/stage.py",
        "stage/turn.py",
        "stage/crew.py",
        "worker/session.py",
        "worker/tier.py",
        "stage/frame.py",
        "stage/inputs.py",
        "stage/ladder.py",
        "stage/fallbacks.py",
    ]
    assert f"{len(Request(RUN, 0, 0, 0, 0).pack())}-byte request" in PAGE
    assert f"{len(Response(0, 0, 0, 0, 0, 0, 0, 0).pack())}-byte response" in PAGE
