"""Where the vehicle ahead is, from the bright rectangle that an infrared camera sees of its rear."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from torchperf_ros import Adapter, BadInput, Received
from torchperf_ros.models.detection_messages import Detection, ImageFrame, MarkerArrays

IMAGE, MARKERS = "sensor_msgs/msg/Image", "visualization_msgs/msg/MarkerArray"


class BrightBox(torch.nn.Module):
    """The box around everything that is brighter than a threshold.

    It only compares and counts, so that its results are the same on every machine.
    """

    def __init__(self, threshold: int) -> None:
        """Take the threshold, 0 to 255."""
        super().__init__()
        self.threshold = threshold

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Image [H, W] of 0 to 255 to [5].

        Left, top, right, bottom (exclusive) in pixels, and the pixels in it.
        """
        bright = image > self.threshold
        columns, rows = bright.any(dim=0).float(), bright.any(dim=1).float()
        left, top = columns.argmax(), rows.argmax()
        right, bottom = len(columns) - columns.flip(0).argmax(), len(rows) - rows.flip(0).argmax()
        return torch.stack([left, top, right, bottom, bright.sum()]).float()


class LeadVehicleAdapter(Adapter):
    """One box, or none, for each image in `mono8`.

    Options:
        threshold: what is bright, 0 to 255; default 200.
        dazzled: share of bright pixels from which the camera counts as dazzled, and the image cannot be
            used; default 0.5.
    """

    inputs = {"image": IMAGE}
    output = MARKERS

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        """Read the options."""
        self._threshold = int(options.get("threshold", 200))
        self._dazzled = float(options.get("dazzled", 0.5))
        self._device = device
        self._messages = MarkerArrays(horizontal_fov_deg=60.0)

    def build(self, tier: str) -> torch.nn.Module:
        """The same for each tier."""
        return BrightBox(self._threshold).to(self._device)

    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        """A dark image."""
        return (torch.zeros((64, 96), device=self._device),)

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        """The pixels; an image in the low sun cannot be used."""
        image = messages["image"].message
        if image.encoding != "mono8" or image.data.size != image.height * image.width:
            msg = (
                f"image is {image.encoding} with {image.data.size} bytes; it has to be mono8 without"
                " padding"
            )
            raise BadInput(msg)
        bright = float(np.mean(image.data > self._threshold))
        if bright > self._dazzled:
            msg = f"the camera is dazzled: {bright:.0%} of the image is bright"
            raise BadInput(msg)
        pixels = image.data.reshape(image.height, image.width).astype(np.float32)
        return (torch.from_numpy(pixels).to(self._device),)

    def postprocess(self, outputs: torch.Tensor, messages: Mapping[str, Received]) -> object:
        """A marker in the camera's frame; its distance follows from its height in the image."""
        image, stamp_ns = messages["image"].message, messages["image"].stamp_ns
        left, top, right, bottom, count = outputs.tolist()
        box = Detection(0, 1.0, (left + right) / 2.0, (top + bottom) / 2.0, right - left, bottom - top)
        frame = ImageFrame(stamp_ns, image.header.frame_id, image.width, image.height)
        return self._messages.build([box] if count else [], frame)
