"""Whether logs that are replayed side by side take a share of the time, and what handing them out costs.

Every log is replayed alone, as `torchperf replay LOG` does it, and on a cluster of one worker, in turns, so that both
meet the same machine. What a log takes alone besides its frames (starting workers, importing torch, hashing the log,
writing results) is the fixed cost of a replay, wherever it runs; what it takes longer on the cluster is the cost of
distribution, in time and in processor time of all processes; on a busy machine the latter says more. Then all logs are
replayed by clusters of one worker and of more, whose start and end, which come once, are told beside.
"""

import argparse
import contextlib
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bare_stage import write_images
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.graph import model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.replay.batch.batch_cluster import BatchOptions, Cluster, open_cluster, replay_on
from torchperf_ros.replay.batch.batch_logs import FoundLog, find_logs
from torchperf_ros.replay.batch.batch_results import Ended, LogTask, replay_one
from torchperf_ros.replay.replay_options import ReplayOptions

_PACE: Final = "fast"
_OF_LINEAR: Final = 0.9
_EACH_S: Final = 0.1
_IDLE_S: Final = 5.0
_LONGER: Final = "on a cluster: longer by"
_MORE: Final = "on a cluster: processor time more by"
_EPILOG = """\
targets: as many times the logs per minute as there are workers, 10 % less at most; 0.1 s per log for distribution

examples:
  ./run bench many_logs
  ./run bench many_logs --logs 32 --parallel 1 2 4 8 --json many_logs.json"""


@dataclass(frozen=True)
class _Cost:
    """Of a replay: its time, the processor time of all processes, and the part of its time in which frames ran."""

    wall_s: float
    cpu_s: float
    frames_s: float


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--logs", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--frames", type=int, default=300, help="of each log (default 300)")
    parser.add_argument("--size", default="320x240", help="of the images, rgb8 (default 320x240)")
    parser.add_argument("--model-ms", type=float, default=10.0, help="inference time (default 10; 0: the smallest)")
    parser.add_argument("--parallel", type=int, nargs="+", default=[1, 2], help="logs at a time (default 1 2)")
    parser.add_argument("--tasks", type=int, default=200, help="tasks that do nothing (default 200)")
    arguments = parser.parse_args()
    report = Report("many_logs", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_many_logs_") as name:
        folder = Path(name)
        logs = _logs(folder / "logs", arguments)
        options = ReplayOptions(pace=_PACE, overrides=_parameters(arguments))
        say("alone and on a cluster of one worker, in turns")
        costs = _in_turns(folder / "turns", logs, options, arguments.tasks)
        clusters = {}
        for workers in sorted({1, *arguments.parallel}):
            say(f"with {workers} at a time")
            clusters[workers] = _cluster(folder / str(workers), logs, options, workers)
    _show(report, costs, clusters, len(logs))
    return 0


def _show(report: Report, costs: dict[str, list[float]], clusters: dict[int, dict[str, Any]], logs: int) -> None:
    spread = {what: _spread(values) for what, values in costs.items()}
    rows = [[what, *found.values()] for what, found in spread.items()]
    report.table("What a log costs, s", ("", "p50", "p25", "p75", "min", "max"), rows)
    one_s = clusters[1]["run_s"]
    rows = []
    for workers, found in clusters.items():
        found["times_as_fast"] = one_s / found["run_s"]
        found["of_linear"] = found["times_as_fast"] / workers
        rows.append([
            workers, found["start_s"], found["run_s"], found["end_s"], logs / found["run_s"] * 60,
            found["times_as_fast"], found["of_linear"],
        ])  # fmt: skip
    report.table(f"{logs} logs", ("workers", "start s", "logs s", "end s", "logs/min", "times one", "of linear"), rows)
    report.finish({"costs": spread, "clusters": clusters}, [
        *(Target(f"{workers} workers, of linear", found["of_linear"], ">=", _OF_LINEAR)
          for workers, found in clusters.items() if workers > 1),
        *(Target(what, spread[what]["p50"], "<=", _EACH_S, "s") for what in (_LONGER, _MORE)),
    ])  # fmt: skip


def _spread(values: list[float]) -> dict[str, float]:
    names = {"p50": 50, "p25": 25, "p75": 75, "min": 0, "max": 100}
    return dict(zip(names, np.percentile(values, list(names.values())).tolist(), strict=True))


def _logs(folder: Path, arguments: argparse.Namespace) -> tuple[FoundLog, ...]:
    folder.mkdir()
    say(f"writing {arguments.logs} logs of {arguments.frames} images")
    width, height = (int(word) for word in arguments.size.split("x"))
    for number in range(arguments.logs):
        write_images(folder / f"{number:03}.mcap", arguments.frames, width, height)
    return find_logs([folder])


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


def _in_turns(folder: Path, logs: tuple[FoundLog, ...], options: ReplayOptions, tasks: int) -> dict[str, list[float]]:
    """What logs cost in this process and on a cluster of one worker, in s."""
    with open_cluster(BatchOptions(folder, parallel=1), _PACE, len(logs)) as cluster:

        def alone(task: LogTask) -> None:
            _check(replay_one(task))

        def handed(task: LogTask) -> None:
            _hand_out(cluster, [task])

        found: dict[Callable[[LogTask], None], list[_Cost]] = {alone: [], handed: []}
        for number, log in enumerate(logs):
            for act in (alone, handed) if number % 2 else (handed, alone):  # neither is always the first
                (task,) = _tasks(folder / act.__name__, (log,), options, 1)
                found[act].append(_cost(act, task))
        nothing_s = []
        for number in range(tasks):
            at_s = time.monotonic()
            cluster.client.submit(int, number, pure=False).result()
            nothing_s.append(time.monotonic() - at_s)
        idle_s = _processor_s()
        time.sleep(_IDLE_S)
        idle_s = (_processor_s() - idle_s) / _IDLE_S
    pairs = list(zip(found[alone], found[handed], strict=True))
    return {
        "a log alone": [one.wall_s for one, _ in pairs],
        "  of it its frames": [one.frames_s for one, _ in pairs],
        "  of it the rest, which is fixed": [one.wall_s - one.frames_s for one, _ in pairs],
        "  processor time": [one.cpu_s for one, _ in pairs],
        _LONGER: [other.wall_s - one.wall_s for one, other in pairs],
        _MORE: [other.cpu_s - one.cpu_s for one, other in pairs],
        "a task that does nothing": nothing_s,
        "a cluster that has nothing to do: processor time per s": [idle_s],
    }


def _cost(act: Callable[[LogTask], None], task: LogTask) -> _Cost:
    cpu_s, began_s = _processor_s(), time.monotonic()
    act(task)
    wall_s = time.monotonic() - began_s
    summary = json.loads((task.folder / task.log.name / "summary.json").read_text(encoding="utf-8"))
    return _Cost(wall_s, _processor_s() - cpu_s, summary["took_s"])


def _processor_s() -> float:
    """Of this process, of those that it has started, at any depth, and of theirs that have ended."""
    me, total_s = psutil.Process(), 0.0
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            total_s += sum(process.cpu_times()[:4])
    return total_s


def _hand_out(cluster: Cluster, tasks: list[LogTask]) -> None:
    replay_on(cluster, tasks, BatchOptions(tasks[0].folder, retries=0), lambda _log, how, _again: _check(how))


def _cluster(folder: Path, logs: tuple[FoundLog, ...], options: ReplayOptions, workers: int) -> dict[str, Any]:
    """Seconds to start a cluster, to replay all logs on it, and to end it."""
    began_s = time.monotonic()
    with open_cluster(BatchOptions(folder, parallel=workers), _PACE, len(logs)) as cluster:
        cluster.client.submit(int).result()
        ready_s = time.monotonic()
        _hand_out(cluster, _tasks(folder, logs, options, workers))
        done_s = time.monotonic()
    return {"start_s": ready_s - began_s, "run_s": done_s - ready_s, "end_s": time.monotonic() - done_s}


def _check(ended: Ended) -> None:
    if ended.reason:
        raise SystemExit(f"a log was not replayed: {ended.reason}\n{ended.traceback}")


if __name__ == "__main__":
    sys.exit(main())
