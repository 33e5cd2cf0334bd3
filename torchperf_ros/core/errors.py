"""The errors of this package, at the name that users import: see `frame/errors.py`."""

from torchperf_ros.frame.errors import AdapterError, BadInput, ConfigError, TorchperfError

__all__ = ["AdapterError", "BadInput", "ConfigError", "TorchperfError"]
