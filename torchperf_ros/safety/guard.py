"""The guard of a stage's plans: judges each before it is published, and replaces one that fails."""

import math
from dataclasses import dataclass

from torchperf_ros.config.guard_options import GuardOptions
from torchperf_ros.frame.outcome import GuardVerdict


@dataclass(frozen=True, slots=True)
class Checked:
    """What the guard made of one plan.

    Attributes:
        payload: CDR bytes to publish; None: there is nothing to publish, see `reason`.
        verdict: see `GuardVerdict`.
        check: the first check that failed, out of `GUARD_CHECKS`; "" if none did.
        value, limit: what that check measured and the limit, in the check's unit; NaN if none failed.
        shadow: what shadow checks would have said, "" if nothing.
        reason: one line for people, "" if all is well.
        ttc_s: time to collision in s, NaN where none is predicted or nothing is known.
        needed_deceleration: m/s^2 that avoid it, NaN likewise.
    """

    payload: bytes | None
    verdict: GuardVerdict
    check: str = ""
    value: float = math.nan
    limit: float = math.nan
    shadow: str = ""
    reason: str = ""
    ttc_s: float = math.nan
    needed_deceleration: float = math.nan


class Guard:
    """Checks one stage's plans (`nav_msgs/Path`) against odometry, limits and obstacles.

    `moved` and `saw` may be called on any thread, `check` on the stage's: what one hands to another is replaced whole.
    """

    def __init__(self, options: GuardOptions) -> None:
        """Know nothing yet."""
        self._options = options
        self.refused: dict[str, str | int] = {}

    def moved(self, odometry: bytes, received_ns: int) -> None:
        """Take the CDR bytes of a `nav_msgs/Odometry`, received at this monotonic time."""

    def saw(self, source: int, markers: bytes, received_ns: int) -> None:
        """Take the CDR bytes of a `visualization_msgs/MarkerArray` of the source with this index in `obstacles`."""

    def check(self, plan: bytes | None, now_ns: int, ros_now_ns: int, age_ms: float) -> Checked:
        """Judge a plan, and say what to publish.

        Args:
            plan: CDR bytes of a `nav_msgs/Path`; None: the stage has none.
            now_ns: monotonic time.
            ros_now_ns: ROS time.
            age_ms: age of the frame that the plan was computed from: the measured part of the response time.
        """
        return Checked(plan, GuardVerdict.UNCHECKED, reason="the guard has no rules yet")

    def forget(self, now_ns: int) -> None:
        """Forget what was received and published before now (monotonic): the vehicle may be elsewhere."""
