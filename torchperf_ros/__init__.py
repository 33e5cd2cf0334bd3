"""PyTorch perception and planning in a vehicle: an answer for every frame by its deadline."""

from torchperf_ros.frame.module_path import is_own_process, look_here_after_python

__version__ = "0.1.0"

if is_own_process():  # before anything else is imported
    look_here_after_python()
