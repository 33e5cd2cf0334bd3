"""How long the runs of a virtual replay take.

As in the log or another run, or drawn from a table, for each tier.
"""

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback, Outcome
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError
from torchperf_ros.replay.run_reading import read_runs
from torchperf_ros.settings.config import NodeConfig, StageConfig
from torchperf_ros.settings.params_file import read_yaml
from torchperf_ros.stage.frame import StepTimes
from torchperf_ros.workers.calibration import Calibration

Say = Callable[[str], None]
P99_SIGMAS: Final = 2.3263478740408408  # the 99th percentile of the standard normal distribution
_NEAR_NS: Final = 5_000_000  # between a stamp and what a recorder's row says of it
_PARTS: Final = ("decode", "preprocess", "inference", "postprocess")
_STEPS: Final = tuple(f"{part}_ms" for part in _PARTS)
_ENDS_BADLY: Final = frozenset({Outcome.LATE, Outcome.HUNG, Outcome.CRASHED, Outcome.PARTIAL})
_EXAMPLE: Final = "perception: {full: {inference_ms: {median: 20, p99: 35}}, fast: {inference_ms: 6}}"
_RESTART: Final = "restart_ms"
_RESTART_MS: Final = 2000.0
_MOST_SAMPLES: Final = 10_000
_TOO_SLOW: Final = 2.0  # budgets: no probe of it fits, and none keeps the standby busy for long


@dataclass(frozen=True)
class Spread:
    """What a step takes in ms: always the same, one of a list, or a log-normal distribution."""

    samples: tuple[float, ...]  # at least one; drawn from
    sigma: float = 0.0  # of the logarithm, around the one sample, its median; 0: always the same

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


_NOTHING: Final = Spread((0.0,))


@dataclass(frozen=True)
class TierTimes:
    """The steps of one tier's runs; `overhead` is hand-over and publish, what no step accounts for."""

    inference: Spread
    decode: Spread = _NOTHING
    preprocess: Spread = _NOTHING
    postprocess: Spread = _NOTHING
    overhead: Spread = _NOTHING


@dataclass(frozen=True)
class RunTimes:
    """What one run of a model takes, on the virtual clock or in a log.

    Attributes:
        steps: in ms.
        overhead_ms: besides them.
        ending: `ON_TIME`: the model decides; `CRASHED`: the worker dies at the end of it; `LATE`, `HUNG`:
            it takes longer than anybody waits; `PARTIAL`: likewise, and at least one step of it was done by
            then.
        tier: in a log: on which it ran; -1: not known.
        backup: in a log: whether it was the backup's run, which answered the frame.
    """

    steps: StepTimes
    overhead_ms: float = 0.0
    ending: Outcome = Outcome.ON_TIME
    tier: int = -1
    backup: bool = False


@dataclass(frozen=True)
class StageTimes:
    tiers: Sequence[TierTimes]  # by index, one for each of the stage's
    known: Mapping[int, RunTimes] = field(default_factory=dict)  # frames of the log by stamp in ns
    seed: int = 0  # of what is drawn
    restart_ms: float = _RESTART_MS  # from a worker's death until its replacement is ready

    def calibrations(self) -> list[Calibration]:
        """What a worker would have measured before its first frame, for each tier."""
        return [tier.inference.calibration for tier in self.tiers]

    def run(self, stamp_ns: int, seq: int, tier: int, attempt: int) -> RunTimes:
        """What a run of a frame on a tier takes.

        `attempt`: 0 for its first run, 1 for its backup, and so on.
        """
        known = self._near(stamp_ns)
        drawn = self._draw(seq, tier, attempt)
        if known is None:
            return drawn
        ran_so = known.backup if attempt else known.ending is Outcome.ON_TIME
        if ran_so and known.tier == tier and math.isfinite(known.steps.total_ms):
            return replace(known, ending=Outcome.ON_TIME)
        return replace(drawn, ending=known.ending) if known.ending in _ENDS_BADLY and not attempt else drawn

    @cached_property
    def _stamps(self) -> list[int]:
        return sorted(self.known)

    def _near(self, stamp_ns: int) -> RunTimes | None:
        place = bisect_left(self._stamps, stamp_ns)
        near = [
            stamp
            for stamp in self._stamps[max(0, place - 1) : place + 1]
            if abs(stamp - stamp_ns) <= _NEAR_NS
        ]
        return self.known[min(near, key=lambda stamp: abs(stamp - stamp_ns))] if stamp_ns and near else None

    def _draw(self, seq: int, tier: int, attempt: int) -> RunTimes:
        rng = random.Random(f"{self.seed} {seq} {tier} {attempt}")  # does not depend on earlier draws
        steps = [getattr(self.tiers[tier], part).draw(rng) for part in _PARTS]
        return RunTimes(StepTimes(*steps), self.tiers[tier].overhead.draw(rng))


def read_step_times(where: str, log: Path, config: NodeConfig, seed: int, say: Say) -> list[StageTimes]:
    """The times of every stage, from `where`: `log`, a `.yaml` table, or what `torchperf report` reads.

    The `log` is what is replayed; `say` gets what is guessed.

    Raises:
        ConfigError: there are none, or the table is none.
    """
    path = log if where == "log" else Path(where)
    if path.suffix in {".yaml", ".yml"}:
        return _of_table(path, config, seed, say)
    try:
        runs = read_runs(path, lambda _done, _total: None)
    except RunLogError as error:
        raise ConfigError(
            f"step times: {error}; give --times a table, for example `{_EXAMPLE}`, or a run of `replay -o`"
        ) from error
    return [_of_stage(runs[0], index, stage, seed, path, say) for index, stage in enumerate(config.stages)]


# -- recorded frames


def _of_stage(run: RunLog, index: int, stage: StageConfig, seed: int, path: Path, say: Say) -> StageTimes:
    logged = next((each for each in run.stages if each.name == stage.name), None)
    if logged is None and index < len(run.stages) and run.stages[index].name == f"stage {index}":
        logged = run.stages[index]  # rows of /perf/latency_stages alone do not name it
    if logged is None or not len(logged):
        raise ConfigError(
            f"step times: {path} has no frame of stage {stage.name}; give --times a table, for example"
            f" `{_EXAMPLE}`"
        )
    # the index of a tier in the parameters by its index in the log; by name where the log has names
    names = logged.tiers or stage.tiers
    tier_of = {old: stage.tiers.index(name) for old, name in enumerate(names) if name in stage.tiers}
    runs = [_run_of(row, tier_of) for row in logged.frames]
    # The streams of a stage share its workers, and so its times.
    same = [each for each in run.stages if stage.stream and each.name.startswith(f"{stage.stage}.")]
    all_runs = [_run_of(row, tier_of) for each in same for row in each.frames] or runs
    found = {}
    for tier in range(len(stage.tiers)):
        good = (run for run in all_runs if run.ending is Outcome.ON_TIME and run.tier == tier)
        if own := list(itertools.islice(good, _MOST_SAMPLES)):
            steps = {part: _samples(getattr(run.steps, f"{part}_ms") for run in own) for part in _PARTS}
            found[tier] = TierTimes(**steps, overhead=_samples(run.overhead_ms for run in own))
    known = {
        run_ns: run for run_ns, run in zip(logged.frames["stamp_ns"].tolist(), runs, strict=True) if run_ns
    }
    return StageTimes(_complete(found, stage, str(path), say), known, seed)


def _run_of(row: np.void, tier_of: Mapping[int, int]) -> RunTimes:
    steps = [round(float(row[name]), 3) for name in _STEPS]
    outcome = Outcome(int(row["outcome"]))
    rest_ms = float(row["total_ms"]) - sum(
        part for part in (float(row["wait_ms"]), *steps) if math.isfinite(part)
    )
    counts = outcome is Outcome.ON_TIME and math.isfinite(rest_ms)
    return RunTimes(
        StepTimes(*steps),
        round(max(0.0, rest_ms), 3) if counts else 0.0,
        outcome,
        tier_of.get(int(row["tier"]), -1),
        row["fallback"] == Fallback.BACKUP,
    )


def _samples(values: Iterable[float]) -> Spread:
    return Spread(tuple(value for value in values if math.isfinite(value)) or (0.0,))


def _complete(found: Mapping[int, TierTimes], stage: StageConfig, where: str, say: Say) -> list[TierTimes]:
    """Times for every tier.

    One that never ran is taken to be as slow as the next more accurate one that did.

    Where none of those ran either, it is taken to be too slow: the vehicle did not use it, and at the times
    of a lower tier the ladder here would.
    """
    if not found:
        raise ConfigError(
            f"step times: {where} has no run of {stage.name} that ended on time; give --times a table:"
            f" `{_EXAMPLE}`"
        )
    times = []
    for tier, name in enumerate(stage.tiers):
        like = max((other for other in found if other <= tier), default=None)
        if like != tier:
            alike = (
                "too slow, as no better one has any" if like is None else f"those of {stage.tiers[like]}"
            )
            say(f"{stage.name}: {where} has no times of tier {name}; taken to be {alike}")
        times.append(TierTimes(Spread((_TOO_SLOW * stage.budget_ms,))) if like is None else found[like])
    return times


# -- a table


def _of_table(path: Path, config: NodeConfig, seed: int, say: Say) -> list[StageTimes]:
    table, where = read_yaml(path, "step times"), f"step times {path}"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: has to be a table like `{_EXAMPLE}`")
    stages = {stage.name: stage for stage in config.stages}
    whole = [stage.name for stage in config.whole_stages]
    _check_names(
        table, [*dict.fromkeys([*whole, *stages]), _RESTART], f"{where}: there is no stage", "there are"
    )
    restart_ms = _number(table.get(_RESTART, _RESTART_MS), f"{where}: {_RESTART}")
    times = []
    for name, stage in stages.items():
        tiers = table.get(name, table.get(stage.stage))
        if not isinstance(tiers, Mapping) or not tiers:
            raise ConfigError(f"{where}: {name} is not there; it has to be like `{_EXAMPLE}`")
        _check_names(tiers, stage.tiers, f"{where}: {name} has no tier", "it has")
        found = {
            stage.tiers.index(tier): _tier(steps, f"{where}: {name}.{tier}")
            for tier, steps in tiers.items()
        }
        times.append(StageTimes(_complete(found, stage, str(path), say), {}, seed, restart_ms))
    return times


def _check_names(table: Mapping[Any, object], known: Sequence[str], what: str, has: str) -> None:
    if unknown := sorted(str(name) for name in table if name not in known):
        raise ConfigError(f"{what} {unknown[0]}; {has} {', '.join(known)}")


def _tier(steps: object, what: str) -> TierTimes:
    parts = [f"{part}_ms" for part in (*_PARTS, "overhead")]
    if not isinstance(steps, Mapping) or "inference_ms" not in steps or set(steps) - set(parts):
        others = ", ".join(part for part in parts if part != "inference_ms")
        raise ConfigError(f"{what}: {steps!r} has to hold inference_ms, and may hold {others}")
    return TierTimes(
        **{key.removesuffix("_ms"): _read_spread(value, f"{what}.{key}") for key, value in steps.items()}
    )


def _read_spread(value: object, what: str) -> Spread:
    if isinstance(value, Mapping) and set(value) == {"median", "p99"}:
        median_ms, p99_ms = (_number(value[key], f"{what}.{key}") for key in ("median", "p99"))
        if 0 < median_ms <= p99_ms:
            return Spread((median_ms,), math.log(p99_ms / median_ms) / P99_SIGMAS)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        return Spread(tuple(_number(each, what) for each in value))
    elif isinstance(value, (int, float)):
        return Spread((_number(value, what),))
    raise ConfigError(
        f"{what}: {value!r} has to be ms, a list of ms, or {{median: ms, p99: ms}} with median <= p99"
    )


def _number(value: object, what: str) -> float:
    if (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    ):
        return float(value)
    raise ConfigError(f"{what}: {value!r} has to be a number of ms, 0 or more")
