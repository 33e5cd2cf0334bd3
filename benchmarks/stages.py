"""What a busy stage of lower priority costs another one on the same machine.

Without a node, with real workers: the higher stage's misses, with and without the other one. Models of a
known cost, and frames at rates of their own that have nothing to do with each other. The higher stage runs
alone; beside the other one with the same priority; and beside it with `priority` one below. The arms take
turns. A stage that is not of the arm gets no frames.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from typing import Any, Final

from benchmarks.rig.arguments import add_stage, arguments_of
from benchmarks.rig.bare_stage import BareStage
from benchmarks.rig.bench_stage import ADAPTER, TIERS
from benchmarks.rig.figures import distribution, share
from benchmarks.rig.graph import model_options
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.outcome import IN_TIME, Outcome
from torchperf_ros.replay.replay_options import prefer_this_process
from torchperf_ros.settings.config import node_config
from torchperf_ros.stage.frame import Answer
from torchperf_ros.stage.right_of_way import set_right_of_way

_PRIORITIES: Final = {"alone": "", "beside an equal": "equal", "beside a lower one": "lower"}
_LARGEST_RISE: Final = 0.1  # percentage points
_SETTLE_S: Final = 1.0
_EPILOG = """\
target: beside a lower one, the higher stage's misses rise by at most 0.1 percentage points

example:
  ./run bench stages --seconds 300 --lower-ms 20 --lower-rate 60 --json stages.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--seconds", type=float, default=60.0, help="of frames for each arm (default 60)")
    parser.add_argument("--slice", type=float, default=20.0, help="seconds of each arm's turn (default 20)")
    parser.add_argument(
        "--rate", type=float, default=30.0, help="frames of the higher stage a second (default 30)"
    )
    parser.add_argument("--lower-rate", type=float, default=47.0, help="and of the other one (default 47)")
    parser.add_argument(
        "--lower-ms", type=float, default=15.0, help="what its model takes (default 15; 0: the smallest)"
    )
    parser.add_argument("--threads", type=int, default=2, help="of each model (default 2)")
    add_stage(parser, model_ms=12.0, budget_ms=25.0)
    arguments = parser.parse_args()
    report = Report("stages", arguments)
    report.finish(*_priority(arguments, report))
    return 0


def _figures(answers: list[Answer]) -> dict[str, Any]:
    counted = [answer for answer in answers if answer.outcome is not Outcome.STARTING]
    missed = sum(answer.outcome not in IN_TIME for answer in counted)
    total_ms = distribution([answer.total_ms for answer in counted])
    return {
        "frames": len(counted),
        "missed": missed,
        "miss_percent": 100 * share(missed, len(counted)),
        "p50_ms": total_ms["p50"],
        "p99_ms": total_ms["p99"],
        "max_ms": total_ms["max"],
        "not_begun": sum("not begun: " in answer.reason for answer in counted),
        "outcomes": dict(Counter(answer.outcome.word for answer in counted)),
    }


def _show(report: Report, title: str, stages: dict[str, dict[str, Any]]) -> None:
    shown = ("frames", "missed", "miss_percent", "p50_ms", "p99_ms", "max_ms", "not_begun")
    rows = [
        [
            name,
            *(found[key] for key in shown),
            ", ".join(f"{n} {word}" for word, n in found["outcomes"].items()),
        ]
        for name, found in stages.items()
        if found["frames"]
    ]
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
    _show(
        report,
        f"Priority; budget {arguments.budget_ms:g} ms, model {arguments.model_ms:g} ms",
        {f"{arm}: {who}": found for arm, both in figures.items() for who, found in both.items()},
    )
    alone, beside = (figures[arm]["higher"]["miss_percent"] for arm in ("alone", "beside a lower one"))
    rise = Target(
        "rise of the higher stage's misses", beside - alone, "<=", _LARGEST_RISE, "percentage points"
    )
    return figures, [rise]


class _Prioritised:
    """The higher stage, an equal one and a lower one, and what drives them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._settle_s = min(_SETTLE_S, arguments.slice)
        self._rates = {
            "higher": arguments.rate,
            "equal": arguments.lower_rate,
            "lower": arguments.lower_rate,
        }
        own = {
            "adapter": ADAPTER,
            "engine": "eager",
            "backup": "none",
            "tiers": [TIERS[0]],
            "fallback": ["hold_last"],
        }
        stages = {
            "higher": {**own, "output": "a", "priority": 0, "budget_ms": arguments.budget_ms},
            "equal": {**own, "output": "b", "priority": 0, "budget_ms": 100.0},
            "lower": {**own, "output": "c", "priority": -1, "budget_ms": 100.0},
        }
        values = {"stages": list(stages), "worker_threads": arguments.threads, "device": "cpu"}
        self._config = node_config(values, stages)
        prefer_this_process(self._config)
        model_ms = {"higher": arguments.model_ms, "equal": arguments.lower_ms, "lower": arguments.lower_ms}
        self._stages = {
            name: BareStage(self._config, name, model_options(ms)) for name, ms in model_ms.items()
        }
        set_right_of_way([self._stages["higher"].actor, self._stages["lower"].actor], self._config)

    def start(self) -> None:
        for stage in self._stages.values():
            stage.start()
        for other in ("lower", "equal"):
            self.drive(other, self._settle_s)

    def drive(self, other: str, seconds: float) -> dict[str, list[Answer]]:
        """Frames for the higher stage, and for the other one if there is one.

        What they were answered with.
        """
        driven = {name: self._stages[name] for name in ("higher", other) if name}
        for stage in driven.values():
            stage.answers.clear()
        threads = [
            threading.Thread(target=stage.feed, args=(seconds, self._rates[name]))
            for name, stage in driven.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stage in driven.values():
            stage.actor.finish()
        time.sleep(
            self._config.stages[1].budget_ms / 1e3
        )  # the next arm is not to find what this one has begun
        return {name: list(stage.answers) for name, stage in driven.items()}

    def stop(self) -> None:
        for stage in self._stages.values():
            stage.actor.stop()


if __name__ == "__main__":
    sys.exit(main())
