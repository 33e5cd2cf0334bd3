"""Everything that a GPU can show within 8 minutes, without ROS and without a network; then the tests marked `gpu`.

Engines, tiers and precisions with parity, CUDA graphs, the launch-bound curve, copies, streams, memory history, the
profiler, starts from packages, and faults through real workers. Each part is a process of its own with a time-out: one
that fails is named, and the rest goes on. Parts build side by side, and time one after the other. `--device cpu` tries
what a CPU can run.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, say

_NO_CUDA = 3
_GIB_EACH = 4
_MOST_JOBS = 16
_EPILOG = """\
exit status: 0 all parts did well, 1 some did not, 3 there is no CUDA device

examples:
  ./run bench cuda --json cuda.json
  ./run bench cuda --parts workers,start
  ./run bench cuda --device cpu --parts copies,memory,profile,workers --seconds 0.1"""


@dataclass
class Part:
    """One part's process.

    Attributes:
        last: begins when all others have ended.
        ended: how, "" while it runs or waits.
        took_s: until then.
    """

    name: str
    last: bool = False
    process: subprocess.Popen[str] | None = None
    started_s: float = 0.0
    ended: str = ""
    took_s: float = math.nan


def main() -> int:
    """Run the parts, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu as a trial (default cuda:0)")
    parser.add_argument("--parts", default="", help="some of them, with commas between (default all)")
    parser.add_argument("--seconds", type=float, default=1.0, help="for which each candidate is timed (default 1)")
    parser.add_argument("--within", type=float, default=470.0, help="seconds for all (default 470)")
    parser.add_argument("--part-within", type=float, default=400.0, help="seconds for one part (default 400)")
    parser.add_argument("--jobs", type=int, default=0, help="parts at once (default: by cores and memory)")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device != "cpu":
        import torch

        if not torch.cuda.is_available():
            print(f"bench cuda: torch {torch.__version__} sees no CUDA device; --device cpu tries what a CPU can run")
            return _NO_CUDA
    from benchmarks.rig.cuda_parts import CUDA_ONLY, LAST, PARTS, run_part

    if arguments.part:
        return run_part(arguments.part, arguments.device, arguments.seconds, arguments.folder)
    names = [name.strip() for name in arguments.parts.split(",") if name.strip()] or list(PARTS)
    if unknown := sorted(set(names) - set(PARTS)):
        parser.error(f"--parts: {unknown[0]!r} is unknown; there are {', '.join(PARTS)}")
    if arguments.device == "cpu":
        names = [name for name in names if name not in CUDA_ONLY]
    report = Report("cuda", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_cuda_") as folder:
        names = [*(name for name in names if name not in LAST), *(name for name in names if name in LAST)]
        parts = _run([Part(name, last=name in LAST) for name in names], arguments, Path(folder))
        found = {name: json.loads(file.read_text(encoding="utf-8"))
                 for name in names if (file := Path(folder, f"{name}.json")).exists()}  # fmt: skip
        logs = {name: Path(folder, f"{name}.log").read_text(encoding="utf-8", errors="replace")[-8000:]
                for name in names if Path(folder, f"{name}.log").exists()}  # fmt: skip
    return _show(report, parts, found, logs)


def _run(parts: list[Part], arguments: argparse.Namespace, folder: Path) -> list[Part]:
    """Every part, some at once; none outlives its time or everybody's."""
    memory_gib = psutil.virtual_memory().available >> 30
    cores = len(os.sched_getaffinity(0))
    jobs = arguments.jobs or max(1, min(_MOST_JOBS, cores, memory_gib // _GIB_EACH))
    environment = {
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // jobs)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), **os.environ, "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    give_up_at = time.monotonic() + arguments.within
    while left := [part for part in parts if not part.ended]:
        running = [part for part in left if part.process is not None]
        for part in running:
            _look_after(part, give_up_at, arguments.part_within)
        for part in left:
            busy = sum(each.process is not None and not each.ended for each in parts)
            if part.process is None and busy < jobs and (not part.last or all(each.last for each in left)):
                _begin(part, arguments, folder, environment, give_up_at)
        time.sleep(0.1)
    return parts


def _begin(
    part: Part, arguments: argparse.Namespace, folder: Path, environment: dict[str, str], give_up_at: float
) -> None:
    if time.monotonic() > give_up_at:
        part.ended = "left out: no time"
        return
    say(f"{part.name} begins")
    command = [
        sys.executable, "-m", "benchmarks.cuda", "--part", part.name, "--folder", str(folder),
        "--device", arguments.device, "--seconds", str(arguments.seconds),
    ]  # fmt: skip
    with open(folder / f"{part.name}.log", "w", encoding="utf-8") as log:
        part.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            text=True,
        )  # fmt: skip
    part.started_s = time.monotonic()


def _look_after(part: Part, give_up_at: float, part_within_s: float) -> None:
    assert part.process is not None
    now, status = time.monotonic(), part.process.poll()
    if status is None and now < min(give_up_at, part.started_s + part_within_s):
        return
    if status is None:
        _kill_group(part.process)
        part.ended = f"killed: not done after {now - part.started_s:.0f} s"
    else:
        part.ended = "done" if status == 0 else f"ended with status {status}"
        _kill_group(part.process)  # what it may have left behind
    part.took_s = now - part.started_s
    say(f"{part.name}: {part.ended} ({part.took_s:.0f} s)")


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _show(report: Report, parts: list[Part], found: dict[str, Any], logs: dict[str, str]) -> int:
    good = True
    summary = []
    for part in parts:
        for title, columns, rows in found.get(part.name, {}).get("tables", ()):
            report.table(title, columns, rows)
        wrong = found.get(part.name, {}).get("wrong", [])
        if part.ended != "done":
            lines = [line for line in logs.get(part.name, "").splitlines() if line.strip()]
            if part.ended.startswith("killed"):  # how far it was
                lines = [line for line in lines if line.startswith("[")]
            wrong = [lines[-1] if lines else "it said nothing"]
        good = good and not wrong
        summary.append((part.name, part.ended, part.took_s, "; ".join(wrong)))
    report.table("Parts", ("", "ended", "s", "what is wrong"), summary)
    figures = {name: content["figures"] for name, content in found.items()}
    ended = {part.name: {"ended": part.ended, "took_s": part.took_s, "wrong": wrong}
             for part, (*_, wrong) in zip(parts, summary, strict=True)}  # fmt: skip
    failed = {part.name: logs.get(part.name, "") for part in parts if part.ended != "done"}
    report.finish({"parts": ended, **figures, "logs": failed}, [])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
