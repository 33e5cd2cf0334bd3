"""What scenes cost: choosing one for each frame, a switch, and compilations while frames come.

A stage without a node, with a real worker, whose scenes `default` and `highway` have a tier each. The speed flaps from
frame to frame, so that the scene changes as often as `scene_hold_s` lets it. A frame's overhead is its latency less the
steps in its worker; a switch's is compared with that of the frames between.
"""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bench_stage import ADAPTER, TIERS
from benchmarks.rig.figures import distribution
from benchmarks.rig.graph import model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.config import node_config
from torchperf_ros.config.message_types import empty_message, encode
from torchperf_ros.frame.frame import Answer
from torchperf_ros.frame.outcome import Outcome
from torchperf_ros.replay.replay_options import prefer_this_process
from torchperf_ros.stage.stage_actor import StageActor, StagePorts
from torchperf_ros.workers.worker_setup import worker_setup

_IMAGE: Final = "sensor_msgs/msg/Image"
_HEIGHT, _WIDTH = 72, 128
_SLOW, _FAST, _LIMIT = 10.0, 30.0, 20.0  # m/s
_READY_S, _WARM = 600.0, 20
_EPILOG = """\
targets: choosing at most 50 us (p99); a switch adds at most 1 ms to its frame (p50); 0 compilations while frames come;
at most one switch in scene_hold_s

examples:
  ./run bench scenes
  ./run bench scenes --engine eager --seconds 30 --json scenes.json"""


def main() -> int:
    """Measure, show, write."""
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=60.0, help="of frames (default 60)")
    parser.add_argument("--rate", type=float, default=30.0, help="frames a second (default 30)")
    parser.add_argument("--hold", type=float, default=0.2, help="scene_hold_s (default 0.2)")
    parser.add_argument("--engine", default="compile", help="of both tiers (default compile, whose shapes are guarded)")
    parser.add_argument("--model-ms", type=float, default=2.0, help="what the slower tier takes (default 2)")
    arguments = parser.parse_args()
    report = Report("scenes", arguments)
    stage = _Stage(arguments)
    try:
        stage.start()
        say(f"{arguments.seconds:g} s of frames whose speed flaps")
        answers, choosing_us = stage.drive(arguments.seconds, arguments.rate)
        compiled = sum(row["recompiles"] for row in stage.actor.pool.tally.rows(stage.actor.pool.everyone))
    finally:
        stage.actor.stop()
    good = [answer for answer in answers if answer.outcome is Outcome.ON_TIME]
    switches = np.diff([answer.frame.scene for answer in good]) != 0
    overhead_ms = np.array([answer.total_ms - answer.wait_ms - answer.steps.total_ms for answer in good[1:]])
    found = {
        "choosing, us": distribution(choosing_us),
        "overhead of a switch, ms": distribution(overhead_ms[switches]),
        "of other frames, ms": distribution(overhead_ms[~switches]),
    }
    columns = ("count", "p50", "p99", "max")
    rows = [[name, *(figures[column] for column in columns)] for name, figures in found.items()]
    report.table(f"engine {arguments.engine}; {len(good)} of {len(answers)} frames on time", ("", *columns), rows)
    _, switch, other = found.values()
    per_hold = stage.actor.scenes.switches / max(arguments.seconds / arguments.hold, 1.0)
    report.finish({**found, "recompiles": compiled, "switches": stage.actor.scenes.switches}, [
        Target("choosing, p99", found["choosing, us"]["p99"], "<=", 50.0, "us"),
        Target("a switch adds, p50", switch["p50"] - other["p50"], "<=", 1.0, "ms"),
        Target("compilations while frames come", compiled, "==", 0),
        Target("switches in scene_hold_s", per_hold, "<=", 1.0),
    ])  # fmt: skip
    return 0


class _Stage:
    """The stage, and what drives it."""

    def __init__(self, arguments: Any) -> None:
        own = {
            "adapter": ADAPTER, "output": "a", "engine": arguments.engine, "backup": "none", "tiers": [TIERS[0]],
            "budget_ms": 200.0, "fallback": ["hold_last"], "scenes": ["highway"], "scene_hold_s": arguments.hold,
            "scene.highway.tiers": [TIERS[1]], "scene.highway.min_speed": _LIMIT,
        }  # fmt: skip
        config = node_config({"stages": ["bench"], "worker_threads": 1, "device": "cpu"}, {"bench": own})
        prefer_this_process(config)
        self._answers: list[Answer] = []
        ports = StagePorts(
            publish=lambda payload: None, hand_on=lambda payload, frame: None, answered=self._answers.append,
            anomaly=lambda alert: None, log=lambda severity, text: None,
        )  # fmt: skip
        (stage,) = config.stages
        setup = {**worker_setup(stage, config), "options": model_options(arguments.model_ms), "compile_first": True}
        self.actor = StageActor(stage, setup, ports, time.time_ns)
        pixels = np.zeros(_HEIGHT * _WIDTH * 3, np.uint8)
        own = {"height": _HEIGHT, "width": _WIDTH, "encoding": "rgb8", "step": _WIDTH * 3, "data": pixels}
        self._image = bytes(encode(empty_message(_IMAGE, **own), _IMAGE))

    def start(self) -> None:
        self.actor.start()
        until = time.monotonic() + _READY_S
        while not self.actor.pool.ready:
            if time.monotonic() > until:
                raise TimeoutError(self.actor.pool.progress)
            time.sleep(0.05)
        self.actor.activate()

    def drive(self, seconds: float, rate: float) -> tuple[list[Answer], list[float]]:
        """What frames were answered with, and how long each scene took to be chosen, in us; the first ones left out."""
        scenes, took_us = self.actor.scenes, list[float]()
        choose: Callable[[int], int] = scenes.choose

        def timed(now_ns: int) -> int:
            began = time.perf_counter_ns()
            scene = choose(now_ns)
            took_us.append((time.perf_counter_ns() - began) / 1e3)
            return scene

        scenes.choose = timed  # type: ignore[method-assign]
        begin = time.monotonic()
        for number in range(round(seconds * rate)):
            time.sleep(max(0.0, begin + number / rate - time.monotonic()))
            scenes.moved(_FAST if number % 2 else _SLOW, time.monotonic_ns())
            self.actor.offer(self._image, time.time_ns(), stamped=True)
        self.actor.finish()
        return self._answers[_WARM:], took_us[_WARM:]


if __name__ == "__main__":
    sys.exit(main())
