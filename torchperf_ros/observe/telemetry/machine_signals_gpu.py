"""An NVIDIA card: temperature, clock, throttling, utilisation, memory; by NVML, or sysfs on a Jetson."""

import importlib
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchperf_ros.observe.telemetry.machine_signals import number_in

_MIB = 1 << 20
_HZ_PER_MHZ = 1_000_000
# NVML's reasons for lower clocks that lead to an alert; a power cap or idle clocks are how cards
# work.
_THROTTLED = {
    0x20: "thermal",
    0x40: "thermal, by hardware",
    0x08: "slowed down by hardware",
    0x80: "power brake",
}
_BY_BUS = "PCI_BUS_ID"
_JETSON_GPUS = ("gpu", "ga10b", "gv11b", "gp10b", "gm20b", "gb10b")


class Gpu:
    """A card, or none.

    Attributes:
        word: what it is, or why there is none.
        throttled: why its clocks are lower than they could be, as of the last look; empty if they are not.
    """

    def __init__(self, word: str) -> None:
        """No card; `word` says why."""
        self.word, self.throttled = word, ""

    def read(self) -> dict[str, float]:
        """The card now, by name and unit as the records have it, NaN where it does not say.

        Empty without one.

        `gpu_used_percent` is the share of the last moment in which a kernel ran.
        """
        return {}


class Nvml(Gpu):
    """A card by NVML, or a part of one (MIG)."""

    def __init__(self, nvml: Any, index: int, environment: Mapping[str, str] = os.environ) -> None:  # noqa: ANN401
        """Open the card that CUDA calls by this index.

        Args:
            nvml: the module, which has no types.
            index: CUDA's, among those that are visible.
            environment: `CUDA_VISIBLE_DEVICES` names these in their order, by NVML's index or by the first
                letters of a UUID; without it, workers have CUDA number the cards as NVML does, see
                `choose_device`.

        Raises:
            nvml.NVMLError: there is no driver, or no such card.
            LookupError: which card it is cannot be known.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._card = self._handle(index, environment)
        super().__init__(str(nvml.nvmlDeviceGetName(self._card)))

    def _handle(self, index: int, environment: Mapping[str, str]) -> Any:  # noqa: ANN401
        nvml = self._nvml
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = (
            [str(index)]
            if visible is None
            else [name.strip() for name in visible.split(",")][index : index + 1]
        )
        if not names:
            raise LookupError(f"CUDA_VISIBLE_DEVICES is {visible!r}, which has no device {index}")
        (name,) = names
        if name.isdecimal():
            cards = nvml.nvmlDeviceGetCount()
            if cards > 1 and environment.get("CUDA_DEVICE_ORDER", _BY_BUS) != _BY_BUS:
                raise LookupError(f"CUDA_DEVICE_ORDER is not {_BY_BUS}, and there are {cards} cards")
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        for number in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(number)
            if str(nvml.nvmlDeviceGetUUID(card)).startswith(name):
                return card
        raise LookupError(f"CUDA_VISIBLE_DEVICES names {name}, and no card has that UUID")

    def read(self) -> dict[str, float]:
        """See `Gpu`."""
        nvml, card = self._nvml, self._card
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card))
        bits = 0 if math.isnan(reasons) else int(reasons)
        self.throttled = "; ".join(why for bit, why in _THROTTLED.items() if bits & bit)
        return {
            "gpu_temperature_c": self._ask(
                lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU)
            ),
            "gpu_clock_mhz": self._ask(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)),
            "gpu_used_percent": self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu),
            "gpu_memory_used_mib": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card).used / _MIB),
            "gpu_memory_total_mib": self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card).total / _MIB),
            "gpu_throttled": float(bool(self.throttled)),
        }

    def _ask(self, question: Callable[[], float]) -> float:
        """The answer, NaN where this card or driver does not have it."""
        try:
            return float(question())
        except self._nvml.NVMLError:
            return math.nan


class JetsonGpu(Gpu):
    """The GPU of a Jetson by sysfs.

    Its temperature is among the machine's thermal zones, its memory the machine's.
    """

    def __init__(self, folder: Path) -> None:
        """Read `folder`, one of /sys/class/devfreq."""
        super().__init__(f"Jetson, {folder.name}")
        self._folder = folder

    def read(self) -> dict[str, float]:
        """Clock and load now."""
        return {
            "gpu_clock_mhz": number_in(self._folder / "cur_freq") / _HZ_PER_MHZ,
            "gpu_used_percent": number_in(self._folder / "device" / "load") / 10,
        }


def gpu_source(device: str, sys: Path = Path("/sys")) -> Gpu:
    """The card that a node of this parameter `device` uses, asked for once."""
    if device == "cpu":
        return Gpu("not used")
    for folder in sorted((sys / "class" / "devfreq").glob("*")):
        if any(name in folder.name for name in _JETSON_GPUS) and (folder / "cur_freq").exists():
            return JetsonGpu(folder)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Gpu("not watched: nvidia-ml-py is not installed")
    try:
        return Nvml(nvml, int(device.partition(":")[2] or 0))
    except nvml.NVMLError as error:
        return Gpu(f"none: {error}")
    except LookupError as error:
        return Gpu(f"not watched: {error}")
