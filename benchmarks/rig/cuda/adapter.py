"""The poisonous bench adapter, with the faults of a GPU.

Memory that runs out, and a context that is lost.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from benchmarks.rig.poison_adapter import PoisonAdapter
from benchmarks.rig.poison_faults import FAULTS
from torchperf_ros.api.adapter import Received

_TOO_LARGE: Final = 1 << 50  # bytes; more than any card has, so that nothing of others is taken


def _lose_context(device: torch.device) -> None:
    """An index that is out of bounds: an assertion on the device, after which every call of CUDA fails."""
    if device.type == "cuda":
        torch.zeros(2, device=device)[torch.tensor([7], device=device)]
        torch.cuda.synchronize(device)


GPU_FAULTS: Final[dict[str, Callable[[torch.device], object]]] = {"context lost": _lose_context}
OUT_OF_MEMORY: Final = "out of memory"
NAMES: Final = (*FAULTS, *GPU_FAULTS, OUT_OF_MEMORY)
"""The image's first byte is 0 for none, or 1 and up for the faults in this order."""


class _Hungry(nn.Module):
    """Wants more memory than there is for an image whose first pixel says so.

    `starves` is false for a lower tier.
    """

    def __init__(self, net: nn.Module, *, starves: bool) -> None:
        super().__init__()
        self.net, self.starves = net, starves

    def forward(self, image: torch.Tensor, hungry: torch.Tensor) -> torch.Tensor:
        if self.starves and hungry.numel() > 1:
            if image.device.type != "cuda":
                raise torch.OutOfMemoryError("as on a GPU")
            torch.empty(_TOO_LARGE, dtype=torch.uint8, device=image.device)
        return self.net(image)


class CudaAdapter(PoisonAdapter):
    """Poisoned by frames, on any device; the lower tiers never run out of memory."""

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__(options, device)
        self._first = next(iter(options["layers"]))

    def build(self, tier: str) -> nn.Module:
        return _Hungry(super().build(tier), starves=tier == self._first).eval()

    def example_inputs(self, tier: str) -> tuple[torch.Tensor, ...]:
        return (*super().example_inputs(tier), torch.zeros(1, device=self._device))

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        first = int(messages["image"].message.data[0])
        fault = NAMES[first - 1] if 0 < first <= len(NAMES) else ""
        GPU_FAULTS.get(fault, lambda _: None)(self._device)
        hungry = torch.zeros(2 if fault == OUT_OF_MEMORY else 1, device=self._device)
        return (*super().preprocess(messages), hungry)
