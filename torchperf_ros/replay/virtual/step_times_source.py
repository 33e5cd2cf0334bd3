"""Where a virtual replay has its step times from: the log's own records, those of another run, or a table."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from torchperf_ros.analysis.run_log import RunLog, RunLogError, StageLog
from torchperf_ros.analysis.run_log_source import read_runs
from torchperf_ros.core.config import NodeConfig, StageConfig
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.frame import StepTimes
from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.core.params_file import read_yaml
from torchperf_ros.replay.virtual.step_times import P99_SIGMAS, KnownRun, Spread, StageTimes, TierTimes

Say = Callable[[str], None]
_STEPS: Final = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
_INFERENCE, _OTHERS = "inference_ms", ("overhead_ms",)
_EXAMPLE: Final = "perception: {full: {inference_ms: {median: 20, p99: 35}}, fast: {inference_ms: 6}}"
_RESTART: Final = "restart_ms"
_MOST_SAMPLES: Final = 10_000
_TOO_SLOW: Final = 10.0  # budgets; whatever the ladder learns of how fast the machine is, that does not fit


def read_step_times(where: str, log: Path, config: NodeConfig, seed: int, say: Say) -> list[StageTimes]:
    """The times of every stage.

    Args:
        where: `log`, a `.yaml` table, or whatever `torchperf report` reads: a run, records, a log with `/perf`.
        log: what is replayed.
        config: whose stages and tiers.
        seed: of what is drawn.
        say: told of what is guessed.

    Raises:
        ConfigError: there are none, or the table is none.
    """
    path = log if where == "log" else Path(where)
    if path.suffix in {".yaml", ".yml"}:
        return _of_table(path, config, seed, say)
    try:
        runs = read_runs(path, lambda _done, _total: None)
    except RunLogError as error:
        msg = f"step times: {error}; give --times a table, for example `{_EXAMPLE}`, or a run of --json"
        raise ConfigError(msg) from error
    return [_of_stage(runs[0], index, stage, seed, path, say) for index, stage in enumerate(config.stages)]


# -- recorded frames --------------------------------------------------------------------------------------------------


def _of_stage(run: RunLog, index: int, stage: StageConfig, seed: int, path: Path, say: Say) -> StageTimes:
    logged = next((each for each in run.stages if each.name == stage.name), None)
    if logged is None and index < len(run.stages) and run.stages[index].name == f"stage {index}":
        logged = run.stages[index]  # rows of /perf/latency_stages alone do not name it
    if logged is None or not len(logged):
        msg = f"step times: {path} has no frame of stage {stage.name}; give --times a table, for example `{_EXAMPLE}`"
        raise ConfigError(msg)
    tier_of = _tiers(logged, stage)
    columns = {name: np.asarray(column) for name, column in logged.frames.items()}
    found = {
        tier: _tier_times(columns, np.flatnonzero((columns["tier"] == old) & (columns["outcome"] == Outcome.ON_TIME)))
        for old, tier in tier_of.items()
    }
    known = {int(columns["stamp_ns"][row]): _known(columns, row, tier_of) for row in range(len(logged))}
    tiers = _complete({tier: times for tier, times in found.items() if times is not None}, stage, str(path), say)
    return StageTimes(tiers, {stamp: run for stamp, run in known.items() if stamp}, seed)


def _tiers(logged: StageLog, stage: StageConfig) -> dict[int, int]:
    """Index of a tier in the parameters by its index in the log; by name where the log has names."""
    if not logged.tiers:
        return {index: index for index in range(len(stage.tiers))}
    return {old: stage.tiers.index(name) for old, name in enumerate(logged.tiers) if name in stage.tiers}


def _tier_times(columns: Mapping[str, Any], rows: Any) -> TierTimes | None:  # noqa: ANN401 - arrays
    if not len(rows):
        return None
    rows = rows[:_MOST_SAMPLES]
    decode, preprocess, inference, postprocess = (_spread(columns[name][rows]) for name in _STEPS)
    overhead = _spread(np.array([_overhead_ms(columns, row) for row in rows]))
    return TierTimes(inference, decode, preprocess, postprocess, overhead)


def _spread(values: Any) -> Spread:  # noqa: ANN401 - an array
    known = values[np.isfinite(values)]
    return Spread(tuple(round(float(value), 3) for value in known)) if len(known) else Spread((0.0,))


def _overhead_ms(columns: Mapping[str, Any], row: int) -> float:
    parts = [float(columns[name][row]) for name in ("wait_ms", *_STEPS)]
    rest_ms = float(columns["total_ms"][row]) - sum(part for part in parts if math.isfinite(part))
    return round(max(0.0, rest_ms), 3) if math.isfinite(rest_ms) else 0.0


def _known(columns: Mapping[str, Any], row: int, tier_of: Mapping[int, int]) -> KnownRun:
    steps = [round(float(columns[name][row]), 3) for name in _STEPS]
    outcome = Outcome(int(columns["outcome"][row]))
    whole = outcome is not Outcome.ON_TIME or all(map(math.isfinite, steps))
    return KnownRun(
        tier_of.get(int(columns["tier"][row]), -1) if whole else -1, outcome, StepTimes(*steps),
        _overhead_ms(columns, row) if outcome is Outcome.ON_TIME else 0.0,
        int(columns["fallback"][row]) == Fallback.BACKUP and all(map(math.isfinite, steps)),
    )  # fmt: skip


def _complete(found: Mapping[int, TierTimes], stage: StageConfig, where: str, say: Say) -> list[TierTimes]:
    """Times for every tier.

    One that never ran is taken to be as slow as the next more accurate one that did. Where none of those ran either,
    it is taken to be too slow: the vehicle did not use it, and at the times of a lower tier the ladder here would.

    Raises:
        ConfigError: there are none at all.
    """
    if not found:
        msg = f"step times: {where} has no run of {stage.name} that ended on time; give --times a table: `{_EXAMPLE}`"
        raise ConfigError(msg)
    times = []
    for tier, name in enumerate(stage.tiers):
        like = max((other for other in found if other <= tier), default=None)
        if like is None:
            say(f"{stage.name}: {where} has no times of tier {name}; taken to be too slow, as no better one has any")
        elif like != tier:
            say(f"{stage.name}: {where} has no times of tier {name}; taken to be those of {stage.tiers[like]}")
        times.append(TierTimes(Spread((_TOO_SLOW * stage.budget_ms,))) if like is None else found[like])
    return times


# -- a table ----------------------------------------------------------------------------------------------------------


def _of_table(path: Path, config: NodeConfig, seed: int, say: Say) -> list[StageTimes]:
    table = read_yaml(path, "step times")
    if not isinstance(table, Mapping):
        msg = f"step times {path}: has to be a table like `{_EXAMPLE}`"
        raise ConfigError(msg)
    names = {stage.name for stage in config.stages} | {_RESTART}
    if unknown := sorted(str(name) for name in table if name not in names):
        msg = f"step times {path}: there is no stage {unknown[0]}; there are {', '.join(sorted(names - {_RESTART}))}"
        raise ConfigError(msg)
    restart_ms = _number(table.get(_RESTART, 2000.0), f"step times {path}: {_RESTART}")
    times = []
    for stage in config.stages:
        tiers = table.get(stage.name)
        if not isinstance(tiers, Mapping) or not tiers:
            msg = f"step times {path}: {stage.name} is not there; it has to be like `{_EXAMPLE}`"
            raise ConfigError(msg)
        if unknown := sorted(str(name) for name in tiers if name not in stage.tiers):
            msg = f"step times {path}: {stage.name} has no tier {unknown[0]}; it has {', '.join(stage.tiers)}"
            raise ConfigError(msg)
        found = {
            stage.tiers.index(name): _tier(steps, f"step times {path}: {stage.name}.{name}")
            for name, steps in tiers.items()
        }
        times.append(StageTimes(_complete(found, stage, str(path), say), {}, seed, restart_ms))
    return times


def _tier(steps: object, what: str) -> TierTimes:
    others = [name for name in (*_STEPS, *_OTHERS) if name != _INFERENCE]
    if not isinstance(steps, Mapping) or _INFERENCE not in steps or set(steps) - {_INFERENCE, *others}:
        msg = f"{what}: {steps!r} has to hold {_INFERENCE}, and may hold {', '.join(others)}"
        raise ConfigError(msg)
    return TierTimes(**{key.removesuffix("_ms"): _read_spread(value, f"{what}.{key}") for key, value in steps.items()})


def _read_spread(value: object, what: str) -> Spread:
    if isinstance(value, Mapping) and set(value) == {"median", "p99"}:
        median_ms, p99_ms = (_number(value[key], f"{what}.{key}") for key in ("median", "p99"))
        if 0 < median_ms <= p99_ms:
            return Spread((median_ms,), math.log(p99_ms / median_ms) / P99_SIGMAS)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        return Spread(tuple(_number(each, what) for each in value))
    elif isinstance(value, (int, float)):
        return Spread((_number(value, what),))
    msg = f"{what}: {value!r} has to be ms, a list of ms, or {{median: ms, p99: ms}} with median <= p99"
    raise ConfigError(msg)


def _number(value: object, what: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return float(value)
    msg = f"{what}: {value!r} has to be a number of ms, 0 or more"
    raise ConfigError(msg)
