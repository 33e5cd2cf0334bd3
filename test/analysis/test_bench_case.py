import json

import pytest

from torchperf_ros.analysis.bench_case import Case, Result


def test_given_figures_when_compared_with_eager_then_ratios_are_of_the_same_process(make_figures):
    figures = make_figures(5.0, 10.0, usual_p99_ms=9.0, eager_usual_p99_ms=12.0)
    assert figures.times_eager == 2.0
    assert figures.beside_eager.median_ms == 0.5
    assert figures.beside_eager.p99_ms == 0.75


@pytest.mark.parametrize(
    ("warm_up_ms", "calls"),
    [
        ((10.0, 10.0), 0),
        ((90.0, 16.0, 10.0), 2),
        ((90.0, 15.0, 10.0), 1),
        ((10.0, 90.0, 10.0), 0),  # a stall, not the cold
        ((90.0, 90.0), 2),
    ],
)
def test_given_first_calls_when_counted_then_those_are_cold_that_come_first_and_take_long(
    make_figures, warm_up_ms, calls
):
    assert make_figures(10.0, warm_up_ms=warm_up_ms).calls_to_warm == calls


def test_given_results_when_made_into_lines_then_they_are_flat_json_with_an_error_or_figures(make_figures):
    case = Case("full", 2, "aoti")
    good = json.loads(json.dumps(Result(case, make_figures(2.0 / 3.0)).as_dict()))
    assert (good["tier"], good["batch"], good["engine"], good["error"], good["p50_ms"]) == (
        "full", 2, "aoti", "", 0.66667,
    )  # fmt: skip
    assert good["times_eager"] == 15.0
    assert len(good["warm_up_ms"]) == 30
    assert Result(case, None, "why").as_dict() == {"tier": "full", "batch": 2, "engine": "aoti", "error": "why"}
