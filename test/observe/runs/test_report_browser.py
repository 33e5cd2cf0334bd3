"""The pages as a browser shows them, without a network."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torchperf_ros.observe.runs.comparison import compare, verdict_page
from torchperf_ros.observe.runs.report import Overview, OverviewRow, stage_figures, write_report
from torchperf_ros.replay.run_reading import input_pictures, read_runs

from . import compare_runs as made
from . import report_logs as logs

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    made.needs_libraries,
    pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine"),
]
BAN = re.compile(r'<meta http-equiv="Content-Security-Policy" content="default-src .none.;[^>]*>')
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=10000",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--log-level=0",
)


def browse(page: Path) -> str:
    """The page as it is drawn.

    Its console has nothing to complain of, nor of what it asked the network for.
    """
    assert BAN.search(page.read_text(encoding="utf-8"))
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={page.parent / 'user'}", "--dump-dom", page.as_uri()],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, re.findall(r":CONSOLE[:(].*", done.stderr)) == (0, []), done.stderr
    return done.stdout


def test_given_the_page_of_a_comparison_when_opened_then_every_plot_is_drawn(tmp_path):
    seconds = np.arange(200.0)
    memory = {"memory_t_ns": (seconds * 1e9).astype(int), "memory": {"workers_rss_mib": 800 + seconds / 10}}
    base, new = (replace(made.run(made.latencies(300, at)), **memory) for at in range(2))
    (tmp_path / "v.html").write_text(verdict_page(compare([base], [new], resamples=300)), encoding="utf-8")
    drawn = browse(tmp_path / "v.html")
    assert 'data-drawn="3"' in drawn
    assert drawn.count('class="main-svg"') >= 3


def test_given_the_page_of_many_logs_when_a_column_is_clicked_then_its_rows_are_sorted_and_every_plot_is_drawn(
    tmp_path,
):
    (run,) = read_runs(logs.write_log(tmp_path / "drive"), lambda done, total: None)
    figures = stage_figures(run.stages[0])
    rows = [
        OverviewRow(f"log_of_tuesday_morning{n}", "perception", replace(figures, p99_ms=p99), 0)
        for n, p99 in enumerate((9, 100, 20))
    ]
    write_report(
        [run], tmp_path / "r.html", lambda text: None, input_pictures, Overview(rows, title="many")
    )
    page = tmp_path / "r.html"
    click = "<script>document.querySelectorAll('.sortable th')[5].click()</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", click), encoding="utf-8")
    drawn = browse(page)
    assert 'data-drawn="7"' in drawn
    assert drawn.count('class="main-svg"') >= 7
    assert "late (1)" in drawn
    assert re.findall(r"<td>(log_of_\w+\d)</td>", drawn) == [
        f"log_of_tuesday_morning{n}" for n in (0, 2, 1)
    ]
