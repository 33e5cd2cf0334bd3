"""One run of `torchperf tune`: asks what the model is, tries, and reports."""

import datetime
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from torchperf_ros.config.build_options import installed_engines
from torchperf_ros.optimize.tune.ranking import Group, Limits, Ranking, Standing
from torchperf_ros.optimize.tune.search import TuneSearch, TuneState, ask_facts, default_path, state_key
from torchperf_ros.optimize.tune.space import Step, TuneSpace, planned
from torchperf_ros.optimize.tune.target import Target, tuned_parameters
from torchperf_ros.optimize.tune.view import show_notes, show_plan, show_ranking
from torchperf_ros.packages.package_cache import open_cache

_INTERRUPTED = 130


class TuneRun:
    """Tunes one stage, or shows what each option does by itself."""

    def __init__(
        self, target: Target, limits: Limits, engines: list[str] | None, seconds: float, console: Console,
        batches: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Load the adapter in a process of its own and ask what it is.

        Args:
            target: what to tune.
            limits: what the best has to keep.
            engines: which may be tried; None: all that are installed.
            seconds: of measuring, for each candidate.
            console: for progress and tables.
            batches: try each option by itself, and these batch sizes, on the first tier; None: search.

        Raises:
            AdapterError: the adapter cannot be loaded, built or run.
        """
        self._target = target if batches is None else replace(target, tiers=target.tiers[:1])
        self._limits, self._seconds, self._console, self._batches = limits, seconds, console, batches
        self._engines = tuple(engines or installed_engines())
        self._interrupted = False
        stage = target.stage
        with console.status(f"loading {stage.adapter}"):
            self._facts = ask_facts(target)  # of all tiers, so that tables and a search share their results
        self._now = target.now(self._facts.threads)
        self._say(f"{stage.adapter}, tiers {', '.join(self._target.tiers)}, on {self._facts.machine}")

    def open_state(self, path: Path | None, *, resume: bool) -> None:
        """Read what earlier runs have measured; `path` None: the file in the cache folder.

        Raises:
            ConfigError: it cannot be read.
        """
        stage, node = self._target.stage, self._target.node
        key = state_key(self._facts.identity, self._facts.machine, stage.adapter, stage.options, self._seconds)
        folder = open_cache(node.cache_dir, node.cache_mib).folder
        self._state = TuneState(path or default_path(folder, key), key, resume=resume)

    def plan(self) -> None:
        """Show what would be tried."""
        space, steps = self._walk()
        known = self._state.of_tier(self._target.tiers[0])
        show_plan(planned(space, steps), known, self._facts, self._seconds, self._console)

    def search(self, minutes: float, timeout_s: float) -> int:
        """Try candidates until nothing is left, the time is over, or Ctrl-C; returns the exit status.

        Raises:
            ConfigError: the state cannot be written.
        """
        self._search = TuneSearch(
            self._target, self._facts, self._limits, self._state, self._console, seconds=self._seconds,
            timeout_s=timeout_s, minutes=minutes,
        )  # fmt: skip
        try:
            self._search.run(*self._walk(), to_the_end=self._batches is not None)
        except KeyboardInterrupt:
            self._interrupted = True
            return _INTERRUPTED
        best = self._search.ranking(self._target.tiers[0]).best
        return 0 if best is not None and best.group is Group.FITS else 1

    def report(self, out: Path | None, json_file: Path | None) -> None:
        """Show the table and write the files; after Ctrl-C no parameters, as not everything was tried.

        Raises:
            OSError: a file cannot be written.
        """
        rankings = {tier: self._search.ranking(tier) for tier in self._target.tiers}
        ranking = rankings[self._target.tiers[0]]
        if not ranking.standings:
            self._say("nothing was tried: the time of --minutes was over, or Ctrl-C, before the first one ended", "red")
            return
        for tier, found in rankings.items():
            title = (
                f"{self._target.stage.name}, tier {tier}{'' if self._batches is None else ', each option by itself'}"
            )
            self._say("")
            show_ranking(found, title, self._limits, self._now, self._facts.batch, self._console)
        show_notes(ranking, self._facts, self._console)
        if self._search.out_of_time or self._interrupted:
            why = "Ctrl-C" if self._interrupted else "out of time"
            self._say(f"{why}: not everything was tried; the same command goes on from here", "yellow")
        text, best = "", ranking.best
        if best is not None:
            if best.group is not Group.FITS:
                self._say(f"nothing fits the budget of {self._limits.budget_ms:g} ms; this is the nearest", "red")
            text = self._parameters(rankings, best)
            self._say(f"\n{text}")
            if self._batches is not None:
                self._say("The best option by itself; without --tables what gains is combined.", "dim")
            if out is not None and not self._interrupted:
                out.write_text(text, encoding="utf-8")
                self._say(f"written to {out}: torchperf node --ros-args --params-file {out}")
        if json_file is not None:
            json_file.write_text(json.dumps(self._figures(rankings, text), indent=2) + "\n", encoding="utf-8")

    def _walk(self) -> tuple[TuneSpace, Iterator[Step]]:
        space = TuneSpace(self._facts, self._limits, self._engines, self._now)
        return space, space.search() if self._batches is None else space.each_alone(self._batches)

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _parameters(self, rankings: dict[str, Ranking], best: Standing) -> str:
        found = best.trial.candidate
        if not self._facts.ranges:  # the policy for sizes means nothing: it stays as it is
            shapes = self._target.stage.shapes
            found = replace(found, shapes=shapes.policy, bucket_width=shapes.bucket_width)
        precision = {
            tier: ranking.best.trial.candidate.options.precision for tier, ranking in rankings.items() if ranking.best
        }
        first = self._target.tiers[0]
        today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
        remarks = [
            f"torchperf tune, {today}: {self._target.stage.adapter}, tier {first}",
            f"p99 {best.p99_ms:.2f} ms, p50 {best.p50_ms:.2f}; eager fp32 p50 {rankings[first].eager_ms:.2f}; budget"
            f" {self._limits.budget_ms:g} ms{'' if best.group is Group.FITS else ' NOT MET'}",
        ]
        return tuned_parameters(self._target, found, precision, self._facts.threads, remarks)

    def _figures(self, rankings: dict[str, Ranking], text: str) -> dict[str, Any]:
        """For JSON: infinite limits and times are null."""
        stage = self._target.stage
        return {
            "adapter": stage.adapter, "options": stage.options, "stage": stage.name,
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
