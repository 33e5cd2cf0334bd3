import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.engine_choice import choose_engine

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
