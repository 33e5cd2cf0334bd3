"""What a detector scores: average precision of each class, and false boxes on empty images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from torch import Tensor

from torchperf_ros.models.networks import (
    BOX_FIELDS,
    CLASSES,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    LEAST_OVERLAP,
    corners,
    overlaps,
)
from torchperf_ros.train.labelled_scenes import Label

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
