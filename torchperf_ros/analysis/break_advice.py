"""What to write instead: for each kind of graph break a sentence, the user's statement rewritten if it can be."""

import ast
from dataclasses import dataclass

import torch

from torchperf_ros.analysis.break_category import Category
from torchperf_ros.analysis.source_line import SourceLine, dotted, foreign_names

_SENTENCES = {
    Category.BRANCH: "Compute both sides, of one shape, and choose by torch.where; if one is expensive, torch.cond.",
    Category.SCALAR: "Keep it a 0-d tensor, which computes like a number. Read it after the model returned.",
    Category.PRINT: "Log outside the model, or return the value; in forward, only where nothing compiles.",
    Category.LOOP: "Replace the loop over elements by one operation on the whole tensor.",
    Category.LOOP_COUNT: "Loop a fixed number of times and let a mask say which rounds count, or use torch.while_loop.",
    Category.DYNAMIC_SHAPE: "Keep the shape and mask what does not count, or take a fixed number by topk.",
    Category.FOREIGN: "Use torch's own function of that kind; if there is none, do it in preprocess or postprocess.",
    Category.UNSUPPORTED: "Move it out of forward: into __init__, preprocess or postprocess.",
}
_BEFORE_AND_AFTER = {
    Category.BRANCH: ("if x.mean() > 0:\n    x = x * 2", "x = torch.where(x.mean() > 0, x * 2, x)"),
    Category.SCALAR: ("scale = x.max().item()\nreturn x / scale", "scale = x.max()\nreturn x / scale"),
    Category.PRINT: ("print(x.mean())", "if not torch.compiler.is_compiling():\n    print(x.mean())"),
    Category.LOOP: (
        "for row in x:\n    if row.sum() > 0:\n        total = total + row",
        "keep = (x.sum(1) > 0).to(x.dtype)\ntotal = (x * keep[:, None]).sum(0)",
    ),
    Category.LOOP_COUNT: (
        "for _ in range(int(count)):\n    x = step(x)",
        "for i in range(MOST_ROUNDS):\n    x = torch.where(i < count, step(x), x)",
    ),
    Category.DYNAMIC_SHAPE: (
        "x = x[scores > 0.5]",
        "keep = scores > 0.5\nx = torch.where(keep[:, None], x, 0.0)  # or: x[scores.topk(100).indices]",
    ),
    Category.FOREIGN: ("order = np.lexsort((y, x))", "order = torch.argsort(x, stable=True)"),
    Category.UNSUPPORTED: (
        "def forward(self, x):\n    return x * load_scale(path)",
        "def __init__(self):\n    self.scale = load_scale(path)\n\ndef forward(self, x):\n    return x * self.scale",
    ),
}
_NUMPY_IN_TORCH = {"concatenate": "cat", "power": "pow", "absolute": "abs", "linalg.norm": "linalg.norm"}


@dataclass(frozen=True)
class Advice:
    """What to do instead of what breaks the graph.

    Attributes:
        sentence: in words.
        before: the code that breaks.
        after: code that does not.
        is_users: whether `after` is the user's own statement rewritten; otherwise an example of the same kind.
    """

    sentence: str
    before: str
    after: str
    is_users: bool


def advise(category: Category, line: SourceLine) -> Advice:
    """Advice for a break of this kind at this line."""
    sentence, (before, after) = _SENTENCES[category], _BEFORE_AND_AFTER[category]
    rewrite = {
        Category.BRANCH: _rewrite_branch,
        Category.SCALAR: _rewrite_scalar,
        Category.PRINT: _rewrite_print,
        Category.FOREIGN: _rewrite_numpy,
    }.get(category)
    if rewrite is not None and line.statement is not None:
        rewritten = rewrite(line)
        if rewritten is not None:
            return Advice(sentence, _source(line), rewritten, is_users=True)
    return Advice(sentence, before, after, is_users=False)


def _source(line: SourceLine) -> str:
    """The statement; of an `if` without `else` whose body returns, also the return that follows."""
    statement = line.statement
    if statement is None:
        return line.text
    text = ast.unparse(statement)
    if isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], ast.Return):
        following = _following(line, statement)
        text += f"\n{ast.unparse(following)}" if following is not None else ""
    return text


def _rewrite_branch(line: SourceLine) -> str | None:
    """`if` with one assignment or one return on either side, or a conditional expression: `torch.where`."""
    statement = line.statement
    if isinstance(statement, ast.If):
        yes = _only(statement.body)
        no = _only(statement.orelse) if statement.orelse else _following(line, statement)
        if isinstance(yes, ast.Return) and isinstance(no, ast.Return) and _alike(yes.value, no.value):
            return f"return {_where(statement.test, yes.value, no.value)}"
        if isinstance(yes, ast.Assign) and len(yes.targets) == 1 and _alike(yes.value):
            name = ast.unparse(yes.targets[0])
            if not statement.orelse:
                return f"{name} = {_where(statement.test, yes.value, yes.targets[0])}"
            if isinstance(no, ast.Assign) and [ast.unparse(place) for place in no.targets] == [name]:
                return f"{name} = {_where(statement.test, yes.value, no.value)}" if _alike(no.value) else None
        return None
    if statement is None:
        return None
    changed = _Conditional()
    rewritten = changed.visit(_copy(statement))
    return ast.unparse(rewritten) if changed.count else None


def _only(body: list[ast.stmt]) -> ast.stmt | None:
    return body[0] if len(body) == 1 else None


def _following(line: SourceLine, statement: ast.If) -> ast.stmt | None:
    """The return that follows an `if` without `else`."""
    for node in ast.walk(line.function) if line.function else ():
        body = getattr(node, "body", None)
        if isinstance(body, list) and statement in body:
            index = body.index(statement) + 1
            return body[index] if index < len(body) and isinstance(body[index], ast.Return) else None
    return None


def _alike(*values: ast.expr | None) -> bool:
    """Whether torch.where can take them: no text, no tuple, and no slice, which may have another size."""
    unfit = (ast.Tuple, ast.List, ast.Dict, ast.JoinedStr, ast.Subscript)
    return not any(
        value is None or isinstance(value, unfit) or (isinstance(value, ast.Constant) and not _is_number(value.value))
        for value in values
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _where(test: ast.expr, yes: ast.expr | None, no: ast.expr | None) -> str:
    if yes is None or no is None:
        return ""
    return f"torch.where({ast.unparse(_Elementwise().visit(_copy(test)))}, {ast.unparse(yes)}, {ast.unparse(no)})"


def _copy(node: ast.AST) -> ast.AST:
    return ast.parse(ast.unparse(node), mode="eval" if isinstance(node, ast.expr) else "exec")


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

    count = 0

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if not _alike(node.body, node.orelse):
            return node
        self.count += 1
        return ast.parse(_where(node.test, node.body, node.orelse), mode="eval").body


def _rewrite_scalar(line: SourceLine) -> str | None:
    if not isinstance(line.statement, (ast.Assign, ast.AugAssign, ast.Return, ast.AnnAssign)):
        return None
    changed = _NoScalar()
    rewritten = changed.visit(_copy(line.statement))
    return ast.unparse(rewritten) if changed.count else None


class _NoScalar(ast.NodeTransformer):
    """`x.item()` and `float(x)` become x."""

    count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr == "item" and not node.args:
            self.count += 1
            return called.value
        if isinstance(called, ast.Name) and called.id in ("float", "int", "bool") and len(node.args) == 1:
            self.count += 1
            return node.args[0]
        return node


def _rewrite_print(line: SourceLine) -> str | None:
    if not isinstance(line.statement, ast.Expr):
        return None
    return f"if not torch.compiler.is_compiling():\n    {ast.unparse(line.statement)}"


def _rewrite_numpy(line: SourceLine) -> str | None:
    """NumPy functions that torch has under the same name, tensors no longer taken out of torch."""
    if not isinstance(line.statement, (ast.Assign, ast.AugAssign, ast.Return, ast.AnnAssign)):
        return None
    changed = _InTorch(foreign_names(line.file))
    rewritten = changed.visit(_copy(line.statement))
    return ast.unparse(rewritten) if changed.count and not changed.failed else None


class _InTorch(ast.NodeTransformer):
    """`np.median(x.detach().cpu().numpy())` becomes `torch.median(x)`."""

    def __init__(self, names: frozenset[str]) -> None:
        self.count, self.failed, self._names = 0, False, names

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in ("numpy", "detach", "cpu") and not node.args:
            return called.value
        if isinstance(called, ast.Name) and called.id == "float" and len(node.args) == 1:
            return node.args[0]
        owner, _, name = dotted(called).partition(".")
        if owner == "torch" and name in ("from_numpy", "as_tensor", "tensor") and len(node.args) == 1:
            return node.args[0]
        if owner in self._names:
            name = _NUMPY_IN_TORCH.get(name, name)
            self.count += 1
            if node.keywords or "." in name or not hasattr(torch, name):
                self.failed = True
            node.func = ast.Attribute(ast.Name("torch"), name)
        return node
