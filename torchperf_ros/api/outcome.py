"""The words for how a frame ended, what replaced it, and how a stage is doing.

The order of the members is the index that `/perf/latency_stages` carries; it never changes.
"""

import enum
from typing import Final


class _Worded(enum.IntEnum):
    @property
    def word(self) -> str:
        """The word used in parameters, on topics and in documents, for example `on_time`."""
        return self.name.lower()


class Outcome(_Worded):
    """How a started frame ended: on time, or the reason why not.

    PARTIAL: the newest step of an anytime model was published by the deadline. It is no fallback, and no
        miss.
    """

    ON_TIME = 0
    LATE = 1
    ERROR = 2
    INVALID = 3
    CRASHED = 4
    HUNG = 5
    BAD_INPUT = 6
    STARTING = 7
    PARTIAL = 8


# Ends of frames that were answered by their own result, whole or not, by the deadline.
#
# All others are misses.
IN_TIME: Final = (Outcome.ON_TIME, Outcome.PARTIAL)


class Fallback(_Worded):
    """What was published instead of the frame's own result."""

    BACKUP = 0
    HOLD_LAST = 1
    STOP = 2
    NONE = 3


class GuardVerdict(_Worded):
    """What the guard made of a plan, from accepted to a collision that braking cannot avoid."""

    ACCEPT = 0
    BRAKE = 1
    REBASED = 2
    STOP = 3
    UNAVOIDABLE = 4
    UNCHECKED = 5


class Health(_Worded):
    """State of a stage, from loading to sustained failure."""

    STARTING = 0
    WAITING = 1
    NOMINAL = 2
    DEGRADED = 3
    SAFE_STOP = 4


WORST_FIRST: Final = (Health.SAFE_STOP, Health.STARTING, Health.DEGRADED, Health.WAITING, Health.NOMINAL)
