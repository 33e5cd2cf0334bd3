"""Advice is code: what it proposes runs, gives the same answer, and does not break."""

import ast
import textwrap

import pytest
import torch

from torchperf_ros.analysis.break_advice import advise
from torchperf_ros.analysis.break_category import Category
from torchperf_ros.analysis.source_line import read_line

from .conftest import SAMPLES, breaking_line


def advice_for(tmp_path, code, category, line=1):
    """Advice for a line of a function whose body is this code."""
    file = tmp_path / "model.py"
    file.write_text("import numpy as np\nimport torch\ndef forward(x, y):\n" + textwrap.indent(code, "    ") + "\n")
    return advise(category, read_line(str(file), 3 + line))


@pytest.mark.parametrize(
    ("category", "code", "after"),
    [
        (Category.BRANCH, "if x > 0:\n    y = x\nelse:\n    y = -x", "y = torch.where(x > 0, x, -x)"),
        (Category.BRANCH, "if x > 0:\n    y = x", "y = torch.where(x > 0, x, y)"),
        (Category.BRANCH, "if x > 0 and not y:\n    return x\nreturn y", "return torch.where((x > 0) & ~y, x, y)"),
        (Category.BRANCH, "y = x if x.sum() > 0 else -x", "y = torch.where(x.sum() > 0, x, -x)"),
        (Category.SCALAR, "y = x.sum().item() * 2", "y = x.sum() * 2"),
        (Category.SCALAR, "return x * float(y)", "return x * y"),
        (Category.PRINT, "print(x)", "if not torch.compiler.is_compiling():\n    print(x)"),
        (Category.FOREIGN, "y = float(np.median(x.detach().cpu().numpy()))", "y = torch.median(x)"),
        (Category.FOREIGN, "y = torch.from_numpy(np.concatenate((x, y)))", "y = torch.cat((x, y))"),
    ],
)
def test_given_a_statement_that_can_be_rewritten_when_advised_then_it_is_the_users_own(tmp_path, category, code, after):
    advice = advice_for(tmp_path, code, category)
    assert advice.after == after
    assert advice.is_users
    assert ast.unparse(ast.parse(code)) == advice.before


@pytest.mark.parametrize(
    ("category", "code"),
    [
        (Category.BRANCH, "if x > 0:\n    y = x\n    x = y"),
        (Category.BRANCH, "if x > 0:\n    y = x\nelse:\n    x = y"),
        (Category.BRANCH, "if x > 0:\n    return y[:1]\nreturn y"),
        (Category.BRANCH, "y = 'more' if x > 0 else 'less'"),
        (Category.SCALAR, "use(x.item())"),
        (Category.FOREIGN, "y = np.lexsort(x)"),
        (Category.FOREIGN, "y = np.sum(x, axis=1)"),
        (Category.PRINT, "y = str(x)"),
    ],
)
def test_given_a_statement_that_cannot_be_rewritten_when_advised_then_an_example_is_shown(tmp_path, category, code):
    advice = advice_for(tmp_path, code, category)
    assert not advice.is_users
    ast.parse(advice.after)


@pytest.mark.parametrize("category", Category)
def test_given_a_category_when_advised_without_source_then_there_is_a_sentence_and_an_example(category):
    advice = advise(category, read_line("no_such_file.py", 1))
    assert advice.sentence.endswith(".")
    for code in (advice.before, advice.after):
        compile(code if "return" not in code else f"def example():\n{textwrap.indent(code, '    ')}", "x", "exec")


def test_given_the_samples_branch_when_its_advice_is_followed_then_the_result_is_the_same_in_one_graph():
    advice = advise(Category.BRANCH, read_line(str(SAMPLES), breaking_line("value_if_bad")))
    names = {"torch": torch}
    exec(f"def followed(x):\n    y = torch.relu(x)\n    {advice.after}", names)
    compiled = torch.compile(names["followed"], backend="eager", fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        expected = x.relu() * 2 if x.relu().sum() > 0 else x.relu() * 3
        assert torch.equal(compiled(x), expected)


def test_given_a_guarded_print_when_compiled_then_nothing_breaks():
    def forward(x):
        if not torch.compiler.is_compiling():
            print(x.mean())
        return x * 2

    assert torch.equal(torch.compile(forward, backend="eager", fullgraph=True)(torch.ones(2)), torch.full((2,), 2.0))
