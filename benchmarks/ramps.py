"""Whether a stage goes down before it breaks: latency drifts by 50 %, memory runs out, a card slows down.

Rules only, on a virtual clock: the ladder, the watch's signals, the alerts' actions and the memory guard of
a stage answer made-up run times, 30 frames a second, with and without `actions`. The alerts come a second
late, as they do from the recorder. Then drives in which nothing happens but noise and single stalls.

With `--live` a real node, with its workers and its recorder: several stages with a ramp each, of models
that wait.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.bench_stage import OURS, STAGE
from benchmarks.rig.bench_stage import TIERS as TIER_NAMES
from benchmarks.rig.graph import CameraProcess, Graph, PerfNodeProcess
from benchmarks.rig.observer import Row
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.alert import Alert, Level
from torchperf_ros.api.clock import NS_PER_MS, NS_PER_S
from torchperf_ros.api.outcome import IN_TIME, Fallback, Outcome
from torchperf_ros.observe.telemetry.rows import SENT, sent_row
from torchperf_ros.observe.watch.stage_signals import StageSignals
from torchperf_ros.settings.config import stage_config
from torchperf_ros.stage.alert_actions import AlertActions
from torchperf_ros.stage.frame import Answer, Frame, Origin, StepTimes
from torchperf_ros.stage.ladder import TierLadder
from torchperf_ros.stage.limits import DriftWatch, MemoryGuard
from torchperf_ros.workers.calibration import Calibration

RULES = ["drift -> lower_tier", "latency -> lower_tier", "gpu -> lower_tier"]
HZ = 30
BUDGET_MS = 50.0
FRESH_MS = 49.0  # less the publish margin
TIERS = (1.0, 0.5, 0.2)  # what they take, as shares of the first
OVERHEAD_MS = 2.0
LEARNT_S = 90  # before anything happens: signals know what is usual after 64 s
AFTER_S = 60
_NORMAL_FRAMES = 10_000
_EPILOG = """\
a ramp: the run time of every tier grows evenly by 50 %, in 10 to 60 s, from 55 to 75 % of the budget on (p50), and
stays there; noise of 3 % (log-normal). Led down: a lower tier runs before the first deadline is
missed.

examples:
  ./run bench ramps --seeds 100 --json ramps.json
  ./run bench ramps --live 4"""
_LIVE_STAGES = 8
_LONGEST_RAMP_S, _LIVE_AFTER_S, _LIVE_READY_S = 60.0, 15, 180.0


@dataclass
class Drive:
    frames: int = 0
    first_down_s: float = float("inf")  # when a frame ran on a lower tier first
    first_miss_s: float = float("inf")
    misses: int = 0
    steps: int = 0  # of actions

    @property
    def led_down(self) -> bool:
        return self.first_down_s < self.first_miss_s


def drive(
    seed: int,
    seconds: int,
    slower: Callable[[float], float],
    rules: list[str],
    *,
    base_ms: float,
    stall: float = 0.0,
    alert_at: Callable[[float], str] = lambda at_s: "",
) -> Drive:
    """Drive for so long; a run takes `slower(time in s)` times as long as usual, with noise.

    A share of the runs, `stall`, takes twice as long; `alert_at` names an alert that the machine raises by
    itself.
    """
    draw, found = random.Random(seed), Drive()
    config = stage_config(
        "seen", {"adapter": "a:B", "output": "o", "budget_ms": BUDGET_MS, "actions": rules}
    )
    ladder, actions = TierLadder(len(TIERS)), AlertActions(config)
    ladder.calibrate([Calibration(base_ms * share, 1.1 * base_ms * share) for share in TIERS])
    drift = DriftWatch("seen") if rules else None
    signals, pending = StageSignals("seen", config.tiers, BUDGET_MS, "in"), list[Alert]()

    def run_ms(tier: int, at_s: float) -> float:
        stalls = 2.0 if draw.random() < stall else 1.0
        return base_ms * TIERS[tier] * slower(at_s) * draw.lognormvariate(0.0, 0.03) * stalls

    for seq in range(seconds * HZ):
        at_s, now_ns = seq / HZ, seq * NS_PER_S // HZ
        if seq and seq % HZ == 0:
            for alert in pending:  # of the second before: the recorder's second, and the reporter's
                actions.report(alert, now_ns)
            pending = signals.second(now_ns)[1]
            if name := alert_at(at_s):
                pending.append(Alert(Level.WARN, f"machine: {name}", ""))
            if drift is not None and (alert := drift.step(now_ns, FRESH_MS)):
                actions.report(alert, now_ns)
            actions.step(now_ns)
            ladder.left_out = actions.lower_tiers
        tier = ladder.choose(FRESH_MS, FRESH_MS, now_ns)
        took_ms = run_ms(tier, at_s)
        missed = took_ms + OVERHEAD_MS > FRESH_MS
        total_ms = min(took_ms + OVERHEAD_MS, FRESH_MS)
        frame = Frame(seq, None, 1, 1.0, now_ns, now_ns + round(BUDGET_MS * NS_PER_MS), Origin(now_ns, 1.0))
        answer = Answer(
            frame,
            Outcome.LATE if missed else Outcome.ON_TIME,
            Fallback.HOLD_LAST if missed else None,
            "",
            tier,
            0.0,
            total_ms,
            BUDGET_MS,
            total_ms - BUDGET_MS,
            now_ns + round(total_ms * NS_PER_MS),
            StepTimes(0.5, 0.5, took_ms, 0.5),
        )
        (row,) = np.frombuffer(sent_row(answer, now_ns, math.nan), SENT)
        signals.answered(row)
        if drift is not None and not missed:
            drift.add(tier, total_ms)
        ladder.learn(tier, took_ms, OVERHEAD_MS)
        if (probe := ladder.probe(FRESH_MS, now_ns)) is not None:  # on the standby
            probe_ms = run_ms(probe, at_s)
            ladder.probed(probe, probe_ms, probe_ms + OVERHEAD_MS, FRESH_MS)
        found.misses += missed
        if missed:
            found.first_miss_s = min(found.first_miss_s, at_s)
        if tier:
            found.first_down_s = min(found.first_down_s, at_s)
    found.frames, found.steps = seconds * HZ, actions.taken
    return found


def ramp(seed: int, rules: list[str]) -> Drive:
    draw = random.Random(seed)
    base_ms, ramp_s = draw.uniform(0.55, 0.75) * BUDGET_MS, draw.uniform(10.0, _LONGEST_RAMP_S)
    seconds = round(LEARNT_S + ramp_s + AFTER_S)
    return drive(
        seed,
        seconds,
        lambda s: 1.0 + 0.5 * min(max(0.0, (s - LEARNT_S) / ramp_s), 1.0),
        rules,
        base_ms=base_ms,
    )


def throttled(seed: int, rules: list[str]) -> Drive:
    """A card whose clock falls.

    `gpu` is an alert from two seconds on, runs take up to twice as long after ten.
    """
    draw = random.Random(seed)
    return drive(
        seed,
        LEARNT_S + AFTER_S,
        lambda s: 1.0 + min(max(0.0, (s - LEARNT_S) / 10.0), 1.0),
        rules,
        base_ms=draw.uniform(0.55, 0.75) * BUDGET_MS,
        alert_at=lambda s: "gpu" if s >= LEARNT_S + 2 else "",
    )


def memory_at_last_step(seed: int) -> float:
    """Memory in use, as a share of the limit, when only the cheapest tier is left.

    It grows by up to 5 % a second.
    """
    draw, guard, used = random.Random(seed), MemoryGuard(), 0.4
    growth = draw.uniform(0.001, 0.05)
    while guard.left_out < len(TIERS) - 1:
        used += growth * draw.uniform(0.5, 1.5)
        guard.update(used, len(TIERS))
    return used


def normal(seed: int, rules: list[str], frames: int) -> Drive:
    """Nothing happens: noise, and one run in 300 that takes twice as long."""
    base_ms = random.Random(seed).uniform(0.3, 0.75) * BUDGET_MS
    return drive(seed, frames // HZ, lambda s: 1.0, rules, base_ms=base_ms, stall=1 / 300)


def live_round(number: int) -> list[Drive]:
    """What became of the stages of one node, each from the beginning of its ramp on."""
    names = [STAGE, *(f"{STAGE}{each}" for each in range(1, _LIVE_STAGES))]
    stages: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(names):
        draw = random.Random(number * _LIVE_STAGES + place)
        options = {
            "base_ms": draw.uniform(0.55, 0.75) * BUDGET_MS,
            "after_s": LEARNT_S,
            "ramp_s": draw.uniform(10.0, _LONGEST_RAMP_S),
            "seed": place,
        }
        stages[name] = {
            "adapter": "benchmarks.rig.ramp_adapter:RampAdapter",
            "options": json.dumps(options),
            "engine": "eager",
            "tiers": list(TIER_NAMES),
            "output": "answer" if name == STAGE else f"answer_{place}",
            "backup": "none",
            "fallback": ["hold_last"],
            "budget_ms": BUDGET_MS,
            "actions": RULES,
        }
    with Graph((OURS,), outputs=False) as graph:
        first = stages.pop(STAGE)
        node = PerfNodeProcess(
            graph,
            first.pop("adapter"),
            json.loads(first.pop("options")),
            node_parameters={"stages": names, **stages},
            **first,
        )
        observer = graph.observer
        graph.wait(
            lambda: all(observer.values(f"perf: {name}").get("worker_0_state") == "idle" for name in names),
            "every worker ready",
            node.process,
            _LIVE_READY_S,
        )
        camera = CameraProcess(graph)
        camera.stream(OURS, seconds=LEARNT_S + _LONGEST_RAMP_S + _LIVE_AFTER_S, rate=HZ, size="128x72")
        rows = observer.seen[OURS].rows
        return [
            since_its_ramp([row for row in rows if row["stage"] == place]) for place in range(_LIVE_STAGES)
        ]


def since_its_ramp(rows: Sequence[Row]) -> Drive:
    """Of the rows of one stage.

    One that was not on its first tier when the ramp began was led down by nothing.
    """
    found, begin_ns = Drive(), rows[0].written_ns + LEARNT_S * NS_PER_S
    for row in rows:
        at_s, missed = (row.written_ns - begin_ns) / NS_PER_S, row["outcome"] not in IN_TIME
        if at_s < 0:
            continue
        found.frames, found.misses = found.frames + 1, found.misses + missed
        if missed:
            found.first_miss_s = min(found.first_miss_s, at_s)
        if row["tier"] > 0:
            found.first_down_s = min(found.first_down_s, at_s)
    return found


def live(rounds: int, report: Report) -> None:
    """Ramps in a real node."""
    drives = []
    for number in range(rounds):
        say(
            f"round {number + 1} of {rounds}: {_LIVE_STAGES} stages,"
            f" {LEARNT_S + _LONGEST_RAMP_S + _LIVE_AFTER_S:g} s"
        )
        drives += live_round(number)
    down_before = [drive for drive in drives if drive.first_down_s < 1 / HZ]
    counted = [drive for drive in drives if drive not in down_before]
    led, kept = sum(drive.led_down for drive in counted), sum(not drive.misses for drive in counted)
    misses, frames = sum(drive.misses for drive in counted), sum(drive.frames for drive in counted)
    columns = (
        "ramps",
        "led down before a miss",
        "no miss at all",
        "misses",
        "of frames",
        "down before: left out",
    )
    report.table("a real node", columns, [(len(counted), led, kept, misses, frames, len(down_before))])
    report.finish(
        {"ramps": [vars(drive) for drive in drives]},
        [
            Target(
                "latency drifts by 50 %: led down before the first miss",
                led / max(1, len(counted)),
                ">=",
                0.9,
            ),
        ],
    )


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument(
        "--live",
        type=int,
        default=0,
        metavar="ROUNDS",
        help="rounds of 8 ramps in a real node, of 3 minutes each",
    )
    parser.add_argument("--seeds", type=int, default=100, help="ramps of each kind (default 100)")
    parser.add_argument(
        "--drives", type=int, default=10, help="normal drives of 10,000 frames (default 10)"
    )
    arguments = parser.parse_args()
    report, rows, down = Report("ramps", arguments), [], {}
    if arguments.live:
        live(arguments.live, report)
        return 0
    for what, kind in (("latency drifts by 50 %", ramp), ("a card is throttled", throttled)):
        for with_rules, rules in (("ladder and actions", RULES), ("ladder alone", [])):
            say(f"{what}, {with_rules}")
            drives = [kind(seed, rules) for seed in range(arguments.seeds)]
            led, kept = ([d.led_down for d in drives], [not d.misses for d in drives])
            down[what, with_rules] = sum(led) / len(drives)
            rows.append(
                (
                    what,
                    with_rules,
                    down[what, with_rules],
                    sum(kept) / len(drives),
                    sum(d.misses for d in drives),
                )
            )
    columns = ("what happens", "who answers", "led down before a miss", "no miss at all", "misses")
    report.table(f"{arguments.seeds} ramps of each kind, share", columns, rows)
    used = max(memory_at_last_step(seed) for seed in range(arguments.seeds))
    report.text(
        f"memory that grows by up to 5 % a second: only the cheapest tier is left at {used:.0%} of the"
        " limit"
    )
    say("normal drives")
    drives = [normal(seed, RULES, _NORMAL_FRAMES) for seed in range(arguments.drives)]
    false = sum(d.steps for d in drives) / max(1, len(drives))
    report.text(
        f"{len(drives)} normal drives of {_NORMAL_FRAMES:,} frames: {false:.2f} degradations in each"
    )
    figures = {
        "led_down": {f"{what}, {who}": value for (what, who), value in down.items()},
        "memory_share": used,
    }
    report.finish(
        {**figures, "false_degradations": false},
        [
            *(
                Target(f"{what}: led down before the first miss", value, ">=", 0.9)
                for (what, who), value in down.items()
                if who != "ladder alone"
            ),
            Target("memory: share of the limit when led down", used, "<=", 1.0),
            Target("false degradations in 10,000 frames", false, "<=", 1.0),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
