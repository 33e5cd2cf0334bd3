"""The page: what it says, what it holds, how large it is."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly", reason="plotly is not installed")

import sys

from torchperf_ros.analysis import report_page
from torchperf_ros.analysis.report_envelope import envelope
from torchperf_ros.analysis.report_page import write_report
from torchperf_ros.analysis.report_summary import in_words, memory_trend, stage_figures, worst_frames
from torchperf_ros.analysis.run_log import RunLogError
from torchperf_ros.analysis.run_log_source import read_runs

sys.path.insert(0, str(Path(__file__).parent))
import report_logs as logs


@pytest.fixture(scope="module")
def drive(tmp_path_factory):
    return logs.write_log(tmp_path_factory.mktemp("logs") / "drive")


@pytest.fixture
def run(drive):
    return read_runs(drive, lambda done, total: None)[0]


def without_plotly(page: Path) -> str:
    """The page less the library, which nobody here wrote."""
    return page.read_text(encoding="utf-8").replace(report_page.get_plotlyjs(), "")


def test_given_a_drive_when_told_in_words_then_the_numbers_are_the_frames(run):
    first, _, memory, anomalies = in_words(run)
    for words in ("perception: 100 frames, 99.00% on time", "the longest 50.5 ms, of 50 ms", "Not on time: 1 late",
                  "the last result held (1)", "left 0.5 ms after its deadline"):  # fmt: skip
        assert words in first
    assert memory == "Memory of the workers: 800 to 880 MiB; too short for a trend."
    assert anomalies.startswith("1 anomaly told, 0 of them errors: perception: deadline missed")


def test_given_a_drive_when_measured_then_quantiles_are_numpys(run):
    figures = stage_figures(run.stages[1])
    assert figures.frames == logs.FRAMES
    assert figures.p95_ms == pytest.approx(np.percentile([10 + n % 10 for n in range(100)], 95))
    assert figures.worst_lateness_ms == -31.0
    assert figures.outcomes == figures.fallbacks == {}


def test_given_a_drive_when_the_worst_are_asked_for_then_the_missed_one_is_first(run):
    worst = worst_frames(run.stages[0], 10)
    assert worst[0] == logs.LATE
    assert set(run.stages[0].frames["total_ms"][worst[1:]]) == {19.0}


def test_given_memory_that_grows_when_the_trend_is_asked_for_then_replaced_workers_and_the_end_do_not_bend_it(run):
    t_s = np.arange(3600.0)
    column = 800.0 + t_s / 360  # 10 MiB in an hour
    column[1000:1200] -= 250.0
    column[3580:] = 0.0
    long = replace(run, memory_t_ns=(t_s * 1e9).astype(np.int64), memory={"workers_rss_mib": column})
    label, slope = memory_trend(long)
    assert label == "workers_rss_mib"
    assert slope == pytest.approx(10.0, rel=0.05)


def test_given_a_long_series_when_thinned_then_every_spike_stays_and_so_do_the_ends():
    values = np.random.default_rng(1).normal(size=100_000)
    values[[777, 55_555]] = 100.0, -100.0
    values[99:200] = np.nan
    kept = envelope(values, 1_000)
    assert len(kept) <= 1_000
    assert {0, 777, 55_555, 99_999} <= set(kept.tolist())
    assert np.all(np.diff(kept) > 0)
    assert envelope(values[:10], 10).tolist() == list(range(10))


def test_given_a_drive_when_written_then_the_page_holds_all_parts_and_asks_for_nothing(run, tmp_path):
    size = write_report([run], tmp_path / "report.html", lambda text: None)
    page = without_plotly(tmp_path / "report.html")
    assert size == (tmp_path / "report.html").stat().st_size < report_page.MOST_BYTES
    for words in ("How the models did: drive", "perception: 100 frames", "The 10 worst frames of planning", "Memory",
                  "Anomalies", "frame 60", "late → hold last"):  # fmt: skip
        assert words in page
    assert page.count('class="plot"') == 7
    assert page.count("data:image/jpeg;base64,") == 20
    assert "neighbour" not in page.partition("</style>")[2]
    assert "&lt;b&gt;no &amp; result&lt;/b&gt;" in page
    assert "<b>no & result</b>" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_given_a_log_without_images_and_memory_when_written_then_the_page_says_so(tmp_path):
    log = logs.write_log(tmp_path / "bare", logs.messages(images=False, memory=False))
    write_report(read_runs(log, lambda done, total: None), tmp_path / "report.html", lambda text: None)
    page = without_plotly(tmp_path / "report.html")
    assert "no /perf/memory_stats in this log: memory" in page
    assert "no images or point clouds in this log" in page
    assert "<h3>Memory</h3>" not in page


def test_given_several_logs_when_written_then_they_stand_side_by_side_and_the_library_is_there_once(run, tmp_path):
    other = read_runs(logs.write_records(tmp_path / "records.jsonl", logs.records()), lambda done, total: None)[0]
    write_report([run, other], tmp_path / "report.html", lambda text: None)
    whole = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = without_plotly(tmp_path / "report.html")
    assert page.count("<section") == 2
    assert page.count('<a href="#run1">records.jsonl</a></td>') == 2
    assert "torch 2.13" in page
    assert whole.count(report_page.get_plotlyjs()[:2_000]) == 1


def test_given_more_than_fits_when_written_then_it_is_thinned_until_it_does_or_refused(run, tmp_path, monkeypatch):
    library = len(report_page.get_plotlyjs().encode())
    whole = write_report([run], tmp_path / "whole.html", lambda text: None)
    monkeypatch.setattr(report_page, "MOST_BYTES", whole - 1)
    assert write_report([run], tmp_path / "small.html", lambda text: None) < whole
    monkeypatch.setattr(report_page, "MOST_BYTES", library)
    with pytest.raises(RunLogError, match="report on fewer at a time"):
        write_report([run], tmp_path / "none.html", lambda text: None)
    assert not (tmp_path / "none.html").exists()
