"""A model of a chosen cost: image in, short path out, whose header names the process that computed it.

As a program, `python -m benchmarks.rig.bench_adapter MS` prints the options for a model of MS milliseconds
here.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from benchmarks.rig.bench_stage import SHARES, TIERS
from torchperf_ros.api.adapter import Adapter, Received
from torchperf_ros.api.messages import header, message_class

warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)

POSES: Final = 5
_CHANNELS, _HEIGHT, _WIDTH = 16, 72, 128
_POSE_EVERY_NS: Final = 100_000_000


class BenchNet(nn.Module):
    """A chain of equal convolutions; its cost is their number."""

    def __init__(self, layers: int) -> None:
        """Build `layers` >= 1 convolutions of 16 channels on 72x128 pixels, about 0.5 ms each on one core."""
        super().__init__()
        self.stem = nn.Conv2d(3, _CHANNELS, 3, padding=1)
        self.body = nn.ModuleList(nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1) for _ in range(layers))
        self.head = nn.Linear(_CHANNELS, POSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """[1, 3, 72, 128] float to [1, POSES] float: the sideways position of each pose in m."""
        x = self.stem(image)
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(x.mean(dim=(2, 3)))


class BenchAdapter(Adapter):
    """Takes `image`, gives a `nav_msgs/msg/Path` whose `header.frame_id` is `pid-N` of the process that made it.

    Options:
        layers: tier -> number of layers.
    """

    inputs = {"image": "sensor_msgs/msg/Image"}
    output = "nav_msgs/msg/Path"

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        self._layers = options["layers"]
        self._device = device
        self._frame_id = f"pid-{os.getpid()}"

    def build(self, tier: str) -> nn.Module:
        torch.manual_seed(0)
        return BenchNet(self._layers[tier]).eval().to(self._device)

    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1, 3, _HEIGHT, _WIDTH, device=self._device),)

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        image = messages["image"].message
        pixels = np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
        rows, columns = np.linspace(0, image.height - 1, _HEIGHT, dtype=int), image.width // _WIDTH
        small = (
            pixels[rows, :: max(1, columns)][:, :_WIDTH]
            if columns
            else pixels[rows].repeat(2, axis=1)[:, :_WIDTH]
        )
        tensor = torch.from_numpy(np.ascontiguousarray(small)).to(self._device)
        return (tensor.permute(2, 0, 1).unsqueeze(0).float().div_(255.0),)

    def sideways(self, outputs: torch.Tensor) -> list[float]:
        """Sideways position of each pose in m."""
        return outputs[0].tolist()

    def postprocess(self, outputs: Any, messages: Mapping[str, Received]) -> object:
        pose_class, stamped = (
            message_class("geometry_msgs/msg/Pose"),
            message_class("geometry_msgs/msg/PoseStamped"),
        )
        point = message_class("geometry_msgs/msg/Point")
        upright = message_class("geometry_msgs/msg/Quaternion")(x=0.0, y=0.0, z=0.0, w=1.0)
        stamp_ns = messages["image"].stamp_ns
        poses = [
            stamped(
                header=header(stamp_ns + number * _POSE_EVERY_NS, self._frame_id),
                pose=pose_class(position=point(x=float(number), y=y, z=0.0), orientation=upright),
            )
            for number, y in enumerate(self.sideways(outputs))
        ]
        return message_class(self.output)(header=header(stamp_ns, self._frame_id), poses=poses)


def layers_for(model_ms: float, device: str = "cpu") -> dict[str, int]:
    """Layers of each tier such that the first takes `model_ms` on this device, or one idle thread of this machine."""
    torch.set_num_threads(1)
    image = torch.zeros(1, 3, _HEIGHT, _WIDTH, device=device)
    took_ms = []
    sample = 10
    with torch.inference_mode():
        net = BenchNet(sample).eval().to(device)
        for _ in range(60):
            started = time.perf_counter()
            net(image).cpu()
            took_ms.append((time.perf_counter() - started) * 1e3)
    layer_ms = float(np.percentile(took_ms[10:], 25)) / sample  # of what is not disturbed by others
    return {
        tier: max(1, round(model_ms * share / layer_ms)) for tier, share in zip(TIERS, SHARES, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ms", type=float, help="inference time of the first tier in ms")
    parser.add_argument("device", nargs="?", default="cpu", help="cpu or cuda")
    arguments = parser.parse_args()
    print(json.dumps({"layers": layers_for(arguments.ms, arguments.device)}))


if __name__ == "__main__":
    main()
