"""The node's parameters.

Each is declared once, as a field of the frozen dataclass that holds its checked value.
"""

import difflib
import ipaddress
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.outcome import Fallback
from torchperf_ros.settings.build_options import (
    AUTO,
    COMPILE_MODES,
    ENGINE_CHOICES,
    EXACT,
    GRAPH_MODE,
    INT8_STATIC,
    MOST_SHAPES,
    OF_PARTS,
    PRECISIONS,
    STATIC_ENGINE,
    BuildOptions,
    ShapeOptions,
    parse_policy,
    parse_shapes,
)
from torchperf_ros.settings.parameter import (
    Parameter,
    check_all,
    declared,
    nested,
    one_each,
    param,
    require,
)
from torchperf_ros.settings.safety_options import (
    VEHICLE_NAMES,
    EmergencyOptions,
    GuardOptions,
    VehicleOptions,
    emergency_options,
    guard_options,
    vehicle_options,
)
from torchperf_ros.settings.stage_options import (
    BACKUP_ACTIVE,
    MOST_BATCH,
    ODOMETRY,
    ActionRule,
    SceneOptions,
    SyncRule,
    check_streams,
    given_names,
    is_of_scene,
    is_of_stream,
    parse_actions,
    parse_scenes,
    parse_sync,
    parse_topics,
    scene_parameters,
    stream_values,
    topic_of_stream,
)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TOPIC = re.compile(r"(~?/)?[A-Za-z_{][\w{}]*(/[A-Za-z_{][\w{}]*)*", re.ASCII)  # {node}: the node's name
_ROS_PARAMETERS = ("use_sim_time", "start_type_description_service")

# The version that a stage's own parameters make; no candidate is called so.
BASE: Final = "base"
_ROLLOUT: Final = "rollout."


@dataclass(frozen=True)
class StageConfig:
    """Parameters of one stage, checked.

    The first value of each is its default in ROS, whose type is a plain one.
    """

    name: str
    adapter: str = param("", "module:Class of the adapter, imported in the worker only.")
    options: dict[str, Any] = param("", "JSON object handed to the adapter; empty: none.")
    output: str = param("", "Topic of the stage's output.")
    topics: tuple[tuple[str, str], ...] = param(
        [""], "Topics of inputs, lines INPUT:=TOPIC; '': as the adapter names them."
    )
    streams: tuple[str, ...] = param(
        [""], "Sensors that share the workers, each with topics NAME/TOPIC of its own; '': none."
    )
    batch: int = param(
        "auto",
        "Most frames of streams in one run; auto: as many as there are streams.",
        choices=("auto", *map(str, range(1, MOST_BATCH + 1))),
    )
    batch_wait_ms: float = param(
        0.0, "Time in ms that a frame may wait for those of other streams.", 0.0, 1000.0, live=True
    )
    budget_ms: float = param(50.0, "Time in ms in which a frame is answered.", 1.0, 60_000.0, live=True)
    budget_from: str = param(
        "receipt",
        "What the budget counts from: the frame's receipt or its stamp.",
        choices=("receipt", "stamp"),
    )
    tiers: tuple[str, ...] = param(
        ["full", "medium", "fast"], "Model variants, from most to least accurate."
    )
    engine: str = param(
        AUTO,
        "How tiers run; auto: the fastest of what is installed; until it is built, eager (on CUDA: graph).",
        choices=ENGINE_CHOICES,
    )
    compile_mode: str = param(
        "default",
        "Mode of torch.compile, for engine compile; reduce-overhead: any engine replays CUDA graphs.",
        choices=COMPILE_MODES,
    )
    precision: tuple[str, ...] = param(
        ["fp32"], "Arithmetic of each tier, or one for all.", choices=PRECISIONS
    )
    channels_last: bool = param(False, "Images in memory with channels last.")
    parts: str = param("", "Of engine compile what is compiled: '' (all), or PATH,PATH of modules.")
    packages: tuple[str, ...] = param(
        [""], "A .pt2 file of each tier, instead of what the adapter builds; '': none."
    )
    shapes: ShapeOptions = param(
        "dynamic",
        "Sizes: exact, dynamic, bucket (rounded up to multiples of 32, and padded) or bucket WIDTH.",
        then=(
            Parameter(
                "common_shapes",
                [""],
                "Shapes to prepare for, as 1x3x256x448, of several inputs with spaces; '': none.",
            ),
        ),
    )
    backup: str = param(
        "standby",
        "Second worker: none, standby (takes over), active (runs the last tier on every frame, poisonous"
        " ones too).",
        choices=("none", "standby", "active"),
    )
    fallback: tuple[Fallback, ...] = param(
        ["backup", "hold_last", "stop"],
        "What to publish instead of a missing result, in this order.",
        choices=tuple(kind.word for kind in Fallback),
    )
    hold_last_ms: float = param(
        300.0, "Largest age in ms of a held output, from receipt.", 0.0, 60_000.0, live=True
    )
    priority: int = param(0, "A lower stage begins nothing while a higher one has a frame due.", -10, 10)
    stop_deceleration: float = param(3.0, "Braking of the fallback stop in m/s^2.", 0.1, 20.0, live=True)
    hang_ms: float = param(
        1000.0, "A worker that runs a frame longer, in ms, is killed.", 10.0, 600_000.0, live=True
    )
    max_frame_bytes: int = param(
        8_388_608, "Largest input message in bytes; a larger one is refused.", 1024, 1 << 30
    )
    input_reliability: str = param(
        "best_effort", "QoS reliability of the inputs.", choices=("best_effort", "reliable")
    )
    input_timeout_ms: float = param(
        1000.0,
        "Without input for this long, in ms, the stage is WAITING, and a speed or a scene's name unknown.",
        10.0,
        600_000.0,
        live=True,
    )
    sync: tuple[SyncRule, ...] = param(
        [""],
        "Inputs that have to fit the trigger's stamp, lines INPUT slop MS offset MS wait MS; '': none.",
    )
    sustained_misses: int = param(
        10,
        "Frames without a fresh answer in a row: a failure; three times as many on time lead up again.",
        1,
        100_000,
        live=True,
    )
    scenes: tuple[SceneOptions, ...] = param(
        [""],
        "Scenes beside default, the first that holds is chosen; scene.NAME.tiers and so on say more; '':"
        " none.",
    )
    scenes_loaded: int = param(4, "So many scenes beside default and emergency are kept loaded.", 0, 64)
    scene_hold_s: float = param(
        1.0, "A scene is kept so long, in s, unless emergency follows.", 0.1, 60.0, live=True
    )
    actions: tuple[ActionRule, ...] = param(
        [""], "What follows from alerts, lines ALERT -> ACTION, see docs/watching.md; '': nothing."
    )
    action_return_s: float = param(
        30.0, "Time in s without the alert after which a step is taken back.", 0.1, 3600.0, live=True
    )
    budget_least_ms: float = param(
        0.0,
        "Shortest budget in ms, at speed or near a collision; 0: the budget does not follow them.",
        0.0,
        60_000.0,
    )
    budget_fast_speed: float = param(
        30.0, "Speed in m/s at which the budget is the shortest.", 1.0, 200.0, live=True
    )
    odometry: str = param(
        "odom",
        "Topic of nav_msgs/Odometry, for guard, scenes, budgets and emergency lane; its frame is the plans'.",
    )
    candidate: str = param(
        "",
        "YAML file of another version of the stage's model, which gets the same frames; '': none.",
        live=True,
    )
    candidate_serves: bool = param(
        False, "Whether that version serves, and the stage's own is beside it.", live=True
    )
    rollout_plan: str = param("", "File of a signed plan, which says when which version serves; '': none.")
    candidate_tolerance: float = param(
        0.1, "Outputs of two versions are the same where numbers are so near each other.", 0.0, 1e9
    )

    guard: GuardOptions | None = nested(GuardOptions)  # None: no check of it acts or is in shadow

    # Of one stream: the stage that it is of, and its own name; the configuration's is STAGE.STREAM.
    stage: str = ""
    stream: str = ""
    # Whether `batch` was asked for as a number: a model that takes fewer frames is refused.
    batch_strict: bool = False

    @property
    def whole_stage(self) -> "StageConfig":
        """That of the stage which this is a stream of."""
        if not self.stream:
            return self
        return replace(self, name=self.stage, stream="", output=self.output.removeprefix(f"{self.stream}/"))

    @property
    def stream_number(self) -> int | None:
        """Its place among the streams of its stage; None of a stage without streams."""
        return self.streams.index(self.stream) if self.stream else None

    def topic_of(self, name: str) -> str:
        """The topic of one of the adapter's inputs, before remapping."""
        return topic_of_stream(self.stream, dict(self.topics).get(name, name))

    @property
    def recover_frames(self) -> int:
        """Frames in a row on time that lead up by one health state."""
        return 3 * self.sustained_misses

    @property
    def workers(self) -> int:
        return 1 if self.backup == "none" else 2

    def scene_budget_ms(self, scene: int) -> float:
        return self.scenes[scene].budget_ms or self.budget_ms

    @property
    def situation_inputs(self) -> tuple[tuple[int, str, str], ...]:
        """What scenes and budgets depend on: index (see `ODOMETRY`), topic and message type."""
        topics = [
            (ODOMETRY - n, one.topic, "std_msgs/msg/String")
            for n, one in enumerate(self.scenes)
            if one.topic
        ]
        by_speed = self.budget_least_ms > 0.0 or any(one.by_speed for one in self.scenes)
        return (*([(ODOMETRY, self.odometry, "nav_msgs/msg/Odometry")] if by_speed else []), *topics)

    def build_options(self, tier: int) -> BuildOptions:
        # An engine that is made ahead of time has one size, or all; torch.compile one for each common shape.
        fixed = self.shapes.policy == EXACT and not (self.shapes.common and self.engine != OF_PARTS)
        return BuildOptions(
            self.engine,
            self.compile_mode,
            "never" if fixed else "auto",
            self.precision[tier],
            self.channels_last,
            self.compile_mode == GRAPH_MODE and self.engine != OF_PARTS,
            self.parts,
        )


@dataclass(frozen=True)
class RolloutOptions:
    """Parameters `rollout.NAME` of the node.

    The plan itself is a parameter of the stage, `STAGE.rollout_plan`.
    """

    vehicle: str = param("", "Id of the vehicle, which never changes; plans draw by it.")
    key: str = param("", "File of the public key of the plans' owner.")
    facts: tuple[str, ...] = param(
        [""], "More that plans ask about, NAME=VALUE, such as region=north; '': none.", live=True
    )

    @property
    def more(self) -> dict[str, str]:
        return dict(fact.split("=", 1) for fact in self.facts)


@dataclass(frozen=True)
class NodeConfig:
    """Parameters of the node, checked; declared as those of a stage are."""

    stages: tuple[StageConfig, ...] = param(
        ["perception", "planning"], "Stages in the order that a frame passes them."
    )
    device: str = param("auto", "Where models run: auto, cpu, cuda or cuda:N.")
    autostart: bool = param(True, "Configure and activate at start; false where a launch file does it.")
    metrics_port: int = param(9464, "Port of the Prometheus exporter; 0: off.", 0, 65535)
    metrics_address: str = param(
        "127.0.0.1", "Address that it listens on; 0.0.0.0: who can reach it can read it."
    )
    realtime_priority: int = param(
        10, "SCHED_FIFO priority of the node process; 0: leave the scheduler.", 0, 98
    )
    lock_memory: bool = param(False, "Lock the node process in memory (mlockall).")
    cpu_affinity: tuple[int, ...] = param([-1], "CPUs of the node process; [-1]: any.", -1, 4095)
    worker_threads: int = param(
        0, "CPU threads of a model; 0: all cores but one, which is left to the node.", 0, 1024
    )
    worker_kept_mib: int = param(
        256, "Freed memory that a worker keeps for its next frame, in MiB.", 1, 2047
    )
    compile_missing: bool = param(
        True, "Compile in the background what is missing; false: such tiers stay eager."
    )
    cache_dir: str = param(
        "", "Folder of compiled packages; empty: torchperf_ros in XDG_CACHE_HOME or ~/.cache."
    )
    package_dirs: tuple[str, ...] = param(
        [""], "Folders, beside that, from which swapped packages come; '': none."
    )
    cache_mib: int = param(1024, "Size in MiB from which the oldest packages are removed.", 64, 1 << 20)
    memory_limit_mib: int = param(
        0,
        "Memory of the models in MiB, from 70 % of which lower tiers run and nothing is compiled; 0: the"
        " device's, or this machine's.",
        0,
        1 << 24,
    )
    evidence_dir: str = param(
        "",
        "Folder of evidence, and of each node's records below records; empty: torchperf_ros in"
        " XDG_STATE_HOME or ~/.local/state.",
    )
    evidence_mib: int = param(256, "Size in MiB from which the oldest evidence is removed.", 1, 1 << 20)
    recorder: bool = param(True, "Record in a process beside: records, black box, watch over signals.")
    record_mib: int = param(
        64, "Size in MiB of the JSON records, the oldest go first; 0: none.", 0, 1 << 20
    )
    black_box_s: float = param(
        10.0, "Seconds before an incident that the black box keeps, and half as many after it.", 0.0, 600.0
    )
    black_box_mib: int = param(60, "MiB that it keeps at most before, and as much after.", 1, 1 << 16)
    watch: bool = param(True, "Have the recorder judge signals of node, inputs, outputs and machine.")
    start_timeout_s: float = param(
        120.0, "A worker that is not ready after so many seconds is replaced.", 1.0, 3600.0
    )
    vehicle: VehicleOptions = nested(VehicleOptions)
    emergency: EmergencyOptions = nested(EmergencyOptions)
    rollout: RolloutOptions = nested(RolloutOptions)

    @property
    def whole_stages(self) -> tuple[StageConfig, ...]:
        """The stages, each once: streams of one stage count as one, with the highest of their priorities."""
        found: dict[str, StageConfig] = {}
        for one in self.stages:
            whole = found.setdefault(one.stage or one.name, one.whole_stage)
            found[whole.name] = replace(whole, priority=max(whole.priority, one.priority))
        return tuple(found.values())


NODE_PARAMETERS = declared(NodeConfig)
STAGE_PARAMETERS = declared(StageConfig)

# Defaults of the stages that the package brings; a user's own stage has to name its adapter and
# output.
STAGE_DEFAULTS: dict[str, dict[str, Any]] = {
    "perception": {"adapter": "torchperf_ros.models.camera:CameraAdapter", "output": "detections"},
    "planning": {
        "adapter": "torchperf_ros.models.planner:PlannerAdapter",
        "output": "trajectory",
        "budget_ms": 30.0,
    },
}


def stage_parameters(stage: str, scenes: object = ()) -> tuple[Parameter, ...]:
    """The parameters of a stage with its own defaults, and those of its `scenes`, by their names."""
    own = STAGE_DEFAULTS.get(stage, {})
    plain = (replace(one, default=own.get(one.name, one.default)) for one in STAGE_PARAMETERS)
    return (*plain, *scene_parameters(scenes))


def of_stage(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """A stage's own values, by their names without the stage's."""
    return {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{stage}.")}


def stage_configs(
    stage: str,
    values: Mapping[str, Any],
    vehicle: VehicleOptions | None = None,
    stages: Sequence[str] = (),
) -> tuple[StageConfig, ...]:
    """Check the values of one of the `stages`: its configuration, or one for each of its streams.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    whole = stage_config(stage, values, vehicle)
    if not whole.streams:
        asked = int(values["batch"]) if whole.batch_strict else 1
        for option, value, least in (("batch", asked, 1), ("batch_wait_ms", whole.batch_wait_ms, 0)):
            why = "frames of different streams run together, and the stage has none; name them in streams"
            require(value <= least, f"{stage}.{option}: is {value}: {why}")
        return (whole,)
    check_streams(stage, whole.streams, stages, [one.name for one in STAGE_PARAMETERS])
    for name, is_given, why in (
        ("scenes", len(whole.scenes) > 1, "which tiers are loaded is one choice for all streams"),
        ("candidate", whole.candidate, "versions are compared for one stream"),
        ("rollout_plan", whole.rollout_plan, "versions are compared for one stream"),
    ):
        require(not is_given, f"{stage}.{name}: is not allowed for a stage with streams: {why}")
    active = whole.backup == "active" or any(rule.action == BACKUP_ACTIVE for rule in whole.actions)
    require(not active, f"{stage}.backup: active is not allowed for a stage with streams; standby is")
    found = []
    for stream in whole.streams:
        one = stage_config(stage, stream_values(stream, values), vehicle, stream)
        found.append(replace(one, output=topic_of_stream(stream, one.output)))
    return tuple(found)


def stage_config(
    stage: str, values: Mapping[str, Any], vehicle: VehicleOptions | None = None, stream: str = ""
) -> StageConfig:
    """Check the values of one stage, or of one stream of it.

    Missing ones take their default, and so does the `vehicle` of its guard.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    require(
        _NAME.fullmatch(stage),
        f"stages: {stage!r} is not a stage name: lower-case letters, digits, _ after a letter",
    )
    name = f"{stage}.{stream}" if stream else stage
    checked = check_all((one for one in stage_parameters(stage) if "." not in one.name), values, f"{name}.")
    require(checked["adapter"], f"{name}.adapter: is empty; it has to be module:Class")
    require(checked["output"], f"{name}.output: is empty; it has to be a topic")
    require(
        _TOPIC.fullmatch(checked["output"]),
        f"{name}.output: {checked['output']!r} is no topic: letters, digits and _, parts divided by /, each"
        " beginning with no digit",
    )
    tiers = checked["tiers"]
    once = tiers and all(tiers) and len(set(tiers)) == len(tiers)
    require(once, f"{name}.tiers: {tiers!r} is not allowed; it has to be at least one name, each once")
    require(
        checked["hang_ms"] >= checked["budget_ms"],
        f"{name}.hang_ms: {checked['hang_ms']} is below {name}.budget_ms {checked['budget_ms']};"
        " it has to be at least the budget",
    )
    packages = one_each(checked["packages"], tiers, f"{name}.packages")
    checked["scenes"], package_of = parse_scenes(name, checked["scenes"], values, tiers, packages)
    tiers, checked["packages"] = (
        list(package_of),
        tuple(package_of.values()),
    )  # what only a scene has comes at the end
    least_ms, hang_ms = checked["budget_least_ms"], checked["hang_ms"]
    least = f"{name}.budget_least_ms: {least_ms} is not allowed; it has to be 0, or from 1 to budget_ms"
    require(least_ms == 0.0 or 1.0 <= least_ms <= checked["budget_ms"], f"{least} {checked['budget_ms']}")
    for scene in checked["scenes"]:
        text = f"{name}.scene.{scene.name}.budget_ms: {scene.budget_ms} is above {name}.hang_ms {hang_ms}"
        require(scene.budget_ms <= hang_ms, text)
    budgets_ms = [scene.budget_ms or checked["budget_ms"] for scene in checked["scenes"]]
    checked["sync"] = parse_sync(name, checked["sync"], budgets_ms)
    names = [scene.name for scene in checked["scenes"]]
    checked["actions"] = parse_actions(name, checked["actions"], names, checked["backup"])
    checked["precision"] = one_each(checked["precision"], tiers, f"{name}.precision")
    able = checked["engine"] in {AUTO, STATIC_ENGINE} or INT8_STATIC not in checked["precision"]
    require(able, f"{name}.precision: {INT8_STATIC} runs by engine {STATIC_ENGINE} only, or {AUTO}")
    parts, engine = checked["parts"], checked["engine"]
    text = (
        f"{name}.parts: {parts!r} is not allowed with engine {engine}; it has to be paths of modules, for"
        " engine"
    )
    require(not parts or engine == OF_PARTS, f"{text} {OF_PARTS}")
    common = tuple(parse_shapes(text, f"{name}.") for text in checked.pop("common_shapes") if text.strip())
    require(
        len(common) <= MOST_SHAPES,
        f"{name}.common_shapes: {len(common)} shapes; at most {MOST_SHAPES} are ready",
    )
    checked["shapes"] = ShapeOptions(*parse_policy(checked["shapes"], f"{name}."), common)
    checked["options"] = _json_object(checked["options"], f"{name}.options")
    checked["topics"] = parse_topics(name, checked["topics"])
    checked["streams"] = tuple(given_names(checked["streams"]))
    batch = checked["batch"]
    checked["batch"] = min(len(checked["streams"]) or 1, MOST_BATCH if batch == AUTO else int(batch))
    checked["tiers"] = tuple(tiers)
    checked["fallback"] = tuple(Fallback[word.upper()] for word in checked["fallback"])
    guard = guard_options(values, name, vehicle)
    own = guard if guard.act or guard.shadow else None
    return StageConfig(
        name=name, **checked, guard=own, stage=stage, stream=stream, batch_strict=batch != AUTO
    )


def _json_object(text: str, name: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"parameter {name}: {text!r} is not JSON ({error}); it has to be an object such as {{}}"
        ) from error
    require(isinstance(options, dict), f"{name}: {text!r} is not a JSON object such as {{}}")
    return dict(options)


def _ip_address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        allowed = "an IP address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
        raise ConfigError(
            f"parameter metrics_address: {text!r} is not allowed; it has to be {allowed}"
        ) from error


_NEARLY = 0.8  # of difflib: one or two letters of a stage's name differ
_OF_TOPICS: Final = {"input", "inputs", "topic", "remap", "remappings", "subscribe"}
_OF_ADAPTER: Final = {"model", "class", "module", "plugin", "weights"}
_NEAR_MISS = 0.85  # the same of a parameter's; `device_id`, which is no misspelt `device`, is at 0.8


# Parameters of earlier versions, and what to write instead.
_GONE: Final = {
    "evidence_count": "the 50 newest incidents are kept, within evidence_mib; remove it",
    "black_box_after_s": "the black box keeps half of black_box_s after an incident; remove it",
    "memory_share": "lower tiers run from 70 % of memory_limit_mib; set that one",
    "record_dir": "records lie in records below evidence_dir; set that one",
    "rollout.folder": "nodes remember in rollout below XDG_STATE_HOME/torchperf_ros; set that variable",
    "emergency.odometry": "the lane takes the last stage's odometry; set STAGE.odometry",
    "emergency.lowest_m": "heights_m has both; write emergency.heights_m: [LOWEST, HIGHEST]",
    "emergency.highest_m": "heights_m has both; write emergency.heights_m: [LOWEST, HIGHEST]",
    "emergency.types": "a sensor is one line; write emergency.sensors: ['TOPIC TYPE']",
    "emergency.mounting": "a sensor is one line; write emergency.sensors: ['TOPIC TYPE x M y M z M yaw RAD']",
    "emergency.timeouts_ms": "a sensor is one line; write emergency.sensors: ['TOPIC TYPE timeout MS']",
}
_GONE_OF_STAGE: Final = {
    "worker": "each worker is a process of its own; remove it",
    "dynamic": "shapes says which sizes vary; write shapes: exact where none does",
    "bucket_width": "shapes says it; write shapes: bucket WIDTH",
    "cuda_graphs": "compile_mode says it for every engine; write compile_mode: reduce-overhead",
    "recover_frames": "it is three times sustained_misses; set that one",
    "window_s": "latency and jitter are of the last 10 s; remove it",
    "action_cooldown_s": "an alert that goes on leads one step further after 2 s; remove it",
    "budget_near_s": "the budget shrinks below 4 s to a collision; remove it",
    "situation_timeout_ms": "a situation is unknown after input_timeout_ms; set that one",
}


def refuse_unknown(values: Mapping[str, Any], stages: Sequence[str]) -> dict[str, str]:
    """See that there is a parameter of every name; a stage that does not run may have some, too.

    `values` are the given ones by name, of which only those of STAGE.scenes are read. A launch file hands
    its global parameters to every node: names that are unlike all of this node's are returned, each with
    the closest one.

    Raises:
        ConfigError: a name is nearly one of this node's, or begins as those of a group or a stage that
            runs, or a stage that runs has none and one of nearly its name has some, so that a misspelt one
            would leave a default in force without a word.
    """
    own, of_stage = (
        [parameter.name for parameter in known] for known in (NODE_PARAMETERS, STAGE_PARAMETERS)
    )
    groups, stage_groups = (
        {name.partition(".")[0] for name in known if "." in name} for known in (own, of_stage)
    )
    foreign = {}
    for name in values:
        stage, dot, rest = name.partition(".")
        group, _, word = name.rpartition(".")
        moved = word in VEHICLE_NAMES and group.rpartition(".")[2] in {"guard", "emergency"}
        require(
            not moved, f"{name}: is vehicle.{word} now, which guard and emergency lane share; set that one"
        )
        gone = _GONE_OF_STAGE.get(rest.rpartition(".")[2]) if stage in stages else _GONE.get(name)
        require(not gone, f"{name}: is gone, as {gone}")
        if is_of_scene(stage, rest, values.get(f"{stage}.scenes")):
            continue
        if is_of_stream(stage, rest, values.get(f"{stage}.streams")):
            continue
        if stage in groups:
            word, known = name, {one: one for one in own if one.startswith(f"{stage}.")}
        elif dot and stage not in stage_groups:
            word, known = rest, {one: f"{stage}.{one}" for one in of_stage}
        else:
            prefix = next(iter(stages), "STAGE")
            word, known = (
                name,
                {**{one: f"{prefix}.{one}" for one in of_stage}, **{one: one for one in own}},
            )
        if known.get(word) == name or name in _ROS_PARAMETERS or stage == "qos_overrides":
            continue
        named = [known[one] for one in difflib.get_close_matches(word, known, cutoff=0.0)]
        is_own = stage in {*groups, *stage_groups, *stages}
        if is_own or difflib.get_close_matches(word, [*known, *_ROS_PARAMETERS], 1, _NEAR_MISS):
            right = _what_is_right(rest if dot else name, own) if is_own else ""
            raise ConfigError(
                f"parameter {name}: is unknown; {right or 'the closest names are ' + ', '.join(named)}"
            )
        foreign[name] = named[0]
    given = {name.partition(".")[0]: name for name in values if "." in name}
    if idle := given.keys() - {*stages, "qos_overrides", *groups}:
        for stage in [stage for stage in stages if stage not in given and _NAME.fullmatch(stage)]:
            if close := difflib.get_close_matches(stage, sorted(idle), 1, _NEARLY):
                why = f"stage {close[0]} is none of the stages that run, {', '.join(stages)}"
                raise ConfigError(
                    f"parameter {given[close[0]]}: {why}, and {stage} has no parameters; name it {stage}"
                )
    return foreign


def _what_is_right(word: str, of_node: Collection[str]) -> str:
    """What the user of this name below a stage wants, "" where that is open."""
    first = word.partition(".")[0]
    if first == "options":
        return "options is one text of JSON, for example options: '{\"threshold\": 0.5}'"
    if first in _OF_TOPICS:
        return (
            "the adapter names the inputs; `topics` says which topics they are: topics:"
            " ['image:=/camera/image_raw']"
        )
    if first in _OF_ADAPTER:
        return "a stage's model is its adapter, for example adapter: my_robot.depth:Depth"
    return f"{word} is one of the node's: it has to stand beside `stages`" if word in of_node else ""


def describe_foreign(closest: Mapping[str, str]) -> str:
    """The warning about names that are none of this node's, see `refuse_unknown`; empty: there are none."""
    names = ", ".join(f"{name} (the closest is {close})" for name, close in closest.items())
    return f"parameters that this node does not have change nothing: {names}" if names else ""


def rollout_options(values: Mapping[str, Any]) -> RolloutOptions:
    """Check the values `rollout.NAME` together; missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    found = check_all(declared(RolloutOptions), values, "", _ROLLOUT)
    facts = tuple(filter(None, found["facts"]))
    for fact in facts:
        name, equals, _ = fact.partition("=")
        require(name and equals, f"{_ROLLOUT}facts: {fact!r} is not allowed; it has to be NAME=VALUE")
    return RolloutOptions(**{**found, "facts": facts})


def node_config(values: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]) -> NodeConfig:
    """Check the node's own values, among `values`, and those of each of the `stages`.

    Missing ones take their default.

    Raises:
        ConfigError: names the parameter, the value, and what is allowed.
    """
    checked = check_all((one for one in NODE_PARAMETERS if "." not in one.name), values, "")
    vehicle = checked["vehicle"] = vehicle_options(values)
    emergency, checked["rollout"] = emergency_options(values, vehicle), rollout_options(values)
    names, device = checked.pop("stages"), checked["device"]
    once = names and len(set(names)) == len(names)
    require(once, f"stages: {names!r} is not allowed; it has to be at least one name, each once")
    known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", device)
    require(known, f"device: {device!r} is not allowed; it has to be auto, cpu, cuda or cuda:N")
    checked["metrics_address"] = _ip_address(checked["metrics_address"])
    checked["cpu_affinity"] = tuple(cpu for cpu in checked["cpu_affinity"] if cpu >= 0)
    checked["package_dirs"] = tuple(filter(None, checked["package_dirs"]))
    for folder in checked["package_dirs"]:
        require(
            folder.startswith(("/", "~")),
            f"package_dirs: {folder!r} is not allowed; it has to begin with / or ~",
        )
    for name in names:
        reserved = any(known.name.startswith(f"{name}.") for known in NODE_PARAMETERS)
        require(not reserved, f"stages: {name!r} is not allowed; parameters of the node's own begin so")
    configs = tuple(
        config for name in names for config in stage_configs(name, stages.get(name, {}), vehicle, names)
    )
    outputs = [config.output for config in configs]
    text = f"output: {', '.join(one.name for one in configs)} share an output topic ({', '.join(outputs)})"
    require(len(set(outputs)) == len(outputs), text)
    last = configs[-1]
    text = f"emergency.sensors: the last stage, {names[-1]}, has streams; the emergency lane watches one output"
    require(not (emergency.sensors and last.stream), text)
    text = f"{last.name}.odometry: is empty; it has to be a topic, which the emergency lane takes"
    require(last.odometry or not emergency.sensors, text)
    checked["emergency"] = replace(emergency, odometry=last.odometry)
    for config in configs:
        text = (
            f"{config.name}.rollout_plan and {config.name}.candidate are both set; a stage has one of them"
        )
        require(not (config.rollout_plan and config.candidate), text)
        text = (
            f"{config.name}.rollout_plan needs rollout.vehicle, the vehicle's id, and rollout.key, a"
            " public key"
        )
        require(not config.rollout_plan or (checked["rollout"].vehicle and checked["rollout"].key), text)
    return NodeConfig(stages=configs, **checked)
