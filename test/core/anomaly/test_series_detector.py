import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.core.anomaly.series_detector import SeriesDetector

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)
DAY_S = 86_400.0


def scores(values, interval_s=1.0, **options):
    detector = SeriesDetector(**options)
    return [detector.update(number * interval_s, value).score for number, value in enumerate(values)]


def noise(count, seed=1, mean=100.0, deviation=2.0):
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(count)]


def readings(values, **options):
    detector = SeriesDetector(**options)
    return [detector.update(float(number), value) for number, value in enumerate(values)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=150),
    st.sampled_from(["both", "up", "down"]),
    st.floats(0, 1e300),
    st.floats(1, 4),
)
def test_given_any_floats_when_updated_then_every_score_is_from_0_to_1(samples, direction, floor, caution):
    detector = SeriesDetector(direction, floor, caution)
    for _ in range(60):  # past the warm-up
        detector.update(0.0, 1.0)
    for time_s, value in samples:
        reading = detector.update(time_s, value)
        assert 0.0 <= reading.score <= 1.0
        assert detector.active == (reading.since_s is not None)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(-60, 60), st.integers(-100_000, 100_000))
def test_given_a_series_when_scaled_and_shifted_then_scores_stay(seed, exponent, shift):
    draw = random.Random(seed)
    values = [round(draw.gauss(0, 30) ** 3 / 500) for _ in range(400)]
    scale = 2.0**exponent  # exact, so that ties stay ties

    assert scores([(value + shift) * scale for value in values]) == pytest.approx(scores(values), abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=80, max_size=200), st.lists(ANY_FLOAT, max_size=30))
def test_given_a_prefix_when_more_follows_then_its_scores_stay(values, more):
    assert scores(values) == scores(values + more)[: len(values)]


def test_given_the_first_samples_when_they_are_wild_then_they_score_nothing():
    assert max(scores([1.0, 1e9, -1e9, 0.0] * 12)) == 0.0


def test_given_zeros_for_long_when_one_jumps_then_it_is_told_at_once_as_certain():
    *before, jump = readings([0.0] * 5000 + [0.001])

    assert max(reading.score for reading in before) == 0.0
    assert jump.score > 0.9
    assert jump.since_s == 5000.0
    assert jump.kind == "spike"
    assert jump.baseline == 0.0


def test_given_noise_when_it_goes_on_then_nothing_is_told():
    assert max(scores(noise(20_000))) < 0.5


@pytest.mark.parametrize(
    ("change", "kinds", "within"),
    [
        (lambda values: values + [130.0] + noise(20, 2), {"spike"}, 1),
        (lambda values: values + noise(60, 2, mean=112.0), {"spike", "level"}, 6),
        (lambda values: values + noise(100, 2, deviation=14.0), {"spike", "variance"}, 20),
        (lambda values: values + [values[-1]] * 40, {"flat"}, 12),
        (lambda values: values + [v + 0.03 * i for i, v in enumerate(noise(1000, 2))], {"drift", "level"}, 600),
    ],
    ids=["spike", "level", "variance", "flat", "ramp"],
)
def test_given_noise_when_it_changes_then_the_change_is_told_with_its_kind(change, kinds, within):
    before = noise(3000)
    found = readings(change(before))
    told = [number for number, reading in enumerate(found) if reading.score >= 0.5]

    assert told
    assert 3000 <= told[0] < 3000 + within
    assert found[told[0]].kind in kinds


def test_given_a_new_level_when_it_stays_then_the_score_fades_and_the_level_becomes_the_baseline():
    found = readings(noise(3000) + noise(1500, 2, mean=130.0))

    assert found[3000].score > 0.5
    assert found[3000].baseline == pytest.approx(100, abs=1)
    assert found[3000 + 150].baseline == pytest.approx(101, abs=3)
    assert found[3000 + 250].baseline == pytest.approx(130, abs=2)
    assert max(reading.score for reading in found[3300:]) < 0.5
    assert found[-1].since_s is None


def test_given_an_anomaly_when_it_comes_again_then_the_first_has_not_hidden_it():
    values = noise(5000)
    spikes = [2000, 2500, 3000, 3500, 4000, 4500]
    for at in spikes:
        values[at] = 140.0

    for direction in ("both", "up"):
        found = scores(values, direction=direction)
        assert all(found[at] > 0.5 for at in spikes)


def test_given_bursts_of_slow_frames_when_one_stalls_for_longer_than_any_then_it_is_told():
    draw = random.Random(2)
    values = [0.41 + abs(draw.gauss(0, 0.01)) for _ in range(2500)]
    for at in range(100, 2000, 95):
        for number in range(at, at + 5):
            values[number] += draw.choice((0.4, 0.4, 0.8, 1.2))
    values[2000] = values[2400] = 4.1

    for direction in ("both", "up"):
        found = scores(values, direction=direction)
        assert min(found[2000], found[2400]) > 0.5


def test_given_a_daily_season_when_a_day_misses_its_peak_then_it_is_told_though_no_value_is_unusual():
    interval_s, a_day = 300.0, 288
    draw = random.Random(3)
    values = [100 + 40 * math.sin(2 * math.pi * i / a_day) + draw.gauss(0, 1) for i in range(10 * a_day)]
    at = 8 * a_day + a_day // 4 - 20
    values[at : at + 40] = [100 + draw.gauss(0, 1) for _ in range(40)]
    detector = SeriesDetector()
    found = [detector.update(i * interval_s, value) for i, value in enumerate(values)]

    assert max(reading.score for reading in found[:at]) < 0.5
    assert max(reading.score for reading in found[at : at + 40]) > 0.5
    assert "season" in {reading.kind for reading in found[at : at + 40]}
    assert found[at].baseline == pytest.approx(137, abs=4)


def test_given_one_direction_when_the_other_happens_then_it_is_not_told():
    down = noise(2000) + [40.0] * 5
    up = noise(2000) + [160.0] * 5

    assert max(scores(down, direction="up")) < 0.5
    assert max(scores(up, direction="down")) < 0.5
    assert scores(up, direction="up")[2000] > 0.5
    assert scores(down, direction="down")[2000] > 0.5


def test_given_a_floor_when_a_departure_is_smaller_then_it_stays_below_the_threshold_in_proportion():
    values = [5.0] * 500 + [5.4]

    assert scores(values)[-1] > 0.9
    assert scores(values, floor=0.5)[-1] == pytest.approx(0.4)
    assert scores(values, floor=0.3)[-1] > 0.9


def test_given_heavy_tails_when_caution_is_asked_for_then_fewer_are_told():
    draw = random.Random(5)
    values = [draw.gauss(0, 1) / draw.gauss(0, 1) for _ in range(20_000)]
    told, cautious = (sum(score >= 0.5 for score in scores(values, caution=c)) for c in (1.0, 2.0))

    assert told > 0
    assert cautious < told


def test_given_missing_values_when_they_come_then_they_are_gaps_below_the_threshold_and_nothing_is_learnt():
    detector = SeriesDetector()
    for number, value in enumerate(noise(200)):
        expected = detector.update(float(number), value)
    gaps = [detector.update(200.0 + number, value) for number, value in enumerate([math.nan, math.inf, -math.inf])]
    after = detector.update(203.0, 100.0)

    assert {gap.kind for gap in gaps} == {"gap"}
    assert all(0 < gap.score < 0.5 for gap in gaps)
    assert after.baseline == pytest.approx(expected.baseline, abs=0.5)
    assert after.score < 0.5


def test_given_a_steady_clock_when_it_pauses_then_that_is_a_gap():
    detector = SeriesDetector()
    for number in range(100):
        detector.update(float(number), 7.0)

    assert detector.update(160.0, 7.0).kind == "gap"
    assert detector.update(161.0, 7.0).kind == ""


def test_given_an_event_when_it_is_over_then_the_state_goes_off_and_the_score_fades_below_the_threshold():
    detector = SeriesDetector()
    for number, value in enumerate(noise(1000)):
        detector.update(float(number), value)
    on = detector.update(1000.0, 150.0)
    states = [(detector.update(1001.0 + number, value), detector.active) for number, value in enumerate(noise(60, 9))]

    assert on.since_s == 1000.0
    assert not states[-1][1]
    trail = [reading.score for reading, _ in states[40:]]
    assert all(0.2 < score < 0.5 for score in trail)
    assert trail == sorted(trail, reverse=True)


def memory_bytes(thing, seen):
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    total = sys.getsizeof(thing)
    if isinstance(thing, dict):
        total += sum(memory_bytes(item, seen) for pair in thing.items() for item in pair)
    elif hasattr(thing, "__iter__") and not isinstance(thing, str):
        total += sum(memory_bytes(item, seen) for item in thing)
    slots = getattr(type(thing), "__slots__", ())
    for name in [*getattr(thing, "__dict__", ()), *slots]:
        total += memory_bytes(getattr(thing, name), seen)
    return total


def test_given_a_long_series_when_it_goes_on_then_memory_stays():
    detector = SeriesDetector()
    draw = random.Random(1)
    sizes = []
    for number in range(15_000):
        detector.update(number * 60.0, draw.random())
        if number % 2500 == 2499 and number > 6000:
            sizes.append(memory_bytes(detector, set()))

    assert max(sizes) <= sizes[0] * 1.02 + 60_000  # of the season, a few more days
    assert max(sizes) < 4_000_000


@pytest.mark.parametrize(
    ("options", "name"),
    [({"direction": "left"}, "direction"), ({"floor": -1.0}, "floor"), ({"floor": math.nan}, "floor"),
     ({"caution": 0.5}, "caution")],
)  # fmt: skip
def test_given_a_bad_option_when_made_then_the_error_names_it(options, name):
    with pytest.raises(ValueError, match=name):
        SeriesDetector(**options)


def test_given_a_flat_line_when_a_second_one_comes_then_the_first_has_not_hidden_it():
    values = noise(3000)
    for at in (1000, 2000):
        values[at : at + 150] = [values[at]] * 150
    found = readings(values)

    for at in (1000, 2000):
        assert "flat" in {reading.kind for reading in found[at : at + 150] if reading.score >= 0.5}


def test_given_zeros_when_one_sample_is_not_then_the_zeros_after_it_are_no_flat_line():
    found = readings([0.0] * 1000 + [1.0] + [0.0] * 900)

    assert {reading.kind for reading in found[1020:]} == {""}
