"""A stage's guard: what it is given, what it makes of an output, and the alert that follows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from torchperf_ros.api.alert import Alert
from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.safety.guard import Checked, Guard, Known
from torchperf_ros.safety.source_clock import SourceClock
from torchperf_ros.settings.config import StageConfig
from torchperf_ros.stage.alert_rules import clock_alert, guard_alert
from torchperf_ros.stage.fallbacks import times_of
from torchperf_ros.stage.figures import StageCounters
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.turn import Output, Turn

# Index of the guard's odometry among a stage's inputs, below those of scenes.
#
# Obstacles have -101, -102, and so on.
GUARD_ODOMETRY: Final = -100
_ODOMETRY_TYPE: Final = "nav_msgs/msg/Odometry"
_OBSTACLES_TYPE: Final = "visualization_msgs/msg/MarkerArray"


@dataclass
class StageGuard:
    """The guard of a stage.

    Attributes:
        counters: the stage's, in which shadow's refusals are counted.
        tell: takes an alert that is of no frame.
        ros_now: gives ROS time in ns.
        stop: makes the stage's stop for a monotonic time; None where there is none.
        failed: logs the exception that is being handled, with these words.
    """

    stage: str
    guard: Guard
    counters: StageCounters
    tell: Callable[[Alert], None]
    ros_now: Callable[[], int]
    stop: Callable[[int], bytes | None]
    failed: Callable[[str], None]
    _stop: bytes | None = None  # what goes out since the guard itself has failed
    _frames: SourceClock = field(default_factory=SourceClock)

    @property
    def refused(self) -> dict[str, int | str]:
        """The messages that the guard could not use."""
        return self.guard.refused

    @staticmethod
    def inputs(config: StageConfig) -> list[tuple[int, str, str]]:
        """Index, topic and message type of what a stage's guard takes; nothing without one."""
        if config.guard is None:
            return []
        topics = enumerate(config.guard.obstacles)
        sources = [(GUARD_ODOMETRY - 1 - at, topic, _OBSTACLES_TYPE) for at, topic in topics]
        return [(GUARD_ODOMETRY, config.odometry, _ODOMETRY_TYPE), *sources]

    def take(self, index: int, data: bytes, stamp_ns: int, received_ns: int) -> None:
        """A message of one of `inputs`.

        `stamp_ns`: its own, or that of the frame it was computed from, 0 for none.
        """
        if index == GUARD_ODOMETRY:
            self.guard.moved(data, received_ns)
        else:
            self.guard.saw(GUARD_ODOMETRY - 1 - index, data, received_ns, stamp_ns)

    def check_output(self, output: Output, now_ns: int) -> Output:
        """What is to be published instead of an output; an error of the guard is answered by a stop."""
        try:
            is_stop = output.fallback is Fallback.STOP
            checked = self.check(output.payload, output.source, now_ns, self.ros_now(), is_stop=is_stop)
        except Exception as error:  # the guard's boundary
            output.outcome = Outcome.ERROR
            output.reason = f"an error in the guard: {type(error).__name__}: {error}"
            self.failed("had an error in its guard")
            checked = self.instead(output.payload, self.stop(now_ns))
            if checked.verdict is not GuardVerdict.ACCEPT:
                output.result = None
                output.fallback = Fallback.NONE if checked.payload is None else Fallback.STOP
        output.checked, output.payload = checked, checked.payload
        return output

    def check(
        self,
        output: bytes | None,
        source: Frame | None,
        now_ns: int,
        ros_now_ns: int,
        *,
        is_stop: bool = False,
    ) -> Checked:
        """What is to be published instead of an output.

        Args:
            output: CDR bytes; None where there is nothing to publish.
            source: the frame that it was computed from.
            now_ns: monotonic time.
            ros_now_ns: ROS time.
            is_stop: whether it is the stage's stop, which is stamped in ROS time.
        """
        stamped_ns, stepped_ns, age_ms = self._times(source, now_ns, ros_now_ns)
        checked = self.guard.check(
            output, now_ns, stamped_ns, age_ms, 0 if is_stop else stepped_ns, is_stop=is_stop
        )
        self._stop = None
        while self.guard.news:
            self.tell(clock_alert(self.stage, self.guard.news.popleft()))
        return checked

    def known(self, source: Frame, now_ns: int, ros_now_ns: int) -> Known | None:
        """What a plan computed from this frame is judged by now; None where no check acts."""
        if not self.guard.acts:
            return None
        stamped_ns, stepped_ns, age_ms = self._times(source, now_ns, ros_now_ns)
        return self.guard.known(now_ns, stamped_ns, age_ms, stepped_ns)

    def instead(self, output: bytes | None, stop: bytes | None) -> Checked:
        """What is to be published when `check` has raised.

        A stop, the same one until a check succeeds again.

        Where all checks are in shadow, it is the output.
        """
        why = "the guard has failed, see the log"
        if not self.guard.acts:
            return Checked(output, GuardVerdict.ACCEPT, shadow=why)
        self._stop = self._stop or stop
        if self._stop is None:
            return Checked(
                None, GuardVerdict.UNCHECKED, reason=f"{why}; there is no earlier plan to stop along"
            )
        return Checked(self._stop, GuardVerdict.STOP, reason=f"{why}; the stage's stop is published")

    def answered(self, turn: Turn, answer: Answer) -> Alert | None:
        """Count what was refused; returns the alert that follows."""
        checked = turn.checked
        if checked is None:
            return None
        is_fine = checked.verdict is GuardVerdict.ACCEPT
        if is_fine and not checked.shadow:
            return None
        text = checked.shadow if is_fine else checked.reason
        self.counters.shadow_refusals += bool(checked.shadow)
        self.counters.last_check = f"frame {answer.frame.seq}: {checked.verdict.word}: {text}"
        numbers = {
            "value": checked.value,
            "limit": checked.limit,
            "ttc_s": checked.ttc_s,
            "needed_deceleration": checked.needed_deceleration,
        }
        values = {name: f"{number:.3f}" for name, number in numbers.items() if math.isfinite(number)}
        return guard_alert(self.stage, answer, text, {"check": checked.check, **values}, shadow=is_fine)

    def _times(self, source: Frame | None, now_ns: int, ros_now_ns: int) -> tuple[int, int, float]:
        """See `times_of`; and how old the frame is in ms, NaN of none."""
        if source is None:
            return ros_now_ns, 0, math.nan
        stamped_ns, stepped_ns = times_of(source, now_ns, ros_now_ns)
        age_s, unknown = self._frames.age_s(
            source.stamp_ns, source.received_ns, now_ns, ros_now_ns - stepped_ns
        )
        if self._frames.is_ros and ros_now_ns:  # an old frame is no frame of another time
            stamped_ns = ros_now_ns
        since_ms = (now_ns - source.received_ns) / NS_PER_MS
        return stamped_ns, stepped_ns, since_ms if unknown else 1000 * age_s
