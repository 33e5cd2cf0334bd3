"""Networks that nobody tuned for this package, and an adapter that runs one of them.

They are torchvision's where it works, with random weights; else networks of the same shape in plain torch.
`small` asks for one block of each kind, for trials on a CPU.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.rig.bench_adapter import POSES, BenchAdapter
from torchperf_ros.api.adapter import Received

RESNET, LRASPP, VIT = "resnet50", "lraspp_mobilenet_v3_large", "vit_b_16"
SIZES: Final = {RESNET: (640, 640), LRASPP: (480, 640), VIT: (224, 224)}
"""Height and width of the image that each is measured with."""
_SMALL: Final = (64, 64)
_MOST_FRAMES: Final = 8
ADAPTER: Final = "benchmarks.rig.cuda.networks:NetworkAdapter"


class NetworkAdapter(BenchAdapter):
    """One network: an image of any size in, which it scales on the device, a short path out.

    Options:
        network: one of `SIZES`.
        small: for a trial on a CPU.
        batch: whether dimension 0 may vary.
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__({"layers": {}, **options}, device)
        self._network, self._small = options["network"], bool(options.get("small"))
        self._size = _SMALL if self._small else SIZES[self._network]
        self._batch = bool(options.get("batch"))

    def build(self, tier: str) -> nn.Module:
        torch.manual_seed(0)
        return network(self._network, small=self._small).eval().to(self._device)

    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        return (torch.rand(1, 3, *self._size, generator=generator).to(self._device),)

    def dynamic_dims(self) -> dict[int, dict[int, tuple[int, int]]]:
        return {0: {0: (1, _MOST_FRAMES)}} if self._batch else {}

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        return (self.scaled(self.upload(messages["image"].message)),)

    def upload(self, image: Any) -> torch.Tensor:
        """The pixels on the device, as they came."""
        pixels = np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3)
        return torch.from_numpy(pixels).to(self._device, non_blocking=True)

    def scaled(self, pixels: torch.Tensor) -> torch.Tensor:
        """[height, width, 3] of bytes to [1, 3, of the network's size] from 0 to 1."""
        # As the network was made ready for: without it, eager would run on another layout.
        image = pixels.permute(2, 0, 1).unsqueeze(0).contiguous().float().mul_(1 / 255)
        return functional.interpolate(image, self._size) if image.shape[2:] != self._size else image

    def sideways(self, outputs: Any) -> list[float]:
        """The first numbers of the answer, a mean over pixels where it is an image."""
        answer = outputs["out"].mean(dim=(2, 3)) if isinstance(outputs, Mapping) else outputs
        found: list[float] = answer[0, :POSES].tolist()
        return found


def network(name: str, *, small: bool = False, own: bool = False) -> nn.Module:
    """A network with random weights; `own` is ours also where torchvision is installed."""
    try:
        models = None if small or own else importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError):
        # It is not there, or its compiled operators are for another build of torch.
        models = None
    if models is None:
        return _OWN[name](small=small)
    family = models.segmentation if name == LRASPP else models
    weights = {"weights": None} | ({"weights_backbone": None} if name == LRASPP else {})
    found: nn.Module = getattr(family, name)(**weights)
    if name == VIT:
        # Its head begins with zeros, so that every answer would be the same. One class stands out, as in those of the
        # other two: half precision would choose another one of two that are near each other.
        nn.init.normal_(found.heads.head.weight, std=0.02)
        nn.init.normal_(found.heads.head.bias, std=5.0)
    return found


def normalised(*layers: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(*layers, nn.BatchNorm2d(channels))


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al., Deep Residual Learning, 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            normalised(nn.Conv2d(channels, width, 1, bias=False), channels=width),
            nn.ReLU(inplace=True),
            normalised(nn.Conv2d(width, width, 3, stride, 1, bias=False), channels=width),
            nn.ReLU(inplace=True),
            normalised(nn.Conv2d(width, out, 1, bias=False), channels=out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = normalised(nn.Conv2d(channels, out, 1, stride, bias=False), channels=out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _resnet(*, small: bool) -> nn.Module:
    layers: list[nn.Module] = [
        normalised(nn.Conv2d(3, 64, 7, 2, 3, bias=False), channels=64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(1 if small else blocks):
            layers.append(Bottleneck(channels, width, 1 if block else stride))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class Inverted(nn.Module):
    """A wide depthwise convolution between two narrow ones (Howard et al., MobileNetV3, 2019)."""

    def __init__(self, channels: int, width: int, out: int, kernel: int, stride: int) -> None:
        super().__init__()
        deep = nn.Conv2d(width, width, kernel, stride, kernel // 2, groups=width, bias=False)
        self.body = nn.Sequential(
            normalised(nn.Conv2d(channels, width, 1, bias=False), channels=width),
            nn.Hardswish(),
            normalised(deep, channels=width),
            nn.Hardswish(),
            normalised(nn.Conv2d(width, out, 1, bias=False), channels=out),
        )
        self._adds = stride == 1 and channels == out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) if self._adds else self.body(x)


_LOW: Final = ((16, 16, 3, 1), (64, 24, 3, 2), (72, 40, 5, 2), (72, 40, 3, 1), (120, 40, 5, 1))
_HIGH: Final = (
    (240, 80, 3, 2),
    *((200, 80, 3, 1),) * 3,
    *((480, 112, 3, 1),) * 2,
    *((960, 160, 5, 1),) * 3,
)


class Lraspp(nn.Module):
    """A segmenter for small devices: the head of the same paper, on a stack of its blocks."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        self.low, channels = self._stack(16, _LOW[:3] if small else _LOW)
        self.high, channels = self._stack(channels, _HIGH[:1] if small else _HIGH)
        self.stem = nn.Sequential(normalised(nn.Conv2d(3, 16, 3, 2, 1), channels=16), nn.Hardswish())
        self.body = normalised(nn.Conv2d(channels, 128, 1, bias=False), channels=128)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 128, 1), nn.Sigmoid())
        self.low_head, self.high_head = nn.Conv2d(40, 21, 1), nn.Conv2d(128, 21, 1)

    @staticmethod
    def _stack(channels: int, blocks: tuple[tuple[int, int, int, int], ...]) -> tuple[nn.Sequential, int]:
        layers = []
        for width, out, kernel, stride in blocks:
            layers.append(Inverted(channels, width, out, kernel, stride))
            channels = out
        return nn.Sequential(*layers), channels

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        low = self.low(self.stem(image))
        high = self.high(low)
        x = torch.relu(self.body(high)) * self.scale(high)
        x = functional.interpolate(x, low.shape[2:], mode="bilinear", align_corners=False)
        x = self.low_head(low) + self.high_head(x)
        x = functional.interpolate(x, image.shape[2:], mode="bilinear", align_corners=False)
        return {"out": x}


class Vit(nn.Module):
    """Patches of an image through a transformer's encoder (Dosovitskiy et al., 2021)."""

    def __init__(self, *, small: bool) -> None:
        super().__init__()
        width, heads, layers = (64, 4, 1) if small else (768, 12, 12)
        side = (_SMALL if small else SIZES[VIT])[0] // 16
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, side * side + 1, width) / 50)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


_OWN: Final[dict[str, Callable[..., nn.Module]]] = {RESNET: _resnet, LRASPP: Lraspp, VIT: Vit}
