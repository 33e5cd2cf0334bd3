"""What kind of thing breaks a graph: from the compiler's reason, and from the source where the reason cannot tell."""

import ast
import re
import sys
from enum import Enum

from torchperf_ros.analysis.source_line import SourceLine, dotted, loops_over_elements, names_in


class Category(Enum):
    """The kinds of graph breaks that have an advice each; the value is what reports and JSON show."""

    BRANCH = "branch on tensor values"
    SCALAR = "tensor read as Python number"
    PRINT = "print or logging"
    LOOP = "Python loop over a tensor"
    LOOP_COUNT = "loop with a data-dependent count"
    DYNAMIC_SHAPE = "data-dependent shape"
    FOREIGN = "NumPy or other foreign call"
    UNSUPPORTED = "unsupported call"


_HINTS = re.compile(r"^\s*Hint: .*$", re.MULTILINE)
_SKIPPED_MODULE = re.compile(r"\bmodule: (\w+)")
_BRANCH = ("Data-dependent branching", "generic_jump", "Data-dependent assertion", "data-dependent control flow")
_SCALAR = ("Tensor.item", "Tensor.tolist", "aten._local_scalar_dense", "Backend compiler exception")
_PRINT = ("builtin operator `print`", "logging.Logger method", "module: _warnings", "module: warnings")
_DYNAMIC_SHAPE = ("Dynamic shape operator", "Dynamic slicing", "data-dependent expression", "output shape depends")
_PRINTING_CALLS = ("print", "pprint", "warnings.warn")
_LOG_METHODS = ("debug", "info", "warning", "error", "critical", "exception", "log")


def categorize(reason: str, line: SourceLine) -> Category:  # noqa: PLR0911 - a list of rules, the first counts
    """The kind of a graph break.

    Args:
        reason: what the compiler says, all of it.
        line: where in the user's code.
    """
    first = reason.partition("\n")[0]
    reason = _HINTS.sub("", reason)  # hints name what it might have been as well
    if _prints(line) or _any(_PRINT, reason):
        return Category.PRINT
    if _counts_by_data(reason, line):
        return Category.LOOP_COUNT
    if _any(_BRANCH, first):
        return _in_element_loop(line) or Category.BRANCH
    if line.foreign_calls():
        return Category.FOREIGN
    if _any(_DYNAMIC_SHAPE, reason) or _slices_by_tensor(reason, line):
        return Category.DYNAMIC_SHAPE
    if _any(_SCALAR, reason):
        return _in_element_loop(line) or Category.SCALAR
    if _formats(line):
        return Category.PRINT
    return Category.FOREIGN if _is_foreign(reason) else Category.UNSUPPORTED


def _any(words: tuple[str, ...], text: str) -> bool:
    return any(word in text for word in words)


def _prints(line: SourceLine) -> bool:
    """Whether the statement does nothing but say something."""
    if not (isinstance(line.statement, ast.Expr) and isinstance(line.statement.value, ast.Call)):
        return False
    called = dotted(line.statement.value.func)
    method = called.rpartition(".")[2]
    return called in _PRINTING_CALLS or (
        method in _LOG_METHODS and "log" in ast.unparse(line.statement.value.func).removesuffix(method).lower()
    )


def _formats(line: SourceLine) -> bool:
    """Whether a tensor is made into text there."""
    nodes = [node for part in line.header for node in ast.walk(part)]
    return any(isinstance(node, ast.FormattedValue) for node in nodes) or bool({"str", "repr"} & set(line.calls()))


def _in_element_loop(line: SourceLine) -> Category | None:
    looping = any(loops_over_elements(loop, line.function) for loop in line.loops)
    return Category.LOOP if looping else None


def _counts_by_data(reason: str, line: SourceLine) -> bool:
    """A `while` on a tensor's value, `range(tensor)`, or a number read from a tensor that a `range` then takes."""
    if isinstance(line.statement, ast.While):
        return True
    if isinstance(line.statement, ast.For):
        return "range" in line.calls() and ("`range`" in reason or _any(_SCALAR, reason))
    if not _any(_SCALAR, reason) or line.function is None or not isinstance(line.statement, ast.Assign):
        return False
    assigned = {name for target in line.statement.targets for name in names_in(target)}
    counts = [node.iter for node in ast.walk(line.function) if isinstance(node, ast.For)]
    return any(
        isinstance(count, ast.Call) and dotted(count.func) == "range" and assigned & names_in(count) for count in counts
    )


def _slices_by_tensor(reason: str, line: SourceLine) -> bool:
    """`x[:count]` with a tensor as the bound, which the compiler reports as a hidden `item()`."""
    if not _any(_SCALAR, reason) or _reads_number(line):
        return False
    return any(isinstance(node, ast.Slice) for part in line.header for node in ast.walk(part))


def _reads_number(line: SourceLine) -> bool:
    return any(call.rpartition(".")[2] in ("item", "int", "float", "tolist") for call in line.calls())


def _is_foreign(reason: str) -> bool:
    """A NumPy function that torch has none for, or a function of a compiled module that is not Python's own."""
    if "numpy function" in reason:
        return True
    module = _SKIPPED_MODULE.search(reason)
    return module is not None and module[1].lstrip("_") not in sys.stdlib_module_names and module[1] != "torch"
