import math

import pytest

from torchperf_ros.frame.tier_ladder import MemoryGuard

SHARE = 0.7


def left_out(guard, *used, tiers=3):
    for share in used:
        guard.update(share, SHARE, tiers)
    return guard.left_out


def test_given_room_when_updated_then_nothing_is_left_out():
    guard = MemoryGuard()
    assert left_out(guard, 0.1, 0.69, 0.7) == 0
    assert not guard.tight


def test_given_short_memory_when_it_stays_short_then_one_tier_after_the_other_is_left_out_but_the_last():
    guard = MemoryGuard()
    assert [left_out(guard, 0.8) for _ in range(4)] == [1, 2, 2, 2]
    assert guard.tight


def test_given_short_memory_when_it_is_a_little_below_the_share_then_nothing_changes_yet():
    guard = MemoryGuard()
    assert left_out(guard, 0.8, 0.65) == 1
    assert guard.tight


def test_given_short_memory_when_there_is_room_again_then_tiers_come_back_one_by_one():
    guard = MemoryGuard()
    left_out(guard, 0.9, 0.9)
    assert [left_out(guard, 0.5) for _ in range(3)] == [1, 0, 0]
    assert not guard.tight


@pytest.mark.parametrize("short", [False, True])
def test_given_a_sample_that_is_unknown_when_updated_then_nothing_changes(short):
    guard = MemoryGuard()
    left_out(guard, *[0.9] * short)
    assert left_out(guard, math.nan) == short
    assert guard.tight == short


def test_given_one_tier_when_memory_is_short_then_it_goes_on():
    assert left_out(MemoryGuard(), 0.9, tiers=1) == 0
