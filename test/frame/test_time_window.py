import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.stage_figures import TimeWindow


def rows(times):
    return np.array([(time, -time) for time in times], dtype=float).reshape(len(times), 2)


@given(
    batches=st.lists(st.lists(st.integers(0, 50), max_size=6), max_size=8),
    span=st.integers(1, 40),
    most=st.integers(1, 12),
)
def test_given_any_batches_when_added_then_what_is_left_is_the_newest_of_the_span(batches, span, most):
    window, seen, now = TimeWindow(2, most), [], 0
    for gaps in batches:
        times = [now := now + gap for gap in gaps]
        seen = [time for time in seen[-most:] + times if time >= now - span][-most:]
        window.add(rows(times), now - span)
        assert window.column(0).tolist() == seen
        assert window.column(1).tolist() == [-time for time in seen]
        assert len(window) <= most


def test_given_no_new_rows_when_time_goes_on_then_old_ones_are_forgotten_all_the_same():
    window = TimeWindow(2)
    window.add(rows([1, 5]), 0)
    window.add(rows([]), 5)
    assert window.column(0).tolist() == [5]
    window.add(rows([]), 6)
    assert len(window) == 0
