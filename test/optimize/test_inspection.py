"""What is found in code that breaks graphs or is compiled again, and nothing in what it should be."""

import sys
from pathlib import Path

import pytest
import torch

from torchperf_ros.optimize.inspect.graph_breaks import Kind, parse_break
from torchperf_ros.optimize.inspect.inspected_model import InspectError
from torchperf_ros.optimize.inspect.inspection import Inspection
from torchperf_ros.optimize.inspect.recompilations import explain_recompilations
from torchperf_ros.optimize.inspect.users_source import read_line, rewrite_branch, rewrite_scalar, rewritten

from . import graph_samples
from .conftest import SAMPLES, breaking_line

GUARD = "if not torch.compiler.is_compiling():\n    "
BAD = {
    "value_if": (Kind.BRANCH, "return torch.where(y.sum() > 0, y * 2, y * 3)"),
    "Norm": (Kind.BRANCH, "return torch.where(flag, self.batch(x), self.layer(x))"),
    "early_exit": (Kind.EARLY_EXIT, ""),
    "Item": (Kind.SCALAR, "score = x.max()"),
    "item_then_branch": (Kind.SCALAR, ""),  # the branch on it breaks then
    "element_loop": (Kind.LOOP, ""),
    "floats": (Kind.LOOP, ""),
    "printed": (Kind.PRINT, f"{GUARD}print('mean', x.mean())"),
    "printed_in_loop": (Kind.PRINT, f"{GUARD}print(step, x.mean())"),
    "printed_in_function": (Kind.PRINT, f"{GUARD}print(y.mean())"),
    "logged": (Kind.PRINT, f"{GUARD}LOG.warning('mean %s', x.mean())"),
    "lexsort": (Kind.FOREIGN, ""),  # torch has none
    "median": (Kind.FOREIGN, ""),  # torch's is another one for an even number of values
    "count": (Kind.LOOP_COUNT, ""),
    "count_while": (Kind.LOOP_COUNT, ""),
    "rows_above": (Kind.DYNAMIC_SHAPE, ""),
    "sleeps": (Kind.UNSUPPORTED, ""),
}


@pytest.mark.parametrize("name", BAD)
def test_given_code_that_breaks_when_inspected_then_line_kind_and_a_rewrite_that_holds_are_found(inspect_sample, name):
    inspection = inspect_sample(name)
    (found,) = inspection.breaks
    assert (found.line.file, found.line.line) == (str(SAMPLES), breaking_line(name))
    assert (found.kind, found.after) == BAD[name]
    assert bool(found.before) == bool(found.after)
    assert found.underline.strip("^~ ") == ""
    assert 0 < len(found.underline) <= len(found.line.text.partition("  #")[0])
    assert found.reasons[0].startswith(found.title)
    assert (inspection.exit_status(0), inspection.exit_status(1)) == (1, 0)


@pytest.mark.parametrize("name", ["shape_if", "numpy_traced", "element_loop_unrolled", "layers_in_loop"])
def test_given_code_without_a_break_when_inspected_then_it_is_one_graph(inspect_sample, name):
    inspection = inspect_sample(name)
    assert (inspection.breaks, inspection.recompilations, inspection.failure) == ([], [], "")
    assert len(inspection.graphs) == 1
    assert inspection.exit_status(0) == 0


def test_given_a_statement_rewritten_for_a_while_when_over_then_the_users_function_is_its_own_again():
    ones = torch.ones(2)
    with rewritten(read_line(str(SAMPLES), breaking_line("value_if")), "return y + 40"):
        assert graph_samples.value_if(ones)[0] == 41
    assert graph_samples.value_if(ones)[0] == 2


def test_given_a_break_in_a_called_function_or_a_loop_when_inspected_then_its_effect_is_known(inspect_sample):
    called, looping = inspect_sample("Norm"), inspect_sample("printed_in_loop")
    assert (called.breaks[0].function, called.breaks[0].splits) == ("pick", ["forward", "pick"])
    assert (called.breaks[0].whole_function, len(called.graphs)) == (False, 3)
    assert (looping.breaks[0].whole_function, len(looping.graphs)) == (True, 0)


def test_given_a_split_model_when_measured_then_times_of_graphs_and_gaps_are_parts_of_the_whole(inspect_sample):
    inspection = inspect_sample("value_if")
    timing = inspection.timings[0]
    assert [graph.op_counts() for graph in inspection.graphs] == [{"relu": 1, "sum": 1, "gt": 1}, {"mul": 1}]
    assert set(timing.graph_ms) == {0, 1}
    assert set(timing.gap_ms) == {-1, 0, 1}
    assert 0 < timing.between_graphs_ms < timing.compiled_ms
    assert inspection.breaks[0].gap_ms == timing.gap_ms[0] > 0
    assert all(graph.ms == timing.graph_ms[graph.index] > 0 for graph in inspection.graphs)
    assert timing.eager_ms > 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says the columns from 3.11 on")
def test_given_a_part_of_a_line_that_breaks_when_shown_then_only_it_is_underlined(inspect_sample):
    found = inspect_sample("Item").breaks[0]
    marked = "".join(c for c, mark in zip(found.line.text, found.underline, strict=False) if mark in "^~")
    assert marked == "x.max().item()"


def test_given_breaks_in_turn_when_placed_then_each_stands_after_the_graph_that_ran_before_it(inspect_sample):
    inspection = inspect_sample("breaks_in_turn")
    places = {item.line.text: item.gaps for item in inspection.breaks}
    assert places == {"print(x.max().item())": [0], "scale = y.max().item()": [1]}


def test_given_a_model_that_raises_when_compiled_when_inspected_then_that_is_a_failure(monkeypatch, inspect_sample):
    timed = Inspection._timed

    def fail_compiled(self, call, index):
        if call is self._compiled:
            raise RuntimeError("compiled too often")
        return timed(self, call, index)

    monkeypatch.setattr(Inspection, "_timed", fail_compiled)
    inspection = inspect_sample("any_shape", "7x7")  # a size that no other test asks for
    assert "raises RuntimeError: compiled too often" in inspection.failure
    assert inspection.timings[0].eager_ms > 0
    assert inspection.exit_status(None) == 1


def test_given_a_model_that_runs_only_once_when_inspected_then_it_cannot_be(inspect_sample):
    with pytest.raises(InspectError, match="already used"):
        inspect_sample("runs_once")


def test_given_a_model_kept_from_the_compiler_then_that_is_the_break_and_not_what_calls_it(inspect_sample):
    (found,) = inspect_sample("disabled").breaks
    assert "torch.compiler.disable" in found.title
    assert found.line.file.startswith(str(Path(torch.__file__).parent))


def test_given_a_model_without_any_operation_when_gated_then_no_breaks_are_no_pass(inspect_sample):
    inspection = inspect_sample("idle")
    assert (inspection.breaks, inspection.graphs) == ([], [])
    assert "no graph" in inspection.doubt
    assert (inspection.exit_status(0), inspection.exit_status(None)) == (1, 0)


TEXT = f"""Graph break in user code at /usr/lib/python3/json.py:9
Graph Break Reason: Failed to handle graph break gracefully. Skipping it. Graph break encountered:

Data dependent operator
  Explanation: Its value depends on data.
  Hint: Do not.

Stack variable source attribution:
    more

User code traceback:
  File "{SAMPLES}", line 17, in value_if
    if y.sum() > 0:  # breaks
       ^^^^^^^^^^^
  File "{torch.__file__}", line 9, in sum
    return 1

Traceback (most recent call last):
  File "/elsewhere.py", line 1, in not_this
"""


def test_given_the_compilers_text_when_read_then_reason_and_the_users_line_are_found():
    reason, whole_function, frame = parse_break(TEXT)
    assert reason == "Data dependent operator\n  Explanation: Its value depends on data.\n  Hint: Do not."
    assert whole_function
    assert frame == (str(SAMPLES), 17, "value_if", "   ^^^^^^^^^^^")


@pytest.mark.parametrize("word", ["Graph Break Reason", "Reason"])
def test_given_text_without_a_stack_when_read_then_the_place_in_its_first_line_is_used(word):
    text = f"Graph break in user code at /robot/net.py:31\n{word}: call_method item\n"
    assert parse_break(text) == ("call_method item", False, ("/robot/net.py", 31, "?", ""))


@pytest.mark.parametrize(
    ("rewrite", "code", "after"),
    [
        (rewrite_branch, "if x > 0:\n        y = x\n    else:\n        y = -x", "y = torch.where(x > 0, x, -x)"),
        (rewrite_branch, "if x > 0:\n        y = x", "y = torch.where(x > 0, x, y)"),
        (rewrite_branch, "y = x if x > 0 and not y else -x", "y = torch.where((x > 0) & ~y, x, -x)"),
        (rewrite_branch, "if x > 0:\n        y = x\n    else:\n        x = y", ""),
        (rewrite_branch, "if x > 0:\n        y = x\n        x = y", ""),
        (rewrite_branch, "if x > 0:\n        return y[:1]\n    return y", ""),
        (rewrite_scalar, "return x * float(y) + y.item()", "return x * y + y"),
    ],
)
def test_given_a_statement_when_rewritten_then_it_is_the_users_own_in_torch(tmp_path, rewrite, code, after):
    (tmp_path / "net.py").write_text(f"\ndef forward(x, y):\n    {code}\n")
    assert rewrite(read_line(str(tmp_path / "net.py"), 3)) == after


def kinds(inspection):
    return [item.kind for item in inspection.recompilations]


def test_given_code_for_any_size_when_sizes_vary_then_it_is_compiled_again_once(inspect_sample):
    inspection = inspect_sample("any_shape", "8x8", "4x8", "6x8", "3x8")
    assert kinds(inspection) == ["size"]
    (found,) = inspection.recompilations
    assert "size mismatch at index 0. expected 8, actual 4" in found.guard
    assert (found.input_set, found.function) == (1, "any_shape")


def test_given_a_branch_on_the_size_when_sizes_vary_then_its_guard_and_line_are_named(inspect_sample):
    inspection = inspect_sample("shape_if", "8x8", "4x8", "6x8")
    assert kinds(inspection) == ["size", "shape branch"]
    branch = inspection.recompilations[1]
    assert "x.size()[0] <= 5" in branch.guard
    assert "if x.shape[0] > 5:" in branch.source


def test_given_a_loop_over_elements_when_sizes_vary_then_it_unrolls_for_each(inspect_sample):
    inspection = inspect_sample("element_loop_unrolled", "8x8", "4x8", "6x8")
    assert kinds(inspection) == ["unrolled", "unrolled"]
    assert [graph.op_counts()["mul"] for graph in inspection.graphs] == [8, 4, 6]


def test_given_a_count_in_the_module_when_run_then_each_value_is_compiled_until_the_compiler_gives_up(inspect_sample):
    found = kinds(inspect_sample("counting"))
    assert set(found[:-1]) == {"value"}
    assert found[-1] == "limit"


@pytest.mark.parametrize(
    ("text", "kind", "guard"),
    [
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Half", "dtype", "tensor 'x' dtype mismatch"),
        ("0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1", "stride", "tensor 'x' stride mismatch"),
        ("0/1: 2 <= x.size()[0]  # a = f(x)  # n.py:3 in f", "one", "2 <= x.size()[0]"),
        ("0/0: x.size()[0] == 8  # y = x.view(8)  # n.py:3 in f", "unrolled", "x.size()[0] == 8"),
        ("0/0: flag == True", "value", "flag == True"),
        ('[\n"0/1: 5 <= x.size()[0]  # if len(x) > 4:  # n.py:3 in f",\n"0/0: other"\n]', "shape branch", "5 <="),
    ],
)
def test_given_the_compilers_words_when_explained_then_kind_and_guard_are_right(text, kind, guard):
    (found,) = explain_recompilations([("0/2", 1, text)], lambda compile_id: ("forward", "n.py", 2))
    assert found.kind == kind
    assert found.guard.startswith(guard)
    assert "#" not in found.guard
    assert (found.function, found.file, found.line) == ("forward", "n.py", 2)
    assert found.advice


@pytest.mark.parametrize("name", ["KeyedByNumber", "KeptInPlace"])
def test_given_a_number_that_is_a_key_or_kept_when_inspected_then_no_tensor_is_proposed_in_its_place(
    inspect_sample, name
):
    (item,) = [one for one in inspect_sample(name).breaks if one.kind is Kind.SCALAR]
    assert item.line.line == breaking_line(name)
    assert (item.before, item.after) == ("", "")


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("n = x.sum().item()\n    return x * (n + 1)", False),
        ("n = int(x.max())\n    m = n // 2\n    return table[m]", True),
        ("n = float(x[0])\n    if n in seen:\n        return x\n    return x + n", True),
        ("n = x.sum().item()\n    self.last = n\n    return x", True),
        ("self.last = x.sum().item()\n    return x", True),
        ("n = x.sum().item()\n    rows.append(n * 2)\n    return x", True),
        ("n = x.sum().item()\n    name = f'{n:.1f}'\n    return x", True),
        ("n = x.sum().item()\n    return {n: x}", True),
        ("n = x.sum().item()\n    return {'n': n, 'x': torch.relu(x)}", False),
    ],
)
def test_given_what_becomes_of_a_number_when_rewritten_then_only_where_it_is_reckoned_with(tmp_path, body, kept):
    file = tmp_path / "model.py"
    file.write_text(f"def forward(self, x):\n    {body}\n")
    assert (rewrite_scalar(read_line(str(file), 2)) == "") is kept


def test_given_a_recurrent_network_when_inspected_then_what_captures_it_was_tried(inspect_sample):
    (item,) = inspect_sample("Recurrent").breaks
    assert item.kind is Kind.RNN
    assert "allow_rnn = True was tried: it is captured, and answers are the same" in item.advice


def test_given_sizes_that_vary_when_inspected_then_dynamic_is_proposed_by_what_came_of_it(inspect_sample):
    (anything,) = inspect_sample("any_shape", "8x6", "4x6", "7x6").recompilations
    assert "torch.compile(dynamic=True) was tried: 0 recompilations instead of 1." in anything.advice
    (equal,) = inspect_sample("any_shape", "8x8", "4x8", "6x8", "3x8").recompilations
    assert "1 recompilation instead of 1. It does not help here." in equal.advice  # equal sizes are one to the compiler
    size, branch = inspect_sample("shape_if", "8x6", "4x6", "7x6").recompilations
    assert (
        "dynamic=True) was tried: 1 recompilation instead of 2. What is left is compiled for each side" in size.advice
    )
    assert "dynamic" not in branch.advice
