"""What figures were measured on, for reports."""

import os
import platform
import time

import torch

from torchperf_ros.core.machine_fingerprint import cpu_model


def describe_machine(device: torch.device, threads: int) -> dict[str, object]:
    """Processor, device, versions, load, and the threads that were used, as JSON values."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "threads": threads,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def machine_line(machine: dict[str, object]) -> str:
    """The same in one line, for tables and pictures."""
    on = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    load = machine["load_average"]
    assert isinstance(load, list)
    return (
        f"{on}{machine['cpu']}, {machine['cores']} cores, threads {machine['threads']}, torch {machine['torch']}, "
        f"load {load[0]}"
    )
