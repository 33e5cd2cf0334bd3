"""The node's parameters, one table for the node and one for each stage."""

from dataclasses import dataclass
from typing import Any

from torchperf_ros.config.build_options import AUTO, COMPILE_MODES, DYNAMIC, ENGINE_CHOICES, PRECISIONS
from torchperf_ros.frame.errors import ConfigError
from torchperf_ros.frame.outcome import Fallback


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
    Parameter("metrics_port", 9464, "Port of the Prometheus exporter; 0: off.", 0, 65535),
    Parameter(
        "metrics_address", "127.0.0.1", "Address that it listens on; 0.0.0.0: anyone who can reach it can read it."
    ),
    Parameter("realtime_priority", 10, "SCHED_FIFO priority of the node process; 0: leave the scheduler.", 0, 98),
    Parameter("lock_memory", False, "Lock the node process in memory (mlockall)."),
    Parameter("cpu_affinity", [-1], "CPUs of the node process; [-1]: any.", -1, 4095),
    Parameter("worker_threads", 0, "CPU threads of a model; 0: all cores but one, which is left to the node.", 0, 1024),
    Parameter("worker_kept_mib", 256, "Freed memory that a worker keeps for its next frame, in MiB.", 1, 2047),
    Parameter("compile_missing", True, "Compile in the background what is missing; false: such tiers stay eager."),
    Parameter("cache_dir", "", "Folder of compiled packages; empty: torchperf_ros in XDG_CACHE_HOME or ~/.cache."),
    Parameter("package_dirs", [""], "Folders, beside that one, from which swapped packages are taken; '': none."),
    Parameter("cache_mib", 4096, "Size in MiB from which the oldest packages are removed.", 64, 1 << 20),
    Parameter("memory_limit_mib", 0, "Memory of the models in MiB; 0: the device's, or this machine's.", 0, 1 << 24),
    Parameter(
        "memory_share", 0.7, "Share of that limit from which lower tiers run and nothing is compiled.", 0.05, 1.0
    ),
    Parameter("evidence_dir", "", "Folder of evidence; empty: torchperf_ros in XDG_STATE_HOME or ~/.local/state."),
    Parameter("evidence_mib", 1024, "Size in MiB from which the oldest evidence is removed.", 1, 1 << 20),
    Parameter("evidence_count", 50, "Number of incidents from which the oldest evidence is removed.", 1, 10_000),
    Parameter("recorder", True, "Record in a process beside: records, black box, watch over signals."),
    Parameter("record_dir", "", "Folder of the JSON records; empty: records in torchperf_ros in XDG_STATE_HOME."),
    Parameter("record_mib", 64, "Size in MiB of the JSON records, the oldest go first; 0: none.", 0, 1 << 20),
    Parameter("black_box_s", 10.0, "Seconds before an incident that the black box keeps.", 0.0, 600.0),
    Parameter("black_box_after_s", 5.0, "Seconds after an incident that it keeps.", 0.0, 600.0),
    Parameter("black_box_mib", 128, "MiB that it keeps at most before, and as much after.", 1, 1 << 16),
    Parameter("watch", True, "Have the recorder judge signals of node, inputs, outputs and machine."),
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
    Parameter(
        "engine",
        AUTO,
        "How tiers run; auto: the fastest of what is installed, eager until that is built.",
        choices=ENGINE_CHOICES,
    ),
    Parameter("compile_mode", "default", "Mode of torch.compile, for engine compile.", choices=COMPILE_MODES),
    Parameter("dynamic", "auto", "Whether compiled sizes may vary; auto: as the adapter declares.", choices=DYNAMIC),
    Parameter("precision", ["fp32"], "Arithmetic of each tier, or one for all.", choices=PRECISIONS),
    Parameter("channels_last", False, "Images in memory with channels last."),
    Parameter("fold_batch_norm", False, "Batch normalisation folded into the convolution before it."),
    Parameter("cuda_graphs", False, "Replay CUDA graphs; for sizes that do not vary."),
    Parameter("packages", [""], "A .pt2 file of each tier to run instead of what the adapter builds; '': none."),
    Parameter(
        "shapes",
        "dynamic",
        "Sizes: exact, bucket (rounded up and padded), dynamic.",
        choices=("exact", "bucket", "dynamic"),
    ),
    Parameter("bucket_width", 32, "Step of the buckets' sizes.", 1, 65_536),
    Parameter("common_shapes", [""], "Shapes to prepare for, as 1x3x256x448, of several inputs with spaces; '': none."),
    Parameter("max_batch", 0, "Larger batches are run in chunks of this size; 0: never.", 0, 65_536),
    Parameter(
        "backup",
        "standby",
        "Second worker: none, standby (takes over), active (runs the last tier on every frame, poisonous ones too).",
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
    Parameter("window_s", 10.0, "Span of the window that latency and jitter are told of, in s.", 1.0, 600.0, live=True),
)

STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "perception": {"adapter": "torchperf_ros.models.camera:CameraAdapter", "output": "detections"},
    "planning": {"adapter": "torchperf_ros.models.planner:PlannerAdapter", "output": "trajectory", "budget_ms": 30.0},
}
"""Defaults of the stages that the package brings; a user's own stage has to name its adapter and output."""


def stage_parameters(stage: str) -> tuple[Parameter, ...]:
    """The parameters of a stage with its own defaults."""
    own = STAGE_DEFAULTS.get(stage, {})
    return tuple(
        Parameter(**{**vars(parameter), "default": own.get(parameter.name, parameter.default)})
        for parameter in STAGE_PARAMETERS
    )
