"""What the figures were measured on, and what a benchmark needs of the machine."""

import os

import psutil

from torchperf_ros.runs.machine_fingerprint import machine_now, version_of


def machine() -> dict[str, object]:
    """The machine, the versions of ROS, and how busy others keep it (takes a second)."""
    return {
        **machine_now(),
        "rclpy": version_of("rclpy"),
        "fastdds": version_of("ros-fastdds"),
        "fifo_permitted": _fifo_permitted(),
        "others_cpu_percent": psutil.cpu_percent(interval=1.0),
    }


def _fifo_permitted() -> bool:
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, policy, parameters)
    return True
