import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.anomaly_series import drive
from torchperf_ros.observe.watch.series_detector import FRAME_CAUTION, SeriesDetector

ANY_FLOAT = st.floats(allow_nan=True, allow_infinity=True, width=64)
DIRECTION = st.sampled_from(["both", "up", "down"])


def scores(values, interval_s=1.0, **options):
    detector = SeriesDetector(**options)
    return [detector.update(number * interval_s, value).score for number, value in enumerate(values)]


def noise(count, seed=1, mean=100.0, deviation=2.0):
    draw = random.Random(seed)
    return [draw.gauss(mean, deviation) for _ in range(count)]


def readings(values, **options):
    detector = SeriesDetector(**options)
    return [detector.update(float(number), value) for number, value in enumerate(values)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(ANY_FLOAT, ANY_FLOAT), max_size=150), DIRECTION, st.floats(0, 1e300), st.floats(1, 4)
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
    assert jump.kind == "step"
    assert jump.baseline == 0.0


@pytest.mark.parametrize(
    ("change", "kinds", "within"),
    [
        (lambda values: values + [130.0] + noise(20, 2), {"value", "step"}, 1),
        (lambda values: values + noise(60, 2, mean=112.0), {"value"}, 25),
        (lambda values: values + noise(100, 2, deviation=14.0), {"value", "step"}, 20),
        (lambda values: values + [values[-1]] * 40, {"flat"}, 12),
        (lambda values: values + [v + 0.03 * i for i, v in enumerate(noise(1000, 2))], {"value"}, 600),
    ],
    ids=["spike", "level", "variance", "flat", "ramp"],
)
def test_given_noise_when_it_changes_then_the_change_is_told_with_its_kind(change, kinds, within):
    found = readings(change(noise(3000)))
    told = [number for number, reading in enumerate(found) if reading.score >= 0.5 and number >= 3000]

    assert told[0] < 3000 + within
    assert found[told[0]].kind in kinds


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_given_latency_at_30_hz_when_it_rises_by_20_percent_then_that_is_told_within_3_s_and_little_else(
    seed,
):
    found = scores(drive(seed, 18_000, "levels"), interval_s=1 / 30, caution=FRAME_CAUTION)
    before = [number for number in range(9000) if found[number] >= 0.5]

    assert any(score >= 0.5 for score in found[9000:9090])
    assert len(before) <= 5


def test_given_a_new_level_when_it_stays_then_it_is_told_once_and_becomes_the_baseline():
    found = readings(noise(3000) + noise(1500, 2, mean=130.0))
    told = [number for number, reading in enumerate(found) if reading.score >= 0.5 and number >= 3000]

    assert told[0] == 3000
    assert max(told) <= 3020  # once more when the level follows
    assert found[3000].baseline == pytest.approx(100, abs=1)
    assert found[3200].baseline == pytest.approx(130, abs=2)
    assert found[3100].since_s == 3000.0
    assert found[-1].since_s is None


def test_given_an_anomaly_when_something_lesser_follows_within_150_samples_then_it_is_halved():
    values = noise(3000)
    values[2000] = 160.0
    values[2100], values[2400] = 125.0, 80.0
    found = readings(values)

    assert found[2100].kind == "value"
    assert found[2100].score < 0.5 < min(found[2000].score, found[2400].score)


def test_given_a_value_seen_when_it_comes_back_then_it_is_known_and_after_8192_samples_it_is_new_again():
    soon, late = (readings([*noise(3000), 130.0, *noise(pause, 2), 130.0])[-1] for pause in (4000, 9500))

    assert soon.kind in {"", "step"}
    assert soon.score < late.score
    assert late.kind == "value"


def test_given_one_direction_when_the_other_happens_then_it_is_not_told():
    down = noise(2000) + [40.0] * 5
    up = noise(2000) + [160.0] * 5

    assert max(scores(down, direction="up", caution=1.4)) < 0.5
    assert max(scores(up, direction="down", caution=1.4)) < 0.5
    assert scores(up, direction="up", caution=1.4)[2000] > 0.5
    assert scores(down, direction="down", caution=1.4)[2000] > 0.5


def test_given_a_floor_when_a_departure_is_smaller_then_it_stays_below_the_threshold_in_proportion():
    values = [5.0] * 500 + [5.4]

    assert scores(values)[-1] > 0.9
    assert scores(values, floor=0.5)[-1] == pytest.approx(0.4)
    assert scores(values, floor=0.3)[-1] > 0.9


def test_given_missing_values_when_they_come_then_they_are_gaps_below_the_threshold_and_nothing_is_learnt():
    detector = SeriesDetector()
    for number, value in enumerate(noise(200)):
        expected = detector.update(float(number), value)
    gaps = [
        detector.update(200.0 + number, value)
        for number, value in enumerate([math.nan, math.inf, -math.inf])
    ]
    after = detector.update(203.0, 100.0)

    assert {gap.kind for gap in gaps} == {"gap"}
    assert all(0 < gap.score < 0.5 for gap in gaps)
    assert after.baseline == pytest.approx(expected.baseline, abs=0.5)
    assert after.score < 0.5


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
    for number in range(12_000):
        detector.update(number * 60.0, draw.gauss(0, 1) / draw.gauss(0, 1))
        if number % 3000 == 2999:
            sizes.append(memory_bytes(detector, set()))

    assert max(sizes) < 400_000
    assert sizes[-1] <= 1.5 * sizes[0]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"direction": "left"}, "direction"),
        ({"floor": -1.0}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"caution": 0.5}, "caution"),
    ],
)
def test_given_a_bad_option_when_made_then_the_error_names_it(options, name):
    with pytest.raises(ValueError, match=name):
        SeriesDetector(**options)


def test_given_zeros_when_one_sample_is_not_then_the_zeros_after_it_are_no_flat_line():
    found = readings([0.0] * 1000 + [1.0] + [0.0] * 900)

    assert {reading.kind for reading in found[1020:]} == {""}
