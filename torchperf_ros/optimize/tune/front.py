"""Accuracy against time over all tiers: which ways nothing beats, which tiers are worth keeping, and a page of it."""

import html
import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torchperf_ros import __version__
from torchperf_ros.optimize.tune.ranking import Group, Limits, Ranking, Standing
from torchperf_ros.optimize.tune.trial import Accuracy

_USABLE: Final = (Group.FITS, Group.OVER_BUDGET)
_HEIGHT_PX: Final = 460


class Point(NamedTuple):
    """A judged trial of a tier."""

    tier: str
    standing: Standing
    accuracy: Accuracy


class TierFront:
    """Compares what was judged of all tiers of a stage.

    Of two tiers, each in its best way, one is not worth keeping if it is neither faster than the other, beyond the
    noise, nor more accurate, by more than `Limits.max_loss`.

    Attributes:
        points: every judged trial, the refused ones, too.
        front: of those that may be used the ones that none beats, the fastest first: each is more accurate than all
            that are as fast or faster.
        kept: tiers that are worth keeping, in the stage's order.
        left_out: tier -> why it is not; of what was not judged nothing is said.
        first: the most accurate tier that is worth keeping and fits the budget; "" where none does.
    """

    def __init__(self, rankings: Mapping[str, Ranking], limits: Limits) -> None:
        """Compare the trials of each tier, which come in the stage's order."""
        self._limits, self._rankings = limits, rankings
        self.points = [
            point for tier, ranking in rankings.items() for one in ranking.standings if (point := _point(tier, one))
        ]
        usable = [point for point in self.points if point.standing.group in _USABLE]
        usable.sort(key=lambda point: (point.standing.p99_ms, -point.accuracy.merit))
        self.front = [
            point for place, point in enumerate(usable)
            if all(point.accuracy.merit > faster.accuracy.merit for faster in usable[:place])
        ]  # fmt: skip
        self.kept = {tier: point for tier, one in rankings.items() if one.best and (point := _point(tier, one.best))}
        self.left_out: dict[str, str] = {}
        for tier in list(self.kept)[::-1]:  # of two that are alike the first is kept
            own = self.kept.pop(tier)
            better = next((other for other in self.kept.values() if not self._is_worth(own, other)), None)
            if better is None:
                self.kept[tier] = own
            else:
                self.left_out[tier] = (
                    f"neither faster (p99 {own.standing.p99_ms:.2f} ms) nor more accurate ({_figure(own)}) than"
                    f" {better.tier} ({better.standing.p99_ms:.2f} ms, {_figure(better)}): leave it out"
                )
        self.kept = {tier: self.kept[tier] for tier in rankings if tier in self.kept}
        fitting = [point for point in self.kept.values() if point.standing.group is Group.FITS]
        self.first = max(fitting, key=lambda point: point.accuracy.merit).tier if fitting else ""

    def words(self) -> list[str]:
        """The proposal, in lines; none where nothing was judged."""
        if not self.kept:
            return []
        named = ", ".join(
            f"{tier} (p99 {one.standing.p99_ms:.2f} ms, {_figure(one)})" for tier, one in self.kept.items()
        )
        budget = f"the budget of {self._limits.budget_ms:g} ms"
        first = (
            f"begin with {self.first}, the most accurate that fits {budget}" if self.first else f"none fits {budget}"
        )
        unknown = [tier for tier in self._rankings if tier not in self.kept and tier not in self.left_out]
        return [f"tiers worth keeping on this machine: {named}; {first}",
                *(f"{tier}: {why}" for tier, why in self.left_out.items()),
                *(f"{tier}: nothing that may be used was judged" for tier in unknown)]  # fmt: skip

    def page(self, adapter: str, machine: str) -> str:
        """A picture of p99 against accuracy with the front and the budget, and a table of every point, as HTML."""
        from torchperf_ros.runs.report.page import Page

        page = Page()
        name = self.points[0].accuracy.name if self.points else "accuracy"
        named, *left = self.words() or ["nothing that may be used was judged"]
        lines = [("good" if self.first else "bad", named), *(("fair", line) for line in left)]
        page.top.append({"kind": "verdict", "lines": lines})
        page.section("Accuracy against time", [page.plots((f"p99 of the model, and {name}", self._picture(name)))])
        head = [("tier", ""), ("candidate", ""), *((text, "n") for text in ("p50 ms", "p99 ms", name, "eager fp32")),
                ("", "")]  # fmt: skip
        rows = [
            [point.tier, point.standing.trial.candidate.label,
             *({"text": text, "css": "n"} for text in (
                 f"{point.standing.p50_ms:.2f}", f"{point.standing.p99_ms:.2f}", f"{point.accuracy.value:.3f}",
                 f"{point.accuracy.eager:.3f}")),
             "; ".join(filter(None, ("on the front" * (point in self.front), point.standing.why)))]
            for point in sorted(self.points, key=lambda one: one.standing.p99_ms)
        ]  # fmt: skip
        page.section("Every judged trial", [{"kind": "table", "head": head, "rows": rows}])
        judged = self.points[0].accuracy.judged if self.points else 0
        return page.render(
            f"Tiers of {adapter}",
            f"{judged} held-out examples, on {machine}. The front: what no other way beats in both.",
            f"torchperf tune {__version__}. p99 without isolated stalls of the machine, corrected for its mood.",
        )

    def _picture(self, name: str) -> Any:  # noqa: ANN401 - plotly has no types
        import plotly.graph_objects as go

        from torchperf_ros.runs.report import report_pictures as draw

        figure = go.Figure()
        figure.add_scatter(
            x=[point.standing.p99_ms for point in self.front], y=[point.accuracy.value for point in self.front],
            mode="lines", name="front", hoverinfo="skip", line={"color": draw.GREY, "width": 1.5, "shape": "hv"},
        )  # fmt: skip
        colours = (draw.BLUE, draw.ORANGE, draw.GREEN, draw.PURPLE, draw.SKY)
        for number, tier in enumerate(self._rankings):
            own = [point for point in self.points if point.tier == tier]
            usable = [point.standing.group in _USABLE for point in own]
            figure.add_scatter(
                x=[point.standing.p99_ms for point in own], y=[point.accuracy.value for point in own], name=tier,
                mode="markers", hovertemplate=f"{tier}, %{{text}}: %{{x:.2f}} ms, %{{y:.3f}}",
                text=[html.escape(point.standing.trial.candidate.label) for point in own],
                marker={
                    "color": colours[number % len(colours)],
                    "symbol": ["circle" if one else "x-thin" for one in usable],
                    "size": [13 if point in self.front else 8 for point in own],
                    "line": {"width": 2, "color": colours[number % len(colours)]},
                },
            )  # fmt: skip
        draw.mark_budget(figure, self._limits.budget_ms)
        x = "p99, ms; large: on the front; crosses: refused"
        return draw.laid_out(figure, _HEIGHT_PX, x, name, showlegend=True).update_yaxes(rangemode="normal")

    def _is_worth(self, one: Point, other: Point) -> bool:
        """Whether one tier is worth keeping beside the other."""
        faster = self._rankings[one.tier].is_faster(one.standing, other.standing)
        return faster or one.accuracy.merit > other.accuracy.merit + self._limits.max_loss


def _point(tier: str, standing: Standing) -> Point | None:
    """The trial, if it was judged and its figure is a number."""
    accuracy = standing.trial.figures and standing.trial.figures.accuracy
    if not accuracy or not math.isfinite(accuracy.value) or not math.isfinite(standing.p99_ms):
        return None
    return Point(tier, standing, accuracy)


def _figure(point: Point) -> str:
    return f"{point.accuracy.name} {point.accuracy.value:.3f}"
