"""What tuning tries, in which order, and what it leaves out: a walk along one option after the other, not a product."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchperf_ros.core.build_options import COMPILE_MODES, DYNAMIC, ENGINES, PRECISIONS, BuildOptions
from torchperf_ros.core.shape_buckets import bucket_sizes
from torchperf_ros.core.tune_ranking import Group, Limits, Ranking, Standing
from torchperf_ros.core.tune_trial import MEASURED, Candidate, Figures, Trial

HOPELESS_RATIO = 2.0
"""A candidate whose median, at a first look, is more than this many times the best p99 so far is given up."""

_EAGER = "eager"
_LAYOUTS = ("channels_last", "fold_batch_norm")
_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_BUCKET_COUNTS = (4, 8)
_MOST_STATIC_GRAPHS = 8  # each is compiled before the first frame
_NEAR = 1.25


@dataclass(frozen=True)
class Facts:
    """What decides which candidates make sense: said by a process that has loaded the adapter on the device.

    Attributes:
        identity: hash of weights, code, inputs and what they run on, of every tier; results under another one say
            nothing.
        cuda: whether the device is CUDA.
        machine: device, instruction set, torch and the like, in one line.
        threads: CPU threads that the node uses by default, the reference's.
        cores: processors that a model may use.
        left_out: precision or layout -> why it does nothing, or nothing good, for this model here.
        ranges: smallest and largest value of each size that varies.
        load_s: seconds that such a process took to start and load the models.
    """

    identity: str
    cuda: bool
    machine: str
    threads: int
    cores: int
    left_out: Mapping[str, str] = field(default_factory=dict)
    ranges: tuple[tuple[int, int], ...] = ()
    load_s: float = 0.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Facts":
        """From the process's JSON.

        Raises:
            TypeError, KeyError: other fields.
        """
        return cls(**{**values, "ranges": tuple((low, high) for low, high in values["ranges"])})


@dataclass(frozen=True)
class Step:
    """A candidate, and which part of the search it belongs to."""

    part: str
    candidate: Candidate


class TuneSpace:
    """Walks through the candidates for one tier; each part starts from the best so far.

    The order is cheap and promising first. In eager, seconds each: the reference (eager fp32), CPU threads, layouts,
    precisions. Then compiled, tens of seconds each: the engines with the best eager options, `now`, and from the best
    compiled one on: precisions, modes, CUDA graphs, layouts, buckets. At last the best of all with the next numbers of
    threads. That is 10 to 20 trials where the full product has hundreds or thousands.

    Left out are: what the facts say does nothing here; CUDA graphs, the modes that need them, and tf32 on the CPU;
    a precision in a compiled engine that was refused, crashed or hung in eager; and, where no compiled engine comes
    within 25 % of the best eager one, all further compiled ones.

    Attributes:
        trials: what became of the candidates so far; whoever tries them adds to it before asking for the next.
    """

    def __init__(
        self, tier: str, facts: Facts, limits: Limits, engines: Iterable[str] = ENGINES, now: Candidate | None = None
    ) -> None:
        """Start with nothing tried.

        Args:
            tier: that is tuned.
            facts: about the model and the device.
            limits: what the best has to keep.
            engines: which may be tried; eager is the reference and always is.
            now: how the tier is run at present, if it is.
        """
        self.trials: list[Trial] = []
        self._tier, self._facts, self._limits = tier, facts, limits
        self._engines = tuple(engine for engine in ENGINES[::-1] if engine in set(engines) and engine != _EAGER)
        self._now = now
        self._seen: set[Candidate] = set()

    @property
    def reference(self) -> Candidate:
        """Eager fp32 on the node's default number of threads."""
        return Candidate(threads=self._facts.threads)

    @property
    def ranking(self) -> Ranking:
        """Of the trials so far."""
        return Ranking(self.trials, self._limits)

    def hopeless_ratio(self) -> float:
        """Median over the reference's median from which a candidate is hopeless; infinite while there is no best."""
        ranking = self.ranking
        if ranking.best is None:
            return math.inf
        return HOPELESS_RATIO * ranking.best.p99_ms / ranking.eager_ms

    def steps(self) -> Iterator[Step]:
        """The candidates, each once; what comes next depends on `trials`."""
        yield from self._part("reference", [self.reference])
        if self._now is not None and self._now.options.engine == _EAGER:
            yield from self._part("now", [self._now])
        for part, vary in (("threads", self._threads), ("layout", self._layouts), ("precision", self._precisions)):
            best = self._best(_is_eager)
            if best is not None:
                yield from self._part(f"eager {part}", vary(best))
        yield from self._compiled()
        best = self._best(lambda trial: True)
        if best is not None:
            yield from self._part("threads at last", self._near_threads(best))

    def _compiled(self) -> Iterator[Step]:
        best = self._best(_is_eager)
        if best is None or not self._engines:
            return
        yield from self._part("engine", [_with(best, engine=engine) for engine in self._engines])
        if self._now is not None and self._now.options.engine in self._engines:
            yield from self._part("now", [self._now])
        if self._best(_is_compiled) is None and best.options.precision != "fp32":
            yield from self._part("engine", [_with(best, engine=e, precision="fp32") for e in self._engines])
        for part, vary in (
            ("precision", self._compiled_precisions), ("mode", self._modes), ("graphs", self._graphs),
            ("layout", self._layouts), ("buckets", self._buckets),
        ):  # fmt: skip
            compiled = self._best(_is_compiled)
            if compiled is None or not self._worth_more():
                return
            yield from self._part(f"compiled {part}", vary(compiled))

    def _part(self, name: str, candidates: Iterable[Candidate]) -> Iterator[Step]:
        for candidate in candidates:
            if candidate not in self._seen:
                self._seen.add(candidate)
                yield Step(name, candidate)

    def _best(self, wanted: Callable[[Trial], bool]) -> Candidate | None:
        found = self.ranking.best_of(wanted)
        return None if found is None else found.trial.candidate

    def _worth_more(self) -> bool:
        ranking = self.ranking
        compiled, eager = ranking.best_of(_is_compiled), ranking.best_of(_is_eager)
        return compiled is not None and (eager is None or compiled.p50_ms <= _NEAR * eager.p50_ms)

    def _threads(self, best: Candidate) -> Iterator[Candidate]:
        """Up to the node's default, which leaves a core to the node."""
        if not self._facts.cuda:  # there the CPU's threads compute nothing
            counts = thread_counts(self._facts.cores)
            yield from (replace(best, threads=count) for count in counts if count < self._facts.threads)

    def _near_threads(self, best: Candidate) -> Iterator[Candidate]:
        """The next smaller and the next larger number, all cores included."""
        if not self._facts.cuda:
            counts = thread_counts(self._facts.cores)
            smaller = [count for count in counts if count < best.threads][-1:]
            larger = [count for count in counts if count > best.threads][:1]
            yield from (replace(best, threads=count) for count in smaller + larger)

    def _layouts(self, best: Candidate) -> Iterator[Candidate]:
        """Each changed alone, then those that gained together; what gained is seen when it is asked for."""
        changed = [
            _with(best, **{name: not getattr(best.options, name)})
            for name in _LAYOUTS if name not in self._facts.left_out
        ]  # fmt: skip
        yield from changed
        ranking = self.ranking
        p50_ms = {standing.trial.candidate: standing.p50_ms for standing in ranking.standings}
        gained = [one for one in changed if p50_ms.get(one, math.inf) < p50_ms.get(best, 0.0)]
        if len(gained) == len(_LAYOUTS):
            yield _with(best, **{name: not getattr(best.options, name) for name in _LAYOUTS})

    def _precisions(self, best: Candidate) -> Iterator[Candidate]:
        for precision in PRECISIONS:
            if precision not in self._facts.left_out:
                yield _with(best, precision=precision)

    def _compiled_precisions(self, best: Candidate) -> Iterator[Candidate]:
        """Those that eager could run right, the quickest there first."""
        standings = sorted(self.ranking.standings, key=lambda standing: standing.p50_ms)
        good = [
            standing.trial.candidate for standing in standings if _is_eager(standing.trial) and not _is_bad(standing)
        ]
        for precision in dict.fromkeys(candidate.options.precision for candidate in good):
            yield _with(best, precision=precision)

    def _modes(self, best: Candidate) -> Iterator[Candidate]:
        if "compile" in self._engines:
            for mode in COMPILE_MODES:
                if self._facts.cuda or mode not in _CUDA_GRAPH_MODES:
                    yield _with(best, engine="compile", mode=mode)

    def _graphs(self, best: Candidate) -> Iterator[Candidate]:
        """Engine compile has its own, as a mode; sizes have to stay."""
        if self._facts.cuda and not self._facts.ranges:
            for options in (best.options, replace(best.options, engine=_EAGER, mode="default")):
                if options.engine != "compile":
                    yield replace(best, options=replace(options, cuda_graphs=True))

    def _buckets(self, best: Candidate) -> Iterator[Candidate]:
        """About 4 and 8 buckets in all; where there are few enough, also with a graph for each."""
        for most in _BUCKET_COUNTS if self._facts.ranges else ():
            width = bucket_width(self._facts.ranges, most)
            bucketed = replace(best, shapes="bucket", bucket_width=width)
            yield bucketed
            if best.options.engine == "compile" and bucket_count(self._facts.ranges, width) <= _MOST_STATIC_GRAPHS:
                yield _with(bucketed, dynamic="never")


def planned(space: TuneSpace) -> list[Step]:
    """What would be tried if every compiled engine and nothing else gained a little; fills the space's trials."""
    steps = []
    for step in space.steps():
        p50_ms = 1.0 if _is_eager_options(step.candidate.options) else 0.9
        figures = Figures(p50_ms, p50_ms, p50_ms, p50_ms, 1.0, 1.0, 1, 0.0, 0.0, 0.0, 1.0, 0.0)
        space.trials.append(Trial("", step.candidate, MEASURED, figures=figures))
        steps.append(step)
    return steps


def combinations(facts: Facts, engines: Iterable[str] = ENGINES) -> int:
    """How many candidates the full product has."""
    modes = [mode for mode in COMPILE_MODES if facts.cuda or mode not in _CUDA_GRAPH_MODES]
    kinds = sum(len(modes) if engine == "compile" else 1 for engine in ENGINES if engine in {_EAGER, *engines})
    layouts = 1 << sum(name not in facts.left_out for name in _LAYOUTS)
    precisions = sum(name not in facts.left_out for name in PRECISIONS)
    threads = 1 if facts.cuda else len({facts.threads, *thread_counts(facts.cores)})
    shapes = 1 + len(_BUCKET_COUNTS) * (len(DYNAMIC) - 1) if facts.ranges else 1
    return kinds * layouts * precisions * threads * shapes * (2 if facts.cuda else 1)


def bucket_width(ranges: Iterable[tuple[int, int]], most: int) -> int:
    """The smallest power of two that makes at most so many buckets of all ranges together; 65,536 if none does."""
    ranges = tuple(ranges)
    width = max(1, 1 << max(0, (max(high - low for low, high in ranges) // most).bit_length() - 1))
    while bucket_count(ranges, width) > most and width < 1 << 16:
        width *= 2
    return width


def bucket_count(ranges: Iterable[tuple[int, int]], width: int) -> int:
    """Buckets of this width in all ranges together."""
    return math.prod(len(bucket_sizes(low, high, width)) for low, high in ranges)


def _with(candidate: Candidate, **changes: Any) -> Candidate:  # noqa: ANN401 - values of any option
    options = replace(candidate.options, **changes)
    if options.engine != "compile" and options.mode != "default":
        options = replace(options, mode="default")
    return replace(candidate, options=options)


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4 and so on, and all cores."""
    return sorted({*(1 << n for n in range(cores.bit_length()) if 1 << n <= cores), cores})


def _is_eager_options(options: BuildOptions) -> bool:
    return options.engine == _EAGER


def _is_eager(trial: Trial) -> bool:
    return _is_eager_options(trial.candidate.options)


def _is_compiled(trial: Trial) -> bool:
    return not _is_eager(trial)


def _is_bad(standing: Standing) -> bool:
    return standing.group is Group.REFUSED
