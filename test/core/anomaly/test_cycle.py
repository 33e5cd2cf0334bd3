import math
import random

import pytest

from torchperf_ros.core.anomaly.cycle import Cycle
from torchperf_ros.core.anomaly.series_detector import SeriesDetector


def test_given_a_clock_without_days_when_the_series_repeats_then_the_cycle_is_known_after_a_look():
    cycle = Cycle()
    for i in range(1100):
        cycle.learn(float(i), 30 * math.sin(2 * math.pi * i / 200))
        if i < 511:
            assert cycle.usual(i + 1.0) is None

    for i in range(1100, 1300, 7):
        assert cycle.usual(float(i)) == pytest.approx(30 * math.sin(2 * math.pi * i / 200), abs=2.5)


def test_given_times_that_stand_still_or_go_backward_when_learnt_then_there_is_no_cycle():
    for step_s in (0.0, -1.0):
        cycle = Cycle()
        for i in range(600):
            cycle.learn(i * step_s, math.sin(i / 10))
        assert cycle.usual(0.0) is None


def test_given_a_cycle_of_its_own_when_a_peak_is_missing_then_it_is_told():
    draw = random.Random(1)
    values = [100 + 30 * math.sin(2 * math.pi * i / 200) + draw.gauss(0, 2) for i in range(3200)]
    values[3040:3070] = [100 + draw.gauss(0, 2) for _ in range(30)]
    detector = SeriesDetector()
    found = [detector.update(float(i), value) for i, value in enumerate(values)]

    assert max(reading.score for reading in found[:3040]) < 0.5
    assert max(reading.score for reading in found[3040:3070]) > 0.5
    assert {reading.kind for reading in found[3045:3060]} == {"season"}
