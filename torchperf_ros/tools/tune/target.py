"""What is tuned, from the command's arguments or a parameter file.

And the parameter file that comes out.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.settings.build_options import GRAPH_MODE
from torchperf_ros.settings.config import STAGE_DEFAULTS, NodeConfig, StageConfig
from torchperf_ros.settings.params_file import config_of, params_of_file
from torchperf_ros.tools.tune.trial import BUCKET, TuneCandidate

_HANG_MS = 1000.0


@dataclass(frozen=True)
class Target:
    """A stage to tune.

    Attributes:
        values: its node's parameters by dotted name, as the file or the command gives them.
        node: the same, checked.
        tiers: those of its tiers that are tuned, the first one fully.
        guessed: no tiers were named: they are those of the node's default, of which the adapter may
            build some.
    """

    values: Mapping[str, Any]
    node: NodeConfig
    stage: StageConfig
    tiers: tuple[str, ...]
    has_base: bool
    guessed: bool = False

    def job(self) -> dict[str, Any]:
        """What each process gets that loads the adapter."""
        return {"adapter": self.stage.adapter, "options": self.stage.options, "device": self.node.device}

    def having(self, tiers: Sequence[str]) -> "Target":
        """The same, once it is known which tiers the adapter builds."""
        values = {**self.values, f"{self.stage.name}.tiers": list(tiers)}
        return _target(values, self.stage.name, {}, has_base=False) if self.guessed else self

    def now(self, threads: int) -> TuneCandidate | None:
        """How the first tier is run at present, if a file has that.

        `threads` is the node's default number.
        """
        if not self.has_base:
            return None
        options, shapes = self.stage.build_options(self.stage.tiers.index(self.tiers[0])), self.stage.shapes
        return TuneCandidate(
            options, self.node.worker_threads or threads, shapes.policy, shapes.bucket_width
        )

    def with_tiers(self, tiers: Sequence[str]) -> "Target":
        """The same with some of its tiers, in the stage's order.

        None named: all. An unknown one is a `ConfigError`.
        """
        if unknown := [tier for tier in tiers if tier not in self.stage.tiers]:
            there = ", ".join(self.stage.tiers)
            raise ConfigError(f"--tiers {unknown[0]!r} is not there; {self.stage.name} has {there}")
        return replace(self, tiers=tuple(name for name in self.stage.tiers if not tiers or name in tiers))


def target_of_adapter(adapter: str, tiers: Sequence[str], own: Mapping[str, Any], device: str) -> Target:
    """A stage with this adapter, and its `own` parameters where they are not None.

    Its name is the one that the node knows this adapter by, else the class's; without tiers it has those
    of the node's default that the adapter builds.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    known = [name for name, values in STAGE_DEFAULTS.items() if values["adapter"] == adapter]
    name = known[0] if known else _name_of(adapter)
    output = STAGE_DEFAULTS.get(name, {}).get("output", f"{name}_output")
    values: dict[str, Any] = {"device": device, f"{name}.adapter": adapter, f"{name}.output": output}
    values |= {f"{name}.tiers": list(tiers)} if tiers else {}
    values |= {} if name in STAGE_DEFAULTS else {"stages": [name]}
    return replace(_target(values, name, own, has_base=False), guessed=not tiers)


def target_of_file(path: Path, name: str | None, own: Mapping[str, Any], device: str | None) -> Target:
    """A stage of a parameter file, by name or adapter, with some parameters changed, or a `ConfigError`."""
    values = params_of_file(path) | ({"device": device} if device else {})
    stages = config_of(values).whole_stages
    found = [one for one in stages if name in {None, one.name, one.adapter}]
    if len(found) != 1:
        asked = "name the stage or its adapter" if found or name is None else f"no {name} there"
        there = ", ".join(f"{one.name} ({one.adapter})" for one in stages)
        raise ConfigError(f"{asked}: {path} has {there}")
    if any(found[0].packages):
        raise ConfigError(
            f"parameter {found[0].name}.packages: {list(found[0].packages)} is not allowed here; what a"
            " package does is fixed, so leave it out of the file to tune what the adapter builds"
        )
    return _target(values, found[0].name, own, has_base=True)


def _target(values: dict[str, Any], name: str, own: Mapping[str, Any], *, has_base: bool) -> Target:
    values |= {f"{name}.{key}": value for key, value in own.items() if value is not None}
    if own.get("budget_ms"):  # a worker must not count as hung within its budget
        values[f"{name}.hang_ms"] = max(values.get(f"{name}.hang_ms", _HANG_MS), own["budget_ms"])
    node = config_of(values)
    stage = next(one for one in node.whole_stages if one.name == name)
    return Target(values, node, stage, stage.tiers, has_base)


def tuned_parameters(
    target: Target,
    found: TuneCandidate,
    precision: Mapping[str, str],
    default_threads: int,
    remarks: Iterable[str],
) -> str:
    """The node's parameter file with what was found; complete, so that the node takes it as it is.

    Only the `precision`, by tier, differs between tiers; those that were not looked at keep theirs.
    `default_threads` is the number that `worker_threads: 0` means here; `remarks` are lines of comment at
    the top.
    """
    stage, options = target.stage, found.options
    every = [precision.get(tier, now) for tier, now in zip(stage.tiers, stage.precision, strict=True)]
    own = {
        "adapter": stage.adapter,
        "output": stage.output,
        "budget_ms": stage.budget_ms,
        # what only a scene has stands there
        "tiers": [stage.tiers[tier] for tier in stage.scenes[0].tiers],
        "engine": options.engine,
        "compile_mode": GRAPH_MODE if options.cuda_graphs else options.mode,
        "precision": every[:1] if len(set(every)) == 1 else every,
        "channels_last": options.channels_last,
        "parts": options.parts,
        "shapes": f"{BUCKET} {found.bucket_width}" if found.shapes == BUCKET else found.shapes,
    }
    if stage.streams:  # each has a budget of its own
        del own["budget_ms"]
    threads = 0 if found.threads == default_threads else found.threads
    values = {
        "stages": [one.name for one in target.node.whole_stages],
        **target.values,
        "worker_threads": threads,
        **{f"{stage.name}.{name}": value for name, value in own.items()},
    }
    groups: dict[str, list[str]] = {"": []}
    for dotted, value in values.items():  # JSON is YAML, and its strings are never taken for anything else
        group, _, name = dotted.rpartition(".")
        groups.setdefault(group, []).append(f"{name}: {json.dumps(value, ensure_ascii=False)}")
    lines = [*(f"# {line}" for line in remarks), "/**/perf:", "  ros__parameters:"]
    lines += [f"    {line}" for line in groups.pop("")]
    for group, written in groups.items():
        lines += [f"    {group}:", *(f"      {line}" for line in written)]
    return "\n".join(lines) + "\n"


def _name_of(adapter: str) -> str:
    """`my_robot.lanes:LaneNetAdapter` is `lane_net`; a `ConfigError` where it is not of that form."""
    module, _, name = adapter.partition(":")
    if not module or not name:
        raise ConfigError(
            f"adapter {adapter!r} does not have the form module:Class, for example"
            " my_robot.segmenter:Segmenter"
        )
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removesuffix("Adapter") or name).lower()
    return re.sub(r"[^a-z0-9_]", "", words).lstrip("_0123456789") or "model"
