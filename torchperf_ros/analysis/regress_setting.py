"""Settings of metrics, for all stages or for one, as options and YAML files give them: `p99=3%`, `lanes.miss=1pp`."""

import abc
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Final, Generic, TypeVar

from torchperf_ros.analysis.regress_metric import METRICS, Metric
from torchperf_ros.core.errors import ConfigError

T = TypeVar("T")
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%|pp|ms|s|MiB/h|MiB)")


def quantity(text: str, units: Collection[str]) -> tuple[float, str]:
    """A number and its unit, for example `40ms`.

    Raises:
        ValueError: it is none, or not in one of these units.
    """
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2] not in units:
        raise ValueError(text)
    return float(found[1]), found[2]


class Settings(abc.ABC, Generic[T]):
    """A value of some metrics; one for a stage wins over one for all, an option over a file."""

    option: ClassVar[str]
    """Its name; that of the file has an `s` more."""
    example: ClassVar[str]
    """A line of such a file."""

    def __init__(self, settings: Iterable[str] = (), file: Path | None = None) -> None:
        """Read them all.

        Args:
            settings: like `p99=3%` or `perception.miss=1pp`; later ones win.
            file: YAML like `{p99: 3%, perception: {miss: 1pp}}`, None for none.

        Raises:
            ConfigError: there is no such metric, a value is none, or the file cannot be read.
        """
        self._values: dict[str, T] = {}
        if file is not None:
            for setting in self._of_file(file):
                self._take(setting, f"{self.option}s {file}:")
        for setting in settings:
            self._take(setting, self.option)

    @abc.abstractmethod
    def parse(self, metric: Metric, text: str) -> T:
        """A value out of its text.

        Raises:
            ValueError: it is none.
        """

    @abc.abstractmethod
    def like(self, metric: Metric) -> str:
        """Texts that would do."""

    def find(self, stage: str, metric: Metric) -> T | None:
        """The value for a stage's metric, None where nothing was set; `stage` is empty for one of the whole run."""
        return self._values.get(f"{stage}.{metric.key}", self._values.get(metric.key))

    def check_stages(self, stages: Collection[str]) -> None:
        """See that every setting for one stage is for one that there is; a typo would turn a gate off.

        Raises:
            ConfigError: there is no such stage.
        """
        for name in self._values:
            stage, dot, _ = name.rpartition(".")
            if dot and stage not in stages:
                msg = f"{self.option} {name}: no stage {stage!r}; there are: {', '.join(stages)}"
                raise ConfigError(msg)

    def places(self, stages: Iterable[str]) -> set[tuple[str, Metric]]:
        """Every stage, empty for the whole run, and metric that has a value."""
        found: set[tuple[str, Metric]] = set()
        for name in self._values:
            stage, _, key = name.rpartition(".")
            metric = METRICS[key]
            found.update((one, metric) for one in ([stage] if stage or metric.whole else stages))
        return found

    def _take(self, setting: str, source: str) -> None:
        name, _, text = setting.partition("=")
        name = name.strip()
        stage, dot, key = name.rpartition(".")
        metric = METRICS.get(key)
        if metric is None:
            msg = f"{source} {setting!r}: no metric {name!r}; there are: {', '.join(METRICS)}"
            raise ConfigError(msg)
        if dot and metric.whole:
            msg = f"{source} {setting!r}: {key} is of the whole run, not of stage {stage!r}; has to be {key}={text}"
            raise ConfigError(msg)
        try:
            self._values[name] = self.parse(metric, text)
        except ValueError as error:
            msg = f"{source} {name}={text}: has to be like {self.like(metric)}"
            raise ConfigError(msg) from error

    def _of_file(self, path: Path) -> list[str]:
        from ruamel.yaml import YAML  # only this needs it
        from ruamel.yaml.error import YAMLError

        like = f"it has to be YAML like '{self.example}'"
        try:
            content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, AttributeError, YAMLError) as error:  # also a tag or a date that is none
            why = " ".join(str(getattr(error, "strerror", None) or error).split())
            msg = f"{self.option}s {path}: cannot be read ({why}); {like}"
            raise ConfigError(msg) from error
        if not isinstance(content, Mapping):
            msg = f"{self.option}s {path}: {like}"
            raise ConfigError(msg)
        settings = []
        for name, value in content.items():
            entries = value.items() if isinstance(value, Mapping) else [("", value)]
            settings += [f"{name}.{key}={text}" if key else f"{name}={text}" for key, text in entries]
        return settings
