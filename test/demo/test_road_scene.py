"""The drawn road: what its messages hold, and that it moves."""

import numpy as np

from torchperf_ros.config.message_types import decode
from torchperf_ros.demo.road_scene import HEIGHT, IMAGE_TYPE, ODOMETRY_TYPE, SPEED_MPS, WIDTH, RoadScene, odometry_cdr


def test_given_a_scene_when_time_passes_then_it_moves_below_the_horizon_and_its_pixels_survive_the_wire() -> None:
    scene = RoadScene()
    before, after = scene.draw(0.0), scene.draw(0.2)
    assert np.array_equal(before[:200], after[:200])
    assert (before[320:] != after[320:]).mean() > 0.01
    image = decode(scene.pixels_cdr(after), IMAGE_TYPE)
    assert (image.height, image.width, image.step, image.encoding) == (HEIGHT, WIDTH, WIDTH * 3, "rgb8")
    assert np.array_equal(image.data.reshape(HEIGHT, WIDTH, 3), after)


def test_given_many_times_when_drawn_then_every_car_stays_drawable() -> None:
    scene = RoadScene(320, 180)
    for at_s in np.linspace(0, 120, 50):
        assert scene.draw(float(at_s)).shape == (180, 320, 3)


def test_given_a_time_when_driven_then_the_odometry_is_there() -> None:
    odometry = decode(odometry_cdr(2.0), ODOMETRY_TYPE)
    assert (odometry.pose.pose.position.x, odometry.twist.twist.linear.x) == (2 * SPEED_MPS, SPEED_MPS)
    assert (odometry.header.frame_id, odometry.child_frame_id, odometry.pose.pose.orientation.w) == (
        "odom",
        "base_link",
        1,
    )
