"""PyTorch perception and planning in a vehicle: an answer for every frame by its deadline.

What an adapter needs is here: `from torchperf_ros import Adapter, BadInput, HistoryBuffer, Received,
message_class, pixels`. Everything below the package is private.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from torchperf_ros.api.import_paths import OldPaths, is_own_process, look_here_after_python

if TYPE_CHECKING:
    from torchperf_ros.api.adapter import Adapter, Received
    from torchperf_ros.api.errors import BadInput
    from torchperf_ros.api.histories import HistoryBuffer
    from torchperf_ros.api.messages import message_class
    from torchperf_ros.api.pixels import pixels

__version__ = "0.1.0"
__all__ = ["Adapter", "BadInput", "HistoryBuffer", "Received", "message_class", "pixels"]

# Where each public name lives. The node process must not load torch, so a name is loaded on first
# use.
_PUBLIC: Final = {
    "Adapter": "adapter",
    "BadInput": "errors",
    "HistoryBuffer": "histories",
    "Received": "adapter",
    "message_class": "messages",
    "pixels": "pixels",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class or a function
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.api.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


# `python -m` puts the folder of the start first, where a user's `queue.py` would stand in for Python's own. So this
# comes before anything else is imported.
if is_own_process():
    look_here_after_python()

sys.meta_path.append(OldPaths())

# A vehicle reports to no one. ONNX Runtime writes a device's id and queues events for its vendor as soon as it is
# imported, OpenVINO's converter asks a server of its vendor: both look here, so this comes before any other import,
# and processes that are started from here have it, too.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # importing it fails, as it may
