"""The search: trials of a stage's candidates in turn within a time, kept for the next run.

What is tuned comes from the command's arguments or a parameter file, and a parameter file comes out. The
search tries in processes: one that is shared as long as nothing fails in it, and one for each compiled
candidate. What fails takes its process along: after an error, a crash or a hang the next job goes to
another one.
"""

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchperf_ros.api.errors import AdapterError, ConfigError, ProtocolError
from torchperf_ros.settings.build_options import GRAPH_MODE
from torchperf_ros.settings.config import STAGE_DEFAULTS, NodeConfig, StageConfig
from torchperf_ros.settings.files import make_private
from torchperf_ros.settings.params_file import config_of, params_of_file
from torchperf_ros.tools.shell import say
from torchperf_ros.tools.tune.space import TuneSpace, planned
from torchperf_ros.tools.tune.trial import (
    BUCKET,
    MEASURING,
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
from torchperf_ros.workers.compile_process import CompileProcess
from torchperf_ros.workers.control import from_json

_HANG_MS = 1000.0


@dataclass(frozen=True)
class Target:
    """A stage to tune.

    Attributes:
        values: its node's parameters by dotted name, as the file or the command gives them.
        node: the same, checked.
        tiers: those of its tiers that are tuned, the first one fully.
        guessed: no tiers were named: they are those of the node's default, of which the adapter may
            build some.
    """

    values: Mapping[str, Any]
    node: NodeConfig
    stage: StageConfig
    tiers: tuple[str, ...]
    has_base: bool
    guessed: bool = False

    def job(self) -> dict[str, Any]:
        """What each process gets that loads the adapter."""
        return {"adapter": self.stage.adapter, "options": self.stage.options, "device": self.node.device}

    def having(self, tiers: Sequence[str]) -> "Target":
        """The same, once it is known which tiers the adapter builds."""
        values = {**self.values, f"{self.stage.name}.tiers": list(tiers)}
        return _target(values, self.stage.name, {}, has_base=False) if self.guessed else self

    def now(self, threads: int) -> TuneCandidate | None:
        """How the first tier is run at present, if a file has that.

        `threads` is the node's default number.
        """
        if not self.has_base:
            return None
        options, shapes = self.stage.build_options(self.stage.tiers.index(self.tiers[0])), self.stage.shapes
        return TuneCandidate(
            options, self.node.worker_threads or threads, shapes.policy, shapes.bucket_width
        )

    def with_tiers(self, tiers: Sequence[str]) -> "Target":
        """The same with some of its tiers, in the stage's order.

        None named: all. An unknown one is a `ConfigError`.
        """
        if unknown := [tier for tier in tiers if tier not in self.stage.tiers]:
            raise ConfigError(
                f"--tiers {unknown[0]!r} is not there; {self.stage.name} has {', '.join(self.stage.tiers)}"
            )
        return replace(self, tiers=tuple(name for name in self.stage.tiers if not tiers or name in tiers))


def target_of_adapter(adapter: str, tiers: Sequence[str], own: Mapping[str, Any], device: str) -> Target:
    """A stage with this adapter, and its `own` parameters where they are not None.

    Its name is the one that the node knows this adapter by, else the class's; without tiers it has those
    of the node's default that the adapter builds.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    known = [name for name, values in STAGE_DEFAULTS.items() if values["adapter"] == adapter]
    name = known[0] if known else _name_of(adapter)
    output = STAGE_DEFAULTS.get(name, {}).get("output", f"{name}_output")
    values: dict[str, Any] = {"device": device, f"{name}.adapter": adapter, f"{name}.output": output}
    values |= {f"{name}.tiers": list(tiers)} if tiers else {}
    values |= {} if name in STAGE_DEFAULTS else {"stages": [name]}
    return replace(_target(values, name, own, has_base=False), guessed=not tiers)


def target_of_file(path: Path, name: str | None, own: Mapping[str, Any], device: str | None) -> Target:
    """A stage of a parameter file, by name or adapter, with some parameters changed, or a `ConfigError`."""
    values = params_of_file(path) | ({"device": device} if device else {})
    stages = config_of(values).whole_stages
    found = [one for one in stages if name in {None, one.name, one.adapter}]
    if len(found) != 1:
        raise ConfigError(
            f"{'name the stage or its adapter' if found or name is None else f'no {name} there'}: {path} has"
            f" {', '.join(f'{one.name} ({one.adapter})' for one in stages)}"
        )
    if any(found[0].packages):
        raise ConfigError(
            f"parameter {found[0].name}.packages: {list(found[0].packages)} is not allowed here; what a"
            " package does is fixed, so leave it out of the file to tune what the adapter builds"
        )
    return _target(values, found[0].name, own, has_base=True)


def _target(values: dict[str, Any], name: str, own: Mapping[str, Any], *, has_base: bool) -> Target:
    values |= {f"{name}.{key}": value for key, value in own.items() if value is not None}
    if own.get("budget_ms"):  # a worker must not count as hung within its budget
        values[f"{name}.hang_ms"] = max(values.get(f"{name}.hang_ms", _HANG_MS), own["budget_ms"])
    node = config_of(values)
    stage = next(one for one in node.whole_stages if one.name == name)
    return Target(values, node, stage, stage.tiers, has_base)


def tuned_parameters(
    target: Target,
    found: TuneCandidate,
    precision: Mapping[str, str],
    default_threads: int,
    remarks: Iterable[str],
) -> str:
    """The node's parameter file with what was found; complete, so that the node takes it as it is.

    Only the `precision`, by tier, differs between tiers; those that were not looked at keep theirs.
    `default_threads` is the number that `worker_threads: 0` means here; `remarks` are lines of comment at
    the top.
    """
    stage, options = target.stage, found.options
    every = [precision.get(tier, now) for tier, now in zip(stage.tiers, stage.precision, strict=True)]
    own = {
        "adapter": stage.adapter,
        "output": stage.output,
        "budget_ms": stage.budget_ms,
        # what only a scene has stands there
        "tiers": [stage.tiers[tier] for tier in stage.scenes[0].tiers],
        "engine": options.engine,
        "compile_mode": GRAPH_MODE if options.cuda_graphs else options.mode,
        "precision": every[:1] if len(set(every)) == 1 else every,
        "channels_last": options.channels_last,
        "parts": options.parts,
        "shapes": f"{BUCKET} {found.bucket_width}" if found.shapes == BUCKET else found.shapes,
    }
    if stage.streams:  # each has a budget of its own
        del own["budget_ms"]
    values = {
        "stages": [one.name for one in target.node.whole_stages],
        **target.values,
        "worker_threads": 0 if found.threads == default_threads else found.threads,
        **{f"{stage.name}.{name}": value for name, value in own.items()},
    }
    groups: dict[str, list[str]] = {"": []}
    for dotted, value in values.items():  # JSON is YAML, and its strings are never taken for anything else
        group, _, name = dotted.rpartition(".")
        groups.setdefault(group, []).append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    lines = [*(f"# {line}" for line in remarks), "/**/perf:", "  ros__parameters:"]
    lines += [f"    {line}" for line in groups.pop("")]
    for group, written in groups.items():
        lines += [f"    {group}:", *(f"      {line}" for line in written)]
    return "\n".join(lines) + "\n"


def _name_of(adapter: str) -> str:
    """`my_robot.lanes:LaneNetAdapter` is `lane_net`; a `ConfigError` where it is not of that form."""
    module, _, name = adapter.partition(":")
    if not module or not name:
        raise ConfigError(
            f"adapter {adapter!r} does not have the form module:Class, for example"
            " my_robot.segmenter:Segmenter"
        )
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Adapter") or name).lower()
    return re.sub(r"[^a-z0-9_]", "", words).lstrip("_0123456789") or "model"


_DOES = "torchperf_ros.tools.tune.trial_run"
# With fewer cores a spare process would take its start from what is built at the same time.
_CORES_FOR_SPARE = 3


class TrialProcesses:
    """Hands jobs to processes, see `trial_run`; it starts each, and ends it with all that it spawned.

    Where there are cores to spare, the next process gets ready while the present one builds. It stands still while that
    one measures.

    Attributes:
        started: how many processes there were.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._ready: dict[str, str] = {}
        self._shared: CompileProcess | None = None
        self._spare: CompileProcess | None = None
        self.started = 0

    def keep_spare(self, tier: str, cores: int) -> None:
        """Have, from now on, a spare process with this tier's model, on a machine with enough cores."""
        self._ready = {"tier": tier} if cores >= _CORES_FOR_SPARE else {}

    def ask(
        self, job: dict[str, Any], timeout_s: float, says: Callable[[str], None], *, alone: bool = False
    ) -> dict[str, Any]:
        """The answer to a job, by a process that it has `alone`, or by the shared one.

        It is of the kind `crashed` or `hung` where no other came.
        """
        process = (None if alone else self._shared) or self._spare or self._start()
        if process is self._spare:
            self._spare = None
        if not alone:
            self._shared = process
        if self._ready and self._spare is None:
            self._spare = self._start(**self._ready)
        goes_on = False
        try:
            answer = self._answer(process, job, timeout_s, says)
            goes_on = answer.get("goes_on", False) and not alone
        finally:
            if not goes_on:
                self._shared = self._shared if alone else None
                process.close()
        return answer

    def _answer(
        self, process: CompileProcess, job: dict[str, Any], timeout_s: float, says: Callable[[str], None]
    ) -> dict[str, Any]:
        doing = "starting"
        says(doing)
        process.send(job)
        try:
            for message in process.messages(timeout_s):
                if message["kind"] != "step":
                    return message
                doing = message["text"]
                self._hold_spare(doing == MEASURING)
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
            self._hold_spare(False)
        return {"kind": TrialOutcome.CRASHED, "text": f"while {doing}: {reason}"}

    def _start(self, **ready: str) -> CompileProcess:
        self.started += 1
        # What compilers keep on disk goes with it: compile seconds are those of a first time.
        own = {"tiers": [], "does": _DOES, "fresh": True, "started_ns": time.monotonic_ns()}
        return CompileProcess({**self._job, **ready, **own}, background=False, takes_more=True)

    def _hold_spare(self, held: bool) -> None:
        if self._spare is not None:
            self._spare.hold(held)

    def close(self) -> None:
        for process in (self._shared, self._spare):
            if process is not None:
                process.close()
        self._shared = self._spare = None


_FIRST_TIER_SHARE = 0.75
_FACTS_TIMEOUT_S = 300.0
_MOST_STATES = 64
_S_PER_MINUTE = 60.0
_TIMEOUT_SHARE = 0.3  # of the search's time: 180 s of the usual ten minutes
_LEAST_TIMEOUT_S = 60.0
# What a measurement takes of the search's time, for each side.
_LOOK_S = 0.4
_MEASURING_SHARE = 0.02
# At the end so many are measured once more. Building one again and timing it beside eager takes so many times as long
# as timing it; where all that is more than this share of the search's time, nothing is kept back for it.
_MOST_COMPARED = 3
_TIMES_MEASURING = 4
_LAST_SHARE = 0.1
_NONE_IS_NEAR = (0.0, 0.0)


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
    target: Target, processes: TrialProcesses, log: Path | None, says: Callable[[str], None]
) -> Facts:
    """What the adapter is, asked in the first process: its tiers, what can be tried; or an `AdapterError`.

    It also writes the frames of the log, if there is one, where the processes find them.
    """
    job = {"tiers": [] if target.guessed else list(target.tiers), "log": "" if log is None else str(log)}
    message = processes.ask(job, _FACTS_TIMEOUT_S, says)
    if message["kind"] != "facts":
        named = message["kind"] == "failed"
        raise AdapterError(
            message["text"] if named else f"adapter {target.stage.adapter!r}: {message['text']}"
        )
    return from_json(Facts, message["facts"])


class TuneState:
    """What has been measured, on disk as JSON lines: the trials of this model on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[tuple[str, TuneCandidate], TuneTrial] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"results in {path} cannot be read ({error}); remove the file") from error
        for line in lines:  # a kill may have cut one off
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
        """Keep a trial in the file before this returns, or raise a `ConfigError` with the reason."""
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
        processes: TrialProcesses,
        started_s: float | None = None,
    ) -> None:
        """Take what is tried and how; its time began at `started_s`, by the monotonic clock, or now."""
        self.trials: list[TuneTrial] = []
        self.out_of_time = False
        self._target, self._facts, self._options, self._state = target, facts, options, state
        self._processes, self._judged = processes, options.judged if facts.has_task else 0
        self._console, self._status, self._best = console, console.status(""), ""
        self._started_s = time.monotonic() if started_s is None else started_s
        self._whole_s, self._is_new = options.minutes * _S_PER_MINUTE, False
        self._usual_s = min(options.seconds, _MEASURING_SHARE * self._whole_s)
        self._left: list[tuple[str, Iterator[TuneCandidate]]] = []
        self._are_builds_compared = False

    def run(self, space: TuneSpace) -> None:
        """Try the candidates of the space, which takes the trials, on the first tier, then the best on the others.

        The first gets three quarters of the time where there are others.
        """
        first, *others = self._target.tiers
        with self._status:
            until_s = self._started_s + self._whole_s * (_FIRST_TIER_SHARE if others else 1.0)
            last_s = _MOST_COMPARED * _TIMES_MEASURING * self._options.seconds
            kept_s = last_s if last_s <= _LAST_SHARE * self._whole_s else 0.0
            self._try_all(first, space.search(), until_s - kept_s, space.trials)
            self._compare_best(first, until_s, space.trials)
            best = space.ranking.best
            if best is None:
                return
            found = best.trial.candidate
            in_fp32 = replace(found, options=replace(found.options, precision="fp32"))
            for tier in others:
                both = iter(dict.fromkeys([found, in_fp32]))
                self._try_all(tier, both, self._started_s + self._whole_s, [])

    def _try_all(
        self, tier: str, walk: Iterator[TuneCandidate], until_s: float, trials: list[TuneTrial]
    ) -> None:
        for candidate in walk:
            self._left.append((tier, itertools.chain([candidate], walk)))
            trial = self._try(tier, candidate, until_s)
            if trial is None:
                return
            self._left.pop()
            trials.append(trial)

    def untried(self, space: TuneSpace) -> list[tuple[str, TuneCandidate]]:
        """Tiers and candidates that the end of the time, or Ctrl-C, has left."""
        return [(tier, candidate) for tier, walk in self._left for candidate in planned(space, walk)]

    def _compare_best(self, tier: str, until_s: float, trials: list[TuneTrial]) -> None:
        """Measure the best few once more, for longer, while there is time; always judge the best."""
        best = self.ranking(tier).best
        if best is None or best.trial.figures is None:
            return
        near = [one for one in self.ranking(tier).standings if _may_be_best(one, best)][:_MOST_COMPARED]
        if self._judged in {0, best.trial.figures.judged} and (len(near) == 1 or not self._is_new):
            return
        each_s = (until_s - time.monotonic()) / (_TIMES_MEASURING * len(near))
        seconds = min(self._options.seconds, each_s)
        if seconds < self._usual_s:
            return
        for one in near:
            if one.trial.took_s > until_s - time.monotonic():  # to build it again
                continue
            again = self._run(tier, one.trial.candidate, until_s, seconds)
            if again and again.figures:
                self._state.add(again)
                for kept in (self.trials, trials):
                    kept[kept.index(one.trial)] = again
                self._show(again, "  measured again")

    def ranking(self, tier: str) -> Ranking:
        """Of one tier's trials, with the noise of the first one's, which has the most."""
        of_tier = {
            name: [trial for trial in self.trials if trial.tier == name] for name in self._target.tiers
        }
        limits, cuda = self._options.limits, self._facts.cuda
        noise = Ranking(of_tier[self._target.tiers[0]], limits, cuda=cuda).noise
        return Ranking(of_tier[tier], limits, noise, cuda=cuda)

    def _try(self, tier: str, candidate: TuneCandidate, until_s: float) -> TuneTrial | None:
        """What becomes of a candidate, or has become of it earlier.

        None where the time does not suffice.
        """
        known = self._state.find(tier, candidate, self._options.timeout_s)
        if known and known.figures and self._judged not in {0, known.figures.judged}:
            # Earlier runs judged nothing, or other examples.
            known = None if known.figures.is_near(self._to_beat(tier)) else known
        trial = known or self._run(tier, candidate, until_s)
        if trial is None:
            self.out_of_time = True
            return None
        if not known:
            self._state.add(trial)
            self._is_new = True
        self.trials.append(trial)
        self._show(trial, "  from an earlier run" if known else "")
        return trial

    def _run(
        self, tier: str, candidate: TuneCandidate, until_s: float, seconds: float = 0.0
    ) -> TuneTrial | None:
        """Try it: by a short look first, or for so many seconds at once."""
        if not (candidate.in_process or self._are_builds_compared):
            self._compare_builds()
        # On CUDA the first graph, which needs no other process, has the device to itself.
        if not self._facts.cuda or len(self.trials) > 1:
            self._processes.keep_spare(tier, self._facts.cores)
        timeout_s = min(self._options.timeout_s, until_s - time.monotonic())
        if timeout_s <= 0:
            return None
        job = {
            "tier": tier,
            "candidate": asdict(candidate),
            "start_s": self._facts.start_s,
            "look_s": min(_LOOK_S, self._usual_s),
            "seconds": seconds or self._usual_s,
            "to_beat": [] if seconds else self._to_beat(tier),
            "judged": self._judged,
            "eager_accuracy": self._eager_accuracy(tier),
        }
        started_s, label = time.monotonic(), f"{tier}: {candidate.label}"
        message = self._processes.ask(
            job,
            timeout_s,
            lambda text: self._status.update(f"{label}: {text}{self._best}"),
            alone=not candidate.in_process,
        )
        kind, took_s = message["kind"], time.monotonic() - started_s
        if kind == TrialOutcome.HUNG and timeout_s < self._options.timeout_s:
            return None
        if message.get("no_room"):  # which says nothing about the candidate
            raise ConfigError(message["text"])
        if kind == "trial":
            figures = from_json(TrialFigures, message["figures"]) if message["figures"] else None
            outcome, reason = message["outcome"], message["reason"]
        else:  # `failed` as well: the facts were there, so it could be loaded before
            figures, reason = None, message["text"]
            outcome = TrialOutcome.HUNG if kind == TrialOutcome.HUNG else TrialOutcome.CRASHED
        return TuneTrial(tier, candidate, outcome, reason, figures, took_s, timeout_s)

    def _compare_builds(self) -> None:
        """Say, before something is compiled, whether weights change at every build: no package can be kept then.

        What runs the model itself need not wait for that.
        """
        self._are_builds_compared = True
        answer = self._processes.ask(
            {"built_again": list(self._target.tiers)}, _FACTS_TIMEOUT_S, self._status.update
        )
        if answer["kind"] == "changing" and answer["text"]:
            say(self._console, answer["text"], "yellow")

    def _to_beat(self, tier: str) -> tuple[float, ...]:
        """The shares of a tier's best so far; of none, as for the reference, a look is all that is taken.

        The few that other tiers have are all measured at length.
        """
        if tier != self._target.tiers[0]:
            return ()
        best = self.ranking(tier).best
        return best.trial.figures.shares if best and best.trial.figures else _NONE_IS_NEAR

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


def _may_be_best(one: RankedTrial, best: RankedTrial) -> bool:
    if one.group > min(best.group, Group.OVER_BUDGET) or one.trial.figures is None:
        return False
    return one is best or (
        best.trial.figures is not None and one.trial.figures.is_near(best.trial.figures.shares)
    )
