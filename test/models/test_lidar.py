import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import BadInput
from torchperf_ros.api.messages import decode, empty_message, encode, header, stamp_ns_of
from torchperf_ros.engines.package_engine import export
from torchperf_ros.models import lidar, networks
from torchperf_ros.models.closed_loop import ODOMETRY, odometry_message
from torchperf_ros.models.detection_messages import KINDS, MARKER_ARRAY
from torchperf_ros.models.lidar import LidarAdapter
from torchperf_ros.models.networks import (
    BESIDE_M,
    CELL_M,
    CLASSES,
    GRID_COLUMNS,
    GRID_ROWS,
    MAP_FIELDS,
    MOST_POINTS,
    OUTSIDE,
    SPARE_POINTS,
    PillarNet,
    build_seeded,
    spare,
    strongest,
)
from torchperf_ros.models.planner import PlannerAdapter
from torchperf_ros.models.point_cloud import CLOUD, at_stamp, cloud_message, read_cloud

CPU = torch.device("cpu")
STAMP_NS = 1_700_000_000_250_000_000
RECORD = np.dtype([("x", "<f4"), ("y", "<f4"), ("z", "<f4"), ("intensity", "<f4"), ("time", "<f4")])


def messages(rows, *, odom_ns=STAMP_NS, speed=0.0, yaw_rate=0.0):
    """A cloud of rows of x, y, z, intensity and time, and odometry, both as they come over the wire."""
    table = np.zeros(len(rows), RECORD)
    for column, name in enumerate(RECORD.names):
        table[name] = [row[column] for row in rows]
    cloud = decode(bytes(encode(cloud_message(table, STAMP_NS, "velodyne"), CLOUD)), CLOUD)
    odom = decode(bytes(encode(odometry_message(0, 0, 0, speed, yaw_rate, odom_ns), ODOMETRY)), ODOMETRY)
    return {"cloud": Received(cloud, STAMP_NS, 1.0), "odom": Received(odom, odom_ns, 1.0)}


def seen(given, **options):
    (tensor,) = LidarAdapter(options, CPU).preprocess(given)
    assert tensor[:SPARE_POINTS].tolist() == [list(OUTSIDE)] * SPARE_POINTS
    return tensor[SPARE_POINTS:]


def cells(*boxes):
    """Network outputs with (score, x, y, length, width, yaw, class index) and nothing else."""
    made = torch.zeros(1, 100, MAP_FIELDS)
    for index, (*box, yaw, kind) in enumerate(boxes):
        made[0, index, :7] = torch.tensor([*box, math.sin(2 * yaw), math.cos(2 * yaw)])
        made[0, index, 7 + kind] = 1.0
    return made


def test_given_a_cloud_when_preprocessed_then_points_are_scaled_and_raised_to_the_ground():
    found = seen(messages([(10, 1, -1.5, 51, 0), (20, 2, -1.9, 300, 0)]), height_m=1.9)
    assert found.numpy() == pytest.approx(np.array([[10, 1, 0.4, 0.2], [20, 2, 0, 1]]), abs=1e-6)


def test_given_a_moving_vehicle_when_preprocessed_then_points_are_where_they_are_at_the_stamp():
    rows = [(10, 0, 1, 0, -0.1), (10, 0, 1, 0, 0)]
    assert seen(messages(rows, speed=15.0))[:, 0].tolist() == pytest.approx([8.5, 10])
    turned = seen(messages(rows, yaw_rate=0.5))[:, 1].tolist()
    assert turned == pytest.approx([10 * math.sin(-0.05), 0], abs=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda given: given.pop("odom"),
            "points are not moved to the cloud's stamp: there is no odometry",
        ),
        (
            lambda given: given.update(
                messages([], odom_ns=STAMP_NS - 501_000_000) | {"cloud": given["cloud"]}
            ),
            "points are not moved to the cloud's stamp: odometry is 501 ms away",
        ),
        (lambda given: setattr(given["cloud"].message, "header", header(STAMP_NS - 10**10, "")), ""),
    ],
)
def test_given_no_recent_odometry_when_preprocessed_then_points_stay_and_the_log_says_so(
    change, says, capfd
):
    given = messages([(10, 0, 1, 0, -0.1)], speed=15.0)
    change(given)
    assert seen(given)[0, 0] == pytest.approx(10.0 if says else 8.5)
    assert (says in capfd.readouterr().err) == bool(says) or not says


def test_given_what_gets_lost_when_preprocessed_then_the_log_says_it_once_in_a_while(monkeypatch, capfd):
    monkeypatch.setattr(lidar, "MOST_POINTS", 30)
    now_s = [0.0]
    monkeypatch.setattr(lidar.time, "monotonic", lambda: now_s[0])
    adapter = LidarAdapter({}, CPU)
    many = messages([(1 + n / 2, 0, 1, 0, 0) for n in range(100)] + [(-20, 0, 1, 0, 0)] * 50)
    for now_s[0] in (0.0, 5.0, 11.0):
        assert len(adapter.preprocess(many)[0]) == 30 + SPARE_POINTS
    assert adapter.clipped == 210
    assert capfd.readouterr().err.splitlines() == [
        f"cloud: of 100 points ahead 70 were left out, evenly: the network takes 30; {total} so far"
        for total in (70, 210)
    ]
    adapter.preprocess(messages([(math.nan, 0, 0, 0, 0)] * 3))
    adapter.preprocess(messages([(1, 0, 0, 0, 500.0)]))
    adapter.preprocess(messages([]))
    blind, clock = capfd.readouterr().err.splitlines()
    assert blind == "cloud: none of the cloud's 3 points is a return: the lidar sees nothing"
    assert "up to 500 s from the cloud's stamp: they are of another clock" in clock


def test_given_markers_of_a_lidar_when_planned_with_body_axes_then_they_are_ahead_and_to_the_left():
    array = LidarAdapter({}, CPU).postprocess(cells((0.6, 20, 3, 4.5, 1.9, 0.0, 0)), messages([]))
    planner = PlannerAdapter({"detections_frame": "body"}, CPU)
    planner.observe({"detections": Received(array, STAMP_NS, 1.0)})
    rows, _ = planner.history.window()
    assert rows[-1, :4].tolist() == pytest.approx([20 / 50, 3 / 20, 4.5 / 5, 1.9 / 5])


def test_given_boxes_when_postprocessed_then_markers_stand_on_the_ground_and_survive_the_wire():
    adapter = LidarAdapter({"height_m": 1.9, "max_detections": 2}, CPU)
    given = messages([])
    boxes = cells((0.6, 20, 3, 4.5, 1.9, 0.5, 0), (0.4, 1, 1, 1, 1, 0, 1), (0.9, 30, -3, 0.5, 0.6, -0.7, 3))
    array = decode(bytes(encode(adapter.postprocess(boxes, given), MARKER_ARRAY)), MARKER_ARRAY)
    clear, first, second = array.markers
    assert clear.action == 3
    assert [marker.ns for marker in (first, second)] == ["pedestrian", "car"]
    assert {(stamp_ns_of(m.header), m.header.frame_id, m.type) for m in (first, second)} == {
        (STAMP_NS, "velodyne", 1)
    }
    at, turn, size = second.pose.position, second.pose.orientation, second.scale
    tall = KINDS["car"].height_m
    assert (at.x, at.y, at.z) == pytest.approx((20, 3, tall / 2 - 1.9))
    assert (size.x, size.y, size.z, second.color.a) == pytest.approx((4.5, 1.9, tall, 0.6))
    assert 2 * math.atan2(turn.z, turn.w) == pytest.approx(0.5, abs=1e-5)


def test_given_example_messages_when_a_frame_runs_then_every_tier_takes_them_and_gives_a_message():
    adapter = LidarAdapter({"score_threshold": 0.0, "max_detections": 5}, CPU)
    given = adapter.example_messages()
    inputs = adapter.preprocess(given)
    ((low, high),) = adapter.dynamic_dims()[0].values()
    for tier in adapter.tiers:
        (example,) = adapter.example_inputs(tier)
        assert low <= len(example) <= high
        assert torch.equal(example, inputs[0])
        with torch.inference_mode():
            outputs = adapter.build(tier)(*inputs)
        assert len(adapter.postprocess(outputs, given).markers) == 6
    assert len(inputs[0]) > 10_000


def test_given_a_broken_message_when_preprocessed_then_the_refusal_names_the_field():
    given = messages([(1, 0, 0, 0, 0)])
    given["cloud"].message.point_step = 1
    with pytest.raises(BadInput, match="cloud point_step is 1; field x ends at 4 bytes"):
        seen(given)
    with pytest.raises(BadInput, match="odom.twist.twist.linear.x is nan"):
        seen(messages([(1, 0, 0, 0, 0)], speed=math.nan))
    assert seen({"cloud": Received(empty_message(CLOUD), 0, 1.0)}).shape == (0, 4)


# -- point clouds as they come


NUMBERS = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6, "f4": 7, "f8": 8}
MANY = 1000


def cloud(columns, order="<", gaps=(), height=1, row_padding=0, **fields):
    """A decoded cloud of named columns (values, kind), with gaps of noise before fields and after rows."""
    formats = {name: np.dtype(order + kind) for name, (_, kind) in columns.items()}
    offsets, at = {}, 0
    for number, name in enumerate(columns):
        at += gaps[number % len(gaps)] if gaps else 0
        offsets[name], at = at, at + formats[name].itemsize
    step = at + (gaps[-1] if gaps else 0)
    count = len(next(iter(columns.values()))[0])
    width = count // height
    data = np.random.default_rng(1).integers(0, 256, (height, width * step + row_padding), dtype=np.uint8)
    record = np.dtype(
        {
            "names": list(columns),
            "formats": list(formats.values()),
            "offsets": list(offsets.values()),
            "itemsize": step,
        }
    )
    table = np.ndarray((height, width), record, data, strides=(data.shape[1], step))
    for name, (values, _) in columns.items():
        table[name] = np.asarray(values).reshape(height, width)
    described = [
        empty_message(
            "sensor_msgs/msg/PointField", name=name, offset=offsets[name], datatype=NUMBERS[kind], count=1
        )
        for name, (_, kind) in columns.items()
    ]
    message = empty_message(
        CLOUD,
        **{
            "header": header(STAMP_NS, "lidar"),
            "height": height,
            "width": width,
            "fields": described,
            "is_bigendian": order == ">",
            "point_step": step,
            "row_step": data.shape[1],
            "data": data.reshape(-1),
        }
        | fields,
    )
    return decode(bytes(encode(message, CLOUD)), CLOUD)


def xyz(count, kind="f4"):
    places = np.random.default_rng(2).uniform(-50, 50, (count, 3)).astype(np.float32)
    return {axis: (places[:, number], kind) for number, axis in enumerate("xyz")}


def columns_of(points):
    return {axis: (points[:, number], "f4") for number, axis in enumerate("xyz")}


@settings(max_examples=60)
@given(
    names=st.permutations(["x", "y", "z", "intensity", "ring", "t"]),
    order=st.sampled_from("<>"),
    kind=st.sampled_from(["f4", "f8"]),
    shine=st.sampled_from(["f4", "u1", "u2"]),
    time=st.sampled_from(["u4", "f4", "f8"]),
    gaps=st.lists(st.integers(0, 9), max_size=4),
    rows=st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(0, 30)),
)
def test_given_any_layout_when_read_then_points_and_times_are_those_that_were_written(
    names, order, kind, shine, time, gaps, rows
):
    height, width, row_padding = rows
    count = height * width
    seconds = np.linspace(-0.1, 0.0, count) if time != "u4" else np.linspace(0.0, 0.1, count)
    written = {"f8": STAMP_NS / 1e9 + seconds, "f4": seconds, "u4": (seconds * 1e9).round()}[time]
    columns = xyz(count, kind) | {
        "intensity": (np.arange(count) % 256, shine),
        "ring": (np.arange(count), "u2"),
        "t": (written, time),
    }
    found = read_cloud(
        cloud({name: columns[name] for name in names}, order, gaps, height, row_padding), MANY
    )
    assert found.points.dtype == found.times_s.dtype == np.float32
    assert np.array_equal(found.points[:, :3], np.column_stack([columns[axis][0] for axis in "xyz"]))
    assert found.points[:, 3] == pytest.approx(np.arange(count) % 256 / 255)
    assert found.times_s == pytest.approx(seconds, abs=1e-6)
    assert (found.empty, found.beyond, found.clipped, found.other_clock_s) == (0, 0, 0, 0.0)


@pytest.mark.parametrize(
    ("name", "kind", "written"),
    [
        ("t", "u4", [0, 50_000_000]),  # Ouster
        ("time", "f4", [0.0, 0.05]),  # Velodyne
        ("timestamp", "f8", [STAMP_NS / 1e9, STAMP_NS / 1e9 + 0.05]),  # Hesai, RoboSense
        ("timestamp", "f8", [float(STAMP_NS), float(STAMP_NS + 50_000_000)]),  # Livox
        ("time_stamp", "u4", [0, 50_000_000]),  # Nebula
        ("offset_time", "u4", [0, 50_000_000]),  # Livox' own messages, converted
    ],
)
def test_given_a_drivers_times_when_read_then_they_are_seconds_from_the_stamp(name, kind, written):
    found = read_cloud(cloud(xyz(2) | {name: (np.array(written), kind)}), MANY)
    assert found.times_s == pytest.approx([0.0, 0.05], abs=1e-6)


def test_given_times_of_another_clock_when_read_then_there_are_none_and_how_far_they_are_is_told():
    found = read_cloud(cloud(xyz(2) | {"timestamp": (np.array([5000.0, 5000.05]), "f8")}), MANY)
    assert found.times_s is None
    assert found.other_clock_s == pytest.approx(STAMP_NS / 1e9 - 5000, rel=1e-6)


def test_given_no_intensity_and_no_time_when_read_then_they_are_zero_and_none():
    found = read_cloud(cloud(xyz(3)), MANY)
    assert (found.points[:, 3].tolist(), found.times_s) == ([0.0] * 3, None)


@pytest.mark.parametrize(
    ("kind", "intensity_max", "written", "read"),
    [
        ("f4", 255.0, [-1.0, math.nan, 51.0, math.inf, 1e9], [0, 0, 0.2, 1, 1]),
        ("u2", 65535.0, [0, 65535], [0, 1]),
        ("f4", 1.0, [0.25], [0.25]),
    ],
)
def test_given_intensities_when_read_then_they_are_shares_of_the_most(kind, intensity_max, written, read):
    columns = xyz(len(written)) | {"intensity": (np.array(written), kind)}
    assert read_cloud(cloud(columns), MANY, intensity_max).points[:, 3] == pytest.approx(read)


def test_given_points_without_a_return_when_read_then_they_are_left_out_and_counted():
    places = np.arange(1, 31, dtype=np.float64).reshape(10, 3)
    places[2, 0], places[4, 1], places[6, 2], places[7], places[8, 0] = (
        math.nan,
        math.inf,
        -math.inf,
        0.0,
        1e300,
    )
    times = np.arange(10) / 100
    times[[5, 7]] = math.nan
    columns = {axis: (places[:, number], "f8") for number, axis in enumerate("xyz")} | {
        "time": (times, "f4")
    }
    found = read_cloud(cloud(columns, height=2), MANY)
    assert found.empty == 5
    assert found.points[:, 0].tolist() == [1, 4, 10, 16, 28]
    assert found.times_s == pytest.approx(
        [0.0, 0.01, 0.03, 0.0, 0.09]
    )  # of a point without a time, the stamp's


@given(count=st.integers(0, 400), most=st.integers(1, 300))
def test_given_more_points_than_are_wanted_when_read_then_so_many_remain_evenly_spread(count, most):
    places = np.column_stack((np.arange(1, count + 1), np.ones(count), np.ones(count)))
    found = read_cloud(cloud(columns_of(places)), most)
    kept = found.points[:, 0]
    assert (len(kept), found.clipped) == (min(count, most), max(0, count - most))
    if found.clipped:
        assert kept[0] == 1
        assert kept[-1] >= count - math.ceil(count / most)
        assert set(np.diff(kept)) <= {count // most, count // most + 1}


def test_given_bounds_when_read_then_what_is_beyond_is_left_out_before_others_are_clipped():
    places = np.column_stack((np.arange(1, 101), np.zeros(100), np.ones(100)))
    found = read_cloud(cloud(columns_of(places)), 10, bounds=(50.0, 59.0, -1.0, 1.0))
    assert (len(found.points), found.beyond, found.clipped, found.empty) == (10, 90, 0, 0)


def test_given_a_last_row_without_padding_when_read_then_it_is_whole():
    message = cloud(xyz(6), height=2, row_padding=10)
    message.data = message.data[:-10]
    assert np.array_equal(read_cloud(message, MANY).points[:, 0], xyz(6)["x"][0])


def test_given_fields_whose_count_the_driver_left_at_0_when_read_then_it_counts_as_1():
    message = cloud(xyz(4))
    for field in message.fields:
        field.count = 0
    assert read_cloud(message, MANY).points.tolist() == read_cloud(cloud(xyz(4)), MANY).points.tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"point_step": 11}, "cloud point_step is 11; field z ends at 12 bytes"),
        ({"width": 5}, "cloud data has 48 bytes; 1 x 5 points of 12 take 60"),
        ({"height": 2, "width": 2, "row_step": 23}, "cloud row_step is 23; 2 points of 12 bytes take 24"),
        ({"height": 3, "width": 2, "row_step": 24}, "cloud data has 48 bytes; 3 x 2 points of 12 take 72"),
        ({"height": 2, "width": 2, "row_step": 30}, "cloud data has 48 bytes; 2 x 2 points of 12 take 54"),
        ({"fields": [0, 2]}, "cloud has no field y; it has x, z, and needs x, y and z"),
        ({"fields": []}, "cloud has no field x; it has none"),
        ({"datatype": 9}, r"cloud field x has datatype 9; it has to be 7 \(float32\) or 8 \(float64\)"),
        ({"datatype": 5}, "cloud field x has datatype 5"),
        ({"count": 2}, "cloud field x has count 2; it has to be 1"),
        ({"offset": 2**32 - 1}, "cloud point_step is 12; field x ends at 4294967299 bytes"),
        ({"name": "intensity", "datatype": 0}, "cloud has no field x"),
    ],
)
def test_given_a_cloud_that_contradicts_itself_when_read_then_the_refusal_names_field_and_values(
    change, says
):
    message = cloud(xyz(4))
    for name, value in change.items():
        if name == "fields":
            message.fields = [message.fields[number] for number in value]
        else:
            setattr(message if hasattr(message, name) else message.fields[0], name, value)
    with pytest.raises(BadInput, match=says):
        read_cloud(message, MANY)


def test_given_an_unknown_datatype_of_the_intensity_when_read_then_it_is_refused_and_unused_fields_are_not():
    message = cloud(xyz(2) | {"intensity": ([1, 2], "f4"), "rgb": ([1, 2], "f4")})
    message.fields[4].datatype = message.fields[4].count = 77
    assert len(read_cloud(message, MANY).points) == 2
    message.fields[3].datatype = 0
    with pytest.raises(BadInput, match="cloud field intensity has datatype 0; it has to be 1 to 8"):
        read_cloud(message, MANY)


@pytest.mark.parametrize(
    ("speed", "yaw_rate"), [(15.0, 0.0), (15.0, 0.5), (15.0, 1e-9), (-5.0, -0.8), (0.0, 1.0), (15.0, 3.0)]
)
def test_given_a_sweep_when_moved_to_the_stamp_then_points_are_where_they_stand(speed, yaw_rate):
    random = np.random.default_rng(3)
    standing, times = random.uniform(-60, 60, (200, 4)), np.linspace(-0.1, 0.0, 200)
    at, yaw, step = np.zeros((200, 2)), yaw_rate * times, 2000
    for index, time_s in enumerate(
        times
    ):  # where the vehicle was: integrated in small steps, back from the stamp
        turned = yaw_rate * time_s * (np.arange(step) + 0.5) / step
        at[index] = np.array([np.cos(turned).sum(), np.sin(turned).sum()]) * speed * time_s / step
    away = standing[:, :2] - at
    seen = standing.copy()
    seen[:, 0] = away[:, 0] * np.cos(yaw) + away[:, 1] * np.sin(yaw)
    seen[:, 1] = away[:, 1] * np.cos(yaw) - away[:, 0] * np.sin(yaw)
    assert np.abs(seen - standing).max() > 0.4
    given_points = seen.astype(np.float32)
    moved = at_stamp(given_points, times.astype(np.float32), speed, yaw_rate)
    assert moved == pytest.approx(standing, abs=1e-3)
    assert moved.dtype == np.float32
    assert np.array_equal(given_points, seen.astype(np.float32))


# -- the network of pillars


CELLS = GRID_ROWS * GRID_COLUMNS


def seeded(tier):
    return build_seeded(lambda: PillarNet(networks.PILLAR_WIDTHS[tier]))


def points(count, seed=1):
    """Around the grid: one in three outside of it."""
    drawn = np.random.default_rng(seed)
    low, high = (-10, -45, 0, 0), (90, 45, 3, 1)
    return drawn.uniform(low, high, (count, 4)).astype(np.float32)


def test_given_one_exported_program_when_run_with_any_number_of_points_then_it_says_what_eager_says():
    network = seeded("fast")
    dims = {0: {0: (SPARE_POINTS, MOST_POINTS + SPARE_POINTS)}}
    program = export(network, (spare(points(700)),), dims).module()
    for count in (0, 1, 2, 500, MOST_POINTS):
        given = spare(points(count))
        with torch.inference_mode():
            expected, found = network(given), program(given)
        assert torch.equal(found, expected), count
        assert found.shape == (1, CELLS, MAP_FIELDS)
        assert found.isfinite().all()


def test_given_points_in_another_order_when_detecting_then_nothing_changes():
    network, given = seeded("fast"), points(3000)
    with torch.inference_mode():
        one, other = (network(spare(each)) for each in (given, given[::-1].copy()))
    assert torch.equal(one, other)


def test_given_points_outside_of_the_grid_when_detecting_then_they_say_nothing():
    network = seeded("fast")
    wild = np.array(
        [[-0.01, 0, 0, 1], [76.8, 0, 0, 1], [5, 38.4, 0, 1], [5, -38.41, 0, 1], [3e38, -3e38, 0, 0]],
        np.float32,
    )
    with torch.inference_mode():
        none, outside, one = (network(spare(each)) for each in (wild[:0], wild, points(9)))
    assert torch.equal(none, outside)
    assert not torch.equal(none, one)


def test_given_clouds_together_when_trained_then_each_has_the_maps_that_it_has_alone():
    network, clouds = seeded("fast"), [torch.from_numpy(points(count, count)) for count in (400, 0, 900)]
    which = torch.arange(3).repeat_interleave(torch.tensor([len(cloud) for cloud in clouds]))
    together = network.maps(torch.cat(clouds), which, 3)
    for number, cloud in enumerate(clouds):
        alone = network.maps(cloud, torch.zeros(len(cloud), dtype=torch.int64), 1)[0]
        torch.testing.assert_close(together[number], alone, atol=1e-5, rtol=1e-4)


def test_given_maps_when_detecting_then_a_peak_is_a_box_and_its_neighbours_are_none(monkeypatch):
    maps = torch.zeros(1, MAP_FIELDS, GRID_ROWS, GRID_COLUMNS)
    maps[:, 0] = -5.0
    maps[0, 0, 40, 20], maps[0, 0, 40, 21], maps[0, 0, 43, 20] = 2.0, 1.0, 0.5
    maps[0, 1:3, 40, 20] = torch.tensor([0.25, 0.75])
    maps[0, 3:5, 40, 20] = torch.tensor([4.0, 2.0]).log()
    maps[0, 5:7, 40, 20] = torch.tensor([math.sin(2 * 1.2), math.cos(2 * 1.2)]) * 0.7
    maps[0, 7 + CLASSES.index("truck"), 40, 20] = 3.0
    monkeypatch.setattr(PillarNet, "maps", lambda *_: maps)
    cells = seeded("fast")(spare(points(1)))[0].numpy()
    box, other = strongest(cells, 0.3, 10)
    assert box.score == pytest.approx(1 / (1 + math.exp(-2.0)))
    assert CLASSES[box.class_index] == "truck"
    place = (20.25 * CELL_M, 40.75 * CELL_M - BESIDE_M, 4.0, 2.0, 1.2)
    assert (box.x, box.y, box.length, box.width, box.yaw) == pytest.approx(place, rel=1e-5)
    assert other.score < box.score
    assert strongest(cells, 0.3, 1) == [box]
    assert strongest(cells, 0.99, 10) == []
