"""The adapter API, at the name that users import: see `model/adapter.py`."""

from torchperf_ros.frame.errors import BadInput
from torchperf_ros.model.adapter import Adapter, Received, load_adapter

__all__ = ["Adapter", "BadInput", "Received", "load_adapter"]
