"""PyTorch perception and planning in a vehicle: an answer for every frame by its deadline."""

import os
import sys

from torchperf_ros.frame.module_path import is_own_process, look_here_after_python

__version__ = "0.1.0"

if is_own_process():  # before anything else is imported
    look_here_after_python()

# A vehicle reports to nobody. ONNX Runtime writes a device's id and queues events for its vendor as soon as
# it is imported, OpenVINO's converter asks a server of its vendor: both look here, so this comes before any
# other import, and processes that are started from here have it, too.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# importing it fails, as it may
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
