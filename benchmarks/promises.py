"""The twelve promises of docs/performance.md.

Measure each by its benchmark, and write the page from the results.

Each promise is one target of one benchmark. The benchmarks run one after the other, and leave their figures
in benchmarks/results. The page is made of these files alone, so that no figure on it was typed by hand.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.rig.arguments import add_some
from benchmarks.rig.report import say, shown

_ROOT = Path(__file__).parent.parent
_RESULTS = _ROOT / "benchmarks" / "results"
_PAGE = _ROOT / "docs" / "performance.md"
_BUSY_PERCENT = 5.0  # of the machine, taken by others or by its host: times beyond are ratios at best
_EPILOG = """\
examples:
  ./run bench promises                       # measures all, about 18 minutes, and writes docs/performance.md
  ./run bench promises --only guard,soak     # measures two again, and writes the page from all results
  ./run bench promises --page                # measures nothing: the page from the results that are there
  ./run bench promises --dry-run             # shows what would be run"""

COMMANDS = {
    "deadline": "--seconds 30 --beside naive",
    "failover": "--parts frames --times 1 --model-ms 5 --faults segfault,hang,abort --seconds 3",
    "startup": "--times 3",
    "overhead": "--sizes 1280x720 --seconds 12",
    "telemetry": "--parts frames --seconds 20",
    "guard": "--parts cost",
    "emergency": "--parts stops --times 1000 --triggers 200 --silences 20",
    "engines": "--parts engines",
    "soak": "--frames 60000",
}


@dataclass(frozen=True)
class Promise:
    """A line of the page.

    Attributes:
        figure: in words.
        benchmark: which measures it.
        target: how its target begins, see `benchmarks.rig.report.Target.what`.
    """

    figure: str
    benchmark: str
    target: str


PROMISES = (
    Promise("started frames answered, under faults", "deadline", "started frames answered"),
    Promise("started frames answered by the deadline, under faults", "deadline", "by the deadline"),
    Promise("frames that are not fresh after one that ends or stops its worker, worst case", "failover",
            "frames not fresh"),
    Promise("configure to active, p50", "startup", "configure to active"),
    Promise("stamp to publish, times the naive node's, 1280x720, p50", "overhead", "stamp to publish p50"),
    Promise("model's steps, times a bare loop's, 1280x720, p50", "overhead", "model's steps p50"),
    Promise("what the node adds to the model's own time, 1280x720, p50", "overhead", "overhead p50"),
    Promise("telemetry of a frame, p50", "telemetry", "record and publish"),
    Promise("check of a plan, 30 poses and 32 objects, p99", "guard", "p99 of a check"),
    Promise("emergency lane: scan to received stop path, p99.9", "emergency", "scan"),
    Promise("engine `auto`, times the best installed engine, worst of five networks", "engines", "auto over the best"),
    Promise("memory of the node, trend over 1,000 frames", "soak", "node, per 1,000 frames"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_some(parser, "--only", COMMANDS)
    parser.add_argument(
        "--page", action="store_true", help="only write the page, from the results that are there"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the commands, and run none")
    arguments = parser.parse_args()
    if arguments.dry_run:
        for name in arguments.only:
            print(command_of(name))
        return 0
    failed = [] if arguments.page else [name for name in arguments.only if not _measured(name)]
    results = {name: _result(name) for name in COMMANDS}
    _PAGE.write_text(page(results), encoding="utf-8")
    say(f"written: {_PAGE.relative_to(_ROOT)}")
    return 1 if failed else 0


def command_of(name: str) -> str:
    """As one types it."""
    return f"./run bench {name} {COMMANDS[name]}".rstrip()


def _measured(name: str) -> bool:
    say(command_of(name))
    _RESULTS.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name].split()]
    ended = subprocess.run([*command, "--json", str(_RESULTS / f"{name}.json")], cwd=_ROOT, check=False)
    if ended.returncode not in {0, 1}:
        say(
            f"bench {name} ended with status {ended.returncode}: its line of the page keeps the result"
            " before"
        )
        return False
    return True


def _result(name: str) -> dict[str, Any] | None:
    file = _RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def page(results: dict[str, dict[str, Any] | None]) -> str:
    """The page in Markdown; a promise without a result says so."""
    machines = [found["machine"] for found in results.values() if found]
    lines = [
        "# Measured performance",
        "",
        (
            "Twelve promises, each measured by one command of this repository. `./run bench promises` runs"
            " them and writes"
        ),
        "this page. What each figure means, and what else was measured, is in the pages below.",
        "",
        *_about(machines),
        "",
        "| promise | measured | target | | command |",
        "|---|---|---|---|---|",
        *(_line(promise, results[promise.benchmark]) for promise in PROMISES),
        "",
        *_BELOW,
    ]
    return "\n".join(lines) + "\n"


_BELOW = (
    (
        "Times of a shared machine differ by a factor of two within minutes, ratios within one run do not:"
        " the lines with"
    ),
    (
        "*times* compare arms that take turns. The naive node is what one writes first: a typed"
        " subscription, the model in"
    ),
    "the callback, a thread pool's time-out as the deadline. It gets the same images, model and faults.",
    "",
    "| more figures | |",
    "|---|---|",
    (
        "| deadlines, overhead, failover, poisonous frames, start-up, telemetry, memory | [the"
        " node](figures/node.md) |"
    ),
    (
        "| engines, compiled packages, launch-bound chains, optimisations, sizes |"
        " [engines](figures/engines.md) |"
    ),
    "| two stages on two cores | [stages](figures/stages.md) |",
    "| one H200, one H100, and what of a Jetson is read | [CUDA](figures/cuda.md) |",
    "| collisions in the closed loop, the guard and the lane in traffic | [safety](figures/safety.md) |",
    "",
    (
        "**Next:** `./run bench` lists every benchmark; [comparing runs](testing.md#comparing-runs) says"
        " whether a"
    ),
    "difference is one.",
)


def _about(machines: Sequence[dict[str, Any]]) -> list[str]:
    if not machines:
        return ["Nothing was measured yet."]
    kinds = dict.fromkeys(
        f"{each['cpu']}, {each['cores']} cores, {each['memory_mib'] / 1024:.0f} GiB, Linux"
        f" {each['kernel']}, Python {each['python']}, torch {each['torch']}, rclpy {each['rclpy']}"
        for each in machines
    )
    dates = sorted(str(each["date"])[:10] for each in machines)
    taken = [_taken(each) for each in machines]
    disturbed = (
        f"While they ran, other processes and the machine's host took {min(taken):.1f} to {max(taken):.1f}"
        " % of it."
    )
    if max(taken) > _BUSY_PERCENT:
        disturbed += " **That is no idle machine: its times count for little.**"
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return [f"Machine: {'; '.join(kinds)}. {when}. {disturbed}"]


def _taken(machine: dict[str, Any]) -> float:
    """How much of the machine others had meanwhile, in percent."""
    return float(machine["others_cpu_percent_meanwhile"] + machine["stolen_percent_meanwhile"])


def _line(promise: Promise, result: dict[str, Any] | None) -> str:
    found = _target_of(promise, result)
    command = f"`{command_of(promise.benchmark)}`"
    if found is None:
        return f"| {promise.figure} | not measured | | | {command} |"
    value = math.nan if found["value"] is None else float(found["value"])
    unit = f" {found['unit']}" if found["unit"] else ""
    measured, target = f"{shown(value)}{unit}", f"{found['relation']} {shown(found['limit'])}{unit}"
    met = "met" if found["met"] else "**missed**"
    return f"| {promise.figure} | {measured} | {target} | {met} | {command} |"


def _target_of(promise: Promise, result: dict[str, Any] | None) -> dict[str, Any] | None:
    targets = result["targets"] if result else []
    return next((each for each in targets if str(each["what"]).startswith(promise.target)), None)


if __name__ == "__main__":
    sys.exit(main())
