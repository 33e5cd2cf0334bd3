"""An NVIDIA card: temperature, clock, throttling, utilisation, memory; by NVML, or sysfs on a Jetson."""

import importlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_MIB = 1 << 20
_HZ_PER_MHZ = 1_000_000
_THROTTLED = {0x20: "thermal", 0x40: "thermal, by hardware", 0x08: "slowed down by hardware", 0x80: "power brake"}
"""NVML's reasons for lower clocks that are told; a power cap or idle clocks are how cards work."""
_BY_BUS = "PCI_BUS_ID"
_JETSON_GPUS = ("gpu", "ga10b", "gv11b", "gp10b", "gm20b", "gb10b")


@dataclass(frozen=True)
class Gpu:
    """One second of a card; NaN where it does not say.

    Attributes:
        temperature_c, clock_mhz: now.
        used_share: of the last moment in which a kernel ran, 0 to 1.
        memory_used_mib, memory_total_mib: memory in MiB.
        throttled: why the clocks are lower than they could be, empty if they are not.
    """

    temperature_c: float
    clock_mhz: float
    used_share: float
    memory_used_mib: float
    memory_total_mib: float
    throttled: tuple[str, ...]

    def values(self) -> dict[str, float]:
        """As numbers by name, for the records."""
        return {
            "gpu_temperature_c": self.temperature_c, "gpu_clock_mhz": self.clock_mhz,
            "gpu_used_percent": 100 * self.used_share, "gpu_memory_used_mib": self.memory_used_mib,
            "gpu_throttled": float(bool(self.throttled)),
        }  # fmt: skip


class GpuSource(Protocol):
    """Where a card is read from.

    Attributes:
        word: what it is, or why there is none.
    """

    word: str

    def read(self) -> Gpu | None:
        """The card now, None where there is none."""


class NoGpu:
    """No card to read; `word` says why."""

    def __init__(self, word: str) -> None:
        """Say why."""
        self.word = word

    def read(self) -> Gpu | None:
        """Nothing."""
        return None


class Nvml:
    """A card by NVML, or a part of one (MIG)."""

    def __init__(self, nvml: Any, index: int, environment: Mapping[str, str] = os.environ) -> None:  # noqa: ANN401
        """Open the card that CUDA calls by this index.

        Args:
            nvml: the module, which has no types.
            index: CUDA's, among those that are visible.
            environment: `CUDA_VISIBLE_DEVICES` names these in their order, by NVML's index or by the first letters
                of a UUID; without it, workers have CUDA number the cards as NVML does, see `choose_device`.

        Raises:
            nvml.NVMLError: there is no driver, or no such card.
            LookupError: which card it is cannot be known.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._card = self._handle(index, environment)
        self.word = str(nvml.nvmlDeviceGetName(self._card))

    def _handle(self, index: int, environment: Mapping[str, str]) -> Any:  # noqa: ANN401
        nvml = self._nvml
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        names = [str(index)] if visible is None else [name.strip() for name in visible.split(",")][index : index + 1]
        if not names:
            msg = f"CUDA_VISIBLE_DEVICES is {visible!r}, which has no device {index}"
            raise LookupError(msg)
        (name,) = names
        if name.isdecimal():
            cards = nvml.nvmlDeviceGetCount()
            if cards > 1 and environment.get("CUDA_DEVICE_ORDER", _BY_BUS) != _BY_BUS:
                msg = f"CUDA_DEVICE_ORDER is not {_BY_BUS}, and there are {cards} cards"
                raise LookupError(msg)
            return nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.startswith("MIG-"):
            return nvml.nvmlDeviceGetHandleByUUID(name)
        for number in range(nvml.nvmlDeviceGetCount()):
            card = nvml.nvmlDeviceGetHandleByIndex(number)
            if str(nvml.nvmlDeviceGetUUID(card)).startswith(name):
                return card
        msg = f"CUDA_VISIBLE_DEVICES names {name}, and no card has that UUID"
        raise LookupError(msg)

    def read(self) -> Gpu | None:
        """The card now; what it does not say is NaN."""
        nvml, card = self._nvml, self._card
        used = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu)
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(card))
        reasons = self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)) or 0
        return Gpu(
            _or_nan(self._ask(lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU))),
            _or_nan(self._ask(lambda: nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM))),
            _or_nan(used) / 100,
            math.nan if memory is None else memory.used / _MIB,
            math.nan if memory is None else memory.total / _MIB,
            tuple(why for bit, why in _THROTTLED.items() if reasons & bit),
        )

    def _ask(self, question: Any) -> Any:  # noqa: ANN401 - a module without types
        """The answer, None where this card or driver does not have it."""
        try:
            return question()
        except self._nvml.NVMLError:
            return None


class JetsonGpu:
    """The GPU of a Jetson by sysfs; its temperature is among the machine's thermal zones, its memory the machine's."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`, one of /sys/class/devfreq."""
        self._folder = folder
        self.word = f"Jetson, {folder.name}"

    def read(self) -> Gpu | None:
        """Clock and load now."""
        clock_mhz = _file(self._folder / "cur_freq") / _HZ_PER_MHZ
        used_share = _file(self._folder / "device" / "load") / 1000
        return Gpu(math.nan, clock_mhz, used_share, math.nan, math.nan, ())


def gpu_source(device: str, sys: Path = Path("/sys")) -> GpuSource:
    """The card that a node of this parameter `device` uses, asked for once.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        sys: where the kernel tells of devices.
    """
    if device == "cpu":
        return NoGpu("not used")
    for folder in sorted((sys / "class" / "devfreq").glob("*")):
        if any(name in folder.name for name in _JETSON_GPUS) and (folder / "cur_freq").exists():
            return JetsonGpu(folder)
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return NoGpu("not watched: nvidia-ml-py is not installed")
    try:
        return Nvml(nvml, int(device.partition(":")[2] or 0))
    except nvml.NVMLError as error:
        return NoGpu(f"none: {error}")
    except LookupError as error:
        return NoGpu(f"not watched: {error}")


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _file(path: Path) -> float:
    try:
        return float(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return math.nan
