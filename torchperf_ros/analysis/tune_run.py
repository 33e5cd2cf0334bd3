"""One run of `torchperf tune`: asks what the model is, searches, and reports."""

import datetime
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchperf_ros.analysis.tune_parameters import tuned_parameters
from torchperf_ros.analysis.tune_request import Target
from torchperf_ros.analysis.tune_search import Subject, TuneSearch, ask_facts
from torchperf_ros.analysis.tune_state import TuneState, default_path, state_key
from torchperf_ros.analysis.tune_view import TuneView, show_plan, show_ranking
from torchperf_ros.core.build_options import ENGINES
from torchperf_ros.core.package_cache import open_cache
from torchperf_ros.core.tune_ranking import Group, Limits, Ranking, Standing
from torchperf_ros.core.tune_space import TuneSpace, combinations, planned

_INTERRUPTED = 130
_S_PER_MINUTE = 60.0


class TuneRun:
    """Tunes one stage."""

    def __init__(
        self, target: Target, limits: Limits, engines: list[str] | None, seconds: float, console: Console
    ) -> None:
        """Load the adapter in a process of its own and ask what it is.

        Args:
            target: what to tune.
            limits: what the best has to keep.
            engines: which may be tried; None: all.
            seconds: of measuring, for each candidate.
            console: for progress and tables.

        Raises:
            AdapterError: the adapter cannot be loaded, built or run.
        """
        self._target, self._limits, self._seconds, self._console = target, limits, seconds, console
        self._engines = tuple(engines or ENGINES)
        stage = target.stage
        self._subject = Subject(stage.adapter, stage.options, target.node.device)
        with console.status(f"loading {stage.adapter}"):
            self._facts = ask_facts(self._subject, target.tiers)
        self._now = target.now(self._facts.threads)
        self._say(f"{stage.adapter}, tiers {', '.join(target.tiers)}, on {self._facts.machine}")

    def open_state(self, path: Path | None, *, resume: bool) -> None:
        """Read what earlier runs have measured; `path` None: the file in the cache folder.

        Raises:
            ConfigError: it cannot be read.
        """
        key = state_key(
            self._facts.identity, self._facts.machine, self._subject.adapter, dict(self._subject.options), self._seconds
        )
        folder = open_cache(self._target.node.cache_dir, self._target.node.cache_mib).folder
        self._state = TuneState(path or default_path(folder, key), key, resume=resume)

    def plan(self) -> int:
        """Show what would be tried; returns the exit status."""
        steps = planned(self._space())
        known = self._state.of_tier(self._target.tiers[0])
        show_plan(steps, known, self._facts, self._seconds, combinations(self._facts, self._engines), self._console)
        return 0

    def search(self, minutes: float, timeout_s: float) -> int:
        """Try candidates until nothing is left, the time is over, or Ctrl-C; returns the exit status.

        Raises:
            ConfigError: the state cannot be written.
        """
        space = self._space()
        tiers = self._target.tiers
        self._interrupted = False
        with TuneView(self._console, len(planned(self._space())) + 2 * len(tiers[1:])) as view:
            self._search = TuneSearch(
                self._subject, self._facts, self._limits, self._state, seconds=self._seconds, timeout_s=timeout_s,
                until_s=time.monotonic() + minutes * _S_PER_MINUTE, view=view,
            )  # fmt: skip
            try:
                self._search.run(space, tiers)
            except KeyboardInterrupt:
                self._interrupted = True
        if self._interrupted:
            return _INTERRUPTED
        best = self._search.ranking(tiers[0]).best
        return 0 if best is not None and best.group is Group.FITS else 1

    def report(self, out: Path | None, json_file: Path | None) -> None:
        """Show the tables and write the files; after Ctrl-C no parameters, as not everything was tried.

        Raises:
            OSError: a file cannot be written.
        """
        rankings = {tier: self._search.ranking(tier) for tier in self._target.tiers}
        first, *others = self._target.tiers
        if not rankings[first].standings:
            self._say("nothing was tried: the time of --minutes was over, or Ctrl-C, before the first one ended", "red")
            return
        self._say("")
        show_ranking(
            rankings[first], f"{self._target.stage.name}, tier {first}", self._limits, self._now, self._console
        )
        best = rankings[first].best
        for tier in others:
            self._show_other(tier, rankings[tier])
        if self._search.out_of_time or self._interrupted:
            why = "Ctrl-C" if self._interrupted else "out of time"
            self._say(f"{why}: not everything was tried; the same command goes on from here", style="yellow")
        text = ""
        if best is not None:
            if best.group is not Group.FITS:
                self._say(f"nothing fits the budget of {self._limits.budget_ms:g} ms; this is the nearest", "red")
            text = self._parameters(rankings, best)
            self._say(f"\n{text}")
            if out is not None and not self._interrupted:
                out.write_text(text, encoding="utf-8")
                self._say(f"written to {out}: torchperf node --ros-args --params-file {out}")
        if json_file is not None:
            json_file.write_text(json.dumps(self._figures(rankings, text), indent=2) + "\n", encoding="utf-8")

    def _space(self) -> TuneSpace:
        return TuneSpace(self._target.tiers[0], self._facts, self._limits, self._engines, self._now)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _show_other(self, tier: str, ranking: Ranking) -> None:
        if not ranking.standings:
            self._say(f"tier {tier}: not looked at", style="yellow")
            return
        best = ranking.best
        if best is None:
            why = "; ".join(standing.why.splitlines()[0] for standing in ranking.standings)
            self._say(f"tier {tier}: runs in eager, as in the node: {why}", style="yellow")
            return
        ratio = best.p50_ms / ranking.eager_ms
        over = f", {best.why}" if best.why else ""
        for standing in ranking.standings:
            if standing.group is Group.REFUSED:
                over += f"; {standing.trial.candidate.label}: {standing.why.splitlines()[0]}"
        self._say(
            f"tier {tier}: {best.trial.candidate.label}: p99 {best.p99_ms:.2f} ms, p50 {best.p50_ms:.2f},"
            f" {ratio:.2f} of eager{over}"
        )

    def _parameters(self, rankings: dict[str, Ranking], best: Standing) -> str:
        found = best.trial.candidate
        if not self._facts.ranges:  # the policy for sizes means nothing: it stays as it is
            shapes = self._target.stage.shapes
            found = replace(found, shapes=shapes.policy, bucket_width=shapes.bucket_width)
        precision = {
            tier: ranking.best.trial.candidate.options.precision for tier, ranking in rankings.items() if ranking.best
        }
        eager_ms = rankings[self._target.tiers[0]].eager_ms
        today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        remarks = [
            f"torchperf tune, {today}: {self._subject.adapter}, tier {self._target.tiers[0]}",
            f"p99 {best.p99_ms:.2f} ms, p50 {best.p50_ms:.2f}; eager fp32 p50 {eager_ms:.2f}; budget"
            f" {self._limits.budget_ms:g} ms{'' if best.group is Group.FITS else ' NOT MET'}",
        ]
        return tuned_parameters(self._target.node, self._target.stage, found, precision, self._facts.threads, remarks)

    def _figures(self, rankings: dict[str, Ranking], text: str) -> dict[str, Any]:
        """For JSON: infinite limits and times are null."""
        return {
            "adapter": self._subject.adapter, "options": self._subject.options, "stage": self._target.stage.name,
            "machine": self._facts.machine, "reference_threads": self._facts.threads,
            "left_out": self._facts.left_out, "complete": not (self._search.out_of_time or self._interrupted),
            "limits": {name: _finite(value) for name, value in vars(self._limits).items()},
            "tiers": {
                tier: {
                    "eager_ms": _finite(ranking.eager_ms), "noise": ranking.noise,
                    "ranking": [_standing(standing) for standing in ranking.standings],
                }
                for tier, ranking in rankings.items()
            },
            "yaml": text,
        }  # fmt: skip


def _standing(standing: Standing) -> dict[str, Any]:
    figures = standing.trial.figures
    return {
        "group": standing.group.name.lower(), "why": standing.why, "p50_ms": _finite(standing.p50_ms),
        "p99_ms": _finite(standing.p99_ms), "break_even_frames": figures and _finite(figures.break_even_frames),
        **standing.trial.as_dict(),
    }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
