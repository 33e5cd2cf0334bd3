"""One run of `torchperf tune`.

Asks what the model is, tries, and reports: a ranked table for each tier, YAML, JSON.
"""

import contextlib
import datetime
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.text import console_table
from torchperf_ros.settings.build_options import ENGINES, INT8_STATIC, PACKAGE_SUFFIXES
from torchperf_ros.tools.shell import say, write_output
from torchperf_ros.tools.tune.search import (
    Target,
    TrialProcesses,
    TuneOptions,
    TuneSearch,
    TuneState,
    ask_facts,
    state_path,
    tuned_parameters,
)
from torchperf_ros.tools.tune.space import TuneSpace, planned
from torchperf_ros.tools.tune.trial import (
    Facts,
    Group,
    Limits,
    RankedTrial,
    Ranking,
    TierChoice,
    TrialFigures,
    TuneCandidate,
)
from torchperf_ros.workers.package_cache import open_cache

_BY_USER = "Ctrl-C"
_HEADS = (
    *(">#", "candidate", ">p50 ms", ">p99 ms", ">max ms", ">gain", ">start s", ">compile s", ">pays after"),
    *(">MB", ">rel. L2"),
)
_MANY = 1e6
_TWICE = 2.0
_WORTH = 0.02  # share of the median below which a difference is none


def tune(target: Target, options: TuneOptions, console: Console) -> int:
    """Try candidates until nothing is left, the time is over, or Ctrl-C; returns the exit status.

    Raises:
        AdapterError: the adapter cannot be loaded, built or run.
        ConfigError, OSError: the state or a file cannot be read or written.
    """
    with tempfile.TemporaryDirectory(prefix="torchperf_") as folder:
        job = target.job() | {"frames": f"{folder}/frames.safetensors" if options.log else ""}
        with contextlib.closing(TrialProcesses(job)) as processes:
            return _tune(target, options, processes, console)


def _tune(target: Target, options: TuneOptions, processes: TrialProcesses, console: Console) -> int:
    stage, node, started_s = target.stage, target.node, time.monotonic()
    with console.status(f"loading {stage.adapter}") as status:
        facts = ask_facts(target, processes, options.log, status.update)
    target = target.having(facts.tiers)
    _check_engines(options.engines, facts)
    say(console, f"{stage.adapter}, tiers {', '.join(target.tiers)}, on {facts.machine}")
    of = facts.identity, facts.machine, stage.adapter, stage.options, options.seconds
    state = TuneState(state_path(open_cache(node.cache_dir, node.cache_mib).folder, *of))
    now = target.now(facts.threads)
    space = TuneSpace(facts, options.limits, options.engines or ENGINES, now)
    if options.dry_run:
        for candidate in planned(space, space.search()):
            where = "shared process" if candidate.in_process else "process of its own"
            known = ", is there" if candidate in state.of_tier(target.tiers[0]) else ""
            say(console, f"{candidate.label} ({where}{known})")
        say(
            console,
            "a search varies each option of the best so far: these come if graphs and compilers gain some",
        )
        _show_not_tried(facts.left_out, console)
        return 0
    search, cut = TuneSearch(target, facts, options, state, console, processes, started_s), ""
    stopped: KeyboardInterrupt | None = None
    try:
        search.run(space)
        cut = f"no time left of --minutes {options.minutes:g}" if search.out_of_time else ""
    except KeyboardInterrupt as by_user:
        stopped, cut = by_user, _BY_USER
    rankings = {tier: search.ranking(tier) for tier in target.tiers}
    not_tried = {**facts.left_out, **space.skipped}
    not_tried |= {f"{tier}: {candidate.label}": cut for tier, candidate in search.untried(space)}
    _report(target, facts, options, rankings, not_tried, cut, console)
    best = rankings[target.tiers[0]].best
    if stopped:
        raise stopped
    return 0 if best is not None and best.group is Group.FITS else 1


def _check_engines(asked: Sequence[str], facts: Facts) -> None:
    for name in asked:
        if name in facts.left_out:
            raise ConfigError(
                f"--engines {name!r} is not allowed here: {facts.left_out[name]}; there are"
                f" {', '.join(each for each in ENGINES if each not in facts.left_out)}"
            )


def _report(
    target: Target,
    facts: Facts,
    options: TuneOptions,
    rankings: dict[str, Ranking],
    not_tried: dict[str, str],
    cut: str,
    console: Console,
) -> None:
    """Show the tables and write the files; after Ctrl-C no parameters, as not everything was tried."""
    ranking, limits = rankings[target.tiers[0]], options.limits
    if not ranking.standings:
        say(console, f"nothing was tried: {cut} before the first one ended", "red")
        return
    for tier, found in rankings.items():
        say(console, f"\n{target.stage.name}, tier {tier}", "bold")
        show_ranking(found, limits, target.now(facts.threads), console)
    _show_notes(ranking, console)
    _show_not_tried(not_tried, console)
    if cut:
        say(console, f"{cut}: not everything was tried; the same command goes on from here", "yellow")
    choice = TierChoice(rankings, limits)
    for line in choice.words():
        say(console, line, "bold")
    text, best = "", ranking.best
    if best is not None:
        if best.group is not Group.FITS:
            tier = target.tiers[0]
            say(
                console,
                f"tier {tier}: nothing fits the budget of {limits.budget_ms:g} ms; this is the nearest",
                "red",
            )
        text = _parameters(target, facts, limits, rankings, best)
        say(console, f"\n{text}")
        if options.output is not None and cut != _BY_USER:
            write_output(options.output, text)
            say(
                console,
                f"written to {options.output}: torchperf node --ros-args --params-file {options.output}",
            )
            if best.trial.candidate.options.engine in PACKAGE_SUFFIXES:
                # The node has no frames to calibrate with.
                log = f" --log {options.log}" if INT8_STATIC in text and options.log is not None else ""
                say(
                    console,
                    f"first, or it begins in eager and builds beside that:"
                    f" torchperf compile --params {options.output}{log}",
                    "bold",
                )
        if not target.has_base:
            say(
                console,
                f"stage {target.stage.name!r} and output {target.stage.output!r}: other names come from"
                " --params FILE",
            )
    if options.json_file is not None:
        tables = {
            tier: {
                "eager_ms": one.eager_ms,
                "noise": one.noise,
                "ranking": list(map(_standing, one.standings)),
            }
            for tier, one in rankings.items()
        }
        figures = {
            "adapter": target.stage.adapter,
            "options": target.stage.options,
            "stage": target.stage.name,
            "machine": facts.machine,
            "reference_threads": facts.threads,
            "not_tried": not_tried,
            "complete": not cut,
            "limits": vars(limits),
            "yaml": text,
            "tiers": tables,
            "worth_keeping": list(choice.kept),
            "first_tier": choice.first,
            "leave_out": choice.left_out,
        }
        # NaN and infinite are null in JSON.
        text = json.dumps(json.loads(json.dumps(figures), parse_constant=lambda _: None), indent=2)
        write_output(options.json_file, f"{text}\n")


def _parameters(
    target: Target, facts: Facts, limits: Limits, rankings: dict[str, Ranking], best: RankedTrial
) -> str:
    found, shapes = best.trial.candidate, target.stage.shapes
    if not facts.ranges:  # the policy for sizes means nothing: it stays as it is
        found = replace(found, shapes=shapes.policy, bucket_width=shapes.bucket_width)
    precision = {
        tier: one.best.trial.candidate.options.precision for tier, one in rankings.items() if one.best
    }
    first = target.tiers[0]
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    remarks = [
        f"torchperf tune, {today}: {target.stage.adapter}, tier {first}",
        (
            f"p99 {best.p99_ms:.2f} ms, p50 {best.p50_ms:.2f}; eager fp32 p50"
            f" {rankings[first].eager_ms:.2f}; budget {limits.budget_ms:g}"
            f" ms{'' if best.group is Group.FITS else ' NOT MET'}"
        ),
    ]
    return tuned_parameters(target, found, precision, facts.threads, remarks)


def _standing(standing: RankedTrial) -> dict[str, Any]:
    figures = standing.trial.figures
    return {
        "group": standing.group.name.lower(),
        "why": standing.why,
        "p50_ms": standing.p50_ms,
        "p99_ms": standing.p99_ms,
        "break_even_frames": figures and figures.break_even_frames,
        **asdict(standing.trial),
    }


def show_ranking(ranking: Ranking, limits: Limits, now: TuneCandidate | None, console: Console) -> None:
    """The table of one tier: those within the limits, over the budget; then what failed, and why."""
    shown = [standing for standing in ranking.standings if standing.group <= Group.OVER_BUDGET]
    figure = next((one.accuracy.name for one in shown if one.accuracy), "")
    styles = ["yellow" if one.group is Group.OVER_BUDGET else "" for one in shown]
    if shown and not styles[0]:
        styles[0] = "green"
    rows = [[str(number), *_row(one, now, figure)] for number, one in enumerate(shown, start=1)]
    if shown:
        console.print(console_table([*_HEADS, *([f">{figure}"] if figure else [])], rows, styles))
    else:
        say(console, "nothing could be measured", "bold red")
    if over := styles.count("yellow"):
        say(console, f"{over} over the budget of {limits.budget_ms:g} ms", "yellow")
    for standing in ranking.standings[len(shown) :]:
        say(console, f"  -  {standing.trial.candidate.label}: {_short(standing.why)}", "dim")


def _show_notes(ranking: Ranking, console: Console) -> None:
    fewest = min((s.trial.figures.samples for s in ranking.standings if s.trial.figures), default=0)
    if fewest:
        say(
            console,
            f"gain: of eager fp32's p50 in the same process ({ranking.eager_ms:.2f} ms), worst..best part of"
            " it, ~ none beyond the noise; p99: without isolated stalls, equal within"
            f" {100 * ranking.noise:.0f} % (noise). At least {fewest} samples each."
            " docs/training.md explains the columns.",
            "dim",
        )


def _show_not_tried(not_tried: dict[str, str], console: Console) -> None:
    for why in dict.fromkeys(not_tried.values()):
        names = ", ".join(name for name, reason in not_tried.items() if reason == why)
        say(console, f"not tried: {names}: {why}", "dim")


def gain_text(figures: TrialFigures) -> str:
    """In percent of eager's median, worst and best part; a multiple from twice the time on.

    There is a difference only if every fifth of the measurement shows it, by 2 % or more.
    """
    if figures.least_share <= 1 + _WORTH and figures.most_share >= 1 - _WORTH:
        return "~"
    share = figures.p50_ms / figures.eager_p50_ms
    if share >= _TWICE:
        return f"takes {share:.1f}x"
    saved, low, high = (
        round(100 * (1 - each)) for each in (share, figures.most_share, figures.least_share)
    )
    return f"{saved:+d} % ({low}..{high})"


def _row(standing: RankedTrial, now: TuneCandidate | None, figure: str) -> list[str]:
    figures, candidate = standing.trial.figures, standing.trial.candidate
    assert figures is not None
    return [
        f"{candidate.label}{' (now)' if candidate == now else ''}",
        f"{standing.p50_ms:.2f}",
        f"{standing.p99_ms:.2f}",
        f"{figures.max_ms * standing.p50_ms / figures.p50_ms:.1f}",
        gain_text(figures),
        f"{figures.cold_start_s:.1f}",
        f"{figures.compile_s:.1f}" if figures.compile_s else "-",
        _frames(figures.break_even_frames),
        f"{figures.memory_mb:.0f}",
        _distance(figures),
        *([f"{standing.accuracy.value:.3f}" if standing.accuracy else "-"] if figure else []),
    ]


def _distance(figures: TrialFigures) -> str:
    distance = f"{figures.relative_l2:.1e}" if figures.relative_l2 else "0"
    return distance if figures.score is None else f"{distance} (score {figures.score:.3f})"


def _frames(frames: float) -> str:
    if not frames or math.isinf(frames):
        return "never" if frames else "-"
    return f"{frames / _MANY:.1f}M" if frames >= _MANY else f"{math.ceil(frames):,}"


def _short(text: str) -> str:
    """The first line and, where more was printed, the last one, which has the result."""
    lines = text.splitlines()
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1].strip()}"
