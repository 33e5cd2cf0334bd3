"""Reading in advance, with real threads."""

import itertools
import threading

import pytest

from torchperf_ros.replay.read_ahead import ReadAhead


def test_given_a_source_when_read_ahead_then_all_comes_in_order():
    assert list(ReadAhead(range(1000), lambda _: 8, 4000)) == list(range(1000))


def test_given_a_slow_taker_when_read_ahead_then_no_more_waits_than_allowed():
    read = []
    full = threading.Event()

    def source():
        for number in itertools.count():
            read.append(number)
            if number == 4:  # the fifth finds no room
                full.set()
            yield number

    ahead = ReadAhead(source(), lambda _: 1000, 4 * 1512)
    assert full.wait(10)
    assert read == [0, 1, 2, 3, 4]
    assert next(iter(ahead)) == 0
    ahead.close()
    assert len(read) <= 6


def test_given_an_item_larger_than_the_limit_when_read_ahead_then_it_comes_all_the_same():
    assert list(ReadAhead([1, 2], lambda _: 10**9, 1)) == [1, 2]


def test_given_a_source_that_breaks_off_when_read_ahead_then_what_came_before_is_given_first():
    def source():
        yield from (1, 2)
        msg = "damaged here"
        raise ValueError(msg)

    items = iter(ReadAhead(source(), lambda _: 1, 10**6))
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="damaged here"):
        next(items)
