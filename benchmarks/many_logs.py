"""Whether logs that are replayed side by side take a share of the time, and what handing them out costs.

The same logs are replayed one after the other without a cluster, and by clusters of one worker and of more on this
machine. What a cluster of one worker takes longer than none is the cost of distribution, for each log; what remains of
it with a task that does nothing is Dask's own. Start and end of a cluster, which come once, are told beside.
"""

import argparse
import json
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import model_options
from benchmarks.rig.image_log import write_images
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.replay.many.many_cluster import open_cluster
from torchperf_ros.replay.many.many_logs import FoundLog, find_logs
from torchperf_ros.replay.many.many_options import ManyOptions
from torchperf_ros.replay.many.many_run import ManyRun
from torchperf_ros.replay.many.many_task import Ended, LogTask, replay_one
from torchperf_ros.replay.replay_options import ReplayOptions

_PACE: Final = "fast"
_OF_LINEAR: Final = 0.9
_EPILOG = """\
targets: as many times the logs per minute as there are workers, 10 % less at most; 0.1 s per log for distribution

examples:
  ./run bench many_logs
  ./run bench many_logs --logs 32 --workers 1 2 4 8 --json many_logs.json"""


class _Silent:
    """Watches a run without a word, but for what failed."""

    def progress(self, log: FoundLog, done_ns: int, total_ns: int) -> None:
        pass

    def ended(self, log: FoundLog, ended: Ended, again: bool) -> None:
        if ended.reason:
            say(f"{log.name}: {ended.reason}")


def main() -> int:
    """Measure, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--logs", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--frames", type=int, default=300, help="of each log (default 300)")
    parser.add_argument("--size", default="320x240", help="of the images, rgb8 (default 320x240)")
    parser.add_argument("--model-ms", type=float, default=10.0, help="inference time (default 10; 0: the smallest)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="logs at a time (default 1 2)")
    parser.add_argument("--tasks", type=int, default=200, help="tasks that do nothing (default 200)")
    arguments = parser.parse_args()
    report = Report("many_logs", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_many_logs_") as name:
        folder = Path(name)
        logs = _logs(folder / "logs", arguments)
        options = ReplayOptions(pace=_PACE, overrides=_parameters(arguments))
        say("without a cluster")
        loop_s = _loop(folder / "loop", logs, options)
        clusters = {}
        for workers in sorted({1, *arguments.workers}):
            say(f"with {workers} at a time")
            clusters[workers] = _cluster(folder / str(workers), logs, options, workers, arguments.tasks)
    _show(report, len(logs), loop_s, clusters)
    return 0


def _show(report: Report, logs: int, loop_s: float, clusters: dict[int, dict[str, Any]]) -> None:
    one_s = clusters[1]["run_s"]
    rows = [["none", "-", loop_s, "-", logs / loop_s * 60, loop_s / one_s, "-"]]
    for workers, figures in clusters.items():
        figures["times_as_fast"] = one_s / figures["run_s"]
        figures["of_linear"] = figures["times_as_fast"] / workers
        rows.append([
            workers, figures["start_s"], figures["run_s"], figures["end_s"], logs / figures["run_s"] * 60,
            figures["times_as_fast"], figures["of_linear"],
        ])  # fmt: skip
    report.table(f"{logs} logs", ("workers", "start s", "logs s", "end s", "logs/min", "times one", "of linear"), rows)
    nothing = clusters[1]["nothing_ms"]
    each_s = (one_s - loop_s) / logs
    report.table("What distribution costs", ("", "p50", "p99", "max"), [
        ["a task that does nothing, ms", nothing["p50"], nothing["p99"], nothing["max"]],
        ["each log, one worker less none, s", each_s, "-", "-"],
    ])  # fmt: skip
    scaled = {workers: figures for workers, figures in clusters.items() if workers > 1}
    report.finish({"loop_s": loop_s, "clusters": clusters, "distribution_s_per_log": each_s}, [
        *(Target(f"{workers} workers, of linear", found["of_linear"], ">=", _OF_LINEAR)
          for workers, found in scaled.items()),
        Target("distribution, each log", each_s, "<=", 0.1, "s"),
    ])  # fmt: skip


def _logs(folder: Path, arguments: argparse.Namespace) -> tuple[FoundLog, ...]:
    folder.mkdir()
    say(f"writing {arguments.logs} logs of {arguments.frames} images")
    width, height = (int(word) for word in arguments.size.split("x"))
    for number in range(arguments.logs):
        write_images(folder / f"{number:03}.mcap", arguments.frames, width, height)
    return find_logs([folder], folder)


def _parameters(arguments: argparse.Namespace) -> dict[str, object]:
    """One stage with one worker process and one thread: what one core can do, whatever else there is."""
    return {
        "stages": ["perception"], "worker_threads": 1, "perception.adapter": ADAPTER,
        "perception.options": json.dumps(model_options(arguments.model_ms)), "perception.output": "path",
        "perception.tiers": ["full"], "perception.engine": "eager", "perception.backup": "none",
    }  # fmt: skip


def _tasks(folder: Path, logs: tuple[FoundLog, ...], options: ReplayOptions, beside: int) -> list[LogTask]:
    run_folder = folder / f".run-{secrets.token_hex(4)}"
    run_folder.mkdir(parents=True)
    return [LogTask(log, options, folder, run_folder, "", beside=beside) for log in logs]


def _loop(folder: Path, logs: tuple[FoundLog, ...], options: ReplayOptions) -> float:
    """Seconds for all logs, one after the other in this process."""
    began_s = time.monotonic()
    for task in _tasks(folder, logs, options, 1):
        _check(replay_one(task))
    return time.monotonic() - began_s


def _cluster(
    folder: Path, logs: tuple[FoundLog, ...], options: ReplayOptions, workers: int, tasks: int
) -> dict[str, Any]:
    """Seconds to start a cluster, to replay all logs on it, and to end it; ms for each task that does nothing."""
    began_s = time.monotonic()
    with open_cluster(ManyOptions(folder, workers=workers), _PACE, len(logs)) as cluster:
        cluster.client.submit(int).result()
        ready_s = time.monotonic()
        nothing_ms = []
        for number in range(tasks):
            at_s = time.monotonic()
            cluster.client.submit(int, number, pure=False).result()
            nothing_ms.append((time.monotonic() - at_s) * 1e3)
        run_s = time.monotonic()
        ended: dict[str, Ended] = {}
        ManyRun(cluster, _Silent(), retries=0, timeout_s=0.0).run(_tasks(folder, logs, options, workers), ended)
        done_s = time.monotonic()
    for how in ended.values():
        _check(how)
    return {
        "start_s": ready_s - began_s, "run_s": done_s - run_s, "end_s": time.monotonic() - done_s,
        "nothing_ms": distribution(nothing_ms), "replay_s": statistics.fmean(_took(folder)),
    }  # fmt: skip


def _took(folder: Path) -> list[float]:
    """What each replay itself took, in s; it grows where several get into each other's way."""
    return [json.loads(file.read_text(encoding="utf-8"))["seconds"] for file in folder.glob("*/summary.json")]


def _check(ended: Ended) -> None:
    if ended.reason:
        raise SystemExit(f"a log was not replayed: {ended.reason}\n{ended.traceback}")


if __name__ == "__main__":
    sys.exit(main())
