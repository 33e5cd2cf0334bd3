"""What each technique of training gains and costs: seconds, memory, accuracy, and the model's latency afterwards.

One tier of the reference detector is trained for the same number of steps in every way, each in a process of its own,
one after the other, on one thread. `shipped` is as `torchperf train` does it, in bf16; `fp32` is without. `parts` adds
up the gradients of four parts of a batch; `loader` makes batches ready in a process beside. `distilled` learns from the
best tier's answers, too; its gain has an interval of 95 % (Student's t) over seeds. `pruned` starts from the tier's
trained weights with a quarter of its channels taken away; `narrow` is a network of that width, from the beginning.
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from scipy import stats

from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.cli.shell import words
from torchperf_ros.models.networks import DETECTOR_WEIGHTS, DETECTOR_WIDTHS, IMAGE_HEIGHT, IMAGE_WIDTH
from torchperf_ros.train.detector_task import DetectorTask
from torchperf_ros.train.task import HELD_OUT
from torchperf_ros.train.tier_training import TierPlan, read_checkpoint, train

_BASE, _DISTILLED, _NARROW = "shipped", "distilled", "narrow"
_PRUNED_SHARE: Final = 0.25
_NO_GAIN: Final = 0.02  # share of seconds or memory below which a difference is none
_RUNS: Final[Mapping[str, Mapping[str, Any]]] = {
    _BASE: {},
    "fp32": {"bf16": False},
    "checkpointing": {"checkpointing": True},
    "parts": {"accumulate": 4},
    "loader": {"loaders": 1},
    _DISTILLED: {"teacher": DETECTOR_WEIGHTS},
    "pruned": {"start": DETECTOR_WEIGHTS, "prune": _PRUNED_SHARE},
    _NARROW: {},
}
_EPILOG = """\
targets: distilled beats training from the beginning, and the interval of its gain excludes 0

examples:
  ./run bench training
  ./run bench training --tier medium --steps 1000 --seeds 5 --json training.json"""


def main() -> int:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--tier", default="fast", choices=tuple(DETECTOR_WIDTHS), help="default fast")
    parser.add_argument("--steps", type=int, default=600, help="of training in each way (default 600)")
    parser.add_argument("--seeds", type=int, default=3, help="of training with and without a teacher (default 3)")
    parser.add_argument("--judged", type=int, default=300, help="held-out images (default 300)")
    parser.add_argument("--ways", default=",".join(_RUNS), help=f"with commas between (default {','.join(_RUNS)})")
    arguments = parser.parse_args()
    wanted = [_BASE, *(name for name in words(arguments.ways) if name != _BASE)]
    if unknown := [name for name in wanted if name not in _RUNS]:
        sys.exit(f"--ways: {unknown[0]} is not there; it has to be of: {', '.join(_RUNS)}")
    report, rows = Report("training", arguments), dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory(prefix="torchperf_training_") as folder:
        for name in wanted:
            for seed in range(1, arguments.seeds + 1) if name in {_BASE, _DISTILLED} else (1,):
                say(f"{name}, seed {seed}")
                checkpoint = Path(folder) / f"{len(rows)}-{seed}.checkpoint"
                plan = TierPlan("detector", arguments.tier, arguments.steps, seed, "cpu", arguments.judged, checkpoint)
                rows.setdefault(name, []).append(_trained(replace(plan, **_RUNS[name]), narrow=name == _NARROW))
    base = rows[_BASE][0]
    report.table(
        f"{arguments.tier}, {arguments.steps} steps of {DetectorTask.batch_size} images, {arguments.judged} judged",
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
    report.finish(result, [target] if len(gains) else [])
    return 0


def _row(name: str, one: Mapping[str, Any], base: Mapping[str, Any]) -> list[object]:
    shares = [one[key] / base[key] for key in ("ms_per_step", "peak_mib")]
    words = ["-" if one is base else "no gain" if abs(each - 1) < _NO_GAIN else f"{each:.2f}x" for each in shares]
    return [name, one["ms_per_step"], words[0], one["peak_mib"], words[1], one["map"], one["p50_ms"]]


def _interval(values: Any) -> tuple[float, float]:
    """Of the mean, 95 %; NaN from one value."""
    if len(values) < 2:
        return float("nan"), float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean() - half), float(values.mean() + half)


def _trained(plan: TierPlan, *, narrow: bool) -> dict[str, Any]:
    """Train in a process of its own, whose memory is then its own, too."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(plan, narrow, there))
    process.start()
    there.close()
    found: dict[str, Any] = here.recv()
    process.join()
    return found


def _train(plan: TierPlan, narrow: bool, pipe: Any) -> None:
    task = _Narrow() if narrow else DetectorTask()
    result = train(task, plan, lambda *_: None)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = read_checkpoint(plan)
    assert found is not None
    net = task.network(plan.tier)
    if plan.prune:
        net, _ = task.pruned(net, plan.prune)  # of the same shapes; the weights follow
    prefix = "module."
    net.load_state_dict({key.removeprefix(prefix): value for key, value in found["mean"].items() if prefix in key})
    pipe.send({
        "ms_per_step": 1e3 * result.seconds / plan.steps, "cpu_s": result.cpu_s, "peak_mib": peak_mib,
        "map": result.score["map"], "false_boxes": result.score["false_boxes"], "width": result.width,
        "p50_ms": _p50_ms(net.eval()), "held_out": HELD_OUT,
    })  # fmt: skip


class _Narrow(DetectorTask):
    """Networks as wide as the pruned ones."""

    def network(self, tier: str) -> Any:
        return self.pruned(super().network(tier), _PRUNED_SHARE)[0]


def _p50_ms(net: torch.nn.Module) -> float:
    image, times = torch.zeros(1, 3, IMAGE_HEIGHT, IMAGE_WIDTH), []
    with torch.inference_mode():
        for _ in range(60):
            begun = time.perf_counter()
            net(image)
            times.append(1e3 * (time.perf_counter() - begun))
    return float(np.median(times[10:]))


if __name__ == "__main__":
    sys.exit(main())
