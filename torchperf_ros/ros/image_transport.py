"""Fast DDS settings that carry camera images, for processes that the package starts itself."""

import importlib.metadata
import os
import sys
from pathlib import Path

_PROFILE = "fastdds_shared_memory.xml"
_PROFILE_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")  # Kilted and later; before
_KILTED_RCLPY = 9


def carry_images() -> None:
    """Give this process and its children a shared-memory segment that images fit into, unless a transport was chosen.

    With Fast DDS' defaults most messages of 1 MB and more are lost.
    """
    if any(name in os.environ for name in ("FASTDDS_BUILTIN_TRANSPORTS", *_PROFILE_VARIABLES)):
        return
    prefixes = [*os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep), sys.prefix]
    folders = [Path(__file__).parents[2], *(Path(prefix, "share", "torchperf_ros") for prefix in prefixes if prefix)]
    for folder in folders:
        profile = folder / "config" / _PROFILE
        if profile.is_file():
            older = int(importlib.metadata.version("rclpy").partition(".")[0]) < _KILTED_RCLPY
            os.environ[_PROFILE_VARIABLES[older]] = str(profile)
            return
    os.environ["FASTDDS_BUILTIN_TRANSPORTS"] = "LARGE_DATA"  # an installation without the package's data files
