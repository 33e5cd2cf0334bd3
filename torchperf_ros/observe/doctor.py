"""`torchperf doctor`.

Listens to a node, or reads a log, splits the time of its frames, and says what to change.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from torchperf_ros.api.text import console_table
from torchperf_ros.observe.doctor_rules import Advice, Case, Check, Need, advise, look_around, sentence
from torchperf_ros.observe.doctor_split import AFTER, PARTS, Heard, Message, Split, split
from torchperf_ros.observe.runs.run_log import RunLog, RunLogError, StageLog, Values
from torchperf_ros.observe.telemetry.node_state import NodeState, StageState

if TYPE_CHECKING:
    from torchperf_ros.observe.top import NodeListener

_OF_NODE: Final = ("use_sim_time", "worker_threads", "realtime_priority", "lock_memory")
_OF_STAGE: Final = ("budget_from", "input_reliability", "priority")
_CLOCK_WARNINGS: Final = ("clock_warning", "stamps_warning")
_ASK_S: Final = 1.0
_MOST_TRIES: Final = 3
_LEAST_RUNS: Final = 5  # of a tier, for a figure
_HEARD: Final = 0.5  # of the frames that were answered meanwhile
_BAR: Final = 12
# By whether the machine has what it should: yes, no, or not known.
_LOOKS: Final = {True: ("ok   ", "green"), False: ("lacks", "red"), None: ("-    ", "grey62")}
_NOT_IN_A_LOG: Final = (
    "a log has only what the node published: camera and transport are one part, and what subscribers,"
    " parameters and the environment add is not in it; run `torchperf doctor` beside the node for these"
)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Findings:
    name: str
    cases: tuple[Case, ...]
    advice: tuple[Advice, ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        """The exit status: 0 nothing to mend, 1 something found."""
        silent = any(not case.split.frames for case in self.cases)
        return int(silent or bool(self.advice) or any(check.ok is False for check in self.checks))


@dataclass
class Ear:
    """What is heard beside the node's own topics, while the doctor listens."""

    node: str
    actuation: str = ""
    state: NodeState = field(default_factory=lambda: NodeState(""))
    parameters: dict[str, Any] = field(default_factory=dict)
    first: dict[str, dict[str, Any]] = field(default_factory=dict)  # by stage, its values at the start
    topics: dict[str, list[Message]] = field(default_factory=dict)
    drivers: dict[str, list[str]] = field(default_factory=dict)  # by trigger
    problems: dict[str, str] = field(default_factory=dict)  # by topic
    tries: int = 0

    def look(self, listener: "NodeListener", state: NodeState) -> bool:
        """Hear what the node's stages run for and publish, as soon as it says so.

        Ask for its parameters once.

        Returns whether enough came of every trigger that the node has had, and an answer of the receiver,
        to split the time.
        """
        self.state, enough = state, True
        for stage in state.stages.values():
            self.first.setdefault(stage.name, dict(stage.values))
            trigger = stage.values.get("trigger", "")
            for topic in filter(None, (trigger, stage.values.get("publishes", ""), self.actuation)):
                self._hear(listener, topic)
            if trigger:
                self.drivers[trigger] = listener.publishers(trigger)
                answered = (stage.count("answered") or 0) - int(self.first[stage.name].get("answered") or 0)
                enough &= len(self.topics[trigger]) >= _HEARD * answered
        if self.actuation in self.topics:
            enough &= self.answers > 0
        if state.stages and not self.parameters and self.tries < _MOST_TRIES:
            self.tries += 1
            # those of a stream are its stage's: it does not declare what it has not of its own
            names = [
                *_OF_NODE,
                *(f"{stage}.{name}" for stage in _whole(state.stages) for name in _OF_STAGE),
            ]
            self.parameters = listener.parameters(self.node, names, _ASK_S)
        return enough

    def _hear(self, listener: "NodeListener", topic: str) -> None:
        if topic not in self.topics:
            messages: list[Message] = []

            def take(stamp_ns: int, info: Mapping[str, int], size_bytes: int) -> None:
                times = info["source_timestamp"], info["received_timestamp"]
                messages.append(
                    Message(stamp_ns, *times, info.get("publication_sequence_number") or 0, size_bytes)
                )

            self.problems[topic] = listener.hear(topic, take)
            if not self.problems[topic]:
                self.topics[topic] = messages

    @property
    def answers(self) -> int:
        """How many messages of the receiver belong to an output."""
        return sum(len(self.heard(stage).actuation_ms()) for stage in self.state.stages.values())

    def heard(self, stage: StageState) -> Heard:
        names = (stage.values.get("trigger", ""), stage.values.get("publishes", ""), self.actuation)
        return Heard(*(self.topics.get(name, []) for name in names))


def examine_node(name: str, seconds: float, actuation: str, progress: Progress) -> Findings:
    """Listen to a node for a while, and look at the machine.

    Raises:
        RunLogError: nothing was heard of it.
    """
    from torchperf_ros.observe.top import listen_for

    ear = Ear(name, actuation)
    psutil.cpu_percent()
    run = listen_for(name, seconds, progress, ear.look)
    busy, own, stages = psutil.cpu_percent() / 100.0, ear.parameters, ear.state.stages
    run = run.lives()[-1]
    splits = {
        stage: split(
            run.stage(stage),
            ear.heard(state),
            handed_over=not state.values.get("trigger"),
            sim_time=own.get("use_sim_time", False),
        )
        for stage, state in stages.items()
    }
    sizes = [one.size_bytes for messages in ear.topics.values() for one in messages]
    clocks = [one.clock_ms for one in splits.values() if math.isfinite(one.clock_ms)]
    pid = _pid_here(ear.state.node.get("pid", ""))
    triggers = {stages[stage].values.get("trigger", "") for stage, one in splits.items() if one.frames}
    unheard = next((topic for topic in sorted(triggers) if ear.topics.get(topic) == []), "")
    need = Need(
        pid,
        ear.state.node.get("scheduling", ""),
        own.get("realtime_priority", 10),
        own.get("lock_memory", False),
        max(sizes, default=0),
        sum(one.lost for one in splits.values()),
        max(clocks, key=abs, default=math.nan),
        busy,
        unheard,
        next((ear.state.node[key] for key in _CLOCK_WARNINGS if key in ear.state.node), ""),
    )
    checks = look_around(need)
    lacks = frozenset(check.name for check in checks if check.ok is False)
    cases = tuple(_live_case(ear, run.stage(name), one, lacks) for name, one in splits.items())
    notes = [why for why in ear.problems.values() if why]
    notes += [_silent(ear, stage) for stage, one in splits.items() if not one.frames]
    if actuation in ear.topics and not ear.answers:
        came = (
            f"{len(ear.topics[actuation])} messages of {actuation} came, none with the stamp of an output"
        )
        notes.append(f"{came}: how long the receiver takes is left out")
    notes += [] if own else ["the node's parameters could not be asked for: advice on these is left out"]
    if unheard:
        notes.append(
            f"nothing of {unheard} came to a second subscriber, so camera and transport are one part"
        )
    if pid is None:
        notes.append("the node runs on another machine: the environment is of this one; run it there, too")
    return Findings(f"{name}, live", cases, tuple(advise(cases)), tuple(checks), tuple(notes))


def examine_log(path: Path, runs: Sequence[RunLog]) -> list[Findings]:
    """Each run that was read from a log, as far as the records of frames say.

    Raises:
        RunLogError: they hold no frames.
    """
    found = []
    for run in (life for one in runs for life in one.lives()):
        knows = any(stage.trigger for stage in run.stages)
        splits = [
            split(stage, handed_over=knows and not stage.trigger) for stage in run.stages if len(stage)
        ]
        cases = tuple(_case(run.node, run.stage(one.stage), one) for one in splits)
        if cases:
            notes = (_NOT_IN_A_LOG, *run.missing, *run.troubles)
            found.append(Findings(run.name, cases, tuple(advise(cases)), notes=notes))
    if not found:
        raise RunLogError(
            f"log {path}: holds no frame that was answered; record `/perf/.*` and `/diagnostics`"
        )
    return found


def _case(node: str, log: StageLog, found: Split) -> Case:
    frames = log.frames[log.counted & np.isfinite(log.total_ms)]
    tiers: NDArray[np.int64] = frames["tier"]
    inference_ms: Values = frames["inference_ms"]
    total_ms: Values = frames["total_ms"]
    counts = {
        int(tier): int(count) for tier, count in zip(*np.unique(tiers, return_counts=True), strict=True)
    }
    runs = {
        log.tier_name(tier): float(np.nanmedian(inference_ms[tiers == tier]))
        for tier, count in sorted(counts.items())
        if tier >= 0 and np.isfinite(inference_ms[tiers == tier]).sum() >= _LEAST_RUNS <= count
    }
    received_ns, steps = frames["t_ns"] - total_ms * 1e6, np.diff(frames["seq"])
    intervals = np.diff(received_ns)[steps > 0] / steps[steps > 0] / 1e6
    return Case(
        found,
        node,
        log.budget_ms,
        float(np.median(intervals)) if len(intervals) else math.nan,
        dropped=log.dropped or 0,
        trigger=log.trigger,
        output=log.output,
        tiers=runs,
        tier=log.tier_name(max(counts, key=lambda tier: counts[tier])) if counts else "",
    )


def _whole(names: Iterable[str]) -> list[str]:
    """The stages of these names, which may be those of streams, each once."""
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _live_case(ear: Ear, log: StageLog, found: Split, lacks: frozenset[str]) -> Case:
    state, own = ear.state.stages[found.stage], ear.parameters
    case, values, heard = _case(ear.node, log, found), state.values, ear.heard(state)
    predicted = {
        tier: state.number(f"tier_{tier}_predicted_ms") for tier in values.get("tiers", "").split(",")
    }
    stages, trigger, known = (
        _whole(ear.state.stages),
        values.get("trigger", ""),
        all(map(math.isfinite, predicted.values())),
    )
    return replace(
        case,
        message_bytes=_size(heard.triggers),
        output_bytes=_size(heard.outputs),
        trigger=trigger,
        driver=" and ".join(ear.drivers.get(trigger, [])),
        output=values.get("publishes", ""),
        actuation=ear.actuation,
        tier=state.tier,
        tiers=predicted if known else case.tiers,
        tiers_by="as the ladder predicts" if known else case.tiers_by,
        engine=values.get("engine", ""),
        device=values.get("device", ""),
        lacks=lacks,
        stages=len(stages),
        scheduling=ear.state.node.get("scheduling", ""),
        cores=len(os.sched_getaffinity(0)),
        highest_priority=max((own.get(f"{stage}.priority", 0) for stage in stages), default=0),
        parameters={
            name.removeprefix(f"{_whole([found.stage])[0]}."): value for name, value in own.items()
        },
        waited=_waited(ear.first.get(found.stage, {}), values),
    )


def _silent(ear: Ear, name: str) -> str:
    stage = ear.state.stages[name]
    trigger = stage.values.get("trigger", "")
    if not trigger:
        return f"{name}: {stage.message}"
    if not ear.drivers.get(trigger):
        why = (
            stage.values.get("waits_for")
            or f"{trigger}: no node publishes it; start the driver, or remap the topic"
        )
        return f"{name}: no message on {why}"
    if wrong := next((event.text for event in ear.state.events if f"{trigger}: " in event.text), ""):
        return f"{name}: {wrong}"
    came = (
        f"{len(ear.topics.get(trigger, []))} messages of {' and '.join(ear.drivers[trigger])} came on"
        f" {trigger}"
    )
    return f"{name}: {came}; the stage is {stage.message or 'silent'}"


def _waited(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[int, float]]:
    """By synchronised input: how many frames waited for it meanwhile, and how long together."""
    names = [key.removeprefix("input_").removesuffix("_waited") for key in now if key.endswith("_waited")]
    grown = {
        name: [
            now[key] - before.get(key, 0.0) for key in (f"input_{name}_waited", f"input_{name}_waited_ms")
        ]
        for name in names
    }
    return {name: (int(count), ms) for name, (count, ms) in grown.items() if count > 0}


def _size(messages: list[Message]) -> int:
    return int(np.median([one.size_bytes for one in messages])) if messages else 0


def _pid_here(pid: str) -> int | None:
    """The node's process, if it is one of this machine's."""
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return int(pid) if b"torchperf" in words else None


# -- what is shown


def show(found: Findings, console: Console) -> None:
    def say(text: str, style: str = "", **how: Any) -> None:  # noqa: ANN401 - rich's
        console.print(text, style=style, markup=False, highlight=False, **how)

    answered = any(case.split.frames for case in found.cases)
    for case in found.cases:
        if case.split.frames:
            console.print(_table(case))
        say(f"{sentence(case.split)}\n", "bold")
        for note in case.split.notes:
            say(f"  not split: {note}\n")
    for note in found.notes:
        say(f"note: {note}")
    if answered:
        title = "What to change, what may save the most first"
        say(f"\n{title if found.advice else 'Nothing stands out to change.'}", "bold")
    for number, one in enumerate(found.advice, start=1):
        saves = f"up to {one.saves_ms:.1f} ms of {one.part}"
        console.print(f"{number}. {one.stage}, {saves}: {one.do}", markup=False)
        say(f"     {one.command}", "cyan", soft_wrap=True)
        say(f"   as {one.because}", "grey62")
    if found.checks:
        say("\nThe environment", "bold")
    for check in found.checks:
        word, style = _LOOKS[check.ok]
        say(f"{word} {check.name:12}{check.found}", style)
        if check.ok is False and check.mend:
            say(f"     {check.mend}", "cyan", soft_wrap=True)


def _table(case: Case) -> Table:
    found = case.split
    before, after = (
        [part for part in found.parts if (part.name in AFTER) is late] for late in (False, True)
    )
    rows, styles = [], []
    for part in filter(lambda part: part.count, (*before, found.whole, *after, found.arrival)):
        known = part.name in PARTS
        shares = (
            (f"{part.share:.0%}", "█" * round(min(part.share, 1.0) * _BAR)) if part in before else ("", "")
        )
        figures = (f"{part.p50_ms:.1f}", f"{part.p99_ms:.1f}")
        rows.append((part.name * known, PARTS[part.name] if known else part.name, *figures, *shares))
        styles.append("bold" if part in {found.whole, found.largest} else "")
    table = console_table(("part", "what", ">p50 ms", ">p99 ms", ">share", ""), rows, styles)
    places = " to ".join(filter(None, (case.trigger, case.output)))
    table.title, table.title_justify = f"{found.stage}: {found.frames:,} frames, {places}", "left"
    return table


def as_json(found: Findings) -> dict[str, Any]:
    """Everything that was found, NaN as null."""
    largest = {case.split.stage: case.split.largest.name for case in found.cases if case.split.largest}
    text = json.dumps({**asdict(found), "status": found.status, "largest": largest}, default=sorted)  # sets
    return dict(json.loads(text, parse_constant=lambda _nan: None))
