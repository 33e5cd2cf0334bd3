"""The page of a comparison: what it holds."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly", reason="plotly is not installed")
pytest.importorskip("arch", reason="arch is not installed")

from plotly.offline import get_plotlyjs

from torchperf_ros.runs.compare.comparison import compare
from torchperf_ros.runs.compare.verdict import Rules
from torchperf_ros.runs.compare.verdict_page import verdict_page
from torchperf_ros.runs.run_log_source import of_run

from . import compare_runs as made


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a run with a longer tail, a `<script>` in its name, and memory."""
    values = made.latencies(1500, 2)
    seconds = np.arange(200.0)
    base = of_run(made.run(made.latencies(1500, 1)), "base.json")
    new = of_run(made.run(np.where(values > 24, values * 1.5, values)), "runs/<script>x")
    memory = {"memory_t_ns": (seconds * 1e9).astype(int), "memory": {"workers_rss_mib": 800 + seconds / 10}}
    base, new = (replace(run, **memory) for run in (base, new))
    path = tmp_path_factory.mktemp("page") / "verdict.html"
    path.write_text(verdict_page(compare([base], [new], Rules(resamples=300))), encoding="utf-8")
    return path


def without_plotly(page):
    return page.read_text(encoding="utf-8").replace(get_plotlyjs(), "")


def test_given_a_page_when_read_then_it_has_verdict_table_and_pictures_and_asks_for_nothing(page):
    text = without_plotly(page)
    figures = json.loads(re.search(r"const figures = (\{.*\});\n", text)[1])
    assert '<div class="verdict bad">2 metrics are worse: perception p99 latency' in text
    assert re.findall(r"<th[^>]*>([^<]*)</th>", text)[:3] == ["metric", "verdict", "base"]
    assert "<td>p99 latency [ms]</td>" in text
    assert "<script>x" not in text
    assert not re.findall(r"(?:src|href)=[\"']?http", text)
    assert len(figures) == 4
    at = figures["figure1"]["data"][2]["x"]
    assert at[0] == "p5"
    assert {"p50", "p95", "p99", "p99.5"} <= set(at)
    low, high = (figures["figure1"]["data"][place]["y"] for place in (1, 0))
    assert all(lower <= upper for lower, upper in zip(low, high, strict=True))


@pytest.mark.parametrize(("silent", "total_ms"), [("base", []), ("new", [math.nan] * 40)])
def test_given_a_stage_that_never_answered_when_a_page_is_written_then_its_pictures_show_the_other_run(
    tmp_path, silent, total_ms
):
    planning = made.rows(made.latencies(200, 3))
    runs = {}
    for name in ("base", "new"):
        told = made.run(made.latencies(200, 1))
        told.frames["planning"] = made.rows(total_ms) if name == silent else planning
        runs[name] = of_run(told, name)
    found = compare([runs["base"]], [runs["new"]], Rules(resamples=300))
    (tmp_path / "v.html").write_text(verdict_page(found), encoding="utf-8")
    found = json.loads(re.search(r"const figures = (\{.*\});\n", without_plotly(tmp_path / "v.html"))[1])
    traces = found["figure2"]["data"]  # of planning, after two of perception
    assert [trace["name"] for trace in traces] == [
        f"{word} ({0 if word == silent else 200})" for word in ("base", "new")
    ]
    assert [len(trace["x"]) > 0 for trace in traces] == [word != silent for word in ("base", "new")]
