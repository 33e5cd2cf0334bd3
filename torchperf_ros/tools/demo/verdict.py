"""What is known about a drive, and what came of it.

A table of the stages, one of the sabotage, and an exit status.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from torchperf_ros.api.clock import NS_PER_MS
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.api.text import console_table, percent
from torchperf_ros.observe.telemetry.node_state import NodeState, SeenFrame, StageState
from torchperf_ros.observe.top_view import DASH, short

_IN_FLIGHT: Final = 1  # the last frame may still be on its way when the counters are read
_OTHERS_SHARE: Final = 0.1
_RECEIVED_SHARE: Final = 0.95
# No answer may leave later than this after its deadline.
PUNCTUAL_MS: Final = 1.0
# An answer sets out this long before its deadline at most.
_BEFORE_MS: Final = 4.0


class Shares(NamedTuple):
    """Which shares of the frames that came, 0 to 1, a stage needs.

    With any answer, and with their own result in time.

    On an idle machine with two cores 98 % have their own result in time under sabotage, and 99.9 % without.
    """

    answered: float
    on_time: float


# What PASS takes; by whether the drive is sabotaged.
NEEDED: Final = {False: Shares(0.99, 0.95), True: Shares(0.95, 0.85)}
# Exit statuses; 2 is bad input.
PASSED, FAILED, TOO_BUSY = 0, 1, 3


@dataclass
class Injection:
    """One line of a saboteur's journal, and the frame that it hit, as soon as that was seen."""

    stage: str
    kind: str
    stamp_ns: int
    pid: int
    record: SeenFrame | None = None

    @property
    def answer(self) -> str:
        return "not seen" if self.record is None else self.record.answer

    @property
    def report(self) -> dict[str, Any]:
        """The same for machines; null for what is not known."""
        seen = self.record
        fallback = seen and seen.fallback
        return {
            **{name: getattr(self, name) for name in ("stage", "kind", "stamp_ns", "pid")},
            "outcome": seen and seen.outcome.word,
            "fallback": fallback and fallback.word,
            "lateness_ms": seen and _finite(seen.lateness_ms),
        }


class DriveState(NodeState):
    """The node, its player and its saboteurs: everything that the view and the verdict are made of."""

    def __init__(self, title: str, seconds: float) -> None:
        super().__init__("/perf")
        self.title, self.seconds = title, seconds  # what is driven, and how long it is to last
        self.sabotaged, self.cameras = False, 1
        self.phase = "starting"  # or `driving`, or what is going on in words
        self.injections: list[Injection] = []  # what was sabotaged
        self.player: dict[str, Any] = {}  # what the player wrote at its end
        self.player_ready = False
        # of a bare timer beside the node: ROS time of a late wake-up, and its lateness
        self.stalls_ns: list[tuple[int, int]] = []
        self.ended_ns = 0  # since when the node's counters are those of the whole drive
        self.others_share = math.nan  # of the processor, that other programs or the host took, 0 to 1

    def stood_still_ms(self, frame: SeenFrame) -> float:
        """The longest time that the machine stood still, while the answer of a frame should have left."""
        begun_ns = frame.published_ns - (frame.lateness_ms + _BEFORE_MS) * NS_PER_MS
        stalls_ns = (one for at, one in self.stalls_ns if at >= begun_ns and at - one <= frame.published_ns)
        return max(stalls_ns, default=0) / NS_PER_MS

    def on_player(self, line: str) -> None:
        values = json.loads(line) if line.startswith("{") else {"event": "note", "text": line}
        word = values.pop("event")
        if word == "done":
            self.player = values
        elif word == "ready":
            self.player_ready = True
        else:
            self.event("note", "player", values["text"])

    def on_journal(self, stage: str, line: str) -> None:
        entry = json.loads(line)
        self.injections.append(Injection(stage, entry["kind"], entry["stamp_ns"], entry["pid"]))

    def match(self) -> None:
        """Find the frames that injections have hit; how each was answered is an event."""
        for hit in self.injections:
            stage = self.stages.get(hit.stage)
            if (
                hit.record is None
                and stage is not None
                and (near := stage.nearest(hit.stamp_ns)) is not None
            ):
                hit.record = near
                took = f"after {near.total_ms:.1f} ms of {near.budget_ms:.0f}"
                self.event("sabotage", hit.stage, f"{hit.kind} in pid {hit.pid}: {hit.answer} {took}")


class DriveResult(NamedTuple):
    """What was not as it should be, and what is worth knowing.

    `short`: what a stage lacks to pass, for which a busy machine may be the reason. `busy`: what else took
    the machine, if it was much.
    """

    failures: list[str]
    short: list[str]
    notes: list[str]
    busy: str = ""

    @property
    def status(self) -> int:
        if self.failures or (self.short and not self.busy):
            return FAILED
        return TOO_BUSY if self.short else PASSED


def judge(state: DriveState) -> DriveResult:
    failures = [] if state.stages else ["node: reported no stages"]
    failures += [] if state.player else ["player: ended before its time"]
    counted = state.reported_ns >= state.ended_ns
    short = (
        [] if counted else ["node: it reported nothing after the drive, so its last frames were not judged"]
    )
    notes: list[str] = []
    for stage in state.stages.values():
        if not stage.records:
            failures.append(f"{stage.name}: no frame was answered")
        if stage.lost is None:
            notes.append(
                f"{stage.name}: the node reported no counters, so only the records seen here were judged"
            )
        elif stage.lost > _IN_FLIGHT and counted:
            failures.append(f"{stage.name}: {stage.lost} started frames were not answered")
        short += [f"{stage.name}: {text}" for text in _short_of(stage, state)]
        if starting := stage.count("starting"):
            notes.append(f"{stage.name}: {starting} frames came while it was still starting")
        if stage.unanswered:
            notes.append(f"{stage.name}: {stage.unanswered} frames had nothing to publish, yet or any more")
    published = state.player.get("images", 0)
    received = _received(list(state.stages.values())[: state.cameras])
    if received is not None and received < published * _RECEIVED_SHARE:
        notes.append(
            f"player: of {published} images only {received} reached the node; with Fast DDS, images need"
            " a transport for large messages (see README) and no ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST"
        )
    if late := state.player.get("late"):
        notes.append(
            f"player: {late} messages were late, the worst by {state.player['worst_late_ms']:.1f} ms"
        )
    notes += [f"node: {text}" for key, text in state.node.items() if key.endswith("_warning")]
    if state.others_share > _OTHERS_SHARE:
        busy = f"other programs took {state.others_share:.0%} of the processor meanwhile"
        notes.append(f"machine: {busy}")
    else:
        busy = ""
    if state.sabotaged and not state.injections:
        short.append("sabotage: no fault was injected, as the workers did not all serve at any time")
    return DriveResult(failures, short, notes, busy)


def _received(cameras: Sequence[StageState]) -> int | None:
    counts = [stage.count("frames") for stage in cameras]
    return None if None in counts or not counts else sum(filter(None, counts))


def _short_of(stage: StageState, state: DriveState) -> list[str]:
    found, needed = [], NEEDED[state.sabotaged]
    if (came := stage.ended + (stage.dropped or 0)) and stage.records:
        without = stage.unanswered + (stage.dropped or 0)
        if without > (1.0 - needed.answered) * came:
            found.append(
                f"{without:,} of {came:,} frames had no answer; {percent(1 - needed.answered, 0)} may have"
                " none"
            )
        if stage.on_time_share < needed.on_time:
            share = percent(stage.on_time_share)
            found.append(
                f"{share} of the frames had their own result in time; {percent(needed.on_time, 0)} have to"
            )
    own_ms = max((one.lateness_ms - state.stood_still_ms(one) for one in stage.late), default=0.0)
    if own_ms > PUNCTUAL_MS:
        found.append(
            f"an answer left {stage.worst_ms:.1f} ms after its deadline; {PUNCTUAL_MS:g} ms is allowed beyond"
            " what a bare timer was late then"
        )
    return found


def summary(state: DriveState, result: DriveResult) -> RenderableType:
    parts: list[RenderableType] = [*_stage_table(state)]
    if state.injections:
        parts += _sabotage_table(state)
    parts += [Text(f"  note  {note}", style="dim") for note in result.notes]
    if result.status == TOO_BUSY:
        parts += [Text(f"  note  {text}", style="dim") for text in result.short]
        text = f"  BUSY  no verdict: {result.busy}; drive again when the machine has time"
        parts.append(Text(text, style="bold yellow"))
    elif result.status == FAILED:
        parts += [Text(f"  FAIL  {text}", style="bold red") for text in result.failures + result.short]
    else:
        stages = state.stages.values()
        worst_ms = max(stage.worst_ms for stage in stages)
        came = sum(stage.ended + (stage.dropped or 0) for stage in stages)
        latest = f"the latest {abs(worst_ms):.2f} ms {'after' if worst_ms > 0 else 'before'} its deadline"
        latest += ", as a bare timer was late then: the machine stood still" * (worst_ms > PUNCTUAL_MS)
        needed = NEEDED[state.sabotaged]
        parts.append(
            Text(
                f"  PASS  {sum(map(_answered, stages)):,} of {came:,} frames were answered, {latest}; of"
                f" each stage {percent(needed.answered, 0)} have to be, {percent(needed.on_time, 0)} by"
                " their own result in time",
                "bold green",
            )
        )
    return Group(*parts)


def report(state: DriveState, result: DriveResult) -> dict[str, Any]:
    """The same for machines; numbers that are not known are null."""
    return {
        "title": state.title,
        "seconds": round(state.elapsed_s, 3),
        "exit_status": result.status,
        "failures": result.failures,
        "short": result.short,
        "busy": result.busy,
        "notes": result.notes,
        "player": state.player,
        "others_share": _finite(state.others_share),
        "stood_still_ms": [late_ns / NS_PER_MS for _, late_ns in state.stalls_ns],
        "stages": {
            s.name: {
                "records": s.records,
                "unanswered": s.unanswered,
                "lost": s.lost,
                "diagnostics": s.values,
                "worst_lateness_ms": _finite(s.worst_ms),
                "later_than_5_ms": s.far_late,
            }
            for s in state.stages.values()
        },
        "sabotage": [hit.report for hit in state.injections],
    }


def _finite(number: float) -> float | None:
    return round(number, 3) if math.isfinite(number) else None


def _answered(stage: StageState) -> int:
    counted = stage.count("answered")
    return stage.records if counted is None else counted


def _stage_table(state: DriveState) -> Iterator[RenderableType]:
    rows = []
    for stage in state.stages.values():
        counts = stage.count("frames"), stage.dropped, _answered(stage), stage.count("restarts")
        frames, dropped, answered, restarts = (DASH if count is None else f"{count:,}" for count in counts)
        on_time = f"{stage.on_time_share:.1%}" if math.isfinite(stage.on_time_share) else DASH
        p50, p99 = short(stage.number("p50_ms")), short(stage.number("p99_ms"))
        latest = _lateness(stage.worst_ms)
        rows.append([stage.name, frames, dropped, answered, on_time, p50, p99, latest, restarts])
    yield Text(f" {state.title}, {state.elapsed_s:.1f} s", style="bold")
    heads = ">frames", ">dropped", ">answered", ">on time", ">p50", ">p99", ">latest", ">restarts"
    yield Padding(console_table(("stage", *heads), rows), (0, 0, 0, 1))
    yield Text(
        " in ms: p50, p99, and latest, past the deadline; dropped: a newer one came first", style="dim"
    )


def _sabotage_table(state: DriveState) -> Iterator[RenderableType]:
    rows = []
    for kind in dict.fromkeys(hit.kind for hit in state.injections):
        hits = [hit for hit in state.injections if hit.kind == kind]
        records = [hit.record for hit in hits if hit.record is not None]
        late_ms = [record.lateness_ms for record in records if record.outcome is not Outcome.STARTING]
        words = [f"{count} {answer}" for answer, count in Counter(hit.answer for hit in hits).most_common()]
        rows.append([kind, str(len(hits)), _lateness(max(late_ms, default=math.nan)), ", ".join(words)])
    title = "sabotage: what was injected, and how the frames that it hit were answered"
    yield Text(f" {title}", style="bold")
    heads = ("fault", ">times", ">latest", "answered")
    yield Padding(console_table(heads, rows), (0, 0, 0, 1))


def _lateness(ms: float) -> str:
    return f"{ms:+.2f}" if math.isfinite(ms) else DASH
