"""How old a source's messages are, also where its stamps are of another clock than ROS time."""

from typing import Final

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S

# Clocks of hosts that run as one differ by less.
#
# What is stamped later than in so long says nothing of its age.
_AHEAD_NS: Final = NS_PER_S
# Nothing waits in a queue for an hour.
#
# Stamps that are further behind are of another clock, uptime for example.
_BACKLOG_NS: Final = 3600 * NS_PER_S
# ROS time that goes back by more has stepped.
#
# From frame to frame it is known less well than to a millisecond.
_STEP_NS: Final = 100 * NS_PER_MS
# So many messages in a row have to be ahead before a lesser delay is believed.
#
# One wrong stamp makes no clock.
_CONFIRMED_BY: Final = 5
# A lead of no more than this over the least delay is drift or jitter, and is believed at once.
_DRIFT_NS: Final = 10 * NS_PER_MS
# s; of the least delay a second is forgotten: ten times what two crystals drift apart
_FORGETS_IN: Final = 1000


def was_overtaken(stamp_ns: int, passed_ns: int, newest_ns: int, most_ms: float) -> bool:
    """Whether a message has an older stamp than the one that came `passed_ns` before, by no more than counts.

    By more, or later, the source's clock may have been set.
    """
    return stamp_ns > 0 and 0 < newest_ns - stamp_ns <= most_ms * NS_PER_MS >= passed_ns


class SourceClock:
    """The clock of one source's stamps.

    It is learned from the first stamped message, and kept until `Guard.forget`.

    - ROS time, if that message is stamped between an hour ago and in a second. From then on an old stamp is
      an old message, however old it is, and a stamp that is more than a second ahead cannot be used. A
      clock that is ahead by less is believed if the first message says so, or five in a row.
    - A clock of its own otherwise. Then the receipt counts, and how far the stamps have fallen behind it
      since the message that had the least delay; stamps that leap ahead of that by more than a second
      cannot be used.

    A source that never stamps counts from its receipt. One that stamped before, and does so no longer,
    cannot be used. One thread asks for ages.

    Attributes:
        is_ros: whether its stamps are ROS time; None: not known yet.
        off_s: if not, by how much they were ahead of ROS time when that was learned.
    """

    def __init__(self, *, is_ros: bool | None = None) -> None:
        """Know nothing yet.

        `is_ros`: False where only the delay beyond that of the quickest messages counts.
        """
        self.is_ros = is_ros
        self.off_s = 0.0
        self._least_ns: int | None = None
        self._least_at_ns = self._ros_ns = self._stepped_ns = 0
        self._lead_ns: list[int] = []  # delays of the messages in a row that are less than the least
        self._lead_at_ns = 0

    def age_s(self, stamp_ns: int, received_ns: int, now_ns: int, ros_now_ns: int) -> tuple[float, str]:
        """How old a message is in s, and why that cannot be known; then the age is infinite.

        Args:
            stamp_ns: its stamp, 0 for none.
            received_ns: its receipt, monotonic.
            now_ns: now, likewise.
            ros_now_ns: ROS time of now; 0 before the first `/clock`: then the receipt counts.
        """
        since_ns = max(now_ns - received_ns, 0)
        if not stamp_ns:
            if self.is_ros is not None:
                return float("inf"), "without a stamp, unlike before"
            return since_ns / NS_PER_S, ""
        if not ros_now_ns:
            return since_ns / NS_PER_S, ""
        behind_ns = ros_now_ns - stamp_ns - since_ns  # when it was received
        if self.is_ros is None:
            self.is_ros = -_AHEAD_NS <= behind_ns <= _BACKLOG_NS
            self.off_s = -behind_ns / NS_PER_S
        if ros_now_ns < self._ros_ns - _STEP_NS:
            self._stepped_ns = now_ns
            if self.is_ros:
                self._least_ns = None
        self._ros_ns = ros_now_ns
        if self.is_ros and received_ns <= self._stepped_ns:  # its stamp is of the time before the step
            return (since_ns + max(behind_ns, 0)) / NS_PER_S, ""
        return self._by_progress(
            behind_ns if self.is_ros else received_ns - stamp_ns, received_ns, since_ns
        )

    def _by_progress(self, delay_ns: int, received_ns: int, since_ns: int) -> tuple[float, str]:
        """The age by a delay whose zero is not known, but that the least one was no less than 0."""
        zero_ns = 0 if self.is_ros else delay_ns
        if self._least_ns is not None:
            forgotten_ns = max(received_ns - self._least_at_ns, 0) // _FORGETS_IN
            least_ns = self._least_ns + forgotten_ns
            zero_ns = min(zero_ns, least_ns) if self.is_ros else least_ns
        leap_ns = (0 if self.is_ros else zero_ns) - delay_ns
        if leap_ns > _AHEAD_NS:
            what = "ahead of ROS time" if self.is_ros else "by a clock that leapt ahead by so much"
            return float("inf"), f"stamped {leap_ns / NS_PER_S:.3g} s {what}"
        self._least_ns, self._least_at_ns = self._confirmed(zero_ns, delay_ns, received_ns), received_ns
        return (since_ns + max(delay_ns - self._least_ns, 0)) / NS_PER_S, ""

    def _confirmed(self, least_ns: int, delay_ns: int, received_ns: int) -> int:
        """The least delay, after this message.

        Of those in a row that are ahead of it, the one that is so the least.
        """
        if self._least_ns is None or delay_ns >= least_ns - _DRIFT_NS:
            self._lead_ns.clear()
            return min(least_ns, delay_ns)
        if received_ns != self._lead_at_ns:
            self._lead_ns.append(delay_ns)
        self._lead_at_ns = received_ns
        if len(self._lead_ns) < _CONFIRMED_BY:
            return least_ns
        least_ns = max(self._lead_ns)
        self._lead_ns.clear()
        return least_ns
