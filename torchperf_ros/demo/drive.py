"""A drive on this machine: starts the node and a player in a ROS graph of their own, watches, ends them, and judges."""

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchperf_ros.core.errors import ConfigError, TorchperfError
from torchperf_ros.core.evidence_folder import open_evidence
from torchperf_ros.core.parameter_tables import STAGE_DEFAULTS
from torchperf_ros.demo.child_process import ChildProcess, GrowingFile
from torchperf_ros.demo.drive_state import DriveState
from torchperf_ros.demo.log_source import IMAGE_TYPES, LogSource
from torchperf_ros.demo.player import IMAGE_TOPICS, ODOMETRY_TOPIC
from torchperf_ros.demo.processor_share import ProcessorShare
from torchperf_ros.demo.verdict import judge, report, summary
from torchperf_ros.demo.view import picture, save_svg, status_line
from torchperf_ros.ros.image_transport import carry_images
from torchperf_ros.ros.top_listener import TopListener
from torchperf_ros.telemetry.event_panel import event_line

STAGES: Final = ("perception", "planning")
_FAULTS: Final = {  # in order of their time; a replacement is ready before the next worker dies
    "perception": ("sigkill", "stall", "gil", "hang", "raise", "nan", "sigsegv"),
    "planning": ("sigkill", "raise", "stall", "nan", "gil"),
}
_FIRST_FAULT: Final = {"perception": 0.6, "planning": 1.6}  # in gaps between two faults
_COMPLETE_S: Final = 60.0
_START_S: Final = 180.0
_AFTER_PLAYER_S: Final = 15.0
_SETTLE_S: Final = 4.0
_SETTLE_DIAGNOSTICS: Final = 2  # the first of them may have been on its way already
_REFRESH_S: Final = 0.125
_LINE_EVERY_S: Final = 2.0
_LOG_LINES: Final = 12


class DriveError(TorchperfError):
    """The drive cannot go on; the message says what ended and why."""


@dataclass(frozen=True)
class DriveOptions:
    """What the user asked for.

    Attributes:
        log: a log to play, None for the drawn road.
        seconds: how long to drive.
        rate_hz: images per second, None for as recorded (30 for the drawn road).
        sabotage: whether faults are injected.
        engine: how tiers run.
        tui: whether the terminal shows the live view; plain lines otherwise.
        json_file: where the report is written, if anywhere.
        svg_file: where the view's last picture is written, if anywhere.
    """

    log: Path | None = None
    seconds: float = 20.0
    rate_hz: float | None = None
    sabotage: bool = False
    engine: str = "eager"
    tui: bool = True
    json_file: Path | None = None
    svg_file: Path | None = None


class Drive:
    """One drive, from the first process to the verdict."""

    def __init__(self, options: DriveOptions, console: Console) -> None:
        """Look at the log, if there is one.

        Raises:
            LogError: the log cannot be played.
            ConfigError: a file that is asked for cannot be written.
        """
        for file in filter(None, (options.json_file, options.svg_file)):
            if file.is_dir() or not os.access(file.parent, os.W_OK):
                msg = f"{file}: cannot be written; it has to be a file in an existing folder"
                raise ConfigError(msg)
        self._options = options
        self._console = console
        self._image_type, title = _what(options)
        self._state = DriveState(STAGES, title, options.seconds)
        self._evidence = open_evidence("", 1, 1)  # the node's defaults; here it is only looked at

    def run(self) -> int:
        """Drive, show it, print the summary; returns 0 if every started frame was answered in time, else 1.

        Raises:
            DriveError: the node or the player ended before it should, or did not start.
        """
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        _own_graph()
        processor, began = ProcessorShare(), self._evidence.name("")
        with tempfile.TemporaryDirectory(prefix="torchperf-demo-") as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            parameters = folder / "parameters.yaml"
            parameters.write_text(json.dumps(self._parameters(folder)), encoding="utf-8")
            self._journals = {stage: GrowingFile(_journal(folder, stage)) for stage in STAGES}
            self._node = stack.enter_context(ChildProcess("node", self._node_arguments(parameters), folder))
            self._player = stack.enter_context(ChildProcess("player", self._player_arguments(), folder))
            os.nice(5)  # the onlooker yields to those it looks at
            self._watcher = stack.enter_context(TopListener(self._state, "/perf", "torchperf_demo"))
            self._show = stack.enter_context(self._screen())
            self._drive()
        self._state.others_share = processor.of_others()
        status = self._end()
        self._point_to_evidence(began)
        return status

    def _drive(self) -> None:
        state = self._state
        try:
            self._watch(self._complete, _COMPLETE_S)
            if not self._watch(self._ready, _START_S):
                msg = f"the node was not ready after {_START_S:.0f} s:\n{self._node.errors.tail(_LOG_LINES)}"
                raise DriveError(msg)
            self._player.say("go")
            state.phase = "driving"
            start_s = time.monotonic()
            self._watch(lambda: self._drove(start_s), state.seconds + _AFTER_PLAYER_S)
            if self._options.svg_file:
                save_svg(state, self._options.svg_file)
        except KeyboardInterrupt:
            state.event("note", "demo", "interrupted")
            self._player.interrupt()
        state.phase = "ending"
        enough = state.diagnostics + _SETTLE_DIAGNOSTICS
        with contextlib.suppress(KeyboardInterrupt):  # who presses it twice is in a hurry
            self._watch(lambda: state.diagnostics >= enough, _SETTLE_S)
        state.phase = "ended"
        self._show()

    def _watch(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Fold in and show what happens until a condition holds; false if it did not within the limit."""
        end_s = time.monotonic() + limit_s
        while not until():
            if time.monotonic() > end_s:
                return False
            self._watcher.listen(_REFRESH_S)
            for line in self._player.output.lines():
                self._state.on_player(line)
            for stage, journal in self._journals.items():
                for line in journal.lines():
                    self._state.on_journal(stage, line)
            self._state.match()
            self._show()
            if self._node.exit_status is not None:
                msg = f"the node ended with status {self._node.exit_status}:\n{self._node.errors.tail(_LOG_LINES)}"
                raise DriveError(msg)
        return True

    def _ready(self) -> bool:
        if self._player.exit_status is not None:
            raise DriveError(
                f"the player ended with status {self._player.exit_status}:\n{self._player.errors.tail(_LOG_LINES)}"
            )
        told = [stage.health for stage in self._state.stages.values()]
        return self._state.player_ready and all(health not in {"", "STARTING"} for health in told)

    def _complete(self) -> bool:
        """Ready, and the backup workers, too: a drive without them is for those who cannot wait for a slow one."""
        return self._ready() and all(stage.complete for stage in self._state.stages.values())

    def _drove(self, start_s: float) -> bool:
        self._state.elapsed_s = min(time.monotonic() - start_s, self._state.seconds)
        return bool(self._state.player) or self._player.exit_status is not None

    def _end(self) -> int:
        verdict = judge(self._state)
        self._console.print(summary(self._state, verdict, self._console.width))
        if self._options.json_file:
            text = json.dumps(report(self._state, verdict), indent=2)
            self._options.json_file.write_text(text + "\n", encoding="utf-8")
        return verdict.exit_status

    def _point_to_evidence(self, began: str) -> None:
        """Where the node wrote down what it found; `began` sorts before what is new."""
        new = [path for path in self._evidence.incidents() if path.name > began]
        if new:
            told = [f"Evidence of this drive, in {self._evidence.root}:", *(f"  {path.name}" for path in new)]
            logs = [path for path in new if (path / "black_box").is_dir()]
            told += [f"Look at it: torchperf report {logs[-1]} -o report.html"] if logs else []
            self._console.print(Text("\n".join(told)), soft_wrap=True)

    @contextlib.contextmanager
    def _screen(self) -> Iterator[Callable[[], None]]:
        """What is called after each step: draws the view, or now and then prints a line."""
        if not self._options.tui:
            yield _Lines(self._state, self._console)
            return
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            yield lambda: live.update(picture(self._state, *self._console.size), refresh=True)

    def _parameters(self, folder: Path) -> dict[str, Any]:
        """Parameters of the node, as a file for `--params-file`: JSON is YAML, too."""
        stages = {stage: self._stage_parameters(stage, folder) for stage in STAGES}
        return {"/**": {"ros__parameters": {"autostart": True, "metrics_port": 0, "stages": list(STAGES), **stages}}}

    def _stage_parameters(self, stage: str, folder: Path) -> dict[str, str]:
        adapter = STAGE_DEFAULTS[stage]["adapter"]
        own = {"compressed": True} if stage == "perception" and self._image_type == IMAGE_TYPES[1] else {}
        if not self._options.sabotage:
            return {"adapter": adapter, "options": json.dumps(own), "engine": self._options.engine}
        faults = faults_of(stage, self._options.seconds)
        options = {"adapter": adapter, "options": own, "journal": str(_journal(folder, stage)), "faults": faults}
        sabotaged = "torchperf_ros.models.sabotage:SabotagedAdapter"
        return {"adapter": sabotaged, "options": json.dumps(options), "engine": self._options.engine}

    def _node_arguments(self, parameters: Path) -> list[str]:
        remaps = [f"image:={IMAGE_TOPICS[self._image_type]}", f"odom:={ODOMETRY_TOPIC}"]
        flags = [word for remap in remaps for word in ("-r", remap)]
        return ["torchperf_ros.ros.main", "--ros-args", *flags, "--params-file", str(parameters)]

    def _player_arguments(self) -> list[str]:
        arguments = ["torchperf_ros.demo.player", "--seconds", str(self._options.seconds)]
        arguments += ["--log", str(self._options.log)] if self._options.log else []
        return arguments + (["--rate", str(self._options.rate_hz)] if self._options.rate_hz else [])


class _Lines:
    """Progress as plain lines, for pipes and logs: events as they come, and the stages every two seconds."""

    def __init__(self, state: DriveState, console: Console) -> None:
        self._state = state
        self._console = console
        self._told = 0
        self._next_s = 0.0

    def __call__(self) -> None:
        new = self._state.events_told - self._told
        for event in list(self._state.events)[-new:] if new else []:
            self._console.print(event_line(event), soft_wrap=True)
        self._told = self._state.events_told
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self._console.print(Text(status_line(self._state)), soft_wrap=True)


def faults_of(stage: str, seconds: float) -> dict[str, dict[str, float]]:
    """The schedule of a stage's faults: each kind at least once in the drive, the deadly ones apart from each other."""
    kinds = _FAULTS[stage]
    gap_s = min(max(seconds / (len(kinds) + 1), 0.5), 5.0)
    every_s = gap_s * (len(kinds) + 1.5)  # so that the first kind does not come again right at the end
    return {
        kind: {"every_s": every_s, "after_s": round(gap_s * (_FIRST_FAULT[stage] + number), 3)}
        for number, kind in enumerate(kinds)
    }


def _what(options: DriveOptions) -> tuple[str, str]:
    """Image type and a title."""
    rate = "" if options.rate_hz is None else f" at {options.rate_hz:g} Hz"
    sabotaged = ", sabotaged" if options.sabotage else ""
    if options.log is None:
        return IMAGE_TYPES[0], f"drawn road, 1280x720 rgb8{rate or ' at 30 Hz'}{sabotaged}"
    with LogSource(options.log) as source:
        return source.image_type, f"{options.log.name}, {source.images} images{rate}{sabotaged}"


def _own_graph() -> None:
    """Have the environment name a graph in which there is no one else, unless the user named one.

    Fast DDS may change the transports, and with them lose most images, where discovery is limited to this host; the
    drive's own graph is therefore told apart by its domain alone.
    """
    if "ROS_DOMAIN_ID" not in os.environ:
        os.environ["ROS_DOMAIN_ID"] = str(20 + os.getpid() % 80)
        os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "SUBNET"
        os.environ.pop("ROS_LOCALHOST_ONLY", None)
    carry_images()


def _journal(folder: Path, stage: str) -> Path:
    return folder / f"{stage}.jsonl"
