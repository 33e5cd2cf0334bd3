import csv
import io
import json

import pytest
from rich.console import Console

from torchperf_ros.analysis.curve_report import curve_csv, curve_json, curve_tables, curve_targets


@pytest.mark.parametrize(
    ("auto", "verdicts"),
    [
        ((1.0, 5.3), ["met", "met"]),
        ((0.96, 9.0), ["met", "met"]),  # 4 % slower
        ((0.94, 9.0), ["missed", "met"]),
        ((1.0, 5.29), ["met", "missed"]),
    ],
)
def test_given_a_curve_when_judged_then_each_target_is_met_or_missed_by_its_figures(make_curve, auto, verdicts):
    assert [target.verdict for target in curve_targets(make_curve(auto))] == verdicts


def test_given_a_curve_without_30_when_judged_then_that_target_counts_as_not_measured(make_curve):
    target = curve_targets(make_curve((2.0,), lengths=(10,)))[1]
    assert target.verdict == "not measured"
    assert target.met is None


def test_given_a_target_when_shown_then_it_names_the_figure_and_where_it_was_found(make_curve):
    first, second = curve_targets(make_curve((0.97, 6.0)))
    assert first.found == "0.97 at n = 1, its least"
    assert second.found == "6.00, by aoti-dynamic"


MACHINE = {"cpu": "Some CPU", "threads": 1}


def shown(curve, width=100):
    console = Console(width=width, file=io.StringIO())
    for table in curve_tables(curve):
        console.print(table)
    return console.file.getvalue()


def test_given_a_curve_when_shown_then_ratios_stand_beside_the_published_ones(make_curve):
    text = shown(make_curve((1.5, 12.0)))
    assert "0.50 (0.35)" in text
    assert "0.80 (3.38)" in text
    assert "12.00" in text
    assert "aoti-dynamic" in text
    assert max(map(len, text.splitlines())) <= 100


def test_given_an_engine_that_failed_when_shown_and_written_then_there_is_no_figure_for_it(make_curve):
    curve = make_curve((2.0, 12.0), failed="dynamic")
    assert "failed" in shown(curve)
    assert "nan" not in shown(curve)
    row = next(row for row in csv.DictReader(io.StringIO(curve_csv(curve))) if row["engine"] == "dynamic")
    assert (row["median_us"], row["error"]) == ("", "CppCompileError: no compiler")


def test_given_a_curve_when_written_as_csv_then_there_is_a_line_for_each_length_and_engine(make_curve):
    rows = list(csv.DictReader(io.StringIO(curve_csv(make_curve((1.5, 12.0))))))
    assert len(rows) == 10
    static = rows[1]
    assert (static["length"], static["engine"], static["times_eager"], static["reference"]) == (
        "1", "static", "0.5", "0.35",
    )  # fmt: skip


def test_given_a_curve_when_written_as_json_then_machine_points_and_verdicts_are_there_and_no_nan(make_curve):
    text = curve_json(make_curve((0.5, 12.0), failed="static"), MACHINE, 0.3)
    report = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert report["machine"]["cpu"] == "Some CPU"
    assert report["seconds"] == 0.3
    assert len(report["points"]) == 10
    assert [target["verdict"] for target in report["targets"]] == ["missed", "met"]
