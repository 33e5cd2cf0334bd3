"""A stage's result whose figures know the frames that they come from, so that a failed assertion can show them."""

from collections import Counter
from dataclasses import fields
from typing import Any, Final

import numpy as np

from torchperf_ros.core.clock import NS_PER_S
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.replay.golden.text_columns import text_columns
from torchperf_ros.replay.replay_result import StageResult

_MOST_FRAMES: Final = 10
_LONGEST_REASON: Final = 60


class AssertedFloat(float):
    """A figure of a stage; a number like any other.

    Attributes:
        stage: whose it is.
        only_missed: whether it counts frames that were not on time, rather than how long frames took.
    """

    stage: "AssertedStage"
    only_missed: bool


class AssertedCount(int):
    """How many of a stage's frames ended in one way; a number like any other."""

    stage: "AssertedStage"
    only_missed = True


class AssertedCounter(Counter[str]):
    """How many of a stage's frames ended how, or were replaced by what."""

    stage: "AssertedStage"
    only_missed = True

    def __repr__(self) -> str:
        return repr(dict(self))


class AssertedStage(StageResult):
    """A `StageResult` for tests."""

    @classmethod
    def of(cls, stage: StageResult) -> "AssertedStage":
        """The same result."""
        return cls(**{entry.name: getattr(stage, entry.name) for entry in fields(stage)})

    @property
    def miss_ratio(self) -> float:
        """As in `StageResult`."""
        return self._figure(super().miss_ratio, only_missed=True)

    def quantile_ms(self, share: float) -> float:
        """As in `StageResult`."""
        return self._figure(super().quantile_ms(share), only_missed=False)

    @property
    def outcomes(self) -> Counter[str]:
        """As in `StageResult`."""
        return self._counter(super().outcomes)

    @property
    def fallbacks(self) -> Counter[str]:
        """As in `StageResult`."""
        return self._counter(super().fallbacks)

    def _counter(self, counts: Counter[str]) -> AssertedCounter:
        counter = AssertedCounter({word: self._count(count) for word, count in counts.items()})
        counter.stage = self
        return counter

    def _count(self, value: int) -> AssertedCount:
        count = AssertedCount(value)
        count.stage = self
        return count

    def _figure(self, value: float, *, only_missed: bool) -> AssertedFloat:
        figure = AssertedFloat(value)
        figure.stage, figure.only_missed = self, only_missed
        return figure

    def worst_frames(self, *, only_missed: bool) -> list[str]:
        """A table of the frames that took longest, of those that were not on time if only these are asked for."""
        frames = self.frames[self.frames["outcome"] != Outcome.ON_TIME] if only_missed else self.frames
        worst = frames[np.argsort(-frames["total_ms"], kind="stable")][:_MOST_FRAMES]
        which = "not on time" if only_missed else "in all"
        head = f"{self.name}: {len(frames)} of {len(self.frames)} frames {which}; those that took longest:"
        rows = [("seq", "stamp", "total_ms", "outcome", "tier", "fallback", "reason"), *map(self._row, worst)]
        return [head, *text_columns(rows)] if len(frames) else [f"{self.name}: no frame {which}"]

    def _row(self, frame: Any) -> tuple[str, ...]:  # noqa: ANN401 - a row of FRAME
        seconds, nanoseconds = divmod(int(frame["stamp_ns"]), NS_PER_S)
        reason = self.reasons.get(int(frame["seq"]), "").partition("\n")[0]
        return (
            str(frame["seq"]),
            f"{seconds}.{nanoseconds:09d}",
            f"{frame['total_ms']:.1f}",
            Outcome(frame["outcome"]).word,
            self.tiers[frame["tier"]] if frame["tier"] >= 0 else "-",
            Fallback(frame["fallback"]).word if frame["fallback"] >= 0 else "-",
            reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}...",
        )

    def __repr__(self) -> str:
        ends = ", ".join(f"{count} {word}" for word, count in self.outcomes.items())
        return f"<stage {self.name}: {len(self.frames)} frames, {ends or 'none answered'}>"
