"""Alerts about a stage: what, how bad, and the numbers that go with it."""

from collections.abc import Mapping
from dataclasses import replace

from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.outcome import Fallback, GuardVerdict, Outcome
from torchperf_ros.settings.stage_options import STALE
from torchperf_ros.stage.frame import Answer, Frame
from torchperf_ros.stage.health import SUPERSEDED_SHARE, Flow

_KINDS = {
    Outcome.BAD_INPUT: "bad input",
    Outcome.INVALID: "invalid output",
    Outcome.ERROR: "model error",
    Outcome.PARTIAL: "partial result",
}
# Where something else was published before the deadline; otherwise it is the deadline that was
# missed.
_IN_TIME_KINDS = {
    Outcome.LATE: "result too slow",
    Outcome.CRASHED: "worker failed",
    Outcome.HUNG: "worker failed",
}


def answer_alert(
    stage: str, answer: Answer, misses_in_a_row: int, sustained_misses: int, before: Frame | None
) -> Alert | None:
    """An alert about an answered frame, None if it was on time or the stage still starts.

    `before`: the last frame of the stage that was not stale.
    """
    outcome, frame = answer.outcome, answer.frame
    if outcome in {Outcome.ON_TIME, Outcome.STARTING}:
        return None
    in_time = answer.lateness_ms <= 0 and answer.fallback is not Fallback.NONE
    kinds = _KINDS | _IN_TIME_KINDS if in_time else _KINDS
    took, budget = f"{answer.total_ms:.3f}", f"{answer.budget_ms:.3f}"
    values = {
        "seq": str(frame.seq),
        "outcome": outcome.word,
        "misses_in_a_row": str(misses_in_a_row),
        "fallback": answer.fallback.word if answer.fallback is not None else "",
        "value": took,
        "baseline": budget,
        "total_ms": took,
        "budget_ms": budget,
    }
    level = Level.ERROR if misses_in_a_row >= sustained_misses else Level.WARN
    if outcome is Outcome.LATE and frame.stale:
        values |= {"age_ms": f"{frame.age_ms:.3f}", "wait_ms": f"{answer.wait_ms:.3f}"}
        return _alert(level, f"{stage}: {STALE}", _why_stale(answer.reason, frame, before), values)
    return _alert(level, f"{stage}: {kinds.get(outcome, 'deadline missed')}", answer.reason, values)


def _why_stale(reason: str, frame: Frame, before: Frame | None) -> str:
    reason = reason.removeprefix(f"{STALE}: ")
    if frame.gone_ms < frame.budget_ms or frame.comes_from_a_stage:
        return reason
    usual = (
        "no frame was younger"
        if before is None
        else f"frame {before.seq} before it was {before.age_ms:.1f} ms old"
    )
    return f"{reason}; {usual}; compare the clocks of both hosts, and the camera's latency with budget_ms"


def guard_alert(
    stage: str, answer: Answer, reason: str, values: Mapping[str, str], *, shadow: bool
) -> Alert:
    """An alert about an output that the guard did not let pass as it was, or, in shadow, would not have."""
    word = "" if answer.check is None else answer.check.word
    what = "plan unchecked" if answer.check is GuardVerdict.UNCHECKED else "plan refused"
    level = Level.ERROR if answer.check is GuardVerdict.UNAVOIDABLE else Level.WARN
    name = f"{stage}: {what}, in shadow" if shadow else f"{stage}: {what}"
    return _alert(level, name, reason, {"seq": str(answer.frame.seq), "verdict": word, **values})


def superseded_alert(stage: str, flow: Flow) -> Alert:
    """An alert that too many frames are superseded; see `SupersededRule`."""
    advice = "a faster tier or engine, or fewer frames, would answer each"
    values = {
        "value": f"{100 * flow.share:.1f}",
        "baseline": f"{100 * SUPERSEDED_SHARE:.0f}",
        "unit": "%",
        "received": str(flow.received),
        "superseded": str(flow.superseded),
    }
    return _alert(Level.WARN, f"{stage}: drops", f"{flow.words}; {advice}", values)


def clock_alert(stage: str, text: str) -> Alert:
    """A warning that the stamps of a guard's source are not ROS time; of each source it comes once."""
    return replace(_alert(Level.WARN, f"{stage}: clock", text, {}), once=True)


def death_alert(stage: str, reason: str, pid: int, restarts: int, *, lasting: bool) -> Alert:
    """An alert about a worker's death; `lasting` if it is one too many."""
    level = Level.ERROR if lasting else Level.WARN
    values = {"pid": str(pid), "restarts": str(restarts)}
    return replace(_alert(level, f"{stage}: worker died", reason, values), logged=True)


def change_alert(stage: str, what: str, text: str) -> Alert:
    """A warning that a stage works otherwise, by its `model` or an `action`.

    Each is another, so none is held back.
    """
    return replace(_alert(Level.WARN, f"{stage}: {what}", text, {}), once=True, logged=True)


def _alert(level: Level, name: str, text: str, values: dict[str, str]) -> Alert:
    first_line, _, detail = text.partition("\n")
    return Alert(level, name, first_line, values | ({"detail": detail} if detail else {}))
