"""pytest's plugin.

Replay a log in a test, and compare what comes out with golden outputs; see `docs/testing.md`.

It costs other tests nothing: more than pytest is imported only when a test asks for `replay` or `golden`.
As it is loaded into every run of pytest, it has to load with old ones, too: Humble's is 6.2, which lacks
names of pytest 7.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from torchperf_ros.replay.golden.fixtures import GoldenFixture, ReplayFixture, Replays
    from torchperf_ros.replay.golden.message_rule import Rules

# The property of a test that says which golden file it has written.
REFRESHED: Final = "golden_refreshed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchperf", "replays of field logs (torchperf_ros)")
    group.addoption(
        "--fieldlogs",
        metavar="DIR",
        help=(
            "where the logs of @pytest.mark.fieldlog are that are not beside the tests;"
            " default: $TORCHPERF_FIELDLOGS"
        ),
    )
    group.addoption(
        "--refresh-golden", action="store_true", help="write golden outputs anew instead of comparing"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "fieldlog(path, optional=False): the log that the test's `replay` replays, beside the test's file,"
        " in the root folder or in --fieldlogs; with optional=True the test is skipped where it is not"
        " there",
    )


@pytest.fixture
def replay(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, torchperf_replays: Replays
) -> ReplayFixture:
    """Replays a log.

    `replay(pace="fast", params="params.yaml")`; the log is that of `@pytest.mark.fieldlog`.
    """
    from torchperf_ros.replay.golden.fixtures import ReplayFixture

    return ReplayFixture(request, tmp_path_factory, torchperf_replays)


@pytest.fixture(scope="session")
def torchperf_replays() -> Replays:
    """Replays of this session, so that none is made twice."""
    return {}


@pytest.fixture
def golden(request: pytest.FixtureRequest, golden_rules: Rules) -> GoldenFixture:
    """Compares what stages published with golden outputs: `golden.check(result)`."""
    from torchperf_ros.replay.golden.fixtures import GoldenFixture

    return GoldenFixture(request, golden_rules)


@pytest.fixture(scope="session")
def golden_rules() -> Rules:
    """How messages are compared, by type; override it to add `MessageRule`s for yours."""
    return {}


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Show the frames behind a figure of a stage."""
    result = sys.modules.get("torchperf_ros.replay.replay")
    if result is None:  # nothing was replayed
        return None
    for side in (left, right):
        if isinstance(side, result.StageFigure):
            frames: list[str] = side.stage.worst_frames(only_missed=side.only_missed)
            return [f"{left!r} {op} {right!r}", *frames]
    return None


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        if getattr(report, "when", "") == "call":
            for name, text in report.user_properties:
                if name == REFRESHED:
                    terminalreporter.write_line(f"golden outputs: {text}")
