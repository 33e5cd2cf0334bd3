"""Graph breaks, one for each line of the user's code: reason, place, kind, and what to write instead."""

import ast
import linecache
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MODULES_OF_NUMPY = ("numpy", "scipy", "cv2", "PIL", "pandas", "sklearn", "shapely", "numba")


@dataclass(frozen=True)
class SourceLine:
    """Where something happens in the user's code; everything is empty where the source cannot be read.

    Attributes:
        line: from 1.
        text: the line without its indentation.
        statement: the innermost statement there; of a compound one, think of its header only.
        loops: the loops and comprehensions around it, or in it, outermost first.
    """

    file: str
    line: int
    text: str
    statement: ast.stmt | None = None
    function: ast.FunctionDef | None = None
    loops: tuple[ast.AST, ...] = ()

    def walk(self) -> list[ast.AST]:
        """Every node that runs at this line: of a compound statement, what stands before its body."""
        match self.statement:
            case ast.With(items=items):
                parts: list[ast.AST] = [item.context_expr for item in items]
            case ast.If(test=part) | ast.While(test=part) | ast.For(iter=part):
                parts = [part]
            case ast.Try() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | None:
                parts = []
            case statement:
                parts = [statement]
        return [found for part in parts for found in ast.walk(part)]

    def calls(self) -> list[str]:
        """Names of what is called at this line, as written: `np.median`, `x.item`, `print`."""
        return [ast.unparse(node.func) for node in self.walk() if isinstance(node, ast.Call)]

    def foreign_calls(self) -> list[str]:
        """Those that go to NumPy, OpenCV and the like, by the names that the file imports them under."""
        return [call for call in self.calls() if call.partition(".")[0] in _foreign_names(self.file)]

    def uses_foreign(self) -> bool:
        """Whether the line reads a name that a call of NumPy or the like has given a value in this function."""
        used = {name for node in self.walk() for name in names_in(node)}
        given = [node for node in ast.walk(self.function or ast.Pass()) if isinstance(node, ast.Assign)]
        return any(
            ast.unparse(call.func).partition(".")[0] in _foreign_names(self.file)
            and used & names_in(ast.Tuple(node.targets))
            for node in given
            for call in ast.walk(node.value)
            if isinstance(call, ast.Call)
        )

    def only_computes(self) -> bool:
        """Whether the numbers that the line reads from tensors are nothing but operands, as far as the source tells.

        In their place tensors then give the same results.
        """
        function = self.function
        if function is None or any(isinstance(node, ast.Try) for node in ast.walk(function)):
            return False
        outer = {inner: node for node in ast.walk(function) for inner in ast.iter_child_nodes(node)}
        reads = [
            node
            for node in self.walk()
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"item", "float"}
        ]
        return bool(reads) and all(_is_operand(read, outer, function) for read in reads)

    def in_element_loop(self) -> bool:
        """Whether the line is about the items of a loop around it, or in it, as far as the source tells.

        A loop that calls its items goes over layers, and not over a tensor's elements.
        """
        used = {name for node in self.walk() for name in names_in(node)}
        return any(_items(loop) & used and not _calls_items(loop) for loop in self.loops)

    def exits_loop(self) -> bool:
        """Whether the line is an `if` that ends a loop, by a condition that is not about the loop's item."""
        statement = self.statement
        if not self.loops or not isinstance(statement, ast.If):
            return False
        leaves = isinstance(statement.body[-1], (ast.Break, ast.Return))
        return leaves and not any(_items(loop) & names_in(statement.test) for loop in self.loops)


def _is_operand(node: ast.AST, outer: dict[ast.AST, ast.AST], function: ast.AST) -> bool:
    """Whether a number meets a tensor by arithmetic, at once or by a name that is nothing but such an operand."""
    above = outer[node]
    if isinstance(above, ast.Call) and ast.unparse(above.func) == "float":
        return _is_operand(above, outer, function)
    if isinstance(above, (ast.BinOp, ast.UnaryOp)) and not isinstance(getattr(above, "op", None), ast.Not):
        others = names_in(above) - names_in(node)
        return bool(others) or _is_operand(above, outer, function)
    if not isinstance(above, ast.Assign) or not isinstance(above.targets[0], ast.Name):
        return False
    uses = [
        one
        for one in ast.walk(function)
        if isinstance(one, ast.Name) and one.id == above.targets[0].id and isinstance(one.ctx, ast.Load)
    ]
    return bool(uses) and all(_is_operand(use, outer, function) for use in uses)


@lru_cache(maxsize=4096)
def read_line(file: str, line: int) -> SourceLine:
    text = linecache.getline(file, line).strip()
    tree = _syntax_tree(file)
    if tree is None:
        return SourceLine(file, line, text)
    statement: ast.stmt | None = None
    function: ast.FunctionDef | None = None
    loops: list[ast.AST] = []
    for node in ast.walk(tree):  # breadth first, so that what comes later is further in
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0) or 0
        if not first <= line <= last:
            continue
        if isinstance(node, ast.stmt):
            statement = node
        if isinstance(node, ast.FunctionDef):
            function, loops = node, []  # a loop around a definition does not repeat its body
        if isinstance(node, (ast.While, *_COMPREHENSIONS)) or (isinstance(node, ast.For) and line > first):
            loops.append(node)
    return SourceLine(file, line, text, statement, function, tuple(loops))


@lru_cache(maxsize=64)
def _syntax_tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=64)
def _foreign_names(file: str) -> frozenset[str]:
    names = set()
    for node in ast.walk(_syntax_tree(file) or ast.Module([], [])):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                module = alias.name if isinstance(node, ast.Import) else node.module or ""
                if module.partition(".")[0] in _MODULES_OF_NUMPY:
                    name = module.partition(".")[0] if isinstance(node, ast.Import) else alias.name
                    names.add(alias.asname or name)
    return frozenset(names)


def names_in(node: ast.AST) -> set[str]:
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def _items(loop: ast.AST) -> set[str]:
    generators = [loop] if isinstance(loop, ast.For) else getattr(loop, "generators", [])
    return {name for generator in generators for name in names_in(generator.target)}


def _calls_items(loop: ast.AST) -> bool:
    """Whether something in it calls an item: `layer(x)`, or `layers[i](x)`."""
    called = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(
        isinstance(each, (ast.Name, ast.Subscript)) and names_in(each) & _items(loop) for each in called
    )


class BreakKind(Enum):
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
    NUMBER = (
        "tensor read as Python number",
        (
            "It is a key, an index, a size, a condition, whole, text or kept, or computed with as no 0-d tensor"
            " is: in its place that is another key each time, keeps its fraction, changes with its source, or is"
            " read again. Read it after the model returned, or split the model there."
        ),
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
            "Loop as often as it may take at most, and let a mask say which rounds count: x = torch.where(i <"
            " count, step(x), x), with count a tensor, and .long() in place of int(). Or use torch.while_loop."
        ),
    )
    DYNAMIC_SHAPE = (
        "data-dependent shape",
        (
            "Keep the shape and mask what does not count: x = torch.where(keep[:, None], x, 0.0)."
            " Or take a fixed number: x[scores.topk(100).indices]. A mean, a minimum or a length then needs"
            " the mask, too, as the zeros would count."
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
    UNSUPPORTED = (
        "unsupported call",
        (
            "Move it out of forward: what is the same for every frame into __init__, the rest into preprocess"
            " or postprocess."
        ),
    )

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


class SourceFrame(NamedTuple):
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
    """

    line: SourceLine
    function: str
    underline: str
    kind: BreakKind
    input_set: int
    reasons: list[str] = field(default_factory=list)
    whole_function: bool = False

    @property
    def place(self) -> tuple[str, int]:
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


def parse_break(text: str) -> tuple[str, bool, SourceFrame]:
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
        SourceFrame(file, int(line), name, mark.rstrip())
        for file, line, name, mark in _FRAME.findall(traceback)
    ]
    ours = [n for n, frame in enumerate(frames, 1) if Path(frame.file).resolve().is_relative_to(_THIS_TOOL)]
    frames = frames[ours[-1] if ours else 0 :]  # what the model called, without what called the model
    if not frames:
        place = re.match(r"Graph break in user code at (.+):(\d+)", text)
        frames = [SourceFrame(place[1], int(place[2]), "?") if place else SourceFrame("?", 0, "?")]
    users = next((frame for frame in reversed(frames) if is_users(frame.file)), frames[-1])
    return reason.strip(), whole, users


def new_break(reason: str, frame: SourceFrame, input_set: int) -> GraphBreak:
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


# a list of rules, the first counts
def kind_of_break(reason: str, line: SourceLine) -> BreakKind:  # noqa: PLR0911
    """What breaks the graph.

    From the compiler's reason, and from the source where the reason cannot tell.
    """
    first = reason.partition("\n")[0]
    reason = _HINTS.sub("", reason)  # hints name what it might have been as well

    def says(words: tuple[str, ...], text: str = reason) -> bool:
        return any(word in text for word in words)

    reads_number = says(_SCALAR)
    if says(_RNN):
        return BreakKind.RNN
    if _prints(line) or says(_PRINT):
        return BreakKind.PRINT
    if _counts_by_data(line, reads_number, "`range`" in reason):
        return BreakKind.LOOP_COUNT
    if says(_BRANCH, first):
        return (
            BreakKind.EARLY_EXIT
            if line.exits_loop()
            else BreakKind.LOOP
            if line.in_element_loop()
            else BreakKind.BRANCH
        )
    if line.foreign_calls():
        return BreakKind.FOREIGN
    # `x[:count]` with a tensor as the bound is reported as a hidden `item()`
    reads = any(call.rpartition(".")[2] in ("item", "int", "float", "tolist") for call in line.calls())
    slices = not reads and any(isinstance(node, ast.Slice) for node in line.walk())
    if says(_DYNAMIC_SHAPE) or (reads_number and slices):
        return BreakKind.DYNAMIC_SHAPE
    if reads_number:
        if line.uses_foreign():
            return BreakKind.FOREIGN
        computed = BreakKind.SCALAR if line.only_computes() else BreakKind.NUMBER
        return BreakKind.LOOP if line.in_element_loop() else computed
    if any(isinstance(node, ast.FormattedValue) for node in line.walk()) or {"str", "repr"} & set(
        line.calls()
    ):
        return BreakKind.PRINT
    module = _SKIPPED_MODULE.search(reason)
    skipped = module is not None and module[1].lstrip("_") not in {*sys.stdlib_module_names, "torch"}
    return BreakKind.FOREIGN if skipped or "numpy function" in reason else BreakKind.UNSUPPORTED


def _prints(line: SourceLine) -> bool:
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
    """A `while` on a tensor's value, `range(tensor)`, or a tensor's number that a `range` takes."""
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
