"""The page as a browser shows it, without a network."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="plotly is not installed")

from torchperf_ros.runs.report.report_page import Overview, OverviewRow, stage_figures, write_report
from torchperf_ros.runs.run_log_source import read_runs

sys.path.insert(0, str(Path(__file__).parent))
import report_logs as logs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")
BAN = re.compile(r'<meta http-equiv="Content-Security-Policy" content="default-src .none.;[^>]*>')
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--virtual-time-budget=10000",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--log-level=0",
)  # fmt: skip


def browse(page: Path, folder: Path, *arguments: str) -> tuple[str, list[str]]:
    """What the browser writes, and what the page's console said."""
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={folder / 'user'}", *arguments, page.as_uri()],
        check=False, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r":CONSOLE[:(].*", done.stderr)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a small drive."""
    folder = tmp_path_factory.mktemp("page")
    write_report(
        read_runs(logs.write_log(folder / "drive"), lambda done, total: None), folder / "r.html", lambda text: None
    )
    return folder / "r.html"


def test_given_the_page_when_opened_then_every_plot_is_drawn_and_nothing_is_complained_of_or_asked_for(page, tmp_path):
    assert BAN.search(page.read_text(encoding="utf-8"))  # what it asked the network for, the console would tell
    drawn, console = browse(page, tmp_path, "--dump-dom")
    assert console == []
    assert 'data-drawn="7"' in drawn
    assert drawn.count('class="main-svg"') >= 7
    assert "scatterlayer" in drawn
    assert "late (1)" in drawn


def test_given_the_page_of_many_logs_when_a_column_is_clicked_then_its_rows_are_sorted_by_value(tmp_path):
    (run,) = read_runs(logs.write_records(tmp_path / "records.jsonl", logs.records()), lambda done, total: None)
    figures = stage_figures(run.stages[0])
    rows = [OverviewRow(f"log{n}", "perception", replace(figures, p99_ms=p99), 0) for n, p99 in enumerate((9, 100, 20))]
    write_report([run], tmp_path / "r.html", lambda text: None, Overview(rows, title="many"))
    page = tmp_path / "r.html"
    click = "<script>document.querySelectorAll('.sortable th')[5].click()</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", click), encoding="utf-8")
    drawn, console = browse(page, tmp_path, "--dump-dom")
    assert console == []
    assert re.findall(r"<td>(log\d)</td>", drawn) == ["log0", "log2", "log1"]


@pytest.mark.parametrize(
    ("count", "ticks"),
    [
        (1, ["log_of_tu…morning0"]),
        (3, [f"log_of_tu…morning{n}" for n in range(3)]),
        (40, [str(n) for n in range(5, 41, 5)]),
    ],
)
def test_given_the_page_of_many_logs_when_opened_then_a_few_have_their_names_below_the_picture(tmp_path, count, ticks):
    (run,) = read_runs(logs.write_records(tmp_path / "records.jsonl", logs.records()), lambda done, total: None)
    figures = stage_figures(run.stages[0])
    rows = [OverviewRow(f"log_of_tuesday_morning{n}", "perception", figures, 0) for n in range(count)]
    write_report([run], tmp_path / "r.html", lambda text: None, Overview(rows, title="many"))
    drawn, console = browse(tmp_path / "r.html", tmp_path, "--dump-dom")
    assert console == []
    overview = drawn[: drawn.index("</header>")]
    assert re.findall(r'class="xtick"[^>]*><text[^>]*>([^<]*)<', overview) == ticks
