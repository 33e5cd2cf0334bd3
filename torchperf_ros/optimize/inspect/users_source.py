"""The user's source, read as Python: what stands at a line, what could stand there, and functions that run so."""

import ast
import contextlib
import copy
import gc
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType

_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_KEEPS = {
    "add", "append", "dict", "extend", "format", "get", "hash", "index", "insert", "isinstance", "pop", "put", "repr",
    "set", "setattr", "setdefault", "str", "update",
}  # fmt: skip
"""Functions and methods that keep a value, look it up, or make a text of it."""
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
        """Those of them that go to NumPy, OpenCV and the like, by the names that the file imports them under."""
        return [call for call in self.calls() if call.partition(".")[0] in _foreign_names(self.file)]

    def in_element_loop(self) -> bool:
        """Whether the line is about the items of a loop around it, or in it, as far as the source tells.

        A loop that calls its items goes over layers, and not over a tensor's elements.
        """
        used = {name for node in self.walk() for name in names_in(node)}
        return any(_items(loop) & used and not _calls_items(loop) for loop in self.loops)

    def exits_loop(self) -> bool:
        """Whether the line is an `if` that ends a loop around it, by a condition that is not about the loop's item."""
        statement = self.statement
        if not self.loops or not isinstance(statement, ast.If):
            return False
        leaves = isinstance(statement.body[-1], (ast.Break, ast.Return))
        return leaves and not any(_items(loop) & names_in(statement.test) for loop in self.loops)


@lru_cache(maxsize=4096)
def read_line(file: str, line: int) -> SourceLine:
    """What stands at this line."""
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
    """Every plain name in an expression."""
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def _items(loop: ast.AST) -> set[str]:
    generators = [loop] if isinstance(loop, ast.For) else getattr(loop, "generators", [])
    return {name for generator in generators for name in names_in(generator.target)}


def _calls_items(loop: ast.AST) -> bool:
    """Whether something in it calls an item: `layer(x)`, or `layers[i](x)`."""
    called = (node.func for node in ast.walk(loop) if isinstance(node, ast.Call))
    return any(isinstance(each, (ast.Name, ast.Subscript)) and names_in(each) & _items(loop) for each in called)


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


def rewrite_branch(line: SourceLine) -> str:
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


def rewrite_scalar(line: SourceLine) -> str:
    """`x.item()` and `float(x)` become x, where the number is only reckoned with.

    A tensor is no key: two of the same value are two entries of a dict, and one that is kept holds its memory.
    """
    return "" if _is_kept_or_looked_up(line) else _changed(line, _Numbers())


def _is_kept_or_looked_up(line: SourceLine) -> bool:
    """Whether the number read at this line may be a key, an index, a text, or kept beyond the call, by the source."""
    reads = {id(node) for node in line.walk() if isinstance(node, ast.Call) and _read_as_number(node) is not None}
    names: set[str] = set()
    nodes = list(ast.walk(line.function)) if line.function else line.walk()
    assigned = [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr))]

    def is_read(*parts: ast.AST | None) -> bool:
        inner = [node for part in parts if part is not None for node in ast.walk(part)]
        return any(id(node) in reads or (isinstance(node, ast.Name) and node.id in names) for node in inner)

    before = -1
    while before != len(names):  # a name that is made of such a number is one, too
        before = len(names)
        for node in assigned:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if is_read(node.value):
                if not all(isinstance(target, ast.Name) for target in targets):
                    return True
                names |= {name for target in targets for name in names_in(target)}

    def keeps(node: ast.AST) -> bool:
        match node:
            case ast.Subscript(slice=part):
                return is_read(part)
            case ast.Dict(keys=parts) | ast.Set(elts=parts) | ast.JoinedStr(values=parts):
                return is_read(*parts)
            case ast.Compare(left=left, ops=operators, comparators=others):
                by_identity = any(isinstance(each, (ast.In, ast.NotIn, ast.Is, ast.IsNot)) for each in operators)
                return by_identity and is_read(left, *others)
            case ast.Call(func=function, args=parts, keywords=named) if id(node) not in reads:
                name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
                return name in _KEEPS and is_read(*parts, *(each.value for each in named))
        return False

    return any(map(keeps, nodes))


def rewrite_print(line: SourceLine) -> str:
    """The statement, only where nothing compiles."""
    if not isinstance(line.statement, ast.Expr):
        return ""
    return f"if not torch.compiler.is_compiling():\n    {ast.unparse(line.statement)}"


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
