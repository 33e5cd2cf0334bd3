"""What scenes cost: choosing one for each frame, a switch, and compilations while frames come.

A stage without a node, with a real worker, whose scenes `default` and `highway` have a tier each. The speed
flaps from frame to frame, so that the scene changes as often as `scene_hold_s` lets it. A frame's overhead
is its latency less the steps in its worker; a switch's is compared with that of the frames between.
"""

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bare_stage import BareStage
from benchmarks.rig.bench_stage import ADAPTER, TIERS
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.outcome import Outcome
from torchperf_ros.replay.replay_options import prefer_this_process
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.frame import Answer

_SLOW, _FAST, _LIMIT = 10.0, 30.0, 20.0  # m/s
_READY_S, _WARM = 600.0, 20
_EPILOG = """\
targets: choosing at most 50 us (p99); a switch adds at most 1 ms to its frame (p50); 0 compilations while frames come;
at most one switch in scene_hold_s

examples:
  ./run bench scenes
  ./run bench scenes --engine eager --seconds 30 --json scenes.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=60.0, help="of frames (default 60)")
    parser.add_argument("--rate", type=float, default=30.0, help="frames a second (default 30)")
    parser.add_argument("--hold", type=float, default=0.2, help="scene_hold_s (default 0.2)")
    parser.add_argument(
        "--engine", default="compile", help="of both tiers (default compile, whose shapes are guarded)"
    )
    parser.add_argument(
        "--model-ms", type=float, default=2.0, help="what the slower tier takes (default 2)"
    )
    arguments = parser.parse_args()
    report = Report("scenes", arguments)
    stage = _stage(arguments)
    try:
        stage.start(_READY_S)
        say(f"{arguments.seconds:g} s of frames whose speed flaps")
        answers, choosing_us = _drive(stage, arguments.seconds, arguments.rate)
        compiled = sum(row["recompiles"] for row in stage.actor.pool.tally.rows(stage.actor.pool.everyone))
    finally:
        stage.actor.stop()
    good = [answer for answer in answers if answer.outcome is Outcome.ON_TIME]
    switches = np.diff([answer.frame.scene for answer in good]) != 0
    overhead_ms = np.array(
        [answer.total_ms - answer.wait_ms - answer.steps.total_ms for answer in good[1:]]
    )
    found = {
        "choosing, us": distribution(choosing_us),
        "overhead of a switch, ms": distribution(overhead_ms[switches]),
        "of other frames, ms": distribution(overhead_ms[~switches]),
    }
    columns = ("count", "p50", "p99", "max")
    rows = [[name, *(figures[column] for column in columns)] for name, figures in found.items()]
    report.table(
        f"engine {arguments.engine}; {len(good)} of {len(answers)} frames on time", ("", *columns), rows
    )
    _, switch, other = found.values()
    per_hold = stage.actor.scenes.switches / max(arguments.seconds / arguments.hold, 1.0)
    report.finish(
        {**found, "recompiles": compiled, "switches": stage.actor.scenes.switches},
        [
            Target("choosing, p99", found["choosing, us"]["p99"], "<=", 50.0, "us"),
            Target("a switch adds, p50", switch["p50"] - other["p50"], "<=", 1.0, "ms"),
            Target("compilations while frames come", compiled, "==", 0),
            Target("switches in scene_hold_s", per_hold, "<=", 1.0),
        ],
    )
    return 0


def _stage(arguments: argparse.Namespace) -> BareStage:
    own = {
        "adapter": ADAPTER,
        "output": "a",
        "engine": arguments.engine,
        "backup": "none",
        "tiers": [TIERS[0]],
        "budget_ms": 200.0,
        "fallback": ["hold_last"],
        "scenes": ["highway"],
        "scene_hold_s": arguments.hold,
        "scene.highway.tiers": [TIERS[1]],
        "scene.highway.min_speed": _LIMIT,
    }
    config = node_config({"stages": ["bench"], "worker_threads": 1, "device": "cpu"}, {"bench": own})
    prefer_this_process(config)
    return BareStage(config, "bench", model_options(arguments.model_ms), compile_first=True)


def _drive(stage: BareStage, seconds: float, rate: float) -> tuple[list[Answer], list[float]]:
    """What frames were answered with, and how long each scene took to be chosen, in us.

    The first ones left out.
    """
    scenes, took_us = stage.actor.scenes, list[float]()
    choose: Callable[[int], int] = scenes.choose

    def timed(now_ns: int) -> int:
        began = time.perf_counter_ns()
        scene = choose(now_ns)
        took_us.append((time.perf_counter_ns() - began) / 1e3)
        return scene

    scenes.choose = timed  # type: ignore[method-assign]
    stage.feed(
        seconds, rate, lambda number: scenes.moved(_FAST if number % 2 else _SLOW, time.monotonic_ns())
    )
    stage.actor.finish()
    return stage.answers[_WARM:], took_us[_WARM:]


if __name__ == "__main__":
    sys.exit(main())
