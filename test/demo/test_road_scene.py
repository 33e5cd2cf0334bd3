"""The drawn road: what its messages hold, and that it moves."""

import itertools

import numpy as np
import pytest

from torchperf_ros.core.message_types import decode
from torchperf_ros.demo.road_scene import HEIGHT, IMAGE_TYPE, ODOMETRY_TYPE, SPEED_MPS, WIDTH, RoadScene


@pytest.fixture(scope="module")
def scene() -> RoadScene:
    return RoadScene(10.0)


def test_given_a_scene_when_it_is_encoded_then_an_rgb8_image_decodes_with_the_drawn_pixels(scene: RoadScene) -> None:
    image = decode(scene.image_cdr(1.7), IMAGE_TYPE)
    assert (image.height, image.width, image.step, image.encoding) == (HEIGHT, WIDTH, WIDTH * 3, "rgb8")
    assert np.array_equal(image.data.reshape(HEIGHT, WIDTH, 3), scene.draw(1.7))


def test_given_a_scene_when_time_passes_then_it_moves_below_the_horizon_and_the_sky_stays(scene: RoadScene) -> None:
    before, after = scene.draw(0.0), scene.draw(0.2)
    assert np.array_equal(before[:200], after[:200])
    assert (before[320:] != after[320:]).mean() > 0.01


def test_given_many_times_when_drawn_then_every_car_stays_drawable(scene: RoadScene) -> None:
    for at_s in np.linspace(0, 120, 50):
        assert scene.draw(float(at_s)).shape == (HEIGHT, WIDTH, 3)


def test_given_ten_images_per_second_when_played_then_odometry_still_comes_at_thirty_in_order(scene: RoadScene) -> None:
    second = list(itertools.takewhile(lambda m: m.t_ns < 1_000_000_000, scene.messages()))
    assert [m.t_ns for m in second] == sorted(m.t_ns for m in second)
    assert sum(m.type_name == IMAGE_TYPE for m in second) == 10
    odometries = [m for m in second if m.type_name == ODOMETRY_TYPE]
    assert len(odometries) == 30
    last = decode(odometries[-1].data, ODOMETRY_TYPE)
    assert last.twist.twist.linear.x == SPEED_MPS
    assert last.pose.pose.position.x == pytest.approx(SPEED_MPS * 29 / 30)
