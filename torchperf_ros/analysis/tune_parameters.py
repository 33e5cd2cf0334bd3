"""The parameter file that tuning writes: complete, so that the node takes it as it is."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torchperf_ros.analysis.parameter_snippet import yaml_value
from torchperf_ros.core.config import NodeConfig, StageConfig
from torchperf_ros.core.parameter_tables import NODE_PARAMETERS, stage_parameters
from torchperf_ros.core.shape_options import format_shapes
from torchperf_ros.core.tune_trial import Candidate

_ALWAYS = (
    "adapter", "output", "budget_ms", "tiers", "engine", "compile_mode", "dynamic", "precision", "channels_last",
    "fold_batch_norm", "cuda_graphs", "shapes", "bucket_width",
)  # fmt: skip
"""Of the tuned stage, written also where they are the default."""


def tuned_parameters(
    node: NodeConfig,
    stage: StageConfig,
    found: Candidate,
    precision: Mapping[str, str],
    default_threads: int,
    remarks: Iterable[str],
) -> str:
    """The node's parameters with those that were found.

    Args:
        node: as it was; whatever is not its default is in the file.
        stage: the one of the node that was tuned.
        found: for the whole stage; only the precision differs between tiers.
        precision: tier -> what was found for it; tiers that were not looked at keep theirs.
        default_threads: the number that `worker_threads: 0` means here.
        remarks: lines of comment at the top.
    """
    options = found.options
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
            lines.append(f"    {parameter.name}: {yaml_value(value)}")
    for one in node.stages:
        tuned = one.name == stage.name
        stage_values = {**_stage_values(one), **(own if tuned else {})}
        written = [
            f"      {p.name}: {yaml_value(stage_values[p.name])}"
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
