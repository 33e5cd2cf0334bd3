"""The emergency lane on a virtual clock.

Its rules with real messages, and when its process publishes what.
"""

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.settings.safety_options import EmergencyOptions


class LaneOnClock:
    """What the lane's process does (`node/emergency_process.py`), without ROS.

    The caller's clock is monotonic time.

    Attributes:
        rules: take what the sensors send.
    """

    def __init__(self, options: EmergencyOptions) -> None:
        self.rules = Emergency(options)
        self._every_ns = round(NS_PER_S / options.rate_hz)
        self._publish_at_ns = 0

    def due(self, now_ns: int, ros_now_ns: int, *, at_once: bool = False) -> bytes | None:
        """Look for silence.

        The stop path where it is time to publish it: at once when latched, then at `rate_hz`; also `at_once`
        where the process ends, which is its last word.
        """
        rules = self.rules
        rules.look_for_silence(now_ns)
        if rules.latch is None or not rules.active:
            self._publish_at_ns = 0
            return None
        if now_ns < self._publish_at_ns and not at_once:
            return None
        self._publish_at_ns = now_ns + self._every_ns
        return rules.stop_path(now_ns, ros_now_ns)
