"""Everything that a GPU can show within 8 minutes, without a network; the node, too, where ROS is there.

Networks that nobody tuned for, by hand beside engine auto and `tune`; a model's steps in a worker beside a bare
process; six cameras; what processes cost in the device's memory; faults through real workers and through the node;
starts, the launch-bound curve, copies, streams, captures; and the tests marked `gpu`. Each part is a process of its
own with a time-out: one that fails is named, and the rest goes on. What only times comes first, one part at a time;
then parts build side by side. What a part has found is shown and written at once, so that a run that is cut off
leaves all before; at its end stands the command for what is left. `--device cpu` tries what a CPU can run.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, Target, say, shown

_NO_CUDA = 3
_GIB_EACH = 4
# Of each part's compiler: with one alone, kernels are compiled one after the other.
_LEAST_THREADS = 4
_LOOKS_EVERY_S = 1.0
_LAST_OF_LOG = 8000
# What is left of a quarter of an hour on a machine that has to be set up first.
_WITHIN_ONCE_MORE_S = 250
# What was ended after so long must not take the time of what has not begun.
_ITS_TIME_S = 60.0
_DONE = "done"
_EPILOG = """\
exit status: 0 all parts did well, 1 some did not, 3 there is no CUDA device

examples:
  ./run bench cuda --json cuda.json
  ./run bench cuda --parts networks,steps
  ./run bench cuda --parts resnet50,tune-resnet50 --within 200
  ./run bench cuda --device cpu --parts networks,cameras,steps,contexts --seconds 0.1"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu as a trial (default cuda:0)")
    parser.add_argument(
        "--parts", default="", help="some of them, with commas between (default: all but cameras-fp32)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.7, help="for which each candidate is timed (default 0.7)"
    )
    parser.add_argument("--within", type=float, default=470.0, help="seconds for all (default 470)")
    parser.add_argument(
        "--part-within", type=float, default=400.0, help="seconds for one part (default 400)"
    )
    parser.add_argument("--jobs", type=int, default=0, help="parts at once (default: by cores and memory)")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print(
                f"bench cuda: torch {torch.__version__} sees no CUDA device; --device cpu tries what a CPU"
                " can run"
            )
            return _NO_CUDA
    if arguments.part:
        _end_with_parent()
    from benchmarks.rig.cuda.parts import CUDA_ONLY, GROUPS, PARTS, PHASES, ROS_ONLY, run_part, usual

    if arguments.part:
        return run_part(arguments.part, arguments.device, arguments.seconds, arguments.folder)
    given = [name.strip() for name in arguments.parts.split(",") if name.strip()] or usual()
    names = list(dict.fromkeys(part for name in given for part in GROUPS.get(name, [name])))
    if unknown := sorted(set(names) - set(PARTS)):
        there_are = ", ".join([*PARTS, *GROUPS])
        parser.error(f"--parts: {unknown[0]!r} is unknown; there are {there_are}")
    if arguments.device == "cpu":
        names = [name for name in names if name not in CUDA_ONLY]
    if not arguments.parts and (missing := [name for name in ROS_ONLY if name not in names]):
        say(f"rclpy is not installed, and {', '.join(missing)} left out: `./run pack --ros` takes it along")
    report = Report("cuda", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_cuda_") as folder:
        parts = _Parts(arguments, report, Path(folder))
        for phase in PHASES:
            parts.run([name for name in phase.parts if name in names], phase.at_once)
        return parts.finish(names)


def _end_with_parent() -> None:
    """Have this part, and what it has started, end when the benchmark is gone, however that ended."""
    parents = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # for what this part starts

    def watch() -> None:
        os.read(parents, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class _Parts:
    """Runs parts as processes, shows what each has found as it ends, and keeps all of it in the JSON file."""

    def __init__(self, arguments: argparse.Namespace, report: Report, folder: Path) -> None:
        self._arguments, self._report, self._folder = arguments, report, folder
        self._end_s = time.monotonic() + arguments.within
        self._ended: dict[str, tuple[str, float]] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._turn, self._is_stopped, self._kept = threading.Lock(), False, ""
        self._handlers = {
            number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _stop(self, number: int, _: object) -> None:
        """End all that runs; what was found is shown and written as at any end."""
        say(f"{signal.Signals(number).name}: all parts end")
        self._is_stopped = True
        for process in list(self._running.values()):
            _kill_group(process)

    def run(self, names: Sequence[str], at_once: int) -> None:
        """Run these; none outlives its time or everybody's."""
        cores = len(os.sched_getaffinity(0))
        most = min(cores, (psutil.virtual_memory().available >> 30) // _GIB_EACH)
        jobs = 1 if at_once == 1 else self._arguments.jobs or max(1, min(at_once, most))
        threads = max(min(_LEAST_THREADS, cores), cores // max(1, min(jobs, len(names))))
        with ThreadPoolExecutor(jobs) as pool:
            runs = [pool.submit(self._run_one, name, threads) for name in names]
            while wait(runs, _LOOKS_EVERY_S).not_done:
                self._keep()
        self._keep()
        for each in runs:
            each.result()

    def _run_one(self, name: str, threads: int) -> None:
        from benchmarks.rig.cuda.parts import least_s, most_s

        began = time.monotonic()
        is_late = began >= self._end_s - least_s(name, self._arguments.device)
        if self._is_stopped or is_late:
            self._ended[name] = "left out: stopped" if self._is_stopped else "left out: no time", math.nan
            return
        most = most_s(name, self._arguments.device)
        left_s = min(self._end_s - began, self._arguments.part_within, most)
        say(f"{name} begins")
        with open(self._folder / f"{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                self._command(name),
                env=self._environment(threads),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running[name] = process
        if self._is_stopped:  # just now, when it was not yet among them
            _kill_group(process)
        try:
            ended = _DONE if process.wait(left_s) == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"killed: not done after {left_s:.0f} s"
        _kill_group(process)  # and what it may have left behind
        process.communicate()
        del self._running[name]
        if self._is_stopped and ended != _DONE:
            ended = "killed: stopped"
        took_s = time.monotonic() - began
        self._ended[name] = ended, took_s
        say(f"{name}: {ended} ({took_s:.0f} s)")
        with self._turn:
            for title, columns, rows in self._found(name).get("tables", ()):
                self._report.table(title, columns, rows)
            for target in self._targets(name):
                self._report.text(_verdict(target))
            for line in self._wrong(name, ended):
                self._report.text(f"{name}: {line}")

    def _command(self, name: str) -> list[str]:
        own = self._arguments
        command = [sys.executable, "-m", "benchmarks.cuda", "--part", name, "--folder", str(self._folder)]
        return [*command, "--device", own.device, "--seconds", str(own.seconds)]

    def _environment(self, threads: int) -> dict[str, str]:
        return {
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "inductor"),
            **os.environ,
            "PYTHONUNBUFFERED": "1",
        }

    def _found(self, name: str) -> dict[str, Any]:
        """What a part has found so far; it may still run."""
        file = self._folder / f"{name}.json"
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return found

    def _targets(self, name: str) -> list[Target]:
        return [Target(**each) for each in self._found(name).get("targets", ())]

    def _log(self, name: str) -> str:
        file = self._folder / f"{name}.log"
        return file.read_text(encoding="utf-8", errors="replace")[-_LAST_OF_LOG:] if file.exists() else ""

    def _wrong(self, name: str, ended: str) -> list[str]:
        wrong: list[str] = self._found(name).get("wrong", [])
        if ended == _DONE or ended.startswith("left out"):
            return wrong
        lines = [line for line in self._log(name).splitlines() if line.strip()]
        if ended.startswith("killed"):  # how far it was
            lines = [line for line in lines if line.startswith("[")]
        return [*wrong, lines[-1] if lines else "it said nothing"]

    def _figures(self) -> dict[str, Any]:
        # A signal may come meanwhile, and parts may begin or end.
        ended = {**dict.fromkeys(list(self._running), ("runs", math.nan)), **self._ended}
        parts = {
            name: {
                "ended": how,
                "took_s": took_s,
                "wrong": self._wrong(name, how),
                "verdicts": list(map(_verdict, self._targets(name))),
            }
            for name, (how, took_s) in ended.items()
        }
        found = {name: each["figures"] for name in ended if (each := self._found(name))}
        logs = {name: self._log(name) for name, (how, _) in ended.items() if how != _DONE}
        return {"parts": parts, **found, "logs": logs}

    def _keep(self) -> None:
        """Write what was found so far, if that is new."""
        figures = self._figures()
        text = json.dumps({**figures, "logs": {}}, default=str)
        if text != self._kept:
            self._kept = text
            self._report.keep(figures)

    def finish(self, names: Sequence[str]) -> int:
        """Show how each part ended, all targets, and the command for parts that have not come to their end."""
        figures = self._figures()
        targets = [target for name in figures["parts"] for target in self._targets(name)]
        rows = [
            (name, part["ended"], part["took_s"], "; ".join(part["wrong"]))
            for name, part in figures["parts"].items()
        ]
        self._report.table("Parts", ("", "ended", "s", "what is wrong"), rows)
        left = [name for name in names if self._ended[name][0] != _DONE]
        if left:
            had = [name for name in left if self._ended[name][1] >= _ITS_TIME_S]
            others = [name for name in left if name not in had]
            parts = {"more": others, "once-more": had}
            figures["left"] = "; ".join(self._left(some, suffix) for suffix, some in parts.items() if some)
            self._report.text(f"For what is left: {figures['left']}")
        self._report.finish(figures, targets)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        return int(bool(left) or any(wrong for *_, wrong in rows) or not all(each.met for each in targets))

    def _left(self, names: Sequence[str], suffix: str) -> str:
        words = [*shlex.split(os.environ.get("TORCHPERF_RUN", "./run")), "bench", "cuda"]
        words += ["--parts", ",".join(names), "--device", self._arguments.device]
        words += ["--within", str(_WITHIN_ONCE_MORE_S)]
        if file := self._arguments.json:
            words += ["--json", str(file.with_name(f"{file.stem}-{suffix}.json"))]
        return shlex.join(words)


def _verdict(target: Target) -> str:
    limit = f"{target.relation} {shown(target.limit)} {target.unit}".strip()
    return f"{target.what}: {shown(target.value)} ({limit}): {'met' if target.met else 'missed'}"


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
