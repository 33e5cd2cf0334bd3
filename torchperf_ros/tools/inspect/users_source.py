"""The user's source, read as Python: what stands at a line."""

import ast
import linecache
from dataclasses import dataclass
from functools import lru_cache

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
    return any(
        isinstance(each, (ast.Name, ast.Subscript)) and names_in(each) & _items(loop) for each in called
    )
