"""One signal, second by second, on a virtual clock."""

import math
import random

import pytest

from torchperf_ros.api.alert import Level
from torchperf_ros.observe.watch.series_detector import Signal, SignalRule, number

LATENCY = SignalRule("latency p50", "latency", "ms", "up", 2.5, 0.15)
RATE = SignalRule("input rate", "input rate", "Hz", "both", 0.5, 0.2)


def latency(seconds, slow=lambda second: False):
    """Around 18 ms with noise, and now and then a second that is slower; 9 ms more where it is `slow`."""
    rng = random.Random(0)
    return [
        18.0 + rng.gauss(0, 0.4) + 6.0 * (rng.random() < 0.004) + 9.0 * slow(at) for at in range(seconds)
    ]


def run(rule, values):
    """The alerts by second."""
    signal, why = Signal(rule), "; most of it in inference"
    return {
        at: signal.alert("camera", why)
        for at, value in enumerate(values)
        if signal.update(1000.0 + at, value)
    }


def steady(usual, then, seconds, begin=300):
    """Next to no noise around `usual`, and `then` from a second on."""
    return [(then if second >= begin else usual) + 0.01 * (second % 3) for second in range(seconds)]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(latency(3 * 3600), id="hours of noise"),
        pytest.param(latency(400, lambda second: second in {300, 301}), id="two slow seconds"),
        pytest.param(steady(18.0, 19.5, 400), id="below the floor"),
        pytest.param(steady(30.0, 10.0, 400), id="the other direction"),
        pytest.param(steady(18.0, 27.0, 58, begin=50), id="a start unlike what follows"),
        pytest.param(
            [math.nan if at % 3 == 0 else value for at, value in enumerate(latency(600))], id="gaps"
        ),
    ],
)
def test_given_seconds_that_are_no_departure_of_the_rule_when_watched_then_nothing_is_told(values):
    assert run(LATENCY, values) == {}


def test_given_a_rule_that_counts_it_when_watched_then_the_same_departure_is_told():
    assert run(SignalRule("latency p50", "latency", "ms", "up", 0.5), steady(18.0, 19.5, 400))
    assert min(run(RATE, steady(30.0, 10.0, 400))) <= 304
    assert run(LATENCY, [math.nan, *latency(600), math.nan] + [27.0] * 20)


@pytest.mark.parametrize("learnt_s", [90, 300, 1000])
def test_given_a_latency_half_again_as_long_when_it_lasts_then_it_is_told_within_seconds_and_until_it_is_over(
    learnt_s,
):
    told = run(LATENCY, latency(learnt_s + 100, lambda second: learnt_s <= second < learnt_s + 40))
    assert learnt_s + 2 <= min(told) <= learnt_s + 6
    assert learnt_s + 39 <= max(told) <= learnt_s + 44
    assert len(told) == max(told) - min(told) + 1
    assert {round(float(alert.values["baseline"])) for alert in told.values()} == {18}


def test_given_the_same_fault_again_when_it_lasts_then_it_is_told_again_until_it_is_how_things_are():
    told = run(LATENCY, latency(2000, lambda second: second >= 300 and second % 100 < 20))
    assert {second // 100 for second in told} >= {3, 4, 5, 6}
    assert max(told) < 1500


def test_given_a_new_level_when_it_stays_then_it_is_the_usual_after_five_minutes():
    told = run(LATENCY, latency(1500, lambda second: second >= 300))
    assert 595 <= max(told) <= 605


def test_given_a_departure_when_said_then_the_sentence_has_value_baseline_and_time():
    told = run(LATENCY, steady(18.0, 18.0, 200) + [27.0] * 13)
    finding = told[max(told)]
    assert finding.name == "camera: latency"
    assert finding.level is Level.WARN
    assert finding.message == "latency p50 27.0 ms, usually 18.0 ms, since 12 s; most of it in inference"
    assert {
        "value": "27.0",
        "baseline": "18.0",
        "unit": "ms",
        "since": "12",
    }.items() <= finding.values.items()
    assert 0.3 <= float(finding.values["score"]) <= 1.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.12"), (18.44, "18.4"), (1234.5, "1234"), (-12.0, "-12.0"), (math.nan, "unknown")],
)
def test_given_a_number_when_said_then_it_has_the_digits_that_matter(value, text):
    assert number(value) == text
