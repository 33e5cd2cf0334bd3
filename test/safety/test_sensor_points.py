"""What the emergency lane reads out of sensors' bytes: places, what is of no use, and what is refused."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import BadInput
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.safety.sensor_points import SensorPoints, read_bool
from torchperf_ros.settings.config import node_config

from .sensor_messages import bool_bytes, cloud_bytes, odometry_bytes, range_bytes, scan_bytes

HERE = (0.0, 0.0, 0.0, 0.0)
BODY_HEIGHTS = (0.2, 2.5)


def reader(kind, place=HERE):
    return SensorPoints(kind, place, BODY_HEIGHTS)


def places(points):
    return np.stack([points.x, points.y], axis=1).tolist()


def test_given_a_scan_when_read_then_its_returns_lie_around_the_vehicle_as_the_sensor_is_mounted():
    found = reader("LaserScan").read(scan_bytes([1.0, 2.0, 3.0]))
    assert np.ravel(places(found)) == pytest.approx([0, -1, 2, 0, 0, 3], abs=1e-6)
    assert (found.usable, found.measured, found.most) == (3, 3, 3)
    turned = reader("LaserScan", (3.0, 1.0, 0.5, math.pi / 2)).read(scan_bytes([1.0, 2.0, 3.0]))
    assert np.ravel(places(turned)) == pytest.approx([4, 1, 3, 3, 0, 1], abs=1e-6)


@pytest.mark.parametrize(
    ("value", "usable", "returns"),
    [
        (0.0, 0, 0),
        (-1.0, 0, 0),
        (0.05, 0, 0),
        (math.nan, 0, 0),  # errors, by REP 117
        (math.inf, 1, 0),
        (31.0, 1, 0),  # no return
        (0.1, 1, 1),
        (30.0, 1, 1),
        (-math.inf, 1, 1),  # the last: too near to be measured
    ],
)
def test_given_a_range_that_is_none_when_read_then_it_counts_as_what_rep_117_says(value, usable, returns):
    for least in (0.1, 0.0):
        if 0 < value < 0.1 and not least:
            continue
        found = reader("LaserScan").read(scan_bytes([value] * 5, least=least))
        assert (found.usable, len(found.x), found.measured) == (5 * usable, 5 * returns, 5)
    if value == -math.inf:
        assert np.hypot(found.x, found.y) == pytest.approx(0.0)


@given(lengths=st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_given_scans_of_another_length_each_time_when_read_then_each_has_its_own_directions(lengths):
    sensor = reader("LaserScan")
    for length in lengths:
        found = sensor.read(scan_bytes(np.full(length, 2.0)))
        assert (len(found.x), found.measured) == (length, length)
        assert np.hypot(found.x, found.y) == pytest.approx(2.0)
        if length > 1:
            assert (found.y[0], found.y[-1]) == pytest.approx((-2.0, 2.0))


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("LaserScan", scan_bytes([1.0, 1.0], step=math.nan), "angle_increment nan have to be finite"),
        ("LaserScan", scan_bytes([1.0, 1.0], first=math.inf), "angle_min inf"),
        (
            "LaserScan",
            scan_bytes([1.0, 1.0], most=0.0),
            r"range_min 0\.1\S* has to be below range_max 0\.0",
        ),
        ("LaserScan", scan_bytes([1.0, 1.0], least=math.nan), "range_min nan"),
        ("LaserScan", scan_bytes([1.0, 1.0], least=-1.0), "not negative"),
        ("Range", range_bytes(1.0, least=5.0), "makes no sense"),
        ("Range", range_bytes(1.0, view=math.nan), "makes no sense"),
        ("Range", range_bytes(1.0, view=7.0), "makes no sense"),
        ("Range", range_bytes(1.0, most=math.nan), "makes no sense"),
    ],
    ids=range(9),
)
def test_given_a_sensor_that_makes_no_sense_of_itself_when_read_then_it_is_refused(kind, data, why):
    with pytest.raises(BadInput, match=why):
        reader(kind).read(data)


POINTS = [[5.0, 1.0, 0.5], [6.0, -1.0, 1.5], [7.0, 0.0, -0.4], [8.0, 0.0, 9.0]]


@pytest.mark.parametrize("fields", ["xyz", "xyzi", "izyx", "aybxcz"])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("big", "kind"), [(False, "f4"), (True, "f4"), (False, "f8"), (True, "f8")])
@pytest.mark.parametrize("rows", [1, 2])
def test_given_a_cloud_of_any_layout_when_read_then_points_of_its_height_are_there(
    fields, padding, big, kind, rows
):
    data = cloud_bytes(POINTS, fields=fields, padding=padding, big=big, kind=kind, rows=rows)
    found = reader("PointCloud2").read(data)
    assert places(found) == [[5.0, 1.0], [6.0, -1.0]]
    assert (found.usable, found.measured) == (4, 4)
    higher = reader("PointCloud2", (1.0, 2.0, 1.0, math.pi)).read(
        data
    )  # the second is at 2.5 m, the third at 0.6 m
    assert np.ravel(places(higher)) == pytest.approx([-4, 1, -5, 3, -6, 2], abs=1e-6)


def test_given_points_without_a_return_when_read_then_none_of_them_is_usable():
    nothing = [[0.0, 0.0, 0.0], [math.nan] * 3, [math.inf, 1.0, 1.0]]
    found = reader("PointCloud2", (0.0, 0.0, 1.0, 0.0)).read(cloud_bytes(nothing))
    assert (found.usable, found.measured, len(found.x)) == (0, 3, 0)
    empty = reader("PointCloud2").read(cloud_bytes(np.empty((0, 3))))
    assert (empty.usable, empty.measured) == (0, 0)


def test_given_a_cloud_that_cannot_be_read_when_read_then_it_says_why():
    cloud = reader("PointCloud2").read
    with pytest.raises(BadInput, match="field z has to be there as float32 or float64"):
        cloud(cloud_bytes(POINTS, fields="xyi"))
    whole = cloud_bytes(POINTS)
    for end in range(len(whole) - 1):  # the last byte is `is_dense`, which the reader ignores
        with pytest.raises(BadInput, match="are no sensor_msgs/PointCloud2"):
            cloud(whole[:end])


def test_given_a_cloud_whose_rows_do_not_fit_its_points_when_read_then_it_is_refused():
    data = bytearray(cloud_bytes(POINTS, rows=2, fields="xyz"))
    at = data.index((12).to_bytes(4, "little") + (24).to_bytes(4, "little"))
    for step, row in ((0, 24), (12, 0), (24, 24)):
        data[at : at + 8] = step.to_bytes(4, "little") + row.to_bytes(4, "little")
        with pytest.raises(BadInput, match=f"2 points of {step} bytes do not fit rows of {row}"):
            reader("PointCloud2").read(bytes(data))


@pytest.mark.parametrize(
    ("distance", "usable", "returns"),
    [
        (1.0, 1, 7),
        (4.0, 1, 7),
        (-math.inf, 1, 7),
        (math.inf, 1, 0),
        (5.0, 1, 0),
        (0.1, 0, 0),
        (0.0, 0, 0),
        (math.nan, 0, 0),
        (-1.0, 0, 0),
    ],
)
def test_given_a_range_sensor_when_read_then_what_it_sees_is_on_an_arc_and_one_measurement(
    distance, usable, returns
):
    found = reader("Range", (2.0, 0.0, 0.3, 0.0)).read(range_bytes(distance))
    assert (found.usable, len(found.x), found.measured) == (usable, returns, 1)
    assert found.most <= 1
    if returns:
        assert np.hypot(found.x - 2.0, found.y) == pytest.approx(max(distance, 0.2))
        assert found.y[-1] == pytest.approx(max(distance, 0.2) * math.sin(0.2))


def test_given_a_trigger_when_read_then_it_is_true_or_false_or_refused():
    assert (read_bool(bool_bytes(True)), read_bool(bool_bytes(False))) == (True, False)
    for data in (b"", b"\0\1\0\0", b"\0\1\0\0\2"):
        with pytest.raises(BadInput, match="no std_msgs/Bool"):
            read_bool(data)


WHOLE = {"LaserScan": scan_bytes([1.0] * 9), "PointCloud2": cloud_bytes(POINTS), "Range": range_bytes(1.0)}


@given(st.sampled_from(sorted(WHOLE)), st.data())
def test_given_bytes_that_are_damaged_when_read_then_they_are_points_or_refused(kind, data):
    whole = bytearray(WHOLE[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = reader(kind).read(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    except BadInput as error:
        assert kind in str(error)  # noqa: PT017 - either end is right
        return
    assert len(found.x) == len(found.y) <= 7 + found.measured
    assert np.isfinite(found.x).all()
    assert np.isfinite(found.y).all()


# -- the ground

LIDAR_M = 1.9
RINGS, AROUND = np.meshgrid(np.radians(np.linspace(-25.0, 10.0, 32)), np.radians(np.linspace(-60, 60, 301)))
DIRECTIONS = np.stack([np.cos(RINGS) * np.cos(AROUND), np.cos(RINGS) * np.sin(AROUND), np.sin(RINGS)], -1)
GROUND = {
    "emergency.sensors": [f"lidar PointCloud2 z {LIDAR_M} timeout 1000"],
}


def swept(rng, *, pitch=0.0, rises=0.0, from_m=10.0, thing=None):
    """Points of a lidar on the roof of a vehicle that dips by `pitch`, in the lidar's axes, in m.

    The ground rises by `rises` for each metre from `from_m` on. `thing`: how far ahead, how wide, how high
    above the ground it is.
    """
    x, y, z = DIRECTIONS.reshape(-1, 3).T
    ahead, up = x * math.cos(pitch) + z * math.sin(pitch), z * math.cos(pitch) - x * math.sin(pitch)
    with np.errstate(divide="ignore", invalid="ignore"):
        flat = np.where(up < 0.0, -LIDAR_M / up, np.inf)
        risen = -(LIDAR_M + rises * from_m) / (up - rises * ahead)
        risen = np.where(risen > 0.0, risen, np.inf)
        range_m = np.where(np.minimum(flat, risen) * ahead > from_m, risen, flat)
        if thing is not None:
            at_m, wide_m, high_m = thing
            front = np.where(ahead > 0.0, at_m / ahead, np.inf)
            height_m = LIDAR_M + front * up - rises * max(at_m - from_m, 0.0)
            hit = (np.abs(front * y) <= wide_m / 2) & (height_m >= 0.0) & (height_m <= high_m)
            range_m = np.where(hit, np.minimum(front, range_m), range_m)
    seen = range_m < 70.0
    noisy = range_m[seen] + rng.normal(0.0, 0.03, np.count_nonzero(seen))
    return noisy[:, None] * np.stack([x, y, z], -1)[seen]


def left_m(seed, thing=None):
    """What a blind vehicle has left to a thing when the lane latches by a lidar, and what it needs to stop.

    None: it does not latch.
    """
    draw, rng = random.Random(f"ground {seed}"), np.random.default_rng(seed)
    # From 15 m on, what is 0.6 m wide gives this lidar fewer than three returns.
    speed, pitch = draw.uniform(5.0, 11.0 if thing else 20.0), math.radians(draw.uniform(-1.0, 2.0))
    road = {"pitch": pitch, "rises": draw.uniform(-0.05, 0.05), "from_m": draw.uniform(4.0, 25.0)}
    needs_m = 0.3 * speed + speed**2 / 12.0
    lane = Emergency(node_config(GROUND, {}).emergency)
    lane.activate(NS_PER_S)
    for number in range(16):
        now_ns, gap_m = (10 + number) * NS_PER_S // 10, needs_m + (1.3 - 0.1 * number) * speed
        at = thing and (3.5 + gap_m, *thing)
        lane.moved(odometry_bytes(speed), now_ns)
        lane.saw(0, cloud_bytes(swept(rng, thing=at, **road), stamp_ns=NS_PER_S + now_ns), now_ns)
        if lane.latch is not None:
            return gap_m, needs_m
    return None


def test_given_a_cloud_with_ground_when_the_vehicle_dips_and_the_road_rises_then_the_ground_is_no_obstacle():
    assert [seed for seed in range(25) if left_m(seed)] == []


@pytest.mark.parametrize("thing", [(1.9, 1.5), (0.6, 1.7), (30.0, 1.0), (30.0, 3.0)])
def test_given_a_thing_on_such_ground_when_the_vehicle_sees_nothing_then_it_is_stopped_in_time(thing):
    for seed in range(10):
        found = left_m(seed, thing)
        assert found[0] >= found[1], seed


def rows(ahead_m, lefts_m, heights_m):
    """Points of rows across the way, so far ahead, from left to right, each at these heights."""
    return [[x, y, z] for x in ahead_m for y in lefts_m for z in heights_m]


ROAD = rows(np.arange(2.5, 8.0), np.linspace(-4.0, 4.0, 17), [0.0])
SIDES_M = [side * left_m for side in (-1, 1) for left_m in (2.6, 2.8, 3.0)]


@pytest.mark.parametrize(
    ("more", "thing"),
    [
        # A wet road gives no returns, but guard rails on both sides do, and so does a child that lies there.
        (rows(np.arange(8.5, 20.0), SIDES_M, [0.45, 0.6]), rows([12.2], [-0.3, 0.0, 0.3], [0.25, 0.4])),
        # The beams of few rings meet what lies right across the way at one height, far behind the last ground.
        (
            rows([10.5, 14.5], np.linspace(-4.0, 4.0, 17), [0.0]),
            rows([18.0], np.linspace(-4.0, 4.0, 17), [0.35]),
        ),
    ],
)
def test_given_what_is_low_when_only_it_or_what_stands_beside_the_way_is_seen_there_then_it_is_no_ground(
    more, thing
):
    found = reader("PointCloud2").read(cloud_bytes([*ROAD, *more, *thing]))
    at_m, _, _ = thing[0]
    assert np.count_nonzero(np.isclose(found.x, at_m)) == len(thing)
