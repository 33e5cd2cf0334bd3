"""The world's lidar: what its rays hit, when, and what the message says of it."""

import math

import numpy as np
import pytest
from typer.testing import CliRunner

from torchperf_ros.api.messages import decode
from torchperf_ros.models.driving_rules import Centreline
from torchperf_ros.models.point_cloud import CLOUD, at_stamp, read_cloud
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.tools.main import app
from torchperf_ros.world.lidar import MOUNTED_M, RANGE_M, RINGS, Pose, sweep
from torchperf_ros.world.loop import Drive, drive
from torchperf_ros.world.scenarios import Scenario
from torchperf_ros.world.sensors import Sensors
from torchperf_ros.world.vehicles import Body
from torchperf_ros.world.world import World

STANDING = Pose(0.0, 0.0, 0.0, 0.0, 0.0)
FAR = 500.0


class Exact:
    """A generator without noise."""

    def normal(self, mean, spread, count):
        return np.full(count, mean)

    def uniform(self, low, high, count):
        return np.full(count, 1.0)


def swept(*boxes, tall=1.45, pose=STANDING, random=None):
    table = np.array(boxes, dtype=float).reshape(-1, 7)
    return sweep(table, np.full(len(table), tall), np.full(len(table), 0.5), pose, random or Exact())


def xyz(found, which):
    return np.stack([found.points[axis][found.hit == which] for axis in "xyz"], axis=1).astype(float)


def test_given_nothing_when_swept_then_there_is_flat_ground_within_range():
    found = swept()
    ground = xyz(found, -1)
    assert len(ground) == len(found.points) > 10_000
    assert np.abs(ground[:, 2]).max() < 1e-5
    assert np.hypot(ground[:, 0], ground[:, 1]).max() < RANGE_M
    assert set(np.unique(found.points["ring"])) < set(range(RINGS))


@pytest.mark.parametrize("tall", [0.5, 1.45, 3.4])
@pytest.mark.parametrize("box", [(20, 3, 0.4), (8, -2, 1.5), (40, 10, -0.7), (12, 12, 0.0)])
def test_given_a_box_when_swept_then_its_points_lie_on_its_sides_and_top_and_none_is_inside_or_behind(
    box, tall
):
    x, y, yaw = box
    length, width = 4.5, 1.9
    found = swept((x, y, yaw, 0, 0, length, width), (FAR, 0, 0, 0, 0, 1, 1), tall=tall)
    points = xyz(found, 0)
    away = points[:, :2] - (x, y)
    along = np.abs(away @ [math.cos(yaw), math.sin(yaw)]) - length / 2
    across = np.abs(away @ [-math.sin(yaw), math.cos(yaw)]) - width / 2
    below = points[:, 2] - tall
    assert len(points) > 5
    assert np.maximum(np.maximum(along, across), np.maximum(below, -points[:, 2])).max() < 1e-3
    assert np.abs(np.stack((along, across, below))).min(axis=0).max() < 1e-3  # on a face
    assert tall < MOUNTED_M or below.max() < -1e-6  # a top above the sensor is not seen
    ground = xyz(found, -1)
    sensor = np.array([0.0, 0.0, MOUNTED_M])
    shares = np.linspace(0.02, 0.98, 60)[:, None, None]
    way = sensor + shares * (ground - sensor)
    inside = (np.abs((way[..., :2] - (x, y)) @ [math.cos(yaw), math.sin(yaw)]) < length / 2 - 0.01) & (
        np.abs((way[..., :2] - (x, y)) @ [-math.sin(yaw), math.cos(yaw)]) < width / 2 - 0.01
    )
    assert not (inside & (way[..., 2] < tall - 0.01)).any()  # no ray to the ground goes through it


def test_given_a_box_behind_another_when_swept_then_only_what_is_above_it_is_seen():
    car, truck = (15, 0, 0, 0, 0, 4.5, 1.9), (30, 0, 0, 0, 0, 8, 2.5)
    heights = np.array([1.45, 3.4])
    found = sweep(np.array([car, truck], float), heights, heights, STANDING, Exact())
    rear = xyz(found, 1)
    assert len(rear)
    middle = rear[np.abs(rear[:, 1]) < 0.8]
    assert middle[:, 2].min() > 0.9  # the car's shadow
    assert rear[:, 0] == pytest.approx(26.0, abs=1e-3)


def test_given_motion_when_swept_then_points_moved_to_the_stamp_lie_where_boxes_stand():
    pose = Pose(3.0, -2.0, 0.3, 15.0, 0.4)
    ahead = 3.0 + 20 * math.cos(0.3), -2.0 + 20 * math.sin(0.3)
    wall = (*ahead, 0.3, 0, 0, 0.5, 20.0)
    found = swept(wall, pose=pose)
    raw = np.column_stack([found.points[name] for name in ("x", "y", "z", "intensity")])[found.hit == 0]
    times = found.points["time"][found.hit == 0]
    assert np.ptp(times) > 0.005
    front = np.abs(raw[:, 2] - 1.45) > 1e-3  # not its top
    assert np.abs(raw[front, 0] - 19.75).min() > 0.15
    moved = at_stamp(raw, times, pose.speed, pose.yaw_rate)
    assert moved[front, 0] == pytest.approx(20.0 - 0.25, abs=1e-3)
    assert found.points["time"].max() <= 0.0


def test_given_a_moving_box_when_swept_then_it_is_seen_where_it_was_at_each_azimuth():
    found = swept((20, 0, 0, 10.0, 0, 0.5, 60.0))
    times, points = found.points["time"][found.hit == 0], xyz(found, 0)
    front = np.abs(points[:, 2] - 1.45) > 1e-3
    assert (points[:, 0] - 10.0 * times)[front] == pytest.approx(19.75, abs=1e-3)
    assert np.ptp(times[front]) > 0.01


def test_given_a_world_when_sensors_send_then_the_cloud_has_noise_of_its_seed_and_stamp():
    kinds = ("car", "pedestrian", "wall")
    bodies = [Body(kind, 15.0 + 10 * number, 4.0 - 2 * number) for number, kind in enumerate(kinds)]

    def sent(seed, stamp_ns):
        world = World(Scenario("test", seed, Centreline.of(800.0), 10.0, bodies, 9.0, {}))
        messages = Sensors(world, lidar=True).messages(stamp_ns)
        assert [topic for topic, _, _ in messages] == ["odom", "objects_in_sight", "cloud", "scan"]
        return messages[2][2]

    one = sent(1, 5)
    assert one == sent(1, 5)
    message = decode(one, CLOUD)
    cloud = read_cloud(message, 120_000)
    assert (message.header.frame_id, message.header.stamp.nanosec) == ("base_link", 5)
    assert [field.name for field in message.fields] == ["x", "y", "z", "intensity", "ring", "time"]
    assert (cloud.empty, cloud.clipped) == (0, 0)
    assert np.abs(cloud.points[cloud.points[:, 2] < 0.1][:, 2]).std() > 0.001
    assert cloud.times_s.min() > -0.03
    for other in (sent(2, 5), sent(1, 6)):
        assert not np.array_equal(decode(other, CLOUD).data, message.data)


def test_given_boxes_around_the_vehicle_when_swept_then_those_that_it_stands_in_or_that_are_far_are_not_seen():
    found = swept((0, 0, 0, 0, 0, 6, 3), (FAR, 0, 0, 0, 0, 5, 5), (-30, 0, 0, 0, 0, 5, 5))
    assert set(found.hit.tolist()) == {-1}


@pytest.mark.parametrize("lidar", [False, True])
def test_given_a_drive_when_written_then_clouds_are_in_its_log_if_they_were_asked_for(tmp_path, lidar):
    one = Scenario("test", 0, Centreline.of(800.0), 10.0, [Body("car", 30.0, 0.0)], 0.3, {})
    drive(Drive(one, "zero", output=tmp_path / "drive.mcap", lidar=lidar))
    with LogReader(tmp_path / "drive.mcap") as log:
        found = {name: topic.count for name, topic in log.topics.items()}
    assert found.get("/cloud", 0) == (found["/scan"] if lidar else 0)
    assert found["/scan"] > 3


def test_given_no_folder_when_clouds_are_asked_for_then_the_command_says_where_they_would_go():
    done = CliRunner().invoke(app, ["drive", "--sensors", "lidar"])
    assert done.exit_code == 2
    assert "--sensors lidar: what they see goes into the log; name a folder with -o" in done.output
