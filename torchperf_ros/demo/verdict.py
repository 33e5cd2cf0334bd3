"""What came of a drive: one table of the stages, one of the sabotage, and an exit status."""

import math
from dataclasses import dataclass
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.demo.drive_state import DriveState, Injection
from torchperf_ros.telemetry.stage_state import FAR_LATE_MS, StageState

_IN_FLIGHT: Final = 1  # the last frame may still be on its way when the counters are read
_OTHERS_SHARE: Final = 0.1
_RECEIVED_SHARE: Final = 0.95
_WIDTH: Final = 100
_WIDE_ONLY: Final = ("fallbacks", "budget", "restarts")
_DASH: Final = "-"


@dataclass(frozen=True)
class Verdict:
    """Whether every started frame was answered in time.

    Attributes:
        failures: what was not as it should be, one sentence each.
        notes: what is worth knowing and no failure.
    """

    failures: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """0 if there are no failures, else 1."""
        return 1 if self.failures else 0


def judge(state: DriveState) -> Verdict:
    """Look at the final state of a drive."""
    failures: list[str] = []
    notes: list[str] = []
    for stage in state.stages.values():
        unanswered = stage.unanswered
        if not stage.records:
            failures.append(f"{stage.name}: no frame was answered")
        if unanswered is not None and unanswered > _IN_FLIGHT:
            failures.append(f"{stage.name}: {unanswered} started frames were not answered")
        if stage.far_late:
            failures.append(
                f"{stage.name}: {stage.far_late} answers later than {FAR_LATE_MS:.0f} ms after their deadline,"
                f" the worst by {stage.worst_ms:.1f} ms"
            )
        if unanswered is None:
            notes.append(f"{stage.name}: the node told no counters, so only the records seen here were judged")
        missed = (stage.count("answered") or 0) - stage.records
        if missed > _IN_FLIGHT:
            notes.append(f"{stage.name}: {missed} answers were not seen here; the counters are the node's own")
        if starting := stage.count("starting"):
            notes.append(f"{stage.name}: {starting} frames came while it was still starting")
    if not state.player:
        failures.append("player: ended before its time")
    published, received = state.player.get("images", 0), next(iter(state.stages.values())).count("frames")
    if received is not None and received < published * _RECEIVED_SHARE:
        notes.append(
            f"player: of {published} images only {received} reached the node; with Fast DDS, images need"
            " a transport for large messages (see README) and no ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST"
        )
    if state.player.get("late"):
        notes.append(
            f"player: {state.player['late']} messages were late, the worst by {state.player['worst_late_ms']:.1f} ms"
        )
    notes += [f"node: {text}" for key, text in state.node.items() if key.endswith("_warning")]
    if state.others_share > _OTHERS_SHARE:
        notes.append(f"machine: other programs took {state.others_share:.0%} of the processor meanwhile")
    lost = sum(injection.record is None for injection in state.injections)
    if lost:
        notes.append(f"sabotage: the frames of {lost} injections were not seen here")
    return Verdict(tuple(failures), tuple(notes))


def summary(state: DriveState, verdict: Verdict, width: int = _WIDTH) -> RenderableType:
    """The end of a drive in words and tables; a narrow terminal gets fewer columns."""
    parts: list[RenderableType] = [_stage_table(state, narrow=width < _WIDTH)]
    if state.injections:
        parts.append(_sabotage_table(state))
    parts += [Text(f"  note  {note}", style="dim") for note in verdict.notes]
    parts += [Text(f"  FAIL  {failure}", style="bold red") for failure in verdict.failures]
    if not verdict.failures:
        answered = sum(_answered(stage) for stage in state.stages.values())
        worst_ms = max(stage.worst_ms for stage in state.stages.values())
        latest = f"{worst_ms:.2f} ms after" if worst_ms > 0 else f"{-worst_ms:.2f} ms before"
        parts.append(
            Text(
                f"  PASS  every started frame was answered: {answered:,}, the latest {latest} its deadline",
                "bold green",
            )
        )
    return Group(*parts)


def report(state: DriveState, verdict: Verdict) -> dict[str, Any]:
    """The same for machines; numbers that are not known are null."""
    return {
        "title": state.title,
        "seconds": round(state.elapsed_s, 3),
        "exit_status": verdict.exit_status,
        "failures": list(verdict.failures),
        "notes": list(verdict.notes),
        "player": state.player,
        "others_share": round(state.others_share, 3) if math.isfinite(state.others_share) else None,
        "stages": {
            stage.name: {
                "records": stage.records,
                "unanswered": stage.unanswered,
                "worst_lateness_ms": round(stage.worst_ms, 3) if math.isfinite(stage.worst_ms) else None,
                "later_than_5_ms": stage.far_late,
                "diagnostics": stage.values,
            }
            for stage in state.stages.values()
        },
        "sabotage": [_injection(injection) for injection in state.injections],
    }


def _injection(injection: Injection) -> dict[str, Any]:
    record = injection.record
    return {
        "stage": injection.stage,
        "kind": injection.kind,
        "stamp_ns": injection.stamp_ns,
        "pid": injection.pid,
        "outcome": record.outcome.word if record else None,
        "fallback": record.fallback.word if record and record.fallback is not None else None,
        "lateness_ms": round(record.lateness_ms, 3) if record and math.isfinite(record.lateness_ms) else None,
    }


def _answered(stage: StageState) -> int:
    told = stage.count("answered")
    return stage.records if told is None else told


def _stage_table(state: DriveState, *, narrow: bool) -> Table:
    table = _table(f"{state.title}, {state.elapsed_s:.1f} s", "stage")
    rows = [_stage_row(stage) for stage in state.stages.values()]
    shown = [name for name in rows[0] if not (narrow and name in _WIDE_ONLY)]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for stage, row in zip(state.stages, rows, strict=True):
        table.add_row(stage, *(row[name] for name in shown))
    table.caption = " in ms: p50, p99, and latest, past the deadline; dropped: a newer one came first"
    return table


def _stage_row(stage: StageState) -> dict[str, str]:
    answered, on_time = stage.count("answered"), stage.count("on_time")
    return {
        "frames": _number(stage.count("frames")),
        "dropped": _number(_sum([stage.count(key) for key in ("superseded", "stale")])),
        "answered": _number(_answered(stage)),
        "on time": f"{on_time / answered:.1%}" if answered and on_time is not None else _DASH,
        "fallbacks": _number(_sum([stage.count(f"fallback_{fallback.word}") for fallback in Fallback])),
        "p50": _rounded(stage.values.get("p50_ms")),
        "p99": _rounded(stage.values.get("p99_ms")),
        "budget": _rounded(stage.values.get("budget_ms")),
        "latest": f"{stage.worst_ms:+.2f}" if math.isfinite(stage.worst_ms) else _DASH,
        "restarts": _number(stage.count("restarts")),
    }


def _sabotage_table(state: DriveState) -> Table:
    table = _table("sabotage: what was injected, and how the frames that it hit were answered", "fault")
    table.add_column("times", justify="right")
    table.add_column("latest", justify="right", no_wrap=True)
    table.add_column("answered", ratio=1)
    for kind, answers in state.answers().items():
        seen = [i.record for i in state.injections if i.kind == kind and i.record is not None]
        worst = max((record.lateness_ms for record in seen if record.outcome is not Outcome.STARTING), default=math.nan)
        words = ", ".join(f"{count} {answer}" for answer, count in answers.most_common())
        table.add_row(kind, str(answers.total()), f"{worst:+.2f}" if math.isfinite(worst) else _DASH, words)
    return table


def _table(title: str, first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=f" {title}", title_justify="left", caption_justify="left", expand=True)
    table.padding = (0, 0, 0, 1)
    table.title_style, table.caption_style = "bold", "dim"
    table.add_column(first, no_wrap=True)
    return table


def _sum(counts: list[int | None]) -> int | None:
    return None if any(count is None for count in counts) else sum(count or 0 for count in counts)


def _rounded(text: str | None) -> str:
    try:
        return f"{float(text):.1f}" if text else _DASH
    except ValueError:
        return _DASH


def _number(count: int | None) -> str:
    return _DASH if count is None else f"{count:,}"
