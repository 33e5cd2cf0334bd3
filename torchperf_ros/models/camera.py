"""The reference perception stage: a camera image in, boxes around objects out."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchperf_ros.api.adapter import Adapter, Received, open_task
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import empty_message, message_class
from torchperf_ros.api.pixels import Pixels, compressed_pixels, compressed_size, raw_pixels
from torchperf_ros.models import detection_messages, networks
from torchperf_ros.models.detection_messages import Detection, ImageFrame, MarkerArrays
from torchperf_ros.models.networks import (
    DETECTOR_WEIGHTS,
    DETECTOR_WIDTHS,
    GRID_CELLS,
    IMAGE_HEIGHT,
    IMAGE_WIDTH,
    DetectorNet,
)
from torchperf_ros.models.options import OptionReader

# Messages are views on memory that may be read-only. torch cannot express that and warns; here it only
# reads.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

_IMAGE: Final = "sensor_msgs/msg/Image"
_COMPRESSED_IMAGE: Final = "sensor_msgs/msg/CompressedImage"
_ENCODINGS: Final = ("rgb8", "bgr8", "8UC3", "rgba8", "bgra8", "mono8")
_OUTPUTS: Final = {
    "markers": detection_messages.MARKER_ARRAY,
    "detection2d": detection_messages.DETECTION_2D_ARRAY,
}


class CameraAdapter(Adapter):
    """Detects objects in one camera's images.

    The weights that ship know the drawn road only, see `DetectorNet`.

    Options:
        compressed: the image is a JPEG or PNG (`sensor_msgs/msg/CompressedImage`); default false.
        output: "markers" (`visualization_msgs/msg/MarkerArray`) or "detection2d"
            (`vision_msgs/msg/Detection2DArray`, where installed); default "markers".
        max_detections: 0 to 1792; default 20, the strongest.
        score_threshold: 0 to 1; default 0.5.
        horizontal_fov_deg: of the camera, 10 to 170; default 70. Distances of markers follow from it.
        max_pixels: largest image, 1 to 67108864 pixels; default 8388608 (4K).
        weights: file that `torchperf train` has written; default the one that ships.
    """

    tiers: ClassVar[tuple[str, ...]] = tuple(DETECTOR_WIDTHS)

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options.

        Raises `ConfigError`, or `UnknownMessageType` where the output is not installed.
        """
        reader = OptionReader(type(self).__name__, options)
        self._compressed = reader.flag("compressed", default=False)
        output = reader.choice("output", default="markers", allowed=tuple(_OUTPUTS))
        self._max_detections = reader.integer("max_detections", default=20, low=0, high=GRID_CELLS)
        self._score_threshold = reader.number("score_threshold", default=0.5, low=0.0, high=1.0)
        horizontal_fov_deg = reader.number("horizontal_fov_deg", default=70.0, low=10.0, high=170.0)
        self._max_pixels = reader.integer("max_pixels", default=8_388_608, low=1, high=67_108_864)
        self._weights = Path(reader.text("weights", default=str(DETECTOR_WEIGHTS)))
        reader.finish()
        self.inputs = {"image": _COMPRESSED_IMAGE if self._compressed else _IMAGE}
        self.output = _OUTPUTS[output]
        message_class(self.output)  # raises where its package is not installed
        self._built = (
            MarkerArrays(horizontal_fov_deg).build
            if output == "markers"
            else detection_messages.detection_2d_array
        )
        self._device = device

    def build(self, tier: str) -> torch.nn.Module:
        """The detector of a tier, `full`, `medium` or `fast`.

        A `ConfigError` where it or its weights are not there.
        """
        width = networks.width_in(self._weights, tier, networks.tier_width(tier, DETECTOR_WIDTHS))
        return networks.build_trained(lambda: DetectorNet(width), tier, self._weights).to(self._device)

    def example_inputs(self, tier: str) -> tuple[Tensor, ...]:
        """A scene as the network of every tier sees it, with objects: [1, 3, 256, 448] float."""
        own = examples_of(self._weights)
        return (self._scenes(own if own.is_file() else examples_of(DETECTOR_WEIGHTS))[:1].clone(),)

    def score_inputs(self, tier: str) -> Sequence[tuple[Tensor, ...]]:
        """The scenes beside the weights, one by one; none where there are no such scenes."""
        own = examples_of(self._weights)
        return [(scene,) for scene in self._scenes(own).split(1)] if own.is_file() else []

    def _scenes(self, path: Path) -> Tensor:
        """The images that lie in a file one below the other, [n, 3, 256, 448] float."""
        file = empty_message(_COMPRESSED_IMAGE, format="png", data=np.fromfile(path, np.uint8))
        pixels = compressed_pixels(file).rgb()
        if pixels.shape[1] != IMAGE_WIDTH or pixels.shape[0] % IMAGE_HEIGHT:
            size = f"{pixels.shape[1]}x{pixels.shape[0]}"
            raise ConfigError(
                f"{path}: {size} pixels; it has to be {IMAGE_WIDTH} wide and a multiple of {IMAGE_HEIGHT}"
                " high"
            )
        scenes = (
            torch.from_numpy(pixels.copy())
            .to(self._device)
            .view(-1, IMAGE_HEIGHT, IMAGE_WIDTH, 3)
            .permute(0, 3, 1, 2)
        )
        return scenes.to(torch.float32, memory_format=torch.contiguous_format).mul_(2.0 / 255.0).sub_(1.0)

    def score(self, outputs: Any, reference: Any) -> float:  # noqa: ANN401
        """F1 of the published boxes, the reference's taken for right; 1 where neither has one.

        A box is found by one of its class that overlaps by 0.5 (intersection over union), the strongest
        first.
        """
        found, wanted = self._published(outputs), self._published(reference)
        classes = [cells[:, networks.BOX_FIELDS :].argmax(axis=1) for cells in (found, wanted)]
        return _agreement((networks.corners(found), classes[0]), (networks.corners(wanted), classes[1]))

    def score_messages(self, output: Any, reference: Any) -> float | None:  # noqa: ANN401
        """The same of two messages.

        Of markers it is their outlines across the camera's view that have to overlap.
        """
        return _agreement(detection_messages.boxes(output), detection_messages.boxes(reference))

    def example_messages(self) -> Mapping[str, Received]:
        """A black image of 1280x720; none where images are compressed."""
        if self._compressed:
            return {}
        width, height = 1280, 720
        data = np.zeros(3 * width * height, np.uint8)
        image = empty_message(
            _IMAGE, height=height, width=width, encoding="rgb8", step=3 * width, data=data
        )
        return {"image": Received(image, 0, math.nan)}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[Tensor, ...]:
        """The image at the network's resolution, [1, 3, 256, 448] float in -1..1, RGB, stretched to fit.

        Raises:
            BadInput: the image cannot be used; the message says which field is wrong, and its value.
        """
        message = messages["image"].message
        if self._compressed:
            pixels = compressed_pixels(message, self._max_pixels, (IMAGE_WIDTH, IMAGE_HEIGHT), _ENCODINGS)
        else:
            pixels = raw_pixels(message, self._max_pixels, _ENCODINGS)
        return (_shrink(pixels, self._device).mul_(2.0 / 255.0).sub_(1.0),)

    def training_task(self, log: Any) -> Any:  # noqa: ANN401 - both are of `train`, which lies above this
        """`DetectorTask`, on the drawn road or on a log's labelled images."""
        return open_task("torchperf_ros.train.detector_task:DetectorTask", log)

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:  # noqa: ANN401
        """The strongest boxes above the threshold as a message with the image's stamp and frame.

        `outputs` are [1, 1792, 9], see `DetectorNet.forward`; `messages` those that were given to
        `preprocess`.
        """
        return self._built(*self.detections(outputs, messages))

    def detections(
        self,
        outputs: Any,  # noqa: ANN401
        messages: Mapping[str, Received],
    ) -> tuple[list[Detection], ImageFrame]:
        """The strongest boxes above the threshold, and what they are of."""
        image = messages["image"]
        message = image.message
        width, height = compressed_size(message) if self._compressed else (message.width, message.height)
        cells = self._published(outputs)
        boxes = (cells[:, 1 : networks.BOX_FIELDS] * (width, height, width, height)).tolist()
        classes = cells[:, networks.BOX_FIELDS :].argmax(axis=1).tolist()
        found = [
            Detection(kind, score, *box)
            for kind, score, box in zip(classes, cells[:, 0].tolist(), boxes, strict=True)
        ]
        return found, ImageFrame(image.stamp_ns, message.header.frame_id, width, height)

    def _published(self, outputs: Any) -> np.ndarray:  # noqa: ANN401
        """The cells whose boxes are published, the strongest first."""
        cells: np.ndarray = outputs[0].float().cpu().numpy()
        scores = cells[:, 0]
        enough = np.flatnonzero(scores >= self._score_threshold)
        return cells[enough[np.argsort(-scores[enough], kind="stable")[: self._max_detections]]]


def _agreement(found: tuple[np.ndarray, np.ndarray], wanted: tuple[np.ndarray, np.ndarray]) -> float:
    """F1 of boxes, each as corners [n, 4] and classes [n], the strongest first."""
    shares = networks.overlaps(found[0], wanted[0])
    shares[found[1][:, None] != wanted[1]] = 0.0
    agree = 0
    for row in shares:  # a view: what is taken is seen by those that follow
        if row.max(initial=0.0) >= networks.LEAST_OVERLAP:
            shares[:, row.argmax()] = 0.0
            agree += 1
    both = sum(shares.shape)
    return 2 * agree / both if both else 1.0


def examples_of(weights: Path) -> Path:
    """The images beside a file of weights that `torchperf train` has written.

    A PNG, one below the other.
    """
    return weights.with_name(f"{weights.stem}_examples.png")


def _shrink(pixels: Pixels, device: torch.device) -> Tensor:
    """[1, 3, 256, 448] float on the device, 0..255, RGB, contiguous and anti-aliased.

    A GPU gets the bytes as they came, as uploading them takes less time than a CPU takes to make them fewer,
    and filters them in floats. On the CPU they stay bytes, which takes a quarter of the time: torch rounds to
    a byte after the columns and again after the rows. Both are the same filter, and so differ by one grey
    level at the most, 0.33 of one in the root mean square; a camera's own bytes are off by 0.29 of one.

    Of large images only every k-th row is read, such that at least two remain per network pixel. Columns
    are left out only from 14336 on, as a bound: gathering single pixels costs more than the filter that
    reads them all.
    """
    rows, columns, _ = pixels.array.shape
    every_row, every_column = max(1, rows // (2 * IMAGE_HEIGHT)), max(1, columns // (16 * IMAGE_WIDTH))
    source = (
        torch.from_numpy(pixels.array[::every_row, ::every_column]).to(device).permute(2, 0, 1).unsqueeze(0)
    )
    source = source.float() if source.is_cuda else source  # which has no such filter for bytes
    small = functional.interpolate(source, (IMAGE_HEIGHT, IMAGE_WIDTH), mode="bilinear", antialias=True)
    if pixels.order == "mono":
        small = small.expand(-1, 3, -1, -1)
    small = small.flip(1) if pixels.order == "bgr" else small
    return small.to(torch.float32, memory_format=torch.contiguous_format)
