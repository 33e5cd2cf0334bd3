"""What `torchperf inspect` looks at, and one inspection of it.

A model, an adapter's tier or any callable, runs under torch.compile with each of its inputs, and the
compiler's messages are kept. `show` prints it, `as_json` is for machines.
"""

import contextlib
import copy
import importlib
import importlib.util
import inspect
import io
import json
import logging
import operator
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.api.errors import TorchperfError
from torchperf_ros.api.import_paths import look_here_after_python
from torchperf_ros.api.text import console_table
from torchperf_ros.engines.built_tier import BuiltTier, Inputs, build_model
from torchperf_ros.engines.model_transforms import quiet_log
from torchperf_ros.engines.outputs import flat_numbers, layout_of
from torchperf_ros.engines.parity import random_inputs, random_like
from torchperf_ros.tools import graph_breaks
from torchperf_ros.tools.graph_breaks import BreakKind, GraphBreak, SourceLine

_SEED = 0
_TRIED, _NEAR = 4, 1e-5  # drawn inputs of each size, and how near answers are that are the same
_SPEC = re.compile(r"(scalar|\d+(?:x\d+)*)(?::(\w+))?")


class InspectError(TorchperfError):
    """The model or its inputs cannot be made as asked; the message has the reason and what would be right."""


class InspectedModel(NamedTuple):
    """A callable and what it is called with: the usual input first, then what it may also meet."""

    name: str
    call: Callable[..., Any]
    input_sets: tuple[Inputs, ...]


def load_model(
    target: str, tier: str, options: dict[str, Any], inputs: list[str], device: torch.device
) -> InspectedModel:
    """Import `module:name` or `file.py:name` and make its inputs.

    It is an `Adapter` class, a module (class, instance or factory without arguments), or a function. Each of
    the `inputs` is a text with a size for each argument, like `1x3x224x224:float32 8:int64`. The first is the
    usual one; an adapter brings its own.

    Raises:
        InspectError: what is asked for is not there, or cannot be made.
    """
    torch.manual_seed(_SEED)  # weights made at random are the same each time
    what = f"TARGET {target!r}"
    try:
        found = _find(target)
        if isinstance(found, type) and issubclass(found, Adapter):
            what += f", tier {tier!r}, options {options}"
            return _adapter_model(f"{target} ({tier})", found(options, device), tier, inputs, device)
        call = _callable(found)
    except InspectError:
        raise
    except (Exception, SystemExit) as error:  # the user's code: its error is why it cannot be loaded
        raise InspectError(f"{what}: {type(error).__name__}: {error}") from error
    if not inputs:
        example = "--input 1x3x224x224:float32, or --input '8x3 8:int64' for two arguments"
        raise InspectError(f"{target} needs its inputs: for example {example}")
    usual = tuple(_make(spec, None, device) for spec in inputs[0].split())
    sets = (usual, *(_like(text, usual, device) for text in inputs[1:]))
    return InspectedModel(
        target, call.eval().to(device) if isinstance(call, torch.nn.Module) else call, sets
    )


def takes_tensor(model: InspectedModel, file: str, line: int) -> bool:
    """Whether a model answers the same where this line keeps a 0-d tensor instead of its number: it is tried.

    Copies of the model run on drawn inputs, one after the other. What they hold then has to be of the same
    kinds, too: a tensor that is kept is more than a number.
    """
    inputs = [random_inputs(each, seed) for seed in range(_TRIED) for each in model.input_sets]
    # A file may have been loaded more than once.
    names = [vars(one) for one in [*sys.modules.values()] if getattr(one, "__file__", "") == file]
    before, reads = [dict(one) for one in names], list[int]()
    try:
        numbers, held = _run(model, inputs, contextlib.nullcontext(), names)
        tensors, held_then = _run(model, inputs, _kept_tensors(file, line, names, reads), names)
    except Exception:  # the user's code: it cannot be copied, or does not take a tensor there
        return False
    finally:
        for one, values in zip(names, before, strict=True):
            one.update(values)
    if not reads or held != held_then or list(map(layout_of, numbers)) != list(map(layout_of, tensors)):
        return False
    pairs = zip(flat_numbers(numbers), flat_numbers(tensors), strict=True)
    return all(torch.allclose(one, other, _NEAR, _NEAR, equal_nan=True) for one, other in pairs)


def _run(
    model: InspectedModel,
    inputs: list[Inputs],
    how: AbstractContextManager[None],
    names: Sequence[Mapping[str, Any]],
) -> tuple[list[Any], list[dict[str, Any]]]:
    """A copy's answers, and of what kinds everything is that its modules and its file then hold."""
    call = copy.deepcopy(model.call)
    torch.manual_seed(_SEED)
    with torch.no_grad(), how:
        outputs = [call(*(tensor.clone() for tensor in each)) for each in inputs]
    held = [vars(one) for one in call.modules()] if isinstance(call, torch.nn.Module) else []
    return outputs, [{name: _kind_of(value) for name, value in one.items()} for one in (*held, *names)]


def _kind_of(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), sorted({type(one).__name__ for one in value})
    if isinstance(value, dict):
        return type(value), *(sorted({type(one).__name__ for one in of}) for of in (value, value.values()))
    return type(value)


@contextlib.contextmanager
def _kept_tensors(
    file: str, line: int, names: Sequence[dict[str, Any]], reads: list[int]
) -> Iterator[None]:
    """Context in which `item()` and `float()` at a line give a 0-d tensor; `reads` grows by each."""
    read = torch.Tensor.item

    def kept(tensor: torch.Tensor) -> torch.Tensor | None:
        frame = sys._getframe(2)
        if (frame.f_code.co_filename, frame.f_lineno) != (file, line):
            return None
        reads.append(line)
        return tensor.reshape(())

    def item(tensor: torch.Tensor) -> Any:  # noqa: ANN401
        found = kept(tensor)
        return read(tensor) if found is None else found

    def as_float(value: Any = 0.0) -> Any:  # noqa: ANN401
        found = kept(value) if isinstance(value, torch.Tensor) else None
        return float(value) if found is None else found

    setattr(torch.Tensor, "item", item)  # noqa: B010
    for one in names:
        one["float"] = as_float
    try:
        yield
    finally:
        delattr(torch.Tensor, "item")
        for one in names:
            del one["float"]


def shapes_text(inputs: Inputs) -> str:
    """`1x3x224x224:float32 4:int64`, as it can be given again."""
    return " ".join(
        f"{'x'.join(map(str, t.shape)) or 'scalar'}:{str(t.dtype).removeprefix('torch.')}" for t in inputs
    )


def _find(target: str) -> Any:  # noqa: ANN401 - what the user's module holds
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InspectError(
            f"TARGET {target!r} does not have the form module:callable or file.py:callable, e.g."
            " my_robot.model:Net"
        )
    path = Path(place).resolve()
    if not place.endswith(".py"):
        look_here_after_python(add=True)
        module = importlib.import_module(place)
    elif spec := importlib.util.spec_from_file_location(path.stem, path):
        sys.path.insert(
            0, str(path.parent)
        )  # for what it imports from beside itself, as `python file.py` does
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    try:
        found: Any = operator.attrgetter(name)(module)
    except AttributeError:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InspectError(
            f"TARGET {target!r}: {place} has no {name!r}; callables there:"
            f" {', '.join(names[:12]) or 'none'}"
        ) from None
    if not callable(found):
        raise InspectError(f"TARGET {target!r} is a {type(found).__name__}, which cannot be called")
    return found


def _callable(found: Any) -> Callable[..., Any]:  # noqa: ANN401
    """The function itself; of a class or a factory without arguments, what it makes."""
    if isinstance(found, torch.nn.Module) or inspect.isbuiltin(found):
        return found
    parameters = inspect.signature(found).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if not isinstance(found, type) and needed:
        return found  # type: ignore[no-any-return]
    made = found()
    if not callable(made):
        raise TypeError(f"it makes a {type(made).__name__}, which cannot be called")
    return made  # type: ignore[no-any-return]


def _adapter_model(
    name: str, adapter: Adapter, tier: str, inputs: list[str], device: torch.device
) -> InspectedModel:
    model, example = build_model(adapter, tier).to(device), adapter.example_inputs(tier)
    *others, usual = BuiltTier(model, example, adapter.dynamic_dims(), device).inputs_by_size()
    sets = (usual, *others, *(_like(text, example, device) for text in inputs))
    different = {shapes_text(one): one for one in reversed(sets)}
    return InspectedModel(name, model, tuple(reversed(different.values())))


def _like(text: str, example: Inputs, device: torch.device) -> Inputs:
    specs = text.split()
    if len(specs) != len(example):
        raise InspectError(
            f"--input {text!r} has {len(specs)} sizes, the model takes {len(example)} inputs:"
            f" for example --input {shapes_text(example)!r}"
        )
    return tuple(_make(spec, like, device) for spec, like in zip(specs, example, strict=True))


def _make(spec: str, like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """A tensor of this size.

    Floats normal, integers 0 to 9, booleans at random; or of the values of another.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InspectError(
            f"input {spec!r} is not a size like 1x3x224x224, 1x3x224x224:float16 or scalar:int64"
        )
    dtype = getattr(torch, match[2], None) if match[2] else torch.float32 if like is None else like.dtype
    if not isinstance(dtype, torch.dtype):
        raise InspectError(
            f"input {spec!r}: {match[2]!r} is not a type of torch such as float32, float16, int64, uint8 or"
            " bool"
        )
    shape = () if match[1] == "scalar" else tuple(map(int, match[1].split("x")))
    if like is None or like.dtype is not dtype:
        like = (torch.zeros(10) if dtype.is_floating_point or dtype.is_complex else torch.arange(10)).to(
            dtype
        )
    return random_like(like, shape, torch.Generator().manual_seed(_SEED)).to(device)


# of the compiled model: what changes with each run is compiled 8 times before the compiler gives up
_RUNS = 10
_CALLS = ("call_function", "call_method", "call_module")
_TRACE = logging.getLogger("torch.__trace")  # what TORCH_TRACE writes to a file
_BREAKS_LOG = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
_NOWHERE = logging.NullHandler()
_MOST_GUARDS_SHOWN = 2


_PLACE = re.compile(r"#\s*(?P<text>[^#]*?)\s*#\s*(?P<file>\S+?):(?P<line>\d+) in \w+")
_ADVICE = {
    "size": (
        "Happens once for each dimension that varies; torch.compile(dynamic=True) may compile for all sizes"
        " at once."
    ),
    "unrolled": (
        "The size is built into the graph, as by a Python loop over that dimension: each size is compiled"
        " anew. Work on the whole tensor instead."
    ),
    "shape branch": "Each side is a graph of its own. Pad to one size, or mask instead of `if`.",
    "one": "Sizes 0 and 1 always get graphs of their own: pad to 2, or warm up with both.",
    "dtype": "Cast in preprocess, so that the model always gets the same type.",
    "stride": "Call .contiguous() on it before, so that the memory layout is always the same.",
    "value": "A Python value is built into the graph: pass it as a tensor, or keep it constant.",
    "limit": "The compiler has given up on this function, which now runs uncompiled.",
}


@dataclass(frozen=True)
class Recompilation:
    """One more compilation of a function that had been compiled.

    Attributes:
        kind: size, unrolled, shape branch, one, dtype, stride, value or limit.
        guard: the condition that the compiled code had assumed and that does not hold, in the compiler's
            words.
        source: `file:line: text` of the user's code that asked for this condition, where the compiler knows
            it.
    """

    function: str
    file: str
    line: int
    input_set: int
    kind: str
    guard: str
    source: str

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


def explain_recompilations(
    raw: list[tuple[str, int, str]], function_of: Callable[[str], tuple[str, str, int]]
) -> list[Recompilation]:
    """For each, the guard that failed and what would help.

    Args:
        raw: in order: compile id, input set, and `recompile_reasons` of the compiler's trace.
        function_of: name, file and line of the function that a compilation is of, by compile id.
    """
    config = torch._dynamo.config
    limit = int(getattr(config, "recompile_limit", 0) or getattr(config, "cache_size_limit", 8))
    found: list[Recompilation] = []
    guards = [_newest_guard(text) for _, _, text in raw]
    functions = [function_of(compile_id) for compile_id, _, _ in raw]
    sizes = Counter(zip(functions, (guard.partition("expected")[0] for guard in guards), strict=True))
    for (compile_id, input_set, _), reason, function in zip(raw, guards, functions, strict=True):
        place = _PLACE.search(reason)
        guard = re.sub(r"\. Guard failed on a parameter.*", "", re.sub(r"\s+#.*", "", reason)).strip()
        source = f"{place['file'].rpartition('/')[2]}:{place['line']}: {place['text']}" if place else ""
        kind = "limit" if int(compile_id.partition("/")[2] or 0) >= limit else _kind(guard, source)
        if kind == "size" and sizes[function, reason.partition("expected")[0]] > 1:
            # a size that the compiler could leave open fails once; one that it built in, each time
            kind = "unrolled"
        name = graph_breaks.readable_function(function[0])
        found.append(Recompilation(name, *function[1:], input_set, kind, guard, source))
    return found


def _newest_guard(text: str) -> str:
    """The reasons are one text, or a JSON list with one for each earlier compilation, the newest first."""
    try:
        reasons = json.loads(text)
    except ValueError:
        reasons = [text]
    first = str(reasons[0]) if isinstance(reasons, list) and reasons else ""
    return re.sub(r"^\d+/\d+: ", "", first).partition("\n")[0]


def _kind(guard: str, source: str) -> str:
    if "dtype mismatch" in guard or "dispatch key" in guard:
        return "dtype"
    if "stride mismatch" in guard:
        return "stride"
    if "size mismatch" in guard or "rank mismatch" in guard:
        return "size"
    if "size()" in guard or "shape[" in guard:
        branches = re.search(r"\b(if|elif|while|else|assert)\b", source)
        if re.fullmatch(r"2 <= \S+", guard) and not branches:
            return "one"
        return "shape branch" if branches or "==" not in guard else "unrolled"
    return "value"


class Graph(NamedTuple):
    """One captured graph: of which compilation, and for which input set."""

    compile_id: str
    input_set: int


class Inspection(logging.Handler):
    """A model under torch.compile with each of its inputs: the content of the compiler's trace.

    Attributes:
        inputs: sizes and types of each input set.
        graphs: in the order of their capture, over all input sets.
        breaks: by line of the user's code, in the order in which they were found.
        failure: what the compiled model raised where the eager one did not; empty if it ran.
    """

    def __init__(self, model: InspectedModel, device: torch.device) -> None:
        super().__init__()  # of the log handler
        self.target, self.device = model.name, device
        self.inputs = [shapes_text(inputs) for inputs in model.input_sets]
        self.graphs: list[Graph] = []
        self.breaks: list[GraphBreak] = []
        self.recompilations: list[Recompilation] = []
        self.failure = ""
        torch.compiler.reset()
        self._model = model
        self._compiled: Callable[..., Any] | None = None
        self._functions: dict[str, tuple[str, str, int]] = {}  # by the first number of a compile id
        self._recompile_reasons: list[tuple[str, int, str]] = []
        self._input_set = 0

    @property
    def doubt(self) -> str:
        """Why "no breaks" means nothing here; empty where it does."""
        if self.breaks or self.failure:
            return ""
        if not self.graphs:
            why = (
                "the model does nothing with tensors, or is kept from the compiler by"
                " torch.compiler.disable"
            )
            return f"no graph: {why}"
        frames = {graph.compile_id.partition("/")[0] for graph in self.graphs if graph.input_set == 0}
        if len(frames) <= 1:
            return ""
        return f"torch {torch.__version__} captures {len(frames)} pieces, and does not report what is between them"

    def exit_status(self, max_breaks: int | None) -> int:
        """1 where there are more breaks than allowed or that is in doubt, or the compiled model fails.

        Else 0.
        """
        gate = max_breaks is not None and (len(self.breaks) > max_breaks or bool(self.doubt))
        return 1 if gate or self.failure else 0

    def run(self, progress: Callable[[str], None]) -> None:
        """Compile the model with each input set; `progress` gets a line on each step.

        Raises:
            InspectError: the model does not run eagerly on its inputs.
        """
        with self._listening():
            for index, shapes in enumerate(self.inputs):
                which = f"input {index + 1} of {len(self.inputs)}, {shapes}"
                try:
                    progress(f"running eagerly: {which}")
                    for _ in range(2):  # an error of the second run is the model's, not the compiler's
                        self.call(self._model.call, index)
                except Exception as error:
                    msg = f"{self.target} does not run on the inputs {shapes}, even without the compiler: "
                    raise InspectError(f"{msg}{type(error).__name__}: {error}") from error
                if not self.failure:
                    progress(f"capturing graphs: {which}")
                    self.failure = self._compile(index)
            for item in self.breaks:
                if item.kind is BreakKind.SCALAR and not takes_tensor(self._model, *item.place):
                    item.kind = BreakKind.NUMBER
        torch.compiler.reset()
        self.recompilations = explain_recompilations(self._recompile_reasons, self._function)

    def _function(self, compile_id: str) -> tuple[str, str, int]:
        return self._functions.get(compile_id.partition("/")[0], ("?", "<unknown>", 0))

    def _compile(self, index: int) -> str:
        try:
            if self._compiled is None:  # it refuses models of torch.jit
                self._compiled = torch.compile(self._model.call, backend=self._keep)
            for _ in range(_RUNS):
                self.call(self._compiled, index)
        except Exception as error:
            first = re.sub(r"\s+", " ", str(error).partition("\n\n")[0])
            return f"compiled, it raises {type(error).__name__}: {first}"
        return ""

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which the compiler is listened to, and neither it nor the model prints."""
        nowhere, propagate = io.StringIO(), _BREAKS_LOG.propagate
        with (
            quiet_log("torch._dynamo", "torch._inductor", "torch.fx", _BREAKS_LOG.name),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            _BREAKS_LOG.setLevel(logging.DEBUG)  # the trace has some breaks only where this log is on
            _BREAKS_LOG.propagate = False
            _BREAKS_LOG.addHandler(_NOWHERE)
            _TRACE.addHandler(self)
            try:
                yield
            finally:
                _TRACE.removeHandler(self)
                _BREAKS_LOG.removeHandler(_NOWHERE)
                _BREAKS_LOG.propagate = propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Called by torch's trace logger, whose records carry `metadata` and `payload`."""
        metadata, text = getattr(record, "metadata", {}), getattr(record, "payload", None) or ""
        frame_id = str(metadata.get("frame_id"))
        compile_id = f"{frame_id}/{metadata.get('frame_compile_id')}"
        name = (metadata.get("artifact") or {}).get("name")
        if name == "dynamo_graph_break_reason":
            reason, whole_function, frame = graph_breaks.parse_break(text)
            item = next((known for known in self.breaks if known.place == frame[:2]), None)
            if item is None:
                item = graph_breaks.new_break(reason, frame, self._input_set)
                self.breaks.append(item)
            item.reasons += [] if reason in item.reasons else [reason]
            item.whole_function |= whole_function
        elif name == "recompile_reasons":
            self._recompile_reasons.append((compile_id, self._input_set, text))
        elif (values := metadata.get("compilation_metrics")) and values.get("co_name"):
            line = int(values.get("co_firstlineno") or 0)
            self._functions[frame_id] = (str(values["co_name"]), str(values.get("co_filename")), line)

    def call(self, call: Callable[..., Any], index: int) -> None:
        """Run the model on copies of one input set; what it draws at random is the same each time."""
        arguments = tuple(tensor.clone() for tensor in self._model.input_sets[index])
        self._input_set = index
        torch.manual_seed(_SEED)
        with torch.no_grad():
            call(*arguments)

    def _keep(self, module: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        """The compiler calls this for each graph, whose ops then run one by one.

        Graphs without an op only pass values on and are left out.
        """
        if any(node.op in _CALLS for node in module.graph.nodes):
            compile_id = str(torch._guards.CompileContext.current_compile_id() or "")
            self.graphs.append(Graph(compile_id, self._input_set))
        return module.forward


def summary(inspection: Inspection) -> str:
    """The whole inspection in one line; graphs are those of the first input set."""
    graphs = [graph for graph in inspection.graphs if graph.input_set == 0]
    words = [_count(len(graphs), "graph"), _count(len(inspection.breaks), "break")]
    if len(inspection.inputs) > 1 or inspection.recompilations:
        recompilations = _count(len(inspection.recompilations), "recompilation")
        words.append(f"{recompilations} over {_count(len(inspection.inputs), 'input')}")
    return ", ".join(words)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def as_json(inspection: Inspection, max_breaks: int | None) -> dict[str, Any]:
    def place(line: SourceLine) -> dict[str, Any]:
        return {"file": line.file, "line": line.line, "source": line.text}

    return {
        "target": inspection.target,
        "torch": torch.__version__,
        "device": str(inspection.device),
        "inputs": inspection.inputs,
        "graphs": [graph.input_set + 1 for graph in inspection.graphs],
        "breaks": [
            {
                **place(item.line),
                "function": item.function,
                "underline": item.underline,
                "category": item.kind.label,
                "title": item.title,
                "reasons": item.reasons,
                "advice": item.kind.advice,
                "whole_function_uncompiled": item.whole_function,
                "input": item.input_set + 1,
            }
            for item in inspection.breaks
        ],
        "recompilations": [
            {**asdict(item), "advice": item.advice, "input": item.input_set + 1}
            for item in inspection.recompilations
        ],
        "failure": inspection.failure or None,
        "doubt": inspection.doubt or None,
        "max_breaks": max_breaks,
        "exit_status": inspection.exit_status(max_breaks),
        "summary": summary(inspection),
    }


def show(inspection: Inspection, console: Console, max_breaks: int | None) -> None:
    console.print(Text(inspection.target, style="bold"))
    console.print(Text(f"torch {torch.__version__} · {inspection.device}"))
    for number, item in enumerate(inspection.breaks, 1):
        console.print(Text.assemble((f"\nbreak {number}  ", "bold red"), (item.kind.label, "bold")))
        console.print(Padding(_break(item, len(inspection.inputs)), (0, 0, 0, 2)))
    if inspection.recompilations:
        console.print(Text("\nrecompilations", style="bold"))
        heads = (">input", "function", "kind", "guard that failed, and what would help")
        console.print(console_table(heads, _recompilation_rows(inspection)))
    for words in filter(None, [inspection.failure and f"FAILED: {inspection.failure}", inspection.doubt]):
        console.print(Text(words, style="bold red"))
    console.print(Text(f"\n{summary(inspection)}", style="bold"))
    if max_breaks is not None:
        good = inspection.exit_status(max_breaks) == 0
        words = f"{_count(len(inspection.breaks), 'break')}, at most {max_breaks} allowed"
        style = "bold green" if good else "bold red"
        console.print(Text(f"{'PASS' if good else 'FAIL'}: {words}", style=style))


def _break(item: GraphBreak, input_sets: int) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    file = min(item.line.file, os.path.relpath(item.line.file), key=len)
    grid.add_row("where", Text(f"{file}:{item.line.line} in {item.function}", style="cyan"))
    grid.add_row("", Text.assemble((item.line.text, "bold"), (f"\n{item.underline}", "red")))
    grid.add_row("why", Text(f"{item.title}. {item.explanation}" if item.explanation else item.title))
    effects = []
    if item.whole_function:
        effects.append("the compiler leaves the whole function uncompiled")
    if input_sets > 1 and item.input_set:
        effects.append(f"first with input {item.input_set + 1}")
    if effects:
        grid.add_row("effect", Text("; ".join(effects)))
    grid.add_row("instead", Text(item.kind.advice))
    return grid


def _recompilation_rows(inspection: Inspection) -> Iterator[tuple[str, ...]]:
    explained: set[str] = set()
    groups: dict[tuple[str, int, str, str], list[Recompilation]] = {}
    for item in inspection.recompilations:
        groups.setdefault((item.file, item.line, item.kind, item.source), []).append(item)
    for (file, line, kind, source), items in groups.items():
        more = len(items) - _MOST_GUARDS_SHOWN
        lines = [item.guard for item in items[:_MOST_GUARDS_SHOWN]]
        lines += [f"and {more} more like it"] if more > 0 else []
        lines += [source] if source else []
        lines += [] if kind in explained else [items[0].advice]
        explained.add(kind)
        inputs = ", ".join(dict.fromkeys(str(item.input_set + 1) for item in items))
        place = f"{items[0].function}\n{os.path.basename(file)}:{line}"
        yield inputs, place, kind, "\n".join(lines)
