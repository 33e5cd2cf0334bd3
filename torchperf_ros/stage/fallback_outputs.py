"""What can stand in for a missing result: the last good output, and the stop made from it."""

import functools
from dataclasses import dataclass

from torchperf_ros.config.config import StageConfig
from torchperf_ros.frame.clock import NS_PER_MS
from torchperf_ros.frame.frame import USABLE_AGE_MS, Frame, usable_age_ms
from torchperf_ros.frame.outcome import Fallback
from torchperf_ros.frame.stop_output import TimedPath, can_stop


@dataclass
class _Made:
    """An output, and the frame that it was computed from."""

    payload: bytes
    frame: Frame

    @functools.cached_property
    def path(self) -> TimedPath | None:
        return TimedPath.read(self.payload)


class FallbackOutputs:
    """Remembers the newest good output, and makes the stop output from it.

    A stop is made once per failure: from the frame that it is published for until one is answered otherwise, with a
    fresh result or a held output, every frame gets the same bytes. So the vehicle keeps to one braking trajectory. It
    ends at standstill, where the vehicle stays however long the failure lasts, and whatever results come late: a stop
    that began anew with each of them would never end.

    Only the stage's thread calls, except for `forget`.
    """

    def __init__(self) -> None:
        """Start with nothing to hold."""
        self.forget(0)

    def forget(self, now_ns: int) -> None:
        """Hold nothing of what was received before now (monotonic): the vehicle may be elsewhere when frames return."""
        self._not_before_ns = now_ns
        self._good: _Made | None = None
        self._stop: _Made | None = None
        self._stopping = False  # the stop is what was published last

    def remember(self, payload: bytes, frame: Frame, *, late: bool = False) -> None:
        """A good output of a frame, published or late; an older one than the held one is ignored."""
        if not (late and self._stopping):
            self._stop, self._stopping = None, False
        is_newer = self._good is None or frame.seq > self._good.frame.seq
        if is_newer and frame.received_ns >= self._not_before_ns:
            self._good = _Made(payload, frame)

    def prepare(self, config: StageConfig, output_type: str, answer_ns: int, ros_answer_ns: int) -> None:
        """Make the stop output ahead of the deadline, if the answer may come to need it; takes at most some 2 ms.

        There is none where the last good output does not say where the vehicle is at that time: see `TimedPath`.

        Args:
            config: the stage's configuration.
            output_type: message type of the output.
            answer_ns: monotonic time of the deadline.
            ros_answer_ns: the same in ROS time; braking begins then, unless this is no time of the output's own: before
                the first `/clock`, or for a log that is played without one.
        """
        if Fallback.STOP not in config.fallback or not can_stop(output_type):
            return
        if self._choose(config, answer_ns, backup=False, stop=self._good is not None) is Fallback.STOP:
            self._make_stop(config, answer_ns, ros_answer_ns)

    def stop(self, config: StageConfig, answer_ns: int, ros_answer_ns: int) -> bytes | None:
        """The stop output, whatever fallbacks are configured, as the answer; None if there is none: see `prepare`."""
        self._make_stop(config, answer_ns, ros_answer_ns)
        self._stopping = self._stop is not None
        return self.payload(Fallback.STOP)

    def _make_stop(self, config: StageConfig, answer_ns: int, ros_answer_ns: int) -> None:
        good = self._good
        if self._stop is None and good is not None and good.path is not None:
            stop = good.path.stop(time_of(good.frame, answer_ns, ros_answer_ns), config.stop_deceleration)
            self._stop = None if stop is None else _Made(stop, good.frame)

    def choose(self, config: StageConfig, answer_ns: int, *, backup: bool = False) -> Fallback:
        """The first configured fallback that is available for an answer at `answer_ns`, which it is then given.

        `backup`: whether the backup has a result of this frame.
        """
        chosen = self._choose(config, answer_ns, backup=backup, stop=self._stop is not None)
        self._stopping = chosen is Fallback.STOP
        if not self._stopping:
            self._stop = None
        return chosen

    def _choose(self, config: StageConfig, answer_ns: int, *, backup: bool, stop: bool) -> Fallback:
        good = self._good
        young = good is not None and (answer_ns - good.frame.received_ns) / NS_PER_MS <= config.hold_last_ms
        available = {Fallback.BACKUP: backup, Fallback.HOLD_LAST: young, Fallback.STOP: stop, Fallback.NONE: True}
        return next((kind for kind in config.fallback if available[kind]), Fallback.NONE)

    def payload(self, fallback: Fallback | None) -> bytes | None:
        """The bytes to publish for `hold_last` and `stop`; None for the others."""
        made = {Fallback.HOLD_LAST: self._good, Fallback.STOP: self._stop}.get(fallback) if fallback else None
        return None if made is None else made.payload

    @property
    def frame(self) -> Frame | None:
        """The frame that the held output, or the stop, was computed from; None: there is none."""
        made = self._stop if self._stopping else self._good
        return None if made is None else made.frame


def time_of(frame: Frame, now_ns: int, ros_now_ns: int) -> int:
    """ROS time of now in the time of an output; if that is far from where its frame's stamp says, the latter."""
    if not frame.stamp_ns:
        return ros_now_ns
    since_ms = usable_age_ms(frame.age_ms) + (now_ns - frame.received_ns) / NS_PER_MS
    expected_ns = frame.stamp_ns + round(since_ms * NS_PER_MS)
    return ros_now_ns if abs(ros_now_ns - expected_ns) <= USABLE_AGE_MS * NS_PER_MS else expected_ns
