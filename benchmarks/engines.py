"""Engines beside each other and a plain call of each library; packages of parts beside packages of the whole.

`engines`: five networks that none of them was tuned for: three of torchvision's, a transformer block, a recurrent
planner. Every engine's runner is what a worker would run; `auto` is the one of them that engine auto takes, by a
measurement of its own that is made before. The plain call is what the library's documentation shows, with the same
number of threads and the same precision. All of one network are timed in turns, with a camera's pause before each call.

`blocks`: two networks of equal blocks, a transformer of 12 layers and a residual network of 12 blocks, with weights
drawn for each block. Each is built by engine aoti as a whole, and with `parts: blocks`, in this process, in turn, from
export to a call that is ready; what all packages of a machine share (compiled headers) is made before. CPU seconds are
those of the process and its compilers: other processes' load hardly changes them. Both packages and eager are then
timed in turns; `least` is the quickest call, which nothing else has disturbed.

Parity is the relative L2 distance to eager, on random inputs.
"""

import argparse
import importlib
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.rig.arguments import add_some, arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.config.build_options import AUTO, BLOCKS, BuildOptions, installed_engines
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import Runner, compare, make_runner
from torchperf_ros.engines.package_engine import export
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.model.stopwatch import Timing, time_interleaved

_CPU = torch.device("cpu")
_EAGER = "eager"
_ENGINES = (_EAGER, "aoti", "onnxruntime", "openvino")
_PLAIN = "plain "
_WAYS = {"whole": "", "blocks": BLOCKS}
_PAUSE_S = 1 / 30
_NEAR_BEST, _NEAR_PLAIN = 1.03, 1.1
_MOST_COMPILE, _MOST_P50, _MOST_L2 = 0.5, 1.03, 1e-3
_EPILOG = f"""\
targets of engines: auto at most {_NEAR_BEST} times the best engine, and at most {_NEAR_PLAIN} times the plain call of
its library
targets of blocks: CPU seconds of compiling at most {_MOST_COMPILE} of the whole's, p50 at most {_MOST_P50} of the
whole's, parity in the limits of fp32

examples:
  ./run bench engines --parts engines --models planner,transformer --rounds 200 --json engines.json
  ./run bench engines --parts blocks --stacks transformer --blocks 8 --json blocks.json"""

Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]


class Block(nn.Module):
    """A transformer's encoder block."""

    def __init__(self, width: int = 256, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, batch x length x width, to the same shape."""
        batch, length, width = tokens.shape
        parts = self.qkv(self.norms[0](tokens)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        tokens = tokens + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return tokens + self.mlp(self.norms[1](tokens))


class Planner(nn.Module):
    """A recurrent planner: what was seen in, a path out."""

    def __init__(self, seen: int = 32, width: int = 128, poses: int = 20) -> None:
        super().__init__()
        self.poses, self.gru = poses, nn.GRU(seen, width, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3 * poses))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        """Observations, batch x steps x numbers, to poses, batch x poses x 3."""
        return self.head(self.gru(seen)[0][:, -1]).reshape(-1, self.poses, 3)


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


class Segmenter(nn.Module):
    """torchvision's segmentation network without the dictionary around its result."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """An image to a score for each class and pixel."""
        return self.network(image)["out"]


def _vision(name: str) -> nn.Module:
    try:
        models = importlib.import_module("torchvision.models")
    except ImportError as error:
        sys.exit(f"{name} is torchvision's: pip install 'torchperf-ros[benchmarks]' ({error})")
    except RuntimeError:
        # its compiled operators, for boxes, which no network here has, are for the CUDA build of torch; beside the
        # CPU's its import asks for two of them that are not there
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float limit) -> Tensor")
        models = importlib.import_module("torchvision.models")
    if name == "lraspp":
        return Segmenter(models.segmentation.lraspp_mobilenet_v3_large(weights=None, weights_backbone=None))
    return getattr(models, name)(weights=None)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mobilenet_v3_large": (lambda: _vision("mobilenet_v3_large"), (1, 3, 224, 224)),
    "resnet18": (lambda: _vision("resnet18"), (1, 3, 224, 224)),
    "lraspp": (lambda: _vision("lraspp"), (1, 3, 256, 256)),
    "transformer": (Block, (1, 128, 256)),
    "planner": (Planner, (1, 20, 32)),
}
STACKS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "transformer": (_transformer, (1, 128, 64)),
    "residual": (_residual, (1, 3, 224, 224)),
}


def main() -> int:
    parts = {"engines": _engines, "blocks": _blocks}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) - 1),
                        help="of the processor (default all but one)")  # fmt: skip
    engines = parser.add_argument_group("engines")
    add_some(engines, "--models", MODELS)
    add_some(engines, "--engines", _ENGINES)
    engines.add_argument("--rounds", type=int, default=60, help="calls of each that are timed (default 60)")
    blocks = parser.add_argument_group("blocks")
    add_some(blocks, "--stacks", STACKS)
    add_some(blocks, "--ways", _WAYS)
    blocks.add_argument("--blocks", type=int, default=12, help="of each stack (default 12)")
    blocks.add_argument("--seconds", type=float, default=10.0, help="of timing, for each way (default 10)")
    arguments = parser.parse_args()
    report = Report("engines", arguments)
    torch.set_num_threads(arguments.threads)
    report.finish_parts(arguments, parts)
    return 0


def _engines(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    found = {name: _measure(name, arguments) for name in arguments.models}
    _show(report, found)
    return found, _targets(found)


def _measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, example = make().eval(), (torch.randn(shape),)
    wanted = [engine for engine in arguments.engines if engine in installed_engines()]
    calls: dict[str, Call] = {_EAGER: model}
    parity, left_out = {_EAGER: 0.0}, {}
    with tempfile.TemporaryDirectory(prefix="torchperf_engines_") as folder:
        for engine in wanted:
            if engine == _EAGER:
                continue
            say(f"{name}: {engine}")
            try:
                runner = make_runner(BuiltTier(model, example, {}, _CPU), BuildOptions(engine))
                plain = _PLAINS[engine](model, example, arguments.threads, Path(folder))
                with torch.inference_mode():
                    parity[engine] = check_engine(model, runner.call, example, {}, "fp32").relative_l2
                    plain(*example)
            except Exception as error:  # the libraries' boundary: the table says why a place in it is empty
                left_out[engine] = f"{type(error).__name__}: {error}".splitlines()[0]
                say(f"{name}: {engine} is left out: {left_out[engine]}")
            else:
                calls |= {engine: runner.call, _PLAIN + engine: plain}
        say(f"{name}: timing")
        with torch.inference_mode():
            inputs = tuple(tensor.clone() for tensor in example)
            engines = {engine: call for engine, call in calls.items() if not engine.startswith(_PLAIN)}
            choice = compare(engines, inputs, _CPU, left_out)
            bound = {each: (lambda call=call: call(*inputs)) for each, call in calls.items()}
            rounds = (arguments.rounds, arguments.rounds)
            found = time_interleaved(bound, _CPU, seconds=0.0, rounds=rounds, inner=1, pause_s=_PAUSE_S)
    return _figures(found, parity, choice.engine, left_out)


def _plain_aoti(model: nn.Module, example: Inputs, threads: int, folder: Path) -> Call:
    path = str(folder / "plain.pt2")
    torch._inductor.aoti_compile_and_package(torch.export.export(model, example), package_path=path)
    return torch._inductor.aoti_load_package(path)


def _plain_onnxruntime(model: nn.Module, example: Inputs, threads: int, folder: Path) -> Call:
    import onnxruntime

    path = str(folder / "plain.onnx")
    torch.onnx.export(export(model, example, {}), dynamo=True, verbose=False).save(path)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *inputs: session.run(None, {name: t.numpy() for name, t in zip(names, inputs, strict=True)})


def _plain_openvino(model: nn.Module, example: Inputs, threads: int, folder: Path) -> Call:
    import openvino

    converted = openvino.convert_model(model, example_input=example, input=[tuple(t.shape) for t in example])
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(converted, "CPU", settings)
    return lambda *inputs: compiled([tensor.numpy() for tensor in inputs])


_PLAINS: dict[str, Callable[[nn.Module, Inputs, int, Path], Call]] = {
    "aoti": _plain_aoti,
    "onnxruntime": _plain_onnxruntime,
    "openvino": _plain_openvino,
}


def _figures(
    found: dict[str, Timing], parity: dict[str, float], chosen: str, left_out: dict[str, str]
) -> dict[str, Any]:
    p50_ms = {name: timing.median_ms for name, timing in found.items()}
    best = min((name for name in p50_ms if not name.startswith(_PLAIN)), key=lambda name: p50_ms[name])
    plain_ms = p50_ms.get(_PLAIN + chosen, p50_ms[_EAGER])
    p50_ms[AUTO] = p50_ms[chosen]  # the very same call
    return {
        "p50_ms": p50_ms,
        "p99_ms": {name: timing.p99_ms for name, timing in found.items()},
        "relative_l2": parity,
        "auto": chosen,
        "best": best,
        "auto_over_best": p50_ms[AUTO] / p50_ms[best],
        "auto_over_plain": p50_ms[AUTO] / plain_ms,
        "left_out": left_out,
    }


def _show(report: Report, figures: dict[str, Any]) -> None:
    rows, plain, parity = [], [], []
    for name, found in figures.items():
        p50_ms = found["p50_ms"]
        rows.append([name, *(p50_ms.get(engine, math.nan) for engine in _ENGINES), p50_ms[AUTO], found["auto"]])
        calls = (p50_ms.get(_PLAIN + engine, math.nan) for engine in _ENGINES[1:])
        plain.append([name, *calls, found["auto_over_best"], found["auto_over_plain"]])
        parity.append([name, *(f"{found['relative_l2'].get(engine, math.nan):.1e}" for engine in _ENGINES[1:])])
    report.table("Engines, p50 in ms", ("network", *_ENGINES, AUTO, "auto is"), rows)
    columns = ("network", *(f"plain {engine}" for engine in _ENGINES[1:]), "auto / best", "auto / plain")
    report.table("Plain calls of the libraries, p50 in ms", columns, plain)
    report.table("Parity with eager, relative L2", ("network", *_ENGINES[1:]), parity)


def _targets(figures: dict[str, Any]) -> list[Target]:
    worst = {
        key: max(figures, key=lambda name, key=key: figures[name][key]) for key in ("auto_over_best", "auto_over_plain")
    }
    words = {"auto_over_best": "auto over the best engine", "auto_over_plain": "auto over the plain call"}
    limits = {"auto_over_best": _NEAR_BEST, "auto_over_plain": _NEAR_PLAIN}
    return [
        Target(f"{words[key]}, at worst ({name})", figures[name][key], "<=", limits[key]) for key, name in worst.items()
    ]


def _blocks(arguments: argparse.Namespace, report: Report) -> tuple[dict[str, Any], list[Target]]:
    with tempfile.TemporaryDirectory(prefix="torchperf_engines_") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        if len(arguments.ways) == len(_WAYS):
            say("what all packages share")
            _built(nn.Linear(4, 4), torch.zeros(1, 4), "")
        found = {name: _stack(name, arguments) for name in arguments.stacks}
    _show_blocks(report, found)
    return found, _block_targets(found)


def _stack(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    make, shape = STACKS[name]
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
    for way in arguments.ways:
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


def _show_blocks(report: Report, figures: dict[str, Any]) -> None:
    rows = []
    for name, found in figures.items():
        whole = found.get("whole", {"p50_ms": math.nan, "least_ms": math.nan})
        for way in filter(found.__contains__, _WAYS):
            one = found[way]
            ratios = (one["p50_ms"] / whole["p50_ms"], one["p50_ms"] / found["eager_p50_ms"],
                      one["least_ms"] / whole["least_ms"])  # fmt: skip
            rows.append([f"{name}, {way}", one["compile_s"], one["cpu_s"], one["p50_ms"], *ratios,
                         f"{one['relative_l2']:.1e}", one["parts"] or "all"])  # fmt: skip
    columns = ("stack", "compile s", "CPU s", "p50 ms", "p50 / whole", "p50 / eager", "least / whole", "relative L2",
               "compiled")  # fmt: skip
    report.table("Packages of parts and of the whole", columns, rows)


def _block_targets(figures: dict[str, Any]) -> list[Target]:
    targets = []
    for name, found in figures.items():
        if found.keys() >= _WAYS.keys():
            whole, blocks = found["whole"], found["blocks"]
            cpu_s, p50_ms = (blocks[key] / whole[key] for key in ("cpu_s", "p50_ms"))
            targets += [
                Target(f"{name}: CPU seconds of compiling, blocks / whole", cpu_s, "<=", _MOST_COMPILE),
                Target(f"{name}: p50, blocks / whole", p50_ms, "<=", _MOST_P50),
                Target(f"{name}: relative L2", blocks["relative_l2"], "<=", _MOST_L2),
            ]
    return targets


if __name__ == "__main__":
    sys.exit(main())
