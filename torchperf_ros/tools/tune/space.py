"""What tuning tries, in which order: a walk along one option after the other, not a product of all."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torchperf_ros.settings.build_options import (
    COMPILE_MODES,
    DISTRIBUTIONS,
    ENGINES,
    GRAPH,
    GRAPH_MODE,
    INT8_STATIC,
    OF_PARTS,
    PRECISIONS,
    STATIC_ENGINE,
    bucket_width,
)
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    EAGER,
    Facts,
    Group,
    Limits,
    RankedTrial,
    Ranking,
    TrialFigures,
    TrialOutcome,
    TuneCandidate,
    TuneTrial,
)

_COMPILE, _AOTI = OF_PARTS, STATIC_ENGINE
_CUDA_GRAPH_MODES = (GRAPH_MODE, "max-autotune")
_BUCKET_COUNTS = (4, 8)
_NEAR = 1.25
_FURTHER = "further compiled candidates"
# On CUDA: what is cheapest, and then what gains most on convolutions and on products of matrices.
_FIRST_GRAPHS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "fp16", "channels_last": True},
    {"precision": "tf32"},
)


class TuneSpace:
    """Walks through the candidates for one tier.

    `docs/training.md`, "What is tried", lists them, and what is left out.

    Each option is varied from the best so far, cheap and promising ones first.

    Attributes:
        trials: the results of the candidates so far; the caller adds one before it asks for the next.
        skipped: what these results have ruled out -> why.
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
        self.skipped: dict[str, str] = {}
        self._facts, self._limits = facts, limits
        self._engines = {EAGER} | {*engines} - {*facts.left_out}
        self._now = [] if now is None else [now]
        self._reference = TuneCandidate(threads=facts.threads)

    @property
    def ranking(self) -> Ranking:
        return Ranking(self.trials, self._limits, cuda=self._facts.cuda)

    def search(self) -> Iterator[TuneCandidate]:
        """The candidates of the walk, each once; what comes next depends on `trials`."""
        seen: set[TuneCandidate] = set()
        for candidate in self._walk():
            if candidate not in seen and (candidate in self._now or self._applies(candidate)):
                seen.add(candidate)
                yield candidate

    def _applies(self, candidate: TuneCandidate) -> bool:
        options, left_out = candidate.options, self._facts.left_out
        if options.precision in left_out or (options.channels_last and "channels_last" in left_out):
            return False
        has = options.precision in self._facts.precisions.get(options.engine, PRECISIONS)
        if not has:
            self.skipped[options.label] = f"{options.engine} does not have it on this device"
        return has

    def _walk(self) -> Iterator[TuneCandidate]:
        yield self._reference
        yield from self._present(EAGER)
        if self._best() is None:
            return
        yield from self._graphs()
        if self._facts.cuda:
            has_graph = any(one.trial.candidate.options.engine == GRAPH for one in self._right())
            # Eager cannot be faster than the same in a graph.
            yield from () if has_graph else self._in_process()
            yield from self._compiled((_COMPILE, _AOTI, *DISTRIBUTIONS))
            yield from self._in_process()
        else:
            yield from self._on(DISTRIBUTIONS, self._reference)
            yield from self._in_process()
            yield from self._compiled((*DISTRIBUTIONS, _AOTI, _COMPILE))
        yield from self._varied()
        yield from self._near_threads()

    def _best(self, *, compiled: bool | None = None) -> TuneCandidate | None:
        found = self.ranking.best_of(compiled=compiled)
        return found.trial.candidate if found else None

    def _right(self) -> list[RankedTrial]:
        """Those that run the model itself, and right: the quickest first."""
        found = [s for s in self.ranking.standings if s.group is not Group.REFUSED]
        return sorted((s for s in found if s.trial.candidate.in_process), key=lambda s: s.p50_ms)

    def _present(self, engine: str) -> Iterator[TuneCandidate]:
        yield from (one for one in self._now if one.options.engine == engine)

    def _on(self, engines: Iterable[str], best: TuneCandidate, **changes: Any) -> Iterator[TuneCandidate]:  # noqa: ANN401
        yield from (_with(best, engine=name, **changes) for name in engines if name in self._engines)

    def _graphs(self) -> Iterator[TuneCandidate]:
        """Eager in CUDA graphs; of sizes that vary, one for each of a few buckets."""
        if GRAPH not in self._engines:
            return
        yield from self._present(GRAPH)
        first = _with(next(self._buckets(self._reference), self._reference), engine=GRAPH)
        for changes in _FIRST_GRAPHS:
            yield _with(first, **changes)
            graphs = [s.trial.candidate for s in self._right() if s.trial.candidate.options.engine == GRAPH]
            if first not in graphs:
                self.skipped["graph in other precisions"] = f"{first.label} cannot be used"
                return
        yield from self._in_precisions(graphs[0], ("fp16", "bf16", "tf32"))
        yield from self._layouts(graphs[0])
        yield from self._buckets(graphs[0])

    def _in_process(self) -> Iterator[TuneCandidate]:
        """Threads, layouts and precisions of the best eager one, which show what to compile."""
        for vary in (self._fewer_threads, self._layouts, self._in_precisions):
            if best := self._best(compiled=False):
                yield from vary(best)

    def _fewer_threads(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        yield from (replace(best, threads=count) for count in self._thread_counts() if count < best.threads)

    def _in_precisions(
        self, best: TuneCandidate, names: Iterable[str] = PRECISIONS
    ) -> Iterator[TuneCandidate]:
        """Without those that failed: in another layout they would, too, and may cost the process."""
        failed = {
            t.candidate.options.precision for t in self.trials if t.candidate.in_process and not t.figures
        }
        yield from (_with(best, precision=name) for name in names if name not in {INT8_STATIC, *failed})

    def _thread_counts(self) -> list[int]:
        """1, 2, 4 and so on, and all cores; none on CUDA, where the CPU's threads compute nothing."""
        cores = self._facts.cores
        return [] if self._facts.cuda else sorted({*(1 << n for n in range(cores.bit_length())), cores})

    def _compiled(self, engines: Iterable[str]) -> Iterator[TuneCandidate]:
        best = self._best(compiled=False)
        assert best is not None
        static = self._facts.cuda and not self._facts.ranges
        how = TuneCandidate(best.options, best.threads)  # buckets are a variation
        plain = _with(how, precision="fp32", channels_last=False)
        for name in engines:
            mode = GRAPH_MODE if static and name == _COMPILE else "default"
            yield from self._on([name], how, mode=mode)
            if static and name == _COMPILE:
                yield from self._on([name], plain, mode=mode)
            if static and name == _AOTI:
                yield from self._on([name], how, cuda_graphs=True)
            if name == STATIC_ENGINE:  # of all it gains most, where convolutions run in int8
                yield from self._on([name], how, precision=INT8_STATIC)
            yield from self._present(name) if name in self._engines else ()
        if self._best(compiled=True) is None:
            yield from self._on(engines, plain)

    def _varied(self) -> Iterator[TuneCandidate]:
        """Variations of the best compiled one, as long as compiling is worth its while."""
        for vary in (self._precisions, self._layouts, self._buckets, self._modes):
            ranking = self.ranking
            compiled, in_process = ranking.best_of(compiled=True), ranking.best_of(compiled=False)
            if compiled is None:
                return
            if in_process is not None and compiled.p50_ms > _NEAR * in_process.p50_ms:
                best = in_process.trial.candidate.label
                self.skipped[_FURTHER] = f"none came within {_NEAR - 1:.0%} of {best}"
                return
            yield from vary(compiled.trial.candidate)

    def _precisions(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        """Those that eager could run right, the quickest first."""
        for name in dict.fromkeys(one.trial.candidate.options.precision for one in self._right()):
            yield _with(best, precision=name)

    def _layouts(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        yield _with(best, channels_last=not best.options.channels_last)

    def _buckets(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        for most in _BUCKET_COUNTS if self._facts.ranges else ():
            width = bucket_width(self._facts.ranges, most)
            yield _with(replace(best, shapes=BUCKET, bucket_width=width), dynamic="auto")

    def _modes(self, best: TuneCandidate) -> Iterator[TuneCandidate]:
        for mode in COMPILE_MODES:
            if self._facts.cuda or mode not in _CUDA_GRAPH_MODES:
                yield from self._on([_COMPILE], best, mode=mode, cuda_graphs=False)

    def _near_threads(self) -> Iterator[TuneCandidate]:
        """The best with the next smaller and larger number, all cores included, as long as one gains."""
        counts = self._thread_counts()
        for _ in counts:
            if best := self._best():
                near = [count for count in counts if count < best.threads][-1:]
                near += [count for count in counts if count > best.threads][:1]
                yield from (replace(best, threads=count) for count in near)


def planned(space: TuneSpace, walk: Iterator[TuneCandidate]) -> list[TuneCandidate]:
    """What the rest of a walk would try if graphs and compilers and nothing else gained a little.

    It fills the space's trials.
    """
    found = []
    for candidate in walk:
        found.append(candidate)
        eager_ms = space.ranking.eager_ms if space.trials else 1.0
        ms = eager_ms * (
            0.9 if not candidate.in_process else 1.0 if candidate.options.engine == EAGER else 0.95
        )
        times = (ms, ms, ms, ms, eager_ms, eager_ms, 1.0, 1.0)
        figures = TrialFigures(*times, 1, 0.0, 0.0, 0.0, 0.0, 0.0)
        space.trials.append(TuneTrial("", candidate, TrialOutcome.MEASURED, figures=figures))
    return found


def _with(candidate: TuneCandidate, **changes: Any) -> TuneCandidate:  # noqa: ANN401 - values of any option
    options = replace(candidate.options, **changes)
    fixed: dict[str, Any] = {} if options.engine == _COMPILE else {"mode": "default"}
    if options.engine in DISTRIBUTIONS:  # these lay out memory as they like
        fixed["channels_last"] = False
    return replace(candidate, options=replace(options.with_engine(options.engine), **fixed))
