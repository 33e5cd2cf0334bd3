import math

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import decode, empty_message, encode, header, stamp_ns_of
from torchperf_ros.models import lidar
from torchperf_ros.models.detection_messages import KINDS, MARKER_ARRAY
from torchperf_ros.models.driving_messages import ODOMETRY, odometry_message
from torchperf_ros.models.lidar import LidarAdapter
from torchperf_ros.models.pillars import MAP_FIELDS, OUTSIDE, SPARE_POINTS
from torchperf_ros.models.planner import PlannerAdapter
from torchperf_ros.models.point_cloud import CLOUD, cloud_message

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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"colour": 1},
            "'colour' .value 1. is unknown; allowed: max_detections, score_threshold, height_m",
        ),
        ({"height_m": 11}, "'height_m' is 11; allowed: a number from -10 to 10"),
        ({"weights": 3}, "'weights' is 3; allowed: a non-empty string"),
    ],
)
def test_given_a_bad_option_when_constructed_then_the_error_names_it_its_value_and_what_is_allowed(
    options, says
):
    with pytest.raises(ConfigError, match=says):
        LidarAdapter(options, CPU)


def test_given_a_broken_message_when_preprocessed_then_the_refusal_names_the_field():
    given = messages([(1, 0, 0, 0, 0)])
    given["cloud"].message.point_step = 1
    with pytest.raises(BadInput, match="cloud point_step is 1; field x ends at 4 bytes"):
        seen(given)
    with pytest.raises(BadInput, match="odom.twist.twist.linear.x is nan"):
        seen(messages([(1, 0, 0, 0, 0)], speed=math.nan))
    assert seen({"cloud": Received(empty_message(CLOUD), 0, 1.0)}).shape == (0, 4)
