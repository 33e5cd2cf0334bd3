"""Graph breaks, one for each line of the user's code: reason, place, kind, and what to write instead."""

import ast
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from torchperf_ros.tools.inspect.users_source import SourceLine, names_in, read_line


class Kind(Enum):
    """The kinds of graph breaks: as reports and JSON name it, and what to do instead."""

    BRANCH = (
        "branch on tensor values",
        "Compute both sides, of one shape, and choose by torch.where; if one is expensive, torch.cond.",
    )
    EARLY_EXIT = (
        "branch on tensor values",
        (
            "It ends a loop early. Run every round, and keep the result of the one that would have been the"
            " last: x = torch.where(done, x, layer(x)). If rounds are expensive, split the model there."
        ),
    )
    SCALAR = (
        "tensor read as Python number",
        "Keep it a 0-d tensor, which computes like a number. Read it after the model returned.",
    )
    PRINT = (
        "print or logging",
        "Log outside the model, or return the value; in forward, only where nothing compiles.",
    )
    LOOP = (
        "Python loop over a tensor",
        (
            "Replace the loop over elements by one operation on the whole tensor; a mask stands for an `if`"
            " in it."
        ),
    )
    LOOP_COUNT = (
        "loop with a data-dependent count",
        (
            "Loop a fixed number of times and let a mask say which rounds count: x = torch.where(i < count,"
            " step(x), x). Or use torch.while_loop."
        ),
    )
    DYNAMIC_SHAPE = (
        "data-dependent shape",
        (
            "Keep the shape and mask what does not count: x = torch.where(keep[:, None], x, 0.0)."
            " Or take a fixed number: x[scores.topk(100).indices]."
        ),
    )
    FOREIGN = (
        "NumPy or other foreign call",
        "Use torch's own function of that kind; if there is none, do it in preprocess or postprocess.",
    )
    RNN = (
        "RNN, GRU or LSTM",
        (
            "torch.compile leaves the function around it uncompiled, unless torch._dynamo.config.allow_rnn"
            " is True; torch.export, and so engine aoti, takes it as it is."
        ),
    )
    UNSUPPORTED = ("unsupported call", "Move it out of forward: into __init__, preprocess or postprocess.")

    def __init__(self, label: str, advice: str) -> None:
        self.label, self.advice = label, advice


# frames of a traceback, with the underlines that Python 3.11 and later give them
_FRAME = re.compile(
    r'^  File "(.+)", line (\d+), in (.+)$(?:\n    .*$)?(?:\n    ( *[~^]+)\s*$)?', re.MULTILINE
)
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+?)_at_(\d+)")
_STDLIB = Path(sysconfig.get_path("stdlib")).resolve()
_THIS_TOOL = Path(__file__).resolve().parent
_NOT_THE_USERS = (Path(torch.__file__).resolve().parent, Path(np.__file__).resolve().parent, _THIS_TOOL)

_HINTS = re.compile(r"^\s*Hint: .*$", re.MULTILINE)
_SKIPPED_MODULE = re.compile(r"\bmodule: (\w+)")
_BRANCH = (
    "Data-dependent branching",
    "generic_jump",
    "Data-dependent assertion",
    "data-dependent control flow",
)
_SCALAR = ("Tensor.item", "Tensor.tolist", "aten._local_scalar_dense", "Backend compiler exception")
_PRINT = ("builtin operator `print`", "logging.Logger method", "module: _warnings", "module: warnings")
_DYNAMIC_SHAPE = (
    "Dynamic shape operator",
    "Dynamic slicing",
    "data-dependent expression",
    "output shape depends",
)
_RNN = ("wrap RNN, GRU, or LSTM",)
_LOG_METHODS = ("debug", "info", "warning", "error", "critical", "exception", "log")


class Frame(NamedTuple):
    """One Python frame.

    Where, in which function, and the compiler's underline below the line, if it has one.
    """

    file: str
    line: int
    function: str
    underline: str = ""


@dataclass
class GraphBreak:
    """All breaks at one line.

    Attributes:
        underline: `^^^` below the part of the line that breaks, with the line's own indentation taken off.
        reasons: the compiler's texts, the first one first.
        whole_function: the compiler left the function around it uncompiled, it did not only split it.
        ended: the compilations that it ended.
        splits: the functions that the compiler splits or leaves uncompiled because of it: callers are split
            as well.
    """

    line: SourceLine
    function: str
    underline: str
    kind: Kind
    input_set: int
    reasons: list[str] = field(default_factory=list)
    whole_function: bool = False
    ended: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int]:
        """File and line."""
        return self.line.file, self.line.line

    @property
    def title(self) -> str:
        """The compiler's name for it, in one line."""
        return self.reasons[0].partition("\n")[0]

    @property
    def explanation(self) -> str:
        """The compiler's explanation in one line, empty where it has none."""
        found = re.search(r"Explanation: (.*?)(?:\n|$)", self.reasons[0])
        return found[1].strip() if found else ""


def parse_break(text: str) -> tuple[str, bool, Frame]:
    """Read the compiler's text about one break, `dynamo_graph_break_reason` in its trace.

    Returns:
        The reason without its introduction; whether the whole function is left uncompiled; the innermost frame in the
        user's code, else the innermost one.
    """
    body = text.partition("\nTraceback (most recent call last)")[0]
    head, _, traceback = body.partition("User code traceback:")
    reason = head.partition("Reason: ")[2] or head  # "Graph Break Reason: ", older: "Reason: "
    reason = reason.partition("\nStack variable source attribution:")[0]
    whole = "gracefully" in reason.partition("\n")[0]
    if named := re.search(r"^.+\n  Explanation: ", reason, re.MULTILINE):
        reason = reason[named.start() :]  # without an introduction about what breaks as well
    frames = [
        Frame(file, int(line), name, mark.rstrip()) for file, line, name, mark in _FRAME.findall(traceback)
    ]
    ours = [n for n, frame in enumerate(frames, 1) if Path(frame.file).resolve().is_relative_to(_THIS_TOOL)]
    frames = frames[ours[-1] if ours else 0 :]  # what the model called, without what called the model
    if not frames:
        place = re.match(r"Graph break in user code at (.+):(\d+)", text)
        frames = [Frame(place[1], int(place[2]), "?") if place else Frame("?", 0, "?")]
    users = next((frame for frame in reversed(frames) if is_users(frame.file)), frames[-1])
    return reason.strip(), whole, users


def new_break(reason: str, frame: Frame, input_set: int) -> GraphBreak:
    """The first break at a line."""
    line = read_line(frame.file, frame.line)
    code = re.sub(r":?(\s+#.*)?$", "", line.text)
    underline = frame.underline[: len(code)] or "^" * len(code)
    return GraphBreak(
        line, readable_function(frame.function), underline, kind_of_break(reason, line), input_set
    )


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, NumPy's, the standard library's nor this tool's."""
    path = Path(file).resolve()
    in_stdlib = path.is_relative_to(_STDLIB) and "site-packages" not in path.parts
    return not (
        file.startswith("<") or in_stdlib or any(path.is_relative_to(folder) for folder in _NOT_THE_USERS)
    )


def readable_function(name: str) -> str:
    """The user's name of a function that the compiler resumes in the middle."""
    match = _RESUMED.fullmatch(name)
    return f"{match[1]}, after line {match[2]}" if match else name


def own_function(name: str) -> str:
    """The same without where it is resumed."""
    return _RESUMED.sub(r"\1", name)


# a list of rules, the first counts
def kind_of_break(reason: str, line: SourceLine) -> Kind:  # noqa: PLR0911
    """What breaks the graph.

    From the compiler's reason, and from the source where the reason cannot tell.
    """
    first = reason.partition("\n")[0]
    reason = _HINTS.sub("", reason)  # hints name what it might have been as well

    def says(words: tuple[str, ...], text: str = reason) -> bool:
        return any(word in text for word in words)

    reads_number = says(_SCALAR)
    if says(_RNN):
        return Kind.RNN
    if _prints(line) or says(_PRINT):
        return Kind.PRINT
    if _counts_by_data(line, reads_number, "`range`" in reason):
        return Kind.LOOP_COUNT
    if says(_BRANCH, first):
        return (
            Kind.EARLY_EXIT if line.exits_loop() else Kind.LOOP if line.in_element_loop() else Kind.BRANCH
        )
    if line.foreign_calls():
        return Kind.FOREIGN
    # `x[:count]` with a tensor as the bound is reported as a hidden `item()`
    reads = any(call.rpartition(".")[2] in ("item", "int", "float", "tolist") for call in line.calls())
    slices = not reads and any(isinstance(node, ast.Slice) for node in line.walk())
    if says(_DYNAMIC_SHAPE) or (reads_number and slices):
        return Kind.DYNAMIC_SHAPE
    if reads_number:
        return Kind.LOOP if line.in_element_loop() else Kind.SCALAR
    if any(isinstance(node, ast.FormattedValue) for node in line.walk()) or {"str", "repr"} & set(
        line.calls()
    ):
        return Kind.PRINT
    module = _SKIPPED_MODULE.search(reason)
    skipped = module is not None and module[1].lstrip("_") not in {*sys.stdlib_module_names, "torch"}
    return Kind.FOREIGN if skipped or "numpy function" in reason else Kind.UNSUPPORTED


def _prints(line: SourceLine) -> bool:
    """Whether the statement does nothing but write something."""
    if not (isinstance(line.statement, ast.Expr) and isinstance(line.statement.value, ast.Call)):
        return False
    called = ast.unparse(
        line.statement.value.func
    )  # not a dotted name in `logging.getLogger(name).info(x)`
    owner, _, method = called.rpartition(".")
    return called in ("print", "pprint", "warnings.warn") or (
        method in _LOG_METHODS and "log" in owner.lower()
    )


def _counts_by_data(line: SourceLine, reads_number: bool, range_breaks: bool) -> bool:
    """A `while` on a tensor's value, `range(tensor)`, or a number read from a tensor that a `range` then takes."""
    if isinstance(line.statement, ast.While):
        return True
    if isinstance(line.statement, ast.For):
        return "range" in line.calls() and (range_breaks or reads_number)
    if not reads_number or line.function is None or not isinstance(line.statement, ast.Assign):
        return False
    assigned = {name for target in line.statement.targets for name in names_in(target)}
    counts = [node.iter for node in ast.walk(line.function) if isinstance(node, ast.For)]
    return any(
        isinstance(count, ast.Call) and ast.unparse(count.func) == "range" and assigned & names_in(count)
        for count in counts
    )
