"""How long the runs of a virtual replay take: known for a frame, or drawn for its tier."""

import math
import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from torchperf_ros.core.frame import StepTimes
from torchperf_ros.core.outcome import Outcome
from torchperf_ros.core.tier_ladder import Calibration

P99_SIGMAS: Final = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""
_NEAR_NS: Final = 5_000_000  # between a stamp and what a recorder's row says of it


@dataclass(frozen=True)
class Spread:
    """What a step takes in ms: always the same, one of a list, or a log-normal distribution.

    Attributes:
        samples: at least one; drawn from.
        sigma: of the logarithm, around the one sample, its median; 0: always the same.
    """

    samples: tuple[float, ...]
    sigma: float = 0.0

    def draw(self, rng: random.Random) -> float:
        """One value in ms, to 1 us, so that no machine's arithmetic shows."""
        value_ms = self.samples[0] if len(self.samples) == 1 else rng.choice(self.samples)
        return round(value_ms * math.exp(rng.gauss(0.0, self.sigma)) if self.sigma else value_ms, 3)

    @property
    def calibration(self) -> Calibration:
        """Median and 99th percentile, as a worker would have measured them."""
        ordered = sorted(self.samples)
        median_ms, p99_ms = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
        return Calibration(round(median_ms, 3), round(p99_ms * math.exp(self.sigma * P99_SIGMAS), 3))


NOTHING: Final = Spread((0.0,))


@dataclass(frozen=True)
class TierTimes:
    """The steps of one tier's runs; `overhead` is hand-over and publish, what no step accounts for."""

    inference: Spread
    decode: Spread = NOTHING
    preprocess: Spread = NOTHING
    postprocess: Spread = NOTHING
    overhead: Spread = NOTHING


@dataclass(frozen=True)
class KnownRun:
    """What a log says of one frame: its tier, its steps where it has them, and how it ended."""

    tier: int
    outcome: Outcome
    steps: StepTimes
    overhead_ms: float = 0.0
    backup: bool = False


@dataclass(frozen=True)
class VirtualRun:
    """What a run takes on the virtual clock.

    Attributes:
        steps: in ms.
        overhead_ms: besides them.
        ending: `ON_TIME`: the model decides; `CRASHED`: the worker dies at the end of it; `LATE`, `HUNG`: it takes
            longer than anybody waits.
    """

    steps: StepTimes
    overhead_ms: float = 0.0
    ending: Outcome = Outcome.ON_TIME


@dataclass(frozen=True)
class StageTimes:
    """What the runs of one stage take.

    Attributes:
        tiers: by index, one for each of the stage's.
        known: frames of the log by stamp in ns.
        seed: of what is drawn.
        restart_ms: from a worker's death until its replacement is ready.
    """

    tiers: Sequence[TierTimes]
    known: Mapping[int, KnownRun] = field(default_factory=dict)
    seed: int = 0
    restart_ms: float = 2000.0

    def __post_init__(self) -> None:
        """Sort the stamps."""
        object.__setattr__(self, "_stamps", sorted(self.known))

    def calibrations(self) -> list[Calibration]:
        """What a worker would have measured before its first frame, for each tier."""
        return [tier.inference.calibration for tier in self.tiers]

    def run(self, stamp_ns: int, seq: int, tier: int, attempt: int) -> VirtualRun:
        """What a run takes.

        Args:
            stamp_ns: of the frame.
            seq: of the frame.
            tier: that it is run on.
            attempt: 0 for the frame's first run, 1 for its backup, and so on.
        """
        known = self._near(stamp_ns)
        if known is not None and known.tier == tier and known.outcome is Outcome.ON_TIME and not attempt:
            return VirtualRun(known.steps, known.overhead_ms)
        if known is not None and attempt and known.backup and known.tier == tier:
            return VirtualRun(known.steps, known.overhead_ms)
        drawn = self._draw(seq, tier, attempt)
        ended_badly = known is not None and known.outcome in {Outcome.LATE, Outcome.HUNG, Outcome.CRASHED}
        if known is not None and ended_badly and not attempt:
            return VirtualRun(drawn.steps, drawn.overhead_ms, known.outcome)
        return drawn

    def _near(self, stamp_ns: int) -> KnownRun | None:
        """The frame of the log with this stamp, or the nearest within 5 ms."""
        if not stamp_ns:
            return None
        if stamp_ns in self.known:
            return self.known[stamp_ns]
        stamps: list[int] = self._stamps  # type: ignore[attr-defined]
        place = bisect_left(stamps, stamp_ns)
        near = [stamp for stamp in stamps[max(0, place - 1) : place + 1] if abs(stamp - stamp_ns) <= _NEAR_NS]
        return self.known[min(near, key=lambda stamp: abs(stamp - stamp_ns))] if near else None

    def _draw(self, seq: int, tier: int, attempt: int) -> VirtualRun:
        rng = random.Random(f"{self.seed} {seq} {tier} {attempt}")  # the same whatever was drawn before it
        times = self.tiers[tier]
        spreads = (times.decode, times.preprocess, times.inference, times.postprocess)
        return VirtualRun(StepTimes(*(spread.draw(rng) for spread in spreads)), times.overhead.draw(rng))
