"""What stages on one machine cost each other: a busy one of lower priority, and workers that share their processes.

Without a node, with real workers. The arms of either part take turns.

`priority`: the higher stage's misses, with and without the other one. Models of a known cost, and frames at rates of
their own that have nothing to do with each other. The higher stage runs alone; beside the other one with the same
priority; and beside it with `priority` one below. A stage that is not of the arm gets no frames.

`shared`: what `worker: shared` saves and costs, with the reference detector and the reference planner behind it. Each
arm starts workers of its own, is driven for a while, and has its memory read before it ends. With a standby the two
stages' runners are in different processes. Without one both run in one process, and wait for each other's Python. USS
is what a process would give back if it ended alone; PSS counts pages of several processes in parts, also those that
workers share with the process that they are forked from; RSS counts them whole in each.
"""

import argparse
import itertools
import statistics
import sys
import threading
import time
from collections import Counter
from typing import Any, Final

import psutil

from benchmarks.rig.arguments import add_device, add_some, add_stage, arguments_of
from benchmarks.rig.bare_stage import BareStage, at_pace
from benchmarks.rig.bench_stage import ADAPTER, TIERS
from benchmarks.rig.figures import distribution, share
from benchmarks.rig.graph import model_options
from benchmarks.rig.messages import scene_cdr
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.config import NodeConfig, node_config
from torchperf_ros.config.message_types import empty_message, encode
from torchperf_ros.frame.frame import Answer, restamped
from torchperf_ros.frame.outcome import IN_TIME, Outcome
from torchperf_ros.replay.replay_options import prefer_this_process
from torchperf_ros.stage.right_of_way import set_right_of_way
from torchperf_ros.stage.stage_input import StageInput
from torchperf_ros.workers.shared_process import share_processes

_PRIORITIES: Final = {"alone": "", "beside an equal": "equal", "beside a lower one": "lower"}
_LARGEST_RISE: Final = 0.1  # percentage points
_BACKUPS, _WORKERS = ("standby", "none"), ("own", "shared")
_MARKERS, _ODOMETRY = "visualization_msgs/msg/MarkerArray", "nav_msgs/msg/Odometry"
_MEMORY: Final = ("uss", "pss", "rss")
_MIB: Final = 1 << 20
_SHARED_BUDGET_MS: Final = 500.0  # more than detector and planner take
_MOST_SHARE: Final = 0.6
_SETTLE_S: Final = 1.0
_EPILOG = """\
targets: beside a lower one, the higher stage's misses rise by at most 0.1 percentage points; with a standby, workers
that share take at most 60 % of the memory of those that do not

examples:
  ./run bench stages --parts priority --seconds 300 --lower-ms 20 --lower-rate 60 --json priority.json
  ./run bench stages --parts shared --turns 5 --slice 30"""


def main() -> int:
    parts = {"priority": _priority, "shared": _shared}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument("--seconds", type=float, default=60.0, help="of frames for each arm (default 60)")
    parser.add_argument("--slice", type=float, default=20.0, help="seconds of each arm's turn (default 20)")
    own = parser.add_argument_group("priority")
    own.add_argument("--rate", type=float, default=30.0, help="frames of the higher stage a second (default 30)")
    own.add_argument("--lower-rate", type=float, default=47.0, help="and of the other one (default 47)")
    own.add_argument("--lower-ms", type=float, default=15.0, help="what its model takes (default 15; 0: the smallest)")
    own.add_argument("--threads", type=int, default=2, help="of each model (default 2)")
    add_stage(parser, model_ms=12.0, budget_ms=25.0)
    own = parser.add_argument_group("shared")
    own.add_argument("--image-rate", type=float, default=15.0, help="images per second (default 15)")
    own.add_argument("--size", default="640x480", help="of the images, rgb8 (default 640x480)")
    add_some(own, "--backups", _BACKUPS)
    add_device(parser)
    arguments = parser.parse_args()
    Report("stages", arguments).finish_parts(arguments, parts)
    return 0


def _figures(answers: list[Answer]) -> dict[str, Any]:
    counted = [answer for answer in answers if answer.outcome is not Outcome.STARTING]
    missed = sum(answer.outcome not in IN_TIME for answer in counted)
    total_ms = distribution([answer.total_ms for answer in counted])
    return {
        "frames": len(counted), "missed": missed, "miss_percent": 100 * share(missed, len(counted)),
        "p50_ms": total_ms["p50"], "p99_ms": total_ms["p99"], "max_ms": total_ms["max"],
        "not_begun": sum("not begun: " in answer.reason for answer in counted),
        "outcomes": dict(Counter(answer.outcome.word for answer in counted)),
    }  # fmt: skip


def _show(report: Report, title: str, stages: dict[str, dict[str, Any]]) -> None:
    shown = ("frames", "missed", "miss_percent", "p50_ms", "p99_ms", "max_ms", "not_begun")
    rows = [
        [name, *(found[key] for key in shown), ", ".join(f"{n} {word}" for word, n in found["outcomes"].items())]
        for name, found in stages.items() if found["frames"]
    ]  # fmt: skip
    columns = ("stage", "frames", "misses", "%", "p50 ms", "p99 ms", "max ms", "not begun", "outcomes")
    report.table(title, columns, rows)


def _turns(arguments: argparse.Namespace) -> int:
    return max(1, round(arguments.seconds / arguments.slice))


def _priority(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    answers: dict[str, dict[str, list[Answer]]] = {arm: {"higher": [], "other": []} for arm in _PRIORITIES}
    stages = _Prioritised(arguments)
    try:
        stages.start()
        for turn in range(_turns(arguments)):
            for arm, other in _PRIORITIES.items():
                say(f"turn {turn + 1} of {_turns(arguments)}: {arm}, {arguments.slice:g} s")
                found = stages.drive(other, arguments.slice)
                answers[arm]["higher"] += found["higher"]
                answers[arm]["other"] += found.get(other, [])
    finally:
        stages.stop()
    figures = {arm: {who: _figures(each) for who, each in both.items()} for arm, both in answers.items()}
    _show(report, f"Priority; budget {arguments.budget_ms:g} ms, model {arguments.model_ms:g} ms",
          {f"{arm}: {who}": found for arm, both in figures.items() for who, found in both.items()})  # fmt: skip
    alone, beside = (figures[arm]["higher"]["miss_percent"] for arm in ("alone", "beside a lower one"))
    rise = Target("rise of the higher stage's misses", beside - alone, "<=", _LARGEST_RISE, "percentage points")
    return figures, [rise]


class _Prioritised:
    """The higher stage, an equal one and a lower one, and what drives them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._settle_s = min(_SETTLE_S, arguments.slice)
        self._rates = {"higher": arguments.rate, "equal": arguments.lower_rate, "lower": arguments.lower_rate}
        own = {"adapter": ADAPTER, "engine": "eager", "backup": "none", "tiers": [TIERS[0]], "fallback": ["hold_last"]}
        stages = {
            "higher": {**own, "output": "a", "priority": 0, "budget_ms": arguments.budget_ms},
            "equal": {**own, "output": "b", "priority": 0, "budget_ms": 100.0},
            "lower": {**own, "output": "c", "priority": -1, "budget_ms": 100.0},
        }
        values = {"stages": list(stages), "worker_threads": arguments.threads, "device": "cpu"}
        self._config = node_config(values, stages)
        prefer_this_process(self._config)
        model_ms = {"higher": arguments.model_ms, "equal": arguments.lower_ms, "lower": arguments.lower_ms}
        self._stages = {name: BareStage(self._config, name, model_options(ms)) for name, ms in model_ms.items()}
        set_right_of_way([self._stages["higher"].actor, self._stages["lower"].actor], self._config)

    def start(self) -> None:
        for stage in self._stages.values():
            stage.start()
        for other in ("lower", "equal"):
            self.drive(other, self._settle_s)

    def drive(self, other: str, seconds: float) -> dict[str, list[Answer]]:
        """Frames for the higher stage, and for the other one if there is one; what they were answered with."""
        driven = {name: self._stages[name] for name in ("higher", other) if name}
        for stage in driven.values():
            stage.answers.clear()
        threads = [
            threading.Thread(target=stage.feed, args=(seconds, self._rates[name])) for name, stage in driven.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stage in driven.values():
            stage.actor.finish()
        time.sleep(self._config.stages[1].budget_ms / 1e3)  # the next arm is not to find what this one has begun
        return {name: list(stage.answers) for name, stage in driven.items()}

    def stop(self) -> None:
        for stage in self._stages.values():
            stage.actor.stop()


def _shared(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    image = scene_cdr(*map(int, arguments.size.split("x")))
    arms = list(itertools.product(arguments.backups, _WORKERS))
    answers: dict[str, dict[str, list[Answer]]] = {", ".join(arm): {} for arm in arms}
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in answers}
    for turn in range(_turns(arguments)):
        for arm, (backup, worker) in zip(answers, arms, strict=True):
            say(f"turn {turn + 1} of {_turns(arguments)}: backup {backup}, worker {worker}")
            found, used = _drive(_shared_config(arguments, backup, worker), image, arguments)
            memory[arm].append(used)
            for stage, each in found.items():
                answers[arm].setdefault(stage, []).extend(each)
    used_mib = {
        arm: {kind: statistics.median(used[kind] for used in each) for kind in each[0]} for arm, each in memory.items()
    }
    of_own = {
        arm: {kind: share(used[kind], used_mib[f"{arm.partition(', ')[0]}, own"][kind]) for kind in _MEMORY}
        for arm, used in used_mib.items()
    }
    figures = {arm: {stage: _figures(each) for stage, each in stages.items()} for arm, stages in answers.items()}
    report.table(
        "MiB of all worker processes, median of the turns",
        ("backup, worker", "processes", *(kind.upper() for kind in _MEMORY), *(f"{k.upper()} / own" for k in _MEMORY)),
        [[arm, *used.values(), *of_own[arm].values()] for arm, used in used_mib.items()],
    )
    _show(report, f"Each stage's time from receipt to publish, {arguments.image_rate:g} images a second",
          {f"{arm}: {stage}": found for arm, stages in figures.items() for stage, found in stages.items()})  # fmt: skip
    return {arm: {"memory_mib": used_mib[arm], "stages": figures[arm]} for arm in answers}, [
        Target(f"with a standby, {kind.upper()} of shared workers, of that of own ones", value, "<=", _MOST_SHARE)
        for kind, value in of_own.get("standby, shared", {}).items()
    ]


def _shared_config(arguments: argparse.Namespace, backup: str, worker: str) -> NodeConfig:
    own = {"backup": backup, "worker": worker, "engine": "eager", "budget_ms": _SHARED_BUDGET_MS}
    values = {"device": arguments.device, "worker_threads": 1, "recorder": False}
    return node_config(values, {"perception": own, "planning": own})


def _drive(
    config: NodeConfig, image: bytes, arguments: argparse.Namespace
) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """What each stage answered, and what the workers had in use at the end."""
    prefer_this_process(config)
    perception, planning = stages = [BareStage(config, stage.name, stage.options) for stage in config.stages]
    share_processes([stage.actor.pool for stage in stages])
    follower = StageInput(planning.actor, 0, "detections", _MARKERS, stamped=False)
    perception.hand_on = follower.hand_over
    odometry = bytes(encode(empty_message(_ODOMETRY), _ODOMETRY))

    def offer(number: int) -> None:
        stamp_ns = time.time_ns()
        planning.actor.offer_latest(1, restamped(odometry, stamp_ns), stamp_ns)
        perception.actor.offer(restamped(image, stamp_ns), stamp_ns, stamped=True)

    try:
        for stage in stages:
            stage.start()
        for stage in stages:
            pool = stage.actor.pool
            stage.until(
                lambda pool=pool: all(w is not None and w.usable for w in pool.workers), "all workers are ready"
            )
        at_pace(min(2 * _SETTLE_S, arguments.slice), arguments.image_rate, offer)
        begun = [len(stage.answers) for stage in stages]
        at_pace(arguments.slice, arguments.image_rate, offer)
        used = _memory({worker.pid for stage in stages for worker in stage.actor.pool.everyone})
    finally:
        for stage in stages:
            stage.actor.stop()
    return {stage.actor.config.name: stage.answers[first:] for stage, first in zip(stages, begun, strict=True)}, used


def _memory(pids: set[int]) -> dict[str, float]:
    """Processes, and MiB of all of them together."""
    each = [psutil.Process(pid).memory_full_info() for pid in pids]
    return {"processes": float(len(each)), **{kind: sum(getattr(one, kind) for one in each) / _MIB for kind in _MEMORY}}


if __name__ == "__main__":
    sys.exit(main())
