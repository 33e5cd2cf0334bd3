"""How large a change has to be to matter: a margin for each metric, in its own unit or relative to the base."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchperf_ros.core.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """One thing that two runs are compared by; more of it is worse.

    Attributes:
        key: as in parameters, for example `p99`.
        title: as in tables.
        unit: of its values in tables.
        margin: the smallest change that matters, as in parameters.
    """

    key: str
    title: str
    unit: str
    margin: str


P50, P95, P99 = (Metric(*told) for told in (
    ("p50", "p50 latency", "ms", "2%,0.1ms"), ("p95", "p95 latency", "ms", "3%,0.2ms"),
    ("p99", "p99 latency", "ms", "3%,0.2ms")))  # fmt: skip
MAX = Metric("max", "longest latency", "ms", "5%,0.2ms")
JITTER = Metric("jitter", "jitter", "ms", "10%,0.1ms")
MISS = Metric("miss", "miss ratio", "%", "0.1pp")
FALLBACK = Metric("fallback", "fallback ratio", "%", "0.1pp")
DROPPED = Metric("dropped", "dropped ratio", "%", "0.5pp")
OUTPUTS = Metric("outputs", "outputs changed", "%", "0pp")
MEMORY_PEAK = Metric("memory_peak", "memory peak", "MiB", "5%,16MiB")
MEMORY_SLOPE = Metric("memory_slope", "memory slope", "MiB/h", "60MiB/h")
START_UP = Metric("start_up", "start-up time", "s", "50%,2s")
COMPILE = Metric("compile", "compile time", "s", "25%,2s")
METRICS: Final = {
    metric.key: metric
    for metric in (P50, P95, P99, MAX, JITTER, MISS, FALLBACK, DROPPED, OUTPUTS, MEMORY_PEAK, MEMORY_SLOPE, START_UP,
                   COMPILE)
}  # fmt: skip
"""Every metric by its key, in the order of the tables."""

_PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|pp|ms|s|MiB/h|MiB)")
_ABSOLUTE: Final = {"%": "pp"}
"""The unit in parameters, where it is not that of the tables: a share changes by percentage points."""


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


class MinEffects:
    """The margin of every metric, for all stages or for one."""

    def __init__(self, settings: Iterable[str] = ()) -> None:
        """Take the defaults and change some.

        Args:
            settings: like `p99=3%`, `p50=2%,0.2ms` or `perception.miss=1pp`; later ones win.

        Raises:
            ConfigError: there is no such metric, or a margin is none.
        """
        self._margins = {metric.key: _margin(metric, metric.margin) for metric in METRICS.values()}
        for setting in settings:
            name, _, text = setting.partition("=")
            metric = METRICS.get(name.strip().rpartition(".")[2])
            if metric is None:
                msg = f"--min-effect {setting!r}: no metric {name.strip()!r}; there are: {', '.join(METRICS)}"
                raise ConfigError(msg)
            self._margins[name.strip()] = _margin(metric, text)

    def check_stages(self, stages: Collection[str]) -> None:
        """See that every setting for one stage is for one that there is; a typo would turn a gate off.

        Raises:
            ConfigError: there is no such stage.
        """
        for name in self._margins:
            stage, dot, _ = name.rpartition(".")
            if dot and stage not in stages:
                msg = f"--min-effect {name}: no stage {stage!r}; there are: {', '.join(stages)}"
                raise ConfigError(msg)

    def margin(self, stage: str, metric: Metric) -> Margin:
        """The margin of a stage's metric; `stage` is empty for those of the whole run."""
        return self._margins.get(f"{stage}.{metric.key}", self._margins[metric.key])


def read_min_effects(path: Path) -> list[str]:
    """Settings out of a YAML file like `{p99: 3%, perception: {miss: 1pp}}`.

    Raises:
        ConfigError: it cannot be read, or is not like that.
    """
    from ruamel.yaml import YAML  # only this needs it
    from ruamel.yaml.error import YAMLError

    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError, YAMLError) as error:  # also a tag or a date that its text does not fit
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        msg = f"--min-effects {path}: cannot be read ({why}); it has to be YAML like 'p99: 3%'"
        raise ConfigError(msg) from error
    if not isinstance(content, Mapping):
        msg = f"--min-effects {path}: has to be YAML like 'p99: 3%'"
        raise ConfigError(msg)
    settings = []
    for name, value in content.items():
        entries = value.items() if isinstance(value, Mapping) else [("", value)]
        settings += [f"{name}.{key}={text}" if key else f"{name}={text}" for key, text in entries]
    return settings


def _margin(metric: Metric, text: str) -> Margin:
    unit = _ABSOLUTE.get(metric.unit, metric.unit)
    units = {unit} if unit == "pp" else {unit, "%"}
    parts = [_PART.fullmatch(part.strip()) for part in text.split(",")]
    if not all(part is not None and part[2] in units for part in parts):
        like = "0.5pp" if unit == "pp" else f"3%, 2{unit}, or both with a comma between"
        msg = f"--min-effect {metric.key}={text}: has to be like {like}"
        raise ConfigError(msg)
    found = {part[2]: float(part[1]) for part in parts if part is not None}
    return Margin(found.get("%", 0.0) / 100, found.get(unit, 0.0))
