"""Commands about the versions of a running node's stages: start, serve, back, end."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import typer
from typer import Argument

from torchperf_ros.tools.shell import NodeName, fail, need

_Stage = Annotated[str, Argument(help="For example perception.")]
# A candidate that compiles as it starts takes that long; the command shows how far it is.
_TIMEOUT_S: Final = 120.0
_BAD: Final = ("refused", "rolled back", "given up", "cannot")


def start(
    candidate: Annotated[
        Path, Argument(help="YAML file of the stage's parameters that differ, and its `version`.")
    ],
    stage: _Stage = "perception",
    name: NodeName = "/perf",
) -> None:
    """Have a running node take another version of a stage's model beside the one that serves.

    It gets the same frames, in the time that these leave, and publishes nothing.
    `torchperf top` compares the two: times, deadlines, outputs.

    Example: torchperf rollout start candidate.yaml perception

    Exit status: 0 if it is beside, 1 if it cannot be and why, 2 if the input cannot be used.
    """
    if not candidate.is_file():
        fail(f"candidate {candidate} is not there")
    file = str(candidate.resolve())
    _change(name, stage, {"candidate_serves": False, "candidate": file}, ": shadow")


def serve(stage: _Stage = "perception", name: NodeName = "/perf") -> None:
    """Have the version that is beside a stage serve; the other one stays warm beside it.

    It comes back by itself as soon as a guard breaks: workers that die, a safe
    stop, missed deadlines, refused plans, memory that grows. How many outputs
    differ is shown, and takes it back under a signed plan only.

    Example: torchperf rollout serve perception

    Exit status: 0 if it serves, 1 if not.
    """
    _change(name, stage, {"candidate_serves": True}, ": serves")


def back(stage: _Stage = "perception", name: NodeName = "/perf") -> None:
    """Have the stage's own version serve again, at once; the other one stays beside it.

    Example: torchperf rollout back perception

    Exit status: 0 if it serves again, 1 if not.
    """
    _change(name, stage, {"candidate_serves": False}, ": shadow")


def end(stage: _Stage = "perception", name: NodeName = "/perf") -> None:
    """Have only the stage's own version, which serves at once if it did not.

    Example: torchperf rollout end perception

    Exit status: 0 if that is so, 1 if not.
    """
    _change(name, stage, {"candidate_serves": False, "candidate": ""}, "")


def _change(name: str, stage: str, values: Mapping[str, object], wanted: str) -> None:
    """Set parameters of the stage, and print its state until `/diagnostics` ends with `wanted`.

    A `wanted` of "" waits until nothing is left of a candidate.
    """
    need("rclpy")
    from torchperf_ros.node.services import ServiceFailed, set_parameters
    from torchperf_ros.observe.telemetry.node_state import NodeState
    from torchperf_ros.observe.top.top import NodeListener

    try:
        set_parameters(name, {f"{stage}.{key}": value for key, value in values.items()}, _TIMEOUT_S)
    except ServiceFailed as error:
        fail(str(error), 1)
    state, give_up_at, shown = NodeState(name), time.monotonic() + _TIMEOUT_S, ""
    with NodeListener(state, "torchperf_rollout") as listener:
        listener.listen(1.5)  # the next report came after the change
        while time.monotonic() < give_up_at:
            found = state.stages.get(stage)
            now = "" if found is None else found.values.get("candidate", "")
            if now != shown:
                typer.echo(f"{stage}: {now or 'its own version only'}")
                shown = now
            if found is not None and (now.endswith(wanted) if wanted else not now):
                typer.echo(f"{stage}: version {found.values.get('version', 'base')} serves")
                return
            if any(word in now for word in _BAD):
                fail(f"{stage}: {now}", 1)
            listener.listen(0.5)
    fail(
        f"{stage}: not within {_TIMEOUT_S:g} s; /diagnostics of {name} says:"
        f" {shown or 'nothing of a candidate'}",
        1,
    )
