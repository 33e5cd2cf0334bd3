"""Tracks of objects, and the camera's boxes on the road."""

import math

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.models.camera_driving import CameraDrivingAdapter, ObjectTracks, Sighting
from torchperf_ros.models.closed_loop import (
    MARKER_ARRAY,
    ODOMETRY,
    PATH,
    Centreline,
    SeenObject,
    encoded,
    objects_message,
    objects_of,
    odometry_message,
    path_bytes,
    route_bytes,
    route_of,
)
from torchperf_ros.models.driving import OracleAdapter, RulePlannerAdapter
from torchperf_ros.models.networks import BOX_FIELDS, CLASSES, GRID_CELLS
from torchperf_ros.models.road_scene import (
    CAMERA_HEIGHT_M,
    EXTENTS,
    HORIZON,
    HORIZONTAL_FOV_DEG,
    RoadScene,
    SceneObject,
)
from torchperf_ros.safety.stop_output import TimedPath

CPU = torch.device("cpu")
VIEW = {"horizontal_fov_deg": HORIZONTAL_FOV_DEG, "horizon": HORIZON, "camera_height_m": CAMERA_HEIGHT_M}
SIZE = 640, 360
IMAGE = "sensor_msgs/msg/Image"
SCENE = RoadScene(*SIZE)


def messages(seconds: float, pose=(0.0, 0.0, 0.0), odom: bool = True):
    stamp_ns = round(seconds * 1e9)
    pixels = decode(SCENE.pixels_cdr(SCENE.draw_objects(0.0, [])), IMAGE)
    found = {"image": Received(pixels, stamp_ns, 0.0)}
    if odom:
        message = odometry_message(*pose, 10.0, 0.0, stamp_ns)
        found["odom"] = Received(decode(bytes(encode(message, ODOMETRY)), ODOMETRY), stamp_ns, 0.0)
    return found


def boxes(*objects: SceneObject) -> torch.Tensor:
    """Outputs of a network that finds these objects exactly."""
    cells = torch.zeros(1, GRID_CELLS, BOX_FIELDS + len(CLASSES))
    for place, one in enumerate(objects):
        left, top, right, bottom = np.array(SCENE.box_px(one, EXTENTS[one.kind])) / np.tile(SIZE, 2)
        cells[0, place, :BOX_FIELDS] = torch.tensor(
            [0.9, (left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
        )
        cells[0, place, BOX_FIELDS + CLASSES.index(one.kind)] = 9.0
    return cells


@pytest.mark.parametrize("yaw", [0.0, 1.0, -2.5])
def test_given_a_pedestrian_who_crosses_when_seen_then_place_and_velocity_come_in_odometrys_frame(yaw):
    adapter = CameraDrivingAdapter(VIEW, CPU)
    for step in range(20):
        seconds = 1.0 + 0.05 * step
        right = 4.0 - 1.4 * seconds
        found = adapter.postprocess(
            boxes(SceneObject(20.0, right, (9, 9, 9), "pedestrian")), messages(seconds, (100.0, -50.0, yaw))
        )
        assert (len(found.markers) == 0) == (step == 0), "one frame alone proves nothing"
    ((x, y, _, vx, vy, length, width),) = objects_of(found)
    ahead, left = 20.25, -right
    assert x == pytest.approx(100.0 + ahead * math.cos(yaw) - left * math.sin(yaw), abs=0.6)
    assert y == pytest.approx(-50.0 + ahead * math.sin(yaw) + left * math.cos(yaw), abs=0.6)
    assert vy * math.cos(yaw) - vx * math.sin(yaw) == pytest.approx(1.4, abs=0.2)
    assert abs(vx * math.cos(yaw) + vy * math.sin(yaw)) < 0.5
    assert (length, width) == (0.5, pytest.approx(0.5, abs=0.1))


def test_given_a_car_ahead_that_brakes_when_seen_then_its_speed_follows_and_it_keeps_its_number():
    adapter, numbers = CameraDrivingAdapter(VIEW, CPU), set()
    speed, ahead = 14.0, 40.0
    for step in range(60):
        speed = max(0.0, 14.0 - 0.05 * 5.0 * step)
        ahead += (speed - 10.0) * 0.05
        seconds = 1.0 + 0.05 * step
        found = adapter.postprocess(
            boxes(SceneObject(ahead, 0.3, (9, 9, 9))), messages(seconds, (10.0 * seconds, 0, 0))
        )
        numbers |= {marker.id for marker in found.markers}
    ((x, y, _, vx, vy, _, _),) = objects_of(found)
    assert (vx, vy) == (pytest.approx(speed, abs=4.0), pytest.approx(0.0, abs=0.3))
    assert x - 10.0 * seconds == pytest.approx(ahead + 2.25, rel=0.1)
    assert len(numbers) == 1


def test_given_no_odometry_or_a_box_above_the_horizon_then_it_says_so_or_leaves_it_out():
    adapter = CameraDrivingAdapter(VIEW, CPU)
    with pytest.raises(BadInput, match="odom has not been received"):
        adapter.postprocess(boxes(), messages(1.0, odom=False))
    cells = boxes(SceneObject(20.0, 0.0, (9, 9, 9)))
    cells[0, 0, 2] = 0.1
    for seconds in (1.0, 1.05):
        assert not adapter.postprocess(cells, messages(seconds)).markers


def test_given_sightings_when_one_is_lost_for_half_a_second_or_time_goes_back_then_its_track_ends():
    def sight(x, kind="car"):
        return [Sighting(kind, x, 0.0, 4.5, 1.9)]

    tracks = ObjectTracks()
    (first,) = tracks.update(sight(30.0), 1.0, (0.0, 0.0))
    assert tracks.update([], 1.2, (0.0, 0.0)) == []
    assert tracks.update(sight(30.5), 1.4, (0.0, 0.0)) == [first]
    assert tracks.update(sight(30.5, "truck"), 1.5, (0.0, 0.0)) != [first]
    (later,) = tracks.update(sight(31.0), 2.5, (0.0, 0.0))
    assert later.number not in {first.number}
    (again,) = tracks.update(sight(31.0), 2.0, (0.0, 0.0))
    assert again.sightings == 1
    two = tracks.update([*sight(31.1), *sight(60.0)], 2.1, (0.0, 0.0))
    assert [track.sightings for track in two] == [2, 1]


def test_given_boxes_on_the_road_when_two_versions_are_compared_then_the_score_of_an_image_is_not_taken_of_them():
    adapter = CameraDrivingAdapter(VIEW, CPU)
    for seconds in (1.0, 1.05):
        found = adapter.postprocess(boxes(SceneObject(20.0, 0.0, (9, 9, 9))), messages(seconds))
    assert adapter.score_messages(found, found) is None
    assert adapter.score_messages.__func__ is Adapter.score_messages, (
        "a worker asks this way whether there is one"
    )


# -- the truth, and rules that plan by it


S = 1_000_000_000
BOXES = [[40.0, 0.5, 0.1, 8.0, -0.5, 4.5, 1.9], [120.0, -3.0, 0.0, 0.0, 0.0, 0.5, 0.5]]


def objects(stamp_ns=10 * S):
    seen = [SeenObject("car", 3, BOXES[0]), SeenObject("pedestrian", 4, BOXES[1])]
    return decode(encoded(objects_message(seen, stamp_ns), MARKER_ARRAY), MARKER_ARRAY)


def received(message, stamp_ns=10 * S):
    return Received(message, stamp_ns, 0.0)


def given_at(*, odom_ns=10 * S):
    odom = received(odometry_message(0.0, 0.0, 0.0, 15.0, 0.0, odom_ns), odom_ns)
    route = decode(route_bytes(Centreline.of(300.0), 15.0, 0), PATH)
    return {"detections": received(objects()), "odom": odom, "route": received(route, 0)}


def planned(adapter, given, tier="full"):
    outputs = adapter.build(tier)(*adapter.preprocess(given))
    return adapter.postprocess(outputs, given)


def test_given_objects_when_sent_as_markers_then_boxes_and_velocities_come_back():
    assert objects_of(objects()) == pytest.approx(np.array(BOXES))


def test_given_a_box_without_an_arrow_when_read_then_it_stands_still():
    array = objects()
    array.markers = [marker for marker in array.markers if marker.type == 1]
    assert objects_of(array)[0, 3:5].tolist() == [0.0, 0.0]


def test_given_a_route_when_sent_then_lane_and_speed_come_back():
    lane, wanted = route_of(decode(route_bytes(Centreline.of(600.0, 80.0, 200.0, 150.0), 12.5, 0), PATH))
    assert len(lane.points) > 30
    assert wanted == 12.5


@pytest.mark.parametrize(("tier", "count"), [("full", 2), ("medium", 1), ("fast", 1)])
def test_given_a_tier_when_the_oracle_sees_then_it_sees_as_far_as_that(tier, count):
    adapter = OracleAdapter({}, CPU)
    given = {"scan": received(None), "objects_in_sight": received(objects()), "odom": given_at()["odom"]}
    outputs = adapter.build(tier)(*adapter.preprocess(given))
    assert len(objects_of(adapter.postprocess(outputs, given))) == count


def test_given_no_truth_when_the_oracle_sees_then_the_message_says_what_is_missing():
    with pytest.raises(BadInput, match="objects_in_sight has not been received"):
        OracleAdapter({}, CPU).preprocess({"scan": received(None), "odom": given_at()["odom"]})


def test_given_a_frame_when_planned_then_the_path_is_stamped_and_begins_at_the_vehicle():
    path = planned(RulePlannerAdapter({}, CPU), given_at(odom_ns=10 * S + 50_000_000))
    timed = TimedPath.read(path)
    assert timed.stamps_ns[0] == 10 * S + 50_000_000  # odometry's: that is where the vehicle was then
    assert decode(path, PATH).header.stamp.sec == 10  # the frame's
    assert timed.points[0].tolist() == [0.0, 0.0, 0.0]
    assert len(timed.points) == 31


def test_given_detections_older_than_odometry_when_planned_then_objects_are_brought_forward():
    _, early, _ = RulePlannerAdapter({}, CPU).preprocess(given_at())
    _, late, _ = RulePlannerAdapter({}, CPU).preprocess(given_at(odom_ns=11 * S))
    assert (late - early)[0, :2].tolist() == pytest.approx([8.0, -0.5])


def test_given_a_blind_planner_when_planned_then_no_object_is_taken_into_account():
    near = given_at()
    near["detections"].message.markers[0].pose.position.x = 15.0
    seeing, blind = (
        TimedPath.read(planned(RulePlannerAdapter({"blind": b}, CPU), near)) for b in (0.0, 1.0)
    )
    assert blind.points[-1, 0] == pytest.approx(45.0)
    assert seeing.points[-1, 0] < 30.0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.pop("odom"), "odom has not been received"),
        (lambda m: m.pop("route"), "route has not been received"),
        (lambda m: m["route"].message.poses.clear(), "route has 0 points; it has to have 2 to"),
        (lambda m: setattr(m["odom"].message.twist.twist.linear, "x", float("nan")), "odom is not finite"),
    ],
)
def test_given_a_message_that_cannot_be_used_when_planned_then_the_refusal_says_why(change, match):
    given = given_at()
    change(given)
    with pytest.raises(BadInput, match=match):
        RulePlannerAdapter({}, CPU).preprocess(given)


def test_given_an_unknown_tier_or_option_when_built_then_it_is_refused():
    with pytest.raises(ConfigError, match="tier 'huge' does not exist"):
        RulePlannerAdapter({}, CPU).build("huge")
    with pytest.raises(ConfigError, match="colour"):
        RulePlannerAdapter({"colour": 1}, CPU)


def test_given_example_inputs_when_run_then_a_path_comes_out():
    adapter = RulePlannerAdapter({}, CPU)
    assert adapter.build("fast")(*adapter.example_inputs("fast")).shape == (31, 4)
    poses = decode(path_bytes(np.zeros((2, 4)), "odom", 0, 0), PATH).poses
    assert poses[1].header.stamp.nanosec == 100_000_000
