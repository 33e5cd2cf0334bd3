import math
import random

import pytest

from torchperf_ros.core.anomaly.precedents import Precedents


def compared(values):
    precedents = Precedents()
    found = []
    for value in values:
        found.append(precedents.compare(value))
        precedents.learn(value)
    return found


def plainly(values, number):
    """Both distances of one sample, by comparing it with each earlier one."""

    def run(other):
        return sum(0.8**age * abs(values[number - age] - values[other - age]) for age in range(other + 1))

    earlier = range(max(0, number - 2048), number - 32)
    return min(abs(values[number] - values[other]) for other in earlier), min(run(other) for other in earlier[16:])


def test_given_any_series_when_compared_then_both_distances_are_those_to_the_nearest():
    draw = random.Random(1)
    values = [draw.gauss(0, 1) + 3 * math.sin(i / 9) for i in range(4200)]
    found = compared(values)

    assert found[:49] == [None] * 49
    for number in (49, 60, 500, 2047, 2048, 2063, 2070, 3000, 4095, 4096, 4199):
        near, near_run = plainly(values, number)
        assert found[number][0] == near
        assert found[number][1] == pytest.approx(near_run, rel=0.1)  # a run begins 16 samples back, not with the series


def test_given_a_cycle_when_a_part_runs_backward_then_only_its_run_is_far_from_all():
    values = [float(i % 40) for i in range(1000)]
    values[810:830] = values[810:830][::-1]
    found = compared(values)

    assert max(near for near, _ in found[100:]) == 0.0
    assert max(near_run for _, near_run in found[200:810]) < 1e-9
    assert max(near_run for _, near_run in found[812:830]) > 5.0


def test_given_a_spike_when_constants_follow_for_ever_then_no_distance_is_left():
    found = compared(1e9 if number == 100 else 1.0 for number in range(9000))

    assert found[-1] == (0.0, 0.0)
