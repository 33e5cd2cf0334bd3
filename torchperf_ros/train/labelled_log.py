"""A user's own log with labels, to train on: the labels' format, and the images of it for the detector.

Labels are JSON Lines, one line for each labelled message: its `header.stamp` in ns, and what the adapter
makes of it. For `CameraAdapter` those are boxes in pixels of the image as it was recorded:

    {"stamp_ns": 1700000000123456789, "labels": [{"class": "car", "box": [left, top, right, bottom]}]}

An image without an object is worth a line, too: `"labels": []`. Those without a line are not used.
"""

import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from torchperf_ros.api.adapter import HELD_OUT, Received
from torchperf_ros.api.errors import BadInput, ConfigError
from torchperf_ros.api.messages import stamp_ns_of
from torchperf_ros.api.pixels import compressed_size
from torchperf_ros.models.camera import CameraAdapter
from torchperf_ros.models.networks import CLASSES, IMAGE_HEIGHT, IMAGE_WIDTH
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.train.labelled_scenes import LEAST_HEIGHT_PX, Label

# the last of the log: neighbours in time are too alike to judge one by the other
_HELD_OUT_SHARE: Final = 0.2
_FEWEST: Final = 10
_BYTE: Final = 127.5
_SIDES: Final = 4
_IMAGE, _COMPRESSED = "sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"


@dataclass(frozen=True)
class Example:
    """One labelled message.

    Attributes:
        where: file and line of the label, for messages.
        message: as an adapter gets it.
        labels: as the line has them.
    """

    where: str
    message: Received
    labels: Any


class LabelledLog:
    """A log, one topic of it, and the labels of that topic's messages."""

    def __init__(self, log: Path, topic: str, labels: Path) -> None:
        """Read the labels.

        Raises:
            ConfigError: the log has no such topic; a line is no label, two have one stamp, or there are
                fewer than 10.
            LogError: the log cannot be read.
        """
        self.log, self.topic, self.path = log, topic, labels
        self.labels = dict(self._lines())
        with LogReader(log) as reader:
            if topic not in reader.topics:
                raise ConfigError(
                    f"log {log}: topic {topic} is not there; it has {', '.join(reader.topics) or 'none'}"
                )
            self.type_name = reader.topics[topic].type_name
        if len(self.labels) < _FEWEST:
            raise ConfigError(
                f"labels {labels}: {len(self.labels)} lines; at least {_FEWEST} are needed to train on"
            )

    def _lines(self) -> Iterator[tuple[int, tuple[str, Any]]]:
        seen = set()
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"labels {self.path}: cannot be read: {error}") from error
        for number, text in enumerate(lines, start=1):
            if not text.strip():
                continue
            where = f"labels {self.path}, line {number}"
            try:
                line = json.loads(text)
                stamp_ns, labels = line["stamp_ns"], line["labels"]
            except (ValueError, KeyError, TypeError) as error:
                form = '{"stamp_ns": 1700000000000000000, "labels": [...]}'
                raise ConfigError(f"{where}: {text[:80]!r} is not like {form} ({error})") from error
            if type(stamp_ns) is not int or stamp_ns <= 0:
                raise ConfigError(
                    f"{where}: stamp_ns is {stamp_ns!r}; it has to be a whole number of ns above 0"
                )
            if stamp_ns in seen:
                raise ConfigError(f"{where}: stamp_ns {stamp_ns} has been there before")
            seen.add(stamp_ns)
            yield stamp_ns, (where, labels)

    def examples(self) -> Iterator[Example]:
        """The labelled messages, in the order of the log.

        Raises:
            ConfigError: labels are left over.
            LogError: the log cannot be read.
        """
        left = dict(self.labels)
        with LogReader(self.log) as reader:
            for raw in reader.messages({self.topic}):
                message = reader.decode(raw)
                stamp_ns = stamp_ns_of(message.header) if hasattr(message, "header") else raw.t_ns
                if (found := left.pop(stamp_ns, None)) is not None:
                    yield Example(found[0], Received(message, stamp_ns, math.nan), found[1])
        if left:
            where, _ = next(iter(left.values()))
            more = f" and of {len(left) - 1} more" if len(left) > 1 else ""
            raise ConfigError(
                f"{where}: no message of {self.topic} in {self.log} has the stamp {next(iter(left))}"
                f" ns{more}"
            )


class LoggedImages:
    """Labelled images of a log, as `LabelledScenes` gives drawn ones.

    The last fifth of them is only judged by.
    """

    def __init__(self, log: LabelledLog, seed: int | str) -> None:
        """Read the images, as `CameraAdapter` makes them ready, into a temporary file.

        Raises:
            ConfigError: a label is none of a box in its image; an image cannot be used.
            LogError: the log cannot be read.
        """
        compressed = log.type_name == _COMPRESSED
        if not compressed and log.type_name != _IMAGE:
            raise ConfigError(
                f"log {log.log}: {log.topic} is {log.type_name}; it has to be {_IMAGE} or {_COMPRESSED}"
            )
        adapter = CameraAdapter({"compressed": compressed}, torch.device("cpu"))
        count = len(log.labels)
        shape = (count, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
        # it keeps it
        self._images = np.memmap(tempfile.TemporaryFile(), np.uint8, "w+", shape=shape)  # noqa: SIM115
        self._labels = []
        for place, example in enumerate(log.examples()):
            try:
                (image,) = adapter.preprocess({"image": example.message})
            except BadInput as error:
                raise ConfigError(f"{example.where}: its image cannot be used: {error}") from error
            message = example.message.message
            size = compressed_size(message) if compressed else (message.width, message.height)
            self._images[place] = ((image[0] + 1.0) * _BYTE).round().to(torch.uint8).numpy()
            self._labels.append(list(_labels(example, size)))
        self._trained = count - max(1, round(_HELD_OUT_SHARE * count))
        self._seed, self._held_out = seed, seed == HELD_OUT

    def batch(self, number: int, count: int) -> tuple[Tensor, list[list[Label]]]:
        """Images to judge by, from a number on, as many as there are.

        Or some to train on, half of them mirrored.
        """
        if self._held_out:
            last = min(self._trained + number + count, len(self._labels))
            places = list(range(self._trained + number, last))
            return self._floats(places), [self._labels[place] for place in places]
        draw = random.Random(f"{self._seed}/{number}")
        places = [draw.randrange(self._trained) for _ in range(count)]
        images, labels = self._floats(places), [self._labels[place] for place in places]
        for index in range(count):
            if draw.random() < 0.5:  # noqa: PLR2004 - a half
                images[index] = images[index].flip(2)
                labels[index] = [
                    label._replace(left=IMAGE_WIDTH - label.right, right=IMAGE_WIDTH - label.left)
                    for label in labels[index]
                ]
        return images, labels

    def _floats(self, places: list[int]) -> Tensor:
        return torch.from_numpy(self._images[places]).to(torch.float32).div_(_BYTE).sub_(1.0)


def _labels(example: Example, size: tuple[int, int]) -> Iterator[Label]:
    """The boxes of a line, the lowest first, in an image that is stretched to the network's size."""
    if not isinstance(example.labels, list):
        raise ConfigError(f"{example.where}: labels have to be a list, not {example.labels!r}")
    found = []
    for one in example.labels:
        name, box = (one.get("class"), one.get("box")) if isinstance(one, dict) else (None, None)
        if name not in CLASSES:
            raise ConfigError(
                f"{example.where}: class {name!r} is not there; it has to be of: {', '.join(CLASSES)}"
            )
        if not isinstance(box, list) or len(box) != _SIDES or not all(_is_number(side) for side in box):
            raise ConfigError(f"{example.where}: box {box!r} is not [left, top, right, bottom] in pixels")
        left, top, right, bottom = box
        if not (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
            raise ConfigError(
                f"{example.where}: box {box} is not in its image of {size[0]}x{size[1]} pixels with left <"
                " right and top < bottom"
            )
        scale_x, scale_y = IMAGE_WIDTH / size[0], IMAGE_HEIGHT / size[1]
        high = (bottom - top) * scale_y >= LEAST_HEIGHT_PX
        sides = left * scale_x, top * scale_y, right * scale_x, bottom * scale_y
        found.append(Label(*sides, CLASSES.index(name), high))
    return iter(sorted(found, key=lambda label: label.bottom))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
