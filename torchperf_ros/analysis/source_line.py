"""A line of the user's source, read as Python: its statement, the function and the loops around it."""

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache

_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MODULES_OF_NUMPY = ("numpy", "scipy", "cv2", "PIL", "pandas", "sklearn", "shapely", "numba")


@dataclass(frozen=True)
class SourceLine:
    """Where something happens in the user's code; everything is empty where the source cannot be read.

    Attributes:
        file: path.
        line: from 1.
        text: the line without its indentation.
        statement: the innermost statement there; of a compound one, think of its header only.
        function: the function that it stands in.
        loops: the loops and comprehensions around it, or in it, outermost first.
    """

    file: str
    line: int
    text: str
    statement: ast.stmt | None = None
    function: ast.FunctionDef | None = None
    loops: tuple[ast.AST, ...] = ()

    @property
    def header(self) -> list[ast.AST]:
        """The expressions of the statement that run at this line, without the body of a compound one."""
        node = self.statement
        if node is None:
            return []
        if isinstance(node, (ast.If, ast.While)):
            return [node.test]
        if isinstance(node, ast.For):
            return [node.iter]
        if isinstance(node, ast.With):
            return [item.context_expr for item in node.items]
        return [] if isinstance(node, _COMPOUND) else [node]

    def underline(self) -> str:
        """`^^^` below the statement's expressions, for a line without its indentation."""
        parts = [part for part in self.header if getattr(part, "lineno", 0) == self.line]
        if not parts:
            return ""
        indent = len(linecache.getline(self.file, self.line)) - len(linecache.getline(self.file, self.line).lstrip())
        first = min(getattr(part, "col_offset", 0) for part in parts)
        ends = [getattr(part, "end_col_offset", 0) for part in parts if getattr(part, "end_lineno", 0) == self.line]
        last = max(ends, default=first + 1)
        return " " * (first - indent) + "^" * max(1, last - first)

    def calls(self) -> list[str]:
        """Dotted names of what is called at this line, as written: `np.median`, `x.item`, `print`."""
        nodes = [node for part in self.header for node in ast.walk(part)]
        return [dotted(node.func) for node in nodes if isinstance(node, ast.Call)]

    def foreign_calls(self) -> list[str]:
        """Those of them that go to NumPy, OpenCV and the like, by the names that the file imports them under."""
        names = foreign_names(self.file)
        return [call for call in self.calls() if call.partition(".")[0] in names]


@lru_cache(maxsize=4096)
def read_line(file: str, line: int) -> SourceLine:
    """What stands at this line."""
    text = linecache.getline(file, line).strip()
    tree = syntax_tree(file)
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
def syntax_tree(file: str) -> ast.Module | None:
    """The parsed file, None where it cannot be read."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


@lru_cache(maxsize=64)
def foreign_names(file: str) -> frozenset[str]:
    """Names under which a file imports NumPy and other libraries that compute outside torch."""
    names = set()
    for node in ast.walk(syntax_tree(file) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in _MODULES_OF_NUMPY:
                    names.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in _MODULES_OF_NUMPY:
            names |= {alias.asname or alias.name for alias in node.names}
    return frozenset(names)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain; `?` stands for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return "?"


def names_in(node: ast.AST) -> set[str]:
    """Every plain name in an expression."""
    return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def loops_over_elements(loop: ast.AST, function: ast.FunctionDef | None) -> bool:
    """Whether a loop goes over a tensor's elements, as far as the source tells.

    That is: over an argument of the function, `unbind()`, `tolist()` and the like, or `range(len(x))` and
    `range(x.shape[0])`; also inside `enumerate` and `zip`.
    """
    if isinstance(loop, ast.For):
        over: list[ast.expr] = [loop.iter]
    elif isinstance(loop, _COMPREHENSIONS):
        over = [generator.iter for generator in loop.generators]
    else:
        return False
    arguments = {argument.arg for argument in function.args.args} - {"self"} if function else set()
    while over:
        found = over.pop()
        if isinstance(found, ast.Name) and found.id in arguments:
            return True
        if isinstance(found, ast.Call):
            called = dotted(found.func)
            if called in ("enumerate", "zip"):
                over += found.args
            if called.rpartition(".")[2] in ("unbind", "tolist", "split", "chunk"):
                return True
            if called == "range" and any(_is_size(node) for argument in found.args for node in ast.walk(argument)):
                return True
    return False


def reads_size(node: ast.AST) -> bool:
    """Whether an expression depends on a tensor's size: `x.shape`, `x.size()`, `x.numel()`, `x.ndim`, `len(x)`."""
    return any(_is_size(found) for found in ast.walk(node))


def _is_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("shape", "size", "numel")
    return isinstance(node, ast.Call) and dotted(node.func) == "len"
