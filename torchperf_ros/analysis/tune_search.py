"""The search: trials one after the other, each in a process of its own, within a time, kept for the next run."""

import contextlib
import math
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torchperf_ros.analysis.tune_state import TuneState
from torchperf_ros.core.errors import AdapterError, ProtocolError
from torchperf_ros.core.tune_ranking import Limits, Ranking
from torchperf_ros.core.tune_space import Facts, Step, TuneSpace
from torchperf_ros.core.tune_trial import CRASHED, HUNG, Candidate, Figures, Trial
from torchperf_ros.supervise.compile_process import CompileProcess

_MODULE = "torchperf_ros.worker.trial_main"
_POLL_S = 0.2
_FIRST_TIER_SHARE = 0.75
_FACTS_TIMEOUT_S = 300.0


class View(Protocol):
    """Who is told how the search goes."""

    def trying(self, tier: str, step: Step) -> None:
        """A trial begins."""

    def says(self, text: str) -> None:
        """The trial says what it does."""

    def ended(self, trial: Trial, ranking: Ranking, *, earlier: bool) -> None:
        """A trial is over, or was known from an earlier run."""


class OutOfTime(Exception):
    """The time for the whole search is over; not an error."""


@dataclass(frozen=True)
class Subject:
    """Whose model is tuned, on what.

    Attributes:
        adapter: `module:Class`.
        options: handed to the adapter.
        device: auto, cpu, cuda or cuda:N.
    """

    adapter: str
    options: Mapping[str, Any]
    device: str

    def job(self, tier: str) -> dict[str, Any]:
        """What each process is told."""
        return {"adapter": self.adapter, "options": self.options, "device": self.device, "tier": tier}


def ask_facts(subject: Subject, tiers: Sequence[str]) -> Facts:
    """Load the adapter in a process of its own and say what its first tier is; the others have to be there, too.

    Raises:
        AdapterError: it cannot be loaded, built or run.
    """
    started_s = time.monotonic()
    message = _talk(subject.job(tiers[0]) | {"others": tiers[1:]}, _FACTS_TIMEOUT_S, lambda text: None)
    if message["kind"] != "facts":
        text = message["text"]
        raise AdapterError(text if message["kind"] == "failed" else f"adapter {subject.adapter!r}: {text}")
    return replace(Facts.from_dict(message["facts"]), load_s=time.monotonic() - started_s)


class TuneSearch:
    """Tunes one stage: the first tier by the whole walk, the others by checking what was found for the first.

    Attributes:
        trials: what became of all candidates, of all tiers, in the order tried.
        out_of_time: whether it ended before everything was tried.
    """

    def __init__(
        self,
        subject: Subject,
        facts: Facts,
        limits: Limits,
        state: TuneState,
        *,
        seconds: float,
        timeout_s: float,
        until_s: float,
        view: View,
    ) -> None:
        """Take what to tune.

        Args:
            subject: the adapter.
            facts: of its first tier.
            limits: what the best has to keep.
            state: what is known from earlier runs.
            seconds: of measuring, for each candidate.
            timeout_s: for each trial; beyond, it and all that it spawned is killed.
            until_s: by `time.monotonic`, when the search ends.
            view: is told.
        """
        self.trials: list[Trial] = []
        self.out_of_time = False
        self._subject, self._facts, self._limits, self._state = subject, facts, limits, state
        self._seconds, self._timeout_s, self._view = seconds, timeout_s, view
        self._started_s, self._until_s = time.monotonic(), until_s

    def run(self, space: TuneSpace, tiers: tuple[str, ...]) -> None:
        """Walk through the space on the first tier, then check the others.

        The first gets three quarters of the time where there are others.

        Raises:
            ConfigError: the state cannot be written.
        """
        first, *others = tiers
        self._first_tier = first
        share = _FIRST_TIER_SHARE if others else 1.0
        with self._until(self._started_s + share * (self._until_s - self._started_s)):
            for step in space.steps():
                space.trials.append(self._try(first, step, space.hopeless_ratio()))
        best = space.ranking.best
        if best is None:
            return
        with self._until(self._until_s):
            for tier in others:
                self._check(tier, best.trial.candidate)

    def ranking(self, tier: str) -> Ranking:
        """Of one tier's trials, with the noise of the first one's, which has the most."""
        trials = {name: [trial for trial in self.trials if trial.tier == name] for name in (self._first_tier, tier)}
        return Ranking(trials[tier], self._limits, Ranking(trials[self._first_tier], self._limits).noise)

    def _check(self, tier: str, found: Candidate) -> None:
        """Another tier with what the first one's best is; in fp32, too, where that is not its precision."""
        wanted = [found, replace(found, options=replace(found.options, precision="fp32"))]
        for candidate in dict.fromkeys(wanted):
            self._try(tier, Step("other tier", candidate), math.inf)

    @contextlib.contextmanager
    def _until(self, until_s: float) -> Iterator[None]:
        self._deadline_s = until_s
        try:
            yield
        except OutOfTime:
            self.out_of_time = True

    def _try(self, tier: str, step: Step, hopeless_ratio: float) -> Trial:
        known = self._state.find(tier, step.candidate, self._timeout_s)
        if known is None:
            self._view.trying(tier, step)
            trial = self._run(tier, step.candidate, hopeless_ratio)
            self._state.add(trial)
        else:
            trial = known
        self.trials.append(trial)
        self._view.ended(trial, self.ranking(tier), earlier=known is not None)
        return trial

    def _run(self, tier: str, candidate: Candidate, hopeless_ratio: float) -> Trial:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise OutOfTime
        timeout_s = min(self._timeout_s, left_s)
        job = self._subject.job(tier) | {
            "candidate": candidate.as_dict(), "reference_threads": self._facts.threads, "seconds": self._seconds,
            "hopeless_ratio": hopeless_ratio if math.isfinite(hopeless_ratio) else None,
        }  # fmt: skip
        started_s = time.monotonic()
        message = _talk(job, timeout_s, self._view.says)
        if message["kind"] == HUNG and timeout_s < self._timeout_s:
            raise OutOfTime
        took_s = time.monotonic() - started_s
        if message["kind"] != "trial":  # `failed` as well: the facts were there, so it could be loaded before
            outcome = HUNG if message["kind"] == HUNG else CRASHED
            return Trial(tier, candidate, outcome, message["text"], None, took_s, timeout_s)
        figures = message["figures"] and Figures(**message["figures"])
        return Trial(tier, candidate, message["outcome"], message["reason"], figures, took_s, timeout_s)


def _talk(job: dict[str, Any], timeout_s: float, says: Callable[[str], None]) -> dict[str, Any]:
    """Run a process to its last word; it and all that it spawned is dead when this returns.

    What its compilers keep on disk is its own and goes with it: compile seconds are those of a first time.

    Returns:
        Its last message, or one of the kind `crashed` or `hung` with a text.
    """
    with tempfile.TemporaryDirectory(prefix="torchperf_", ignore_cleanup_errors=True) as folder:
        return _listen(CompileProcess({**job, "folder": folder}, background=False, module=_MODULE), timeout_s, says)


def _listen(process: CompileProcess, timeout_s: float, says: Callable[[str], None]) -> dict[str, Any]:
    doing, give_up_at_s = "starting", time.monotonic() + timeout_s
    try:
        while (messages := process.listen()) is not None:
            for message in messages:
                if message["kind"] != "step":
                    return message
                doing = message["text"]
                says(doing)
            left_s = give_up_at_s - time.monotonic()
            if left_s <= 0:
                return {"kind": HUNG, "text": f"no end after {timeout_s:.0f} s, while {doing}; killed"}
            select.select([process.news], [], [], min(_POLL_S, left_s))
        reason = process.death_reason() or "the trial process ended without a word"
    except ProtocolError as error:
        reason = str(error)
    finally:
        process.close()
    return {"kind": CRASHED, "text": f"while {doing}: {reason}"}
