from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.waiting import PublishMargin

WINDOW = 8


def test_given_no_samples_when_asked_then_both_parts_are_at_the_minimum():
    assert PublishMargin(minimum_ms=0.1).ms == 0.2


def test_given_late_wake_ups_when_asked_then_the_worst_one_and_the_worst_publish_add_up():
    margin = PublishMargin(0.1, 2.0, WINDOW)
    for late_ms in (0.3, 0.7, 0.2):
        margin.woke(late_ms)
    for took_ms in (0.05, 0.4):
        margin.published(took_ms)
    assert margin.ms == 0.7 + 0.4


def test_given_one_bad_wake_up_when_a_window_of_good_ones_followed_then_it_is_forgotten():
    margin = PublishMargin(0.1, 2.0, WINDOW)
    margin.woke(1.5)
    assert margin.ms > 1.5
    for _ in range(WINDOW - 1):
        margin.woke(0.0)
    assert margin.ms > 1.5
    margin.woke(0.0)
    assert margin.ms < 1.0


def test_given_a_stall_of_a_second_when_learned_then_the_margin_stays_within_its_maximum():
    margin = PublishMargin(0.1, 2.0, WINDOW)
    margin.woke(1000.0)
    margin.published(1000.0)
    assert margin.ms == 2.0


def test_given_a_wake_up_before_its_time_when_learned_then_it_does_not_shorten_the_margin():
    margin = PublishMargin(0.1, 2.0, window=1)
    margin.published(0.5)
    margin.woke(-5.0)
    assert margin.ms == 0.5


@given(st.lists(st.tuples(st.booleans(), st.floats(-10, 1e5)), max_size=50))
def test_given_any_history_when_learned_then_the_margin_is_bounded_and_covers_the_recent_worst(history):
    margin = PublishMargin(0.1, 2.0, WINDOW)
    woke, published = [], []
    for is_wake, took_ms in history:
        if is_wake:
            margin.woke(took_ms)
            woke.append(took_ms)
        else:
            margin.published(abs(took_ms))
            published.append(abs(took_ms))
        worst_ms = max([0.0, *woke[-WINDOW:]]) + max([0.0, *published[-WINDOW:]])
        assert 0.1 <= margin.ms <= 2.0
        assert margin.ms >= min(worst_ms, 2.0)
