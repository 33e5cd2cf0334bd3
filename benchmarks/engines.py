"""Engines beside each other and a plain call of each library.

Five networks that none of them was tuned for: three of torchvision's, a transformer block, a recurrent
planner. Every engine's runner is what a worker would run; `auto` is the one of them that engine auto takes,
by a measurement of its own that is made before. The plain call is what the library's documentation shows,
with the same number of threads and the same precision. All of one network are timed in turns, with a
camera's pause before each call.

Parity is the relative L2 distance to eager, on random inputs.
"""

import argparse
import importlib
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.rig.arguments import add_some, arguments_of
from benchmarks.rig.report import Report, Target, say
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.device import Timing, time_interleaved
from torchperf_ros.engines.package import compare, make_runner
from torchperf_ros.engines.package_engine import export
from torchperf_ros.engines.parity import check_engine
from torchperf_ros.settings.build_options import AUTO, DISTRIBUTIONS, BuildOptions, installed

_CPU = torch.device("cpu")
_EAGER = "eager"
_ENGINES = (_EAGER, "aoti", "onnxruntime", "openvino")
_PLAIN = "plain "
_PAUSE_S = 1 / 30
_NEAR_BEST, _NEAR_PLAIN = 1.03, 1.1
_EPILOG = f"""\
targets: auto at most {_NEAR_BEST} times the best engine, and at most {_NEAR_PLAIN} times the plain call of
its library

example:
  ./run bench engines --parts engines --models planner,transformer --rounds 200 --json engines.json"""

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
        parts = (
            self.qkv(self.norms[0](tokens)).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
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
        # its compiled operators, for boxes, which no network here has, are for the CUDA build of torch;
        # beside the CPU's its import asks for two of them that are not there
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor boxes, Tensor scores, float limit) -> Tensor"
            )
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


def main() -> int:
    parts = {"engines": _engines}
    parser = arguments_of(__doc__ or "", _EPILOG)
    add_some(parser, "--parts", parts)
    parser.add_argument(
        "--threads",
        type=int,
        default=max(1, (os.cpu_count() or 1) - 1),
        help="of the processor (default all but one)",
    )
    engines = parser.add_argument_group("engines")
    add_some(engines, "--models", MODELS)
    add_some(engines, "--engines", _ENGINES)
    engines.add_argument("--rounds", type=int, default=60, help="calls of each that are timed (default 60)")
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
    wanted = [
        engine
        for engine in arguments.engines
        if engine not in DISTRIBUTIONS or installed(DISTRIBUTIONS[engine])
    ]
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
            bound = {each: lambda call=call: call(*inputs) for each, call in calls.items()}
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
    return lambda *inputs: session.run(
        None, {name: t.numpy() for name, t in zip(names, inputs, strict=True)}
    )


def _plain_openvino(model: nn.Module, example: Inputs, threads: int, folder: Path) -> Call:
    import openvino

    converted = openvino.convert_model(
        model, example_input=example, input=[tuple(t.shape) for t in example]
    )
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
    }
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
        rows.append(
            [name, *(p50_ms.get(engine, math.nan) for engine in _ENGINES), p50_ms[AUTO], found["auto"]]
        )
        calls = (p50_ms.get(_PLAIN + engine, math.nan) for engine in _ENGINES[1:])
        plain.append([name, *calls, found["auto_over_best"], found["auto_over_plain"]])
        parity.append(
            [name, *(f"{found['relative_l2'].get(engine, math.nan):.1e}" for engine in _ENGINES[1:])]
        )
    report.table("Engines, p50 in ms", ("network", *_ENGINES, AUTO, "auto is"), rows)
    columns = ("network", *(f"plain {engine}" for engine in _ENGINES[1:]), "auto / best", "auto / plain")
    report.table("Plain calls of the libraries, p50 in ms", columns, plain)
    report.table("Parity with eager, relative L2", ("network", *_ENGINES[1:]), parity)


def _targets(figures: dict[str, Any]) -> list[Target]:
    worst = {
        key: max(figures, key=lambda name, key=key: figures[name][key])
        for key in ("auto_over_best", "auto_over_plain")
    }
    words = {"auto_over_best": "auto over the best engine", "auto_over_plain": "auto over the plain call"}
    limits = {"auto_over_best": _NEAR_BEST, "auto_over_plain": _NEAR_PLAIN}
    return [
        Target(f"{words[key]}, at worst ({name})", figures[name][key], "<=", limits[key])
        for key, name in worst.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
