"""How long models take in the closed loop, and what goes wrong with them: drawn by seed, the same for every arm."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Final

from torchperf_ros.frame.clock import NS_PER_S
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import Outcome
from torchperf_ros.replay.virtual.step_times import RunTimes, Spread, StageTimes, TierTimes
from torchperf_ros.world.world import start_ns

STAGES: Final = ("perception", "planning")
TIERS: Final = ("full", "medium", "fast")
RESTART_MS: Final = 300.0
"""From a worker's death until its replacement is ready: forked, its model loaded, warmed up."""

_MEDIANS_MS: Final = {"perception": (25.0, 10.0, 3.0), "planning": (3.0, 1.5, 0.7)}
"""What the reference networks take on one thread of a server's processor, see `models/networks.py`."""
_P99_SHARE: Final = {1: 1.4, 4: 2.0}  # p99 by median; a machine with four times the work has a heavier tail
_P99_SIGMAS: Final = 2.3263478740408408
_OVERHEAD_MS: Final = 0.5

FAULTS: Final = {
    "none": "nothing",
    "bench": "as `bench deadline`: of the runs 2 % stall for 200 ms, 1 % hold the interpreter lock for 100 ms, 1 %"
             " raise, 1 % give NaN; every 10 s one hangs for ever and one has its process killed",
    "frame": "of perception's frames 1 % stall for 200 ms, 0.3 % hang and 0.3 % kill whoever runs them",
    "blind": "in 5 % of the seconds the planner takes no object into account",
    "unseen": "in 5 % of the seconds perception finds no object",
    "all": "bench, frame and blind",
}  # fmt: skip
"""The faults that can be chosen."""

_STALL_MS: Final = {"stall": 200.0, "gil": 100.0, "poison_stall": 200.0}
_OF_RUNS: Final = {"stall": 0.02, "gil": 0.01, "raise": 0.01, "nan": 0.01}
_OF_FRAMES: Final = {"poison_stall": 0.01, "poison_hang": 0.003, "poison_sigkill": 0.003}
_EVERY_NS: Final = 10 * NS_PER_S
_BLIND: Final = 0.05
_ENDINGS: Final = {
    "raise": Outcome.ERROR, "nan": Outcome.INVALID, "hang": Outcome.HUNG, "sigkill": Outcome.CRASHED,
    "poison_hang": Outcome.HUNG, "poison_sigkill": Outcome.CRASHED,
}  # fmt: skip


@dataclass
class Luck:
    """What happens to the runs of one drive.

    Attributes:
        seed: of everything that is drawn.
        load: 1 or 4: how much work the machine has.
        faults: one of `FAULTS`.
        injected: stamp in ns and kind of each fault so far.
    """

    seed: int
    load: int = 1
    faults: str = "none"
    injected: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check what was chosen; raises `ConfigError` where there is no such load, or there are no such faults."""
        if self.faults not in FAULTS:
            raise ConfigError(f"faults {self.faults!r} are not there; it has to be one of: {', '.join(FAULTS)}")
        if self.load not in _P99_SHARE:
            raise ConfigError(f"load {self.load} is not there; it has to be one of: {', '.join(map(str, _P99_SHARE))}")
        rng, self._start_ns = random.Random(f"{self.seed} schedule"), start_ns(self.seed)
        self._due = {kind: self._start_ns + rng.randrange(_EVERY_NS) for kind in ("hang", "sigkill")}
        self._stage = {kind: [rng.choice(STAGES) for _ in range(100)] for kind in self._due}

    @property
    def blind(self) -> float:
        """Share of the seconds that are planned blindly."""
        return _BLIND if self.faults in {"blind", "all"} else 0.0

    @property
    def unseen(self) -> float:
        """Share of the seconds in which perception finds nothing."""
        return _BLIND if self.faults == "unseen" else 0.0

    def times(self, stage: str) -> "FaultyTimes":
        """What the stage's runs take."""
        sigma = math.log(_P99_SHARE[self.load]) / _P99_SIGMAS
        overhead = Spread((_OVERHEAD_MS,))
        tiers = [TierTimes(Spread((ms * self.load,), sigma), overhead=overhead) for ms in _MEDIANS_MS[stage]]
        return FaultyTimes(tiers, seed=self.seed * 2 + STAGES.index(stage), stage=stage, luck=self)

    def fault(self, stage: str, stamp_ns: int, attempt: int) -> str:
        """The kind of fault that hits this run of a frame; "" for none. `attempt`: 0 for its first run."""
        kind = self._draw(stage, stamp_ns, attempt)
        if kind:
            self.injected.append((stamp_ns, kind))
        return kind

    def _draw(self, stage: str, stamp_ns: int, attempt: int) -> str:
        if self.faults in {"frame", "all"} and stage == STAGES[0]:
            chances = random.Random(f"{self.seed} frame {stamp_ns}")
            for kind, share in _OF_FRAMES.items():
                if chances.random() < share:
                    return kind
        if self.faults not in {"bench", "all"}:
            return ""
        for kind, due_ns in self._due.items():
            slot = (due_ns - self._start_ns) // _EVERY_NS
            if stamp_ns >= due_ns and not attempt and self._stage[kind][slot % 100] == stage:
                self._due[kind] = due_ns + _EVERY_NS
                return kind
        chances = random.Random(f"{self.seed} {stage} {stamp_ns} {attempt}")
        return next((kind for kind, share in _OF_RUNS.items() if chances.random() < share), "")


@dataclass(frozen=True, kw_only=True)
class FaultyTimes(StageTimes):
    """What the runs of a stage take, with faults."""

    stage: str
    luck: Luck
    restart_ms: float = RESTART_MS

    def run(self, stamp_ns: int, seq: int, tier: int, attempt: int) -> RunTimes:
        """What a run takes and how it ends; what the machine draws depends on the stamp, not on the frames before."""
        run = super().run(stamp_ns, stamp_ns // 1_000_000, tier, attempt)
        kind = self.luck.fault(self.stage, stamp_ns, attempt)
        steps = replace(run.steps, inference_ms=run.steps.inference_ms + _STALL_MS.get(kind, 0.0))
        return replace(run, steps=steps, ending=_ENDINGS.get(kind, Outcome.ON_TIME))
