"""What a replay cannot do."""

from torchperf_ros.core.errors import TorchperfError


class ReplayError(TorchperfError):
    """A log cannot be replayed with these parameters; the message says why and what would do."""
