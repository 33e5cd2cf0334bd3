"""How large a change has to be to matter: a margin for each metric, in its own unit or relative to the base."""

import math
from dataclasses import dataclass

from torchperf_ros.analysis.regress_metric import Metric
from torchperf_ros.analysis.regress_setting import Settings, quantity


@dataclass(frozen=True)
class Margin:
    """The smallest change that matters: a share of the base's value, or a number in the metric's unit if that is more.

    Attributes:
        share: of the base, 0 to 1.
        absolute: in the unit of the metric.
    """

    share: float
    absolute: float

    def of(self, base: float) -> float:
        """In the unit of the metric; without a base, what does not depend on one."""
        return max(self.share * abs(base), self.absolute) if math.isfinite(base) else self.absolute


class MinEffects(Settings[Margin]):
    """The margin of every metric: its own, or what was set, for example `p50=2%,0.2ms` or `perception.miss=1pp`."""

    option = "--min-effect"
    example = "p99: 3%"

    def margin(self, stage: str, metric: Metric) -> Margin:
        """The margin of a stage's metric; `stage` is empty for those of the whole run."""
        return self.find(stage, metric) or self.parse(metric, metric.margin)

    def parse(self, metric: Metric, text: str) -> Margin:
        """A margin out of its text, for example `3%` or `2%,0.2ms`; a share changes by percentage points, `0.5pp`."""
        absolute = _absolute(metric)
        units = {absolute} if absolute == "pp" else {absolute, "%"}
        found = {unit: value for value, unit in (quantity(part, units) for part in text.split(","))}
        return Margin(found.get("%", 0.0) / 100, found.get(absolute, 0.0))

    def like(self, metric: Metric) -> str:
        """Texts that would do."""
        unit = _absolute(metric)
        return "0.5pp" if unit == "pp" else f"3%, 2{unit}, or both with a comma between"


def _absolute(metric: Metric) -> str:
    return "pp" if metric.unit == "%" else metric.unit
