"""How a tier runs. One engine for now: eager."""

import time
from typing import Any

import numpy as np
import torch

from torchperf_ros.core.tier_ladder import Calibration
from torchperf_ros.worker.device import Device

_WARM_UP_RUNS = 3
_CALIBRATION_RUNS = 20
_CALIBRATION_SECONDS = 1.5
_FEWEST_RUNS = 5


class EagerEngine:
    """A tier's model, run operator by operator."""

    def __init__(self, model: torch.nn.Module, device: Device) -> None:
        """Take a built model and move it to the device in eval mode."""
        self._model = model.eval().to(device.device)
        self._device = device

    def run(self, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, int]:
        """Outputs and inference time in ns, copies to the device included."""
        with self._device.on_stream(), self._device.timed() as took_ns:
            outputs = self._model(*self._device.to_device(inputs))
        return outputs, took_ns[0]

    def calibrate(self, inputs: tuple[torch.Tensor, ...], *, briefly: bool = False) -> Calibration:
        """Warm up, then measure median and p99 of at most 20 runs or 1.5 s, but at least 5 runs.

        Args:
            inputs: what to run on.
            briefly: only 5 runs, where another worker serves meanwhile and has been calibrated.
        """
        for _ in range(_WARM_UP_RUNS):
            self.run(inputs)
        times_ms: list[float] = []
        stop_at = time.monotonic() + _CALIBRATION_SECONDS
        most = _FEWEST_RUNS if briefly else _CALIBRATION_RUNS
        while len(times_ms) < most and (len(times_ms) < _FEWEST_RUNS or time.monotonic() < stop_at):
            times_ms.append(self.run(inputs)[1] / 1e6)
        return Calibration(float(np.median(times_ms)), float(np.percentile(times_ms, 99)))
