"""The highest values that a new run may have, whatever the base was."""

import math

from torchperf_ros.analysis.regress_metric import Metric
from torchperf_ros.analysis.regress_setting import Settings, quantity


class Limits(Settings[float]):
    """The highest value of a metric, in its unit, for example `miss=1%` or `perception.p99=40ms`; by default none."""

    option = "--limit"
    example = "miss: 1%"

    def limit(self, stage: str, metric: Metric) -> float:
        """The limit of a stage's metric, NaN where there is none; `stage` is empty for those of the whole run."""
        found = self.find(stage, metric)
        return math.nan if found is None else found

    def parse(self, metric: Metric, text: str) -> float:
        """A limit out of its text."""
        return quantity(text, {metric.unit})[0]

    def like(self, metric: Metric) -> str:
        """A text that would do."""
        return f"2{metric.unit}"
