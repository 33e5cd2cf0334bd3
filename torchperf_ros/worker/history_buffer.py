"""Bounded histories, at the name that users import: see `model/history_buffer.py`."""

from torchperf_ros.model.history_buffer import HistoryBuffer

__all__ = ["HistoryBuffer"]
