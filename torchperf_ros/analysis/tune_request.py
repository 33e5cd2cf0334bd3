"""What is to be tuned, out of the command's arguments and a parameter file, checked before anything is tried."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchperf_ros.core.build_options import ENGINES
from torchperf_ros.core.config import NodeConfig, StageConfig, node_config
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.parameter_tables import STAGE_DEFAULTS
from torchperf_ros.core.params_file import read_params_file
from torchperf_ros.core.tune_trial import Candidate


@dataclass(frozen=True)
class Target:
    """A stage to tune.

    Attributes:
        node: its node's parameters; the tuned ones replace some of these.
        stage: its own.
        tiers: those of its tiers that are tuned, the first one fully.
        has_base: whether `node` was read from a file.
    """

    node: NodeConfig
    stage: StageConfig
    tiers: tuple[str, ...]
    has_base: bool

    def now(self, threads: int) -> Candidate | None:
        """How the first tier is run at present, if a file says so; `threads` is the node's default number."""
        if not self.has_base:
            return None
        options, shapes = self.stage.build_options(self.stage.tiers.index(self.tiers[0])), self.stage.shapes
        return Candidate(options, self.node.worker_threads or threads, shapes.policy, shapes.bucket_width)


def target_of_adapter(
    adapter: str, stage: str | None, tiers: Sequence[str], values: Mapping[str, Any], device: str
) -> Target:
    """A stage with this adapter.

    Args:
        adapter: `module:Class`.
        stage: its name; None: the one that the node knows this adapter by, else the class's name.
        tiers: all tiers of the stage.
        values: further parameters of the stage: options, output, budget_ms; None: the default.
        device: auto, cpu, cuda or cuda:N.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    known = [name for name, own in STAGE_DEFAULTS.items() if own["adapter"] == adapter]
    name = stage or (known[0] if known else _name_of(adapter))
    output = STAGE_DEFAULTS.get(name, {}).get("output", f"{name}_output")
    own = {"adapter": adapter, "output": output, "tiers": list(tiers), **_given(values)}
    node: dict[str, Any] = {"device": device}
    if name not in STAGE_DEFAULTS:
        node["stages"] = [name]
    config = node_config(node, {name: _with_hang_ms(own)})
    found = next(one for one in config.stages if one.name == name)
    return Target(config, found, found.tiers, has_base=False)


def target_of_file(path: Path, stage: str | None, values: Mapping[str, Any], device: str | None) -> Target:
    """A stage of a node's parameter file.

    Raises:
        ConfigError: the file, the stage or a value cannot be used.
    """
    node = read_params_file(path)
    names = [one.name for one in node.stages]
    if stage is None and len(names) > 1:
        msg = f"--stage is needed: {path} has {', '.join(names)}"
        raise ConfigError(msg)
    if stage is not None and stage not in names:
        msg = f"--stage {stage!r} is not in {path}; it has {', '.join(names)}"
        raise ConfigError(msg)
    found = next(one for one in node.stages if stage in {None, one.name})
    if any(found.packages):
        msg = (
            f"parameter {found.name}.packages: {list(found.packages)} is not allowed here; what a package does is"
            " fixed, so leave it out of the file to tune what the adapter builds"
        )
        raise ConfigError(msg)
    given = _given(values)
    budget_ms = given.get("budget_ms", found.budget_ms)
    changed = replace(
        found, budget_ms=budget_ms, hang_ms=max(found.hang_ms, budget_ms), output=given.get("output", found.output)
    )
    stages = tuple(changed if one is found else one for one in node.stages)
    outputs = [one.output for one in stages]
    if outputs.count(changed.output) > 1:
        msg = f"--output-topic {changed.output!r} is another stage's in {path}; each needs its own"
        raise ConfigError(msg)
    return Target(replace(node, stages=stages, device=device or node.device), changed, found.tiers, has_base=True)


def only_tiers(target: Target, tiers: Sequence[str] | None) -> Target:
    """The same with some of its tiers, in the stage's order.

    Raises:
        ConfigError: there is no such tier.
    """
    for tier in tiers or ():
        if tier not in target.stage.tiers:
            msg = f"--tier {tier!r} is not there; {target.stage.name} has {', '.join(target.stage.tiers)}"
            raise ConfigError(msg)
    return replace(target, tiers=tuple(name for name in target.stage.tiers if not tiers or name in tiers))


def check_arguments(
    numbers: Mapping[str, float | None], files: Mapping[str, Path | None], engines: Sequence[str]
) -> None:
    """What the command line's own types do not check.

    Raises:
        ConfigError: a number is not finite, a file cannot be written, an engine is unknown.
    """
    for name, number in numbers.items():
        if number is not None and not (math.isfinite(number) and number > 0):
            msg = f"{name} {number:g} is not allowed; it has to be a number above 0"
            raise ConfigError(msg)
    for name, path in files.items():
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            msg = f"{name} {path} cannot be written; it has to be a file in an existing folder"
            raise ConfigError(msg)
    for engine in engines:
        if engine not in ENGINES:
            msg = f"--engine {engine!r} is not allowed; it has to be one of {', '.join(ENGINES)}"
            raise ConfigError(msg)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _with_hang_ms(values: dict[str, Any]) -> dict[str, Any]:
    """A worker must not count as hung within its budget."""
    budget_ms = values.get("budget_ms")
    return values if budget_ms is None else {**values, "hang_ms": max(1000.0, budget_ms)}


def _name_of(adapter: str) -> str:
    """`my_robot.lanes:LaneNetAdapter` is `lane_net`.

    Raises:
        ConfigError: not of that form.
    """
    module, _, name = adapter.partition(":")
    if not module or not name:
        msg = f"--adapter {adapter!r} does not have the form module:Class, for example my_robot.segmenter:Segmenter"
        raise ConfigError(msg)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Adapter") or name).lower()
    return re.sub(r"[^a-z0-9_]", "", words).lstrip("_0123456789") or "model"
