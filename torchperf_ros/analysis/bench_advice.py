"""What follows from the figures of `torchperf bench model`: each piece of advice names those that it rests on."""

from collections.abc import Sequence
from itertools import groupby

from torchperf_ros.analysis.bench_case import Figures, Result
from torchperf_ros.core.engine_choice import EAGER, choose_engine
from torchperf_ros.core.tier_ladder import Calibration

_SLOW_COMPILE_S = 3.0  # the node is to be active within this
_COLD_FIRST_CALLS = 3
_LONG_TAIL = 2.0
_BATCH_PAYS = 1.15
_MORE_MEMORY = 1.2


def advise(results: Sequence[Result]) -> list[str]:
    """A sentence for each thing to do or to know, tier by tier.

    Args:
        results: in the order of `ModelBench.cases`.
    """
    said = []
    for tier, of_tier in groupby(results, key=lambda result: result.case.tier):
        best: dict[int, Figures] = {}
        for batch, of_batch in groupby(of_tier, key=lambda result: result.case.batch):
            group = list(of_batch)
            figures = {result.case.engine: result.figures for result in group if result.figures is not None}
            where = f"{tier}, batch {batch}"
            said += [f"{where}: {result.case.engine} was left out: {result.error}" for result in group if result.error]
            if figures:
                chosen = _chosen(figures)
                best[batch] = figures[chosen]
                said += [f"{where}: {text}" for text in _of_batch(figures, chosen)]
        said += [f"{tier}: {text}" for text in _of_batches(best)]
    return said


def _chosen(figures: dict[str, Figures]) -> str:
    """By the project's rule; where eager was not asked for, each engine's own measurement of it stands in."""
    beside = {name: found.beside_eager for name, found in figures.items() if name != EAGER}
    chosen = choose_engine({**beside, EAGER: Calibration(1.0, 1.0)})
    return chosen if chosen in figures else min(figures, key=lambda name: figures[name].p50_ms)


def _of_batch(figures: dict[str, Figures], chosen: str) -> list[str]:
    best, said = figures[chosen], []
    others = {name: found for name, found in figures.items() if name not in (chosen, EAGER)}
    if chosen == EAGER:
        said += [f"stay with eager (p50 {best.p50_ms:.3g} ms): {_why_not(name, one)}" for name, one in others.items()]
    else:
        found = "".join(f"; {name} {one.times_eager:.2f}" for name, one in others.items())
        said.append(
            f"engine {chosen}: p50 {best.p50_ms:.3g} ms against {best.eager_p50_ms:.3g} in eager,"
            f" {best.times_eager:.2f} times eager{found}"
        )
    if best.compile_s > _SLOW_COMPILE_S:
        what = "compile ahead with `torchperf compile`" if chosen == "aoti" else "aoti can be compiled ahead instead"
        said.append(f"{best.compile_s:.0f} s of the {best.cold_start_s:.0f} s cold start go into compiling: {what}")
    if best.calls_to_warm >= _COLD_FIRST_CALLS:
        said.append(
            f"{best.calls_to_warm} calls until it is warm, the first {best.warm_up_ms[0]:.3g} ms against a p50 of"
            f" {best.p50_ms:.3g}: warm up before the first frame, as the node does"
        )
    if best.usual_p99_ms > _LONG_TAIL * best.p50_ms:
        said.append(
            f"p99 {best.usual_p99_ms:.3g} ms is {best.usual_p99_ms / best.p50_ms:.1f} times p50, stalls left out: a"
            " budget has to hold the p99; see what else runs on this machine"
        )
    eager = figures.get(EAGER)
    if eager is not None and best.peak_mib > _MORE_MEMORY * eager.peak_mib:
        said.append(
            f"{chosen} needs {best.peak_mib:.0f} MiB at its peak, compiling included, eager {eager.peak_mib:.0f}"
        )
    return said


def _why_not(engine: str, figures: Figures) -> str:
    beside = figures.beside_eager
    if beside.median_ms < 1.0 and beside.p99_ms > 1.0:
        return f"{engine} is {figures.times_eager:.2f} times eager, with a p99 {beside.p99_ms:.2f} times as long"
    return f"{engine} is {figures.times_eager:.2f} times eager"


def _of_batches(best: dict[int, Figures]) -> list[str]:
    """Whether larger batches pay, by the engine that is best at each."""
    if len(best) < 2:  # noqa: PLR2004 - nothing to compare
        return []
    rates = {batch: figures.times_reference(batch) for batch, figures in best.items()}
    smallest, most = min(rates), max(rates, key=lambda batch: rates[batch])
    gain = rates[most] / rates[smallest]
    found = ", ".join(f"{rates[batch]:.2f} at batch {batch}" for batch in sorted(rates))
    found = f"items/s, as multiples of eager's with the adapter's own example: {found}"
    if most == smallest or gain < _BATCH_PAYS:
        return [f"larger batches do not pay: {found}"]
    longer = most / smallest / gain
    return [f"batch {most} pays for inputs that come together, an answer takes {longer:.1f} times as long: {found}"]
