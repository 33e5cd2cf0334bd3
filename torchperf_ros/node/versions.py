"""Other versions of the node's stages: the place where a roll-out plugs in.

The room `fleet` has the implementation. It is loaded, by name, when a parameter first asks for a candidate or a
plan, and at configure where a parameter `rollout.*` says that one may come: loading takes 26 ms, which no frame
of a node that drives should wait for. A node without any of them loads none of it.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from torchperf_ros.api.alert import Alert
from torchperf_ros.settings.config import NodeConfig
from torchperf_ros.stage.stage import Stage
from torchperf_ros.workers.worker_pool import Log

_IMPLEMENTATION: Final = "torchperf_ros.fleet.rollouts"


class Versions(Protocol):
    """Looks after the versions of all stages; see `Rollouts`, which has it all."""

    def check(self, config: NodeConfig) -> None:
        """Raise `ConfigError` where a changed parameter cannot be followed."""

    def prepared(self, config: NodeConfig) -> NodeConfig:
        """The configuration with the versions that the stages begin with; raises `ConfigError`."""

    def begin(self, stages: Sequence[Stage], config: NodeConfig) -> None:
        """Look after these stages; before they start."""

    def reconfigure(self, config: NodeConfig) -> None:
        """Take changed parameters."""

    def values(self, stage: str) -> Mapping[str, str]:
        """What `/diagnostics` says of a stage's versions."""

    def end(self) -> None:
        """Look after none any more, before the stages stop."""


class VersionsOnDemand:
    """Loads what looks after versions when a parameter asks for one; until then every call costs nothing."""

    def __init__(
        self, values: Callable[[str], dict[str, Any]], log: Log, alert: Callable[[Alert], None], node: str
    ) -> None:
        """`values` gives a stage's own parameters, `node` is its fully qualified name."""
        self._arguments = values, log, alert, node
        self._loaded: Versions | None = None
        self._stages: Sequence[Stage] = ()
        self._has_begun = False

    def _of(self, config: NodeConfig) -> Versions | None:
        """What looks after versions, where this configuration asks for one or an earlier one has."""
        if self._loaded is None and any(stage.candidate or stage.rollout_plan for stage in config.stages):
            self._loaded = importlib.import_module(_IMPLEMENTATION).Rollouts(*self._arguments)
        return self._loaded

    def check(self, config: NodeConfig) -> None:
        """See `Versions`."""
        if (versions := self._of(config)) is not None:
            versions.check(config)

    def prepared(self, config: NodeConfig) -> NodeConfig:
        """See `Versions`."""
        if any(vars(config.rollout).values()):
            importlib.import_module(_IMPLEMENTATION)
        versions = self._of(config)
        return config if versions is None else versions.prepared(config)

    def begin(self, stages: Sequence[Stage], config: NodeConfig) -> None:
        """See `Versions`."""
        self._stages, self._has_begun = stages, self._loaded is not None
        if self._loaded is not None:
            self._loaded.begin(stages, config)

    def reconfigure(self, config: NodeConfig) -> None:
        """Take changed parameters; the first candidate of a node that drives already begins here."""
        versions = self._of(config)
        if versions is None:
            return
        if self._has_begun:
            versions.reconfigure(config)
        else:
            versions.prepared(config)
            self.begin(self._stages, config)

    def values(self, stage: str) -> Mapping[str, str]:
        """See `Versions`; empty where there never was another."""
        return {} if self._loaded is None else self._loaded.values(stage)

    def end(self) -> None:
        """See `Versions`."""
        self._stages, self._has_begun = (), False
        if self._loaded is not None:
            self._loaded.end()
