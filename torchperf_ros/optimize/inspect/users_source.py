"""The user's source, read as Python: what stands at a line, what could stand there, and functions that run so."""

import ast
import contextlib
import copy
import gc
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import NamedTuple

_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOG_METHODS = ("debug", "info", "warning", "error", "critical", "exception", "log")

WHERE_NOTHING_COMPILES = "if not torch.compiler.is_compiling():"
"""What a rewritten `print` begins with."""


class SourceLine(NamedTuple):
    """Where something happens in the user's code; everything is empty where the source cannot be read.

    Attributes:
        line: from 1.
        text: the line without its indentation.
        statement: the innermost statement there; of a compound one, think of its header only.
        function: the innermost function around it.
    """

    file: str
    line: int
    text: str
    statement: ast.stmt | None = None
    function: ast.FunctionDef | None = None


@lru_cache(maxsize=4096)
def read_line(file: str, line: int) -> SourceLine:
    """What stands at this line."""
    found: dict[type, ast.AST] = {}
    for node in ast.walk(_syntax_tree(file) or ast.Module([], [])):  # breadth first: what comes later is further in
        if getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0):
            found |= {kind: node for kind in (ast.stmt, ast.FunctionDef) if isinstance(node, kind)}
    text = linecache.getline(file, line).strip()
    return SourceLine(file, line, text, found.get(ast.stmt), found.get(ast.FunctionDef))  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _syntax_tree(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _read_as_number(call: ast.Call) -> ast.AST | None:
    """What a call makes a Python number of: x in `float(x)` and in `x.item()`."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args:
        return call.func.value
    return call.args[0] if ast.unparse(call.func) in ("float", "int", "bool") and len(call.args) == 1 else None


def before_rewrite(line: SourceLine) -> str:
    """The statement; of an `if` without `else` whose body returns, also the return that follows."""
    statement = line.statement
    if statement is None:
        return line.text
    following = _following(line, statement)
    return ast.unparse(statement) + (f"\n{ast.unparse(following)}" if following else "")


def rewrites(line: SourceLine) -> list[str]:
    """What could stand in the place of the line's statement, to be tried in this order.

    A branch becomes `torch.where`; `x.item()` and `float(x)` become x; what is printed or logged is so only where
    nothing compiles.
    """
    found = [_without_branch(line), _changed(line, _Numbers())]
    if _prints(line) and line.statement:
        found.append(f"{WHERE_NOTHING_COMPILES}\n    {ast.unparse(line.statement)}")
    return [text for text in found if text]


def _prints(line: SourceLine) -> bool:
    """Whether the statement does nothing but write something."""
    if not (isinstance(line.statement, ast.Expr) and isinstance(line.statement.value, ast.Call)):
        return False
    called = ast.unparse(line.statement.value.func)  # not a dotted name in `logging.getLogger(name).info(x)`
    owner, _, method = called.rpartition(".")
    return called in ("print", "pprint", "warnings.warn") or (method in _LOG_METHODS and "log" in owner.lower())


def _without_branch(line: SourceLine) -> str:
    """`if` with one assignment or one return on either side, or a conditional expression: by `torch.where`."""
    statement = line.statement
    if not isinstance(statement, ast.If):
        return _changed(line, _Conditional())
    if len(statement.body) > 1 or len(statement.orelse) > 1:
        return ""
    yes, no = statement.body[0], statement.orelse[0] if statement.orelse else _following(line, statement)
    if isinstance(yes, ast.Return) and isinstance(no, ast.Return):
        chosen = _where(statement.test, yes.value, no.value)
        return f"return {chosen}" if chosen else ""
    if not isinstance(yes, ast.Assign) or len(yes.targets) != 1:
        return ""
    name = ast.unparse(yes.targets[0])
    otherwise: ast.expr | None = None if statement.orelse else yes.targets[0]
    if isinstance(no, ast.Assign) and statement.orelse and [ast.unparse(place) for place in no.targets] == [name]:
        otherwise = no.value
    chosen = _where(statement.test, yes.value, otherwise)
    return f"{name} = {chosen}" if chosen else ""


@contextlib.contextmanager
def rewritten(line: SourceLine, text: str) -> Iterator[None]:
    """Context in which the loaded functions run with one statement in place of the line's own.

    They keep their identity, globals, and the numbers of their lines.

    Raises:
        LookupError: nothing loaded has that statement, for example because the file has changed since.
        ValueError: a function that is made anew in each call cannot take it.
    """
    tree, old = _syntax_tree(line.file), line.statement
    if tree is None or old is None:
        raise LookupError(line.file)
    new = ast.parse(text).body[0]
    for node in ast.walk(new):
        ast.copy_location(node, old)
    before, after = _codes(tree, line.file), _codes(copy.deepcopy(tree, {id(old): new}), line.file)
    swaps = {} if len(before) != len(after) else {a: b for a, b in zip(before, after, strict=True) if a != b}
    functions = [found for found in gc.get_objects() if type(found) is FunctionType]
    swapped = [(one, one.__code__) for one in functions if one.__code__.co_filename == line.file]
    swapped = [(found, code) for found, code in swapped if code in swaps]
    if not swapped:
        raise LookupError(line.file)
    try:
        for found, code in swapped:
            found.__code__ = swaps[code]
        yield
    finally:
        for found, code in swapped:
            found.__code__ = code


def _codes(tree: ast.Module, file: str) -> list[CodeType]:
    codes = [compile(tree, file, "exec", dont_inherit=True)]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return codes


def _changed(line: SourceLine, transformer: ast.NodeTransformer) -> str:
    """The line's statement after a change, empty where nothing changes."""
    if line.statement is None or isinstance(line.statement, _COMPOUND):
        return ""
    before = ast.unparse(line.statement)
    after = ast.unparse(transformer.visit(ast.parse(before)))
    return after if after != before else ""


def _following(line: SourceLine, statement: ast.stmt) -> ast.Return | None:
    """The return that follows an `if` without `else` whose body returns."""
    if not isinstance(statement, ast.If) or statement.orelse or not isinstance(statement.body[-1], ast.Return):
        return None
    for node in ast.walk(line.function) if line.function else ():
        body = getattr(node, "body", None)
        if isinstance(body, list) and statement in body[:-1]:
            following = body[body.index(statement) + 1]
            return following if isinstance(following, ast.Return) else None
    return None


def _where(test: ast.expr, yes: ast.expr | None, no: ast.expr | None) -> str:
    """Empty where a side is missing, or a slice, which may have another size on the inputs that take it."""
    if yes is None or no is None or isinstance(yes, ast.Subscript) or isinstance(no, ast.Subscript):
        return ""
    condition = _Elementwise().visit(ast.parse(ast.unparse(test), mode="eval"))
    return f"torch.where({ast.unparse(condition)}, {ast.unparse(yes)}, {ast.unparse(no)})"


class _Elementwise(ast.NodeTransformer):
    """`a and b` and `not a` ask for a bool; `a & b` and `~a` do not."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        operator: ast.operator = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        joined = node.values[0]
        for value in node.values[1:]:
            joined = ast.BinOp(joined, operator, value)
        return joined

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.UnaryOp(ast.Invert(), node.operand) if isinstance(node.op, ast.Not) else node


class _Conditional(ast.NodeTransformer):
    """`a if test else b` becomes torch.where."""

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        chosen = _where(node.test, node.body, node.orelse)
        return ast.parse(chosen, mode="eval").body if chosen else node


class _Numbers(ast.NodeTransformer):
    """`float(x)` and `x.item()` become x."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        return _read_as_number(node) or node
