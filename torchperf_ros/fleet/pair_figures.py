"""Frames as two versions of a stage have them.

Pairs, and what they come to in counts and differences of times.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torchperf_ros.api.outcome import IN_TIME, Outcome
from torchperf_ros.safety.guard import Known
from torchperf_ros.stage.frame import Answer

_RECENT: Final = 1024


@dataclass(frozen=True, slots=True)
class Pair:
    """One frame as both versions have it.

    Attributes:
        answer: how the version that serves has answered it.
        outcome: what the shadow came to: `on_time` stands for a good result, whenever it came.
        steps_ms: what decoding, preprocessing, inference and postprocessing took the shadow together; NaN:
            no result.
        served: output of the version that serves, CDR bytes, before the guard; None where it has no whole
            one.
        payload: the shadow's output, likewise.
        reason: why it has none.
        known: what the guard would judge plans by; None without one.
        disturbed: another frame was answered meanwhile, to which the shadow gives way: its time says
            nothing.
    """

    answer: Answer
    outcome: Outcome
    steps_ms: float
    served: bytes | None
    payload: bytes | None
    reason: str = ""
    known: Known | None = None
    disturbed: bool = False

    @property
    def both(self) -> bool:
        """Whether both versions have a whole output, which can be compared."""
        return self.served is not None and self.payload is not None

    @property
    def timed(self) -> bool:
        return not (self.disturbed or math.isnan(self.steps_ms) or math.isnan(self.answer.steps.total_ms))

    @property
    def late(self) -> bool:
        """Whether the shadow would have missed the deadline, had it served.

        Its steps in place of the other's.

        Where it was disturbed only a result that is missing counts.
        """
        own_ms = self.answer.steps.total_ms
        rest_ms = self.answer.wait_ms if math.isnan(own_ms) else self.answer.total_ms - own_ms
        allowed_ms = self.answer.total_ms - self.answer.lateness_ms
        return self.payload is None or (not self.disturbed and rest_ms + self.steps_ms > allowed_ms)


class Compared(NamedTuple):
    """What came of the outputs of a pair.

    Attributes:
        seq: the frame's.
        difference: the first field that differs, "" if none does.
        refusals: why the guard would replace the base's plan, and the candidate's; "" where it would not.
        score: how far they are the same answer by the adapter's `score_messages`; None where it says
            nothing.
        problem: why there is no score.
    """

    seq: int
    difference: str
    refusals: Sequence[str] = ("", "")
    score: float | None = None
    problem: str = ""


@dataclass
class PairBlock:
    """Counts of pairs.

    Attributes:
        pairs, both: all pairs, and those whose times can be compared.
        base_late, candidate_late: pairs in which that version missed the deadline, or would have.
        compared, different: pairs whose outputs were compared, and differ.
        base_refused, candidate_refused: of these, plans that the guard would replace, and would not the
        other's. scored, score_sum: of these, pairs for which the adapter has a score, and these together.
        failed: pairs without a result of the candidate.
        base_ms, candidate_ms: what the steps took each, of `both`; of a block only, not of the total.
    """

    pairs: int = 0
    both: int = 0
    base_late: int = 0
    candidate_late: int = 0
    compared: int = 0
    different: int = 0
    base_refused: int = 0
    candidate_refused: int = 0
    scored: int = 0
    score_sum: float = 0.0
    failed: int = 0
    base_ms: list[float] = field(default_factory=list)
    candidate_ms: list[float] = field(default_factory=list)

    @property
    def score(self) -> float:
        return self.score_sum / self.scored if self.scored else math.nan


@dataclass
class PairFigures:
    """Since the candidate stands beside; one thread adds, others read.

    Attributes:
        version: the candidate's name.
        total: of all pairs.
        block: of those since the last `take_block`, which has to be called now and then.
        last_difference: of outputs, the last in words.
        last_refusal: of a plan of the candidate that the guard would replace, but not the base's; likewise.
        last_failure: why the candidate had no result, the last time.
    """

    version: str = ""
    total: PairBlock = field(default_factory=PairBlock)
    block: PairBlock = field(default_factory=PairBlock)
    last_difference: str = ""
    last_refusal: str = ""
    last_failure: str = ""
    _recent_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, pair: Pair, *, candidate_serves: bool) -> None:
        """Count a pair; the shadow is the base where the candidate serves."""
        answer = pair.answer
        served_late = answer.outcome not in IN_TIME
        late = (pair.late, served_late) if candidate_serves else (served_late, pair.late)
        failed = answer.fallback is not None if candidate_serves else pair.outcome is not Outcome.ON_TIME
        if failed:
            self.last_failure = answer.reason if candidate_serves else pair.reason
        if pair.timed:
            times_ms = (
                (pair.steps_ms, answer.steps.total_ms)
                if candidate_serves
                else (answer.steps.total_ms, pair.steps_ms)
            )
            self._recent_ms.append(times_ms[1] - times_ms[0])
            self.block.base_ms.append(times_ms[0])
            self.block.candidate_ms.append(times_ms[1])
        for block in (self.total, self.block):
            block.pairs += 1
            block.base_late += late[0]
            block.candidate_late += late[1]
            block.failed += failed
            block.both += pair.timed

    def compared(self, found: Compared) -> None:
        self.last_difference = found.difference or self.last_difference
        base, candidate = map(bool, found.refusals)
        if candidate and not base:
            self.last_refusal = found.refusals[1]
        for block in (self.total, self.block):
            block.compared += 1
            block.different += bool(found.difference)
            block.base_refused += base and not candidate
            block.candidate_refused += candidate and not base
            if found.score is not None:
                block.scored, block.score_sum = block.scored + 1, block.score_sum + found.score

    def take_block(self) -> PairBlock:
        block, self.block = self.block, PairBlock()
        return block

    def quantile_ms(self, share: float) -> float:
        """Of the candidate's time less the base's, of the last pairs; NaN before there is one."""
        ordered = sorted(self._recent_ms)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else math.nan

    @property
    def words(self) -> str:
        total = self.total
        parts = [f"{total.pairs} frames", f"{total.candidate_late} late (base {total.base_late})"]
        if total.both:
            parts.append(f"{self.quantile_ms(0.5):+.2f} ms p50, {self.quantile_ms(0.99):+.2f} ms p99")
        if total.compared:
            parts.append(f"{total.different} of {total.compared} outputs differ")
        if total.scored:
            parts.append(f"score {total.score:.3f}")
        if total.base_refused or total.candidate_refused:
            parts.append(f"{total.candidate_refused} plans refused (base {total.base_refused})")
        return ", ".join([*parts, *([f"{total.failed} without a result"] if total.failed else [])])
