"""What a stage has done so far: counters, and the raw numbers of its last frames for whoever computes from them."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from torchperf_ros.frame.frame import Answer
from torchperf_ros.frame.outcome import Fallback, Outcome

_PENDING = 8192  # rows that wait to be taken: eight seconds at 1 kHz; `StageFigures` counts what was pushed out


RECEIPT: Final = np.dtype([("received_ns", "i8"), ("age_ms", "f8"), ("number", "i8")])
"""A row of `StageCounters.receipts`; `number`: receipts so far, this one included."""

ANSWER: Final = np.dtype(
    [
        ("published_ns", "i8"), ("tier", "i8"), ("outcome", "i8"), ("wait_ms", "f8"), ("decode_ms", "f8"),
        ("preprocess_ms", "f8"), ("inference_ms", "f8"), ("postprocess_ms", "f8"), ("total_ms", "f8"),
        ("lateness_ms", "f8"), ("number", "i8"),
    ]
)  # fmt: skip
"""A row of `StageCounters.answers`; times as in `Answer`, NaN where unknown; `number`: frames that ended so far."""


@dataclass
class StageCounters:
    """Counters since configure.

    Every frame that came in is in exactly one of answered, unanswered, superseded, stale, in flight.

    Attributes:
        outcomes, fallbacks: both of these by index of `Outcome` and `Fallback`.
        zero_stamps, future_stamps, backward_stamps, repeated_stamps: stamps that cannot be right.
        receipts, answers: rows of raw numbers, appended here (which is all that a frame waits for) and taken away by
            `StageFigures` on another thread; appending to a deque and taking from it need no lock.
    """

    frames: int = 0  # frames received, or due from the stage before
    answered: int = 0  # frames for which something was published, whatever the outcome
    unanswered: int = 0  # frames for which nothing was, as no fallback was to be had
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    fallbacks: list[int] = field(default_factory=lambda: [0] * len(Fallback))
    missed_deadline: int = 0  # frames that ended after their deadline
    late_results: int = 0  # results that came after their frame had been answered; not published as if fresh
    rehearsals: int = 0  # runs of the spare worker that nobody waited for, to keep it warm
    probes: int = 0  # runs of a higher tier outside any frame's answer
    backups: int = 0  # frames that the second worker ran as well, on the cheapest tier
    missed_observations: int = 0  # frames that a worker with a full queue could not be told of, for its histories
    refused_inputs: int = 0  # messages of other inputs than the trigger that were too large
    internal_errors: int = 0  # errors in the node itself; each cost a frame its answer, or at least its result
    ignored: int = 0  # messages that came while the stage was not active
    zero_stamps: int = 0
    future_stamps: int = 0
    backward_stamps: int = 0
    repeated_stamps: int = 0
    activated_ns: int = 0  # monotonic time since which the stage takes frames, the last time it was activated; 0: never
    receipts: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_PENDING))
    answers: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_PENDING))
    last_reason: str = ""  # why the last frame that was not on time was not
    _last_stamp_ns: int = 0

    def received(self, received_ns: int, stamp_ns: int, age_ms: float, *, stamped: bool) -> None:
        """Count a frame and what is odd about its stamp (`stamped`: its type has one)."""
        self.frames += 1
        self.receipts.append((received_ns, age_ms, self.frames))
        if not stamped:
            return
        if stamp_ns == 0:
            self.zero_stamps += 1
            return
        self.future_stamps += age_ms < 0
        self.backward_stamps += stamp_ns < self._last_stamp_ns
        self.repeated_stamps += stamp_ns == self._last_stamp_ns
        self._last_stamp_ns = stamp_ns

    def add(self, answer: Answer) -> None:
        """Count a frame that was answered, or for which there was nothing to publish."""
        if answer.fallback is Fallback.NONE:
            self.unanswered += 1
        else:
            self.answered += 1
        if answer.reason:
            self.last_reason = f"frame {answer.frame.seq}: {answer.reason}"
        self.outcomes[answer.outcome] += 1
        if answer.fallback is not None:
            self.fallbacks[answer.fallback] += 1
        self.missed_deadline += answer.lateness_ms > 0
        steps = answer.steps
        self.answers.append(
            (
                answer.published_ns, answer.tier, answer.outcome, answer.wait_ms,
                steps.decode_ms, steps.preprocess_ms, steps.inference_ms, steps.postprocess_ms,
                answer.total_ms, answer.lateness_ms, self.ended,
            )
        )  # fmt: skip

    @property
    def ended(self) -> int:
        """Frames that were answered, or for which there was nothing to publish."""
        return self.answered + self.unanswered

    @property
    def miss_ratio(self) -> float:
        """Share of these that were not on time, 0 to 1."""
        return 1.0 - self.outcomes[Outcome.ON_TIME] / self.ended if self.ended else 0.0
