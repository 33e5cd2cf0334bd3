"""Other inputs: what is compiled again and why, which branches depend on sizes, which loops unroll."""

import pytest

from torchperf_ros.analysis.compiler_trace import TraceEvent
from torchperf_ros.analysis.recompilations import explain_recompilations, parse_recompilation


def kinds(inspection):
    return [item.kind for item in inspection.recompilations]


def test_given_one_input_when_inspected_then_nothing_is_compiled_again(inspect_sample):
    assert inspect_sample("shape_if_bad").recompilations == []


@pytest.mark.parametrize("name", ["shape_if_good", "subsample_good", "element_loop_good"])
def test_given_code_for_any_size_when_sizes_vary_then_it_is_compiled_again_once(inspect_sample, name):
    inspection = inspect_sample(name, "8x8", "4x8", "6x8", "3x8")
    assert kinds(inspection) == ["size"]
    assert "size mismatch at index 0. expected 8, actual 4" in inspection.recompilations[0].guard
    assert inspection.recompilations[0].input_set == 1
    assert inspection.recompilations[0].function == name


@pytest.mark.parametrize("name", ["shape_if_bad", "subsample_bad"])
def test_given_a_branch_on_the_size_when_sizes_vary_then_its_guard_and_line_are_named(inspect_sample, name):
    inspection = inspect_sample(name, "8x8", "4x8", "6x8")
    assert kinds(inspection) == ["size", "shape branch"]
    branch = inspection.recompilations[1]
    assert "x.size()[0] <= 5" in branch.guard
    assert "if x.shape[0] > 5:" in branch.source
    assert [item.kind for item in inspection.remarks] == ["shape-dependent branch"]
    assert "x.shape[0] > 5" in inspection.remarks[0].text


def test_given_a_loop_over_elements_when_sizes_vary_then_it_unrolls_for_each(inspect_sample):
    inspection = inspect_sample("element_loop_unrolled", "8x8", "4x8", "6x8")
    assert kinds(inspection) == ["unrolled", "unrolled"]
    (remark,) = inspection.remarks
    assert remark.kind == "unrolled loop"
    assert remark.line.text == "for row in x:"
    assert "mul 8 times" in remark.text
    assert "over the graphs: 16, 8, 12" in remark.text


def test_given_a_loop_over_different_layers_when_inspected_then_it_is_no_remark(inspect_sample):
    assert inspect_sample("layers_in_loop").remarks == []


def test_given_numpy_that_torch_traces_when_inspected_then_it_is_a_remark_and_no_break(inspect_sample):
    inspection = inspect_sample("numpy_traced")
    assert inspection.breaks == []
    assert [item.kind for item in inspection.remarks] == ["traced NumPy"]
    assert "absolute, sqrt" in inspection.remarks[0].text


def test_given_a_count_in_the_module_when_run_then_each_value_is_compiled_until_the_compiler_gives_up(inspect_sample):
    found = kinds(inspect_sample("counting"))
    assert set(found[:-1]) == {"value"}
    assert found[-1] == "limit"


@pytest.mark.parametrize(
    ("text", "kind", "guard"),
    [
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Half", "dtype", "tensor 'x' dtype mismatch"),
        ("0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1", "stride", "stride mismatch"),
        ("0/1: 2 <= x.size()[0]  # a = f(x)  # n.py:3 in f", "one", "2 <= x.size()[0]"),
        ("0/0: x.size()[0] == 8  # y = x.view(8)  # n.py:3 in f", "unrolled", "x.size()[0] == 8"),
        ("0/0: flag == True", "value", "flag == True"),
        ('[\n"0/1: 5 <= x.size()[0]  # if len(x) > 4:  # n.py:3 in f",\n"0/0: other"\n]', "shape branch", "5 <="),
    ],
)
def test_given_the_compilers_words_when_explained_then_kind_and_guard_are_right(text, kind, guard):
    raw = parse_recompilation(TraceEvent("recompile_reasons", "0/2", {}, text), input_set=1)
    (found,) = explain_recompilations([raw], {"0": ("forward", "n.py", 2)}, set())
    assert found.kind == kind
    assert found.guard.startswith(guard) or guard in found.guard
    assert "#" not in found.guard
    assert (found.function, found.file, found.line) == ("forward", "n.py", 2)
    assert found.advice
