import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from torchperf_ros.safety.stop_output import brake_along


def straight(speed, seconds, count=31):
    times_s = np.linspace(0.0, seconds, count)
    return np.stack([speed * times_s, 0 * times_s, 0 * times_s], axis=1), times_s


def travelled(points):
    return np.linalg.norm(np.diff(points, axis=0), axis=1).sum()


@pytest.mark.parametrize(
    ("speed", "deceleration", "seconds", "start_s"),
    [
        (5.0, 3.0, 10.0, 1.0),
        (15.0, 3.0, 10.0, 1.0),
        (30.0, 8.0, 10.0, 1.0),
        (0.5, 0.1, 10.0, 1.0),
        (20.0, 4.0, 1.0, 0.5),
        (10.0, 5.0, 3.0, 3.0),  # it goes on straight: the path is shorter, or begins at its end
        (0.0, 5.0, 3.0, 1.0),  # stands
    ],
)
def test_given_a_steady_speed_when_braking_then_its_way_is_v_squared_over_2a(
    speed, deceleration, seconds, start_s
):
    points, times_s = straight(speed, seconds)
    where, when_s, _ = brake_along(points, times_s, start_s, deceleration, len(points))
    assert where[0] == pytest.approx([speed * start_s, 0.0, 0.0])
    assert where[-1] == pytest.approx([speed * start_s + speed**2 / (2 * deceleration), 0.0, 0.0])
    assert when_s[0] == start_s
    assert when_s[-1] - start_s == pytest.approx(max(speed / deceleration, seconds))
    assert np.all(np.diff(when_s) > 0)


def test_given_a_bend_when_braking_then_every_point_lies_on_it():
    times_s = np.linspace(0.0, 4.0, 41)
    points = np.stack([20 * np.sin(times_s / 4), 20 - 20 * np.cos(times_s / 4), 0.1 * times_s], axis=1)
    where, *_ = brake_along(points, times_s, 0.3, 5.0, len(points))
    assert max(distance_to_polyline(point, points) for point in where) < 1e-6


def distance_to_polyline(point, points):
    best = np.inf
    for a, b in zip(points[:-1], points[1:], strict=True):
        along = np.clip(np.dot(point - a, b - a) / max(np.dot(b - a, b - a), 1e-12), 0, 1)
        best = min(best, float(np.linalg.norm(point - a - along * (b - a))))
    return best


@pytest.mark.parametrize("start_s", [-0.001, 3.001, 60.0])
def test_given_a_start_outside_of_the_path_when_braking_then_it_is_refused(start_s):
    points, times_s = straight(10.0, 3.0)
    with pytest.raises(ValueError, match="the path lasts from 0.0 to 3.0 s"):
        brake_along(points, times_s, start_s, 5.0, len(points))


@pytest.mark.parametrize("count", [2, 7, 31, 100])
def test_given_any_number_of_points_when_braking_then_each_follows_the_uniform_deceleration(count):
    points, times_s = straight(10.0, 6.0)
    where, when_s, passed = brake_along(points, times_s, 0.0, 2.0, count)
    braking_s = np.minimum(when_s, 5.0)
    assert where[:, 0] == pytest.approx(10.0 * braking_s - braking_s**2)
    assert np.all(points[passed, 0] <= where[:, 0] + 1e-9)
    assert np.all(where[:, 0] <= points[passed + 1, 0] + 1e-9)


@pytest.mark.parametrize(("count", "deceleration"), [(0, 3.0), (1, 3.0), (5, 0.0), (5, -1.0)])
def test_given_nothing_to_brake_with_when_braking_then_it_is_refused(count, deceleration):
    with pytest.raises(ValueError, match="cannot brake"):
        brake_along(np.zeros((count, 3)), np.arange(float(count)), 0.0, deceleration, 5)


@settings(deadline=None)
@given(data=st.data(), count=st.integers(2, 30), share=st.floats(0, 1), deceleration=st.floats(0.1, 20))
def test_given_any_path_when_braking_then_times_rise_speed_falls_and_the_way_is_never_longer_than_physics(
    data, count, share, deceleration
):
    steps = data.draw(arrays(float, (count - 1, 3), elements=st.floats(-3, 3)))
    gaps_s = data.draw(arrays(float, count - 1, elements=st.floats(0.05, 0.5)))
    points = np.vstack([np.zeros(3), np.cumsum(steps, axis=0)])
    times_s = np.concatenate([[0.0], np.cumsum(gaps_s)])
    start = share * times_s[-1]
    where, when_s, _ = brake_along(points, times_s, start, deceleration, len(points))
    assert where.shape == points.shape
    assert np.all(np.isfinite(where))
    assert np.all(np.diff(when_s) > 0)
    assert when_s[0] == start
    top_speed = float((np.linalg.norm(steps, axis=1) / gaps_s).max())
    assert travelled(where) <= top_speed**2 / (2 * deceleration) + 1e-6
    chords = np.linalg.norm(np.diff(where, axis=0), axis=1) / np.diff(when_s)
    assert np.all(chords <= top_speed + 1e-6)


@settings(deadline=None)
@given(
    speeds=arrays(float, 20, elements=st.floats(0, 30)),
    start=st.floats(0, 1.8),
    deceleration=st.floats(0.5, 10),
)
def test_given_any_speeds_along_a_line_then_it_never_goes_backwards_and_only_slows(
    speeds, start, deceleration
):
    times_s = np.arange(20) * 0.1
    x = np.concatenate([[0.0], np.cumsum(speeds[:-1] * 0.1)])
    where, when_s, _ = brake_along(np.stack([x, 0 * x, 0 * x], axis=1), times_s, start, deceleration, 20)
    found = np.diff(where[:, 0]) / np.diff(when_s)
    assert np.all(found >= -1e-9)
    assert np.all(np.diff(found) <= 1e-6)
    assert where[0, 0] == pytest.approx(np.interp(start, times_s, x))


@given(st.floats(0.1, 1e8), st.floats(1e-9, 1.0), st.floats(0.5, 10.0))
def test_given_a_path_of_any_speed_when_braking_then_it_takes_no_longer_than_a_vehicle_can_take(
    leap_m, step_s, deceleration
):
    points, times_s = np.array([[0.0, 0, 0], [leap_m, 0, 0], [leap_m, 0, 0]]), step_s * np.arange(3)
    where, when_s, _ = brake_along(points, times_s, 0.0, deceleration, 31)
    assert when_s[-1] <= 1.001 * max(100.0 / deceleration, times_s[-1])
    assert where[-1, 0] <= 1.001 * max(leap_m, 0.5 * 100.0**2 / deceleration)
    assert np.isfinite(where).all()
