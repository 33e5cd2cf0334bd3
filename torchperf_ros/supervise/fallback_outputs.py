"""What can stand in for a missing result: the last good output, and the stop made from it."""

from dataclasses import dataclass

from torchperf_ros.core.clock import NS_PER_MS
from torchperf_ros.core.config import StageConfig
from torchperf_ros.core.errors import BadInput
from torchperf_ros.core.fallback_policy import choose_fallback
from torchperf_ros.core.frame import USABLE_AGE_MS, Frame, usable_age_ms
from torchperf_ros.core.outcome import Fallback
from torchperf_ros.core.stop_output import can_stop, stop_path


@dataclass(slots=True)
class _Good:
    payload: bytes
    frame: Frame


class FallbackOutputs:
    """Remembers the newest good output and makes, once per failure, the stop output from it."""

    def __init__(self) -> None:
        """Start with nothing to hold."""
        self._good: _Good | None = None
        self._stop: bytes | None = None
        self._stop_tried = False

    def remember(self, payload: bytes, frame: Frame) -> None:
        """A good output of a frame, on time or late; an older one than the held one is ignored."""
        if self._good is None or frame.seq > self._good.frame.seq:
            self._good = _Good(payload, frame)
            self._stop = None
            self._stop_tried = False

    def prepare(self, config: StageConfig, output_type: str, answer_ns: int, ros_answer_ns: int) -> None:
        """Make the stop output ahead of the deadline, if the answer may come to need it.

        Made once per failure, so that the vehicle keeps to one braking trajectory instead of starting it anew with
        every frame.

        Args:
            config: the stage's configuration.
            output_type: message type of the output.
            answer_ns: monotonic time of the deadline.
            ros_answer_ns: the same in ROS time; braking begins then, unless this is no time of the output's own: before
                the first `/clock`, or for a log that is played without one.
        """
        wanted = Fallback.STOP in config.fallback and can_stop(output_type)
        if not wanted or self._stop_tried or self._good is None:
            return
        if self._choose(config, answer_ns, backup=False, stop=True) is Fallback.STOP:
            self._stop_tried = True
            # an output that its own stage made and encoded decodes; if not, there is no stop to publish
            try:
                begin_ns = _in_time_of(self._good.frame, answer_ns, ros_answer_ns)
                self._stop = stop_path(self._good.payload, begin_ns, config.stop_deceleration)
            except BadInput:
                self._stop = None

    def choose(self, config: StageConfig, answer_ns: int, *, backup: bool = False) -> Fallback:
        """The first configured fallback that is available for an answer at `answer_ns`.

        Args:
            config: the stage's configuration.
            answer_ns: monotonic time of the answer.
            backup: whether the backup has a result of this frame.
        """
        return self._choose(config, answer_ns, backup=backup, stop=self._stop is not None)

    def _choose(self, config: StageConfig, answer_ns: int, *, backup: bool, stop: bool) -> Fallback:
        age_ms = None if self._good is None else (answer_ns - self._good.frame.received_ns) / NS_PER_MS
        return choose_fallback(
            config.fallback, backup=backup, last_age_ms=age_ms, hold_last_ms=config.hold_last_ms, stop=stop
        )

    def payload(self, fallback: Fallback | None) -> bytes | None:
        """The bytes to publish for `hold_last` and `stop`; None for the others."""
        if fallback is Fallback.HOLD_LAST and self._good is not None:
            return self._good.payload
        return self._stop if fallback is Fallback.STOP else None

    @property
    def stamp_ns(self) -> int:
        """Stamp of the frame that the held output, and the stop made from it, were computed from; 0: there is none."""
        return 0 if self._good is None else self._good.frame.stamp_ns


def _in_time_of(frame: Frame, now_ns: int, ros_now_ns: int) -> int:
    """ROS time of now; if that is far from where the frame's stamp says it should be, the latter."""
    if not frame.stamp_ns:
        return ros_now_ns
    since_ms = usable_age_ms(frame.age_ms) + (now_ns - frame.received_ns) / NS_PER_MS
    expected_ns = frame.stamp_ns + round(since_ms * NS_PER_MS)
    return ros_now_ns if abs(ros_now_ns - expected_ns) <= USABLE_AGE_MS * NS_PER_MS else expected_ns
