"""Several cameras and one model: one stage with streams, beside one naive node a camera, and beside one stage a camera.

All three have the same cameras, the same model and the same budget. They work in turns, and what does not work
meanwhile sleeps. Each is measured from the first image of a turn to its last: which images were answered, which
of these by the deadline, what that took of the processors, and what memory its processes have together (PSS).
With `faults`, the first camera's images make whoever runs them raise, stall or die; the other cameras' do not.
"""

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import psutil

from benchmarks.rig.arguments import add_camera, add_stage, arguments_of
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.graph import CameraProcess, Graph, model_options
from benchmarks.rig.observer import Row
from benchmarks.rig.poison_faults import FAULTS
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.outcome import Outcome

_STREAMS, _STAGES, _NAIVE = "streams", "stages", "naive nodes"
_ARMS: Final = (_STREAMS, _STAGES, _NAIVE)
_POISON: Final = (
    "benchmarks.rig.poison_adapter:PoisonAdapter"  # it observes, which every worker does of each frame
)
_FAULTS: Final = ("unprintable error", "sleep in preprocess", "segfault")
_EVERY: Final = 40  # images of the first camera from one fault to the next
_CONNECT_S, _MOMENT_S = 90.0, 1.0
_FIRST_FRAMES: Final = 5  # of a turn: caches are cold after the others' turns
_BY_DEADLINE = 99.9
_EPILOG = """\
targets, for 8 cameras of 1280x720 at 30 Hz and a light model on two cores: 99.9 % by the deadline, <= 0.8 cores,
<= 450 MiB; a fault in one stream costs each other stream at most two frames that are not fresh; each stream has
within 10 % of its share

examples:
  ./run bench cameras
  ./run bench cameras --streams 1,2,4,8 --seconds 12 --faults
  ./run bench cameras --streams 3 --model-ms 12 --rate 20 --budget-ms 50 --arms streams
  ./run bench cameras --streams 4 --ramp"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--streams", default="1,2,4,8", help="how many cameras (default 1,2,4,8)")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each turn (default 12)")
    parser.add_argument("--turns", type=int, default=1, help="of each arm (default 1)")
    parser.add_argument(
        "--arms", default=",".join(_ARMS), help=f"which to measure: {', '.join(_ARMS)} (default all)"
    )
    parser.add_argument("--batch", default="auto", help="most frames in one run (default auto)")
    parser.add_argument(
        "--faults", action="store_true", help="also a turn with faults in the first camera's images"
    )
    parser.add_argument("--ramp", action="store_true", help="also the rate up to which 99.9 %% are in time")
    add_camera(parser)
    add_stage(parser, model_ms=0.0, budget_ms=33.0)
    arguments = parser.parse_args()
    arms = [arm.strip() for arm in arguments.arms.split(",")]
    if unknown := set(arms) - set(_ARMS):
        parser.error(f"--arms {', '.join(unknown)}: there are {', '.join(_ARMS)}")
    report = Report("cameras", arguments)
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for count in map(int, arguments.streams.split(",")):
        found = _measure(arguments, arms, count)
        figures[str(count)] = found
        _show(report, count, found)
        targets += _targets(count, found)
    report.finish(figures, targets)
    return 0


@dataclass
class Arm:
    """One way to run the model for so many cameras: its processes, and where its cameras publish.

    Attributes:
        namespaces: of its nodes.
        topics: of its cameras, in their order.
    """

    name: str
    graph: Graph
    count: int
    namespaces: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def rows(self) -> list[list[Row]]:
        """The records of each camera's frames since `clear`."""
        seen = [self.graph.observer.seen[namespace].rows for namespace in self.namespaces]
        if len(self.namespaces) > 1:
            return [list(rows) for rows in seen]
        found: list[list[Row]] = [[] for _ in range(self.count)]
        for row in seen[0]:
            found[int(row["stage"])].append(row)
        return found

    def clear(self) -> None:
        for namespace in self.namespaces:
            self.graph.observer.seen[namespace].clear()

    def family(self) -> list[psutil.Process]:
        """Its processes, those that they have started included."""
        found = []
        for child in self.processes:
            own = psutil.Process(child.process.pid)
            found += [own, *own.children(recursive=True)]
        return found


def _namespaces(name: str, count: int) -> list[str]:
    base = f"/bench/{name.split(maxsplit=1)[0]}"
    return [f"{base}{number}" for number in range(count)] if name == _NAIVE else [base]


def _start(arguments: argparse.Namespace, graph: Graph, name: str, count: int) -> Arm:
    """Start an arm's processes; they load while the next arm's are started."""
    arm, options = Arm(name, graph, count, _namespaces(name, count)), model_options(arguments.model_ms)
    adapter = _POISON if arguments.faults else ADAPTER
    if name == _NAIVE:
        config = {
            "adapter": adapter,
            "options": options,
            "budget_ms": arguments.budget_ms,
            "margin_ms": 2.0,
        }
        for namespace in arm.namespaces:
            given = ["benchmarks.rig.naive_node", "--namespace", namespace, "--config", json.dumps(config)]
            arm.processes.append(graph.process(f"naive-{namespace[-1]}", given))
            arm.topics.append(f"{namespace}/image")
        return arm
    cameras = [f"camera_{number}" for number in range(count)]
    stage = {
        "adapter": adapter,
        "options": json.dumps(options),
        "output": "answer",
        "tiers": ["full"],
        "engine": "eager",
        "budget_ms": arguments.budget_ms,
    }
    own: dict[str, Any]
    if name == _STREAMS:
        own = {"stages": ["bench"], "bench": {**stage, "streams": cameras, "batch": arguments.batch}}
        arm.topics = [f"{arm.namespaces[0]}/{camera}/image" for camera in cameras]
    else:
        own = {
            "stages": cameras,
            **{
                camera: {**stage, "output": f"{camera}/answer", "topics": [f"image:={camera}/image"]}
                for camera in cameras
            },
        }
        arm.topics = [f"{arm.namespaces[0]}/{camera}/image" for camera in cameras]
    parameters = {
        "worker_threads": 1,
        "device": graph.device,
        "evidence_dir": str(graph.folder / f"{name}-evidence"),
        **own,
    }
    file = graph.folder / f"{name}.yaml"
    file.write_text(json.dumps({"/**": {"ros__parameters": parameters}}), encoding="utf-8")
    ros = ["--ros-args", "-r", f"__ns:={arm.namespaces[0]}", "--params-file", str(file)]
    arm.processes.append(graph.process(name, ["torchperf_ros.node.main", *ros]))
    return arm


def _measure(arguments: argparse.Namespace, names: Sequence[str], count: int) -> dict[str, Any]:
    namespaces = tuple(one for name in names for one in _namespaces(name, count))
    with Graph(namespaces, outputs=False) as graph:
        say(f"{count} cameras: starting {', '.join(names)}")
        arms = [_start(arguments, graph, name, count) for name in names]
        camera = CameraProcess(graph)
        for arm in arms:
            _connect(arguments, arm, camera)
        found: dict[str, Any] = {arm.name: {"turns": []} for arm in arms}
        for turn in range(arguments.turns):
            for arm in arms:
                say(f"{count} cameras, turn {turn + 1}: {arm.name}, {arguments.seconds:g} s")
                found[arm.name]["turns"].append(_turn(arguments, arm, camera, arguments.rate))
        for arm in arms:
            found[arm.name] |= _together(found[arm.name].pop("turns"))
            if arguments.faults:
                say(f"{count} cameras: {arm.name}, faults in the first")
                found[arm.name]["faults"] = _faults(arguments, arm, camera)
            if arguments.ramp:
                found[arm.name]["ramp_hz"] = _ramp(arguments, arm, camera)
    return found


def _connect(arguments: argparse.Namespace, arm: Arm, camera: CameraProcess) -> None:
    """Stream for moments until each camera is answered by a result of its own."""
    give_up_s = time.monotonic() + _CONNECT_S
    while time.monotonic() < give_up_s:
        arm.clear()
        camera.ask(_MOMENT_S, topic=arm.topics, rate=arguments.rate, size="64x48")
        arm.graph.observer.listen(0.5)
        if all(any(row["outcome"] == Outcome.ON_TIME for row in rows) for rows in arm.rows()):
            return
    answered = [Counter(Outcome(int(row["outcome"])).word for row in rows) for rows in arm.rows()]
    ended = [process.errors.tail(12) for process in arm.processes if process.exit_status is not None]
    raise SystemExit(f"{arm.name}: not every camera is answered: {answered}\n" + "\n".join(ended))


def _turn(
    arguments: argparse.Namespace,
    arm: Arm,
    camera: CameraProcess,
    rate: float,
    first_bytes: Mapping[str, int] | None = None,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """One turn's figures: of each camera its frames, and of the arm processors and memory."""
    arm.clear()
    seconds = seconds or arguments.seconds
    before_s, started_s = _processor_s(arm.family()), time.monotonic()
    said = camera.ask(
        seconds,
        topic=arm.topics,
        rate=rate,
        size=arguments.size,
        first_bytes=dict(first_bytes or {}),
    )
    took_s = time.monotonic() - started_s
    family = arm.family()
    cores = (_processor_s(family) - before_s) / took_s
    memory = sum(_pss(process) for process in family) / 2**20
    arm.graph.observer.listen(1.0)
    sent = round(seconds * rate)
    cameras = [_camera(rows, sent) for rows in arm.rows()]
    return {
        "sent": sent,
        "cameras": cameras,
        "cores": cores,
        "pss_mib": memory,
        "processes": len(family),
        "camera_worst_late_ms": said["worst_late_ms"],
    }


def _processor_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            used = process.cpu_times()
        except psutil.Error:
            continue
        total += used.user + used.system
    return total


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def _camera(rows: Sequence[Row], sent: int) -> dict[str, Any]:
    """Of one camera's frames, without the first ones: answered, by the deadline, not fresh, and latency."""
    rows = [row for row in rows if row["seq"] >= rows[0]["seq"] + _FIRST_FRAMES] if rows else []
    sent = max(1, sent - _FIRST_FRAMES)
    fresh = [row for row in rows if row["outcome"] == Outcome.ON_TIME]
    in_time = sum(row["lateness_ms"] <= 0 for row in rows)
    return {
        "sent": sent,
        "answered": len(rows),
        "in_time": in_time,
        "fresh": len(fresh),
        "latency_ms": [row["total_ms"] for row in fresh],
        "outcomes": Counter(Outcome(int(row["outcome"])).word for row in rows),
    }


def _together(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several turns as one."""
    cameras = [
        {key: sum(one[key] for one in each) for key in ("sent", "answered", "in_time", "fresh")}
        for each in zip(*(turn["cameras"] for turn in turns), strict=True)
    ]
    outcomes = sum((one["outcomes"] for turn in turns for one in turn["cameras"]), Counter())
    latency_ms = [ms for turn in turns for one in turn["cameras"] for ms in one["latency_ms"]]
    shares = [100 * one["fresh"] / one["sent"] for one in cameras]
    return {
        "cameras": cameras,
        "outcomes": outcomes,
        "answered_percent": 100
        * sum(one["answered"] for one in cameras)
        / sum(one["sent"] for one in cameras),
        "in_time_percent": 100
        * sum(one["in_time"] for one in cameras)
        / sum(one["sent"] for one in cameras),
        "fresh_percent": sum(shares) / len(shares),
        "worst_percent": min(shares),
        "best_percent": max(shares),
        "latency_p50_ms": float(np.percentile(latency_ms, 50)) if latency_ms else math.nan,
        "latency_p99_ms": float(np.percentile(latency_ms, 99)) if latency_ms else math.nan,
        "cores": sum(turn["cores"] for turn in turns) / len(turns),
        "pss_mib": max(turn["pss_mib"] for turn in turns),
        "processes": max(turn["processes"] for turn in turns),
    }


def _faults(arguments: argparse.Namespace, arm: Arm, camera: CameraProcess) -> dict[str, Any]:
    """What faults in the first camera's images cost the others: frames that are not fresh, of each fault."""
    sent = round(arguments.seconds * arguments.rate)
    places = range(_EVERY // 2, sent - _EVERY // 2, _EVERY)
    first_bytes = {str(at): FAULTS.index(_FAULTS[n % len(_FAULTS)]) + 1 for n, at in enumerate(places)}
    turn = _turn(arguments, arm, camera, arguments.rate, first_bytes)
    lost = [one["sent"] - one["fresh"] for one in turn["cameras"]]
    return {
        "faults": len(first_bytes),
        "kinds": _FAULTS,
        "not_fresh": lost,
        "others_not_fresh_a_fault": max(lost[1:], default=0) / max(1, len(first_bytes)),
        "in_time_percent": 100
        * sum(one["in_time"] for one in turn["cameras"][1:])
        / max(1, sum(one["sent"] for one in turn["cameras"][1:])),
    }


def _ramp(arguments: argparse.Namespace, arm: Arm, camera: CameraProcess) -> float:
    """The rate of each camera up to which 99.9 % of the frames are fresh and in time; steps of 1.25."""
    good, rate = 0.0, arguments.rate
    while rate <= 16 * arguments.rate:
        say(f"{arm.name}: {rate:.0f} Hz each")
        found = _together([_turn(arguments, arm, camera, rate, seconds=min(5.0, arguments.seconds))])
        if found["fresh_percent"] < _BY_DEADLINE:
            break
        good, rate = rate, 1.25 * rate
    return good


def _show(report: Report, count: int, found: Mapping[str, Any]) -> None:
    columns = (
        "",
        "answered %",
        "in time %",
        "fresh %",
        "worst",
        "best",
        "p50 ms",
        "p99 ms",
        "cores",
        "PSS MiB",
        "proc",
    )
    keys = ("answered_percent", "in_time_percent", "fresh_percent", "worst_percent", "best_percent")
    more = ("latency_p50_ms", "latency_p99_ms", "cores", "pss_mib", "processes")
    rows = [[name, *(one[key] for key in (*keys, *more))] for name, one in found.items()]
    report.table(f"{count} cameras (worst and best camera: fresh %)", columns, rows)
    for name, one in found.items():
        report.text(
            f"{name}: {', '.join(f'{number} {word}' for word, number in one['outcomes'].most_common())}"
        )
    if any("faults" in one for one in found.values()):
        rows = [
            [
                name,
                one["faults"]["faults"],
                one["faults"]["others_not_fresh_a_fault"],
                one["faults"]["in_time_percent"],
            ]
            for name, one in found.items()
        ]
        report.table(
            f"{count} cameras, faults in the first",
            ("", "faults", "not fresh a fault, worst other", "others in time %"),
            rows,
        )
    if any("ramp_hz" in one for one in found.values()):
        rows = [[name, one["ramp_hz"], count * one["ramp_hz"]] for name, one in found.items()]
        report.table("99.9 % fresh up to", ("", "Hz each", "frames a second"), rows)


def _targets(count: int, found: Mapping[str, Any]) -> list[Target]:
    if (ours := found.get(_STREAMS)) is None:
        return []
    targets = [
        Target(f"{count} streams, by the deadline", ours["in_time_percent"], ">=", _BY_DEADLINE, "%")
    ]
    spread = ours["best_percent"] - ours["worst_percent"]
    targets.append(Target(f"{count} streams, best less worst", spread, "<=", 10.0, "%"))
    if count >= 8:
        targets += [
            Target(f"{count} streams, processors", ours["cores"], "<=", 0.8, "cores"),
            Target(f"{count} streams, memory", ours["pss_mib"], "<=", 450.0, "MiB"),
        ]
    if "faults" in ours and count > 1:
        lost = ours["faults"]["others_not_fresh_a_fault"]
        targets.append(
            Target(f"{count} streams, not fresh in another for a fault", lost, "<=", 2.0, "frames")
        )
    return targets


if __name__ == "__main__":
    sys.exit(main())
