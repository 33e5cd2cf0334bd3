"""Packages of parts beside packages of the whole: what compiling costs, and what a frame does.

Two networks of equal blocks: a transformer of 12 layers and a residual network of 12 blocks, with weights drawn for
each block. Each is built by engine aoti as a whole, and with `parts: blocks`, in this process, in turn, from
export to a call that is ready; what all packages of a machine share (compiled headers) is made before. CPU seconds are
those of the process and its compilers: other processes' load hardly changes them. Both packages and eager are then
timed in turns; `least` is the quickest call, which nothing else has disturbed. Parity is the relative L2 distance to
eager, on random inputs.
"""

import argparse
import math
import os
import resource
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

from benchmarks.engines import Block
from benchmarks.rig.arguments import arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.build_options import BLOCKS, BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import Runner, make_runner
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.model.stopwatch import time_interleaved

_CPU = torch.device("cpu")
_WAYS = {"whole": "", "blocks": BLOCKS}
_MOST_COMPILE, _MOST_P50, _MOST_L2 = 0.5, 1.03, 1e-3
_EPILOG = f"""\
targets: compile seconds at most {_MOST_COMPILE} of the whole's, p50 at most {_MOST_P50} of the whole's, parity in the
limits of fp32

examples:
  ./run bench parts
  ./run bench parts --models transformer --blocks 8 --json parts.json"""


class Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Features to features of the same shape."""
        found = torch.relu(self.norms[0](self.first(image)))
        return torch.relu(image + self.norms[1](self.second(found)))


def _transformer(blocks: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), *(Block() for _ in range(blocks)), nn.LayerNorm(256), nn.Linear(256, 10))


def _residual(blocks: int) -> nn.Module:
    stem = nn.Conv2d(3, 64, 7, stride=4, padding=3)
    return nn.Sequential(stem, *(Residual() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(64, 10))  # fmt: skip


MODELS = {"transformer": (_transformer, (1, 128, 64)), "residual": (_residual, (1, 3, 224, 224))}


def main() -> int:
    arguments = _arguments()
    report = Report("parts", arguments)
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="torchperf_parts_") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        if arguments.ways == ",".join(_WAYS):
            say("what all packages share")
            _built(nn.Linear(4, 4), torch.zeros(1, 4), "")
        figures = {name: _measure(name, arguments) for name in arguments.models.split(",")}
    columns = (
        "network",
        "compile s",
        "CPU s",
        "p50 ms",
        "p50 / whole",
        "p50 / eager",
        "least / whole",
        "relative L2",
        "compiled",
    )
    rows = []
    for name, found in figures.items():
        for way in arguments.ways.split(","):
            one, p50_ms = found[way], found[way]["p50_ms"]
            whole_ms = found["whole"]["p50_ms"] if "whole" in found else math.nan
            least_ms = found["whole"]["least_ms"] if "whole" in found else math.nan
            ratios = [p50_ms / whole_ms, p50_ms / found["eager_p50_ms"], one["least_ms"] / least_ms]
            what = [f"{one['relative_l2']:.1e}", one["parts"] or "all"]
            rows.append([f"{name}, {way}", one["compile_s"], one["cpu_s"], p50_ms, *ratios, *what])
    report.table("Parts and the whole", columns, rows)
    both = {name: found for name, found in figures.items() if found.keys() >= _WAYS.keys()}
    report.finish(figures, [target for name, found in both.items() for target in _targets(name, found)])
    return 0


def _arguments() -> argparse.Namespace:
    parser = arguments_of(__doc__ or "", _EPILOG)
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)} (default all)")
    parser.add_argument("--ways", default=",".join(_WAYS), help=f"some of {', '.join(_WAYS)} (default both)")
    parser.add_argument("--blocks", type=int, default=12, help="of each network (default 12)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing, for each way (default 10)")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1),
                        help="of the processor (default all but one)")  # fmt: skip
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.models.split(",")) - set(MODELS)):
        parser.error(f"--models {unknown[0]}: it has to be some of {', '.join(MODELS)}")
    return arguments


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, example = make(arguments.blocks).eval(), torch.randn(shape)
    for module in model.modules():  # as trained: none has the values that a new one has
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.2, 0.4)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2.0)
    found: dict[str, Any] = {}
    calls = {"eager": lambda: model(example)}
    for way in arguments.ways.split(","):
        say(f"{name}: compiling, {way}")
        runner, compile_s, cpu_s = _built(model, example, _WAYS[way])
        calls[way] = lambda runner=runner: runner.call(example)
        with torch.inference_mode():
            parity = check_engine(model, runner.call, (example,), {}, "fp32")
        found[way] = {
            "compile_s": compile_s, "cpu_s": cpu_s, "relative_l2": parity.relative_l2, "parts": runner.parts,
        }  # fmt: skip
    say(f"{name}: timing")
    with torch.inference_mode():
        timings = time_interleaved(calls, _CPU, seconds=arguments.seconds, rounds=(5, 1000))
    for way, figures in found.items():
        figures |= {"p50_ms": timings[way].median_ms, "least_ms": min(timings[way].times_ms)}
    return found | {"eager_p50_ms": timings["eager"].median_ms}


def _built(model: nn.Module, example: torch.Tensor, parts: str) -> tuple[Runner, float, float]:
    started, before = time.perf_counter(), _cpu_s()
    runner = make_runner(BuiltTier(model, (example,), {}, _CPU), BuildOptions("aoti", parts=parts))
    return runner, time.perf_counter() - started, _cpu_s() - before


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _targets(name: str, found: dict[str, Any]) -> list[Target]:
    whole, blocks = found["whole"], found["blocks"]
    return [
        Target(
            f"{name}: CPU seconds of compiling, blocks / whole", blocks["cpu_s"] / whole["cpu_s"], "<=", _MOST_COMPILE
        ),
        Target(f"{name}: p50, blocks / whole", blocks["p50_ms"] / whole["p50_ms"], "<=", _MOST_P50),
        Target(f"{name}: relative L2", blocks["relative_l2"], "<=", _MOST_L2),
    ]


if __name__ == "__main__":
    sys.exit(main())
