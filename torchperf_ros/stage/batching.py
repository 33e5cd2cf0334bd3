"""Several frames in one run: those of different streams that wait at the same time.

No frame waits for one that has not come. Frames that wait for a worker run together if that takes less time
than one after the other, and if all of them are answered by their deadlines.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchperf_ros.stage.turn import Turn
from torchperf_ros.workers.calibration import Batching, SortedWindow, usual_p99

_WINDOW = 128
_MOST_REFUSALS = 150  # asked several times a frame: within a second or two
_SPARED = 1  # slow run of a window; the next one counts


@dataclass(slots=True)
class FrameBatch:
    """Frames that one worker runs together, by stream; each is taken out when the worker has answered it."""

    size: int
    turns: dict[int, Turn]
    slowest_ms: float = 0.0  # the longest inference of those that were answered


class BatchTimes:
    """What the inference of several frames takes: from own runs, before there are any from a worker's start.

    Attributes:
        most: frames in one run; 1: the model is not to be batched.
        refusal: why it is not, "" if it is.
    """

    def __init__(self) -> None:
        self.most, self.refusal = 1, ""
        self._measured: dict[int, Sequence[tuple[int, float]]] = {}
        self._own: dict[tuple[int, int], SortedWindow] = {}
        self._refusals: Counter[tuple[int, int]] = Counter()  # of what own runs speak against

    def measured(self, found: Batching) -> None:
        """Take what a worker has found out at its start."""
        self.most, self.refusal = found.most, found.refusal
        self._measured = dict(enumerate(found.times_ms))

    def add(self, tier: int, size: int, inference_ms: float) -> None:
        """Learn from one run."""
        self._own.setdefault((tier, size), SortedWindow(_WINDOW)).add(inference_ms)

    def predicted_ms(self, tier: int, size: int, slowdown: float) -> float:
        """The time of the inference of so many frames; infinite where nothing is known of it.

        `slowdown`: how much slower the machine is than when it was measured.
        """
        own = self._own.get((tier, size))
        if own is not None and len(own) > _SPARED:
            return usual_p99(own, _SPARED)
        points = self._measured.get(tier, ())
        for (below, below_ms), (above, above_ms) in pairwise(points):
            if below <= size <= above:
                share = (size - below) / (above - below)
                return (below_ms + share * (above_ms - below_ms)) * slowdown
        return float("inf")

    def largest(
        self, tier: int, lefts_ms: Sequence[float], alone_ms: float, overhead_ms: float, slowdown: float
    ) -> int:
        """How many of the frames that wait, the most urgent first, run together; 1: none do.

        Args:
            tier: that runs them.
            lefts_ms: time until the answer of each has to leave.
            alone_ms: inference of one frame.
            overhead_ms: what each frame takes beside inference; these add up.
            slowdown: see `predicted_ms`.
        """
        for size in range(min(self.most, len(lefts_ms)), 1, -1):
            inference_ms = self.predicted_ms(tier, size, slowdown)
            whole_ms = inference_ms + size * overhead_ms
            if inference_ms < size * alone_ms and whole_ms <= min(lefts_ms[:size]):
                return size
            self._left_out(tier, size)
        return 1

    def _left_out(self, tier: int, size: int) -> None:
        """After a while the measurement of the start counts again: a slow moment is not for ever."""
        if (own := self._own.get((tier, size))) is not None:
            self._refusals[tier, size] += 1
            if self._refusals[tier, size] >= _MOST_REFUSALS:
                self._refusals[tier, size] = 0
                own.clear()
