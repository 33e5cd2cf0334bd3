import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rig.messages import S
from torchperf_ros.safety.tracks import Tracks, follow

PERIOD_NS = S // 20


class Source:
    """Detections of objects, array by array."""

    def __init__(self, sigma_m=0.0, period_ns=PERIOD_NS, seed=0):
        self.tracks, self.stamp_ns, self.period_ns = None, 1_700_000_000 * S, period_ns
        self.sigma_m, self.rng = sigma_m, np.random.default_rng(seed)

    def sees(self, places, keys=None, after_ns=None, late_s=0.0, halves=(1.0, 1.0)):
        self.stamp_ns += self.period_ns if after_ns is None else after_ns
        places = np.array(places, np.complex128).reshape(-1)
        count = len(places)
        places += self.sigma_m * (self.rng.normal(size=count) + 1j * self.rng.normal(size=count))
        keys = [(b"car", number) for number in range(count)] if keys is None else keys
        late_s = np.broadcast_to(np.asarray(late_s, float), (count,)).copy()
        halves = np.broadcast_to(np.asarray(halves, float), (count, 2)).copy()
        found = follow(self.tracks, self.stamp_ns, 0j, places, np.zeros(count), halves, keys, late_s)
        self.tracks = found.tracks
        return found

    def drive(self, place, velocity, arrays):
        """A single object at constant velocity."""
        for number in range(arrays):
            found = self.sees([place + velocity * number * self.period_ns / S])
        return found


@pytest.mark.parametrize("velocity", [0.0, 15.0, -30.0 + 2.0j, 1.4j])
@pytest.mark.parametrize("period_ns", [S // 30, S // 20, S // 10])
def test_given_an_object_without_noise_when_followed_then_its_velocity_is_known_from_the_third_array_on(
    velocity, period_ns
):
    source = Source(period_ns=period_ns)
    for arrays in range(2):
        found = source.drive(100.0 + velocity * arrays * period_ns / S, velocity, 1)
        assert (found.velocities[0], found.unsure[0], found.unknown) == (0.0, 15.0, 1)
    found = source.drive(100.0 + velocity * 2 * period_ns / S, velocity, 1)
    assert (found.unknown, found.velocities[0]) == (
        0,
        pytest.approx(velocity, abs=0.05 * abs(velocity) + 1e-6),
    )
    found = source.drive(100.0 + velocity * 3 * period_ns / S, velocity, 20)
    assert found.velocities[0] == pytest.approx(velocity, abs=0.02)
    assert len(found.coasting.keys) == 0


@pytest.mark.parametrize("sigma_m", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize("hz", [10, 20, 30])
def test_given_noise_when_followed_then_it_is_learned_and_velocities_are_as_good_as_they_say(sigma_m, hz):
    source, off, unsure = Source(sigma_m, S // hz), [], []
    velocities = np.array([20.0, 10.0 + 1j, 0.0, -15.0, 1.4j, 5.0, 8.0, 25.0])
    places = 30.0 * np.arange(8) * 1j
    for number in range(6 * hz):
        found = source.sees(places + velocities * number / hz)
        if number > 2 * hz:
            off.append(found.velocities - velocities)
            unsure.append(found.unsure)
    rms = math.sqrt(np.mean(np.abs(off) ** 2) / 2)
    assert math.sqrt(source.tracks.noise) == pytest.approx(max(sigma_m, 0.02), rel=0.25)
    assert rms < 0.1 + 1.5 * sigma_m
    assert rms < 1.2 * math.sqrt(np.mean(np.square(unsure)))
    assert np.median(unsure) < 0.1 + 2.5 * sigma_m
    assert found.unknown == 0


@pytest.mark.parametrize("sigma_m", [0.05, 0.2])
def test_given_a_noise_that_was_not_guessed_when_eight_are_followed_for_a_second_then_it_is_known(sigma_m):
    found, velocities = [], np.array([20.0, 10.0 + 1j, 0.0, -15.0, 1.4j, 5.0, 8.0, 25.0])
    for seed in range(5):
        source = Source(sigma_m, S // 10, seed)
        for number in range(11):
            source.sees(30.0 * np.arange(8) * 1j + velocities * number / 10)
        found.append(math.sqrt(source.tracks.noise))
    assert np.mean(found) == pytest.approx(sigma_m, rel=0.25)


@pytest.mark.parametrize(("change", "within_s"), [(-8.0, 0.3), (-3.0, 0.5), (2.0j, 0.5)])
def test_given_an_object_that_changes_its_velocity_when_followed_then_it_is_noticed(change, within_s):
    source, hz = Source(0.1), 20
    source.drive(50.0, 20.0, 60)
    place, noticed_s = 50.0 + 20.0 * 60 / hz, None
    for number in range(40):
        t = number / hz
        found = source.sees([place + 20.0 * t + 0.5 * change * t * t])
        moved = (found.velocities[0] - 20.0) * np.conj(change) / abs(change)
        if noticed_s is None and moved.real > 2 * found.unsure[0]:
            noticed_s = t
    assert noticed_s <= within_s + 0.5
    assert found.velocities[0] == pytest.approx(20.0 + change * 39 / hz, abs=2.0)


@settings(max_examples=10, deadline=None)
@given(
    speed=st.floats(10.0, 20.0),
    lateral=st.floats(1.5, 2.5),
    left=st.sampled_from((-1, 1)),
    seed=st.integers(0, 1000),
)
def test_given_any_object_in_a_bend_when_followed_then_its_direction_does_not_lag_behind(
    speed, lateral, left, seed
):
    source, rate, across = Source(0.1, S // 10, seed), left * lateral / speed, []
    for number in range(80):
        way = speed * np.exp(1j * rate * number / 10)
        found = source.sees([way / (1j * rate) + 20.0 * lane * way / speed * 1j for lane in range(3)])
        if number >= 20:
            velocities = way * (1.0 - 20.0 * np.arange(3) / speed * rate)
            across.append(((found.velocities - velocities) / way * speed).imag)
    assert abs(np.mean(across)) < 0.25


@pytest.mark.parametrize(("speed", "unknown"), [(69.0, 0), (72.0, 1)])
def test_given_something_faster_than_any_road_user_when_followed_then_its_velocity_is_not_known(
    speed, unknown
):
    found = Source().drive(0.0, speed, 20)
    assert (found.unknown, abs(found.velocities[0])) == (
        unknown,
        pytest.approx(0.0 if unknown else speed, abs=0.1),
    )


def test_given_objects_in_any_order_when_followed_then_each_keeps_its_own_velocity():
    source, rng = Source(0.05), np.random.default_rng(1)
    places, velocities = np.array([0, 4j, 8j, 30, 34 + 3j]), np.array([10.0, -10.0, 3.0, 0.0, 12.0])
    for number in range(30):
        order = rng.permutation(5)
        found = source.sees((places + velocities * number / 20)[order])
    assert found.unknown == 0
    assert found.velocities == pytest.approx(velocities[order], abs=0.5)


def test_given_two_that_pass_each_other_closely_when_followed_then_each_keeps_its_velocity():
    source = Source(0.05)
    for number in range(80):
        t = number / 20 - 2.0
        found = source.sees([15.0 * t, -15.0 * t + 3.0j])
    assert found.velocities == pytest.approx([15.0, -15.0], abs=0.5)


def test_given_an_id_that_stays_when_two_places_fit_then_it_decides():
    for first in (0, 1):
        source = Source()
        for _ in range(10):
            source.sees([0.0, 2.9], keys=[(b"a", 0), (b"a", 1)])
        found = source.sees([1.43, 1.47], keys=[(b"a", first), (b"a", 1 - first)])
        assert found.unknown == 0
        place = dict(zip(source.tracks.keys, source.tracks.mean()[0], strict=True))
        assert place[b"a", 0].real < place[b"a", 1].real  # it is the one that was at 0 m


def test_given_an_object_that_is_not_detected_when_it_was_sure_then_it_coasts_for_a_bounded_time():
    source = Source()
    source.drive(0.0, 10.0, 10)
    last = 10.0 * 9 / 20
    for number in range(1, 10):
        found = source.sees([])
        if number <= 6:
            place, velocity, unsure = found.coasting.mean()
            assert place == pytest.approx([last + 10.0 * number / 20], abs=0.1)
            assert velocity == pytest.approx([10.0], abs=0.1)
            assert unsure[0] > 0.0
        else:
            assert len(found.coasting.keys) == len(source.tracks.keys) == 0
    source = Source()
    source.drive(0.0, 10.0, 2)
    assert len(source.sees([]).coasting.keys) == 0  # two detections may have been none


@pytest.mark.parametrize("pattern", ["110", "11010", "10", "100", "1000001"])
def test_given_an_object_that_flickers_from_the_first_when_detected_three_times_then_its_velocity_is_known(
    pattern,
):
    source, times = Source(), 0
    for number in range(15):
        is_seen = pattern[number % len(pattern)] == "1"
        before = times
        times += is_seen
        found = source.sees([5.0 + 2.0j * number / 20] if is_seen else [])
        assert len(found.coasting.keys) == (
            before >= 3 and not is_seen
        )  # what was seen twice counts when it is seen
        if is_seen:
            assert found.unknown == (times < 3)
            assert found.velocities[0] == pytest.approx(2.0j if times >= 3 else 0.0, abs=0.2)
    assert times >= 3


def test_given_an_object_seen_once_when_it_is_not_detected_again_then_it_is_forgotten_in_bounded_time():
    source = Source()
    source.drive(0.0, 10.0, 1)
    for _ in range(7):
        source.sees([])
    assert len(source.tracks.keys) == 0
    assert source.sees([0.0]).unknown == 1


def test_given_an_object_that_is_back_in_time_when_followed_then_its_velocity_is_known():
    source = Source(0.02)
    source.drive(0.0, 10.0, 20)
    for _ in range(4):
        source.sees([])
    found = source.sees([10.0 * 24 / 20])
    assert (found.unknown, found.velocities[0]) == (0, pytest.approx(10.0, abs=0.5))


def test_given_something_new_beside_a_known_object_when_detected_then_it_counts_where_it_is_and_stands():
    source = Source()
    source.drive(0.0, 10.0, 20)
    found = source.sees([10.0, 12.0 + 1j])
    assert found.places[1] == 12.0 + 1j
    assert (found.velocities[1], found.unsure[1], found.unknown) == (0.0, 15.0, 1)
    assert found.velocities[0] == pytest.approx(10.0, abs=0.1)


@pytest.mark.parametrize("part_has_id", [True, False])
@pytest.mark.parametrize("offset", [0.3 - 0.2j, -0.7, 0.6 + 0.6j])
def test_given_a_second_box_of_a_moving_object_when_it_takes_its_track_then_the_whole_counts_with_the_velocity_as_well(
    part_has_id, offset
):
    source, keys = Source(), [(b"car", 0), (b"car", 1)]
    source.drive(0.0, 10.0j, 10)
    for number in range(10, 14):
        place = 10.0j * number / 20
        seen = [place + offset, place] if part_has_id else [place, place + offset]
        found = source.sees(seen, keys=keys)
        also, velocity, _ = found.coasting.mean()
        for at in range(2):
            own = found.velocities[at] if found.unsure[at] < 15.0 else None
            if own is None:  # it stands where it was seen, and moves on as the other does
                assert found.places[at] == seen[at]
                (same,) = (np.abs(also - seen[at]) < 1e-6).nonzero()
                own = velocity[same].item()
            assert own == pytest.approx(10.0j, abs=2.0)
        assert len(also) == found.unknown == (number < 12)
    assert len(source.tracks.keys) == 2


CAR = (2.25, 0.95)


@settings(max_examples=20, deadline=None)
@given(speed=st.floats(-20.0, 20.0), share=st.floats(0.3, 0.7), seed=st.integers(0, 1000))
def test_given_a_known_car_when_its_box_is_two_parts_then_both_move_as_it_does_and_it_stays_one(
    speed, share, seed
):
    source = Source(0.05, seed=seed)
    for number in range(20):
        source.sees([speed * number / 20], halves=CAR)
    whole = speed * 1.0
    parts = [whole - 2.25 * (1.0 - share), whole + 2.25 * share]
    found = source.sees(parts, halves=[(2.25 * share, 0.95), (2.25 * (1.0 - share), 0.95)])
    assert found.velocities == pytest.approx([speed, speed], abs=0.6)
    assert found.places == pytest.approx(parts, abs=0.3)
    assert (found.unknown, len(found.coasting.keys), len(source.tracks.keys)) == (0, 0, 1)
    found = source.sees([speed * 21 / 20], halves=CAR)
    assert (found.unknown, found.velocities[0]) == (0, pytest.approx(speed, abs=0.6))


@settings(max_examples=20, deadline=None)
@given(x=st.floats(-4.0, 4.0), y=st.floats(-3.0, 3.0))
def test_given_a_known_car_when_something_small_is_new_beside_its_whole_box_then_it_counts_as_standing(
    x, y
):
    source = Source()
    source_places = [10.0 * number / 20 for number in range(20)]
    for place in source_places:
        source.sees([place], halves=CAR)
    found = source.sees([10.0, complex(10.0 + x, y)], halves=[CAR, (0.3, 0.3)])
    assert found.velocities[0] == pytest.approx(10.0, abs=0.3)
    assert (found.velocities[1], found.unknown, found.times[1]) == (0.0, 1, 1)


@settings(max_examples=20, deadline=None)
@given(aside=st.floats(2.2, 4.0), ahead=st.floats(-6.0, 6.0))
def test_given_two_known_cars_when_they_are_one_box_then_both_go_on_for_a_bounded_time(aside, ahead):
    source = Source()
    for number in range(30):
        t = number / 20
        source.sees([10.0 * t, ahead + 10.0 * t + aside * 1j], halves=CAR)
    for number in range(30, 40):
        t = number / 20
        both = np.array([10.0 * t, ahead + 10.0 * t + aside * 1j])
        size = (2.25 + 0.5 * abs((both[1] - both[0]).real), 0.95 + 0.5 * aside)
        found = source.sees([both.mean()], halves=size)
        if number < 36:
            assert (found.times[0], found.unknown) == (0, 0)
            expected = sorted(found.coasting.mean()[0], key=lambda place: place.imag)
            assert expected == pytest.approx(both, abs=0.2)
        else:
            assert found.times[0] > 0


@settings(max_examples=20, deadline=None)
@given(more=st.floats(0.6, 3.0), side=st.sampled_from([0, 1]))
def test_given_two_known_cars_when_a_box_is_larger_than_both_then_it_counts(more, side):
    source = Source()
    for _ in range(10):
        source.sees([0.0, 3.5j], halves=CAR)
    size = np.array([2.25, 0.95 + 1.75])
    size[side] += more
    assert source.sees([1.75j], halves=size).times[0] > 0


@settings(max_examples=20, deadline=None)
@given(aside=st.floats(1.9, 2.1), missed=st.sampled_from([0, 1]))
def test_given_two_known_cars_when_one_is_missed_and_the_other_split_then_both_stay_where_they_are(
    aside, missed
):
    source, cars = Source(), np.array([0.0, aside * 1j])
    for number in range(20):
        source.sees(0.5 * number + cars, halves=CAR)
    split = 10.0 + cars[1 - missed]
    found = source.sees([split - 1.125, split + 1.125], halves=(1.125, 0.95))
    assert found.velocities == pytest.approx([10.0, 10.0], abs=0.3)
    assert found.places == pytest.approx([split - 1.125, split + 1.125], abs=0.1)
    assert found.coasting.mean()[0] == pytest.approx([10.0 + cars[missed]], abs=0.1)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_given_a_van_in_three_parts_when_two_of_them_would_make_a_missed_car_then_they_are_the_vans(order):
    source, places, sizes = Source(), np.array([0.0, 0.9 + 1.6j])[order], np.array([(2.5, 1.0), CAR])[order]
    for _ in range(20):
        source.sees(places, halves=sizes)
    found = source.sees(5.0 / 3.0 * np.array([-1, 0, 1]), halves=(2.5 / 3.0, 1.0))
    assert (found.unknown, len(source.tracks.keys)) == (0, 2)
    assert found.coasting.mean()[0] == pytest.approx([0.9 + 1.6j], abs=0.1)


@settings(max_examples=20, deadline=None)
@given(mirrored=st.booleans(), half=st.floats(0.2, 0.4))
def test_given_a_known_car_when_two_pedestrians_are_at_its_corners_then_they_are_no_parts_of_it(
    mirrored, half
):
    source = Source()
    for number in range(20):
        source.sees([0.5 * number], halves=CAR)
    corner = complex(2.25 - half, (0.95 - half) * (-1) ** mirrored)
    found = source.sees([10.0 - corner, 10.0 + corner], halves=(half, half))
    assert (found.unknown, list(found.velocities)) == (2, [0.0, 0.0])


def test_given_somebody_who_stands_when_a_van_beside_them_is_split_then_they_stand():
    source = Source()
    for number in range(20):
        source.sees([0.5 * number - 10.0, 1.2j], halves=[(2.5, 1.0), (0.3, 0.3)])
    found = source.sees([-1.25, 1.25, 1.2j], halves=[(1.25, 1.0), (1.25, 1.0), (0.3, 0.3)])
    assert found.velocities == pytest.approx([10.0, 10.0, 0.0], abs=0.3)


def test_given_two_known_pedestrians_in_one_box_when_a_third_is_new_beside_them_then_it_is_neither():
    source = Source()
    for _ in range(20):
        source.sees([0.0, 2.0j], halves=(0.3, 0.3))
    found = source.sees([1.0j, -1.0j], halves=[(0.3, 1.3), (0.3, 0.3)])
    assert list(found.times) == [0, 1]
    assert found.coasting.mean()[0] == pytest.approx([0.0, 2.0j], abs=0.1)


def test_given_two_known_pedestrians_when_a_car_is_between_them_and_hides_both_then_it_counts():
    source = Source()
    for _ in range(10):
        source.sees([-1.95 - 0.65j, 1.95 + 0.65j], halves=(0.3, 0.3))
    assert source.sees([0.0], halves=CAR).times[0] > 0


@pytest.mark.parametrize("is_one_first", [True, False])
@pytest.mark.parametrize("apart", [3.0j, 6.0, 4.0 + 3.0j])
def test_given_two_that_were_one_box_or_become_one_when_seen_again_then_all_of_it_counts(
    apart, is_one_first
):
    source = Source()
    one = ([0.5 * apart], (2.25 + 0.5 * apart.real, 0.95 + 0.5 * apart.imag))
    two = ([0.0, apart], CAR)
    source.sees([])
    for places, halves in (one, two) if is_one_first else (two, one):
        found = source.sees(places, halves=halves)
    assert min(found.times) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_given_boxes_split_and_merged_at_random_when_followed_then_each_without_a_velocity_is_counted_once(
    seed,
):
    """Cars in two lanes, in boxes that belong together in any way."""
    source, rng = Source(0.05, seed=seed), np.random.default_rng(seed)
    for number in range(40):
        cars = 0.5 * number + np.array([0.0, 8.0, 16.0, 3.0j, 8.0 + 3.0j])
        seen = [(car, CAR) for car in cars if rng.random() < 0.9]
        if rng.random() < 0.3:
            seen = [
                part for car, _ in seen for part in ((car - 1.1, (1.15, 0.95)), (car + 1.1, (1.15, 0.95)))
            ]
        if rng.random() < 0.3:
            seen.append((cars[1] + 1.5j, (2.25, 2.45)))
        order = rng.permutation(len(seen))
        found = source.sees([seen[at][0] for at in order], halves=[seen[at][1] for at in order])
        assert found.unknown == np.count_nonzero((found.unsure == 15.0) & (found.times > 0))
        assert len(found.places) == len(found.times) == len(seen)


def test_given_a_box_of_two_that_lasts_when_they_part_then_neither_is_a_part_of_the_other():
    """A car passes somebody who stands, and for an array both are one box."""
    source = Source()
    for number in range(20):
        source.sees([5.0 * number / 20 - 5.0, 2.0j], halves=[CAR, (0.3, 0.3)])
    source.sees([0.675j], halves=(2.25, 1.625))
    for number in range(21, 24):
        found = source.sees([5.0 * number / 20 - 5.0, 2.0j], halves=[CAR, (0.3, 0.3)])
        assert found.velocities == pytest.approx([5.0, 0.0], abs=0.5)


def test_given_something_new_within_an_object_that_stands_when_detected_then_it_counts_once():
    source = Source(0.05)
    for _ in range(10):
        source.sees([0.0])
    assert len(source.sees([0.0, 0.5]).coasting.keys) == 0


def test_given_an_array_that_is_not_newer_when_followed_then_it_teaches_nothing():
    source = Source()
    source.drive(0.0, 10.0, 20)
    before = source.tracks
    for after_ns, place in ((0, 9.5), (-PERIOD_NS, 9.0), (-PERIOD_NS, 8.5)):
        found = source.sees([place], after_ns=after_ns)
        assert found.tracks is before
        assert found.velocities[0] == pytest.approx(10.0, abs=0.1)
    source.tracks = before
    assert source.sees([9.5], after_ns=-2 * S).unknown == 1  # the log begins anew
    assert source.sees([9.5], after_ns=2 * S).unknown == 1
    assert source.tracks.noise == before.noise


def test_given_detections_of_several_moments_when_followed_then_each_counts_at_its_own():
    source, late_s = Source(), [0.0, 0.04]
    for number in range(30):
        found = source.sees([10.0 * number / 20, 20j + 10.0 * (number / 20 - 0.04)], late_s=late_s)
    assert found.velocities == pytest.approx([10.0, 10.0], abs=0.05)
    assert found.places == pytest.approx([14.5, 20j + 14.1], abs=0.05)


def test_given_thousands_of_objects_when_followed_then_the_nearest_have_tracks():
    source = Source()
    places = np.arange(1.0, 1001.0) * 5
    for _ in range(4):
        found = source.sees(places)
    assert len(source.tracks.keys) == 256
    assert found.unknown == 1000 - 256
    assert np.abs(source.tracks.mean()[0]).max() == pytest.approx(256 * 5, abs=1.0)


def test_given_more_objects_than_have_tracks_when_one_moves_then_it_keeps_its_own_and_what_has_none_is_counted():
    source, parked = (
        Source(),
        [complex(3 * (number % 20) - 30, 5 + 0.5 * (number // 20)) for number in range(300)],
    )
    for number in range(5):
        assert source.sees([60.0 - 10.0j * number / 20]).left_out == 0
    for number in range(5, 12):
        found = source.sees([60.0 - 10.0j * number / 20, *parked])
        assert found.velocities[0] == pytest.approx(-10.0j, abs=0.1)
        assert found.left_out == 301 - 256
    again = source.sees([54.5j, *parked], after_ns=0)
    assert again.left_out >= 301 - 256  # it teaches nothing, and says as much
    assert source.sees(parked[:200]).left_out > 0  # what coasts is one of them
    for _ in range(7):
        found = source.sees(parked[:200])
    assert found.left_out == 0


def test_given_more_objects_than_have_tracks_when_the_rest_is_far_then_none_is_left_out():
    source = Source()
    places = [*(5.0 + 1j * np.arange(200)), *(600.0 + 1j * np.arange(200))]
    for _ in range(4):
        found = source.sees(places)
        assert (found.left_out, len(source.tracks.keys)) == (0, 256)
    assert set(np.abs(found.unsure[:200] - 15.0) > 1.0) == {True}


def test_given_what_was_seen_once_when_there_are_many_then_it_gives_way_to_what_is_seen():
    source, many = Source(), 10.0j * np.arange(256)
    source.sees(many - 200.0)
    for _ in range(3):
        found = source.sees(0.15 * many + 300.0)
        assert found.left_out == 0
    assert found.unknown == 0


@settings(max_examples=60)
@given(
    arrays=st.lists(
        st.tuples(
            st.integers(-3 * S, 3 * S) | st.just(PERIOD_NS),
            st.lists(st.tuples(st.floats(-1e8, 1e8) | st.floats(-20, 20), st.floats(-20, 20)), max_size=8),
        ),
        max_size=10,
    )
)
def test_given_any_detections_when_followed_then_each_counts_nearly_where_it_was_seen(arrays):
    source, other = Source(), Source()
    for after_ns, seen in arrays:
        places = [complex(x, y) for x, y in seen]
        found, again = source.sees(places, after_ns=after_ns), other.sees(places, after_ns=after_ns)
        assert len(found.places) == len(found.velocities) == len(places)
        assert all(np.isfinite(column).all() for column in (found.places, found.velocities, found.unsure))
        assert (np.abs(found.places - np.array(places, np.complex128).reshape(-1)) <= 1.0 + 1e-6).all()
        assert all(np.isfinite(column).all() for column in found.tracks[6:])
        assert len(found.tracks.keys) <= 256
        for one, two in zip(found.tracks, again.tracks, strict=True):
            assert np.array_equal(one, two)


def test_given_none_when_asked_then_there_is_no_object():
    assert [len(column) for column in Tracks.none(5).mean()] == [0, 0, 0]
