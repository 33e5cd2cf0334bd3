"""The page: what it says, what it holds, how large it is; of one log, of several, of hundreds."""

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("plotly", reason="plotly is not installed")

from plotly.offline import get_plotlyjs

from torchperf_ros.observe.runs import report
from torchperf_ros.observe.runs.report import (
    Overview,
    OverviewRow,
    in_words,
    stage_figures,
    verdict,
    worst_frames,
    write_report,
)
from torchperf_ros.observe.runs.report_pictures import VERMILION, envelope
from torchperf_ros.observe.runs.run_builder import RunLogBuilder
from torchperf_ros.observe.runs.run_log import CANDIDATE, RunLogError, run_of, write_run
from torchperf_ros.replay.run_reading import input_pictures

from . import compare_runs as made
from . import report_logs as logs
from .report_logs import figures_of, without_plotly


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return read(logs.write_log(tmp_path_factory.mktemp("logs") / "drive"))


def read(path):
    (run,) = logs.read(path)
    return run


def written(folder, runs, overview=None):
    """The page of these runs."""
    size = write_report(runs, folder / "page.html", lambda _: None, input_pictures, overview)
    assert size == (folder / "page.html").stat().st_size < report.MOST_BYTES
    return (folder / "page.html").read_text(encoding="utf-8")


def test_given_a_drive_when_told_in_words_then_the_numbers_are_the_frames(run):
    first, memory, anomalies = in_words(run)
    late = "Not on time: 1 late; published instead: the last result held (1)."
    assert first == f"perception: {late} 1 frame had a synchronised input missing."
    assert memory == "Memory of the workers: 800 to 880 MiB; too short for a trend."
    assert anomalies.startswith("1 anomaly reported, 0 of them errors: perception: deadline missed")


def test_given_a_drive_when_measured_then_quantiles_are_numpys(run):
    figures = stage_figures(run.stages[1])
    assert figures.frames == logs.FRAMES
    assert figures.p95_ms == pytest.approx(np.percentile([10 + n % 10 for n in range(100)], 95))
    assert figures.worst_lateness_ms == -31.0
    assert worst_frames(run.stages[0], 10)[0] == logs.LATE
    assert figures.outcomes == figures.fallbacks == {}


def test_given_a_stage_with_a_guard_when_reported_then_what_it_did_not_accept_is_told_and_shown_first(
    run, tmp_path
):
    planning = run.stage("planning")
    kind, text = verdict(planning)
    assert kind == "fair"
    assert text.endswith("; the guard did not accept every output: 1 brake")
    assert worst_frames(planning, 1).tolist() == [logs.BRAKED]
    assert not stage_figures(run.stage("perception")).guarded
    page = written(tmp_path, [run])
    assert "not accepted by the guard" in page
    assert "→ guard: brake" in page


def test_given_records_of_a_candidate_when_reported_then_both_versions_are_there(run, tmp_path):
    builder = RunLogBuilder("/perf")
    said = {"version": "base", "candidate": "b: shadow", "candidate_pairs": "9 frames, 1 late (base 0)"}
    for pairs in ("1 frame", "9 frames, 1 late (base 0)"):
        builder.record(
            {"kind": "candidate", "t_ns": 5, "stage": "perception", **said, "candidate_pairs": pairs}
        )
    stage = builder.build("drive", None).stage("perception")
    assert stage.candidate == {**dict.fromkeys(CANDIDATE, ""), **said}
    tried = replace(run, stages=(replace(run.stages[0], candidate=stage.candidate), *run.stages[1:]))
    page = written(tmp_path, [tried])
    assert all(words in page for words in ("two versions", "b: shadow", "9 frames, 1 late (base 0)"))
    assert "two versions" not in written(tmp_path, [run])


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
    page = without_plotly(written(tmp_path, [run]))
    for words in (
        "How the models did: drive",
        "perception: 99.00% on time: 1 late",
        "Memory",
        "The 10 worst frames of planning",
        "Anomalies",
        "frame 60",
        "late → hold last",
    ):
        assert words in page
    assert page.count('class="plot"') == 7
    assert page.count("data:image/jpeg;base64,") == 20
    assert "neighbour" not in page.partition("</style>")[2]
    assert "&lt;b&gt;no &amp; result&lt;/b&gt;" in page
    assert "<b>no & result</b>" not in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_given_several_logs_when_written_then_they_stand_side_by_side_and_say_what_they_lack(tmp_path):
    runs = [
        read(logs.write_log(tmp_path / "bare", logs.messages(images=False, memory=False))),
        read(logs.write_records(tmp_path / "records.jsonl", logs.records()[:-3])),
    ]
    whole = written(tmp_path, [replace(run, memory={}) for run in runs])
    page = without_plotly(whole)
    assert page.count("<section") == 2
    assert page.count('<a href="#run1">records.jsonl</a></td>') == 2
    assert "torch 2.13" in page
    assert whole.count(get_plotlyjs()[:2_000]) == 1
    for words in (
        "no /perf/memory_stats in this log: memory",
        "no images or point clouds in this log",
        "no recorded inputs beside these figures",
    ):
        assert words in page
    assert "<h3>Memory</h3>" not in page


def test_given_more_than_fits_when_written_then_it_is_thinned_until_it_does_or_refused(
    run, tmp_path, monkeypatch
):
    library = len(get_plotlyjs().encode())
    whole = write_report([run], tmp_path / "whole.html", lambda text: None, input_pictures)
    monkeypatch.setattr(report, "MOST_BYTES", whole - 1)
    assert write_report([run], tmp_path / "small.html", lambda text: None, input_pictures) < whole
    monkeypatch.setattr(report, "MOST_BYTES", library)
    monkeypatch.setattr(report, "_LEAST_POINTS", 1000)
    with pytest.raises(RunLogError, match="report on fewer at a time"):
        write_report([run], tmp_path / "none.html", lambda text: None, input_pictures)
    assert not (tmp_path / "none.html").exists()


def failing(lines):
    """Every frame of perception fails, as its model returns a dict; the stage stops after a second."""
    for line in lines:
        if line["kind"] == "frame" and line["stage"] == "perception":
            steps = dict.fromkeys(("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms"))
            line |= {
                "outcome": "error",
                "fallback": "none",
                "reason": "KeyError: 0 (b_dict.py:36)",
                **steps,
            }
    second = {
        "v": 1,
        "kind": "health",
        "t_ns": logs.START_NS + 10**9,
        "stage": "perception",
        "to": "SAFE_STOP",
    }
    return [*lines, second]


def test_given_a_model_that_always_fails_when_reported_then_the_page_begins_with_why_and_its_charts_say_so(
    tmp_path,
):
    lines = [{**line, "check": line.get("check") and "accept"} for line in failing(logs.records())]
    whole = written(tmp_path, [read(logs.write_records(tmp_path / "r.jsonl", lines))])
    page = without_plotly(whole)
    parts = [
        (
            '<div class="verdict bad">perception: 0.00% on time: KeyError: 0 (b_dict.py:36); SAFE_STOP for'
            " 4.0 s</div>"
        ),
        '<div class="verdict good">planning: 100.00% on time</div>',
        '<div class="figures">',
        "<h3>Anomalies</h3>",
        'class="plot"',
        "The 10 worst frames",
        "<footer>",
        "torch 2.13",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "tier and health; no frame was on time" in page
    assert "There is no frame with all of its steps known; no frame was on time." in page
    assert "no picture of its input" not in page.partition("<body>")[2]
    assert [title for title in re.findall(r"<summary>(The .*)</summary>", page)] == [
        "The 10 worst frames of planning"
    ]
    timeline = figures_of(whole)[0]
    bands = [shape for shape in timeline["layout"]["shapes"] if shape["type"] == "rect"]
    assert [(shape["x0"], round(shape["x1"])) for shape in bands] == [(1.7e12 + 1000, round(1.7e12 + 4971))]
    assert timeline["layout"]["yaxis3"]["categoryarray"] == [
        "STARTING",
        "WAITING",
        "NOMINAL",
        "DEGRADED",
        "SAFE_STOP",
    ]
    (marks,) = (trace for trace in timeline["data"] if trace["name"] == "anomalies (1)")
    assert marks["text"] == ["perception: deadline missed: why"]


def test_given_frames_that_all_came_during_the_start_when_drawn_then_there_is_a_page(tmp_path):
    lines = logs.records()
    for line in lines:
        line["outcome"] = "starting"
    run = read(logs.write_records(tmp_path / "r.jsonl", lines))
    assert 'class="plot"' in written(tmp_path, [run])
    (tmp_path / "full.html").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: .*full\.html"):
        write_report([run], tmp_path / "full.html", lambda _: None, input_pictures)


def test_given_a_pause_and_bad_inputs_when_drawn_then_lines_break_and_bad_inputs_are_failures(tmp_path):
    lines = [line for line in logs.records() if not (line["kind"] == "frame" and 30 <= line["seq"] < 90)]
    for line in lines:
        if line["kind"] == "frame" and line["seq"] in {3, 4}:
            line |= {"outcome": "bad_input", "reason": "the image is cut off"}
    whole = written(tmp_path, [read(logs.write_records(tmp_path / "r.jsonl", lines))])
    assert "perception: 95.00% on time: the image is cut off<" in whole
    traces = {trace["name"]: trace for trace in figures_of(whole)[0]["data"]}
    for name in ("on time", "budget", "tier"):
        assert traces[name]["x"].count(None) == traces[name]["y"].count(None) == 1
    assert traces["bad input (2)"]["marker"]["color"] == VERMILION


@pytest.mark.parametrize("source", ["records", "log"])
def test_given_a_log_of_two_runs_of_the_node_when_reported_then_each_has_its_own_figures(tmp_path, source):
    later_ns = 37 * 60 * 10**9
    if source == "records":
        again = [{**line, "t_ns": line["t_ns"] + later_ns} for line in failing(logs.records())]
        path = logs.write_records(tmp_path / "drive.jsonl", [*logs.records(), *again])
    else:
        told = [message for message in logs.messages(images=False) if message[0] != "/diagnostics"]
        again = [(topic, kind, t_ns + later_ns, cdr) for topic, kind, t_ns, cdr in told]
        path = logs.write_log(tmp_path / "drive", told + again)
    run = read(path)
    whole = written(tmp_path, [run])
    page = without_plotly(whole)
    assert [len(life.stages[0]) for life in run.lives()] == [logs.FRAMES, logs.FRAMES]
    assert page.count("<section") == 2
    assert f"<h2>{path.name}, run 2 of 2</h2>" in page
    if source == "records":
        assert "run 1 of 2: perception: 99.00% on time: 1 late" in page
        assert "run 2 of 2: perception: 0.00% on time: KeyError" in page
        assert [word for _, word in run.lives()[1].stages[0].health] == ["NOMINAL", "SAFE_STOP"]
    for figure in figures_of(whole):
        times = [at for trace in figure["data"] for at in trace["x"] if at and at > 1e12]
        assert not times or max(times) - min(times) < 60_000


def replayed(folder, name, pace="real"):
    frames = made.rows([10.0] * 50, 86_400_000.0 if pace == "fast" else 40.0)
    run = run_of({"stages": [{"name": "perception"}], "pace": pace}, {"perception": frames})
    write_run(run, folder / f"{name}.json")
    return replace(read(folder / f"{name}.json"), name=name)


def test_given_more_logs_than_a_page_holds_then_the_worst_have_a_section_most_a_row_and_the_rest_is_counted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "MOST_ROWS", 40)
    names = [f"a_drive_with_a_long_name_{number:05}" for number in range(47)]
    worst = [replayed(tmp_path, name) for name in names[:2]]
    figures = stage_figures(worst[0].stages[0])
    rows = [OverviewRow(name, "perception", figures, 1) for name in names]
    text = written(tmp_path, worst, Overview(rows, [("bad<1>", "no & log")], "47 of 48 logs in out"))
    assert text.count("<section ") == 2
    assert text.count("<td>perception</td>") == 40
    assert "7 more rows, of the best, are left out" in text
    assert re.findall(r'<a href="#(run\d)">(a_\w+)</a>', text) == [("run0", names[0]), ("run1", names[1])]
    assert "<b>bad&lt;1&gt;</b>: no &amp; log" in text
    assert f'<b class="">{50 * len(rows):,}</b><span>frames that came, of all stages</span>' in text
    assert "How the models did: 47 of 48 logs in out" in text
