"""How the reference detector learns.

What its cells are to say of an image, and what it costs where they do not.
"""

import importlib.util
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from torchperf_ros.api.adapter import Task
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.models.camera import examples_of
from torchperf_ros.models.networks import (
    BOX_FIELDS,
    CLASSES,
    DETECTOR_WIDTHS,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    STRIDE,
    DetectorNet,
    build_seeded,
    tier_width,
)
from torchperf_ros.train.labelled_log import LabelledLog, LoggedImages
from torchperf_ros.train.labelled_scenes import (
    LEAST_HEIGHT_PX,
    THRESHOLD,
    DetectionScore,
    Label,
    LabelledScenes,
)

_ROWS, _COLUMNS = IMAGE_HEIGHT // STRIDE, IMAGE_WIDTH // STRIDE
_WIDTH_OF_PEAK: Final = 1 / 6  # standard deviation, of the box's size
_LEAST_PEAK: Final = 0.3  # cells
_BOX_WEIGHT: Final = 2.0
_PRIOR: Final = 0.01  # of a cell to hold a box: what an untrained head says
_IMAGES_JUDGED_AT_ONCE: Final = 25
_EXAMPLES, _EXAMPLES_OF = 8, 32
_BEYOND: Final = 1e-3  # channels: torch-pruning cuts what is left of a layer down to whole ones
_TAUGHT_FROM: Final = 0.1  # score of the teacher's cells whose boxes and classes are imitated
_DRAWN: Final = """\
Finds objects ({classes}) in images of the drawn road (`torchperf_ros/models/road_scene.py`), {width}x{height}.
It has never seen a photograph: on a real road its boxes mean nothing.

Judged on {judged} images of a seed that it was not trained with."""
_LOGGED: Final = """\
Finds objects ({classes}) in images as in `{log}`, topic `{topic}`, at {width}x{height}.
It has learned from {lines} labelled ones (`{labels}`), but for the last fifth of them.

Judged on that last fifth."""
_CARD: Final = """\
# The detector

{what} `map` is the mean average precision at an overlap of
0.5 (PASCAL VOC), `ap_...` that of a class, of boxes at least {least:g} pixels high of which a third is seen.
`false_boxes` are those above a score of {threshold:g}, for each image that holds nothing.
A figure is `nan` where no image shows it.
"""


class Labelled(Protocol):
    """Where images with labels come from: `LabelledScenes`, or a user's log."""

    def batch(self, number: int, count: int) -> tuple[Tensor, list[list[Label]]]:
        """Images [count, 3, 256, 448] float in -1..1, and the labels of each."""


class DetectorTask(Task):
    """Trains `DetectorNet`, see `Task`."""

    name = "detector"
    tiers: Mapping[str, int] = DETECTOR_WIDTHS
    steps: Mapping[str, int] = {"full": 1300, "medium": 1200, "fast": 2800}
    batch_size = 16
    rate: Mapping[str, float] = {tier: min(3e-3, 0.07 / width) for tier, width in DETECTOR_WIDTHS.items()}
    judged = 500
    gradient = 5.0

    def __init__(self, log: LabelledLog | None = None) -> None:
        """Learn from a log's labelled images, or from drawn ones where there is none."""
        self._log, self._sources = log, dict[int | str, Labelled]()
        self.teacher: Any = None

    def network(self, tier: str, width: int | None = None) -> DetectorNet:
        """A network that finds nothing yet (Lin et al., "Focal Loss for Dense Object Detection", 2017)."""
        net = build_seeded(lambda: DetectorNet(width or tier_width(tier, DETECTOR_WIDTHS)))
        with torch.no_grad():
            net.head[-1].get_parameter("bias")[0] = -math.log((1 - _PRIOR) / _PRIOR)
        return net.requires_grad_(requires_grad=True).train()

    # as `Task` has them
    def pruned(self, network: Any, share: float) -> tuple[DetectorNet, int]:  # noqa: ANN401
        """By groups of channels that depend on each other (Fang et al., "DepGraph", 2023)."""
        if importlib.util.find_spec("torch_pruning") is None:
            raise ConfigError("torch-pruning is not installed: pip install 'torchperf-ros[train]'")
        import torch_pruning

        before = network.fine[0].out_channels
        width = max(1, round(before * (1.0 - share)))
        example = torch.zeros(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
        pruner = torch_pruning.pruner.MagnitudePruner(
            _Cells(network),
            example,
            importance=torch_pruning.importance.GroupMagnitudeImportance(),
            pruning_ratio=1.0 - (width + _BEYOND) / before,
            ignored_layers=[network.head[-1]],
        )
        pruner.step()
        found = DetectorNet(width)
        found.load_state_dict(network.state_dict())
        return found.requires_grad_(requires_grad=True).train(), width

    def learn_from(self, teacher: Any) -> None:  # noqa: ANN401 - as `Task` has it
        """Have cells be like the teacher's, too."""
        self.teacher = teacher

    def batch(self, seed: int | str, number: int, count: int) -> tuple[Tensor, list[list[Label]]]:
        """Images and labels, see `Labelled.batch`."""
        if seed not in self._sources:
            self._sources[seed] = (
                LabelledScenes(seed) if self._log is None else LoggedImages(self._log, seed)
            )
        return self._sources[seed].batch(number, count)

    # as `Task` has them
    def loss(self, network: Any, batch: Any, device: torch.device) -> Tensor:  # noqa: ANN401
        """`loss` of the labels, and how far from the teacher's cells where there is one."""
        images, labels = batch[0].to(device), batch[1]
        cells = network.cells(images)
        total = loss(cells, labels)
        if self.teacher is None:
            return total
        with torch.no_grad():
            taught = self.teacher.cells(images)
        return total + _beside(cells.float(), taught.float())

    def judge(
        self, call: Callable[..., Any], seed: int | str, count: int, device: torch.device
    ) -> dict[str, float]:
        """See `DetectionScore.figures`."""
        score = DetectionScore()
        for begin in range(0, count, _IMAGES_JUDGED_AT_ONCE):
            images, labels = self.batch(seed, begin, min(_IMAGES_JUDGED_AT_ONCE, count - begin))
            if not labels:  # a log has no more of them
                break
            for place, own in enumerate(labels):  # an engine takes one image
                score.add(call(images[place : place + 1].to(device)), [own])
        return score.figures()

    def write_examples(self, weights: Path) -> None:
        """Images with objects for `CameraAdapter.score_inputs`.

        Of some the 8 that make the smallest file, no noise.
        """
        images, labels = self.batch("examples", 0, _EXAMPLES_OF)
        shown = [
            image for image, own in zip(images, labels, strict=True) if any(label.counts for label in own)
        ]
        pixels = [
            ((image + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy() for image in shown
        ]
        if pixels:
            smallest = sorted(pixels, key=lambda one: len(_png([one])))[:_EXAMPLES]
            examples_of(weights).write_bytes(_png(smallest))

    def card(self, judged: int) -> str:
        size, log = {"classes": ", ".join(CLASSES), "width": IMAGE_WIDTH, "height": IMAGE_HEIGHT}, self._log
        what = _DRAWN.format(judged=judged, **size)
        if log is not None:
            what = _LOGGED.format(
                log=log.log, topic=log.topic, lines=len(log.labels), labels=log.path, **size
            )
        return _CARD.format(what=what, least=LEAST_HEIGHT_PX, threshold=THRESHOLD)


class _Cells(nn.Module):
    """What the head gives, without the indices of the decoder, which cannot be pruned."""

    def __init__(self, network: DetectorNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        return self.network.cells(image)


def loss(cells: Tensor, labels: Sequence[Sequence[Label]]) -> Tensor:
    """CenterNet's (Zhou et al., 2019).

    A focal loss of the scores, L1 of places and logarithmic sizes, cross-entropy.

    Args:
        cells: of `DetectorNet.cells`, [batch, 9, 32, 56].
        labels: of each image; those that need not be found are learned where they can be.
    """
    heat, places, wanted = (part.to(cells.device) for part in targets(labels))
    score = torch.sigmoid(cells[:, 0].float()).clamp(1e-4, 1 - 1e-4)
    hit = (1 - score) ** 2 * torch.log(score)
    miss = (1 - heat) ** 4 * score**2 * torch.log(1 - score)
    total = -torch.where(heat == 1.0, hit, miss).sum() / max(1, len(places))
    if not len(places):
        return total
    image, row, column = places.unbind(1)
    found = cells.float()[image, :, row, column]
    offset = functional.l1_loss(torch.sigmoid(found[:, 1:3]), wanted[:, :2])
    size = functional.l1_loss(found[:, 3:5], wanted[:, 2:4])
    kind = functional.cross_entropy(found[:, BOX_FIELDS:], wanted[:, 4].long())
    return total + _BOX_WEIGHT * (offset + size) + kind


def _beside(cells: Tensor, taught: Tensor) -> Tensor:
    """How far cells are from a teacher's.

    Cross-entropy of scores, boxes and classes where the teacher finds one.

    Hinton et al., "Distilling the Knowledge in a Neural Network" (2015), for a dense head.
    """
    score = torch.sigmoid(taught[:, 0])
    found = (score > _TAUGHT_FROM).float()
    weight = found * score
    many = weight.sum().clamp(min=1.0)
    scores = functional.binary_cross_entropy_with_logits(cells[:, 0], score, reduction="none")
    scores = scores - functional.binary_cross_entropy_with_logits(taught[:, 0], score, reduction="none")
    boxes = (cells[:, 1:BOX_FIELDS] - taught[:, 1:BOX_FIELDS]).abs().mean(dim=1)
    chosen = functional.softmax(taught[:, BOX_FIELDS:], dim=1)
    classes = -(chosen * functional.log_softmax(cells[:, BOX_FIELDS:], dim=1)).sum(dim=1)
    return (scores.sum() + (weight * (boxes + classes)).sum()) / many


def targets(labels: Sequence[Sequence[Label]]) -> tuple[Tensor, Tensor, Tensor]:
    """What the cells are to say.

    Returns:
        Peaks of the score [batch, 32, 56], 1 at the cell of each box's centre and a bell around it; those cells [n, 3]
        (image, row, column); for each the place in the cell (2), the logarithmic size in cells (2), the
        class: [n, 5].
    """
    heat = torch.zeros(len(labels), _ROWS, _COLUMNS)
    rows, columns = torch.arange(_ROWS)[:, None], torch.arange(_COLUMNS)[None]
    found: dict[tuple[int, int, int], list[float]] = {}
    for image, own in enumerate(labels):
        for label in own:  # the farthest first: of two in one cell the nearer stays
            x, y = (label.left + label.right) / 2 / STRIDE, (label.top + label.bottom) / 2 / STRIDE
            width, height = (label.right - label.left) / STRIDE, (label.bottom - label.top) / STRIDE
            column, row = min(int(x), _COLUMNS - 1), min(int(y), _ROWS - 1)
            spread = [2 * max(side * _WIDTH_OF_PEAK, _LEAST_PEAK) ** 2 for side in (width, height)]
            bell = torch.exp(-((columns - column) ** 2 / spread[0] + (rows - row) ** 2 / spread[1]))
            heat[image] = torch.maximum(heat[image], bell)
            found[image, row, column] = [
                x - column,
                y - row,
                math.log(width),
                math.log(height),
                label.class_index,
            ]
    for place in found:
        heat[place] = 1.0
    places = torch.tensor(list(found), dtype=torch.long).reshape(-1, 3)
    return heat, places, torch.tensor(list(found.values()), dtype=torch.float32).reshape(-1, 5)


def _png(images: Sequence[np.ndarray]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.concatenate(images)).save(file, "PNG", optimize=True)
    return file.getvalue()
