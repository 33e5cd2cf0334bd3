"""One page for hundreds of logs: all of them in a table, the worst in detail."""

import re

import numpy as np
import pytest

from torchperf_ros.analysis.report_overview import MOST_ROWS, Overview, OverviewRow
from torchperf_ros.analysis.report_page import MOST_BYTES, write_report
from torchperf_ros.analysis.report_summary import stage_figures
from torchperf_ros.analysis.run_log_run_file import read_run_file
from torchperf_ros.core.frame_table import FRAME
from torchperf_ros.core.run_file import Run, write_run

pytest.importorskip("plotly", reason="plotly is not installed")


def run_log(folder, name, pace="real"):
    frames = np.zeros(50, dtype=FRAME)
    frames["t_ns"] = 1_700_000_000_000_000_000 + np.arange(50) * 10**8
    frames["fallback"] = -1
    frames["total_ms"], frames["budget_ms"] = 10.0, 86_400_000.0 if pace == "fast" else 40.0
    write_run(Run({"stages": [{"name": "perception"}], "pace": pace}, {"perception": frames}), folder / f"{name}.json")
    return read_run_file(folder / f"{name}.json", name)


def page(folder, runs, overview):
    write_report(runs, folder / "page.html", lambda _: None, overview)
    return (folder / "page.html").read_text(encoding="utf-8")


def test_given_hundreds_of_logs_when_reported_then_all_are_in_the_table_and_only_the_worst_have_a_section(tmp_path):
    worst = [run_log(tmp_path, name) for name in ("drive0", "drive1")]
    figures = stage_figures(worst[0].stages[0])
    rows = [OverviewRow(f"drive{number}", "perception", figures, number) for number in range(300)]
    text = page(tmp_path, worst, Overview(rows, [("bad<1>", "no & log")], "300 of 301 logs in out"))

    assert len(re.findall("<section ", text)) == 2
    assert text.count("<td>perception</td>") == 300
    assert re.findall(r'<a href="#(run\d)">(drive\d+)</a>', text) == [("run0", "drive0"), ("run1", "drive1")]
    assert "<b>bad&lt;1&gt;</b>: no &amp; log" in text
    assert '<b class="">15,000</b><span>frames answered, of all stages</span>' in text
    assert "How the models did: 300 of 301 logs in out" in text


def test_given_more_logs_than_a_page_holds_when_reported_then_the_rest_is_counted(tmp_path):
    run = run_log(tmp_path, "drive")
    figures = stage_figures(run.stages[0])
    rows = [OverviewRow(f"a_drive_with_a_long_name_{n:05}", "perception", figures, 0) for n in range(MOST_ROWS + 7)]
    text = page(tmp_path, [run], Overview(rows))
    assert text.count("<td>perception</td>") == MOST_ROWS
    assert "7 more rows, of the best, are left out" in text
    assert len(text) < MOST_BYTES


def test_given_a_run_without_deadlines_when_reported_then_no_budget_is_shown(tmp_path):
    fast, real = run_log(tmp_path, "fast", "fast"), run_log(tmp_path, "real")
    assert np.isnan(fast.stages[0].frames["budget_ms"]).all()
    text = page(tmp_path, [fast], None)
    assert "the longest 10.0 ms, without a deadline." in text
    assert '"name":"budget"' not in text
    assert "86,400" not in text
    assert '"name":"budget"' in page(tmp_path, [real], None)
