"""A drive on this machine.

Starts the node and a player in a ROS graph of their own, watches, ends them, and judges.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.text import Text

import torchperf_ros
from torchperf_ros.api.errors import TorchperfError, how_it_ended
from torchperf_ros.models.road_scene import IMAGE_TYPE
from torchperf_ros.node.middleware import carry_images
from torchperf_ros.observe.telemetry.machine import ProcessorShare
from torchperf_ros.observe.telemetry.node_state import NodeState
from torchperf_ros.observe.top import SVG_HEIGHT, SVG_WIDTH, NodeListener, Screen, save_svg
from torchperf_ros.observe.top_view import ends, node_line, node_picture
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.settings.build_options import AUTO
from torchperf_ros.settings.config import STAGE_DEFAULTS
from torchperf_ros.tools.demo.make_log import CAMERAS, IMAGE_TOPICS, ODOMETRY_TOPIC
from torchperf_ros.tools.demo.player import SLOW_HZ, SMALL, drive_topics
from torchperf_ros.tools.demo.verdict import DriveState, judge, report, summary
from torchperf_ros.workers.incident_folder import open_incidents
from torchperf_ros.workers.process_setup import die_with_parent

_PATIENCE_S: Final = {signal.SIGINT: 5.0, signal.SIGTERM: 3.0, signal.SIGKILL: 10.0}


class GrowingFile:
    """The lines of a file that another process appends to; it need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[str]:
        """The whole lines that were added since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line.decode(errors="replace").rstrip("\n")

    def tail(self, count: int) -> str:
        """Its last lines, whether they were read or not."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self._path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
        return ""


class ChildProcess(contextlib.AbstractContextManager["ChildProcess"]):
    """A Python module as a process in its own session, so that the terminal's Ctrl-C is the parent's alone.

    Its `output` and its `errors` are what it wrote to its standard output and to its standard error, and
    `process` is what signals go to.
    """

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        output, errors = folder / f"{name}.out", folder / f"{name}.err"
        self.output, self.errors = GrowingFile(output), GrowingFile(errors)
        path = [str(Path(torchperf_ros.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        with output.open("wb") as out, errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, and no other thread runs yet
            )

    @property
    def exit_status(self) -> int | None:
        """None while it runs, negative if a signal ended it."""
        return self.process.poll()

    def say(self, line: str) -> None:
        """Write a line to its standard input; nothing happens if it is gone."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """Send SIGINT, then SIGTERM, then SIGKILL to it and to what it left behind."""
        for number, patience_s in _PATIENCE_S.items():
            if self.process.poll() is not None:
                break
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def __exit__(self, *_: object) -> None:
        self.end()


STAGES: Final = ("perception", "planning")
_FAULTS: Final = {  # in order of their time; a replacement is ready before the next worker dies
    "perception": (
        "sigkill",
        "stall",
        "poison_stall",
        "gil",
        "hang",
        "raise",
        "poison_sigsegv",
        "nan",
        "sigsegv",
    ),
    "planning": ("sigkill", "raise", "stall", "poison_sigkill", "nan", "gil", "poison_hang"),
}
_FIRST_FAULT: Final = {"perception": 0.6, "planning": 1.6}  # in gaps between two faults
_CAMERAS_BUDGET_MS: Final = 66.0  # they are triggered together, and their frames run one after the other
_COMPLETE_S: Final = 60.0
_START_S: Final = 180.0
_LATEST_S: Final = 15.0
_SETTLE_S: Final = 4.0
_SETTLED_NS: Final = 200_000_000  # after its end a frame has been answered, and a report tells of it
_PROGRESS_CELLS: Final = 20
_LOG_LINES: Final = 12


class DriveError(TorchperfError):
    """The drive cannot go on; the message says what ended and why."""


@dataclass(frozen=True)
class DriveOptions:
    """What the user asked for, see `torchperf demo --help`."""

    log: Path | None = None
    cameras: int = 1  # several: streams of one stage, with faults in the first
    seconds: float = 20.0
    sabotage: bool = False
    tui: bool = True  # whether the terminal shows the live view
    json_file: Path | None = None
    svg_file: Path | None = None


class DemoDrive:
    def __init__(self, options: DriveOptions, console: Console) -> None:
        """Look at the log, if there is one; raises `LogError` where the log cannot be played."""
        self._options = options
        self._console = console
        self._image_type, title = IMAGE_TYPE, "drawn road, 1280x720 rgb8 at 30 Hz"
        if options.cameras > 1:
            width, height = SMALL
            title = f"{options.cameras} drawn roads, {width}x{height} rgb8 at {SLOW_HZ:g} Hz"
        if options.log is not None:
            with LogReader(options.log) as log:
                image = drive_topics(log)[0]
            self._image_type, title = image.type_name, f"{options.log.name}, {image.count} images"
        self._state = DriveState(f"{title}, sabotaged" if options.sabotage else title, options.seconds)
        self._state.sabotaged, self._state.cameras = options.sabotage, options.cameras
        self._evidence = open_incidents("", 1)  # the node's defaults; here it is only looked at

    def run(self) -> int:
        """Drive, show it, print the summary; returns the exit status, see `DriveResult`.

        Raises:
            DriveError: the node or the player ended before it should, or did not start.
        """
        own_graph()
        processor, began = ProcessorShare(), self._evidence.name("")
        with tempfile.TemporaryDirectory(prefix="torchperf-demo-") as name, contextlib.ExitStack() as stack:
            self._start(Path(name), stack)
            os.nice(5)  # the processes that are looked at come first
            self._listener = stack.enter_context(NodeListener(self._state, "torchperf_demo"))
            drawn = (
                (lambda width, height: drive_picture(self._state, width, height))
                if self._options.tui
                else None
            )
            self._screen = stack.enter_context(Screen(self._state, self._console, drawn, line=drive_line))
            self._drive()
        self._state.others_share = sum(processor.taken())
        result = judge(self._state)
        self._console.print(summary(self._state, result))
        if self._options.json_file:
            text = json.dumps(report(self._state, result), indent=2)
            self._options.json_file.write_text(text + "\n", encoding="utf-8")
        new = [path for path in self._evidence.incidents() if path.name > began]
        self._console.print(Text("\n".join(what_next(self._evidence.root, new))), soft_wrap=True)
        return result.status

    def _drive(self) -> None:
        state, self._began_s = self._state, time.monotonic()
        try:
            stages = state.stages.values()  # after a while without the backup workers
            complete = self._watch(
                lambda: self._ready() and all(stage.complete for stage in stages), _COMPLETE_S
            )
            if not complete and not self._watch(self._ready, _START_S):
                raise DriveError(
                    f"the node was not ready after {_START_S:.0f} s:\n{self._node.errors.tail(_LOG_LINES)}"
                )
            self._player.say("go")
            state.phase = "driving"
            self._start_s = time.monotonic()
            self._watch(
                lambda: bool(state.player) or self._player.exit_status is not None,
                state.seconds + _LATEST_S,
            )
        except KeyboardInterrupt:
            state.event("note", "demo", "interrupted")
            self._player.process.send_signal(signal.SIGINT)
        state.phase = "waiting for the last counters"
        state.ended_ns = time.time_ns() + _SETTLED_NS
        with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C ends it at once
            self._watch(lambda: state.reported_ns >= state.ended_ns, _SETTLE_S)
        state.phase = f"drove {state.elapsed_s:.1f} s"
        self._screen.show()
        if self._options.svg_file:
            save_svg(drive_picture(state, SVG_WIDTH, SVG_HEIGHT), self._options.svg_file, "torchperf demo")

    def _watch(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Fold in and show what happens until a condition holds; false if it did not within the limit."""
        state, end_s = self._state, time.monotonic() + limit_s
        while not until():
            if time.monotonic() > end_s:
                return False
            self._listener.listen(0.125)
            for line in self._player.output.lines():
                state.on_player(line)
            state.stalls_ns += map(json.loads, self._timer.output.lines())
            for stage, journal in self._journals.items():
                for line in journal.lines():
                    state.on_journal(stage, line)
            state.match()
            for gate in self._gates:
                gate.step(state)
            if state.phase.startswith("starting"):
                state.phase = f"starting, {time.monotonic() - self._began_s:.0f} s"
            if state.phase == "driving":
                state.elapsed_s = min(time.monotonic() - self._start_s, state.seconds)
            self._screen.show()
            self._check("node", self._node)
        return True

    def _check(self, name: str, process: ChildProcess) -> None:
        if process.exit_status is not None:
            how = how_it_ended(process.exit_status)
            raise DriveError(f"the {name} ended by {how}:\n{process.errors.tail(_LOG_LINES)}")

    def _ready(self) -> bool:
        self._check("player", self._player)
        stages = self._state.stages.values()
        started = len(stages) == len(STAGES) + self._options.cameras - 1 and all(
            stage.health not in {"", "STARTING"} for stage in stages
        )
        return self._state.player_ready and started

    def _start(self, folder: Path, stack: contextlib.ExitStack) -> None:
        parameters = folder / "parameters.yaml"
        values = drive_parameters(self._options, self._image_type, folder)
        parameters.write_text(
            json.dumps({"/**": {"ros__parameters": values}}), encoding="utf-8"
        )  # JSON is YAML, too
        remaps = ["-r", f"image:={IMAGE_TOPICS[self._image_type]}", "-r", f"odom:={ODOMETRY_TOPIC}"]
        node = ["torchperf_ros.node.main", "--ros-args", *remaps, "--params-file", str(parameters)]
        what = [self._options.log and str(self._options.log), self._options.seconds, self._options.cameras]
        shown = {stage: stage for stage in STAGES}
        if self._options.cameras > 1:  # faults are in the first camera's stream only
            shown["perception"] = f"perception.{CAMERAS[0]}"
        self._journals = {shown[stage]: GrowingFile(folder / f"{stage}.jsonl") for stage in STAGES}
        self._gates = (
            [FaultGate(shown[stage], folder / f"{stage}.gate") for stage in STAGES]
            if self._options.sabotage
            else []
        )
        self._timer = stack.enter_context(
            ChildProcess("timer", ["torchperf_ros.observe.telemetry.machine"], folder)
        )
        self._node = stack.enter_context(ChildProcess("node", node, folder))
        self._player = stack.enter_context(
            ChildProcess("player", ["torchperf_ros.tools.demo.player", json.dumps(what)], folder)
        )


class FaultGate:
    """Lets one scheduled fault of a stage through at a time.

    While all of its workers serve, by the node's report.

    A fault that found a stage without its standby would show what a busy machine does, and not what the
    stage does. The gate is a file, which the saboteur removes as it takes a fault.
    """

    def __init__(self, stage: str, path: Path) -> None:
        self._stage, self._path = stage, path
        self._reports = 0  # how many there were when it was found closed; 0: it is open, as far as is known

    def step(self, state: DriveState) -> None:
        """Open it where a report that came after the last fault shows all workers at work."""
        stage = state.stages.get(self._stage)
        if stage is None or self._path.exists():
            return
        if not self._reports:
            self._reports = state.reports
        elif state.reports > self._reports and stage.complete and state.phase == "driving":
            self._path.touch()
            self._reports = 0


def drive_picture(state: DriveState, width: int, height: int) -> RenderableType:
    words = (
        f"{state.elapsed_s:.1f} of {state.seconds:.0f} s "
        if state.phase == "driving"
        else f"{state.phase} "
    )
    done = round(_PROGRESS_CELLS * min(state.elapsed_s / state.seconds, 1.0))
    title = Text.assemble((" torchperf demo ", "bold black on green3"), (f" {state.title}", "bold"))
    progress = Text.assemble(
        (words, "grey62"), ("━" * done, "green3"), ("━" * (_PROGRESS_CELLS - done), "grey23")
    )
    injected = Text(f" {len(state.injections)} faults injected ", "orchid1") if state.injections else None
    waits = ["starting the node and its workers"]
    return node_picture(state, width, height, ends(title, progress, width), waits, injected)


def drive_line(node: NodeState) -> str:
    """The same in one line, where there is no terminal to draw in.

    What the start is at, then how it goes.
    """
    if not isinstance(node, DriveState) or not node.phase.startswith("starting"):
        return node_line(node)
    doing = [
        f"{stage.name}: {stage.values.get('progress') or stage.health}" for stage in node.stages.values()
    ]
    return f"{node.phase}: {' | '.join(doing) or 'the node and its workers'}"


def drive_parameters(options: DriveOptions, image_type: str, folder: Path) -> dict[str, Any]:
    """The node's parameters for a drive with images of this type; journals of faults go to the folder."""
    stages: dict[str, Any] = {}
    for stage in STAGES:
        adapter = STAGE_DEFAULTS[stage]["adapter"]
        own: dict[str, Any] = (
            {"compressed": True} if stage == "perception" and image_type != IMAGE_TYPE else {}
        )
        if options.sabotage:
            own = {
                "adapter": adapter,
                "options": own,
                "journal": str(folder / f"{stage}.jsonl"),
                "gate": str(folder / f"{stage}.gate"),
                "faults": faults_of(stage, options.seconds),
            }
            if stage == "perception" and options.cameras > 1:
                own["only"] = CAMERAS[0]
            adapter = "torchperf_ros.models.sabotage:SabotagedAdapter"
        stages[stage] = {"adapter": adapter, "options": json.dumps(own), "engine": AUTO}
    # Packages that are on this machine serve, else eager.
    values = {"autostart": True, "metrics_port": 0, "compile_missing": False}
    if options.cameras > 1:
        stages["perception"]["streams"] = list(CAMERAS[: options.cameras])
        stages["perception"]["budget_ms"] = _CAMERAS_BUDGET_MS
        stages["planning"]["topics"] = [f"detections:={CAMERAS[0]}/detections"]
    return {**values, "stages": list(STAGES), **stages}


def what_next(evidence: Path, incidents: list[Path]) -> list[str]:
    """The end of a drive: its incidents, and what a person can do now, as commands that work here."""
    command = (
        "./run torchperf" if (Path(torchperf_ros.__file__).parents[1] / "run").exists() else "torchperf"
    )
    found = [f"Incidents of this drive, in {evidence}:", *(f"  {path.name}" for path in incidents)]
    seen = incidents[-1] if incidents else evidence / "records" / "perf" / "records.jsonl"
    return [
        *(found if incidents else []),
        "What next:",
        f"  see this drive as a page   {command} report {shlex.quote(str(seen))} -o report.html",
        f"  make its models faster     {command} compile --params config/perception.yaml, and drive again",
        (
            f"  check a model of your own  {command} check my_robot.segmenter:Segmenter   (README: Your own"
            " model)"
        ),
        "  why did it stutter         docs/looking.md",
    ]


def faults_of(stage: str, seconds: float) -> dict[str, dict[str, float]]:
    """The schedule of a stage's faults.

    Each kind at least once in the drive, the deadly ones apart from each other.
    """
    kinds = _FAULTS[stage]
    gap_s = min(max(seconds / (len(kinds) + 1), 0.5), 5.0)
    every_s = gap_s * (len(kinds) + 1.5)  # so that the first kind does not come again right at the end
    return {
        kind: {"every_s": every_s, "after_s": round(gap_s * (_FIRST_FAULT[stage] + number), 3)}
        for number, kind in enumerate(kinds)
    }


def own_graph() -> None:
    """Have the environment name a graph in which there is no one else, unless the user named one.

    Fast DDS may change the transports, and with them lose most images, where discovery is limited to this
    host; the drive's own graph therefore differs by its domain alone.
    """
    if "ROS_DOMAIN_ID" not in os.environ:
        os.environ["ROS_DOMAIN_ID"] = str(20 + os.getpid() % 80)
        os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "SUBNET"
        os.environ.pop("ROS_LOCALHOST_ONLY", None)
    carry_images()
