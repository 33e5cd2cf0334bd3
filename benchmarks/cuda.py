"""Everything that a GPU can show within 8 minutes, without ROS and without a network.

Networks that nobody tuned for, by hand beside engine auto and `tune`; a model's steps in a worker beside a bare
process; six cameras; what processes cost in the device's memory; faults through real workers; starts, the
launch-bound curve, copies, streams, captures; and the tests marked `gpu`. Each part is a process of its own with a
time-out: one that fails is named, and the rest goes on. Parts build side by side, and time one after the other.
`--device cpu` tries what a CPU can run.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, say

_NO_CUDA = 3
_GIB_EACH = 4
_MOST_JOBS = 16
# Of each part's compiler: with one alone, kernels are compiled one after the other.
_LEAST_THREADS = 4
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
    from benchmarks.rig.cuda.parts import CUDA_ONLY, GROUPS, PARTS, PHASES, USUAL, run_part

    if arguments.part:
        return run_part(arguments.part, arguments.device, arguments.seconds, arguments.folder)
    given = [name.strip() for name in arguments.parts.split(",") if name.strip()] or list(USUAL)
    names = list(dict.fromkeys(part for name in given for part in GROUPS.get(name, [name])))
    if unknown := sorted(set(names) - set(PARTS)):
        there_are = ", ".join([*PARTS, *GROUPS])
        parser.error(f"--parts: {unknown[0]!r} is unknown; there are {there_are}")
    if arguments.device == "cpu":
        names = [name for name in names if name not in CUDA_ONLY]
    report = Report("cuda", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_cuda_") as folder:
        ended, end_s = dict[str, tuple[str, float]](), time.monotonic() + arguments.within
        for phase in ([name for name in phase if name in names] for phase in PHASES):
            ended |= _run(phase, arguments, Path(folder), end_s)
        found = {
            name: json.loads(file.read_text(encoding="utf-8"))
            for name in ended
            if (file := Path(folder, f"{name}.json")).exists()
        }
        logs = {
            name: file.read_text(encoding="utf-8", errors="replace")[-8000:]
            for name in ended
            if (file := Path(folder, f"{name}.log")).exists()
        }
    return _show(report, ended, found, logs)


def _run(
    names: list[str], arguments: argparse.Namespace, folder: Path, end_s: float
) -> dict[str, tuple[str, float]]:
    """How each part ended, and after how many seconds.

    Some run at once, none outlives its time or everybody's.
    """
    memory_gib = psutil.virtual_memory().available >> 30
    cores = len(os.sched_getaffinity(0))
    jobs = arguments.jobs or max(1, min(_MOST_JOBS, cores, memory_gib // _GIB_EACH))
    threads = max(min(_LEAST_THREADS, cores), cores // max(1, min(jobs, len(names))))
    environment = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }

    def run(name: str) -> tuple[str, float]:
        began = time.monotonic()
        left_s = min(end_s - began, arguments.part_within)
        if left_s <= 0:
            return "left out: no time", math.nan
        say(f"{name} begins")
        command = [
            sys.executable,
            "-m",
            "benchmarks.cuda",
            "--part",
            name,
            "--folder",
            str(folder),
            "--device",
            arguments.device,
            "--seconds",
            str(arguments.seconds),
        ]
        with open(folder / f"{name}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            ended = "done" if process.wait(left_s) == 0 else f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"killed: not done after {left_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it may have left behind
        process.wait()
        took_s = time.monotonic() - began
        say(f"{name}: {ended} ({took_s:.0f} s)")
        return ended, took_s

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def _show(
    report: Report, ended: dict[str, tuple[str, float]], found: dict[str, Any], logs: dict[str, str]
) -> int:
    summary: list[tuple[str, str, float, str]] = []
    for name, (how, took_s) in ended.items():
        for title, columns, rows in found.get(name, {}).get("tables", ()):
            report.table(title, columns, rows)
        wrong = found.get(name, {}).get("wrong", [])
        if how != "done":
            lines = [line for line in logs.get(name, "").splitlines() if line.strip()]
            if how.startswith("killed"):  # how far it was
                lines = [line for line in lines if line.startswith("[")]
            wrong = [lines[-1] if lines else "it said nothing"]
        summary.append((name, how, took_s, "; ".join(wrong)))
    report.table("Parts", ("", "ended", "s", "what is wrong"), summary)
    figures = {name: content["figures"] for name, content in found.items()}
    parts = {name: {"ended": how, "took_s": took_s, "wrong": wrong} for name, how, took_s, wrong in summary}
    failed = {name: logs.get(name, "") for name, (how, _) in ended.items() if how != "done"}
    report.finish({"parts": parts, **figures, "logs": failed}, [])
    return int(any(wrong for *_, wrong in summary))


if __name__ == "__main__":
    sys.exit(main())
