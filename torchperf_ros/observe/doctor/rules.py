"""What follows from where the time goes: advice, each with what to type and what it was derived from."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchperf_ros.observe.doctor.split import AFTER, Split

MOST_ADVICE: Final = 5
WORTH_MS: Final = 1.0
"""Advice that may save less is not given, nor is what may save less than `_WORTH_SHARE` of stamp to publish."""
_WORTH_SHARE: Final = 0.02
LARGE_BYTES: Final = 400_000  # Fast DDS's default segment is 0.5 MB, and holds headers, too
_LOSS_SHARE: Final = 0.01
_HALF: Final = 0.5
_NEARLY: Final = 0.9
_SPREAD: Final = 1.3  # p99 by p50 of a model that has the machine for itself
_TAKES_MS: Final = 5.0  # to take a message of megabytes out of shared memory takes 1 to 3
LARGER_SEGMENT: Final = (
    "export FASTDDS_DEFAULT_PROFILES_FILE="
    "$(ros2 pkg prefix --share torchperf_ros)/config/fastdds_shared_memory.xml   # where {} is started"
)
REAL_TIME: Final = (
    'echo "$USER - rtprio 98" | sudo tee -a /etc/security/limits.d/torchperf.conf   # then log in anew'
)
CLOCK_RATE: Final = "sudo cpupower frequency-set -g performance"
BUSIEST: Final = "top -o %CPU"
"""What mends the environment."""
_IN_THE_WORKER: Final = ("decode", "preprocess", "inference", "postprocess", "publish")


@dataclass(frozen=True)
class Case:
    """A stage, and what is known beside its times; what is not known is empty, or NaN.

    Attributes:
        parameters: of the stage by name, those of the node among them.
        tiers: by name in their order, what a run of each takes in ms; `tiers_by` says by what.
        waited: by synchronised input, how many frames waited for it, and how long together in ms.
        lacks: names of what the environment lacks.
    """

    split: Split
    node: str = "/perf"
    budget_ms: float = math.nan
    interval_ms: float = math.nan
    message_bytes: int = 0
    output_bytes: int = 0
    dropped: int = 0
    trigger: str = ""
    driver: str = ""
    output: str = ""
    actuation: str = ""
    tier: str = ""
    tiers: Mapping[str, float] = field(default_factory=dict)
    tiers_by: str = "median of its runs"
    engine: str = ""
    device: str = ""
    scheduling: str = ""
    cores: int = 0
    stages: int = 1
    highest_priority: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    waited: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()

    @property
    def cheaper(self) -> str:
        """The next tier that takes less time than the one in use; empty where there is none."""
        names = list(self.tiers)
        after = names[names.index(self.tier) + 1 :] if self.tier in names else []
        return next((name for name in after if self.tiers[name] < self.tiers[self.tier]), "")

    def advice(self, part: str, saves_ms: float, do: str, command: str, because: str) -> "Advice":
        """Advice on this stage; one whose saving is not known saves nothing."""
        return Advice(
            self.split.stage, part, saves_ms if math.isfinite(saves_ms) else 0.0, do, command, because
        )


@dataclass(frozen=True)
class Advice:
    """One thing to change.

    Attributes:
        stage: whose.
        part: of `PARTS`, that it makes shorter.
        saves_ms: what it may save at most, of each frame or of the slowest, as `because` says.
        do: what to do.
        command: what to type, or to write into the parameter file.
        because: what it was derived from.
    """

    stage: str
    part: str
    saves_ms: float
    do: str
    command: str
    because: str


def sentence(split: Split) -> str:
    """Which part is the largest, in one sentence."""
    largest = split.largest
    if largest is None or not split.frames:
        return f"{split.stage}: no frame was answered, so nothing can be split"
    of = (
        "ms after the output left"
        if largest.name in AFTER
        else f"of {split.whole.mean_ms:.1f} ms ({largest.share:.0%})"
    )
    slow = (
        f"; the slowest 5 % are slow by {split.slow_part}, +{split.slow_ms:.1f} ms"
        if split.slow_part
        else ""
    )
    return f"{split.stage}: the largest part is {largest.name}, {largest.mean_ms:.1f} {of}{slow}"


def advise(cases: Sequence[Case]) -> list[Advice]:
    """The advice whose evidence is there, what may save the most first."""
    rules = (_camera, _budget, _transport, _scheduling, _queue, _model, _machine, _code, _receiver)
    found = [one for case in cases for rule in rules for one in rule(case)]
    least = {case.split.stage: max(WORTH_MS, _WORTH_SHARE * case.split.whole.mean_ms) for case in cases}
    worth = [one for one in found if one.saves_ms >= least[one.stage]]
    return sorted(worth, key=lambda one: -one.saves_ms)[:MOST_ADVICE]


def _camera(case: Case) -> Iterator[Advice]:
    """Exposure and readout take up to a frame's interval; what is above it waits in the driver."""
    part, interval_ms = case.split.part("camera"), case.interval_ms
    do = "fewer buffers in the driver, a shorter exposure; or its stamps are too early"
    because = (
        f"{case.trigger} leaves {case.driver or 'its driver'} {part.p50_ms:.1f} ms after its stamp (p50)"
    )
    because += f", one comes every {interval_ms:.1f} ms"
    yield case.advice(
        "camera", part.p50_ms - interval_ms, do, f"ros2 param dump {case.driver or 'DRIVER'}", because
    )
    part, do = (
        case.split.part("input"),
        "find out whether it is the camera or the transport, beside the node",
    )
    because = f"frames are {part.p50_ms:.1f} ms old at receipt (p50), one comes every {interval_ms:.1f} ms"
    yield case.advice(
        "input", part.p50_ms - interval_ms, do, f"torchperf doctor --node {case.node}", because
    )


def _budget(case: Case) -> Iterator[Advice]:
    """Deadlines that count from receipt know nothing of what was before.

    Where that is all of it, none can help.
    """
    age_ms, whole = case.split.age_ms, case.split.whole
    if case.parameters.get("budget_from") == "receipt" and WORTH_MS <= age_ms < _NEARLY * case.budget_ms:
        do = "count the budget from the stamp: what comes late gets a cheaper tier, or a fallback, in time"
        because = (
            f"the budget of {case.budget_ms:g} ms begins {age_ms:.1f} ms after the stamp, at receipt (p50)"
        )
        because += f"; outputs are {whole.p99_ms:.1f} ms old when they leave (p99)"
        over_ms = whole.p99_ms - case.budget_ms
        yield case.advice("inference", over_ms, do, f"{case.split.stage}.budget_from: stamp", because)


def _transport(case: Case) -> Iterator[Advice]:
    """Messages that are lost make the next output late by an interval; large ones take their time."""
    part, stage, lost, published = (
        case.split.part("transport"),
        case.split.stage,
        case.split.lost,
        case.split.published,
    )
    size, share = f"{case.trigger} has {case.message_bytes / 1e6:.2f} MB", lost / max(published, 1)
    takes = f"transport takes {part.p50_ms:.1f} ms (p50), {part.p99_ms:.1f} (p99)"
    reliable = case.parameters.get("input_reliability") == "reliable"
    if share >= _LOSS_SHARE:
        because = f"{lost} of {published} messages were lost on the way; {size}"
        if case.message_bytes >= LARGE_BYTES:
            do, command = (
                "give the driver a larger shared-memory segment",
                LARGER_SEGMENT.format("the driver"),
            )
        else:
            do, command = "have lost messages sent again", f"{stage}.input_reliability: reliable"
        if case.message_bytes >= LARGE_BYTES or not reliable:
            yield case.advice("transport", share * case.interval_ms, do, command, because)
    if reliable:
        command, because = f"{stage}.input_reliability: best_effort", f"inputs are reliable; {takes}"
        do = "do not wait for messages that are sent again"
        yield case.advice("transport", part.p99_ms - part.p50_ms, do, command, because)
    if case.message_bytes >= LARGE_BYTES:
        do, saves_ms = "run driver and node on one machine, or send less", part.p50_ms - _TAKES_MS
        command = f"ros2 run image_transport republish raw compressed --ros-args -r in:={case.trigger}"
        yield case.advice("transport", saves_ms, do, command, f"{size}; {takes}")


def _scheduling(case: Case) -> Iterator[Advice]:
    """A node of normal priority waits for the processor behind every other program."""
    tail = {name: (part := case.split.part(name)).p99_ms - part.p50_ms for name in ("transport", "publish")}
    if case.scheduling and not case.scheduling.startswith("fifo"):
        do = "let the node run before other programs, under SCHED_FIFO"
        because = f"its scheduling is {case.scheduling.partition(':')[0]}; transport and publish take "
        because += f"{sum(tail.values()):.1f} ms more in their slowest 1 % than usual"
        yield case.advice(max(tail, key=lambda one: tail[one]), sum(tail.values()), do, REAL_TIME, because)


def _queue(case: Case) -> Iterator[Advice]:
    """One reason.

    Inputs that are waited for, frames that come faster than they are answered, or a higher stage.
    """
    part, stage, frames = case.split.part("queue"), case.split.stage, max(case.split.frames, 1)
    run_ms = sum(case.split.part(name).mean_ms for name in _IN_THE_WORKER)
    topic, (count, waited_ms) = max(case.waited.items(), key=lambda one: one[1][1], default=("", (0, 0.0)))
    waits = f"frames wait {part.p50_ms:.1f} ms (p50), {part.p99_ms:.1f} (p99)"
    if count and waited_ms / frames >= _HALF * part.mean_ms:
        mean_ms = waited_ms / count
        command = (
            f"{stage}.sync: ['{topic} slop 40 wait {max(_HALF * mean_ms, 1.0):.0f}']   # slop as it is now"
        )
        because = f"{count} of {frames} frames waited {mean_ms:.1f} ms each for {topic}"
        yield case.advice(
            "queue", waited_ms / frames, f"wait for {topic} for a shorter time", command, because
        )
    elif run_ms > _NEARLY * case.interval_ms:
        do = (
            f"answer each frame before the next one comes: {_NEARLY * 1e3 / run_ms:.0f} a second, or a"
            " cheaper tier"
        )
        command = (
            f"{stage}.tiers: [{case.cheaper}]"
            if case.cheaper
            else f"ros2 param list {case.driver or 'DRIVER'}"
        )
        because = f"{waits}: one comes every {case.interval_ms:.1f} ms and takes {run_ms:.1f}"
        because += f"; {case.dropped} were never started"
        yield case.advice("queue", part.mean_ms, do, command, because)
    elif case.parameters.get("priority", 0) < case.highest_priority:
        command, because = (
            f"{stage}.priority: {case.highest_priority}",
            f"{waits}; a stage of higher priority goes first",
        )
        yield case.advice("queue", part.mean_ms, "give it the priority of the others", command, because)
    elif (
        run_ms + case.split.part("inference").p99_ms - case.split.part("inference").p50_ms
        < case.interval_ms
    ):
        # no slow run makes the next frame wait
        do, command = (
            "have frames come evenly: some come in bunches",
            f"ros2 topic hz {case.trigger or 'TRIGGER'}",
        )
        yield case.advice(
            "queue", part.p99_ms - part.p50_ms, do, command, f"{waits}; one takes {run_ms:.1f}"
        )


def _model(case: Case) -> Iterator[Advice]:
    """A cheaper tier, and an engine."""
    part, cheaper = case.split.part("inference"), case.cheaper
    if cheaper:
        names, now_ms, then_ms = list(case.tiers), case.tiers[case.tier], case.tiers[cheaper]
        command = f"{case.split.stage}.tiers: [{', '.join(names[names.index(cheaper) :])}]"
        because = f"tier {case.tier} takes {now_ms:.1f} ms, {cheaper} {then_ms:.1f} ({case.tiers_by})"
        do = "begin with a cheaper tier, if it is good enough"
        yield case.advice("inference", part.mean_ms * (1.0 - then_ms / now_ms), do, command, because)
    if case.engine == "eager":
        do, command = "compile the model", "torchperf compile --params FILE   # the node's parameter file"
        because = (
            f"tier {case.tier} runs in eager and takes {part.p50_ms:.1f} ms (p50); that half goes is"
            " assumed"
        )
        yield case.advice("inference", _HALF * part.p50_ms, do, command, because)


def _machine(case: Case) -> Iterator[Advice]:
    """A model whose slowest runs are far from its usual ones shares its cores, or their clock rate changes."""
    part, threads = case.split.part("inference"), int(case.parameters.get("worker_threads", -1))
    if case.device.startswith("cuda") or part.p99_ms <= _SPREAD * part.p50_ms:
        return
    tail_ms, spread = (
        part.p99_ms - part.p50_ms,
        f"inference takes {part.p50_ms:.1f} ms (p50), {part.p99_ms:.1f} (p99)",
    )
    own, each = max(case.cores - 1, 1), threads or max(case.cores - 1, 1)
    if threads >= 0 and each > 1 and each * case.stages > own:
        do, command = "fewer threads for each model", f"worker_threads: {max(own // case.stages, 1)}"
        because = f"{spread}; {case.stages} stages have {each} threads each on {case.cores} cores"
        yield case.advice("inference", tail_ms, do, command, because)
    if "load" in case.lacks:
        do = "end what else takes the processors, or move it"
        yield case.advice("inference", tail_ms, do, BUSIEST, f"{spread}; the machine is full")
    if "governor" in case.lacks:
        yield case.advice(
            "inference", tail_ms, "keep the clock rate up", CLOCK_RATE, f"{spread}; see governor below"
        )


def _code(case: Case) -> Iterator[Advice]:
    """Steps that are the adapter's own, and those of large messages."""
    for name in ("decode", "preprocess", "postprocess", "publish"):
        part = case.split.part(name)
        size = (
            f"; an output has {case.output_bytes / 1e6:.2f} MB"
            if name == "publish" and case.output_bytes
            else ""
        )
        command, because = (
            f"torchperf profile --node {case.node}",
            f"{name} takes {part.p50_ms:.1f} ms (p50){size}",
        )
        because += "; that half goes is assumed"
        yield case.advice(name, _HALF * part.p50_ms, f"see what {name} does", command, because)


def _receiver(case: Case) -> Iterator[Advice]:
    receive, actuation, large = *map(case.split.part, AFTER), case.output_bytes >= LARGE_BYTES
    because = (
        f"{case.output} ({case.output_bytes / 1e6:.2f} MB) arrives {receive.p50_ms:.1f} ms after it is sent"
        " (p50)"
    )
    command = LARGER_SEGMENT.format("the node") if large else f"torchperf top --node {case.node} --once"
    do = (
        "a larger shared-memory segment for the node"
        if large
        else "see whether the machine, or the network, is full"
    )
    yield case.advice("receive", receive.p50_ms, do, command, because)
    do = "have the receiver take the newest output only, and do less in its callback"
    command = (
        "QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)   # of the receiver's subscription"
    )
    because = f"{case.actuation} leaves {actuation.p50_ms:.1f} ms after the output that it belongs to (p50)"
    yield case.advice("actuation", actuation.p50_ms, do, command, because)
