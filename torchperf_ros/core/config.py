"""The node's parameters: one table with type, default, range and description, and frozen dataclasses."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchperf_ros.core.errors import ConfigError
from torchperf_ros.core.outcome import Fallback

ENGINES = ("eager",)
_PLANNED_ENGINES = ("compile", "aoti")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Parameter:
    """One ROS parameter.

    Attributes:
        name: relative to the node, or to the stage.
        default: also gives the type: bool, int, float, str, list of str, list of int.
        description: for `ros2 param describe`, with the unit.
        minimum, maximum: closed range for numbers.
        choices: the words allowed, for str and list of str.
        live: may be changed while the node is configured.
    """

    name: str
    default: Any
    description: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    live: bool = False

    def check(self, value: Any, prefix: str = "") -> Any:  # noqa: ANN401 - the value of any parameter
        """Return the value, whole numbers as float where the parameter is one.

        Raises:
            ConfigError: wrong type, out of range, or not one of the choices.
        """
        name = f"{prefix}{self.name}"
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(self.default):
            msg = f"parameter {name}: {value!r} is a {type(value).__name__}; it has to be {self.allowed}"
            raise ConfigError(msg)
        one = self.default[0] if isinstance(self.default, list) else self.default
        for item in value if isinstance(value, list) else [value]:
            if type(item) is not type(one) or not self._allows(item):
                msg = f"parameter {name}: {value!r} is not allowed; it has to be {self.allowed}"
                raise ConfigError(msg)
        return value

    def _allows(self, item: Any) -> bool:  # noqa: ANN401
        if self.choices:
            return item in self.choices
        if isinstance(item, (int, float)) and not isinstance(item, bool):
            # written so that NaN, which compares false, is refused
            return (self.minimum is None or item >= self.minimum) and (self.maximum is None or item <= self.maximum)
        return True

    @property
    def allowed(self) -> str:
        """What is allowed, in words."""
        if self.choices:
            return ("a list of: " if isinstance(self.default, list) else "one of: ") + ", ".join(self.choices)
        one, a = (self.default[0], "a list of") if isinstance(self.default, list) else (self.default, "a")
        span = "" if self.minimum is None else f" from {self.minimum} to {self.maximum}"
        return f"{a} {type(one).__name__}{span}"


NODE_PARAMETERS = (
    Parameter("stages", ["perception", "planning"], "Stages in the order that a frame passes them."),
    Parameter("device", "auto", "Where models run: auto, cpu, cuda or cuda:N."),
    Parameter("autostart", True, "Configure and activate at start; false where a launch file does it."),
    Parameter("metrics_port", 9464, "Port of the Prometheus exporter on 127.0.0.1; 0: off.", 0, 65535),
    Parameter("realtime_priority", 10, "SCHED_FIFO priority of the node process; 0: leave the scheduler.", 0, 98),
    Parameter("lock_memory", False, "Lock the node process in memory (mlockall)."),
    Parameter("cpu_affinity", [-1], "CPUs of the node process; [-1]: any.", -1, 4095),
    Parameter("worker_threads", 0, "CPU threads of a model; 0: all cores but one, which is left to the node.", 0, 1024),
    Parameter("start_timeout_s", 120.0, "A worker that is not ready after this many seconds is replaced.", 1.0, 3600.0),
)

STAGE_PARAMETERS = (
    Parameter("adapter", "", "module:Class of the adapter, imported in the worker only."),
    Parameter("options", "{}", "JSON object handed to the adapter."),
    Parameter("output", "", "Topic of the stage's output."),
    Parameter("budget_ms", 50.0, "Time in ms in which a frame is answered.", 1.0, 60_000.0, live=True),
    Parameter(
        "budget_from",
        "receipt",
        "What the budget counts from: the frame's receipt or its stamp.",
        choices=("receipt", "stamp"),
    ),
    Parameter("tiers", ["full", "medium", "fast"], "Model variants, from most to least accurate."),
    Parameter("engine", "eager", "How tiers run.", choices=(*ENGINES, *_PLANNED_ENGINES)),
    Parameter(
        "backup",
        "standby",
        "Second worker: none, standby (takes over), active (runs the last tier on every frame).",
        choices=("none", "standby", "active"),
    ),
    Parameter(
        "fallback",
        ["backup", "hold_last", "stop"],
        "What to publish instead of a missing result, in this order.",
        choices=tuple(kind.word for kind in Fallback),
    ),
    Parameter(
        "hold_last_ms", 300.0, "How old in ms a held output may be, from its frame's receipt.", 0.0, 60_000.0, live=True
    ),
    Parameter("stop_deceleration", 3.0, "Braking of the fallback stop in m/s^2.", 0.1, 20.0, live=True),
    Parameter(
        "hang_ms", 1000.0, "A worker that runs a frame for longer, in ms, is killed.", 10.0, 600_000.0, live=True
    ),
    Parameter("max_frame_bytes", 8_388_608, "Largest input message in bytes; a larger one is refused.", 1024, 1 << 30),
    Parameter(
        "input_reliability", "best_effort", "QoS reliability of the inputs.", choices=("best_effort", "reliable")
    ),
    Parameter(
        "input_timeout_ms",
        1000.0,
        "Without input for this long, in ms, the stage is WAITING.",
        10.0,
        600_000.0,
        live=True,
    ),
    Parameter(
        "sustained_misses", 10, "Frames in a row without a fresh answer that are a failure.", 1, 100_000, live=True
    ),
    Parameter("recover_frames", 30, "Frames in a row on time that lead up by one health state.", 1, 100_000, live=True),
)

STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "perception": {"adapter": "torchperf_ros.models.camera:CameraAdapter", "output": "detections"},
    "planning": {"adapter": "torchperf_ros.models.planner:PlannerAdapter", "output": "trajectory", "budget_ms": 30.0},
}
"""Defaults of the stages that the package brings; a user's own stage has to name its adapter and output."""


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

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return 1 if self.backup == "none" else 2


@dataclass(frozen=True)
class NodeConfig:
    """Parameters of the node, checked; names and units as in `NODE_PARAMETERS`."""

    stages: tuple[StageConfig, ...]
    device: str
    autostart: bool
    metrics_port: int
    realtime_priority: int
    lock_memory: bool
    cpu_affinity: tuple[int, ...]
    worker_threads: int
    start_timeout_s: float


def stage_parameters(stage: str) -> tuple[Parameter, ...]:
    """The parameters of a stage with its own defaults."""
    own = STAGE_DEFAULTS.get(stage, {})
    return tuple(
        Parameter(**{**vars(parameter), "default": own.get(parameter.name, parameter.default)})
        for parameter in STAGE_PARAMETERS
    )


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
    if checked["engine"] in _PLANNED_ENGINES:
        msg = f"parameter {prefix}engine: {checked['engine']!r} does not exist yet; it has to be {', '.join(ENGINES)}"
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
    checked["options"] = _json_object(checked["options"], prefix)
    checked["tiers"] = tuple(tiers)
    checked["fallback"] = tuple(Fallback[word.upper()] for word in checked["fallback"])
    return StageConfig(name=name, **checked)


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
    checked["cpu_affinity"] = tuple(cpu for cpu in checked["cpu_affinity"] if cpu >= 0)
    configs = tuple(stage_config(name, stages.get(name, {})) for name in names)
    outputs = [config.output for config in configs]
    if len(set(outputs)) != len(outputs):
        msg = f"parameter output: the stages {', '.join(names)} share an output topic ({', '.join(outputs)})"
        raise ConfigError(msg)
    return NodeConfig(stages=configs, **checked)
