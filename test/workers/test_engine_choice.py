import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.engine_choice import EngineChoice, choose_engine

EAGER = Calibration(10.0, 12.0)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        (Calibration(5.0, 6.0), "aoti"),
        (Calibration(9.6, 12.0), "aoti"),
        (Calibration(9.7, 9.7), "eager"),  # 3 %: a tie
        (Calibration(11.0, 11.0), "eager"),
        (Calibration(5.0, 15.0), "aoti"),  # the p99 of two measurements scatters
        (Calibration(5.0, 15.1), "eager"),
        (Calibration(float("nan"), float("nan")), "eager"),
    ],
)
def test_given_an_engine_when_compared_with_eager_then_it_is_chosen_only_if_clearly_better(found, chosen):
    assert choose_engine({"eager": EAGER, "aoti": found}) == chosen


def test_given_several_better_engines_when_chosen_then_the_smallest_median_wins():
    found = {
        "static": Calibration(4.0, 5.0),
        "aoti": Calibration(3.0, 5.0),
        "dynamic": Calibration(2.0, 90.0),
    }
    assert choose_engine({"eager": EAGER, **found}) == "aoti"


times_ms = st.floats(0.001, 1000.0)
calibrations = st.builds(lambda median, tail: Calibration(median, median + tail), times_ms, times_ms)


@given(st.dictionaries(st.text(max_size=3), calibrations), calibrations)
def test_given_any_measurements_when_chosen_then_the_choice_is_never_slower_than_eager(found, eager):
    measured = {**found, "eager": eager}
    chosen = measured[choose_engine(measured)]
    assert chosen.median_ms <= eager.median_ms
    assert chosen.p99_ms <= eager.p99_ms * 1.25


@given(st.dictionaries(st.text(max_size=3), calibrations), calibrations, st.data())
def test_given_a_choice_when_some_engines_cannot_run_then_the_best_of_the_others_is_as_if_chosen_from_them(
    found, eager, data
):
    measured = {**found, "eager": eager}
    timings_ms = {name: [one.median_ms, one.p99_ms] for name, one in measured.items()}
    choice = EngineChoice(choose_engine(measured), timings_ms)
    names = {"eager", *data.draw(st.lists(st.sampled_from(sorted(measured))))}
    expected = choice.engine if choice.engine in names else choose_engine({n: measured[n] for n in names})
    assert choice.best_of(names) == expected
