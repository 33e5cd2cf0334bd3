"""The node's parameters, checked, as frozen dataclasses."""

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.config.parameter_tables import NODE_PARAMETERS, stage_parameters
from torchperf_ros.config.shape_options import ShapeOptions
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import Fallback

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class StageConfig:
    """Parameters of one stage, checked; names and units as in `STAGE_PARAMETERS`."""

    name: str
    adapter: str
    options: dict[str, Any]
    output: str
    budget_ms: float
    budget_from: str
    tiers: tuple[str, ...]
    engine: str
    compile_mode: str
    dynamic: str
    precision: tuple[str, ...]
    channels_last: bool
    fold_batch_norm: bool
    cuda_graphs: bool
    packages: tuple[str, ...]
    shapes: ShapeOptions
    backup: str
    fallback: tuple[Fallback, ...]
    hold_last_ms: float
    stop_deceleration: float
    hang_ms: float
    max_frame_bytes: int
    input_reliability: str
    input_timeout_ms: float
    sustained_misses: int
    recover_frames: int
    window_s: float

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return 1 if self.backup == "none" else 2

    def build_options(self, tier: int) -> BuildOptions:
        """How the tier of this index is built."""
        return BuildOptions(
            self.engine, self.compile_mode, self.dynamic, self.precision[tier],
            self.channels_last, self.fold_batch_norm, self.cuda_graphs,
        )  # fmt: skip


@dataclass(frozen=True)
class NodeConfig:
    """Parameters of the node, checked; names and units as in `NODE_PARAMETERS`."""

    stages: tuple[StageConfig, ...]
    device: str
    autostart: bool
    metrics_port: int
    metrics_address: str
    realtime_priority: int
    lock_memory: bool
    cpu_affinity: tuple[int, ...]
    worker_threads: int
    worker_kept_mib: int
    compile_missing: bool
    cache_dir: str
    package_dirs: tuple[str, ...]
    cache_mib: int
    memory_limit_mib: int
    memory_share: float
    evidence_dir: str
    evidence_mib: int
    evidence_count: int
    recorder: bool
    record_dir: str
    record_mib: int
    black_box_s: float
    black_box_after_s: float
    black_box_mib: int
    watch: bool
    start_timeout_s: float


def stage_config(name: str, values: Mapping[str, Any]) -> StageConfig:
    """Check the values of one stage; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    if not _NAME.fullmatch(name):
        msg = f"parameter stages: {name!r} is not a stage name; lower-case letters, digits and _ after a letter"
        raise ConfigError(msg)
    prefix = f"{name}."
    checked = {p.name: p.check(values.get(p.name, p.default), prefix) for p in stage_parameters(name)}
    for required in ("adapter", "output"):
        if not checked[required]:
            hint = "module:Class" if required == "adapter" else "a topic"
            msg = f"parameter {prefix}{required}: is empty; it has to be {hint}"
            raise ConfigError(msg)
    tiers = checked["tiers"]
    if not tiers or not all(tiers) or len(set(tiers)) != len(tiers):
        msg = f"parameter {prefix}tiers: {tiers!r} is not allowed; it has to be at least one name, each once"
        raise ConfigError(msg)
    if checked["hang_ms"] < checked["budget_ms"]:
        msg = (
            f"parameter {prefix}hang_ms: {checked['hang_ms']} is below {prefix}budget_ms {checked['budget_ms']};"
            " it has to be at least the budget"
        )
        raise ConfigError(msg)
    for per_tier in ("precision", "packages"):
        checked[per_tier] = _one_per_tier(checked[per_tier], tiers, f"{prefix}{per_tier}")
    checked["shapes"] = ShapeOptions.parse(
        checked["shapes"], checked.pop("bucket_width"), checked.pop("common_shapes"), checked.pop("max_batch"), prefix
    )
    checked["options"] = _json_object(checked["options"], prefix)
    checked["tiers"] = tuple(tiers)
    checked["fallback"] = tuple(Fallback[word.upper()] for word in checked["fallback"])
    return StageConfig(name=name, **checked)


def _one_per_tier(values: list[str], tiers: list[str], name: str) -> tuple[str, ...]:
    """One value for each tier; a single one counts for all."""
    if len(values) not in {1, len(tiers)}:
        msg = f"parameter {name}: {values!r} has {len(values)} entries; it has to have 1, or {len(tiers)}, one per tier"
        raise ConfigError(msg)
    return tuple(values * len(tiers) if len(values) == 1 else values)


def _json_object(text: str, prefix: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"parameter {prefix}options: {text!r} is not JSON ({error}); it has to be an object such as {{}}"
        raise ConfigError(msg) from error
    if not isinstance(options, dict):
        msg = f"parameter {prefix}options: {text!r} is not a JSON object such as {{}}"
        raise ConfigError(msg)
    return options


def _ip_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        msg = (
            f"parameter metrics_address: {text!r} is not allowed; it has to be an IP address of this machine,"
            " such as 127.0.0.1, or 0.0.0.0 for all of them"
        )
        raise ConfigError(msg) from error


def node_config(values: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]) -> NodeConfig:
    """Check the node's own values and those of each stage; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    checked = {p.name: p.check(values.get(p.name, p.default)) for p in NODE_PARAMETERS}
    names = checked.pop("stages")
    if not names or len(set(names)) != len(names):
        msg = f"parameter stages: {names!r} is not allowed; it has to be at least one name, each once"
        raise ConfigError(msg)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", checked["device"]):
        msg = f"parameter device: {checked['device']!r} is not allowed; it has to be auto, cpu, cuda or cuda:N"
        raise ConfigError(msg)
    checked["metrics_address"] = _ip_address(checked["metrics_address"])
    checked["cpu_affinity"] = tuple(cpu for cpu in checked["cpu_affinity"] if cpu >= 0)
    checked["package_dirs"] = tuple(filter(None, checked["package_dirs"]))
    if relative := [name for name in checked["package_dirs"] if not name.startswith(("/", "~"))]:
        msg = f"parameter package_dirs: {relative[0]!r} is not allowed; it has to begin with / or ~"
        raise ConfigError(msg)
    configs = tuple(stage_config(name, stages.get(name, {})) for name in names)
    outputs = [config.output for config in configs]
    if len(set(outputs)) != len(outputs):
        msg = f"parameter output: the stages {', '.join(names)} share an output topic ({', '.join(outputs)})"
        raise ConfigError(msg)
    return NodeConfig(stages=configs, **checked)
