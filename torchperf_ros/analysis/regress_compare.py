"""Two runs against each other: whether they may be compared, and what comes of it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from torchperf_ros.analysis.regress_metric import METRICS
from torchperf_ros.analysis.regress_run import RegressError, RunFrames, no_frames
from torchperf_ros.analysis.regress_stage import Resampling, StageComparison, compare_stage
from torchperf_ros.analysis.regress_verdict import Estimate, Finding, Rules, Verdict, judge
from torchperf_ros.analysis.regress_whole import Agreement, agreement, compare_outputs, compare_whole
from torchperf_ros.core.percent import percent

NOTHING_WORSE: Final = 0
SOMETHING_WORSE: Final = 1
CANNOT_COMPARE: Final = 2
_MACHINE: Final = ("cpu", "cores", "memory_mib", "device")
_SHOWN: Final = 12
_OTHER_TIERS: Final = 0.01
"""A tier's share of a stage's answers has to differ by so much to be worth a word."""
_TESTS: Final = 8  # of a stage, and one of the whole run


@dataclass(frozen=True)
class Comparison:
    """What two runs said.

    Attributes:
        base, new: the runs; a stage that only the other has holds no frames.
        stages: of either, in the order of the base.
        agreements: of their outputs, by stage.
        findings: every metric that was judged, stage by stage, then those of the whole run.
        notes: what makes the runs less comparable, in words.
        resampling: how resamples were drawn.
    """

    base: RunFrames
    new: RunFrames
    stages: tuple[StageComparison, ...]
    agreements: Mapping[str, Agreement]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    resampling: Resampling

    def with_verdict(self, verdict: Verdict) -> list[Finding]:
        """The findings that came out so."""
        return [finding for finding in self.findings if finding.verdict is verdict]

    @property
    def broken_limits(self) -> list[Finding]:
        """The findings whose limit the new run does not keep."""
        return [finding for finding in self.findings if finding.breaks_limit]

    @property
    def silent(self) -> list[str]:
        """The stages that answered in the base, and not once in the new run."""
        return [stage.name for stage in self.stages if stage.frames[0] and not stage.frames[1]]

    def status(self, strict: bool = False) -> int:
        """The exit status: 0: nothing is worse, 1: something is or breaks its limit, 2: no metric could be judged.

        Args:
            strict: a metric of which there is not enough data counts as worse, so that a stage that one run lacks does.
        """
        if self.with_verdict(Verdict.WORSE) or self.broken_limits:
            return SOMETHING_WORSE
        if not any(self.with_verdict(verdict) for verdict in (Verdict.BETTER, Verdict.EQUIVALENT)):
            return CANNOT_COMPARE
        return SOMETHING_WORSE if strict and self.with_verdict(Verdict.NOT_ENOUGH) else NOTHING_WORSE


def compare(
    base: RunFrames,
    new: RunFrames,
    rules: Rules | None = None,
    resampling: Resampling | None = None,
    across_machines: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Comparison:
    """Compare two runs.

    Args:
        base: the run that is the measure.
        new: the run in question.
        rules: how verdicts are reached.
        resampling: how resamples are drawn.
        across_machines: compare runs of different machines all the same.
        progress: told how many of how many resamples were drawn.

    Raises:
        RegressError: they have no stage in common, or ran on different machines.
        ConfigError: a margin or a limit is for a stage that neither has.
    """
    rules, resampling = rules or Rules(), resampling or Resampling()
    notes = _differences(base, new)
    if (machines := other_machine(base, new)) and not across_machines:
        msg = f"{new.name} ran on another machine than {base.name}: {machines}; --across-machines compares them anyway"
        raise RegressError(msg)
    if not set(base.stages) & set(new.stages):
        msg = f"{base.name} has the stages {_list(base)}, {new.name} {_list(new)}; they need one in common"
        raise RegressError(msg)
    names = list(dict.fromkeys([*base.stages, *new.stages]))
    rules.check_stages(names)
    base, new = (replace(run, stages={name: run.stages.get(name, no_frames(name)) for name in names})
                 for run in (base, new))  # fmt: skip
    # fewer could not tell a p-value that passes the correction
    least = math.ceil(2 * _TESTS * len(names) / rules.alpha)
    resampling = replace(resampling, resamples=max(resampling.resamples, least))
    done, total = 0, 2 * resampling.resamples * len(names)

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    stages = tuple(compare_stage(base.stages[name], new.stages[name], resampling, advance) for name in names)
    agreements = {name: agreement(base.stages[name], new.stages[name]) for name in names}
    estimates = [one for stage in stages for one in stage.estimates]
    estimates += [*compare_outputs(base, new, agreements), *compare_whole(base, new, resampling)]
    untold = rules.limits.places(names) - {(one.stage, one.metric) for one in estimates}
    estimates += [Estimate(*place, math.nan, math.nan, why="neither run tells") for place in untold]
    places, order = [*names, ""], list(METRICS.values())
    estimates.sort(key=lambda one: (places.index(one.stage), order.index(one.metric)))
    notes += filter(None, (told(base, new, name) for name in names for told in (budgets, answering_tiers)))
    notes += [f"{stage.name}: every latency is the same in both runs" for stage in stages if stage.identical]
    findings = judge([one for one in estimates if one.metric.key not in rules.skip], rules)
    return Comparison(
        base, new, stages, agreements, tuple(findings), tuple([*([machines] if machines else []), *notes]), resampling
    )


def other_machine(base: RunFrames, new: RunFrames) -> str:
    """In words, how the machines of two runs differ; empty if they do not, or one run does not tell."""
    first, second = base.fact("machine", "fingerprint"), new.fact("machine", "fingerprint")
    if not first or not second or first == second:
        return ""
    parts = [f"{key} {base.fact('machine', key)} and {new.fact('machine', key)}" for key in _MACHINE
             if base.fact("machine", key) != new.fact("machine", key)]  # fmt: skip
    return "the machines differ: " + (", ".join(parts) or f"fingerprints {first} and {second}")


def budgets(base: RunFrames, new: RunFrames, stage: str) -> str:
    """In words, how a stage's deadlines differ, which its misses are counted by; empty if they do not."""
    first, second = base.stages[stage].budget_ms, new.stages[stage].budget_ms
    if first == second or not (math.isfinite(first) and math.isfinite(second)):
        return ""
    return f"{stage}: the budget is {first:g} ms in the base, {second:g} ms in the new run"


def answering_tiers(base: RunFrames, new: RunFrames, stage: str) -> str:
    """In words, which tiers answered how many of a stage's frames in both runs; empty if it is much the same."""
    names = [_tier_names(run, stage) for run in (base, new)]
    if not all(names):
        names = [{}, {}]  # a run that tells no names is compared by their numbers
    shares = [_tier_shares(run, stage, known) for run, known in zip((base, new), names, strict=True)]
    first, second = shares
    if not first or not second:
        return ""
    if all(abs(first.get(tier, 0.0) - second.get(tier, 0.0)) < _OTHER_TIERS for tier in {*first, *second}):
        return ""
    told = [", ".join(f"{tier} {percent(share, 0)}" for tier, share in found.items()) for found in shares]
    return f"{stage}: base answered by {told[0]}; new by {told[1]}"


def _tier_names(run: RunFrames, stage: str) -> dict[int, str]:
    stages = run.fact("stages")
    for one in stages if isinstance(stages, list) else []:
        if isinstance(one, Mapping) and one.get("name") == stage and isinstance(one.get("tiers"), list):
            return dict(enumerate(map(str, one["tiers"])))
    return {}


def _tier_shares(run: RunFrames, stage: str, names: Mapping[int, str]) -> dict[str, float]:
    """Of the frames that a tier answered, by its name, the most frequent first."""
    tiers = run.stages[stage].tier
    found = Counter(tiers[tiers >= 0].tolist())
    return {names.get(tier, f"tier {tier}"): count / found.total() for tier, count in found.most_common()}


def _differences(base: RunFrames, new: RunFrames) -> list[str]:
    """What else the runs do not have in common, in words."""
    notes = []
    for what, path in (
        ("log", ("log", "sha256")), ("parameters", ("params_sha256",)), ("pace", ("pace",)), ("seed", ("seed",)),
        ("torch", ("machine", "torch")), ("Python", ("machine", "python")),
    ):  # fmt: skip
        first, second = base.fact(*path), new.fact(*path)
        if first is not None and second is not None and first != second:
            notes.append(f"{what}: {_short(first)} and {_short(second)}")
    models = base.fact("model"), new.fact("model")
    for stage in (name for name in base.stages if name in new.stages):
        hashes = [model.get(stage) if isinstance(model, Mapping) else None for model in models]
        if all(hashes) and hashes[0] != hashes[1]:
            notes.append(f"model of {stage}: {_short(hashes[0])} and {_short(hashes[1])}")
    for run, other in ((base, new), (new, base)):
        notes += [f"stage {name}: only in {run.name}" for name in run.stages if name not in other.stages]
        if run.fact("complete") is False:
            notes.append(f"{run.name} was interrupted")
    if not (base.fact("machine", "fingerprint") and new.fact("machine", "fingerprint")):
        notes.append("machine: not told by both runs, so that it may be another")
    return notes


def _short(value: object) -> str:
    return str(value)[:_SHOWN] or "none"


def _list(run: RunFrames) -> str:
    return ", ".join(run.stages) or "none"
