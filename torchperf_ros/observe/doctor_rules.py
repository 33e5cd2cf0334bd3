"""What the doctor advises: what to type where time goes lost, and what the machine gives and lacks.

The machine is read without root from `/proc`, `/sys` and `/dev/shm`.
"""

import ctypes
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from torchperf_ros.observe.doctor_split import AFTER, Part, Split

MOST_ADVICE: Final = 5
# Advice that may save less is not given, nor is what may save less than `_WORTH_SHARE` of stamp to
# publish.
WORTH_MS: Final = 1.0
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
# What mends the environment.
BUSIEST: Final = "top -o %CPU"
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

    @property
    def lost_share(self) -> float:
        return self.split.lost / max(self.split.published, 1)

    @property
    def run_ms(self) -> float:
        """What a frame takes from hand-over to publish, in the mean."""
        return sum(self.split.part(name).mean_ms for name in _IN_THE_WORKER)

    @property
    def tails_ms(self) -> dict[str, float]:
        """What transport and publish take more in their slowest 1 % than usual."""
        return {name: _tail(self, self.split.part(name)) for name in ("transport", "publish")}

    @property
    def slowest(self) -> str:
        return max(self.tails_ms, key=lambda name: self.tails_ms[name])

    @property
    def waits_for(self) -> "Wait":
        """The synchronised input that took the most waiting."""
        topic, (count, ms) = max(self.waited.items(), key=lambda one: one[1][1], default=("", (0, 0.0)))
        return Wait(topic, count, ms / max(count, 1), ms / max(self.split.frames, 1))

    @property
    def own_cores(self) -> int:
        return max(self.cores - 1, 1)

    @property
    def threads(self) -> int:
        """Threads of each model; -1: not known."""
        return int(self.parameters.get("worker_threads", -1)) or self.own_cores


class Wait(NamedTuple):
    """Frames that waited for an input: how many, how long each, and how long spread over all frames."""

    topic: str
    frames: int
    each_ms: float
    all_ms: float


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
    """What may save the most first; what several streams of a stage share, once, for the worst."""
    found = []
    for case in cases:
        least_ms, reasons = max(WORTH_MS, _WORTH_SHARE * case.split.whole.mean_ms), set()
        for rule in RULES:
            part = case.split.part(rule.part)
            if rule.reason in reasons or not rule.holds(case):
                continue
            reasons |= {rule.reason} - {""}
            # A saving that is not known compares as false, too.
            if (saves_ms := rule.saves_ms(case, part)) >= least_ms:
                texts = (text if isinstance(text, str) else text(case, part) for text in rule[-3:])
                found.append((rule, Advice(case.split.stage, rule.part, saves_ms, *texts)))
    worst: dict[tuple[str, Rule], Advice] = {}
    beside: defaultdict[tuple[str, Rule], list[str]] = defaultdict(list)
    for rule, advice in sorted(found, key=lambda one: -one[1].saves_ms):
        stage, _, stream = advice.stage.partition(".")
        if worst.setdefault((stage, rule), advice) is not advice:
            beside[stage, rule].append(stream)
    merged = [
        replace(one, stage=f"{one.stage} and {', '.join(beside[key])}" if key in beside else one.stage)
        for key, one in worst.items()
    ]
    return merged[:MOST_ADVICE]


def _always(_: Case) -> bool:
    return True


def _half(_: Case, part: Part) -> float:
    return _HALF * part.p50_ms


def _tail(_: Case, part: Part) -> float:
    return part.p99_ms - part.p50_ms


def _mean(_: Case, part: Part) -> float:
    return part.mean_ms


def _usual(_: Case, part: Part) -> float:
    return part.p50_ms


def _over_interval(case: Case, part: Part) -> float:
    """Exposure and readout take up to a frame's interval; what is above it waits in the driver."""
    return part.p50_ms - case.interval_ms


def _spreads(case: Case) -> bool:
    """A model with slowest runs far from usual ones shares its cores, or their clock rate changes."""
    part = case.split.part("inference")
    return not case.device.startswith("cuda") and part.p99_ms > _SPREAD * part.p50_ms


def _is_reliable(case: Case) -> bool:
    return case.parameters.get("input_reliability") == "reliable"


def _has_large(case: Case) -> bool:
    return case.message_bytes >= LARGE_BYTES


def _loses(case: Case) -> bool:
    return case.lost_share >= _LOSS_SHARE and (_has_large(case) or not _is_reliable(case))


def _gives_large(case: Case) -> bool:
    return case.output_bytes >= LARGE_BYTES


def _is_too_fast(case: Case) -> bool:
    return case.run_ms > _NEARLY * case.interval_ms


def _keeps_up(case: Case) -> bool:
    """Whether no slow run makes the next frame wait."""
    return case.run_ms + _tail(case, case.split.part("inference")) < case.interval_ms


def _size(case: Case) -> str:
    return f"{case.trigger} has {case.message_bytes / 1e6:.2f} MB"


def _lost(case: Case, _: Part) -> str:
    return f"{case.split.lost} of {case.split.published} messages were lost on the way; {_size(case)}"


def _takes(part: Part, word: str = "takes") -> str:
    return f"{word} {part.p50_ms:.1f} ms (p50), {part.p99_ms:.1f} (p99)"


def _too_fast(case: Case, part: Part) -> str:
    rate = f"one comes every {case.interval_ms:.1f} ms and takes {case.run_ms:.1f}"
    return f"{_takes(part, 'frames wait')}: {rate}; {case.dropped} were never started"


def _gives_way(case: Case) -> bool:
    return bool(case.scheduling) and not case.scheduling.startswith("fifo")


def _is_late(case: Case, _: Part) -> str:
    tails = f"transport and publish take {sum(case.tails_ms.values()):.1f} ms more"
    return f"its scheduling is {case.scheduling.partition(':')[0]}; {tails} in their slowest 1 % than usual"


def _cheaper_tiers(case: Case, _: Part) -> str:
    names = list(case.tiers)
    return f"{case.split.stage}.tiers: [{', '.join(names[names.index(case.cheaper) :])}]"


def _output_size(case: Case) -> str:
    return f"; an output has {case.output_bytes / 1e6:.2f} MB" if case.output_bytes else ""


def _arrives(case: Case, part: Part) -> str:
    size = f"{case.output} ({case.output_bytes / 1e6:.2f} MB)"
    return f"{size} arrives {part.p50_ms:.1f} ms after it is sent (p50)"


_Text = str | Callable[[Case, Part], str]


class Rule(NamedTuple):
    """Advice, and the evidence that it needs.

    Attributes:
        part: of `PARTS`, that it makes shorter.
        reason: of rules with the same word the first that holds is the reason, and the others are passed over.
        holds: whether the evidence is there, beside the part's own times.
        saves_ms: what it may save at most.
        do, command, because: see `Advice`.
    """

    part: str
    reason: str
    holds: Callable[[Case], object]
    saves_ms: Callable[[Case, Part], float]
    do: _Text
    command: _Text
    because: _Text


_RUN_FIRST: Final = "let the node run before other programs, under SCHED_FIFO"
_ASSUMED: Final = "that half goes is assumed"
# What follows from which evidence.
RULES: Final = (
    Rule("camera", "", _always, _over_interval,
         "fewer buffers in the driver, a shorter exposure; or its stamps are too early",
         lambda c, _: f"ros2 param dump {c.driver or 'DRIVER'}",
         lambda c, p: f"{c.trigger} leaves {c.driver or 'its driver'} {p.p50_ms:.1f} ms after its stamp (p50), one"
         f" comes every {c.interval_ms:.1f} ms"),
    Rule("input", "", _always, _over_interval,
         "find out whether it is the camera or the transport, beside the node",
         lambda c, _: f"torchperf doctor --node {c.node}",
         lambda c, p: f"frames are {p.p50_ms:.1f} ms old at receipt (p50), one comes every {c.interval_ms:.1f} ms"),
    # Deadlines that count from receipt know nothing of what was before. Where that is all of the budget, no
    # deadline can help.
    Rule("inference", "",
         lambda c: c.parameters.get("budget_from") == "receipt"
         and WORTH_MS <= c.split.age_ms < _NEARLY * c.budget_ms,
         lambda c, _: c.split.whole.p99_ms - c.budget_ms,
         "count the budget from the stamp: what comes late gets a cheaper tier, or a fallback, in time",
         lambda c, _: f"{c.split.stage}.budget_from: stamp",
         lambda c, _: f"the budget of {c.budget_ms:g} ms begins {c.split.age_ms:.1f} ms after the stamp, at receipt"
         f" (p50); outputs are {c.split.whole.p99_ms:.1f} ms old when they leave (p99)"),
    # A lost message makes the next output late by an interval; a large one takes its time.
    Rule("transport", "", lambda c: _loses(c) and _has_large(c), lambda c, _: c.lost_share * c.interval_ms,
         "give the driver a larger shared-memory segment", LARGER_SEGMENT.format("the driver"), _lost),
    Rule("transport", "", lambda c: _loses(c) and not _has_large(c), lambda c, _: c.lost_share * c.interval_ms,
         "have lost messages sent again", lambda c, _: f"{c.split.stage}.input_reliability: reliable", _lost),
    Rule("transport", "", _is_reliable, _tail,
         "do not wait for messages that are sent again",
         lambda c, _: f"{c.split.stage}.input_reliability: best_effort",
         lambda _, p: f"inputs are reliable; transport {_takes(p)}"),
    Rule("transport", "", _has_large, lambda _, p: p.p50_ms - _TAKES_MS,
         "run driver and node on one machine, or send less",
         lambda c, _: f"ros2 run image_transport republish raw compressed --ros-args -r in:={c.trigger}",
         lambda c, p: f"{_size(c)}; transport {_takes(p)}"),
    # A node of normal priority waits for the processor behind every other program.
    Rule("transport", "scheduling", lambda c: _gives_way(c) and c.slowest == "transport",
         lambda c, _: sum(c.tails_ms.values()), _RUN_FIRST, REAL_TIME, _is_late),
    Rule("publish", "scheduling", lambda c: _gives_way(c) and c.slowest == "publish",
         lambda c, _: sum(c.tails_ms.values()), _RUN_FIRST, REAL_TIME, _is_late),
    Rule("queue", "queue",
         lambda c: c.waits_for.frames and c.waits_for.all_ms >= _HALF * c.split.part("queue").mean_ms,
         lambda c, _: c.waits_for.all_ms,
         lambda c, _: f"wait for {c.waits_for.topic} for a shorter time",
         lambda c, _: f"{c.split.stage}.sync: ['{c.waits_for.topic} slop 40 wait"
         f" {max(_HALF * c.waits_for.each_ms, 1.0):.0f}']   # slop as it is now",
         lambda c, _: f"{c.waits_for.frames} of {c.split.frames} frames waited {c.waits_for.each_ms:.1f} ms each for"
         f" {c.waits_for.topic}"),
    Rule("queue", "queue", _is_too_fast, _mean,
         lambda c, _: f"answer each frame before the next one comes: {_NEARLY * 1e3 / c.run_ms:.0f} a second, or a"
         " cheaper tier",
         lambda c, _: f"{c.split.stage}.tiers: [{c.cheaper}]" if c.cheaper
         else f"ros2 param list {c.driver or 'DRIVER'}",
         _too_fast),
    Rule("queue", "queue", lambda c: c.parameters.get("priority", 0) < c.highest_priority, _mean,
         "give it the priority of the others",
         lambda c, _: f"{c.split.stage}.priority: {c.highest_priority}",
         lambda _, p: f"{_takes(p, 'frames wait')}; a stage of higher priority goes first"),
    Rule("queue", "queue", _keeps_up, _tail,
         "have frames come evenly: some come in bunches",
         lambda c, _: f"ros2 topic hz {c.trigger or 'TRIGGER'}",
         lambda c, p: f"{_takes(p, 'frames wait')}; one takes {c.run_ms:.1f}"),
    Rule("inference", "", lambda c: c.cheaper,
         lambda c, p: p.mean_ms * (1.0 - c.tiers[c.cheaper] / c.tiers[c.tier]),
         "begin with a cheaper tier, if it is good enough", _cheaper_tiers,
         lambda c, _: f"tier {c.tier} takes {c.tiers[c.tier]:.1f} ms, {c.cheaper} {c.tiers[c.cheaper]:.1f}"
         f" ({c.tiers_by})"),
    Rule("inference", "", lambda c: c.engine == "eager", _half,
         "compile the model", "torchperf compile --params FILE   # the node's parameter file",
         lambda c, p: f"tier {c.tier} runs in eager and takes {p.p50_ms:.1f} ms (p50); {_ASSUMED}"),
    Rule("inference", "", lambda c: _spreads(c) and c.threads > 1 and c.threads * c.stages > c.own_cores, _tail,
         "fewer threads for each model",
         lambda c, _: f"worker_threads: {max(c.own_cores // c.stages, 1)}",
         lambda c, p: f"inference {_takes(p)}; {c.stages} stages have {c.threads} threads each on {c.cores} cores"),
    Rule("inference", "", lambda c: _spreads(c) and "load" in c.lacks, _tail,
         "end what else takes the processors, or move it", BUSIEST,
         lambda _, p: f"inference {_takes(p)}; the machine is full"),
    Rule("inference", "", lambda c: _spreads(c) and "governor" in c.lacks, _tail,
         "keep the clock rate up", CLOCK_RATE,
         lambda _, p: f"inference {_takes(p)}; see governor below"),
    *(Rule(name, "", _always, _half, f"see what {name} does", lambda c, _: f"torchperf profile --node {c.node}",
           lambda _, p: f"{p.name} takes {p.p50_ms:.1f} ms (p50); {_ASSUMED}")
      for name in ("decode", "preprocess", "postprocess")),
    Rule("publish", "", _always, _half, "see what publish does", lambda c, _: f"torchperf profile --node {c.node}",
         lambda c, p: f"publish takes {p.p50_ms:.1f} ms (p50){_output_size(c)}; {_ASSUMED}"),
    Rule("receive", "", _gives_large, _usual,
         "a larger shared-memory segment for the node", LARGER_SEGMENT.format("the node"), _arrives),
    Rule("receive", "", lambda c: not _gives_large(c), _usual,
         "see whether the machine, or the network, is full",
         lambda c, _: f"torchperf top --node {c.node} --once", _arrives),
    Rule("actuation", "", _always, _usual,
         "have the receiver take the newest output only, and do less in its callback",
         "QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)   # of the receiver's subscription",
         lambda c, p: f"{c.actuation} leaves {p.p50_ms:.1f} ms after the output that it belongs to (p50)"),
)  # fmt: skip


_MIB: Final = 1 << 20
_SHM_FREE: Final = 128 * _MIB  # the segments of two participants with this package's profile
_DAY_MS: Final = 86_400_000.0  # a clock that was set is not so far off: these are the stamps of a log
_TIME_ERROR: Final = 5  # of adjtimex(2): the clock is not synchronised
_FULL: Final = 0.9


@dataclass(frozen=True)
class Check:
    """One thing of the environment.

    Attributes:
        ok: None where it cannot be read, or does not matter here.
        found: what holds.
        mend: the command that mends it.
    """

    name: str
    ok: bool | None
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Need:
    """What the node asks of the machine.

    Attributes:
        pid: of its process on this machine; None: the limits of this shell are looked at.
        scheduling: what the node itself says, for example `fifo 10`; empty where not known.
        realtime_priority, lock_memory: its parameters.
        message_bytes: of its largest messages.
        lost: messages that did not reach it.
        clock_ms: how far stamps show a clock to be off; NaN if they do not.
        busy: share of the processors that was used while it was looked at; NaN where not known.
        clock_problem: why the node says that stamps and its clock cannot fit, as one of them goes by
            `/clock`.
        unheard: a topic that the node gets and a second subscriber did not: too large for its publisher's
            segment.
    """

    pid: int | None = None
    scheduling: str = ""
    realtime_priority: int = 10
    lock_memory: bool = False
    message_bytes: int = 0
    lost: int = 0
    clock_ms: float = math.nan
    busy: float = math.nan
    unheard: str = ""
    clock_problem: str = ""


def kernel_clock() -> int:
    """What adjtimex(2) says of this machine's clock, which every user may ask.

    Below 0: it cannot be asked.
    """
    largest_timex = 512  # more bytes than any kernel's `struct timex`
    return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(largest_timex)))


def look_around(need: Need, root: Path = Path("/"), clock: Callable[[], int] = kernel_clock) -> list[Check]:
    """Look at everything.

    Args:
        need: what the node asks of the machine.
        root: where `proc`, `sys` and `dev` lie.
        clock: as `kernel_clock`.
    """
    limits = _limits(root, need.pid)
    priority, locked = (
        limits.get(f"Max {what}", math.nan) for what in ("realtime priority", "locked memory")
    )
    is_fifo = need.scheduling.startswith("fifo")
    scheduled = f"scheduling {need.scheduling or 'not known'}, limit {_number(priority)}"
    lockable = f"limit {_number(locked / _MIB)} MiB"
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {file.read_text().strip() for file in files}
    return [
        Check("rtprio", is_fifo or priority >= need.realtime_priority, scheduled, REAL_TIME)
        if need.realtime_priority or is_fifo
        else Check("rtprio", None, f"{scheduled}: realtime_priority is 0"),
        Check("memlock", math.isinf(locked), lockable, REAL_TIME.replace("rtprio 98", "memlock unlimited"))
        if need.lock_memory
        else Check("memlock", None, f"{lockable}: lock_memory is off, which needs none"),
        Check("governor", governors == {"performance"}, ", ".join(sorted(governors)), CLOCK_RATE)
        if governors
        else Check("governor", None, "this machine does not show one (a virtual machine sets none)"),
        Check("load", None, "not measured")
        if math.isnan(need.busy)
        else Check("load", need.busy < _FULL, f"{need.busy:.0%} of the processors' time was used", BUSIEST),
        _segment(need, root),
        _room(root),
        _clock(need, clock),
        _udp(need, root),
    ]


def _segment(need: Need, root: Path) -> Check:
    """Fast DDS's segments of all participants here.

    A message larger than its sender's goes by UDP, or is lost.
    """
    segment = re.compile(r"(fastdds|fastrtps)_[0-9a-f]{16}$")
    sizes = [file.stat().st_size for file in (root / "dev/shm").glob("fast*") if segment.match(file.name)]
    least = f"{len(sizes)} participants have {min(sizes, default=0) / _MIB:.1f} MiB and more"
    found, ok = least if sizes else "no Fast DDS segment", True if sizes else None
    if need.unheard:
        found += f"; a second subscriber gets nothing of {need.unheard}: too large for its publisher's"
        ok = False
    elif need.message_bytes:
        found += f"; the largest message has {need.message_bytes / _MIB:.1f}"
    if sizes and not need.unheard and need.message_bytes >= LARGE_BYTES:
        ok = max(sizes) > 2 * need.message_bytes and not need.lost
    return Check("segment", ok, found, LARGER_SEGMENT.format("its publisher"))


def _room(root: Path) -> Check:
    try:
        room = os.statvfs(root / "dev/shm")
    except OSError as error:
        return Check("/dev/shm", False, f"not there: {error.strerror}", "docker run --ipc=host ...")
    free = room.f_bavail * room.f_frsize
    mend = "fastdds shm clean   # in a container: docker run --ipc=host, or --shm-size=1g"
    return Check("/dev/shm", free >= _SHM_FREE, f"{free / _MIB:,.0f} MiB free", mend)


def _clock(need: Need, clock: Callable[[], int]) -> Check:
    if need.clock_problem:
        why = "the same for every node; /clock: simulation, or play --clock"
        return Check("clock", False, need.clock_problem, f"ros2 param get NODE use_sim_time   # {why}")
    mend = "chronyc tracking   # on both machines; sudo systemctl enable --now chrony"
    state = clock()
    kernel = "not synchronised" if state == _TIME_ERROR else "synchronised" if state >= 0 else "not known"
    if math.isfinite(need.clock_ms):
        found = f"stamps and receipt differ by {need.clock_ms:,.1f} ms; this machine's clock is {kernel}"
        if abs(need.clock_ms) > _DAY_MS:
            found = (
                f"stamps and receipt differ by {need.clock_ms / _DAY_MS:,.1f} days, as those of a log do"
            )
            mend = "torchperf play LOG --restamp   # or play LOG --clock, and the node with use_sim_time"
        return Check("clock", False, found, mend)
    alone = ", which matters where stamps come from another machine" if state == _TIME_ERROR else ""
    return Check("clock", True if state >= 0 and not alone else None, f"{kernel}{alone}; stamps fit", mend)


def _udp(need: Need, root: Path) -> Check:
    file = root / "proc/sys/net/core/rmem_max"
    size = int(file.read_text()) if file.is_file() else 0
    if not size:
        return Check("udp buffers", None, "not shown here")
    ok = size >= need.message_bytes or not need.lost or None
    lost = f"; {need.lost} messages were lost: this counts where they come from another machine"
    found = f"net.core.rmem_max {size / _MIB:.1f} MiB{'' if ok else lost}"
    return Check("udp buffers", ok, found, "sudo sysctl -w net.core.rmem_max=8388608")


def _limits(root: Path, pid: int | None) -> dict[str, float]:
    """Soft limits of a process by name; of this one where that may not be read."""
    for folder in (f"proc/{pid}", "proc/self"):
        try:
            lines = (root / folder / "limits").read_text().splitlines()
        except OSError:
            continue
        rows = (re.split(r"\s{2,}", line) for line in lines[1:])
        return {
            row[0]: math.inf if row[1] == "unlimited" else float(row[1]) for row in rows if len(row) > 1
        }
    return {}


def _number(value: float) -> str:
    return "unlimited" if math.isinf(value) else "not known" if math.isnan(value) else f"{value:g}"
