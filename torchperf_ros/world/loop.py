"""The closed loop: a scenario, and an arm that turns what its sensors send into plans for its vehicle.

Time is virtual. Sensors send 20 times a second; a plan moves the vehicle from the moment at which its arm
publishes it.
"""

import abc
import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.messages import decode
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.models.closed_loop import (
    AHEAD_S,
    FRAME,
    PATH,
    RANGES_M,
    Blindness,
    Centreline,
    objects_of,
    path_bytes,
    plan_along,
    pose_of,
    route_bytes,
)
from torchperf_ros.models.road_scene import CAMERA_HEIGHT_M, HORIZON, HORIZONTAL_FOV_DEG
from torchperf_ros.replay.log_feed import absolute
from torchperf_ros.replay.replay_options import ReplayError, paced
from torchperf_ros.replay.replay_record import OutputLog, ReplayRecord
from torchperf_ros.replay.replay_stages import ReplayStages
from torchperf_ros.replay.step_times import read_step_times
from torchperf_ros.replay.virtual_stage import KeptPools, VirtualPace
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.safety.guard import Guard
from torchperf_ros.settings.params_file import config_of
from torchperf_ros.settings.safety_options import EmergencyOptions
from torchperf_ros.stage.frame import Answer
from torchperf_ros.world.latencies import RESTART_MS, STAGES, TIERS, DrawnRuns
from torchperf_ros.world.scenarios import MOST_SEED, Scenario
from torchperf_ros.world.sensors import Sensors
from torchperf_ros.world.world import Score, World, score_of

# Between two scans.
PERIOD_NS: Final = 50 * NS_PER_MS
# What can drive.
ARMS: Final = {
    "zero": "the same planner without any latency or fault: what is possible at best",
    "watched": (
        "as zero, but the guard checks every plan and the emergency lane watches: what they do to good"
        " plans"
    ),
    "naive": (
        "one node that runs the best models with a time-out, and keeps its last plan (`rig/naive_node.py`)"
    ),
    "blocking": "the same without the time-out, on one thread: each frame takes as long as it takes",
    "no_fallback": "these stages; where a result is missing nothing is published",
    "no_guard": "these stages with standby, hold_last and stop",
    "no_lane": "as no_guard, and the guard checks every plan",
    "full": "as no_lane, and the emergency lane watches the scan",
    "radar": "as no_lane, and the guard has a radar's echoes beside what perception finds",
    "camera": (
        "as no_lane, but perception is the trained detector on a camera's images, in place of the truth"
    ),
}
BUDGETS_MS: Final = {"perception": 50.0, "planning": 30.0}
# From the naive node's death until it takes frames again, on a processor of its own.
#
# See docs/closed_loop.md.
NAIVE_RESTART_MS: Final = 2600.0
_ZERO, _WATCHED, _RADAR, _CAMERA = "zero", "watched", "radar", "camera"
FAULTLESS: Final = {_ZERO, _WATCHED}
_GUARDED: Final = {"no_lane", "full", _WATCHED, _RADAR, _CAMERA}
_HAVE_LANE: Final = {"full", _WATCHED}
# the lane knows how everybody moves when a drive begins, as any lane does
_WATCHED_BEFORE_NS: Final = NS_PER_S
_AGE_NS: Final = 30 * NS_PER_MS  # of a watched plan's frame when it is published, as with the stages in use
_NAIVE_THREADS: Final = 4

# Worker processes by the parameters of their stages, for one drive after the other.
#
# The caller ends them.
Workers = dict[str, KeptPools]
Messages = tuple[tuple[str, str, bytes], ...]
Watch = Callable[[World], None]


class LaneOnClock:
    """The emergency lane on a virtual clock: what `node/emergency_process.py` does, without ROS.

    The caller's clock is monotonic time.

    Attributes:
        rules: take what the sensors send.
    """

    def __init__(self, options: EmergencyOptions) -> None:
        self.rules = Emergency(options)
        self._every_ns = round(NS_PER_S / options.rate_hz)
        self._publish_at_ns = 0

    def due(self, now_ns: int, ros_now_ns: int, *, at_once: bool = False) -> bytes | None:
        """Look for silence.

        The stop path where it is time to publish it: at once when latched, then at `rate_hz`; also `at_once`
        where the process ends, which is its last word.
        """
        rules = self.rules
        rules.look_for_silence(now_ns)
        if rules.latch is None or not rules.active:
            self._publish_at_ns = 0
            return None
        if now_ns < self._publish_at_ns and not at_once:
            return None
        self._publish_at_ns = now_ns + self._every_ns
        return rules.stop_path(now_ns, ros_now_ns)


@dataclass(frozen=True)
class Drive:
    """One scenario, driven by one arm.

    Attributes:
        arm: one of `ARMS`.
        load, faults: see `DrawnRuns`; of no effect on `zero`.
        output: MCAP to write, None for none.
        camera, lidar: whether images and clouds go into it.
        times: what the stages' runs take, see `replay --times`; None: as the reference networks.
        restart_ms: from a worker's death until its replacement is ready, or the naive node is back; None:
            as in `times`, else `RESTART_MS`; of the naive node `NAIVE_RESTART_MS`.
    """

    scenario: Scenario
    arm: str
    load: int = 1
    faults: str = "none"
    output: Path | None = None
    camera: bool = False
    lidar: bool = False
    times: Path | None = None
    restart_ms: float | None = None

    def luck(self) -> DrawnRuns:
        """What is drawn for it; raises `ConfigError` where seed, load, faults or times cannot be used."""
        seed, restart_ms = self.scenario.seed, RESTART_MS if self.restart_ms is None else self.restart_ms
        if not 0 <= seed <= MOST_SEED:
            raise ConfigError(f"seed {seed} is not allowed; it has to be 0 to {MOST_SEED}")
        luck = DrawnRuns(seed, self.load, self.faults, None, restart_ms)
        if self.times is None:
            return luck
        if self.load != 1:
            raise ConfigError(
                f"load {self.load}: times {self.times} say what runs take; leave the load at 1"
            )
        config = config_of(parameters_of(replace(self, times=None)))
        found = read_step_times(str(self.times), self.times, config, seed, lambda _: None)
        tiers = {stage: each.tiers for stage, each in zip(STAGES, found, strict=True)}
        return replace(
            luck, tiers=tiers, restart_ms=found[0].restart_ms if self.restart_ms is None else restart_ms
        )


@dataclass(frozen=True)
class Driven:
    """What came of a drive.

    Attributes:
        score: figures, see `Score`.
        world: as it was left, with its trace.
        injected: stamp in ns and kind of each fault.
        counts: of plans: published, checked with which verdict, refused by the vehicle.
        latch: why the emergency lane latched, and when; "" if it did not.
    """

    score: Score
    world: World
    injected: list[tuple[int, str]]
    counts: dict[str, int] = field(default_factory=dict)
    latch: str = ""

    def row(self) -> dict[str, Any]:
        return {
            **asdict(self.score),
            "faults": len(self.injected),
            "counts": self.counts,
            "latch": self.latch,
        }


class _Arm(ExitStack, abc.ABC):
    """Turns messages into plans; a context that ends what it starts."""

    def __init__(self, drive: Drive, world: World, log: OutputLog | None, workers: Workers) -> None:
        super().__init__()
        self.drive, self.world, self._log = drive, world, log
        self.luck = drive.luck()
        self.counts: dict[str, int] = {}
        self.lane = drive.scenario.lane  # that the route keeps to by now
        self.emergency: LaneOnClock | None = None
        if drive.arm in _HAVE_LANE:
            self.emergency = LaneOnClock(config_of(parameters_of(drive)).emergency)
            self.emergency.rules.activate(world.start_ns - _WATCHED_BEFORE_NS)
        self._blind = Blindness(self.luck.blind or self.luck.unseen)

    @abc.abstractmethod
    def until(self, t_ns: int) -> None:
        """Let happen what is due before this time; the world is moved on by `move`."""

    @abc.abstractmethod
    def sense(self, messages: Messages, stamp_ns: int) -> None:
        """Take what the sensors send at this time."""

    def start(self) -> None:
        """Before the first route and the first scan."""

    def route(self, lane: Centreline, stamp_ns: int) -> None:
        self.lane = lane
        self.learn(route_bytes(lane, self.drive.scenario.speed, stamp_ns), stamp_ns)

    def learn(self, route: bytes, stamp_ns: int) -> None:
        self.write("route", PATH, route, stamp_ns)

    def watch(self, messages: Messages, stamp_ns: int) -> None:
        """Have the emergency lane judge what the sensors send.

        While it is latched the vehicle follows its path.
        """
        if self.emergency is None:
            return
        rules = self.emergency.rules
        for topic, _, data in messages:
            if topic == rules.options.odometry:
                rules.moved(data, stamp_ns)
            elif topic in rules.options.sensors:
                rules.saw(rules.options.sensors.index(topic), data, stamp_ns)
        stop = self.emergency.due(stamp_ns, stamp_ns)
        if stop is not None:
            self.write("emergency_stop", PATH, stop, stamp_ns)
            self.world.take(stop)

    @property
    def latch(self) -> str:
        found = None if self.emergency is None else self.emergency.rules.latch
        return (
            ""
            if found is None
            else f"{(found.at_ns - self.world.start_ns) / NS_PER_S:.2f} s: {found.reason}"
        )

    def move(self, plan: bytes, at_ns: int) -> None:
        """Publish a plan at this time: the vehicle follows it from then on, unless the lane is latched."""
        self.world.advance(at_ns)
        if self.world.over:
            return
        if self.latch:
            self.count("withheld")
            return
        self.count("plans")
        self.world.take(plan)

    def injected(self, until_ns: int) -> list[tuple[int, str]]:
        """Stamp in ns and kind of each fault until a time.

        Of one that lasts for a second, where that begins.
        """
        starts_ns = (
            range(self.world.start_ns, until_ns, NS_PER_S) if self.drive.arm not in FAULTLESS else ()
        )
        kind = "unseen" if self.luck.unseen else "blind"
        return sorted(
            [*self.luck.injected, *((at_ns, kind) for at_ns in starts_ns if self._blind.at(at_ns))]
        )

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def write(self, topic: str, type_name: str, data: bytes, t_ns: int) -> None:
        if self._log is not None:
            self._log.write(absolute(topic), type_name, data, t_ns)

    def plan(self, messages: Messages, stamp_ns: int, tier: int = 0) -> bytes:
        content = {
            topic: decode(data, kind)
            for topic, kind, data in messages
            if topic in {"odom", "objects_in_sight"}
        }
        ego, objects = pose_of(content["odom"]), objects_of(content["objects_in_sight"])
        name = TIERS[tier]
        near = ((objects[:, :2] - ego[:2]) ** 2).sum(axis=1) <= RANGES_M[name] ** 2
        objects = objects[near][
            : 0 if self._blind.at(stamp_ns) and self.drive.arm not in FAULTLESS else None
        ]
        plan = plan_along(self.lane, ego, objects, self.drive.scenario.speed, AHEAD_S[name])
        return path_bytes(plan, FRAME, stamp_ns, stamp_ns)


class _Zero(_Arm):
    def until(self, t_ns: int) -> None:
        pass

    def sense(self, messages: Messages, stamp_ns: int) -> None:
        plan = self.plan(messages, stamp_ns)
        self.write("trajectory", PATH, plan, stamp_ns)
        self.move(plan, stamp_ns)


class _Watched(_Arm):
    """The rules without latency, or what it comes to with the stages.

    The plan is out `_AGE_NS` after its frame.
    """

    def __init__(self, drive: Drive, world: World, log: OutputLog | None, workers: Workers) -> None:
        super().__init__(drive, world, log, workers)
        options = config_of(parameters_of(drive)).stages[-1].guard
        assert options is not None
        self._guard = Guard(replace(options, obstacles=("objects_in_sight",)))
        self._coming: tuple[int, bytes] | None = None

    def until(self, t_ns: int) -> None:
        if self._coming is None:
            return
        at_ns, plan = self._coming
        self._coming = None
        if self.latch:
            self.count("withheld")
            return
        checked = self._guard.check(plan, at_ns, at_ns, _AGE_NS / NS_PER_MS)
        self.count(f"guard {checked.verdict.word}")
        if checked.check:
            self.count(f"{checked.check} fails")
        if checked.payload is not None:
            self.write("trajectory", PATH, checked.payload, at_ns)
            self.move(checked.payload, at_ns)

    def sense(self, messages: Messages, stamp_ns: int) -> None:
        sent = {topic: data for topic, _, data in messages}
        self._guard.moved(sent["odom"], stamp_ns)
        self._guard.saw(0, sent["objects_in_sight"], stamp_ns)
        self._coming = stamp_ns + _AGE_NS, self.plan(messages, stamp_ns)


class _Naive(_Arm):
    """A node with both models in one callback, a queue of one, and a last plan.

    See `benchmarks/rig/naive_node.py`.

    The best tiers run, one after the other, and the callback waits for the result: `naive` no longer than
    the sum of the budgets, when it publishes its last plan again, and the result that still comes is lost;
    `blocking` until it is there. Exceptions are caught. NaN is published. Where a run hangs, one of four
    threads is gone for ever (of one, in `blocking`); where it kills the process, the node is back
    `restart_ms` later.
    """

    def __init__(self, drive: Drive, world: World, log: OutputLog | None, workers: Workers) -> None:
        super().__init__(drive, world, log, workers)
        patient = drive.arm == "blocking"
        self._times = {stage: self.luck.times(stage) for stage in STAGES}
        self._threads = 1 if patient else _NAIVE_THREADS
        self._wait_ns = None if patient else round((sum(BUDGETS_MS.values()) - 1.0) * NS_PER_MS)
        self._free_ns, self._waiting = 0, list[tuple[Messages, int]]()
        self._coming: tuple[int, bytes] | None = None

    def until(self, t_ns: int) -> None:
        while True:
            if self._coming is not None and self._coming[0] <= t_ns:
                at_ns, plan = self._coming
                self._coming = None
                self.write("trajectory", PATH, plan, at_ns)
                self.move(plan, at_ns)
            if self._coming is not None or not self._waiting or self._free_ns > t_ns:
                return
            messages, stamp_ns = self._waiting.pop()
            self._run(messages, stamp_ns, max(self._free_ns, stamp_ns))

    def sense(self, messages: Messages, stamp_ns: int) -> None:
        self._waiting = [(messages, stamp_ns)]
        self.until(stamp_ns)

    def _run(self, messages: Messages, stamp_ns: int, now_ns: int) -> None:
        if not self._threads:
            self._free_ns = now_ns + (self._wait_ns or 1 << 62)
            return
        took_ms, ending = 0.0, Outcome.ON_TIME
        for stage in STAGES:
            run = self._times[stage].run(stamp_ns, 0, 0, 0)
            took_ms, ending = took_ms + run.steps.total_ms + run.overhead_ms, run.ending
            if ending is not Outcome.ON_TIME:
                break
        done_ns = now_ns + round(took_ms * NS_PER_MS)
        if ending is Outcome.CRASHED:
            self.count("restarts")
            restart_ms = self.drive.restart_ms
            self._free_ns = done_ns + round(
                (NAIVE_RESTART_MS if restart_ms is None else restart_ms) * NS_PER_MS
            )
            self._threads = 1 if self._wait_ns is None else _NAIVE_THREADS
            return
        if ending is Outcome.HUNG:
            self._threads -= 1
            done_ns = 1 << 62
        if self._wait_ns is not None and done_ns > now_ns + self._wait_ns:
            self._free_ns = now_ns + self._wait_ns
            self.count("late")
            return
        self._free_ns = done_ns
        if ending is Outcome.INVALID:
            self.count("not finite")  # it is published, and the vehicle refuses it
        elif ending is Outcome.ON_TIME:
            self._coming = done_ns, self.plan(messages, stamp_ns)


class _Record(ReplayRecord):
    """What a replay keeps; and the world's hook: every answer of the planner comes by here."""

    def __init__(self, arm: "_Stages", *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        self._arm = arm

    def publish(self, index: int, payload: bytes) -> None:
        super().publish(index, payload)
        if index == len(self.topics) - 1:
            self._arm.move(payload, self._now())

    def answer(self, index: int, answer: Answer) -> None:
        super().answer(index, answer)
        if index == len(self.topics) - 1:
            self._arm.count(answer.outcome.word if answer.fallback is None else answer.fallback.word)
            if answer.check is not None and not self._arm.latch:
                self._arm.count(f"guard {answer.check.word}")


class _Stages(_Arm):
    """This project's stages: real actors and worker processes on the virtual clock."""

    def __init__(self, drive: Drive, world: World, log: OutputLog | None, workers: Workers) -> None:
        super().__init__(drive, world, log, workers)
        parameters = parameters_of(drive)
        config = paced(config_of(parameters), "virtual")
        kept = workers.setdefault(json.dumps(parameters), {})
        times = [self.luck.times(stage) for stage in STAGES]
        self._pace = VirtualPace(world.start_ns, times, kept)
        self._record = _Record(self, config.stages, self._pace.now, log, portable=True)
        self.callback(self._record.close)
        definitions = self.enter_context(tempfile.TemporaryDirectory(prefix="torchperf_types_"))
        self._stages = ReplayStages(config, self._pace, self._record, lambda _: None, 0, definitions)
        self.callback(self._stages.stop)

    def start(self) -> None:
        self._stages.start()
        self._stages.connect({item.topic: absolute(item.topic) for item in self._stages.wanted()})
        self._stages.settle()

    def learn(self, route: bytes, stamp_ns: int) -> None:
        super().learn(route, stamp_ns)
        self._stages.offer("/route", route)

    def until(self, t_ns: int) -> None:
        self._pace.reach(t_ns, self._stages, self._record)
        self._record.tick()
        self._record.check()
        if self._stages.lost:  # what is driven then says nothing of the stages
            errors = [actor.pool.last_error for actor in self._stages.actors if actor.pool.last_error]
            raise ReplayError(f"an error in the stages' own code, not in the model: {'; '.join(errors)}")

    def sense(self, messages: Messages, stamp_ns: int) -> None:
        for topic, _, data in messages:
            self._stages.offer(absolute(topic), data)


def parameters_of(drive: Drive) -> Mapping[str, object]:
    """The node's parameters of an arm.

    They do not depend on scenario and seed, so that workers can be kept.
    """
    luck = DrawnRuns(drive.scenario.seed, drive.load, drive.faults)
    values: dict[str, object] = {
        "stages": list(STAGES),
        "recorder": False,
        "perception.adapter": "torchperf_ros.models.driving:OracleAdapter",
        "planning.adapter": "torchperf_ros.models.driving:RulePlannerAdapter",
        "perception.options": json.dumps({"blind": luck.unseen}),
        "planning.options": json.dumps({"blind": luck.blind}),
    }
    for stage in STAGES:
        values[f"{stage}.tiers"] = list(TIERS)
        values[f"{stage}.budget_ms"] = BUDGETS_MS[stage]
        values[f"{stage}.engine"] = "eager"
        values[f"{stage}.max_frame_bytes"] = 1 << 16
        if drive.arm == "no_fallback":
            values[f"{stage}.fallback"] = ["none"]
    if drive.arm == _CAMERA:
        if luck.unseen:
            raise ConfigError("faults unseen: they are the oracle's, which the arm camera does not have")
        view = {
            "horizontal_fov_deg": HORIZONTAL_FOV_DEG,
            "horizon": HORIZON,
            "camera_height_m": CAMERA_HEIGHT_M,
        }
        values["perception.adapter"] = "torchperf_ros.models.camera_driving:CameraDrivingAdapter"
        values["perception.options"] = json.dumps(view)
        values["perception.max_frame_bytes"] = 1 << 20
    if drive.arm in _HAVE_LANE:
        values |= {"emergency.sensors": ["scan"]}
    if drive.arm in _GUARDED:
        values |= {"planning.guard.act": ["all"], "planning.guard.obstacles_frame": "plan"}
    if drive.arm == _RADAR:
        values["planning.guard.obstacles"] = ["detections", "echoes"]
    return values


# Those that are stages of this project.
OWN_ARMS: Final = ("no_fallback", "no_guard", "no_lane", "full", _RADAR, _CAMERA)
NAIVE_ARMS: Final = ("naive", "blocking")
_KINDS: Final[dict[str, type[_Arm]]] = {
    _ZERO: _Zero,
    _WATCHED: _Watched,
    **dict.fromkeys(NAIVE_ARMS, _Naive),
    **dict.fromkeys(OWN_ARMS, _Stages),
}


def end_workers(workers: Workers) -> None:
    for kept in workers.values():
        while kept:
            kept.popitem()[1].stop()


def drive(one: Drive, watch: Watch = lambda _: None, workers: Workers | None = None) -> Driven:
    """Drive a scenario to its end, or to a collision.

    Args:
        one: what, and by whom.
        watch: is called after every scan.
        workers: to be kept for the next drive; None: they end with this one.

    Raises:
        ConfigError: there is no such arm, load or faults.
        ReplayError: a stage cannot run, or has an error of its own.
        OSError: the output cannot be written.
    """
    if one.arm not in _KINDS:
        raise ConfigError(f"arm {one.arm!r} is not there; it has to be one of: {', '.join(_KINDS)}")
    world = World(one.scenario)
    with ExitStack() as stack:
        kept = {} if workers is None else workers
        if workers is None:
            stack.callback(end_workers, kept)
        log = None if one.output is None else stack.enter_context(OutputLog(one.output))
        arm = stack.enter_context(_KINDS[one.arm](one, world, log, kept))
        camera, lidar = (wanted and log is not None for wanted in (one.camera, one.lidar))
        camera = camera or one.arm == _CAMERA
        sensors = Sensors(world, radar=one.arm == _RADAR, camera=camera, lidar=lidar)
        stamp_ns, beside_m, hasty = world.start_ns, math.nan, arm.luck.hasty and one.arm not in FAULTLESS
        arm.start()
        if arm.emergency is not None:
            for before_ns, messages in sensors.before(
                range(stamp_ns - _WATCHED_BEFORE_NS, stamp_ns, PERIOD_NS)
            ):
                arm.watch(messages, before_ns)
        while not world.over:
            arm.until(stamp_ns)
            world.advance(stamp_ns)
            if (wanted_m := world.route(hasty=hasty)) != beside_m:
                beside_m = wanted_m
                if hasty and beside_m:
                    arm.luck.injected.append((stamp_ns, "hasty"))
                arm.route(one.scenario.lane.beside(beside_m), stamp_ns)
            messages = sensors.messages(stamp_ns)
            for topic, kind, data in messages:
                arm.write(topic, kind, data, stamp_ns)
            arm.watch(messages, stamp_ns)
            arm.sense(messages, stamp_ns)
            watch(world)
            stamp_ns += PERIOD_NS
        if log is not None:
            log.close()
    arm.counts["refused by the vehicle"] = world.vehicle.refused
    return Driven(score_of(world), world, arm.injected(stamp_ns), arm.counts, arm.latch)
