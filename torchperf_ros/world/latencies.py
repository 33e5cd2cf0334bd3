"""How long models take in the closed loop, and what goes wrong with them.

Drawn by seed, the same for every arm.
"""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.step_times import P99_SIGMAS, RunTimes, Spread, StageTimes, TierTimes
from torchperf_ros.world.world import start_ns

STAGES: Final = ("perception", "planning")
TIERS: Final = ("full", "medium", "fast")
# From a worker's death until its replacement is ready: forked, its model loaded, warmed up.
RESTART_MS: Final = 300.0

# What the reference networks take on one thread of a server's processor, see `models/networks.py`.
_MEDIANS_MS: Final = {"perception": (25.0, 10.0, 3.0), "planning": (3.0, 1.5, 0.7)}
_P99_SHARE: Final = {1: 1.4, 4: 2.0}  # p99 by median; a machine with four times the work has a heavier tail
_OVERHEAD_MS: Final = 0.5

# The faults that can be chosen; or so many a minute, as `hang=0.5,sigkill=2`, of the kinds in
# `RATED`.
FAULTS: Final = {
    "none": "nothing",
    "bench": (
        "as `bench deadline`: of the runs 2 % stall for 200 ms, 1 % hold the interpreter lock for 100 ms, 1"
        " % raise, 1 % give NaN; every 10 s one hangs for ever and one has its process killed"
    ),
    "frame": "of perception's frames 1 % stall for 200 ms, 0.3 % hang and 0.3 % kill whoever runs them",
    "blind": "in 5 % of the seconds the planner takes no object into account",
    "unseen": "in 5 % of the seconds perception finds no object",
    "hasty": "where the route leads past a slower car it does so whoever comes towards us",
    "all": "bench, frame and blind",
}
_OF_A_RUN: Final = {
    "stall": "a run takes 200 ms longer",
    "gil": "a run holds the interpreter lock for 100 ms",
    "raise": "a run raises",
    "nan": "a run gives NaN",
    "hang": "a run never ends",
    "sigkill": "a run's process is killed",
}
_OF_A_SECOND: Final = {
    "blind": "the planner takes no object into account, for a second",
    "unseen": "perception finds no object, for a second",
}
EACH: Final = "each"
# Kinds of faults that can be chosen by their rate.
RATED: Final = {**_OF_A_RUN, **_OF_A_SECOND, EACH: f"each of {', '.join(_OF_A_RUN)}"}

_STALL_MS: Final = {"stall": 200.0, "gil": 100.0, "poison_stall": 200.0}
_OF_RUNS: Final = {"stall": 0.02, "gil": 0.01, "raise": 0.01, "nan": 0.01}
_OF_FRAMES: Final = {"poison_stall": 0.01, "poison_hang": 0.003, "poison_sigkill": 0.003}
_EVERY_NS: Final = 10 * NS_PER_S
_BLIND: Final = 0.05
_MOST_A_MINUTE: Final = 60.0
_RAREST: Final = 1e-9  # a second: one in 30 years, which no drive meets, and whose time is a number still
_MOST_RESTART_MS: Final = 3.6e6
_ENDINGS: Final = {
    "raise": Outcome.ERROR,
    "nan": Outcome.INVALID,
    "hang": Outcome.HUNG,
    "sigkill": Outcome.CRASHED,
    "poison_hang": Outcome.HUNG,
    "poison_sigkill": Outcome.CRASHED,
}


def usual_times(load: int) -> dict[str, dict[str, dict[str, float]]]:
    """What the reference networks take as a rule, as a table for `replay --times`."""
    return {
        stage: {tier: {"inference_ms": ms * load} for tier, ms in zip(TIERS, medians_ms, strict=True)}
        for stage, medians_ms in _MEDIANS_MS.items()
    }


def _rates(faults: str) -> dict[str, float]:
    """How often a minute each kind comes, of a text such as `hang=0.5,sigkill=2`."""
    named: dict[str, float] = {}
    for part in faults.split(","):
        kind, _, number = (word.strip() for word in part.partition("="))
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if kind not in RATED or not 0.0 <= rate <= _MOST_A_MINUTE:
            raise ConfigError(
                f"faults {part.strip()!r} cannot be read; it has to be KIND=NUMBER, so many a minute, 0 to"
                f" {_MOST_A_MINUTE:g}, where KIND is one of: {', '.join(RATED)}"
            )
        if kind in named:
            raise ConfigError(f"faults {faults!r}: names {kind} twice; it has to be named once")
        named[kind] = rate
    each = named.pop(EACH, None)
    return named if each is None else dict.fromkeys(_OF_A_RUN, each) | named


def _now_and_then(seed: int, kind: str, per_minute: float, start_ns: int) -> Iterator[tuple[int, str]]:
    rng, at_s = random.Random(f"{seed} rate {kind}"), 0.0
    while True:
        at_s += rng.expovariate(max(per_minute / 60.0, _RAREST))
        yield start_ns + round(at_s * NS_PER_S), rng.choice(STAGES)


@dataclass
class DrawnRuns:
    """What happens to the runs of one drive.

    Attributes:
        seed: of everything that is drawn.
        load: 1 or 4: how much work the machine has.
        faults: one of `FAULTS`, or rates of `RATED`.
        tiers: what the runs take by stage, in place of what the reference networks do.
        restart_ms: from a worker's death until its replacement is ready.
        injected: stamp in ns and kind of each fault so far.
    """

    seed: int
    load: int = 1
    faults: str = "none"
    tiers: Mapping[str, Sequence[TierTimes]] | None = None
    restart_ms: float = RESTART_MS
    injected: list[tuple[int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Check what was chosen.

        Raises `ConfigError` where there is no such load, or there are no such faults.
        """
        self._rates = _rates(self.faults) if "=" in self.faults else {}
        if not self._rates and self.faults not in FAULTS:
            raise ConfigError(
                f"faults {self.faults!r} are not there; they have to be one of: {', '.join(FAULTS)}; or so"
                " many a minute, such as hang=0.5,sigkill=2"
            )
        if self.load not in _P99_SHARE:
            raise ConfigError(
                f"load {self.load} is not there; it has to be one of: {', '.join(map(str, _P99_SHARE))}"
            )
        if not 0.0 <= self.restart_ms <= _MOST_RESTART_MS:
            raise ConfigError(
                f"restart {self.restart_ms:g} ms is not allowed; it has to be 0 to {_MOST_RESTART_MS:,.0f} ms"
            )
        begin_ns = start_ns(self.seed)
        coming: dict[str, Iterator[tuple[int, str]]] = {
            kind: _now_and_then(self.seed, kind, rate, begin_ns)
            for kind, rate in self._rates.items()
            if rate and kind not in _OF_A_SECOND
        }
        if self.faults in {"bench", "all"}:
            rng = random.Random(f"{self.seed} schedule")
            first_ns = {kind: begin_ns + rng.randrange(_EVERY_NS) for kind in ("hang", "sigkill")}
            for kind, due_ns in first_ns.items():
                hit = [rng.choice(STAGES) for _ in range(100)]
                coming[kind] = zip(itertools.count(due_ns, _EVERY_NS), itertools.cycle(hit), strict=False)
        self._coming = coming
        self._due = {kind: next(each) for kind, each in coming.items()}

    @property
    def blind(self) -> float:
        """Share of the seconds that are planned blindly."""
        return _BLIND if self.faults in {"blind", "all"} else self._rates.get("blind", 0.0) / 60.0

    @property
    def unseen(self) -> float:
        """Share of the seconds in which perception finds nothing."""
        return _BLIND if self.faults == "unseen" else self._rates.get("unseen", 0.0) / 60.0

    @property
    def hasty(self) -> bool:
        return self.faults == "hasty"

    def times(self, stage: str) -> "FaultyTimes":
        if self.tiers is not None:
            tiers = list(self.tiers[stage])
        else:
            sigma, overhead = math.log(_P99_SHARE[self.load]) / P99_SIGMAS, Spread((_OVERHEAD_MS,))
            tiers = [
                TierTimes(Spread((ms * self.load,), sigma), overhead=overhead) for ms in _MEDIANS_MS[stage]
            ]
        seed = self.seed * 2 + STAGES.index(stage)
        return FaultyTimes(tiers, seed=seed, restart_ms=self.restart_ms, stage=stage, luck=self)

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
        for kind, (due_ns, hit) in self._due.items():
            if stamp_ns >= due_ns and not attempt and hit == stage:
                self._due[kind] = next(self._coming[kind])
                return kind
        if self.faults not in {"bench", "all"}:
            return ""
        chances = random.Random(f"{self.seed} {stage} {stamp_ns} {attempt}")
        return next((kind for kind, share in _OF_RUNS.items() if chances.random() < share), "")


@dataclass(frozen=True, kw_only=True)
class FaultyTimes(StageTimes):
    stage: str
    luck: DrawnRuns

    def run(self, stamp_ns: int, seq: int, tier: int, attempt: int) -> RunTimes:
        """What a run takes and how it ends.

        What the machine draws depends on the stamp, not on the frames before.
        """
        run = super().run(stamp_ns, stamp_ns // 1_000_000, tier, attempt)
        kind = self.luck.fault(self.stage, stamp_ns, attempt)
        steps = replace(run.steps, inference_ms=run.steps.inference_ms + _STALL_MS.get(kind, 0.0))
        return replace(run, steps=steps, ending=_ENDINGS.get(kind, Outcome.ON_TIME))
