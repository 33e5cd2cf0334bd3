"""What a stage has done so far: counters and a window of latencies, for `/diagnostics` and the exporter."""

from dataclasses import dataclass, field

from torchperf_ros.core.frame import Answer
from torchperf_ros.core.latency_window import LatencyWindow
from torchperf_ros.core.outcome import Fallback, Outcome


@dataclass
class StageStatistics:
    """Counters since configure; every frame that came in is in exactly one of answered, superseded, stale, in flight.

    Attributes:
        frames: frames received, or due from the stage before.
        answered: frames answered, whatever the outcome.
        outcomes, fallbacks: answers by index of `Outcome` and `Fallback`.
        missed_deadline: answers that left after their deadline.
        late_results: results that came after their frame had been answered; not published as if fresh.
        rehearsals: runs of the spare worker that nobody waited for, to keep it warm.
        probes: runs of a higher tier outside any frame's answer.
        backups: frames that the second worker ran as well, on the cheapest tier.
        missed_observations: frames that a worker with a full queue could not be told of, for its histories.
        refused_inputs: messages of other inputs than the trigger that were too large.
        internal_errors: frames lost to an error in the node itself.
        ignored: messages that came while the stage was not active.
        zero_stamps, future_stamps, backward_stamps, repeated_stamps: stamps that cannot be right.
        last_reason: why the last frame that was not on time was not.
        total_ms: receipt to publish over the last answers.
        lateness_ms: how far past the deadline, over the last answers; negative: before it.
    """

    frames: int = 0
    answered: int = 0
    outcomes: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    fallbacks: list[int] = field(default_factory=lambda: [0] * len(Fallback))
    missed_deadline: int = 0
    late_results: int = 0
    rehearsals: int = 0
    probes: int = 0
    backups: int = 0
    missed_observations: int = 0
    refused_inputs: int = 0
    internal_errors: int = 0
    ignored: int = 0
    zero_stamps: int = 0
    future_stamps: int = 0
    backward_stamps: int = 0
    repeated_stamps: int = 0
    total_ms: LatencyWindow = field(default_factory=lambda: LatencyWindow(1024))
    lateness_ms: LatencyWindow = field(default_factory=lambda: LatencyWindow(1024))
    last_reason: str = ""
    _last_stamp_ns: int = 0

    def received(self, stamp_ns: int, age_ms: float, *, stamped: bool) -> None:
        """Count a frame and what is odd about its stamp (`stamped`: its type has one)."""
        self.frames += 1
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
        """Count an answer."""
        self.answered += 1
        if answer.reason:
            self.last_reason = f"frame {answer.frame.seq}: {answer.reason}"
        self.outcomes[answer.outcome] += 1
        if answer.fallback is not None:
            self.fallbacks[answer.fallback] += 1
        self.missed_deadline += answer.lateness_ms > 0
        self.total_ms.add(answer.total_ms)
        self.lateness_ms.add(answer.lateness_ms)

    @property
    def miss_ratio(self) -> float:
        """Share of answers that were not on time, 0 to 1."""
        return 1.0 - self.outcomes[Outcome.ON_TIME] / self.answered if self.answered else 0.0
