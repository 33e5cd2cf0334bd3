import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.clock import VirtualClock


@given(st.lists(st.floats(0, 1e6)))
def test_given_a_virtual_clock_when_advanced_then_it_moves_by_just_that_and_never_back(steps_ms):
    clock = VirtualClock(start_ns=7)
    expected_ns = 7
    for step_ms in steps_ms:
        expected_ns += round(step_ms * 1e6)
        assert clock.advance_ms(step_ms) == expected_ns == clock()


def test_given_a_virtual_clock_when_told_to_go_back_then_it_refuses_and_stands_still():
    clock = VirtualClock()
    before_ns = clock()
    with pytest.raises(ValueError, match="cannot go back by -0.5 ms"):
        clock.advance_ms(-0.5)
    assert clock() == before_ns
