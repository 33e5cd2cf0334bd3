"""What moves, what is seen, and who is to blame."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import decode
from torchperf_ros.models.closed_loop import (
    FRAME,
    MARKER_ARRAY,
    SCAN,
    Centreline,
    objects_of,
    path_bytes,
    plan_along,
)
from torchperf_ros.models.point_cloud import CLOUD, at_stamp, read_cloud
from torchperf_ros.models.road_scene import HEIGHT, IMAGE_TYPE, WIDTH, RoadScene
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.tools.main import app
from torchperf_ros.world.loop import Drive, drive
from torchperf_ros.world.scenarios import LANE_M, SCENARIOS, TRAFFIC, Scenario, describe, draw_scenario
from torchperf_ros.world.sensors import BEAMS, LIDAR_RANGE_M, MOUNTED_M, RINGS, Pose, Sensors, scan, sweep
from torchperf_ros.world.vehicles import MOST_BRAKING, NO_PLAN_BRAKING, Body, Vehicle, overlap
from torchperf_ros.world.world import World

S = 1_000_000_000


def scenario(*bodies, speed=20.0, lane=None, duration_s=30.0):
    return Scenario("test", 0, lane or Centreline.of(800.0), speed, list(bodies), duration_s, {})


def world_after(seconds, *bodies, **options):
    world = World(scenario(*bodies, **options))
    world.advance(world.start_ns + round(seconds * S))
    return world


def path(plan, at_ns):
    return path_bytes(plan, FRAME, at_ns, at_ns)


def keep(world, wanted, seconds):
    """Plan anew 20 times a second without any latency."""
    end_ns = world.start_ns + round((world.now_s + seconds) * S)
    at_ns = world.start_ns + round(world.now_s * S)
    while at_ns < end_ns and not world.over:
        v = world.vehicle
        world.take(
            path(
                plan_along(world.scenario.lane, (v.x, v.y, v.yaw, v.speed), np.empty((0, 7)), wanted, 2.0),
                at_ns,
            )
        )
        at_ns += S // 20
        world.advance(at_ns)


def test_given_no_plan_when_the_first_three_seconds_are_over_then_the_vehicle_brakes():
    world = world_after(6.0)
    assert world.vehicle.acceleration == pytest.approx(-NO_PLAN_BRAKING)
    assert 10.0 < world.vehicle.speed < 15.0


def test_given_plans_when_followed_then_speed_and_lane_are_those_of_the_plans():
    world = World(scenario(speed=15.0, lane=Centreline.of(600.0, 30.0, 150.0, 120.0)))
    keep(world, 15.0, 12.0)
    assert world.vehicle.speed == pytest.approx(15.0, abs=0.3)
    assert world.progress_m == pytest.approx(180.0, abs=2.0)
    assert abs(world.scenario.lane.place(np.array([[world.vehicle.x, world.vehicle.y]]))[0, 1]) < 0.3
    assert not world.seen.left_road


def test_given_a_plan_that_brakes_when_followed_then_its_effect_begins_after_the_delay_and_it_ends_at_a_standstill():
    vehicle = Vehicle(speed=10.0)
    times = np.arange(0.0, 4.0, 0.1)
    along = np.where(times < 10 / 6, 10 * times - 3 * times**2, 25 / 3)
    vehicle.follow(np.column_stack((along, np.zeros_like(along))), times)
    speeds = []
    for step in range(400):
        vehicle.step(step * 0.01)
        speeds.append(vehicle.speed)
    assert speeds[13] == 10.0
    assert speeds[25] < 9.8
    assert speeds[-1] == 0.0
    assert np.diff(speeds).min() >= -MOST_BRAKING * 0.01 - 1e-9


def test_given_a_path_that_has_ended_when_the_clock_steps_back_then_it_is_not_driven_again_unless_it_is_taken_again():
    vehicle, times = Vehicle(speed=5.0), np.linspace(0.0, 1.0, 11)
    points = np.column_stack((5.0 * times - 2.5 * times**2, np.zeros(11)))
    vehicle.follow(points, times)
    for step in range(300):
        vehicle.step(step * 0.01)
    assert vehicle.speed == 0.0
    for step in range(100):
        vehicle.step(step * 0.01)
    assert vehicle.speed == 0.0
    vehicle.follow(points + (3.0, 0.0), times)
    for step in range(60):
        vehicle.step(step * 0.01)
    assert vehicle.speed > 0.5


def test_given_a_plan_of_nan_when_taken_then_it_is_refused_and_the_last_one_stays():
    world = World(scenario())
    world.take(path(np.full((31, 4), math.nan), world.start_ns))
    world.advance(world.start_ns + S)
    assert world.vehicle.refused == 1
    assert world.vehicle.speed == pytest.approx(20.0)


@given(
    x=st.floats(-6, 6),
    y=st.floats(-6, 6),
    yaw=st.floats(-3.2, 3.2),
    sizes=st.tuples(*[st.floats(0.5, 5.0)] * 4),
)
@settings(max_examples=200)
def test_given_two_boxes_when_asked_whether_they_overlap_then_it_is_as_with_points_inside(x, y, yaw, sizes):
    one, other = (0.0, 0.0, 0.0, *sizes[:2]), (x, y, yaw, *sizes[2:])
    assert overlap(one, other) == overlap(other, one)
    grid = np.stack(np.meshgrid(*[np.linspace(-0.5, 0.5, 15)] * 2), axis=-1).reshape(-1, 2) * sizes[2:]
    c, s = math.cos(yaw), math.sin(yaw)
    points = grid @ np.array([[c, s], [-s, c]]) + (x, y)
    inside = (np.abs(points) <= np.array(sizes[:2]) / 2).all(axis=1).any()
    assert overlap(one, other) or not inside
    far = math.hypot(x, y) > 0.5 * (math.hypot(*sizes[:2]) + math.hypot(*sizes[2:]))
    assert not (far and overlap(one, other))


@pytest.mark.parametrize(
    ("body", "hit"),
    [
        (Body("car", 40.0, 0.0), "car"),  # ran into
        (Body("car", -8.0, 0.0, speed=30.0), ""),  # hits from behind
        (Body("car", 40.0, 3.5), ""),  # beside
        (Body("wall", 40.0, 0.0, length=0.5), "wall"),
        (Body("pedestrian", 43.0, -2.0, across=1.0, length=0.5, width=0.5), "pedestrian"),
    ],
)
def test_given_a_contact_when_the_vehicle_moves_into_it_then_it_is_to_blame(body, hit):
    world = world_after(2.9, body)
    assert world.seen.hit == hit
    assert (world.seen.impact_ms > 15.0) == bool(hit)
    assert world.over == bool(hit)


@pytest.mark.parametrize(("aside", "hit"), [(0.5, ""), (1.2, "car")])
def test_given_a_contact_beside_when_the_vehicle_is_between_lanes_then_it_is_to_blame(aside, hit):
    world = World(scenario(Body("car", -1.6, aside + 1.8, speed=20.0), speed=20.0))
    world.vehicle.y = aside
    world.advance(world.start_ns + S // 50)
    assert world.seen.hit == hit
    assert world.seen.touched == (set() if hit else {0})


def test_given_a_slower_car_then_the_route_leads_past_it_once_nobody_comes_or_at_once_where_it_is_hasty():
    slower, coming = (
        Body("car", 40.0, 0.0, speed=10.0),
        Body("car", 150.0, LANE_M, speed=-20.0, turned=math.pi),
    )
    world = World(replace(scenario(slower, coming, speed=20.0), overtakes=0))
    assert world.route() == 0.0
    hasty = World(replace(scenario(slower, coming, speed=20.0), overtakes=0))
    assert hasty.route(hasty=True) == LANE_M
    coming.s = -20.0
    assert world.route() == LANE_M
    world.vehicle.x = slower.s + 5.0
    assert world.route() == LANE_M
    world.vehicle.x = slower.s + 20.0
    assert world.route() == 0.0
    assert world.route(hasty=True) == 0.0, "it has been passed"
    assert World(scenario(slower)).route(hasty=True) == 0.0


def test_given_a_lane_with_a_bend_then_the_one_beside_it_is_as_far_away_all_along():
    lane = Centreline.of(400.0, 50.0, 100.0, 120.0)
    beside = lane.beside(LANE_M)
    assert np.abs(lane.place(beside.points)[:, 1] - LANE_M).max() < 0.1
    assert lane.beside(0.0) is lane


def test_given_a_standing_vehicle_when_it_is_driven_into_then_it_is_not_to_blame():
    world = world_after(3.0, Body("car", 30.0, 0.0, speed=-10.0), speed=0.0)
    assert world.seen.hit == ""
    assert world.seen.touched == {0}


def test_given_a_stopped_car_ahead_when_time_passes_then_time_to_collision_is_distance_over_speed():
    world = world_after(1.0, Body("car", 3.5 + 50.0 + 2.25, 0.0))
    assert world.ttc_s == pytest.approx((50.0 - 20.0) / 20.0, abs=0.11)
    assert world.seen.min_ttc_s == world.ttc_s


def test_given_traffic_when_the_one_ahead_brakes_then_it_follows_without_touching():
    follower = Body("car", -40.0, 0.0, speed=20.0, wanted=20.0)
    world = World(scenario(follower))
    keep(world, 0.0, 12.0)
    assert world.vehicle.speed < 0.3
    assert world.seen.touched == set()
    assert follower.speed < 2.0


def test_given_a_script_when_its_time_comes_then_a_body_brakes_and_changes_lanes():
    body = Body(
        "car",
        100.0,
        0.0,
        speed=10.0,
        brake_at_s=1.0,
        braking=5.0,
        move_at_s=1.0,
        move_to_m=3.5,
        move_speed=1.0,
    )
    world_after(6.0, body)
    assert (body.speed, body.d) == (0.0, pytest.approx(3.5))
    assert body.s == pytest.approx(120.0, abs=0.2)


def test_given_boxes_when_scanned_then_ranges_are_to_their_sides_and_what_is_hidden_is_not_seen():
    boxes = np.array(
        [
            [20.0, 0, 0, 0, 0, 4, 2],
            [40.0, 0, 0, 0, 0, 4, 2],
            [0, 30.0, 0, 0, 0, 2, 10],
            [300, 0, 0, 0, 0, 4, 2],
        ]
    )
    ranges, hit = scan(boxes, 0.0, 0.0, 0.0)
    assert len(ranges) == BEAMS
    assert ranges[BEAMS // 2] == pytest.approx(18.0)
    assert set(hit.tolist()) == {-1, 0, 2}
    assert hit[BEAMS // 2] == 0
    assert np.isinf(ranges).any()


def test_given_a_scanner_within_a_box_then_it_sees_nothing_of_it():
    ranges, hit = scan(np.array([[0.0, 0, 0, 0, 0, 4, 2]]), 0.0, 0.0, 0.0)
    assert np.isinf(ranges).all()
    assert set(hit.tolist()) == {-1}


def test_given_a_turned_vehicle_when_it_scans_then_ranges_turn_with_it():
    boxes = np.array([[0.0, 20.0, 0, 0, 0, 4, 4]])
    assert scan(boxes, 0.0, 0.0, math.pi / 2)[0][BEAMS // 2] == pytest.approx(18.0)


def test_given_a_wall_when_sensors_send_then_it_is_in_the_scan_and_no_object():
    world = World(scenario(Body("wall", 20.0, 0.0), Body("car", 60.0, 5.0)))
    sent = {topic: (kind, data) for topic, kind, data in Sensors(world).messages(world.start_ns)}
    array = decode(sent["objects_in_sight"][1], MARKER_ARRAY)
    assert {marker.id for marker in array.markers} == {1}
    ranges = decode(sent["scan"][1], SCAN).ranges
    assert ranges[BEAMS // 2 - 5 : BEAMS // 2 + 6] == pytest.approx(20.0 - 2.25, abs=0.1)
    assert ranges[BEAMS // 2 - 5 : BEAMS // 2 + 6].std() == pytest.approx(0.02, abs=0.015)
    assert list(sent) == ["odom", "objects_in_sight", "scan"]  # the trigger last


def test_given_a_radar_when_sensors_send_then_echoes_have_what_is_hit_and_its_radial_velocity():
    world = World(
        scenario(Body("car", 30.0, 0.0, speed=9.0), Body("car", 20.0, 10.0, across=-5.0, turned=1.57))
    )
    sent = {topic: data for topic, _, data in Sensors(world, radar=True).messages(world.start_ns)}
    ahead, beside = objects_of(decode(sent["echoes"], MARKER_ARRAY))
    assert ahead[:2] == pytest.approx((27.75, 0.0), abs=0.1)
    assert ahead[3:5] == pytest.approx((9.0, 0.0), abs=0.1)
    assert ahead[6] == pytest.approx(1.9, abs=0.3)
    assert math.hypot(*beside[3:5]) < 3.0  # of 5 m/s, most of them across the beam


def test_given_a_camera_when_sensors_send_then_what_is_ahead_is_drawn_where_it_is():
    world = World(scenario(Body("car", 12.0, 0.0)))
    image, other = (
        decode(
            dict((topic, data) for topic, _, data in Sensors(each, camera=True).messages(0))["image"],
            IMAGE_TYPE,
        )
        for each in (world, World(scenario()))
    )
    changed = (image.data != other.data).reshape(image.height, image.width, 3).any(axis=2)
    rows, columns = np.nonzero(changed)
    assert abs(columns.mean() - image.width / 2) < 3
    assert rows.min() > image.height / 3
    assert 0.02 < changed.mean() < 0.2


@pytest.mark.parametrize("name", [*SCENARIOS, *TRAFFIC])
def test_given_a_scenario_when_drawn_twice_then_it_is_the_same_and_another_seed_is_another(name):
    one, again, other = (draw_scenario(name, seed) for seed in (1, 1, 2))
    assert one.drawn == again.drawn != other.drawn
    assert one.bodies == again.bodies
    assert describe(name)[1]
    assert 8.0 < one.duration_s < 30.0


@pytest.mark.parametrize("name", [*SCENARIOS, "overtake"])
def test_given_a_scenario_when_nobody_brakes_then_there_is_a_collision(name):
    for seed in (1, 2, 3):
        world = World(draw_scenario(name, seed))
        keep(world, world.scenario.speed, world.scenario.duration_s)
        assert world.seen.hit in {"car", "pedestrian"}, seed
        assert world.now_s > 2.0


def test_given_an_unknown_scenario_when_drawn_then_the_error_lists_those_that_there_are():
    with pytest.raises(ConfigError, match="scenario 'moon' is not there; it has to be one of: ccrs, ccrm"):
        draw_scenario("moon", 1)


def test_given_a_scene_when_time_passes_then_it_moves_below_the_horizon_and_its_pixels_survive_the_wire():
    width, height = WIDTH // 2, HEIGHT // 2
    scene = RoadScene(width, height)
    before, after = scene.draw(0.0), scene.draw(0.2)
    assert np.array_equal(before[:100], after[:100])
    assert (before[160:] != after[160:]).mean() > 0.01
    image = decode(scene.pixels_cdr(after), IMAGE_TYPE)
    assert (image.height, image.width, image.step, image.encoding) == (height, width, width * 3, "rgb8")
    assert np.array_equal(image.data.reshape(height, width, 3), after)
    for at_s in np.linspace(0, 120, 50):  # wherever the cars are
        assert scene.draw(float(at_s)).shape == (height, width, 3)


# -- what a lidar sees of it


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
    assert np.hypot(ground[:, 0], ground[:, 1]).max() < LIDAR_RANGE_M
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
