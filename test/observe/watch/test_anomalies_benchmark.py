"""What the benchmark counts, on scores that are known."""

import pytest

from benchmarks.anomalies import DETECTORS, Tally
from benchmarks.rig.anomaly_series import Labelled


def test_given_known_scores_when_tallied_then_each_figure_is_right():
    scores = [0.1] * 1000
    for at in (300, 302, 305, 520, 800):  # one false alarm, one in an anomaly, one more false
        scores[at] = 0.9
    series = Labelled("x", "x", [3600.0 * i for i in range(1000)], [0.0] * 1000, [(510, 530), (900, 910)])
    tally = Tally()
    tally.add(series, scores)
    figures = tally.figures()

    assert figures["recall"] == 0.5
    assert figures["precision"] == pytest.approx(1 / 3)
    assert figures["delay_samples"] == 10
    assert figures["false_alarms_per_10000"] == pytest.approx(1e4 * 2 / 800)
    assert figures["false_alarms_per_hour"] == pytest.approx(2 / 799)


@pytest.mark.parametrize("name", DETECTORS)
def test_given_a_large_spike_in_a_steady_series_when_judged_then_every_detector_of_the_benchmark_tells_it(
    name,
):
    detector = DETECTORS[name]()
    scores = [detector.update(float(i), 10.0 + i % 7 + (500.0 if i == 900 else 0.0)) for i in range(1000)]

    assert max(scores[200:900]) < 0.5
    assert scores[900] >= 0.5
