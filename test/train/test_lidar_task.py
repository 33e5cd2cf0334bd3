"""Drawn scenes, the targets and the loss that are made of them, and how boxes are judged."""

import math

import numpy as np
import pytest
import torch

from torchperf_ros.models.networks import (
    AHEAD_M,
    BESIDE_M,
    CELL_M,
    CLASSES,
    PILLAR_WIDTHS,
    CloudBox,
    spare,
    strongest,
)
from torchperf_ros.train.lidar_task import (
    LEAST_POINTS,
    LidarTask,
    average_precision,
    batch_of,
    draw_cloud,
    focal,
)

CPU = torch.device("cpu")
TASK = LidarTask()


def clouds(count, **options):
    return [draw_cloud("test", number, **options) for number in range(count)]


def test_given_a_seed_and_a_number_when_drawn_twice_then_it_is_the_same_and_others_are_not():
    one, again, number, seed = draw_cloud(1, 2), draw_cloud(1, 2), draw_cloud(1, 3), draw_cloud(2, 2)
    assert all(map(torch.equal, one[:3], again[:3]))
    assert one.kinds == again.kinds
    assert not any(one.points.shape == other.points.shape for other in (number, seed))


def test_given_scenes_when_drawn_then_labels_are_in_the_grid_and_points_lie_on_them():
    for cloud in clouds(20):
        assert cloud.points.dtype == cloud.boxes.dtype == torch.float32
        assert 5000 < len(cloud.points) < 30_000
        x, y, length, width, yaw, _ = cloud.boxes.unbind(1)
        assert ((x >= 0) & (x < AHEAD_M) & (y.abs() < BESIDE_M)).all()
        assert (cloud.counts >= LEAST_POINTS).all()
        raised = cloud.points[cloud.points[:, 2] > 0.2]
        for box in range(len(x)):
            away = raised[:, :2] - torch.stack((x[box], y[box]))
            along = (away[:, 0] * yaw[box].cos() + away[:, 1] * yaw[box].sin()).abs() - length[box] / 2
            across = (away[:, 1] * yaw[box].cos() - away[:, 0] * yaw[box].sin()).abs() - width[box] / 2
            assert (
                (along < 0.6) & (across < 0.6)
            ).sum() >= LEAST_POINTS // 2  # those that drive are smeared
    assert set(torch.cat([cloud.boxes[:, 5] for cloud in clouds(20)]).tolist()) == set(range(len(CLASSES)))


def test_given_an_empty_scene_when_drawn_then_nobody_is_labelled():
    assert [len(cloud.boxes) for cloud in clouds(5, empty=True)] == [0] * 5


def outputs_of(batch, number):
    """What a network that says exactly the targets would give for one cloud of a batch."""
    mine = batch.cells[:, 0] == number
    _, row, column = batch.cells[mine].T
    values, count = batch.values[mine], int(mine.sum())
    rows = np.zeros((count, 7 + len(CLASSES)), np.float32)
    rows[:, 0] = 1.0
    rows[:, 1], rows[:, 2] = (column + values[:, 0]) * CELL_M, (row + values[:, 1]) * CELL_M - BESIDE_M
    rows[:, 3:5], rows[:, 5:7] = values[:, 2:4].exp(), values[:, 4:]
    rows[np.arange(count), 7 + batch.kinds[mine].numpy()] = 1.0
    return strongest(rows, 0.5, 100)


def test_given_targets_when_read_as_outputs_then_the_boxes_are_the_labels_and_score_one():
    drawn = clouds(6)
    batch = batch_of(drawn)
    found = [outputs_of(batch, number) for number in range(6)]
    for boxes, cloud in zip(found, drawn, strict=True):
        for box, label in zip(boxes, cloud.boxes.tolist(), strict=True):
            assert (box.x, box.y, box.length, box.width) == pytest.approx(label[:4], rel=1e-4, abs=1e-4)
            assert math.sin(box.yaw - label[4]) == pytest.approx(0.0, abs=1e-4)
            assert box.class_index == label[5]
    truth = [cloud.boxes.numpy() for cloud in drawn]
    assert [average_precision(found, truth, kind, 1.0) for kind in range(len(CLASSES))] == [1.0] * len(
        CLASSES
    )
    assert (batch.heat[tuple(batch.cells.T)] == 1.0).all()
    assert batch.heat.amax() == 1.0
    assert len(batch_of(clouds(2, empty=True)).cells) == 0


def test_given_boxes_when_judged_then_precision_falls_with_the_false_the_far_and_the_double():
    def box(score, x, kind=0):
        return CloudBox(kind, score, x, 0.0, 4.0, 2.0, 0.0)

    truth = [np.array([[10, 0, 4, 2, 0, 0], [20, 0, 4, 2, 0, 0], [20, 0, 4, 2, 0, 1]], np.float32)]

    def ap(*boxes, near_m=1.0):
        return average_precision([list(boxes)], truth, 0, near_m)

    assert ap(box(0.9, 10), box(0.8, 20)) == 1.0
    assert ap(box(0.9, 10)) == 0.5
    assert ap(box(0.9, 10), box(0.8, 10.1), box(0.7, 20)) == pytest.approx(
        (1 + 2 / 3) / 2
    )  # the second is taken
    assert ap(box(0.9, 50), box(0.8, 10), box(0.7, 20)) == pytest.approx(2 / 3)
    assert ap(box(0.9, 11.5), box(0.9, 20, kind=1)) == 0.0
    assert ap(box(0.9, 11.5), near_m=2.0) == 0.5
    assert ap() == 0.0
    assert math.isnan(average_precision([[]], [truth[0][:0]], 0, 1.0))


def test_given_a_perfect_answer_when_the_loss_is_taken_then_it_is_small_and_grows_with_each_error():
    heat = torch.zeros(1, 5, 5)
    heat[0, 2, 2], heat[0, 2, 3] = 1.0, 0.6
    right = torch.where(heat == 1.0, 8.0, -8.0)
    missed, false = right.clone(), right.clone()
    missed[0, 2, 2], false[0, 0, 0] = -8.0, 8.0
    assert float(focal(right, heat)) < 1e-3
    assert min(float(focal(missed, heat)), float(focal(false, heat))) > 1.0
    near = right.clone()
    near[0, 2, 3] = 8.0
    assert float(focal(near, heat)) < float(focal(false, heat)) / 10


@pytest.mark.parametrize("tier", PILLAR_WIDTHS)
def test_given_an_untrained_network_when_it_begins_then_nowhere_is_a_box_and_every_weight_can_learn(tier):
    network, batch = TASK.network(tier), TASK.batch("test", 0, 2)
    TASK.loss(network, batch, CPU).backward()
    assert [name for name, weight in network.named_parameters() if weight.grad is None] == []
    with torch.inference_mode():
        assert network(spare(draw_cloud("test", 0).points.numpy()))[0, :, 0].max() < 0.1
    assert set(TASK.steps) == set(TASK.rate) == set(TASK.tiers)


def test_given_one_cloud_when_learned_for_a_moment_then_the_loss_falls_and_judging_finds_more_than_before():
    network, batch = TASK.network("fast"), TASK.batch("test", 0, 1)
    before = TASK.judge(network, "test", 1, CPU)
    optimiser = torch.optim.Adam(network.parameters(), 4e-3)
    network.train()
    losses = []
    for _ in range(40):
        optimiser.zero_grad()
        loss = TASK.loss(network, batch, CPU)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]
    after = TASK.judge(network, "test", 1, CPU)
    assert next(iter(after)) == "map"
    assert after["map"] > before["map"]
    assert set(after) == {"map", "map_2m", "false_boxes", *(f"ap_{kind}" for kind in CLASSES)}


def test_given_bfloat16_when_the_loss_is_taken_then_it_is_nearly_the_same():
    network, batch = TASK.network("fast"), TASK.batch("test", 0, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        coarse = TASK.loss(network, batch, CPU).item()
    assert coarse == pytest.approx(TASK.loss(network, batch, CPU).item(), rel=0.02)
