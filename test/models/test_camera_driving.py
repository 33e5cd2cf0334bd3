"""Tracks of objects, and the camera's boxes on the road."""

import math

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.models.camera_driving import CameraDrivingAdapter, ObjectTracks, Sighting
from torchperf_ros.models.driving_messages import ODOMETRY, objects_of, odometry_message
from torchperf_ros.models.networks import BOX_FIELDS, CLASSES, GRID_CELLS
from torchperf_ros.models.road_scene import (
    CAMERA_HEIGHT_M,
    EXTENTS,
    HORIZON,
    HORIZONTAL_FOV_DEG,
    RoadScene,
    SceneObject,
)

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


def test_given_no_odometry_a_box_above_the_horizon_or_an_unknown_option_then_it_says_so_or_leaves_it_out():
    adapter = CameraDrivingAdapter(VIEW, CPU)
    with pytest.raises(BadInput, match="odom has not been received"):
        adapter.postprocess(boxes(), messages(1.0, odom=False))
    cells = boxes(SceneObject(20.0, 0.0, (9, 9, 9)))
    cells[0, 0, 2] = 0.1
    for seconds in (1.0, 1.05):
        assert not adapter.postprocess(cells, messages(seconds)).markers
    with pytest.raises(ConfigError, match="'horizon' is 2.0; allowed: a number from 0 to 1"):
        CameraDrivingAdapter({"horizon": 2.0}, CPU)
    with pytest.raises(ConfigError, match="'hight' .value 1. is unknown"):
        CameraDrivingAdapter({"hight": 1}, CPU)


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
