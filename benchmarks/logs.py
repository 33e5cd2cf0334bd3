"""What recorded logs cost.

To read, to replay, to replay many side by side; and whether a played log keeps its time.

`reading`: a message, beside the readers of `rosbags` and of the `mcap` package. Three logs of the same raw
images: one with checksums, one without, one in SQLite. The readers take turns over each; the time of a
message is that of one step of the iteration, the file in the page cache.

`replay`: a log of raw images is replayed as fast as it goes, without an output, through a stage of the
benchmark's model. The overhead of a frame is the time from one frame to the next, less the steps in the
worker: reading the log, the copy into shared memory, two processes waking each other, the row that is kept.
It is replayed once more, then one twice as long, and the memory of the replaying process is read at the end
of each.

`many`: whether logs that are replayed side by side take a share of the time. All logs are replayed by
clusters of one worker and of more, whose start and end come once and have columns of their own. On that of
one worker every log is then replayed once more, in turns with a replay alone, as `torchperf replay LOG`
does it, so that both meet the same machine. What a log takes alone besides its frames (starting workers,
importing torch, hashing the log, writing results) is the fixed cost of a replay, wherever it runs; what it
takes longer on the cluster is the cost of distribution, in time and in processor time of all processes; on
a busy machine the latter says more.

`play`: a log of images and of odometry at 200 Hz, not compressed and compressed, is played by `torchperf
play` to nobody. What goes out more than 5 ms after it is due is late. Then the same while other processes
keep every core busy several times over.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
from mcap.reader import make_reader
from rosbags.highlevel import AnyReader
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from benchmarks.rig.arguments import add_camera, add_some, arguments_of
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import model_options
from benchmarks.rig.messages import IMAGE, image_cdr
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.cdr import restamped
from torchperf_ros.api.clock import NS_PER_S
from torchperf_ros.models.road_scene import ODOMETRY_TYPE, odometry_cdr
from torchperf_ros.replay.batch_tasks import (
    BatchOptions,
    Ended,
    FoundLog,
    LogTask,
    find_logs,
    open_cluster,
    replay_on,
    replay_one,
)
from torchperf_ros.replay.logs.log_reader import LogReader
from torchperf_ros.replay.replay import replay
from torchperf_ros.replay.replay_options import ReplayOptions
from torchperf_ros.replay.replay_record import OutputLog

if TYPE_CHECKING:
    from distributed import Client

_SHOWN: Final = ("count", "p50", "p90", "p99", "max")
_STEPS: Final = ("decode_ms", "preprocess_ms", "inference_ms", "postprocess_ms")
_FIRST_FRAMES: Final = 20
_OVERHEAD_MS, _GROWTH_MIB = 0.5, 16.0
_PACE: Final = "fast"
_MANY_SIZE: Final = "320x240"
_OF_LINEAR, _EACH_S = 0.9, 0.1
_NOTHING = 50  # tasks
_LONGER: Final = "on a cluster: longer by"
_MORE: Final = "on a cluster: processor time more by"
_ODOMETRY_HZ: Final = 200
_COMPRESSIONS: Final = ("none", "zstd")
_BEGIN_NS: Final = 1_700_000_000 * NS_PER_S  # of a log
_SUMMARY: Final = re.compile(
    r"played ([\d,]+) messages in ([\d.]+) s, (?:(\d+) late|none later).* ([\d.]+) ms"
)
_EPILOG = """\
targets: a replay's overhead at 1280x720 p50 <= 0.5 ms, its memory flat; as many times the logs per minute as there are
workers, 10 % less at most, and 0.1 s per log for distribution; nothing is played late on an otherwise idle machine

examples:
  ./run bench logs --parts reading --frames 60 --size 640x480 --json reading.json
  ./run bench logs --parts many --logs 32 --parallel 1 2 4 8 --json many.json
  ./run bench logs --parts play --seconds 60 --busy 4"""


def main() -> int:
    parts = {"reading": _reading, "replay": _replay, "many": _many, "play": _play}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument(
        "--frames", type=int, default=300, help="of each log that is read or replayed (default 300)"
    )
    add_camera(parser)
    reading = parser.add_argument_group("reading")
    reading.add_argument("--turns", type=int, default=3, help="of each reader (default 3)")
    many = parser.add_argument_group("many")
    many.add_argument(
        "--logs", type=int, default=12, help=f"how many, of images of {_MANY_SIZE} (default 12)"
    )
    many.add_argument(
        "--model-ms", type=float, default=10.0, help="inference time (default 10; 0: the smallest)"
    )
    many.add_argument(
        "--parallel", type=int, nargs="+", default=[1, 2], help="logs at a time (default 1 2)"
    )
    many.add_argument(
        "--idle", type=float, default=5.0, help="seconds of a cluster with nothing to do (default 5)"
    )
    play = parser.add_argument_group("play")
    play.add_argument("--seconds", type=float, default=20.0, help="of the log (default 20)")
    play.add_argument(
        "--busy", type=int, default=4, help="processes for each core that keep it busy (default 4)"
    )
    add_some(play, "--compressions", _COMPRESSIONS)
    arguments = parser.parse_args()
    report = Report("logs", arguments)
    with tempfile.TemporaryDirectory(prefix="torchperf_logs_") as folder:
        arguments.folder = Path(folder)
        report.finish_parts(arguments, parts)
    return 0


def _write_log(
    path: Path, messages: Iterable[tuple[str, str, int, bytes]], *, compress: bool = False
) -> None:
    """Topic, type, time in ns from the log's begin and CDR bytes of each message, which is stamped with that time."""
    with OutputLog(path, compress) as log:
        for topic, type_name, t_ns, data in messages:
            log.write(topic, type_name, restamped(data, _BEGIN_NS + t_ns), _BEGIN_NS + t_ns)
        log.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _images(path: Path, frames: int, size: str) -> None:
    """Images of noise at 30 Hz, not compressed."""
    say(f"writing {frames} images")
    width, height = (int(word) for word in size.split("x"))
    image = image_cdr(
        width, height, np.random.default_rng(1).integers(0, 255, width * height * 3, dtype=np.uint8)
    )
    _write_log(path, (("/image", IMAGE, number * 33_333_333, image) for number in range(frames)))


def _stage(model_ms: float) -> dict[str, object]:
    """Parameters of a stage of the benchmark's model, in eager."""
    return {
        "stages": ["perception"],
        "perception.adapter": ADAPTER,
        "perception.output": "path",
        "perception.options": json.dumps(model_options(model_ms)),
        "perception.tiers": ["full"],
        "perception.engine": "eager",
    }


def _reading(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    figures = {name: _turns(path, arguments.turns) for name, path in _same_logs(arguments).items()}
    for name, readers in figures.items():
        rows = [[reader, *(times[key] for key in _SHOWN)] for reader, times in readers.items()]
        report.table(
            f"{name}: {arguments.size} rgb8, ms per message", ("reader", "messages", *_SHOWN[1:]), rows
        )
    return figures, []


def _same_logs(arguments: argparse.Namespace) -> dict[str, Path]:
    first = arguments.folder / "with_checksums.mcap"
    _images(first, arguments.frames, arguments.size)
    logs = {"MCAP with checksums": first}
    store = get_typestore(Stores.ROS2_JAZZY)
    for name, plugin in (("MCAP without checksums", StoragePlugin.MCAP), ("SQLite", StoragePlugin.SQLITE3)):
        path = arguments.folder / plugin.name.lower()
        with LogReader(first) as log, Writer(path, version=9, storage_plugin=plugin) as writer:
            connection = writer.add_connection("/image", IMAGE, typestore=store)
            for message in log.messages():
                writer.write(connection, message.t_ns, message.data)
        logs[name] = path
    return logs


def _turns(path: Path, turns: int) -> dict[str, Any]:
    readers: dict[str, Callable[[Path], Iterator[object]]] = {"LogReader": _ours, "rosbags": _rosbags}
    if path.suffix == ".mcap":
        readers["mcap"] = _mcap
    times: dict[str, list[float]] = {name: [] for name in readers}
    for turn, (name, read) in itertools.product(range(turns), readers.items()):
        if not turn:
            say(f"{path.name}: {name}")
        times[name] += _steps_ms(read(path))
    return {name: distribution(values) for name, values in times.items()}


def _steps_ms(messages: Iterable[object]) -> list[float]:
    steps = []
    begin_ns = time.perf_counter_ns()
    for _ in messages:
        now_ns = time.perf_counter_ns()
        steps.append((now_ns - begin_ns) / 1e6)
        begin_ns = time.perf_counter_ns()
    return steps[1:]  # the first is the opening, too


def _ours(path: Path) -> Iterator[object]:
    with LogReader(path) as log:
        yield from log.messages()


def _rosbags(path: Path) -> Iterator[object]:
    with AnyReader([path], default_typestore=get_typestore(Stores.ROS2_JAZZY)) as log:
        yield from log.messages()


def _mcap(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        yield from make_reader(file, validate_crcs=True).iter_messages()


def _replay(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    short, long = (arguments.folder / f"{factor}.mcap" for factor in (1, 2))
    for log, factor in ((short, 1), (long, 2)):
        _images(log, factor * arguments.frames, arguments.size)
    runs = [_run(log, arguments.size) for log in (short, short, long)]
    rows = [
        [name, *(runs[0][f"{name}_ms"][key] for key in _SHOWN)] for name in ("overhead", "model", "frame")
    ]
    report.table(f"{arguments.size} rgb8, --pace {_PACE}, in ms", ("", "frames", *_SHOWN[1:]), rows)
    report.table(
        "memory of the replaying process",
        ("frames", "log MB", "RSS MiB"),
        [[run["frames"], run["log_mb"], run["rss_mib"]] for run in runs],
    )
    return {"runs": runs}, [
        Target("overhead p50", runs[0]["overhead_ms"]["p50"], "<=", _OVERHEAD_MS, "ms"),
        Target(
            "RSS, log twice as long, less",
            runs[2]["rss_mib"] - runs[1]["rss_mib"],
            "<=",
            _GROWTH_MIB,
            "MiB",
        ),
    ]


def _run(log: Path, size: str) -> dict[str, Any]:
    width, height = (int(word) for word in size.split("x"))
    values = {**_stage(0), "perception.max_frame_bytes": max(1024, 2 * width * height * 3)}
    answered_ns: list[int] = []
    say(f"replaying {log.name}")
    result = replay(
        log, ReplayOptions(overrides=values), lambda _done, _total: answered_ns.append(time.monotonic_ns())
    )
    rows = result.stage("perception").frames
    # the progress is reported when a frame is handed over, which is right after the one before was answered
    frame_ms = np.diff(np.array(answered_ns[: len(rows)])) / 1e6
    model_ms = sum(np.asarray(rows[name]) for name in _STEPS)[: len(frame_ms)]
    kept = slice(_FIRST_FRAMES, None)
    return {
        "frames": len(rows),
        "log_mb": log.stat().st_size / 1e6,
        "rss_mib": psutil.Process().memory_info().rss / (1 << 20),
        "overhead_ms": distribution((frame_ms - model_ms)[kept]),
        "model_ms": distribution(model_ms[kept]),
        "frame_ms": distribution(frame_ms[kept]),
    }


@dataclass(frozen=True)
class _Cost:
    """Of a replay.

    Its time, the processor time of all processes, and the part of its time in which frames ran.
    """

    wall_s: float
    cpu_s: float
    frames_s: float


def _many(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    folder = arguments.folder
    (folder / "logs").mkdir()
    for number in range(arguments.logs):
        _images(folder / "logs" / f"{number:03}.mcap", arguments.frames, _MANY_SIZE)
    logs = find_logs([folder / "logs"])
    # one worker process and one thread: what one core can do, whatever else there is
    values = {**_stage(arguments.model_ms), "worker_threads": 1, "perception.backup": "none"}
    options = ReplayOptions(pace=_PACE, overrides=values)
    costs: dict[str, dict[str, float]] = {}
    clusters: dict[int, dict[str, float]] = {}
    for workers in sorted({1, *arguments.parallel}):
        say(f"with {workers} at a time")
        began_s = time.monotonic()
        with open_cluster(BatchOptions(folder, parallel=workers), _PACE, len(logs)) as (client, _):
            client.submit(int).result()
            ready_s = time.monotonic()
            _hand_out(client, _tasks(folder / str(workers), logs, options, workers))
            done_s = time.monotonic()
            if workers == 1:
                say("alone and on the cluster of one worker, in turns")
                found_s = _in_turns(folder / "turns", client, logs, options, arguments.idle)
                costs = {what: _spread(values) for what, values in found_s.items()}
            ending_s = time.monotonic()
        found = clusters[workers] = {
            "start_s": ready_s - began_s,
            "run_s": done_s - ready_s,
            "end_s": time.monotonic() - ending_s,
        }
        found["logs_per_minute"] = len(logs) / found["run_s"] * 60
        found["times_as_fast"] = clusters[1]["run_s"] / found["run_s"]
        found["of_linear"] = found["times_as_fast"] / workers
    report.table(
        "What a log costs, s",
        ("", "p50", "p25", "p75", "min", "max"),
        [[what, *figures.values()] for what, figures in costs.items()],
    )
    columns = ("workers", "start s", "logs s", "end s", "logs/min", "times one", "of linear")
    report.table(
        f"{len(logs)} logs", columns, [[workers, *found.values()] for workers, found in clusters.items()]
    )
    return {"costs": costs, "clusters": clusters}, [
        *(
            Target(f"{workers} workers, of linear", found["of_linear"], ">=", _OF_LINEAR)
            for workers, found in clusters.items()
            if workers > 1
        ),
        *(Target(what, costs[what]["p50"], "<=", _EACH_S, "s") for what in (_LONGER, _MORE)),
    ]


def _spread(values: list[float]) -> dict[str, float]:
    names = {"p50": 50, "p25": 25, "p75": 75, "min": 0, "max": 100}
    return dict(zip(names, np.percentile(values, list(names.values())).tolist(), strict=True))


def _tasks(folder: Path, logs: Sequence[FoundLog], options: ReplayOptions, beside: int) -> list[LogTask]:
    run_folder = folder / f".run-{secrets.token_hex(4)}"
    run_folder.mkdir(parents=True)
    return [LogTask(log, options, folder, run_folder, "", beside=beside) for log in logs]


def _in_turns(
    folder: Path, client: "Client", logs: Sequence[FoundLog], options: ReplayOptions, idle_s: float
) -> dict[str, list[float]]:
    """What logs cost in this process and on a cluster of one worker, in s."""

    def alone(task: LogTask) -> None:
        _check(replay_one(task))

    def handed(task: LogTask) -> None:
        _hand_out(client, [task])

    found: dict[Callable[[LogTask], None], list[_Cost]] = {alone: [], handed: []}
    for number, log in enumerate(logs):
        for act in (alone, handed) if number % 2 else (handed, alone):  # neither is always the first
            (task,) = _tasks(folder / act.__name__, (log,), options, 1)
            found[act].append(_cost(act, task))
    nothing_s = []
    for number in range(_NOTHING):
        at_s = time.monotonic()
        client.submit(int, number, pure=False).result()
        nothing_s.append(time.monotonic() - at_s)
    before_s = _processor_s()
    time.sleep(idle_s)
    idle = (_processor_s() - before_s) / idle_s
    pairs = list(zip(found[alone], found[handed], strict=True))
    return {
        "a log alone": [one.wall_s for one, _ in pairs],
        "  of it its frames": [one.frames_s for one, _ in pairs],
        "  of it the rest, which is fixed": [one.wall_s - one.frames_s for one, _ in pairs],
        "  processor time": [one.cpu_s for one, _ in pairs],
        _LONGER: [other.wall_s - one.wall_s for one, other in pairs],
        _MORE: [other.cpu_s - one.cpu_s for one, other in pairs],
        "a task that does nothing": nothing_s,
        "a cluster that has nothing to do: processor time per s": [idle],
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


def _hand_out(client: "Client", tasks: list[LogTask]) -> None:
    replay_on(client, tasks, lambda _log, how: _check(how))


def _check(ended: Ended) -> None:
    if ended.reason:
        raise SystemExit(f"a log was not replayed: {ended.reason}\n{ended.traceback}")


def _play(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    figures: dict[str, Any] = {}
    for name in arguments.compressions:
        log = arguments.folder / f"{name}.mcap"
        say(f"writing {arguments.seconds:g} s, compression {name}")
        _write(log, arguments, compress=name == "zstd")
        for busy in dict.fromkeys((0, arguments.busy)):
            say(f"playing it with {busy} busy processes for each core")
            with _busy(busy * (psutil.cpu_count() or 1)):
                figures[f"{name}, {busy} busy processes a core"] = _played(log)
    report.table(
        f"{arguments.size} rgb8 at {arguments.rate:g} Hz and odometry at {_ODOMETRY_HZ} Hz",
        ("compression and load", "messages", "took s", "late", "latest ms"),
        [[name, *row.values()] for name, row in figures.items()],
    )
    idle = [row["late"] for name, row in figures.items() if ", 0 busy" in name]
    return figures, [Target("late messages, idle machine", sum(idle), "==", 0)]


def _played(log: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "torchperf_ros.tools", "play", str(log), "--clock"]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    found = _SUMMARY.search(said)
    assert found, said
    messages, took_s, late, worst_ms = found.groups()
    return {
        "messages": int(messages.replace(",", "")),
        "took_s": float(took_s),
        "late": int(late or 0),
        "worst_late_ms": float(worst_ms),
    }


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-m", "benchmarks.rig.busy"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _write(path: Path, arguments: argparse.Namespace, *, compress: bool) -> None:
    """Images of a gradient with some noise, which compress as those of a camera do: by a little."""
    width, height = (int(word) for word in arguments.size.split("x"))
    noise = np.random.default_rng(1).integers(0, 32, width * height * 3, dtype=np.uint8)
    image = image_cdr(
        width, height, noise + (np.arange(width * height * 3) // (3 * width) % 200).astype(np.uint8)
    )
    times = [
        (round(n * NS_PER_S / arguments.rate), True)
        for n in range(round(arguments.seconds * arguments.rate))
    ]
    times += [(n * NS_PER_S // _ODOMETRY_HZ, False) for n in range(round(arguments.seconds * _ODOMETRY_HZ))]
    messages = (
        (
            ("/image", IMAGE, t_ns, image)
            if is_image
            else ("/odom", ODOMETRY_TYPE, t_ns, odometry_cdr(t_ns / NS_PER_S))
        )
        for t_ns, is_image in sorted(times)
    )
    _write_log(path, messages, compress=compress)


if __name__ == "__main__":
    sys.exit(main())
