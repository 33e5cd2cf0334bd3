"""Images of the drawn road with the boxes that are in them: what the reference detector learns from.

Every kind of object in any paint, anywhere on the road and beside it, at any distance. And what a
detector scores on them: average precision of each class, and false boxes on empty images.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchperf_ros.models.networks import (
    BOX_FIELDS,
    CLASSES,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LEAST_OVERLAP,
    corners,
    overlaps,
)
from torchperf_ros.models.road_scene import EXTENTS, RoadScene, SceneObject

# Of a box that has to be found; lower ones, and those of which 0.1 to 0.33 is seen, may be found.
LEAST_HEIGHT_PX: Final = 8.0
_SIZES: Final = ((640, 360), (1280, 720))
_LEAST_SEEN, _HIDDEN = 1 / 3, 0.1
_LEAST_PX: Final = 2.0
_LANE_M: Final = 3.5
_NEAREST_M, _FARTHEST_M = 4.0, 120.0
_MOST_OBJECTS: Final = 7
_EMPTY_SHARE: Final = 0.15
# of the empty ones: no road either, as of a camera that is covered, blinded or broken
_COVERED_SHARE: Final = 0.25
_KEEPS_LANE: Final = 0.7  # of cars and trucks; the others cross, or stand anywhere
_WIDEST_SLOPE: Final = 0.6  # to the side, per metre ahead: the edge of the image is at 0.64
_NOISY_SHARE, _MOST_NOISE = 0.3, 0.06
_CONTRAST, _BRIGHTNESS = (0.8, 1.2), 0.15


class Label(NamedTuple):
    """A box in an image of the network's size.

    Attributes:
        left, top, right, bottom: pixels.
        class_index: index into `CLASSES`.
        counts: whether it has to be found, see `LEAST_HEIGHT_PX`.
    """

    left: float
    top: float
    right: float
    bottom: float
    class_index: int
    counts: bool


class LabelledScenes:
    """Draws batches of images; those of a seed and a number are always the same ones."""

    def __init__(self, seed: int | str) -> None:
        self._seed = seed
        self._scenes = [(RoadScene(*size), size) for size in _SIZES]

    def batch(self, number: int, count: int) -> tuple[Tensor, list[list[Label]]]:
        """Images [count, 3, 256, 448] float in -1..1, as of `CameraAdapter`, and the labels of each."""
        draw = random.Random(f"{self._seed}/{number}")
        drawn = [self._one(draw) for _ in range(count)]
        return torch.cat([image for image, _ in drawn]), [labels for _, labels in drawn]

    def _one(self, draw: random.Random) -> tuple[Tensor, list[Label]]:
        scene, size = draw.choice(self._scenes)
        seen = [] if draw.random() < _EMPTY_SHARE else _objects(draw)
        if not seen and draw.random() < _COVERED_SHARE:
            return _covered(draw), []
        pixels = scene.draw_objects(draw.uniform(0.0, 1000.0), seen)
        image = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)
        small = functional.interpolate(image, (IMAGE_HEIGHT, IMAGE_WIDTH), mode="bilinear", antialias=True)
        shown = small.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)
        return self._exposed(shown, draw), labels_of(scene, size, seen)

    @staticmethod
    def _exposed(image: Tensor, draw: random.Random) -> Tensor:
        image.mul_(draw.uniform(*_CONTRAST)).add_(draw.uniform(-_BRIGHTNESS, _BRIGHTNESS))
        if draw.random() < _NOISY_SHARE:
            noise = torch.Generator().manual_seed(draw.getrandbits(32))
            image.add_(torch.randn(image.shape, generator=noise), alpha=draw.uniform(0.0, _MOST_NOISE))
        return image.clamp_(-1.0, 1.0)


def _covered(draw: random.Random) -> Tensor:
    """An image of one grey, of noise, or of random blocks or smooth blobs, [1, 3, 256, 448]."""
    size = draw.choice(((1, 1), (2, 2), (4, 7), (8, 14), (32, 56), (IMAGE_HEIGHT, IMAGE_WIDTH)))
    coarse = torch.rand((1, 3, *size), generator=torch.Generator().manual_seed(draw.getrandbits(32)))
    spread, middle = draw.uniform(0.0, 2.0), draw.uniform(-1.0, 1.0)
    mode = draw.choice(("nearest", "bilinear"))
    return functional.interpolate(
        (coarse - 0.5) * spread + middle, (IMAGE_HEIGHT, IMAGE_WIDTH), mode=mode
    ).clamp(-1, 1)


def _objects(draw: random.Random) -> list[SceneObject]:
    seen = []
    for _ in range(draw.randint(1, _MOST_OBJECTS)):
        kind = draw.choices(("car", "truck", "cyclist", "pedestrian", "wall"), (5, 2, 2, 3, 1))[0]
        even = draw.uniform(_NEAREST_M, _FARTHEST_M)
        near = math.exp(draw.uniform(math.log(_NEAREST_M), math.log(_FARTHEST_M)))
        lane = draw.choice((-_LANE_M, 0.0, _LANE_M)) + draw.gauss(0.0, 0.5)
        ahead = draw.choice((even, near))
        widest = max(2.5 * _LANE_M, _WIDEST_SLOPE * ahead)
        keeps_lane = kind in {"car", "truck"} and draw.random() < _KEEPS_LANE
        lateral = lane if keeps_lane else draw.uniform(-widest, widest)
        paint = (draw.randint(10, 245), draw.randint(10, 245), draw.randint(10, 245))
        seen.append(SceneObject(ahead, lateral, paint, kind))
    return sorted(seen, key=lambda one: -one.ahead_m)


def labels_of(scene: RoadScene, size: tuple[int, int], seen: Sequence[SceneObject]) -> list[Label]:
    """The boxes of objects, the farthest first, in an image of this size stretched to the network's."""
    scale = np.tile((IMAGE_WIDTH / size[0], IMAGE_HEIGHT / size[1]), 2)
    frame = np.tile((IMAGE_WIDTH, IMAGE_HEIGHT), 2)
    boxes = [np.clip(np.array(scene.box_px(one, EXTENTS[one.kind])) * scale, 0.0, frame) for one in seen]
    labels = []
    for place, (one, box) in enumerate(zip(seen, boxes, strict=True)):
        left, top, right, bottom = box.tolist()
        if one.kind not in CLASSES or right - left < _LEAST_PX or bottom - top < _LEAST_PX:
            continue
        seen_share = _seen_share(box, boxes[place + 1 :])
        if seen_share > _HIDDEN:
            counts = bottom - top >= LEAST_HEIGHT_PX and seen_share >= _LEAST_SEEN
            labels.append(Label(left, top, right, bottom, CLASSES.index(one.kind), counts))
    return labels


def _seen_share(box: np.ndarray, before: Sequence[np.ndarray]) -> float:
    """What nearer ones leave of a box, 0 to 1, on a grid of 16 x 16 points."""
    left, top, right, bottom = box
    x = left + (np.arange(16) + 0.5) * (right - left) / 16
    y = (top + (np.arange(16) + 0.5) * (bottom - top) / 16)[:, None]
    hidden = np.zeros((16, 16), dtype=bool)
    for other in before:
        hidden |= (x >= other[0]) & (x <= other[2]) & (y >= other[1]) & (y <= other[3])
    return 1.0 - float(hidden.mean())


_LEAST_SCORE: Final = 0.01
# The score from which on `CameraAdapter` publishes a box, by default.
THRESHOLD: Final = 0.5


@dataclass
class DetectionScore:
    """Collects images, then judges.

    A box is found if a detection of its class overlaps by an intersection over union of 0.5. What
    `Label.counts` leaves open is neither found nor a false detection.
    """

    def __post_init__(self) -> None:
        self._found: list[list[tuple[float, bool]]] = [[] for _ in CLASSES]  # score, whether it is right
        self._wanted = [0] * len(CLASSES)
        self._empty_images = self._false_boxes = 0

    def add(self, outputs: Tensor, labels: Sequence[Sequence[Label]]) -> None:
        """Take outputs of `DetectorNet.forward`, [batch, cells, 9], and the labels of each image."""
        for image, wanted in zip(outputs.float().cpu().numpy(), labels, strict=True):
            cells = image[image[:, 0] >= _LEAST_SCORE]
            boxes = corners(cells) * (IMAGE_WIDTH, IMAGE_HEIGHT, IMAGE_WIDTH, IMAGE_HEIGHT)
            scores, classes = cells[:, 0], cells[:, BOX_FIELDS:].argmax(axis=1)
            if not wanted:
                self._empty_images += 1
                self._false_boxes += int((scores >= THRESHOLD).sum())
            for index in range(len(CLASSES)):
                own = classes == index
                self._judge(
                    index,
                    scores[own],
                    boxes[own],
                    [label for label in wanted if label.class_index == index],
                )

    def _judge(self, index: int, scores: np.ndarray, boxes: np.ndarray, labels: Sequence[Label]) -> None:
        self._wanted[index] += sum(label.counts for label in labels)
        shares = overlaps(boxes, np.array([label[:4] for label in labels]).reshape(-1, 4))
        taken: set[int] = set()
        for place in np.argsort(-scores, kind="stable"):
            free = [n for n in range(len(labels)) if n not in taken and shares[place, n] >= LEAST_OVERLAP]
            best = max(free, key=lambda n: (labels[n].counts, shares[place, n]), default=None)
            if best is not None:
                taken.add(best)
            if best is None or labels[best].counts:
                self._found[index].append((float(scores[place]), best is not None))

    def average_precision(self, index: int) -> float:
        """Of one class, 0 to 1; NaN where no box of it was to be found."""
        ranked = sorted(self._found[index], reverse=True)
        return area_under_precision([right for _, right in ranked], self._wanted[index])

    @property
    def mean_average_precision(self) -> float:
        return float(np.nanmean([self.average_precision(index) for index in range(len(CLASSES))]))

    @property
    def false_boxes(self) -> float:
        """Published boxes per image in which there is nothing."""
        return self._false_boxes / self._empty_images if self._empty_images else float("nan")

    def figures(self) -> dict[str, float]:
        each = {f"ap_{name}": self.average_precision(index) for index, name in enumerate(CLASSES)}
        return {"map": self.mean_average_precision, "false_boxes": self.false_boxes, **each}


def area_under_precision(right: Sequence[bool], wanted: int) -> float:
    """Average precision: the area under the precision over the recall, made monotone.

    As PASCAL VOC computes it since 2010 (Everingham et al., 2015).

    Args:
        right: whether each detection is, the surest first.
        wanted: how many were to be found; NaN is returned where it is 0.
    """
    if not wanted:
        return float("nan")
    hits = np.cumsum(right)
    precision = hits / np.arange(1, len(right) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]  # the best at this recall or more
    return float(best[np.array(right, dtype=bool)].sum() / wanted)
