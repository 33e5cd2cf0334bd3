"""What tuning tries, in which order, and what it leaves out.

A walk along one option after the other, not a product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from torchperf_ros.settings.build_options import (
    COMPILE_MODES,
    ENGINES,
    INT8_STATIC,
    PRECISIONS,
    STATIC_ENGINE,
)
from torchperf_ros.settings.shape_options import bucket_count, bucket_width
from torchperf_ros.tools.tune.ranking import Group, Limits, Ranking
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    EAGER,
    Facts,
    TrialFigures,
    TrialOutcome,
    TuneCandidate,
    TuneTrial,
)

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_BUCKET_COUNTS = (4, 8)
_MOST_STATIC_GRAPHS = 8  # each is compiled before the first frame
_NEAR = 1.25


class TuneSpace:
    """Walks through the candidates for one tier.

    `docs/training.md`, "What is tried", lists them, and what is left out.

    Each option is varied from the best so far, cheap and promising ones first.

    Attributes:
        trials: the results of the candidates so far; the caller adds one before it asks for the next.
    """

    def __init__(
        self,
        facts: Facts,
        limits: Limits,
        engines: Iterable[str] = ENGINES,
        now: TuneCandidate | None = None,
    ) -> None:
        """Start with nothing tried.

        `engines` are those beside eager, `now` is how the tier is run at present.
        """
        self.trials: list[TuneTrial] = []
        self._facts, self._limits = facts, limits
        self._engines = tuple(
            engine for engine in ENGINES[::-1] if engine in set(engines) and engine != EAGER
        )
        self._now = [] if now is None else [now]
        self._seen: set[TuneCandidate] = set()
        self._reference = TuneCandidate(threads=facts.threads)

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.trials, self._limits)

    def search(self) -> Iterator[TuneCandidate]:
        """The candidates of the walk, each once; what comes next depends on `trials`."""
        yield from self._new([self._reference, *(one for one in self._now if one.is_eager)])
        for vary in (self._threads, self._layouts, self._precisions):
            if best := self._best(compiled=False):
                yield from self._new(vary(best))
        yield from self._compiled()
        if best := self._best():
            yield from self._new(self._near_threads(best))

    def _compiled(self) -> Iterator[TuneCandidate]:
        best = self._best(compiled=False)
        if best is None or not self._engines:
            return
        yield from self._new(_with(best, engine=engine) for engine in self._engines)
        yield from self._new(one for one in self._now if one.options.engine in self._engines)
        if self._best(compiled=True) is None and best.options.precision != "fp32":
            yield from self._new(_with(best, engine=e, precision="fp32") for e in self._engines)
        ways = (self._compiled_precisions, self._modes, self._graphs, self._layouts, self._buckets)
        for vary in ways:
            ranking = self.ranking
            compiled, eager = ranking.best_of(compiled=True), ranking.best_of(compiled=False)
            if compiled is None or (eager is not None and compiled.p50_ms > _NEAR * eager.p50_ms):
                return
            yield from self._new(vary(compiled.trial.candidate))

    def _new(self, candidates: Iterable[TuneCandidate]) -> Iterator[TuneCandidate]:
        for candidate in candidates:
            if candidate not in self._seen:
                self._seen.add(candidate)
                yield candidate

    def _best(self, *, compiled: bool | None = None) -> TuneCandidate | None:
        found = self.ranking.best_of(compiled=compiled)
        return found.trial.candidate if found else None

    def _threads(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """Up to the node's default, which leaves a core to the node."""
        yield from (
            replace(best, threads=count) for count in self._thread_counts() if count < self._facts.threads
        )

    def _near_threads(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """The next smaller and the next larger number, all cores included."""
        counts = self._thread_counts()
        smaller = [count for count in counts if count < best.threads][-1:]
        larger = [count for count in counts if count > best.threads][:1]
        yield from (replace(best, threads=count) for count in smaller + larger)

    def _thread_counts(self) -> list[int]:
        """1, 2, 4 and so on, and all cores; none on CUDA, where the CPU's threads compute nothing."""
        cores = self._facts.cores
        return [] if self._facts.cuda else sorted({*(1 << n for n in range(cores.bit_length())), cores})

    def _layouts(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        if "channels_last" not in self._facts.left_out:
            yield _with(best, channels_last=not best.options.channels_last)

    def _precisions(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        for precision in PRECISIONS:
            if precision not in self._facts.left_out and precision != INT8_STATIC:
                yield _with(best, precision=precision)

    def _static_int8(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """By the engine that has it; eager has not."""
        if INT8_STATIC not in self._facts.left_out and STATIC_ENGINE in self._engines:
            yield _with(best, engine=STATIC_ENGINE, precision=INT8_STATIC)

    def _compiled_precisions(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """Those that eager could run right, the quickest there first."""
        good = [
            s for s in self.ranking.standings if s.trial.candidate.is_eager and s.group is not Group.REFUSED
        ]
        good.sort(key=lambda standing: standing.p50_ms)
        for precision in dict.fromkeys(standing.trial.candidate.options.precision for standing in good):
            yield _with(best, precision=precision)
        yield from self._static_int8(best)

    def _modes(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        if "compile" in self._engines:
            for mode in COMPILE_MODES:
                if self._facts.cuda or mode not in _CUDA_GRAPH_MODES:
                    yield _with(best, engine="compile", mode=mode)

    def _graphs(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """Engine compile has its own, as a mode; sizes have to stay."""
        if self._facts.cuda and not self._facts.ranges:
            for options in (best.options, replace(best.options, engine=EAGER, mode="default")):
                if options.engine != "compile":
                    yield replace(best, options=replace(options, cuda_graphs=True))

    def _buckets(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """About 4 and 8 buckets in all; where there are few enough, also with a graph for each."""
        for most in _BUCKET_COUNTS if self._facts.ranges else ():
            width = bucket_width(self._facts.ranges, most)
            bucketed = replace(best, shapes=BUCKET, bucket_width=width)
            yield bucketed
            if (
                best.options.engine == "compile"
                and bucket_count(self._facts.ranges, width) <= _MOST_STATIC_GRAPHS
            ):
                yield _with(bucketed, dynamic="never")


def planned(space: TuneSpace) -> list[TuneCandidate]:
    """What would be tried if every compiled engine and nothing else gained a little.

    Fills the space's trials.
    """
    found = []
    for candidate in space.search():
        ms = 1.0 if candidate.is_eager else 0.9
        values = dict.fromkeys(
            (field.name for field in fields(TrialFigures) if field.default is MISSING), 0.0
        )
        values |= {"p50_ms": ms, "p99_ms": ms, "eager_p50_ms": 1.0, "eager_p99_ms": 1.0}
        figures = TrialFigures(**values)  # type: ignore[arg-type]
        space.trials.append(TuneTrial("", candidate, TrialOutcome.MEASURED, figures=figures))
        found.append(candidate)
    return found


def _with(candidate: TuneCandidate, **changes: Any) -> TuneCandidate:  # noqa: ANN401 - values of any option
    options = replace(candidate.options, **changes)
    options = options.with_engine(options.engine)
    return replace(
        candidate, options=options if options.engine == "compile" else replace(options, mode="default")
    )
