"""Drives that the planner imitates, what it reads of them, its loss, and how it is judged."""

import math
import random

import numpy as np
import pytest
import torch

from torchperf_ros.api.adapter import Received
from torchperf_ros.api.messages import decode, encode
from torchperf_ros.models.closed_loop import ODOMETRY, odometry_message
from torchperf_ros.models.detection_messages import MARKER_ARRAY, ImageFrame, MarkerArrays
from torchperf_ros.models.networks import HISTORY_FRAMES, NEAREST, OBJECT_FIELDS, WAYPOINTS
from torchperf_ros.models.planner import PlannerAdapter
from torchperf_ros.models.road_scene import HEIGHT, WIDTH
from torchperf_ros.train import planner_task as tested
from torchperf_ros.train.planner_task import (
    Examples,
    ImitatedCamera,
    PlannerTask,
    drive,
    examples_of,
    relative,
)
from torchperf_ros.world.scenarios import draw_scenario
from torchperf_ros.world.world import World

CPU = torch.device("cpu")
CCRB = 2  # drives of this scenario


@pytest.fixture(autouse=True)
def few_drives_on_one_thread(monkeypatch):
    monkeypatch.setattr(tested, "_DRIVES", 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other in layers as small as these
    yield
    torch.set_num_threads(threads)


def test_given_a_seed_and_a_number_when_drawn_again_then_examples_are_the_same_and_others_differ():
    task = PlannerTask()
    first, again = task.batch(3, 7, 5), PlannerTask().batch(3, 7, 5)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert [len(part) for part in first] == [5] * 4
    assert not torch.equal(first[0], task.batch(3, 8, 5)[0])
    assert not torch.equal(first[0], task.batch("held out", 7, 5)[0])


def test_given_a_drive_when_its_messages_go_through_the_adapter_then_it_makes_the_same_features_of_them():
    adapter, examples = PlannerAdapter({}, CPU), examples_of(3, CCRB)
    seen = 0
    for index, tick in zip(range(HISTORY_FRAMES), drive(3, CCRB), strict=False):
        stamp_ns = 1_000_000_000 + tick.at_ns
        markers = MarkerArrays(tick.fov_deg).build(tick.seen, ImageFrame(stamp_ns, "camera", WIDTH, HEIGHT))
        odometry = decode(bytes(encode(odometry_message(*tick.vehicle, stamp_ns), ODOMETRY)), ODOMETRY)
        messages = {
            "detections": Received(
                decode(bytes(encode(markers, MARKER_ARRAY)), MARKER_ARRAY), stamp_ns, 0.0
            ),
            "odom": Received(odometry, stamp_ns, 0.0),
        }
        adapter.observe(messages)
        history, mask, ego = adapter.preprocess(messages)
        assert torch.equal(history[0, -1], examples.features[index])
        assert torch.equal(ego[0], examples.ego[index])
        seen += len(tick.seen)
    assert torch.equal(history[0], examples.features[:HISTORY_FRAMES])
    assert mask.all()
    assert seen > HISTORY_FRAMES / 2


@pytest.mark.parametrize(("ahead_m", "off_m"), [(15.0, 0.5), (40.0, 3.0)])
def test_given_a_car_when_the_camera_finds_it_then_it_is_placed_where_it_is_or_missed_now_and_then(
    ahead_m, off_m
):
    scenario = draw_scenario("ccrs", 1)
    scenario.bodies[0].s, scenario.bodies[0].d = ahead_m, 2.0
    world, found = World(scenario), []
    for seed in range(200):
        visible, seen = ImitatedCamera(random.Random(seed)).look(world, [0, 1])
        assert visible == [0]  # the other one is behind
        found += [MarkerArrays(65.24).box_m(one, WIDTH, HEIGHT) for one in seen]
    x, _, z, *_ = np.array(found).T
    assert 180 < len(found) < 200
    assert (z.mean(), x.mean()) == (pytest.approx(ahead_m, rel=0.07), pytest.approx(-2.0, abs=0.2))
    assert 0.2 * off_m < z.std() < off_m


def test_given_a_vehicle_that_drives_north_when_a_plan_is_put_in_its_frame_then_ahead_is_x():
    plan = np.tile((10.0, 25.0, math.radians(100.0), 3.0), (WAYPOINTS + 1, 1))
    poses = relative(plan, (10.0, 20.0, math.radians(90.0), 4.0, 0.0))
    assert poses.shape == (WAYPOINTS, 4)
    assert poses[0] == pytest.approx((5.0, 0.0, math.radians(10.0), 3.0))
    plan[:, 2] -= 2 * math.pi  # the same heading
    assert relative(plan, (10.0, 20.0, math.radians(90.0), 4.0, 0.0))[0, 2] == pytest.approx(
        math.radians(10.0)
    )


def test_given_a_drive_when_learned_from_then_plans_begin_where_the_vehicle_is_and_some_brake_hard():
    examples = examples_of(3, CCRB)
    ego, plans = examples.ego, examples.plans
    assert torch.allclose(plans[:, 0, 0], 0.1 * ego[:, 0], atol=0.1)
    assert (plans[:, :, 3] >= 0.0).all()
    assert (ego[:, 0] - plans[:, -1, 3]).max() > 3.0
    assert min(examples.since) == 1


def test_given_a_mirror_when_an_example_is_turned_round_then_everything_left_is_right(monkeypatch):
    def example(share):
        monkeypatch.setattr(tested, "_MIRRORED", share)
        history, mask, ego, plan = (part[0] for part in PlannerTask().batch(3, 1, 1))
        return (
            history[:, : NEAREST * OBJECT_FIELDS].view(-1, NEAREST, OBJECT_FIELDS),
            history[:, -2:],
            mask,
            ego,
            plan,
        )

    objects, motion, mask, ego, plan = example(0.0)
    turned_objects, turned_motion, same, turned_ego, turned_plan = example(1.0)
    assert torch.equal(mask, same)
    assert torch.equal(objects * torch.tensor([1.0, -1.0, 1.0, 1.0, 1.0, 1.0]), turned_objects)
    for one, turned in ((motion, turned_motion), (ego, turned_ego)):
        assert torch.equal(one * torch.tensor([1.0, -1.0]), turned)
    assert torch.equal(plan * torch.tensor([1.0, -1.0, -1.0, 1.0]), turned_plan)


def test_given_frames_after_a_push_when_cut_out_then_the_history_knows_nothing_of_before(monkeypatch):
    monkeypatch.setattr(tested, "_GAP", 0.0)
    monkeypatch.setattr(tested, "_SHORTENED", 0.0)
    features = torch.arange(1.0, 4.0).view(3, 1).expand(3, 50)
    task, made = (
        PlannerTask(),
        Examples(features, torch.ones(3, 2), torch.zeros(3, WAYPOINTS, 4), [1, 1, 2]),
    )
    monkeypatch.setattr(tested, "examples_of", lambda *_: made)
    history, mask, _, _ = task.batch(0, 0, 30)
    known = {
        tuple(rows[-2:, 0].tolist()): one.sum().item() for rows, one in zip(history, mask, strict=True)
    }
    assert known == {(0.0, 1.0): 1, (0.0, 2.0): 1, (2.0, 3.0): 2}


def test_given_a_few_steps_when_trained_then_the_loss_falls_and_early_exits_count():
    task = PlannerTask()
    net, batch = task.network("fast"), task.batch(3, 0, 8)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    losses = []
    for _ in range(40):
        loss = task.loss(net, batch, CPU)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    *inputs, plans = batch
    steps = list(net.steps(*inputs))
    assert torch.equal(steps[-1], net(*inputs))
    assert task.loss(net, batch, CPU) > tested.plan_error(steps[-1], plans)


class Told(torch.nn.Module):
    """Plans that are 1 m off at first, and in the end 0 m for one example and 3 m for another."""

    def steps(self, history, mask, ego):
        yield torch.ones(2, WAYPOINTS, 4)
        yield torch.zeros(2, WAYPOINTS, 4)
        last = torch.zeros(2, WAYPOINTS, 4)
        last[1, -1, 1] = 3.0
        yield last


def test_given_plans_when_judged_then_the_figures_are_what_they_are_by_hand(monkeypatch):
    nothing = torch.zeros(2, 1), torch.zeros(2, 1), torch.zeros(2, 2), torch.zeros(2, WAYPOINTS, 4)
    monkeypatch.setattr(PlannerTask, "batch", lambda self, seed, number, count: nothing)
    score = PlannerTask().judge(Told(), "held out", 2, CPU)
    assert next(iter(score)) == "fde"
    assert score == pytest.approx(
        {"fde": 1.5, "ade": 1.5 / WAYPOINTS, "miss": 0.5, "fde_1": math.sqrt(2.0), "fde_2": 0.0}
    )
