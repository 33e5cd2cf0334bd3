"""A model that waits instead of computing, so that several beside each other do not disturb one another.

Longer and longer, from a while after the first frame on.
"""

import random
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.rig.bench_adapter import POSES, BenchAdapter
from benchmarks.rig.bench_stage import SHARES, TIERS
from torchperf_ros.api.adapter import Received


class RampAdapter(BenchAdapter):
    """As the bench adapter, with a model that waits.

    Options:
        base_ms: what the first tier takes.
        after_s: from the first frame until it begins to take longer.
        ramp_s: until it takes 1.5 times as long.
        seed: of the noise, 3 % (log-normal).
    """

    def __init__(self, options: dict[str, Any], device: torch.device) -> None:
        super().__init__({"layers": {}}, device)
        self._options, self._first_at = options, 0.0
        self._draw = random.Random(options["seed"])

    def build(self, tier: str) -> nn.Module:
        return _Wait(self, SHARES[TIERS.index(tier)])

    def preprocess(self, messages: Mapping[str, Received]) -> tuple[torch.Tensor, ...]:
        self._first_at = self._first_at or time.monotonic()
        return super().preprocess(messages)

    def wait(self, share: float) -> None:
        """As long as a run takes now."""
        since_s = time.monotonic() - self._first_at - self._options["after_s"] if self._first_at else 0.0
        slower = 1.0 + 0.5 * min(max(0.0, since_s / self._options["ramp_s"]), 1.0)
        time.sleep(self._options["base_ms"] / 1e3 * share * slower * self._draw.lognormvariate(0.0, 0.03))


class _Wait(nn.Module):
    def __init__(self, adapter: RampAdapter, share: float) -> None:
        super().__init__()
        self._wait = adapter.wait
        self._share = share

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self._wait(self._share)
        return torch.zeros(1, POSES)
