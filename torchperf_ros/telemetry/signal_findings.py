"""What the watch found last: it goes on while a busy machine leaves the recorder no time to look again."""

from collections.abc import Sequence

from torchperf_ros.core.anomaly_rules import Anomaly
from torchperf_ros.core.clock import NS_PER_S

_PATIENCE_NS = 20 * NS_PER_S


class LastFindings:
    """The findings of the recorder's last look; none once it has been silent for more than 20 s."""

    def __init__(self) -> None:
        """Nothing found."""
        self._found: Sequence[Anomaly] = ()
        self._heard_ns = 0

    def update(self, found: Sequence[Anomaly], now_ns: int, *, looked: bool) -> Sequence[Anomaly]:
        """What goes on now.

        Args:
            found: what the recorder has said since the last call.
            now_ns: monotonic time.
            looked: whether it has looked since then; if so, what it did not find again is over.
        """
        if found or looked:
            self._found, self._heard_ns = found, now_ns
        return self._found if now_ns - self._heard_ns <= _PATIENCE_NS else ()
