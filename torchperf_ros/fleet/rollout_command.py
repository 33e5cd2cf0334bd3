"""The commands `torchperf rollout`.

Plans and keys, how a roll-out stands, its next step, and a fleet to try it on.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer import Argument, Option

from torchperf_ros.api.errors import ConfigError
from torchperf_ros.api.text import console_table
from torchperf_ros.settings.files import read_bounded
from torchperf_ros.tools.shell import (
    Command,
    CommandGroup,
    File,
    Files,
    NodeName,
    Texts,
    check_outputs,
    console,
    fail,
    files_by_suffix,
    follow,
    need,
    outputs_option,
    pairs,
    progress_bars,
    say,
    write_output,
)

if TYPE_CHECKING:
    from torchperf_ros.fleet.plan import RolloutPlan
    from torchperf_ros.fleet.records import Brought
    from torchperf_ros.fleet.status import Move, RolloutStanding

_LIBRARIES: Final = ("cryptography", "mmh3", "openfeature")
_PLAIN_WIDTH: Final = 160
_MOST_NAMED: Final = 10
_YAML: Final = (".yaml", ".yml")
# A candidate that compiles as it starts takes that long; the command shows how far it is.
_TIMEOUT_S: Final = 120.0
_BAD: Final = ("refused", "rolled back", "given up", "cannot")
# What each action sets of the stage, and how `candidate` on `/diagnostics` ends once that is so.
_ACTIONS: Final[dict[str, tuple[dict[str, object], str]]] = {
    "start": ({"candidate_serves": False}, ": shadow"),
    "serve": ({"candidate_serves": True}, ": serves"),
    "back": ({"candidate_serves": False}, ": shadow"),
    "end": ({"candidate_serves": False, "candidate": ""}, ""),
}
# Of the simulated fleet: the same plan gives the same figures.
_SEED: Final = 1

rollout = typer.Typer(
    cls=CommandGroup,
    help="""New versions onto a fleet: signed plans, steps, verdicts, and the way back.

    A plan is a signed file that each vehicle reads for itself; there is no server.
    It names a candidate, the vehicles and the steps. Vehicles bring records home,
    and `status`, `advance`, `hold` and `rollback` are for the plan's owner:
    docs/rollout.md has the whole way.
    """,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Plan = Annotated[Path, Argument(help="A plan: .yaml as `new` writes it, or signed.")]
Signed = Annotated[Path, Argument(help="The signed plan.")]
Folders = Annotated[list[Path] | None, Argument(metavar="DIR...", help="What vehicles brought home.")]
Public = Annotated[Path, Option("--key", help="The public key that vehicles trust; not for a .yaml.")]
Private = Annotated[Path, Option("--key", help="The private key that signs.")]
Write = Annotated[bool, Option("--write", help="Write the next plan; without it, only say what would be.")]
_KEY, _PUBLIC = Path("rollout.key"), Path("rollout.key.pub")


@rollout.command(cls=Command)
def keygen(
    private: Annotated[Path, Argument(help="The private key's file; .pub is added.")] = _KEY,
) -> None:
    """Make the pair of keys: one signs plans, the other one goes onto every vehicle.

    Keep the private one off the vehicles. It cannot be made again: with another
    key, every vehicle needs the new public one.

    Example: torchperf rollout keygen rollout.key

    Exit status: 0, or 2 if one is there already.
    """
    need(*_LIBRARIES)
    from torchperf_ros.fleet.signature import make_keys

    public = make_keys(private)
    typer.echo(f"wrote {private}, which signs, and {public}, which vehicles trust")


@rollout.command(cls=Command)
def new(
    output: Annotated[Path, Option("--output", "-o", help="The plan to write, to be edited and signed.")],
    stage: Annotated[str, Option(help="The stage that gets the candidate.")],
    version: Annotated[str, Option(help="The candidate's name, for example 7.2.")],
    set_: Annotated[
        Texts, Option("--set", metavar="NAME=VALUE", help="A parameter that differs; repeatable.")
    ] = None,
    file: Annotated[Files, Option(metavar="FILE", help="Has to be there unchanged; repeatable.")] = None,
) -> None:
    """Write a plan to edit: the candidate, the steps 1, 5, 20, 50, 100 %, the guards.

    Values of --set are YAML, as in a parameter file. Of each --file the plan holds
    the SHA-256, and its path from the plan's folder: vehicles look for it there.

    Its name and `targeting`, a rule of which vehicles it is for, are edited in the file.

    Example: torchperf rollout new -o plan.yaml --stage perception --version 7.2
             --set 'packages=[detector-7.2.pt2]' --file detector-7.2.pt2

    Exit status: 0, or 2 for a value that is not allowed.
    """
    need(*_LIBRARIES)
    from torchperf_ros.fleet.plan import new_plan, plan_text, utc_now
    from torchperf_ros.settings.params_file import parse_value
    from torchperf_ros.workers.package_manifest import file_sha256

    check_outputs({"--output": output}, file or ())
    if output.exists():
        fail(f"--output {output}: is there already; remove it, or name another file")
    given = pairs("--set", set_ or (), "=", "NAME=VALUE, a parameter of the stage and its value")
    sums = {
        os.path.relpath(path, output.parent): _found(path, "--file", file_sha256) for path in file or ()
    }
    values: dict[str, Any] = {
        "name": f"{stage}-{version}",
        "stage": stage,
        "version": version,
        "files": sums,
        "candidate": {key: parse_value(key, text) for key, text in given.items()},
    }
    plan = new_plan(values, utc_now())
    write_output(output, plan_text(plan))
    typer.echo(f"wrote {output}; edit it, then: torchperf rollout sign {output}")


@rollout.command(cls=Command)
def sign(
    plan: Annotated[Path, Argument(help="The plan, YAML.")],
    key: Private = _KEY,
    output: Annotated[
        File, Option("--output", "-o", metavar="FILE", help="Default: PLAN as .json.")
    ] = None,
    gate: Annotated[
        Files, Option(metavar="FILE", help="JSON of compare, drive or a bench: has to be good.")
    ] = None,
) -> None:
    """Sign a plan: the file that goes onto vehicles, by any way, on any medium.

    What vehicles would refuse is not signed. A vehicle takes a plan only if its
    serial is greater than that of the last one. With --gate nothing is signed
    unless `torchperf compare -o` (.json) found nothing worse, `torchperf drive -o` hit
    nothing (drive.json), and `./run bench safety --json`, or another benchmark, met
    its targets.

    Examples: torchperf rollout sign plan.yaml --key rollout.key -o plan.json
              torchperf rollout sign plan.yaml --gate verdict.json --gate safety.json

    Exit status: 0, 1 if a gate is closed, or 2 for a file that cannot be used.
    """
    need(*_LIBRARIES)
    for file in gate or ():
        _check_gate(file)
    from torchperf_ros.fleet import signature
    from torchperf_ros.fleet.plan import PlanError, read_plan_file

    target = output or plan.with_suffix(".json")
    check_outputs({"--output": target}, (plan, key))
    found, private = read_plan_file(plan), signature.read_private_key(key)
    _check_usable(found, plan)
    with suppress(OSError, PlanError):  # nothing is there, or no plan of this key
        there = signature.read_signed(read_bounded(target), private.public_key(), f"plan {target}")
        if there.stage == found.stage and there.serial > found.serial:
            older = f"its serial {found.serial} is older than {there.serial} of {target}"
            fail(
                f"plan {plan}: {older}, and vehicles refuse a replay; write a greater serial into {plan},"
                " or name another file with -o"
            )
        if there.stage == found.stage and (lost := [*{*there.revoked} - {*found.revoked, *found.again}]):
            fail(
                f"plan {plan}: {target} takes {', '.join(sorted(lost))} back, and a vehicle that was away"
                f" meanwhile would keep it; write it into {plan}, too: under `revoked`, or to bring it back"
                " under `again`"
            )
    write_output(target, signature.sign(found, private))
    typer.echo(
        f"wrote {target}: {found.version} for {found.stage}, serial {found.serial}, until"
        f" {found.expires:%Y-%m-%d}"
    )


def _check_usable(plan: "RolloutPlan", path: Path) -> None:
    """End with status 2 where no vehicle could follow the plan.

    Its time is over, or a file is not what it says.
    """
    from torchperf_ros.fleet.plan import utc_now
    from torchperf_ros.fleet.vehicle import SignedFiles

    if plan.expires <= utc_now():
        fail(
            f"plan {path}: its `expires`, {plan.expires:%Y-%m-%d %H:%M} UTC, is over, and vehicles refuse"
            " it; write a later one"
        )
    if why := SignedFiles(path.parent, lambda _path: "").changed(plan.files):
        fail(
            f"plan {path}: its {why}; vehicles look for it from the plan's folder on: bring it back, or"
            " write the new sum into the plan"
        )


def _check_gate(file: Path) -> None:
    """End with status 1 where a comparison is not good, a drive had a contact, or a benchmark missed."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.get("kind") == "regress":
            closed = "" if found["status"] == 0 else str(found["verdict"])
        elif "collision" in found:
            closed = f"{found['scenario']}, seed {found['seed']}: a collision" if found["collision"] else ""
        else:
            missed = [
                f"{t['what']} is {t['value']}, the target {t['relation']} {t['limit']}"
                for t in found["targets"]
                if not t["met"]
            ]
            closed = "; ".join(missed) if found["targets"] else "it has no targets"
    except OSError as error:
        fail(f"--gate {file}: cannot be read ({error.strerror or error})")
    except (ValueError, KeyError, TypeError, AttributeError):
        fail(
            f"--gate {file}: is no JSON of `torchperf compare -o`, `torchperf drive -o` or `./run bench"
            " --json`"
        )
    if closed:
        fail(f"--gate {file}: nothing is signed: {closed}", 1)
    typer.echo(f"gate {file}: open")


@rollout.command(cls=Command)
def check(
    plan: Plan,
    fact: Annotated[
        list[str], Option(metavar="NAME=VALUE", help="Of the vehicle: vehicle=ID, and such as gpu=orin.")
    ],
    key: Public = _PUBLIC,
) -> None:
    """Say what a vehicle that never had a candidate would do about a plan, and why.

    It is the vehicle's own code that answers. Facts: vehicle (its id), drive, gpu, memory_gib, torch,
    ros_distro, region.

    Example: torchperf rollout check plan.json --fact vehicle=car-7 --fact gpu=orin

    Exit status: 0 if the plan can be followed, with any role of the vehicle, 2 if not.
    """
    found = _read(plan, key)
    from torchperf_ros.fleet import signature, vehicle
    from torchperf_ros.fleet.plan import facts_of, utc_now
    from torchperf_ros.fleet.vehicle import SignedFiles, placement_of

    facts = facts_of({"vehicle": "", **pairs("--fact", fact, "=", "NAME=VALUE")})
    signature.check_time(found, utc_now(), f"plan {plan}")
    # Permissions of the files here say nothing about those on the vehicle.
    files = SignedFiles(plan.parent, lambda _path: "")
    place = placement_of(found, facts, vehicle.VehicleState(), files.changed)
    typer.echo(f"{place.role.value}: {place.why}")


@rollout.command(cls=Command)
def status(
    folders: Annotated[list[Path], Argument(metavar="DIR...", help="What vehicles brought home.")],
    plan: Annotated[Path, Option(help="The plan: .yaml, or signed.")],
    key: Public = _PUBLIC,
    output: Annotated[
        Files,
        outputs_option("Write a page with every figure (.html), the figures (.json)."),
    ] = None,
) -> None:
    """Show how a roll-out stands: vehicles, verdicts, roll-backs, and the next step.

    A verdict is better, worse, equivalent or not enough data, on all vehicles and
    on each kind of GPU. Look as often as you like: the chance of a false one is 5 %
    for all looks together. Records are found wherever they lie below DIR.

    Example: torchperf rollout status home/ --plan plan.json -o rollout.html

    Exit status: 0 if it may go on or has to wait, 1 if it has to be rolled back, 2
    for input that cannot be used.
    """
    files = files_by_suffix(output, ".html", ".json", inputs=(plan,))
    need(*(("plotly", "jinja2") if ".html" in files else ()))
    found = _read(plan, key)
    standing, move, brought = _standing(found, folders)
    _show(found, standing, move, brought.left_out)
    if ".html" in files:
        from torchperf_ros.fleet.status import status_page

        write_output(files[".html"], status_page(found, standing, move, brought.left_out))
    if ".json" in files:
        figures = {
            "plan": found.to_mapping(),
            **standing.to_json(),
            "left_out": list(brought.left_out),
            "move": move.kind.value,
            "reasons": list(move.reasons),
        }
        write_output(files[".json"], json.dumps(figures, indent=1) + "\n")
    raise typer.Exit(1 if move.kind.value == "rollback" else 0)


@rollout.command(cls=Command)
def advance(
    plan: Signed,
    folders: Folders = None,
    key: Private = _KEY,
    write: Write = False,
    force: Annotated[
        bool, Option("--force", help="Over any verdict or none; not over a broken guard.")
    ] = False,
) -> None:
    """Write the plan of the next step, if the figures allow it.

    It refuses while the step has too little exposure or has not lasted long enough,
    where a verdict is worse, and where there is not enough data for one. A hard
    guard that broke on vehicles cannot be forced.

    Example: torchperf rollout advance plan.json home/ --key rollout.key --write

    Exit status: 0, 1 if it refuses, 2 for input that cannot be used.
    """
    found = _read(plan, key)
    standing, move, brought = _standing(found, folders or [])
    _show(found, standing, move, brought.left_out)
    if move.kind.value != "advance" and (move.hard or not force):
        hint = "" if move.hard else "; --force goes on all the same"
        fail(f"does not advance{hint}", 1)
    _next(plan, key, lambda one, now: one.advanced(now), found, write=write)


@rollout.command(cls=Command)
def hold(plan: Signed, key: Private = _KEY) -> None:
    """Write the plan with which no further vehicle begins; those that have, go on.

    `advance` ends a hold.

    Example: torchperf rollout hold plan.json --key rollout.key

    Exit status: 0, or 2 for input that cannot be used.
    """
    _next(plan, key, lambda one, now: one.held(now))


@rollout.command(cls=Command)
def rollback(plan: Signed, key: Private = _KEY) -> None:
    """Write the plan with which every vehicle goes back, and none takes this version again.

    Only a later plan that names the version under `again` brings it back.

    Example: torchperf rollout rollback plan.json --key rollout.key

    Exit status: 0, or 2 for input that cannot be used.
    """
    _next(plan, key, lambda one, now: one.rolled_back(now))


@rollout.command(cls=Command)
def simulate(
    plan: Annotated[Path, Argument(help="A plan, .yaml as `new` writes it.")],
    vehicles: Annotated[int, Option(min=10, max=1_000_000, help="How many the fleet has.")] = 10_000,
    candidate: Annotated[
        str,
        Option(metavar="KIND[=PERCENT]", help="What it is like, and by how much; `list` shows the kinds."),
    ] = "worse=5",
    runs: Annotated[Files, Option(metavar="RUN", help="Times out of these runs; repeatable.")] = None,
    svg: Annotated[File, Option(metavar="FILE", help="Draw it.")] = None,
) -> None:
    """Play a plan on a simulated fleet: which vehicles have the candidate until it is stopped.

    Beside it, the same candidate on all vehicles at once. Buckets, guards, verdicts
    and steps are the code of vehicles and of `advance`. Times are drawn from
    minutes of recorded runs (`torchperf replay -o RUN.parquet`, at --pace real); without
    --runs they have the reference detector's median and p99.

    Example: torchperf rollout simulate plan.yaml --candidate crashing --svg out.svg

    Exit status: 0, or 2 for input that cannot be used.
    """
    need(*_LIBRARIES, *(("matplotlib",) if svg else ()))
    import numpy as np

    from torchperf_ros.fleet import simulate as play
    from torchperf_ros.fleet.plan import read_plan_file

    kind, _, percent = candidate.partition("=")
    if not re.fullmatch(r"|100(\.0*)?|[0-9]{1,2}(\.[0-9]*)?", percent):
        fail(
            f"--candidate {candidate!r}: {percent} is not allowed; it has to be 0 to 100 %, such as {kind}=5"
        )
    if kind not in play.CANDIDATES:
        known = "; ".join(f"{name}: {text}" for name, text in play.CANDIDATES.items())
        fail(f"--candidate {candidate!r} is not there; there are {known}")
    if plan.suffix not in _YAML:
        fail(f"plan {plan}: is no .yaml; simulate takes a plan as `torchperf rollout new` writes it")
    check_outputs({"--svg": svg}, (plan, *(runs or ())))
    found, random = read_plan_file(plan), np.random.default_rng(_SEED)
    if found.unit != "vehicle":
        fail(f"plan {plan}: draws by {found.unit}, which is not simulated; try a copy with `unit: vehicle`")
    windows = play.recorded_minutes(runs, found.stage, random) if runs else play.built_in_minutes(random)
    outcomes = {}
    with progress_bars() as bars:
        for name, one in {"in steps": found, "all at once": play.all_at_once(found)}.items():
            outcomes[name] = play.simulate(
                one,
                vehicles,
                play.SimulatedCandidate(kind, float(percent or 5) / 100.0),
                windows,
                _SEED,
                progress=follow(bars, name),
            )
    heads, *rows = play.outcome_rows(outcomes)
    console(_PLAIN_WIDTH).print(console_table(heads, rows))
    if svg:
        play.draw_outcomes(
            outcomes, f"A candidate of kind `{kind}` on {vehicles:,} vehicles, simulated", svg
        )


def _read(path: Path, key: Path) -> "RolloutPlan":
    """A plan, signed or for people; `key`: either one of the pair."""
    need(*_LIBRARIES)
    from torchperf_ros.fleet import signature
    from torchperf_ros.fleet.plan import read_plan_file

    if path.suffix in _YAML:
        return read_plan_file(path)
    is_public = key.suffix == ".pub"
    public = signature.read_public_key(key) if is_public else signature.read_private_key(key).public_key()
    return signature.read_signed(_found(path, "plan", read_bounded), public, f"plan {path}")


def _found(path: Path, what: str, read: Callable[[Path], Any]) -> Any:  # noqa: ANN401 - what `read` gives
    try:
        return read(path)
    except OSError as error:
        raise ConfigError(f"{what} {path}: cannot be read ({error.strerror or error})") from error


def _standing(plan: "RolloutPlan", folders: list[Path]) -> "tuple[RolloutStanding, Move, Brought]":
    from torchperf_ros.fleet.plan import utc_now
    from torchperf_ros.fleet.records import read_records, record_files
    from torchperf_ros.fleet.status import next_move, standing_of

    if missing := [path for path in folders if not path.exists()]:
        fail(f"{missing[0]}: is not there; name folders that vehicles brought home")
    with progress_bars() as bars:
        brought = read_records(record_files(folders), follow(bars, "reading records"))
    now = utc_now()
    brought = brought.until(now.timestamp()).of_plan(plan)
    standing = standing_of(plan, brought, now)
    return standing, next_move(plan, standing), brought


# texts
def _show(plan: "RolloutPlan", standing: "RolloutStanding", move: "Move", left_out: Any) -> None:  # noqa: ANN401
    from torchperf_ros.fleet.status import headline, tables

    shown = console(_PLAIN_WIDTH)
    say(shown, headline(plan), "bold")
    for table in tables(plan, standing):
        shown.print(table)
    for found, what in ((standing.rolled_back, "rolled it back"), (standing.refused, "refused the plan")):
        for vehicle, reason in list(found.items())[:_MOST_NAMED]:
            say(shown, f"- {vehicle} {what}: {reason}")
        if len(found) > _MOST_NAMED:
            say(shown, f"- and {len(found) - _MOST_NAMED:,} more {what}")
    for line in left_out:
        say(shown, f"- left out: {line}")
    for reason in move.reasons:
        say(shown, f"{move.kind.value}: {reason}", "bold red" if move.kind.value == "rollback" else "bold")


def _next(
    path: Path,
    key: Path,
    change: "Callable[[RolloutPlan, Any], RolloutPlan]",
    judged: "RolloutPlan | None" = None,
    *,
    write: bool = True,
) -> None:
    """Sign what comes next, and write it, or say what would be written.

    The change is one of the plan as it is now: another operator may have written one, a roll-back above all,
    since it was `judged`.
    """
    if path.suffix in _YAML:
        fail(f"{path}: is not signed; `torchperf rollout sign {path}` comes first")
    with _found(key, "key", lambda file: file.open("rb")) as alone:
        with suppress(OSError):  # a share that has no locks
            fcntl.flock(alone, fcntl.LOCK_EX)  # whoever signs has this file
        plan = _read(path, key)
        from torchperf_ros.fleet import signature
        from torchperf_ros.fleet.plan import utc_now
        from torchperf_ros.fleet.status import headline

        if judged is not None and judged != plan:
            fail(
                f"{path}: was changed meanwhile, {headline(plan)}: nothing was written; look at it again", 1
            )
        following = change(plan, max(utc_now(), plan.issued))
        if write:
            write_output(path, signature.sign(following, signature.read_private_key(key)))
    typer.echo(f"{'wrote' if write else 'would write'} {path}: {headline(following)}")
    if not write:
        typer.echo("nothing was written; --write does it")


@rollout.command(cls=Command, rich_help_panel="One node")
def candidate(
    action: Annotated[str, Argument(help="start, serve, back or end.")],
    file: Annotated[
        File, Argument(metavar="[FILE]", help="For start: YAML of the stage's parameters that differ.")
    ] = None,
    stage: Annotated[str, Option(help="For example perception.")] = "perception",
    name: NodeName = "/perf",
) -> None:
    """Have a running node take another version of a stage's model, and see how that goes.

    start: it stands beside the version that serves. It gets the same frames, in the
    time that these leave, and publishes nothing; `torchperf top` compares the two.

    serve: it serves, and the other one stays warm beside it. It comes back by
    itself as soon as a guard breaks: workers that die, a safe stop, missed
    deadlines, refused plans, memory that grows. How many outputs differ is shown,
    and takes it back under a signed plan only.

    back: the stage's own version serves again, at once.

    end: there is only the stage's own version.

    Examples: torchperf rollout candidate start candidate.yaml
              torchperf rollout candidate serve --stage planning --node /robot1/perf

    Exit status: 0 if that is so, 1 if it cannot be and why, 2 if the input cannot be used.
    """
    if action not in _ACTIONS:
        fail(f"action {action!r} does not exist; allowed: {', '.join(_ACTIONS)}")
    if (action == "start") is (file is None):
        fail("start needs the candidate's file" if file is None else f"{action} takes no file")
    if file is not None and not file.is_file():
        fail(f"candidate {file} is not there")
    need("rclpy")
    from torchperf_ros.node.services import ServiceFailed, set_parameters
    from torchperf_ros.observe.telemetry.node_state import NodeState
    from torchperf_ros.observe.top import NodeListener

    own, wanted = _ACTIONS[action]
    values = own if file is None else {**own, "candidate": str(file.resolve())}
    try:
        set_parameters(name, {f"{stage}.{key}": value for key, value in values.items()}, _TIMEOUT_S)
    except ServiceFailed as error:
        # rclpy's word, where the node has no such stage
        fail(f"{error}{'; name a stage of the node by --stage' if 'undeclared' in str(error) else ''}", 1)
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
