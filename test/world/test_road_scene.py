"""The drawn road: what its messages hold, and that it moves."""

import numpy as np

from torchperf_ros.config.message_types import decode
from torchperf_ros.world.road_scene import HEIGHT, IMAGE_TYPE, WIDTH, RoadScene


def test_given_a_scene_when_time_passes_then_it_moves_below_the_horizon_and_its_pixels_survive_the_wire() -> None:
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
