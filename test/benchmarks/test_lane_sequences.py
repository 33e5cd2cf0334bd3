"""The drawn sequences of the emergency lane, and what judges them."""

import numpy as np
import pytest

from benchmarks.traffic.lane_sequences import EVENTS, Held, Judge, draw_events, run_sequence
from torchperf_ros.safety.stop_output import TimedPath
from torchperf_ros.world.vehicles import Vehicle


def stop(x, speed, at_s=0.0, braking=6.0):
    """A path that begins at x, and brakes."""
    times = np.linspace(0.0, speed / braking, 20)
    points = np.zeros((20, 3))
    points[:, 0] = x + speed * times - braking * times**2 / 2
    return TimedPath.made(((at_s + times) * 1e9).astype(np.int64), points, np.zeros(20), b"odom").bytes()


def judged():
    held = Held(0)
    judge = Judge(held)
    judge.begin()
    return held, judge


def test_given_a_path_that_asks_for_more_than_the_vehicle_had_then_that_is_seen():
    held, judge = judged()
    judge.published(stop(0.0, 10.0), Vehicle(speed=10.0), 0.0, 0)
    assert held.holds
    judge.published(stop(8.0, 2.0, 1.5), Vehicle(x=8.0, speed=0.0), 0.0, 0)
    assert held.holds
    judge.published(stop(8.3, 2.0, 3.0), Vehicle(x=8.3, speed=0.0), 0.0, 0)
    assert not held.holds
    assert held.faster_by_ms == pytest.approx(2.0, abs=0.1)
    assert held.paths == 3


def test_given_a_path_that_is_stamped_anew_then_only_what_is_still_to_come_of_it_counts():
    held, judge = judged()
    judge.published(stop(0.0, 12.0), Vehicle(speed=12.0), 12.0, 0)
    judge.published(stop(0.0, 12.0, 0.001), Vehicle(x=9.0, speed=6.0), 6.0, 10**9)
    judge.published(stop(0.0, 12.0, 0.002), Vehicle(x=9.0, speed=6.0), 6.0, 10**9)
    assert held.paths == 3
    assert held.holds


def test_given_a_path_that_ends_while_it_moves_then_that_is_seen():
    held, judge = judged()
    times = np.array([0.0, 1.0])
    points = np.array([[0.0, 0, 0], [8.0, 0, 0]])
    judge.published(
        TimedPath.made((times * 1e9).astype(np.int64), points, np.zeros(2), b"odom").bytes(),
        Vehicle(speed=8.0),
        8.0,
        0,
    )
    assert held.moving_ends == 1


def test_given_a_vehicle_that_moves_after_it_stood_then_speed_and_distance_are_seen_until_the_lane_is_cleared():
    held, judge = judged()
    judge.published(stop(0.0, 6.0), Vehicle(speed=6.0), 6.0, 0)
    for _ in range(30):
        judge.look(Vehicle(x=3.0))
    judge.look(Vehicle(x=5.0, speed=1.5))
    could_stand_m = 6.0 * 0.15 + 6.0**2 / (
        2 * 6.0
    )  # the path ends after 3 m: too soon for brakes with a delay
    assert held.fastest_ms == 1.5
    assert held.past_m == pytest.approx(5.0 - could_stand_m)
    judge.is_held = False
    judge.look(Vehicle(x=50.0, speed=20.0))
    assert (held.fastest_ms, held.past_m) == (1.5, pytest.approx(5.0 - could_stand_m))


def test_given_seeds_when_drawn_then_each_event_comes_and_a_sequence_is_the_same_twice():
    assert draw_events(3) == draw_events(3) != draw_events(4)
    assert {event.kind for seed in range(60) for event in draw_events(seed)} == set(EVENTS)
    assert run_sequence(3) == run_sequence(3)


def test_given_nothing_but_a_button_when_driven_then_the_vehicle_stands_at_the_end_of_its_stop_path_and_stays():
    seed = next(
        seed for seed in range(1000) if {event.kind for event in draw_events(seed)} == {"button", "clear"}
    )
    held = run_sequence(seed)
    assert held.latched
    assert held.holds
    assert held.past_m < 0.5
