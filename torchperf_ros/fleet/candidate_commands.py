"""Commands about the versions of a running node's stages: start, serve, back, end."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from typer import Argument, Option

from torchperf_ros.tools.shell import NodeName, fail, need

_Stage = Annotated[str, Argument(help="For example perception.")]
_Timeout = Annotated[float, Option("--timeout", min=1.0, help="How long to wait, in seconds.")]
_BAD: Final = ("refused", "rolled back", "given up", "cannot")


def start(
    candidate: Annotated[
        Path, Argument(help="YAML file of the stage's parameters that differ, and its `version`.")
    ],
    stage: _Stage = "perception",
    name: NodeName = "/perf",
    timeout_s: _Timeout = 120.0,
) -> None:
    """Have a running node take another version of a stage's model beside the one that serves.

    It gets the same frames, in the time that these leave, and publishes nothing.
    `torchperf top` compares the two: times, deadlines, outputs.

    Example: torchperf rollout start candidate.yaml perception

    Exit status: 0 if it is beside, 1 if it cannot be and why, 2 if the input cannot be used.
    """
    need("rclpy")
    if not candidate.is_file():
        fail(f"candidate {candidate} is not there")
    _set(
        name,
        {f"{stage}.candidate_serves": False, f"{stage}.candidate": str(candidate.resolve())},
        timeout_s,
    )
    _wait(name, stage, timeout_s, ": shadow")


def serve(stage: _Stage = "perception", name: NodeName = "/perf", timeout_s: _Timeout = 120.0) -> None:
    """Have the version that is beside a stage serve; the other one stays warm beside it.

    It comes back by itself as soon as a guard breaks: workers that die, a safe
    stop, missed deadlines, refused plans, memory that grows. How many outputs
    differ is shown, and takes it back under a signed plan only.

    Example: torchperf rollout serve perception

    Exit status: 0 if it serves, 1 if not.
    """
    need("rclpy")
    _set(name, {f"{stage}.candidate_serves": True}, timeout_s)
    _wait(name, stage, timeout_s, ": serves")


def back(stage: _Stage = "perception", name: NodeName = "/perf", timeout_s: _Timeout = 15.0) -> None:
    """Have the stage's own version serve again, at once; the other one stays beside it.

    Example: torchperf rollout back perception

    Exit status: 0 if it serves again, 1 if not.
    """
    need("rclpy")
    _set(name, {f"{stage}.candidate_serves": False}, timeout_s)
    _wait(name, stage, timeout_s, ": shadow")


def end(stage: _Stage = "perception", name: NodeName = "/perf", timeout_s: _Timeout = 15.0) -> None:
    """Have only the stage's own version, which serves at once if it did not.

    Example: torchperf rollout end perception

    Exit status: 0 if that is so, 1 if not.
    """
    need("rclpy")
    _set(name, {f"{stage}.candidate_serves": False, f"{stage}.candidate": ""}, timeout_s)
    _wait(name, stage, timeout_s, "")


def _set(name: str, values: Mapping[str, object], timeout_s: float) -> None:
    from torchperf_ros.node.services import ServiceFailed, set_parameters

    try:
        set_parameters(name, values, timeout_s)
    except ServiceFailed as error:
        fail(str(error), 1)


def _wait(name: str, stage: str, timeout_s: float, wanted: str) -> None:
    """Say how it goes until `/diagnostics` says what is wanted; "": nothing more of a candidate."""
    from torchperf_ros.observe.telemetry.node_state import NodeState
    from torchperf_ros.observe.top.listener import NodeListener

    state, give_up_at, said = NodeState(name), time.monotonic() + timeout_s, ""
    with NodeListener(state, "torchperf_rollout") as listener:
        listener.listen(1.5)  # a report that came after the change
        while time.monotonic() < give_up_at:
            found = state.stages.get(stage)
            now = "" if found is None else found.values.get("candidate", "")
            if now != said:
                typer.echo(f"{stage}: {now or 'its own version only'}")
                said = now
            if found is not None and (now.endswith(wanted) if wanted else not now):
                typer.echo(f"{stage}: version {found.values.get('version', 'base')} serves")
                return
            if any(word in now for word in _BAD):
                fail(f"{stage}: {now}", 1)
            listener.listen(0.5)
    fail(
        f"{stage}: not within {timeout_s:g} s; /diagnostics of {name} says:"
        f" {said or 'nothing of a candidate'}",
        1,
    )
