"""Labels, targets, the score, and a short training that goes on where it was."""

import math

import numpy as np
import pytest
import torch

from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.networks import (
    BOX_FIELDS,
    CLASSES,
    DETECTOR_WEIGHTS,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    DetectorNet,
    build_seeded,
    build_trained,
)
from torchperf_ros.models.road_scene import RoadScene, SceneObject
from torchperf_ros.train import tier_training
from torchperf_ros.train.detector_task import DetectorTask, loss, targets
from torchperf_ros.train.labelled_scenes import DetectionScore, Label, LabelledScenes, labels_of
from torchperf_ros.train.tier_training import (
    TierPlan,
    TrainingFailed,
    read_checkpoint,
    train,
    trained_weights,
)


def test_given_a_seed_and_a_number_when_drawn_again_then_images_and_labels_are_the_same_and_others_differ():
    first, labels = LabelledScenes(3).batch(7, 4)
    again, same = LabelledScenes(3).batch(7, 4)
    assert torch.equal(first, again)
    assert labels == same
    assert first.shape == (4, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
    assert -1.0 <= first.min() < first.max() <= 1.0
    assert not torch.equal(first, LabelledScenes(3).batch(8, 4)[0])
    assert not torch.equal(first, LabelledScenes("held out").batch(7, 4)[0])


@pytest.mark.parametrize("kind", CLASSES)
def test_given_an_object_when_drawn_then_what_changes_in_the_image_is_what_its_label_says(kind):
    size = (640, 360)
    scene, one = RoadScene(*size), SceneObject(12.0, 1.0, (250, 20, 20), kind)
    changed = np.any(scene.draw_objects(0.0, [one]) != scene.draw_objects(0.0, []), axis=2)
    rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
    found = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) * np.tile(
        (IMAGE_WIDTH / 640, IMAGE_HEIGHT / 360), 2
    )
    (label,) = labels_of(scene, size, [one])
    assert label[:4] == pytest.approx(found, abs=1.0)
    assert CLASSES[label.class_index] == kind
    assert label.counts


def test_given_what_hides_an_object_when_labelled_then_it_counts_less_and_at_last_is_gone():
    scene, behind = RoadScene(640, 360), SceneObject(40.0, 0.0, (1, 2, 3))

    def labels(lateral_m, ahead_m=10.0):
        return labels_of(scene, (640, 360), [behind, SceneObject(ahead_m, lateral_m, (9, 9, 9), "truck")])

    assert [label.counts for label in labels(5.0)] == [True, True]
    assert len(labels(0.0)) == 1
    assert [label.counts for label in labels(1.1)] == [False, True]
    assert len(labels_of(scene, (640, 360), [SceneObject(20.0, 0.0, (1, 2, 3), "wall")])) == 0


def perfect(labels):
    """Cells that say just what they are to say."""
    heat, places, wanted = targets(labels)
    cells = torch.full((len(labels), BOX_FIELDS + len(CLASSES), *heat.shape[1:]), -9.0)
    for (image, row, column), (x, y, width, height, kind) in zip(
        places.tolist(), wanted.tolist(), strict=True
    ):
        cells[image, :BOX_FIELDS, row, column] = torch.tensor(
            [9.0, math.log(x / (1 - x)), math.log(y / (1 - y)), width, height]
        )
        cells[image, BOX_FIELDS + int(kind), row, column] = 9.0
    return cells


def answered(cells):
    net = DetectorNet(2)
    net.cells = lambda image: cells
    return net(torch.zeros(len(cells), 3, IMAGE_HEIGHT, IMAGE_WIDTH))


def labelled():
    return [[Label(20.0, 30.0, 61.0, 70.0, 0, True), Label(101.0, 40.0, 131.0, 99.0, 3, True)], []]


def test_given_cells_that_say_what_they_are_to_say_when_decoded_then_the_boxes_are_the_labels_and_the_loss_is_small():
    cells = perfect(labelled())
    outputs = answered(cells)
    found = outputs[0][outputs[0][:, 0] > 0.5]
    size = torch.tensor((IMAGE_WIDTH, IMAGE_HEIGHT))
    corners = torch.cat(
        ((found[:, 1:3] - found[:, 3:5] / 2) * size, (found[:, 1:3] + found[:, 3:5] / 2) * size), dim=1
    )
    assert sorted(corners.round().int().tolist()) == sorted(
        [list(map(int, label[:4])) for label in labelled()[0]]
    )
    assert (outputs[1][:, 0] < 0.5).all()
    assert loss(cells, labelled()) < 0.1 < loss(torch.zeros_like(cells), labelled())


def test_given_detections_when_judged_then_the_precision_is_what_it_is_by_hand():
    right, both = answered(perfect(labelled())), [labelled()[0][:1], []]
    score = DetectionScore()
    score.add(right, labelled())
    assert score.figures()["map"] == pytest.approx(1.0)
    assert (score.false_boxes, score.average_precision(0)) == (0.0, 1.0)
    assert math.isnan(score.average_precision(1))
    score.add(
        right[:1], [[]]
    )  # now a pedestrian and a car where there is nothing: false ones, on an empty image
    assert score.false_boxes == 1.0
    half = DetectionScore()
    half.add(torch.cat((right[:1], right[:1])), [both[0], [Label(300.0, 30.0, 341.0, 70.0, 0, True)]])
    assert half.average_precision(0) == pytest.approx(0.5)  # one of two found, one false at the same score
    open_ones = DetectionScore()
    open_ones.add(right[:1], [[label._replace(counts=False) for label in labelled()[0]]])
    assert math.isnan(open_ones.average_precision(0))


def test_given_a_training_when_written_then_the_adapter_has_scenes_with_objects_beside_the_weights(
    tmp_path,
):
    weights = tmp_path / "own.safetensors"
    DetectorTask().write_examples(weights)
    assert (tmp_path / "own_examples.png").stat().st_size <= 150_000
    scenes = CameraAdapter({"weights": str(weights)}, torch.device("cpu")).score_inputs("fast")
    assert [scene.shape for (scene,) in scenes] == [(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH)] * 8
    drawn, labels = LabelledScenes("examples").batch(0, 32)
    nearest = [int((drawn - scene).abs().mean((1, 2, 3)).argmin()) for (scene,) in scenes]
    assert len(set(nearest)) == 8
    assert all(any(label.counts for label in labels[place]) for place in nearest)
    assert (scenes[0][0] - drawn[nearest[0]]).abs().max() <= 1 / 255 + 1e-6  # rounded to bytes


def test_given_a_training_that_was_ended_when_run_again_then_it_comes_to_the_same_weights(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tier_training, "_JUDGED_EVERY", 2)
    monkeypatch.setattr(tier_training, "_JUDGED_BRIEFLY", 2)
    monkeypatch.setattr(DetectorTask, "batch_size", 2)
    threads = torch.get_num_threads()

    def plan(name):
        return TierPlan("detector", "fast", 4, 1, "cpu", 2, tmp_path / name)

    class Ended(Exception):
        pass

    def end(step):
        raise Ended

    try:
        whole = train(DetectorTask(), plan("whole"), lambda step: None)
        monkeypatch.setattr(tier_training, "_REPORTED_EVERY", 4)
        monkeypatch.setattr(tier_training, "_KEPT_EVERY_S", 0.0)
        with pytest.raises(Ended):
            train(DetectorTask(), plan("ended"), end)
        assert read_checkpoint(plan("ended"))["step"] == 3, "kept by time, between two judgements"
        result = train(DetectorTask(), plan("ended"), lambda step: None)
    finally:
        torch.set_num_threads(threads)
    assert [step for step, _, _ in result.curve] == [step for step, _, _ in whole.curve] == [2, 4]
    ended, expected = trained_weights(plan("ended")), trained_weights(plan("whole"))
    assert all(torch.equal(ended[name], expected[name]) for name in expected)
    net = build_seeded(lambda: DetectorNet(12))
    net.load_state_dict(expected)
    assert not torch.equal(net.head[-1].weight, build_seeded(lambda: DetectorNet(12)).head[-1].weight)


def weights_after(tmp_path, name, steps=2, **changes):
    plan = TierPlan("detector", "fast", steps, 1, "cpu", 1, tmp_path / name, **changes)
    result = train(DetectorTask(), plan, lambda *_: None)
    return trained_weights(plan), result


def test_given_no_room_when_a_checkpoint_is_written_then_the_error_says_so_and_the_one_before_stays(
    tmp_path, limited
):
    plan = TierPlan("detector", "fast", 1, 1, "cpu", 1, tmp_path / "kept")
    tier_training.write_checkpoint(plan, {"step": 1})
    too_large = pytest.raises(TrainingFailed, match="kept cannot be written: File too large; mend that")
    with limited("FSIZE", 1000), too_large:
        tier_training.write_checkpoint(plan, {"step": 2, "net": torch.zeros(1000)})
    assert read_checkpoint(plan)["step"] == 1
    assert not (tmp_path / "kept.part").exists()


def test_given_a_loader_when_trained_then_the_weights_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(DetectorTask, "batch_size", 2)
    monkeypatch.setattr(tier_training, "_JUDGED_BRIEFLY", 1)
    torch.set_num_threads(1)
    plain, _ = weights_after(tmp_path, "plain")
    loaded, _ = weights_after(tmp_path, "loaded", loaders=1)
    assert all(torch.equal(plain[name], loaded[name]) for name in plain)


def test_given_a_teacher_or_weights_to_prune_when_trained_then_it_starts_near_to_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(DetectorTask, "batch_size", 2)
    task, batch = DetectorTask(), DetectorTask().batch(1, 0, 4)
    net = build_trained(lambda: DetectorNet(12), "fast", DETECTOR_WEIGHTS)
    alone = task.loss(net, batch, torch.device("cpu"))
    task.learn_from(net)
    assert torch.allclose(
        task.loss(net, batch, torch.device("cpu")), alone + own_answers(net, batch), rtol=1e-3
    )
    pruned, result = weights_after(tmp_path, "pruned", steps=1, start=DETECTOR_WEIGHTS, prune=0.25)
    assert result.width == 9
    assert pruned["head.0.weight"].shape == (18, 18, 3, 3)
    _, taught = weights_after(tmp_path, "taught", steps=1, teacher=DETECTOR_WEIGHTS)
    assert taught.width == 12


def own_answers(net, batch):
    """What imitating oneself costs: nothing but the entropy of the own classes."""
    cells = net.cells(batch[0])
    score = torch.sigmoid(cells[:, 0])
    weight = (score > 0.1) * score
    chosen = torch.log_softmax(cells[:, BOX_FIELDS:], dim=1)
    return (weight * -(chosen.exp() * chosen).sum(1)).sum() / ((score > 0.1) * score).sum().clamp(min=1.0)
