"""The search.

Trials one after the other, each in a process of its own, within a time, kept for the next run.
"""

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchperf_ros.api.errors import AdapterError, ConfigError, ProtocolError
from torchperf_ros.settings.user_folder import make_private
from torchperf_ros.tools.tune.ranking import Limits, Ranking
from torchperf_ros.tools.tune.space import TuneSpace
from torchperf_ros.tools.tune.target import Target
from torchperf_ros.tools.tune.trial import Facts, TrialFigures, TrialOutcome, TuneCandidate, TuneTrial
from torchperf_ros.workers.compile_process import CompileProcess

_DOES = "torchperf_ros.tools.tune.trial_run"
_FIRST_TIER_SHARE = 0.75
_FACTS_TIMEOUT_S = 300.0
_MOST_STATES = 64
_S_PER_MINUTE = 60.0


@dataclass(frozen=True)
class TuneOptions:
    """How a stage is tuned; each is the option of `torchperf tune` of that name, with the same default."""

    limits: Limits
    engines: Sequence[str] = ()
    seconds: float = 3.0
    timeout_s: float = 180.0
    minutes: float = 10.0
    resume: bool = True
    dry_run: bool = False
    output: Path | None = None
    json_file: Path | None = None
    judged: int = 100
    log: Path | None = None


def ask_facts(
    target: Target, log: Path | None = None, frames: str = "", says: Callable[[str], None] = lambda _: None
) -> Facts:
    """What the adapter is, asked in a process of its own.

    Its tiers, what can be tried; or an `AdapterError`.

    That one also writes the frames of the log, if there is one, into the file `frames`.
    """
    started_s = time.monotonic()
    own = {"tiers": [] if target.guessed else list(target.tiers), "log": "" if log is None else str(log)}
    message = _talk(target.job() | own | {"frames": frames}, _FACTS_TIMEOUT_S, says)
    if message["kind"] != "facts":
        text = message["text"]
        raise AdapterError(
            text if message["kind"] == "failed" else f"adapter {target.stage.adapter!r}: {text}"
        )
    values = message["facts"]
    ranges = tuple((low, high) for low, high in values["ranges"])
    return Facts(
        **values
        | {
            "tiers": tuple(values["tiers"]),
            "ranges": ranges,
            "load_s": time.monotonic() - started_s,
        }
    )


class TuneState:
    """What has been measured, on disk as JSON lines: the trials of this model on this machine."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Read the trials in this file if it is to `resume`, but for a line cut off by a kill."""
        self._path = path
        self._found: dict[tuple[str, TuneCandidate], TuneTrial] = {}
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if resume and path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"results in {path} cannot be read ({error}); remove the file") from error
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                trial = TuneTrial.from_dict(json.loads(line)["trial"])
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
        if known and known.outcome == TrialOutcome.MEASURED and self._judged not in {0, _judged(known)}:
            known = None  # earlier versions judged nothing, and the examples may be others
        trial = known or self._run(tier, candidate, until_s)
        if trial is None:
            self.out_of_time = True
            return None
        if not known:
            self._state.add(trial)
        self.trials.append(trial)
        self._show(trial, earlier=known is not None)
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
        message = _talk(job, timeout_s, lambda text: self._status.update(f"{label}: {text}{self._best}"))
        if message["kind"] == TrialOutcome.HUNG and timeout_s < self._options.timeout_s:
            return None
        took_s = time.monotonic() - started_s
        if (
            message["kind"] != "trial"
        ):  # `failed` as well: the facts were there, so it could be loaded before
            outcome = TrialOutcome.HUNG if message["kind"] == TrialOutcome.HUNG else TrialOutcome.CRASHED
            return TuneTrial(tier, candidate, outcome, message["text"], None, took_s, timeout_s)
        figures = message["figures"] and TrialFigures.from_dict(message["figures"])
        return TuneTrial(tier, candidate, message["outcome"], message["reason"], figures, took_s, timeout_s)

    def _eager_accuracy(self, tier: str) -> float | None:
        """Eager fp32's, as an earlier trial of the tier has found it; it is the same in every trial."""
        found = (t.figures.accuracy for t in self._state.of_tier(tier).values() if t.figures)
        return next((one.eager for one in found if one and one.judged == self._judged), None)

    def _show(self, trial: TuneTrial, *, earlier: bool) -> None:
        ranking = self.ranking(trial.tier)
        standing = next(one for one in ranking.standings if one.trial is trial)
        line = Text(f"{time.monotonic() - self._started_s:5.0f} s  {trial.tier}  ", style="dim")
        line.append(trial.candidate.label, style="default")
        if trial.outcome == TrialOutcome.MEASURED:
            line.append(f"  p99 {standing.p99_ms:.2f} ms, p50 {standing.p50_ms:.2f}")
            if trial.figures and (found := trial.figures.accuracy):
                line.append(f", {found.name} {found.value:.3f}")
        if standing.why:
            line.append(f"  {standing.why.splitlines()[0]}")
        if ranking.best is standing:
            line.append("  best so far", style="green")
        if ranking.best is not None:
            self._best = f" (best p99 {ranking.best.p99_ms:.2f} ms)"
        if earlier:
            line.append("  from an earlier run")
        self._console.print(line, soft_wrap=True)


def _judged(trial: TuneTrial) -> int:
    """How many examples its accuracy is of, 0 where it has none."""
    accuracy = trial.figures and trial.figures.accuracy
    return accuracy.judged if accuracy else 0


def _talk(job: dict[str, Any], timeout_s: float, says: Callable[[str], None]) -> dict[str, Any]:
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
