"""What is tuned, from the command's arguments or a parameter file; and the parameter file that comes out."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchperf_ros.config.config import (
    NODE_PARAMETERS,
    STAGE_DEFAULTS,
    NodeConfig,
    StageConfig,
    node_config,
    stage_parameters,
)
from torchperf_ros.config.params_file import read_params_file
from torchperf_ros.config.shape_options import format_shapes
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.optimize.tune.trial import Candidate

_HANG_MS = 1000.0
_ALWAYS = (
    "adapter", "output", "budget_ms", "tiers", "engine", "compile_mode", "dynamic", "precision", "channels_last",
    "fold_batch_norm", "cuda_graphs", "shapes", "bucket_width",
)  # fmt: skip
"""Of the tuned stage, written also where they are the default."""


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

    def job(self, tier: str) -> dict[str, Any]:
        """What each process gets that loads a tier."""
        stage = self.stage
        return {"adapter": stage.adapter, "options": stage.options, "device": self.node.device, "tier": tier}

    def now(self, threads: int) -> Candidate | None:
        """How the first tier is run at present, if a file says so; `threads` is the node's default number."""
        if not self.has_base:
            return None
        options, shapes = self.stage.build_options(self.stage.tiers.index(self.tiers[0])), self.stage.shapes
        return Candidate(options, self.node.worker_threads or threads, shapes.policy, shapes.bucket_width)

    def with_tiers(self, tiers: Sequence[str]) -> "Target":
        """The same with some of its tiers, in the stage's order; none named: all.

        Raises:
            ConfigError: there is no such tier.
        """
        for tier in tiers:
            if tier not in self.stage.tiers:
                msg = f"--tier {tier!r} is not there; {self.stage.name} has {', '.join(self.stage.tiers)}"
                raise ConfigError(msg)
        return replace(self, tiers=tuple(name for name in self.stage.tiers if not tiers or name in tiers))


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
    if "budget_ms" in own:
        own["hang_ms"] = max(_HANG_MS, own["budget_ms"])  # a worker must not count as hung within its budget
    node: dict[str, Any] = {"device": device}
    if name not in STAGE_DEFAULTS:
        node["stages"] = [name]
    config = node_config(node, {name: own})
    found = next(one for one in config.stages if one.name == name)
    return Target(config, found, found.tiers, has_base=False)


def target_of_file(path: Path, stage: str | None, values: Mapping[str, Any], device: str | None) -> Target:
    """A stage of a node's parameter file.

    Raises:
        ConfigError: the file, the stage or a value cannot be used.
    """
    node = read_params_file(path)
    found = [one for one in node.stages if stage in {None, one.name}]
    if len(found) != 1:
        asked = "--stage is needed" if stage is None else f"--stage {stage!r} is not there"
        msg = f"{asked}: {path} has {', '.join(one.name for one in node.stages)}"
        raise ConfigError(msg)
    own, given = found[0], _given(values)
    if any(own.packages):
        msg = (
            f"parameter {own.name}.packages: {list(own.packages)} is not allowed here; what a package does is"
            " fixed, so leave it out of the file to tune what the adapter builds"
        )
        raise ConfigError(msg)
    budget_ms = given.get("budget_ms", own.budget_ms)
    changed = replace(
        own, budget_ms=budget_ms, hang_ms=max(own.hang_ms, budget_ms), output=given.get("output", own.output)
    )
    stages = tuple(changed if one is own else one for one in node.stages)
    if [one.output for one in stages].count(changed.output) > 1:
        msg = f"--output-topic {changed.output!r} is another stage's in {path}; each needs its own"
        raise ConfigError(msg)
    return Target(replace(node, stages=stages, device=device or node.device), changed, own.tiers, has_base=True)


def tuned_parameters(
    target: Target, found: Candidate, precision: Mapping[str, str], default_threads: int, remarks: Iterable[str]
) -> str:
    """The node's parameter file with what was found; complete, so that the node takes it as it is.

    Args:
        target: the stage that was tuned; whatever is not the default of its node is in the file.
        found: for the whole stage; only the precision differs between tiers.
        precision: tier -> what was found for it; tiers that were not looked at keep theirs.
        default_threads: the number that `worker_threads: 0` means here.
        remarks: lines of comment at the top.
    """
    node, stage, options = target.node, target.stage, found.options
    own = {
        "engine": options.engine, "compile_mode": options.mode, "dynamic": options.dynamic,
        "precision": [precision.get(tier, now) for tier, now in zip(stage.tiers, stage.precision, strict=True)],
        "channels_last": options.channels_last, "fold_batch_norm": options.fold_batch_norm,
        "cuda_graphs": options.cuda_graphs, "shapes": found.shapes, "bucket_width": found.bucket_width,
    }  # fmt: skip
    threads = 0 if found.threads == default_threads else found.threads
    lines = [*(f"# {line}" for line in remarks), "/**/perf:", "  ros__parameters:"]
    values = {**_node_values(node), "worker_threads": threads}
    for parameter in NODE_PARAMETERS:
        value = values[parameter.name]
        if parameter.name in {"stages", "worker_threads"} or value != parameter.default:
            lines.append(f"    {parameter.name}: {_yaml(value)}")
    for one in node.stages:
        tuned = one.name == stage.name
        stage_values = {**_stage_values(one), **(own if tuned else {})}
        written = [
            f"      {p.name}: {_yaml(stage_values[p.name])}"
            for p in stage_parameters(one.name)
            if (tuned and p.name in _ALWAYS) or stage_values[p.name] != p.default
        ]
        lines += [f"    {one.name}:", *written] if written else []
    return "\n".join(lines) + "\n"


def _node_values(node: NodeConfig) -> dict[str, Any]:
    """As `node_config` takes them."""
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    values["stages"] = [stage.name for stage in node.stages]
    values["cpu_affinity"] = list(node.cpu_affinity) or [-1]
    values["package_dirs"] = list(node.package_dirs) or [""]
    return values


def _stage_values(stage: StageConfig) -> dict[str, Any]:
    """As `stage_config` takes them; what counts for all tiers alike as one entry."""
    values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    shapes = stage.shapes
    values |= {
        "options": json.dumps(stage.options), "tiers": list(stage.tiers), "shapes": shapes.policy,
        "bucket_width": shapes.bucket_width, "max_batch": shapes.max_batch,
        "common_shapes": [format_shapes(one) for one in shapes.common] or [""],
        "fallback": [kind.word for kind in stage.fallback],
    }  # fmt: skip
    for name in ("precision", "packages"):
        every = list(values[name])
        values[name] = every[:1] if len(set(every)) == 1 else every
    return values


def _yaml(value: object) -> str:
    """A parameter's value on one line: JSON is YAML, and its strings are never taken for anything else."""
    return json.dumps(value, ensure_ascii=False)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


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
