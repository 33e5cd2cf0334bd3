"""The search: what tuning tries, in which order, and trials one after the other within a time, kept for the next run.

Each trial runs in a process of its own. The order is a walk along one option after the other, not a product.
"""

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchperf_ros.api.errors import AdapterError, ConfigError, ProtocolError
from torchperf_ros.settings.build_options import (
    COMPILE_MODES,
    ENGINES,
    INT8_STATIC,
    PRECISIONS,
    STATIC_ENGINE,
)
from torchperf_ros.settings.shape_options import bucket_count, bucket_width
from torchperf_ros.settings.user_folder import make_private
from torchperf_ros.tools.tune.target import Target
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    EAGER,
    Facts,
    Group,
    Limits,
    Ranking,
    TrialFigures,
    TrialOutcome,
    TuneCandidate,
    TuneTrial,
)
from torchperf_ros.workers.compile_process import CompileProcess
from torchperf_ros.workers.control import from_json

_CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_BUCKET_COUNTS = (4, 8)
_MOST_STATIC_GRAPHS = 8  # each is compiled before the first frame
_NEAR = 1.25
_DOES = "torchperf_ros.tools.tune.trial_run"
_FIRST_TIER_SHARE = 0.75
_FACTS_TIMEOUT_S = 300.0
_MOST_STATES = 64
_S_PER_MINUTE = 60.0
_TIMEOUT_SHARE = 0.3  # of the search's time: 180 s of the usual ten minutes
_LEAST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class TuneOptions:
    """How a stage is tuned; each is the option of `torchperf tune` of that name, with the same default."""

    limits: Limits
    engines: Sequence[str] = ()
    seconds: float = 3.0
    minutes: float = 10.0
    dry_run: bool = False
    output: Path | None = None
    json_file: Path | None = None
    judged: int = 100
    log: Path | None = None

    @property
    def timeout_s(self) -> float:
        """A candidate that takes longer is killed."""
        return max(_LEAST_TIMEOUT_S, _TIMEOUT_SHARE * self.minutes * _S_PER_MINUTE)


def ask_facts(
    target: Target, log: Path | None = None, frames: str = "", says: Callable[[str], None] = lambda _: None
) -> Facts:
    """What the adapter is, asked in a process of its own.

    Its tiers, what can be tried; or an `AdapterError`.

    That one also writes the frames of the log, if there is one, into the file `frames`.
    """
    started_s, name = time.monotonic(), target.stage.adapter
    own = {"tiers": [] if target.guessed else list(target.tiers), "log": "" if log is None else str(log)}
    message = talk(target.job() | own | {"frames": frames}, _FACTS_TIMEOUT_S, says)
    if message["kind"] != "facts":
        begin = "" if message["kind"] == "failed" else f"adapter {name!r}: "
        raise AdapterError(begin + message["text"])
    return replace(from_json(Facts, message["facts"]), load_s=time.monotonic() - started_s)


class TuneState:
    """What has been measured, on disk as JSON lines: the trials of this model on this machine."""

    def __init__(self, path: Path) -> None:
        """Read the trials in this file, if it is there, but for a line cut off by a kill."""
        self._path = path
        self._found: dict[tuple[str, TuneCandidate], TuneTrial] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"results in {path} cannot be read ({error}); remove the file") from error
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, ProtocolError):
                trial = from_json(TuneTrial, json.loads(line)["trial"])
                self._found[trial.tier, trial.candidate] = trial

    def of_tier(self, tier: str) -> dict[TuneCandidate, TuneTrial]:
        return {candidate: trial for (name, candidate), trial in self._found.items() if name == tier}

    def find(self, tier: str, candidate: TuneCandidate, timeout_s: float) -> TuneTrial | None:
        """What became of it earlier; None where that is unknown, or it hung and is given more time now."""
        trial = self._found.get((tier, candidate))
        return (
            None if trial and trial.outcome == TrialOutcome.HUNG and timeout_s > trial.timeout_s else trial
        )

    def add(self, trial: TuneTrial) -> None:
        """Keep a trial; it is in the file when this returns, or a `ConfigError` has the reason why it is not."""
        self._found[trial.tier, trial.candidate] = trial
        try:
            make_private(self._path.parent)
            with self._path.open("a+b") as file:
                if file.tell() and not self._path.read_bytes().endswith(
                    b"\n"
                ):  # a kill cut the last line off
                    file.write(b"\n")
                file.write(json.dumps({"trial": asdict(trial)}).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"results in {self._path} cannot be written: {error.strerror}; it has to be a folder of"
                " your own"
            ) from error


def state_path(cache_folder: Path, *parts: object) -> Path:
    """The file of results that depend on these.

    Identity of the model, its options, the machine, seconds of measuring.

    It lies in the cache's folder `tune`; all but the newest 64 in there are removed.
    """
    folder = cache_folder / "tune"
    files = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    for path in files[:-_MOST_STATES]:
        path.unlink(missing_ok=True)
    return folder / f"{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]}.jsonl"


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
    """What would be tried if every compiled engine and nothing else gained a little; fills the space's trials."""
    for candidate in space.search():
        ms, of_eager = 1.0 if candidate.is_eager else 0.9, 1.0
        times = (ms, ms, ms, ms, of_eager, of_eager, ms, ms)
        figures = TrialFigures(*times, 1, 0.0, 0.0, 0.0, 0.0, 0.0)
        space.trials.append(TuneTrial("", candidate, TrialOutcome.MEASURED, figures=figures))
    return [trial.candidate for trial in space.trials]


def _with(candidate: TuneCandidate, **changes: Any) -> TuneCandidate:  # noqa: ANN401 - values of any option
    options = replace(candidate.options, **changes)
    options = options.with_engine(options.engine)
    return replace(
        candidate, options=options if options.engine == "compile" else replace(options, mode="default")
    )


class TuneSearch:
    """Tries the candidates of one stage.

    The first tier's whole walk, then what was found for it on the others.

    It shows a line for each trial that has ended, and below what the present one does.

    Attributes:
        trials: what became of all candidates, of all tiers, in the order tried.
        out_of_time: whether it ended before everything was tried.
    """

    def __init__(
        self,
        target: Target,
        facts: Facts,
        options: TuneOptions,
        state: TuneState,
        console: Console,
        frames: str = "",
    ) -> None:
        self._frames = frames
        self.trials: list[TuneTrial] = []
        self.out_of_time = False
        self._target, self._facts, self._options, self._state = target, facts, options, state
        self._judged = options.judged if facts.has_task else 0
        self._console, self._status, self._best = console, console.status(""), ""
        self._started_s, self._whole_s = time.monotonic(), options.minutes * _S_PER_MINUTE

    def run(self, space: TuneSpace) -> None:
        """Try the candidates of the space, which takes the trials, on the first tier, then the best on the others.

        The first gets three quarters of the time where there are others.
        """
        first, *others = self._target.tiers
        with self._status:
            until_s = self._started_s + self._whole_s * (_FIRST_TIER_SHARE if others else 1.0)
            for candidate in space.search():
                trial = self._try(first, candidate, until_s)
                if trial is None:
                    break
                space.trials.append(trial)
            if space.ranking.best is None:
                return
            found = space.ranking.best.trial.candidate
            in_fp32 = replace(found, options=replace(found.options, precision="fp32"))
            for tier in others:
                for candidate in dict.fromkeys([found, in_fp32]):
                    self._try(tier, candidate, self._started_s + self._whole_s)

    def ranking(self, tier: str) -> Ranking:
        """Of one tier's trials, with the noise of the first one's, which has the most."""
        of_tier = {
            name: [trial for trial in self.trials if trial.tier == name] for name in self._target.tiers
        }
        limits = self._options.limits
        return Ranking(of_tier[tier], limits, Ranking(of_tier[self._target.tiers[0]], limits).noise)

    def _try(self, tier: str, candidate: TuneCandidate, until_s: float) -> TuneTrial | None:
        """What becomes of a candidate, or has become of it earlier.

        None where the time does not suffice.
        """
        known = self._state.find(tier, candidate, self._options.timeout_s)
        if known and known.figures and self._judged not in {0, known.figures.judged}:
            known = None  # earlier versions judged nothing, and the examples may be others
        trial = known or self._run(tier, candidate, until_s)
        if trial is None:
            self.out_of_time = True
            return None
        if not known:
            self._state.add(trial)
        self.trials.append(trial)
        self._show(trial, "  from an earlier run" if known else "")
        return trial

    def _run(self, tier: str, candidate: TuneCandidate, until_s: float) -> TuneTrial | None:
        timeout_s = min(self._options.timeout_s, until_s - time.monotonic())
        if timeout_s <= 0:
            return None
        job = self._target.job() | {
            "tier": tier,
            "candidate": asdict(candidate),
            "reference_threads": self._facts.threads,
            "seconds": self._options.seconds,
            "judged": self._judged,
            "eager_accuracy": self._eager_accuracy(tier),
            "frames": self._frames,
        }
        started_s, label = time.monotonic(), f"{tier}: {candidate.label}"
        message = talk(job, timeout_s, lambda text: self._status.update(f"{label}: {text}{self._best}"))
        kind, took_s = message["kind"], time.monotonic() - started_s
        if kind == TrialOutcome.HUNG and timeout_s < self._options.timeout_s:
            return None
        if kind == "trial":
            figures = from_json(TrialFigures, message["figures"]) if message["figures"] else None
            outcome, reason = message["outcome"], message["reason"]
        else:  # `failed` as well: the facts were there, so it could be loaded before
            figures, reason = None, message["text"]
            outcome = TrialOutcome.HUNG if kind == TrialOutcome.HUNG else TrialOutcome.CRASHED
        return TuneTrial(tier, candidate, outcome, reason, figures, took_s, timeout_s)

    def _eager_accuracy(self, tier: str) -> float | None:
        """Eager fp32's, as an earlier trial of the tier has found it; it is the same in every trial."""
        found = (t.figures.accuracy for t in self._state.of_tier(tier).values() if t.figures)
        return next((one.eager for one in found if one and one.judged == self._judged), None)

    def _show(self, trial: TuneTrial, origin: str) -> None:
        ranking = self.ranking(trial.tier)
        standing = next(one for one in ranking.standings if one.trial is trial)
        times = f"  p99 {standing.p99_ms:.2f} ms, p50 {standing.p50_ms:.2f}" if trial.figures else ""
        accuracy = f", {standing.accuracy}" if standing.accuracy else ""
        why = f"  {standing.why.splitlines()[0]}" if standing.why else ""
        line = Text(f"{time.monotonic() - self._started_s:5.0f} s  {trial.tier}  ", style="dim")
        line.append(f"{trial.candidate.label}{times}{accuracy}{why}", style="default")
        if ranking.best is standing:
            line.append("  best so far", style="green")
        if ranking.best is not None:
            self._best = f" (best p99 {ranking.best.p99_ms:.2f} ms)"
        self._console.print(line.append(origin), soft_wrap=True)


def talk(job: dict[str, Any], timeout_s: float, says: Callable[[str], None]) -> dict[str, Any]:
    """Its last message, or one of the kind `crashed` or `hung`.

    It and all that it spawned is dead when this returns.

    What its compilers keep on disk is its own and goes with it: compile seconds are those of a first time.
    """
    doing = "starting"
    with tempfile.TemporaryDirectory(prefix="torchperf_", ignore_cleanup_errors=True) as folder:
        job = {"tiers": [], **job, "does": _DOES, "folder": folder, "started_ns": time.monotonic_ns()}
        process = CompileProcess(job, background=False)
        try:
            says(doing)
            for message in process.messages(timeout_s):
                if message["kind"] != "step":
                    return message
                doing = message["text"]
                says(doing)
            reason = process.death_reason() or "the trial process ended without a word"
        except TimeoutError:
            return {
                "kind": TrialOutcome.HUNG,
                "text": f"no end after {timeout_s:.0f} s, while {doing}; killed",
            }
        except ProtocolError as error:
            reason = str(error)
        finally:
            process.close()
    return {"kind": TrialOutcome.CRASHED, "text": f"while {doing}: {reason}"}
