"""What each technique of training gains and costs.

Seconds, memory, accuracy, and the model's latency afterwards.

One tier of the reference detector is trained for the same number of steps in every way, each in a process
of its own, one after the other, on one thread. `shipped` is as `torchperf train` does it, in bf16; `fp32`
is without. `parts` adds up the gradients of four parts of a batch; `loader` makes batches ready in a
process beside. `distilled` learns from the best tier's answers, too; its gain has an interval of 95 %
(Student's t) over seeds. `pruned` starts from the tier's trained weights with a quarter of its channels
taken away; `narrow` is a network of that width, from the beginning.

`packages` trains nothing: detector and lidar, tier by tier, as they ship, built by each engine in fp32,
bf16 and int8_static, each in a process of its own; then all of a tier are timed in turns, and judged on
held-out examples.
"""

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.rig.arguments import add_some, arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.api.adapter import HELD_OUT, load_adapter
from torchperf_ros.api.errors import one_line
from torchperf_ros.engines.built_tier import BuiltTier, build_model, scoring_of
from torchperf_ros.engines.device import time_interleaved
from torchperf_ros.engines.package import ENGINES
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.models.networks import DETECTOR_WEIGHTS, DETECTOR_WIDTHS, IMAGE_HEIGHT, IMAGE_WIDTH
from torchperf_ros.settings.build_options import DISTRIBUTIONS, MOST_LOSS, BuildOptions, installed
from torchperf_ros.train.detector_task import DetectorTask
from torchperf_ros.train.tier_training import TierPlan, network_of, train, trained_weights

_BASE, _DISTILLED, _NARROW, _PACKAGES = "shipped", "distilled", "narrow", "packages"
_CPU: Final = torch.device("cpu")
_ADAPTERS: Final = {
    "detector": "torchperf_ros.models.camera:CameraAdapter",
    "lidar": "torchperf_ros.models.lidar:LidarAdapter",
}
_PRECISIONS: Final = ("fp32", "bf16", "int8_static")
_PAUSE_S: Final = 1 / 30
_PRUNED_SHARE: Final = 0.25
_NO_GAIN: Final = 0.02  # share of seconds or memory below which a difference is none
_RUNS: Final[Mapping[str, Mapping[str, Any]]] = {
    _BASE: {},
    "fp32": {"bf16": False},
    "parts": {"accumulate": 4},
    "loader": {"loaders": 1},
    _DISTILLED: {"teacher": DETECTOR_WEIGHTS},
    "pruned": {"start": DETECTOR_WEIGHTS, "prune": _PRUNED_SHARE},
    _NARROW: {},
}
_EPILOG = """\
targets: distilled beats training from the beginning, and the interval of its gain excludes 0;
         packages lose at most 0.005 of mAP

examples:
  ./run bench training
  ./run bench training --tier medium --steps 1000 --seeds 5 --json training.json
  ./run bench training --ways packages --models detector --tiers full,fast"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--tier", default="fast", choices=tuple(DETECTOR_WIDTHS), help="default fast")
    parser.add_argument("--steps", type=int, default=600, help="of training in each way (default 600)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="of training with and without a teacher (default 3)"
    )
    parser.add_argument("--judged", type=int, default=300, help="held-out images (default 300)")
    add_some(parser, "--ways", (*_RUNS, _PACKAGES))
    packages = parser.add_argument_group(_PACKAGES)
    add_some(packages, "--models", _ADAPTERS)
    add_some(packages, "--tiers", DETECTOR_WIDTHS)
    engines = [name for name in ENGINES if name not in DISTRIBUTIONS or installed(DISTRIBUTIONS[name])]
    add_some(packages, "--engines", engines)
    packages.add_argument(
        "--rounds", type=int, default=60, help="calls of each package that are timed (default 60)"
    )
    arguments = parser.parse_args()
    report, result, targets = Report("training", arguments), dict[str, Any](), list[Target]()
    if trained := [name for name in arguments.ways if name != _PACKAGES]:
        result, targets = _trainings(
            [_BASE, *(name for name in trained if name != _BASE)], arguments, report
        )
    if _PACKAGES in arguments.ways:
        found = result["packages"] = _packages(arguments, report)
        losses = [one["loss"] for rows in found.values() for one in rows.values() if "loss" in one]
        targets.append(Target("mAP that packages lose, at most", max(losses), "<=", MOST_LOSS))
    report.finish(result, targets)
    return 0


def _trainings(
    wanted: Sequence[str], arguments: argparse.Namespace, report: Report
) -> tuple[dict[str, Any], list[Target]]:
    rows = dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory(prefix="torchperf_training_") as folder:
        for name in wanted:
            for seed in range(1, arguments.seeds + 1) if name in {_BASE, _DISTILLED} else (1,):
                say(f"{name}, seed {seed}")
                checkpoint = Path(folder) / f"{len(rows)}-{seed}.checkpoint"
                plan = TierPlan(
                    "detector", arguments.tier, arguments.steps, seed, "cpu", arguments.judged, checkpoint
                )
                rows.setdefault(name, []).append(
                    _in_process(_train, replace(plan, **_RUNS[name]), name == _NARROW)
                )
    base = rows[_BASE][0]
    report.table(
        f"{arguments.tier}, {arguments.steps} steps of {DetectorTask.batch_size} images, {arguments.judged}"
        " judged",
        ("way", "ms/step", "of shipped", "peak MiB", "of shipped", "mAP@0.5", "p50 ms"),
        [_row(name, own[0], base) for name, own in rows.items()],
    )
    pairs = zip(rows.get(_DISTILLED, ()), rows[_BASE], strict=False)
    gains = np.array([taught["map"] - alone["map"] for taught, alone in pairs])
    low, high = _interval(gains)
    if len(gains):
        report.text(f"distilled less shipped: mAP {gains.mean():+.3f} ({low:+.3f} to {high:+.3f}, 95 %)")
    result = {"runs": rows, "distilled": {"gains": gains.tolist(), "low": low, "high": high}}
    target = Target("distilled, gain of mAP, lower end of the interval", low, ">=", 1e-9)
    return result, [target] if len(gains) else []


def _packages(arguments: argparse.Namespace, report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    """By model and tier, and in that by engine and precision, what was measured."""
    found = {}
    torch.set_num_threads(1)
    for model in arguments.models:
        for tier in arguments.tiers:
            with tempfile.TemporaryDirectory(prefix="torchperf_training_") as folder:
                rows, calls = dict[str, dict[str, Any]](), dict[str, Callable[..., Any]]()
                for options in (
                    BuildOptions(e, precision=p) for e in arguments.engines for p in _PRECISIONS
                ):
                    if options.precision not in ENGINES[options.engine].precisions["cpu"]:
                        continue
                    say(f"{model} {tier}: {options.label}")
                    path = Path(folder) / options.label.replace(" ", "_")
                    one = rows[options.label] = _in_process(_build, _ADAPTERS[model], tier, options, path)
                    if "why" not in one:
                        calls[options.label] = ENGINES[options.engine].load(
                            path, one["outputs"], options, _CPU
                        )
                _measure(_ADAPTERS[model], tier, calls, rows, arguments)
            found[f"{model} {tier}"] = rows
            report.table(
                f"{model} {tier}, p50 in turns, {arguments.judged} judged",
                (
                    "package",
                    "built in s",
                    "peak MiB",
                    "in int8",
                    "mAP",
                    "lost",
                    "p50 ms",
                    "of the engine's fp32",
                ),
                [_package_row(label, one, rows) for label, one in rows.items()],
            )
    return found


def _build(adapter: str, name: str, options: BuildOptions, path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    made = load_adapter(adapter)({}, _CPU)
    tier = BuiltTier(
        build_model(made, name),
        made.example_inputs(name),
        made.dynamic_dims(),
        _CPU,
        scoring=scoring_of(made, name, _CPU),
    )
    begun = time.perf_counter()
    try:
        built = ENGINES[options.engine].build(tier, options, path)
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        seconds = time.perf_counter() - begun
        call, scoring = ENGINES[options.engine].load(path, built.outputs, options, _CPU), tier.scoring
        with torch.inference_mode():
            judging = scoring and replace(scoring, judges=True)  # as `torchperf compile` does
            check_engine(tier.model, call, tier.example, tier.dims, options.precision, scoring=judging)
    except Exception as error:  # the libraries' boundary: the table says why a place in it is empty
        return {"why": one_line(error)}
    return {"seconds": seconds, "peak_mib": peak_mib, "outputs": built.outputs, "int8": built.int8}


def _measure(
    adapter: str,
    tier: str,
    calls: Mapping[str, Callable[..., Any]],
    rows: Mapping[str, dict[str, Any]],
    arguments: argparse.Namespace,
) -> None:
    made = load_adapter(adapter)({}, _CPU)
    task, example, eager = made.training_task(None), made.example_inputs(tier), build_model(made, tier)
    with torch.inference_mode():
        bound = {
            label: lambda call=call: call(*example) for label, call in {"eager": eager, **calls}.items()
        }
        rounds = (arguments.rounds, arguments.rounds)
        times = time_interleaved(bound, _CPU, seconds=0.0, rounds=rounds, inner=1, pause_s=_PAUSE_S)
        best = task.judge(eager, HELD_OUT, arguments.judged, _CPU)["map"]
        for label, call in calls.items():
            value = task.judge(call, HELD_OUT, arguments.judged, _CPU)["map"]
            timing = times[label]
            rows[label].update(map=value, loss=best - value, p50_ms=timing.median_ms, p99_ms=timing.p99_ms)


def _package_row(label: str, one: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> list[object]:
    if "why" in one:
        return [label, "-", "-", one["why"], "-", "-", "-", "-"]
    int8 = ", ".join(f"{n['int8']} of {n['there']} {kind}" for kind, n in one["int8"].items())
    share = one["p50_ms"] / rows[label.partition(" ")[0]].get("p50_ms", float("nan"))
    gain = "-" if " " not in label else "no gain" if share > 1 - _NO_GAIN else f"{share:.2f}x"
    return [
        label,
        one["seconds"],
        one["peak_mib"],
        int8,
        one["map"],
        f"{one['loss']:+.4f}",
        one["p50_ms"],
        gain,
    ]


def _row(name: str, one: Mapping[str, Any], base: Mapping[str, Any]) -> list[object]:
    shares = [one[key] / base[key] for key in ("ms_per_step", "peak_mib")]
    words = [
        "-" if one is base else "no gain" if abs(each - 1) < _NO_GAIN else f"{each:.2f}x" for each in shares
    ]
    return [name, one["ms_per_step"], words[0], one["peak_mib"], words[1], one["map"], one["p50_ms"]]


def _interval(values: Any) -> tuple[float, float]:
    """Of the mean, 95 %; NaN from one value."""
    if len(values) < 2:
        return float("nan"), float("nan")
    from scipy import (
        stats,
    )  # takes as long to import as the rest: not in each process that trains or builds

    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def _in_process(work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """Do it in a process of its own, whose memory is then its own, too."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(work, *given).result()


def _train(plan: TierPlan, narrow: bool) -> dict[str, Any]:
    task = _Narrow() if narrow else DetectorTask()
    result = train(task, plan, lambda *_: None)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    net, _ = network_of(task, plan)
    net.load_state_dict(trained_weights(plan))
    return {
        "ms_per_step": 1e3 * result.seconds / plan.steps,
        "cpu_s": result.cpu_s,
        "peak_mib": peak_mib,
        "map": result.score["map"],
        "false_boxes": result.score["false_boxes"],
        "width": result.width,
        "p50_ms": _p50_ms(net.eval()),
        "held_out": HELD_OUT,
    }


class _Narrow(DetectorTask):
    """Networks as wide as the pruned ones."""

    def network(self, tier: str) -> Any:
        return self.pruned(super().network(tier), _PRUNED_SHARE)[0]


def _p50_ms(net: torch.nn.Module) -> float:
    image = torch.zeros(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH)
    with torch.inference_mode():
        timings = time_interleaved({"net": lambda: net(image)}, _CPU, seconds=0.0, rounds=(50, 50), inner=1)
    return timings["net"].median_ms


if __name__ == "__main__":
    sys.exit(main())
