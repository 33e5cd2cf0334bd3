"""What `worker: shared` saves and costs: memory of all worker processes, and each stage's latencies.

The reference detector and the reference planner behind it, without a node. Each arm starts workers of its own, is
driven for a while, and has its memory read before it ends; the arms take turns. With a standby the two stages' runners
are in different processes. Without one both run in one process, and wait for each other's Python.

USS is what a process would give back if it ended alone; PSS counts pages of several processes in parts, also those that
workers share with the process that they are forked from; RSS counts them whole in each.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import psutil

from benchmarks.rig.arguments import add_device, arguments_of
from benchmarks.rig.bare_stage import BareStage, noise_cdr
from benchmarks.rig.figures import distribution, share
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.config import NodeConfig, node_config
from torchperf_ros.config.message_types import empty_message, encode
from torchperf_ros.frame.frame import Answer, restamped
from torchperf_ros.frame.outcome import IN_TIME, Outcome
from torchperf_ros.replay.replay_options import prefer_this_process
from torchperf_ros.stage.stage_input import StageInput
from torchperf_ros.workers.shared_process import share_processes

_ARMS: Final = tuple((backup, worker) for backup in ("standby", "none") for worker in ("own", "shared"))
_MARKERS, _ODOMETRY = "visualization_msgs/msg/MarkerArray", "nav_msgs/msg/Odometry"
_MEMORY: Final = ("uss", "pss", "rss")
_MIB: Final = 1 << 20
_MOST_SHARE, _SETTLE_S = 0.6, 2.0
_EPILOG = """\
target: with a standby, workers that share take at most 60 % of the memory of those that do not

examples:
  ./run bench shared
  ./run bench shared --turns 5 --seconds 30 --json shared.json"""


def main() -> int:
    arguments = _parser().parse_args()
    report = Report("shared", arguments)
    image = noise_cdr(*map(int, arguments.size.split("x")))
    answers: dict[tuple[str, str], dict[str, list[Answer]]] = {arm: {} for arm in _ARMS}
    memory: dict[tuple[str, str], list[dict[str, float]]] = {arm: [] for arm in _ARMS}
    for turn in range(arguments.turns):
        for arm in _ARMS:
            say(f"turn {turn + 1} of {arguments.turns}: backup {arm[0]}, worker {arm[1]}")
            found, used = _drive(arguments, _config(arguments, *arm), image)
            memory[arm].append(used)
            for stage, each in found.items():
                answers[arm].setdefault(stage, []).extend(each)
    used_mib = {
        arm: {kind: statistics.median(u[kind] for u in each) for kind in each[0]} for arm, each in memory.items()
    }
    figures = {arm: {stage: _figures(each) for stage, each in stages.items()} for arm, stages in answers.items()}
    report.table(
        "MiB of all worker processes, median of the turns",
        ("backup, worker", "processes", *(kind.upper() for kind in _MEMORY), *(f"{k.upper()} / own" for k in _MEMORY)),
        [[", ".join(arm), each["processes"], *(each[kind] for kind in _MEMORY),
          *(share(each[kind], used_mib[arm[0], "own"][kind]) for kind in _MEMORY)] for arm, each in used_mib.items()],
    )  # fmt: skip
    shown = ("frames", "missed", "p50_ms", "p99_ms", "max_ms")
    report.table(
        f"each stage's time from receipt to publish, {arguments.rate:g} images a second",
        ("backup, worker: stage", *(name.replace("_", " ") for name in shown)),
        [[f"{', '.join(arm)}: {stage}", *(each[name] for name in shown)]
         for arm, stages in figures.items() for stage, each in stages.items()],
    )  # fmt: skip
    report.finish(
        {", ".join(arm): {"memory_mib": used_mib[arm], "stages": figures[arm]} for arm in _ARMS},
        [
            Target(
                f"with a standby, {kind.upper()} of shared workers, of that of own ones",
                share(used_mib["standby", "shared"][kind], used_mib["standby", "own"][kind]),
                "<=",
                _MOST_SHARE,
            )
            for kind in _MEMORY
        ],
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=10.0, help="of frames for each arm's turn (default 10)")
    parser.add_argument("--turns", type=int, default=3, help="of each arm (default 3)")
    parser.add_argument("--rate", type=float, default=15.0, help="images per second (default 15)")
    parser.add_argument("--size", default="640x480", help="of the images, rgb8 (default 640x480)")
    parser.add_argument("--threads", type=int, default=1, help="of each model (default 1)")
    parser.add_argument("--budget-ms", type=float, default=500.0, help="of either stage (default 500: what it takes)")
    add_device(parser)
    return parser


def _config(arguments: argparse.Namespace, backup: str, worker: str) -> NodeConfig:
    own = {"backup": backup, "worker": worker, "engine": "eager", "budget_ms": arguments.budget_ms}
    values = {"device": arguments.device, "worker_threads": arguments.threads, "recorder": False}
    return node_config(values, {"perception": own, "planning": own})


def _drive(
    arguments: argparse.Namespace, config: NodeConfig, image: bytes
) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """What each stage answered, and what the workers had in use at the end."""
    prefer_this_process(config)
    perception, planning = stages = [BareStage(config, stage.name, stage.options) for stage in config.stages]
    share_processes([stage.actor.pool for stage in stages])
    follower = StageInput(planning.actor, 0, "detections", _MARKERS, stamped=False)
    perception.hand_on = follower.hand_over
    odometry = bytes(encode(empty_message(_ODOMETRY), _ODOMETRY))
    begun: dict[str, int] = {}

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
        _pace(_SETTLE_S, arguments.rate, offer)
        begun = {stage.actor.config.name: len(stage.answers) for stage in stages}
        _pace(arguments.seconds, arguments.rate, offer)
        used = _memory({worker.pid for stage in stages for worker in stage.actor.pool.everyone})
    finally:
        for stage in stages:
            stage.actor.stop()
    return {stage.actor.config.name: stage.answers[begun[stage.actor.config.name] :] for stage in stages}, used


def _pace(seconds: float, rate: float, offer: Callable[[int], None]) -> None:
    begin = time.monotonic()
    for number in range(round(seconds * rate)):
        time.sleep(max(0.0, begin + number / rate - time.monotonic()))
        offer(number)


def _memory(pids: set[int]) -> dict[str, float]:
    """MiB of all these processes together."""
    each = [psutil.Process(pid).memory_full_info() for pid in pids]
    return {"processes": float(len(each)), **{kind: sum(getattr(one, kind) for one in each) / _MIB for kind in _MEMORY}}


def _figures(answers: list[Answer]) -> dict[str, Any]:
    counted = [answer for answer in answers if answer.outcome is not Outcome.STARTING]
    total_ms = distribution([answer.total_ms for answer in counted])
    return {
        "frames": len(counted), "missed": sum(answer.outcome not in IN_TIME for answer in counted),
        "p50_ms": total_ms["p50"], "p99_ms": total_ms["p99"], "max_ms": total_ms["max"],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
