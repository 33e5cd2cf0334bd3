"""The lidar's network.

Any number of points in one program, whatever their order, and boxes where its cells say so.
"""

import math

import numpy as np
import pytest
import torch

from torchperf_ros.engines.package_engine import export
from torchperf_ros.models import pillars
from torchperf_ros.models.networks import CLASSES, build_seeded
from torchperf_ros.models.pillars import (
    BESIDE_M,
    CELL_M,
    GRID_COLUMNS,
    GRID_ROWS,
    MAP_FIELDS,
    MOST_POINTS,
    SPARE_POINTS,
    PillarNet,
    spare,
    strongest,
)

CELLS = GRID_ROWS * GRID_COLUMNS


def seeded(tier):
    return build_seeded(lambda: PillarNet(pillars.PILLAR_WIDTHS[tier]))


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
