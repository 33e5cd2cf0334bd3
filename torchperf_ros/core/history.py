"""Rules for the stamps of a bounded history: what is the next sample, what is a repeat, and what starts it anew."""

import enum
from types import MappingProxyType

from torchperf_ros.core.errors import ConfigError


class StampVerdict(enum.Enum):
    """What a sample's stamp means for a history.

    Attributes:
        FIRST: nothing stamped came before it; appended.
        NEXT: newer than the last by at most the largest gap; appended.
        UNSTAMPED: no stamp (0 or less), so its order is unknown; appended as it came.
        REPEATED: the last stamp again; ignored.
        OLDER: older than the last by at most the tolerance, so out of order; ignored.
        GAP: newer than the last by more than the largest gap; the history starts anew with it.
        JUMPED_BACK: older than the last by more than the tolerance, as after a log's loop or a clock's reset;
            the history starts anew with it.
    """

    FIRST = "first"
    NEXT = "next"
    UNSTAMPED = "unstamped"
    REPEATED = "repeated"
    OLDER = "older"
    GAP = "gap"
    JUMPED_BACK = "jumped_back"

    @property
    def ignores(self) -> bool:
        """Whether the sample is left out of the history."""
        return self in {StampVerdict.REPEATED, StampVerdict.OLDER}

    @property
    def resets(self) -> bool:
        """Whether everything before the sample is forgotten; the sample itself is kept."""
        return self in {StampVerdict.GAP, StampVerdict.JUMPED_BACK}


class GapRule:
    """Judges one stamp after the other, and counts every verdict.

    The last stamp is that of the last sample that was kept: an ignored one moves nothing, and an unstamped
    one neither. A single stamp from the future therefore costs at most `tolerance_ns` of ignored samples.
    """

    def __init__(self, *, max_gap_ns: int, tolerance_ns: int) -> None:
        """Start without a last stamp.

        Args:
            max_gap_ns: largest step forward in ns that still continues the history, at least 1.
            tolerance_ns: largest step backward in ns that counts as out of order rather than a jump, at least 0.

        Raises:
            ConfigError: a value is out of range.
        """
        if max_gap_ns < 1:
            msg = f"max_gap_ns is {max_gap_ns}; allowed: 1 ns and more"
            raise ConfigError(msg)
        if tolerance_ns < 0:
            msg = f"tolerance_ns is {tolerance_ns}; allowed: 0 ns and more"
            raise ConfigError(msg)
        self._max_gap_ns = max_gap_ns
        self._tolerance_ns = tolerance_ns
        self._last_ns: int | None = None
        self._counts = dict.fromkeys(StampVerdict, 0)

    @property
    def counts(self) -> MappingProxyType[StampVerdict, int]:
        """How often each verdict was given since the rule was made; a live, read-only view."""
        return MappingProxyType(self._counts)

    def judge(self, stamp_ns: int) -> StampVerdict:
        """The verdict on the next sample's stamp, which becomes the last one unless it is ignored.

        Args:
            stamp_ns: stamp of the sample in ns; 0 or less where it has none.
        """
        verdict = self._compare(stamp_ns)
        self._counts[verdict] += 1
        if not verdict.ignores and verdict is not StampVerdict.UNSTAMPED:
            self._last_ns = stamp_ns
        return verdict

    def forget(self) -> None:
        """Drop the last stamp, so that any stamp can follow; the counts stay."""
        self._last_ns = None

    def _compare(self, stamp_ns: int) -> StampVerdict:
        if stamp_ns <= 0:
            return StampVerdict.UNSTAMPED
        if self._last_ns is None:
            return StampVerdict.FIRST
        step_ns = stamp_ns - self._last_ns
        if step_ns > self._max_gap_ns:
            return StampVerdict.GAP
        if step_ns > 0:
            return StampVerdict.NEXT
        if step_ns == 0:
            return StampVerdict.REPEATED
        return StampVerdict.OLDER if step_ns >= -self._tolerance_ns else StampVerdict.JUMPED_BACK
