import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.frame.outcome import Fallback
from torchperf_ros.stage.fallback_outputs import choose_fallback

orders = st.lists(st.sampled_from(Fallback), max_size=4)


def choose(order, **given_values):
    values = {"last_age_ms": 10.0, "hold_last_ms": 300.0, "stop": True, "backup": True, **given_values}
    return choose_fallback(order, **values)


@pytest.mark.parametrize("order", list(itertools.permutations((Fallback.BACKUP, Fallback.HOLD_LAST, Fallback.STOP))))
def test_given_everything_available_when_chosen_then_the_first_configured_wins(order):
    assert choose(order) is order[0]


@pytest.mark.parametrize(
    ("missing", "chosen"),
    [
        ({"backup": False}, Fallback.HOLD_LAST),
        ({"backup": False, "last_age_ms": None}, Fallback.STOP),
        ({"backup": False, "last_age_ms": 300.1}, Fallback.STOP),
        ({"backup": False, "last_age_ms": 300.0}, Fallback.HOLD_LAST),
        ({"backup": False, "last_age_ms": None, "stop": False}, Fallback.NONE),
    ],
)
def test_given_the_default_order_when_some_are_missing_then_the_next_available_is_chosen(missing, chosen):
    assert choose((Fallback.BACKUP, Fallback.HOLD_LAST, Fallback.STOP), **missing) is chosen


def test_given_none_first_when_others_are_available_then_nothing_is_published():
    assert choose((Fallback.NONE, Fallback.HOLD_LAST)) is Fallback.NONE


@given(
    order=orders, age_ms=st.none() | st.floats(0, 1000), hold_ms=st.floats(0, 1000), stop=st.booleans(),
    backup=st.booleans(),
)  # fmt: skip
def test_given_any_order_when_chosen_then_it_is_configured_and_available_and_nothing_before_it_is(
    order, age_ms, hold_ms, stop, backup
):
    def available(kind):
        return {
            Fallback.BACKUP: backup, Fallback.STOP: stop, Fallback.NONE: True,
            Fallback.HOLD_LAST: age_ms is not None and age_ms <= hold_ms,
        }[kind]  # fmt: skip

    chosen = choose_fallback(order, last_age_ms=age_ms, hold_last_ms=hold_ms, stop=stop, backup=backup)
    assert available(chosen)
    if chosen in order:
        assert not any(available(kind) for kind in order[: order.index(chosen)])
    else:
        assert chosen is Fallback.NONE
        assert not any(available(kind) for kind in order)
