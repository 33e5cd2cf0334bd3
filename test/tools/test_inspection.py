"""What can be inspected, and what is said about what cannot."""

import sys
from pathlib import Path

import pytest
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.tools.graph_breaks import BreakKind, parse_break
from torchperf_ros.tools.inspection import (
    InspectError,
    Inspection,
    explain_recompilations,
    load_model,
    shapes_text,
    takes_tensor,
)

from . import graph_samples
from .conftest import SAMPLES, breaking_line


class Batches(Adapter):
    inputs = {"image": "sensor_msgs/msg/Image"}
    output = "std_msgs/msg/Float64"

    def __init__(self, options, device):
        self.scale = options["scale"]
        self.device = device

    def build(self, tier):
        return torch.nn.Linear(4, {"full": 4}[tier])

    def example_inputs(self, tier):
        return torch.ones(2, 4), torch.ones(2, 3, dtype=torch.int64)

    def dynamic_dims(self):
        return {0: {0: (1, 5)}, 1: {0: (1, 5)}}

    preprocess = postprocess = None  # no frame comes


@pytest.fixture
def adapter_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "adapter_under_inspection", sys.modules[__name__])
    return "adapter_under_inspection:Batches"


def load(target, inputs=("8x8",), tier="full", options=None):
    return load_model(target, tier, options or {}, list(inputs), torch.device("cpu"))


@pytest.mark.parametrize(
    "target", [f"{SAMPLES}:Item", f"{SAMPLES}:factory", f"{SAMPLES}:any_shape", "torch.nn:ReLU"]
)
def test_given_a_class_a_factory_or_a_function_when_loaded_then_it_can_be_called(target):
    model = load(target)
    assert isinstance(model.call, torch.nn.Module) == (not target.endswith("any_shape"))
    model.call(*model.input_sets[0])
    assert not getattr(model.call, "training", False)


@pytest.mark.parametrize(
    ("name", "same"),
    {
        **dict.fromkeys(("scaled", "as_float", "counted"), True),
        **dict.fromkeys(("rescaled", "wraps", "inverted", "precise", "Average"), False),
    }.items(),
)
def test_given_a_number_that_a_tensor_may_stand_for_when_tried_then_answers_and_what_is_kept_decide(
    name, same
):
    """The number is older than its source, larger than its type, no truth, more precise, or kept."""
    model = load(f"{SAMPLES}:{name}")
    item = torch.Tensor.item
    assert takes_tensor(model, str(SAMPLES), breaking_line(name)) is same
    assert torch.Tensor.item is item
    assert not takes_tensor(model, str(SAMPLES), 1), "no number is read there"


def test_given_sizes_and_types_when_made_then_they_are_as_written():
    assert [
        shapes_text(inputs)
        for inputs in load(
            f"{SAMPLES}:two_arguments", ["1x3x4:float16 scalar:int64", "2x3x4 scalar", "2x3 5:bool"]
        ).input_sets
    ] == [
        "1x3x4:float16 scalar:int64",
        "2x3x4:float16 scalar:int64",
        "2x3:float16 5:bool",
    ]


def test_given_the_same_command_twice_when_made_then_the_inputs_are_the_same():
    first, second = (load(f"{SAMPLES}:any_shape", ["8x8", "4x4"]) for _ in range(2))
    for a, b in zip(first.input_sets, second.input_sets, strict=True):
        assert torch.equal(a[0], b[0])


def test_given_an_adapter_when_loaded_then_further_inputs_come_from_its_dynamic_dimensions(adapter_module):
    model = load(adapter_module, ["4x4 4x3"], options={"scale": 1})
    assert model.name == "adapter_under_inspection:Batches (full)"
    assert [shapes_text(inputs).partition(":")[0] for inputs in model.input_sets] == [
        "2x4",
        "3x4",
        "1x4",
        "5x4",
        "4x4",
    ]
    assert all(inputs[1].shape[0] == inputs[0].shape[0] for inputs in model.input_sets)


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("no_colon", {}, ["'no_colon'", "module:callable"]),
        ("nowhere.py:Net", {}, ["nowhere.py", "No such file"]),
        ("no_such_module:Net", {}, ["no_such_module", "ModuleNotFoundError"]),
        (f"{SAMPLES}:missing", {}, ["'missing'", "value_if"]),
        (f"{SAMPLES}:CALLS", {}, ["list", "cannot be called"]),
        (f"{SAMPLES}:value_if", {"inputs": []}, ["--input", "1x3x224x224:float32"]),
        (f"{SAMPLES}:value_if", {"inputs": ["8by8"]}, ["'8by8'", "1x3x224x224"]),
        (f"{SAMPLES}:value_if", {"inputs": ["8x8:float33"]}, ["'float33'", "float32"]),
        (f"{SAMPLES}:value_if", {"inputs": ["8x8", "8x8 8"]}, ["2 sizes", "takes 1", "'8x8:float32'"]),
        ("torch.nn:Linear", {}, ["'in_features' and 'out_features'"]),
        ("adapter_under_inspection:Batches", {"inputs": []}, ["KeyError", "'scale'"]),
        ("adapter_under_inspection:Batches", {"options": {"scale": 1}}, ["'8x8'", "takes 2 inputs"]),
        (
            "adapter_under_inspection:Batches",
            {"inputs": [], "options": {"scale": 1}, "tier": "huge"},
            ["tier 'huge'", "Batches.build knows no tier 'huge'"],
        ),
    ],
)
def test_given_what_cannot_be_loaded_when_loaded_then_the_message_names_it_and_what_would_be_right(
    adapter_module, target, more, words
):
    with pytest.raises(InspectError) as caught:
        load(target, **more)
    for word in words:
        assert word in str(caught.value)


BAD = {
    "value_if": BreakKind.BRANCH,
    "Norm": BreakKind.BRANCH,
    "early_exit": BreakKind.EARLY_EXIT,
    "Item": BreakKind.NUMBER,
    "item_then_branch": BreakKind.NUMBER,
    "scaled": BreakKind.SCALAR,
    "keyed": BreakKind.NUMBER,
    "rescaled": BreakKind.NUMBER,
    "whole": BreakKind.NUMBER,
    "excepted": BreakKind.NUMBER,
    "element_loop": BreakKind.LOOP,
    "floats": BreakKind.LOOP,
    "printed": BreakKind.PRINT,
    "printed_in_loop": BreakKind.PRINT,
    "printed_in_function": BreakKind.PRINT,
    "logged": BreakKind.PRINT,
    "lexsort": BreakKind.FOREIGN,
    "median": BreakKind.FOREIGN,
    "count": BreakKind.LOOP_COUNT,
    "count_while": BreakKind.LOOP_COUNT,
    "rows_above": BreakKind.DYNAMIC_SHAPE,
    "sleeps": BreakKind.UNSUPPORTED,
    "Recurrent": BreakKind.RNN,
}


@pytest.mark.parametrize("name", BAD)
def test_given_code_that_breaks_when_inspected_then_line_kind_reason_and_advice_are_found(
    inspect_sample, name
):
    inspection = inspect_sample(name)
    (found,) = inspection.breaks
    assert (found.line.file, found.line.line) == (str(SAMPLES), breaking_line(name))
    assert found.kind is BAD[name]
    assert found.kind.advice
    assert found.underline.strip("^~ ") == ""
    assert 0 < len(found.underline) <= len(found.line.text.partition("  #")[0])
    assert found.reasons[0].startswith(found.title)
    assert (inspection.exit_status(0), inspection.exit_status(1)) == (1, 0)


def test_given_a_number_of_numpys_when_read_then_the_call_is_what_breaks(inspect_sample):
    (found,) = inspect_sample("percentile").breaks
    assert (found.line.line, found.kind) == (breaking_line("percentile"), BreakKind.FOREIGN)


def test_given_a_number_that_is_only_computed_with_when_kept_a_tensor_as_advised_then_results_stay_in_one_graph(
    inspect_sample,
):
    x = torch.rand(4, 4)
    assert torch.allclose(graph_samples.scaled(x), graph_samples.scaled_by_a_tensor(x))
    assert len(inspect_sample("scaled_by_a_tensor").graphs) == 1


@pytest.mark.parametrize("name", ["shape_if", "numpy_traced", "element_loop_unrolled", "layers_in_loop"])
def test_given_code_without_a_break_when_inspected_then_it_is_one_graph(inspect_sample, name):
    inspection = inspect_sample(name)
    assert (inspection.breaks, inspection.recompilations, inspection.failure) == ([], [], "")
    assert len(inspection.graphs) == 1
    assert inspection.exit_status(0) == 0


def test_given_a_break_in_a_called_function_or_a_loop_when_inspected_then_its_effect_is_known(
    inspect_sample,
):
    called, looping = inspect_sample("Norm"), inspect_sample("printed_in_loop")
    assert called.breaks[0].function == "pick"
    assert (called.breaks[0].whole_function, len(called.graphs)) == (False, 3)
    assert (looping.breaks[0].whole_function, len(looping.graphs)) == (True, 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python says the columns from 3.11 on")
def test_given_a_part_of_a_line_that_breaks_when_shown_then_only_it_is_underlined(inspect_sample):
    found = inspect_sample("Item").breaks[0]
    marked = "".join(c for c, mark in zip(found.line.text, found.underline, strict=False) if mark in "^~")
    assert marked == "x.max().item()"


def test_given_breaks_in_turn_when_inspected_then_each_is_one(inspect_sample):
    assert [item.line.text for item in inspect_sample("breaks_in_turn").breaks] == [
        "print(x.max().item())",
        "scale = y.max().item()",
    ]


def test_given_a_model_that_raises_when_compiled_when_inspected_then_that_is_a_failure(
    monkeypatch, inspect_sample
):
    ran = Inspection.call

    def fail_compiled(self, call, index):
        if call is self._compiled:
            raise RuntimeError("compiled too often")
        ran(self, call, index)

    monkeypatch.setattr(Inspection, "call", fail_compiled)
    inspection = inspect_sample("any_shape", "7x7")  # a size that no other test asks for
    assert "raises RuntimeError: compiled too often" in inspection.failure
    assert inspection.exit_status(None) == 1


def test_given_a_scripted_model_when_inspected_then_that_the_compiler_refuses_it_is_a_failure(
    inspect_sample,
):
    inspection = inspect_sample("scripted")
    assert "torch.compile does not support compiling torch.jit.script" in inspection.failure
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
    assert [graph.input_set for graph in inspection.graphs] == [0, 1, 2]


def test_given_a_count_in_the_module_when_run_then_each_value_is_compiled_until_the_compiler_gives_up(
    inspect_sample,
):
    found = kinds(inspect_sample("counting"))
    assert set(found[:-1]) == {"value"}
    assert found[-1] == "limit"


@pytest.mark.parametrize(
    ("text", "kind", "guard"),
    [
        (
            "0/0: tensor 'x' dtype mismatch. expected Float, actual Half",
            "dtype",
            "tensor 'x' dtype mismatch",
        ),
        (
            "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 1",
            "stride",
            "tensor 'x' stride mismatch",
        ),
        ("0/1: 2 <= x.size()[0]  # a = f(x)  # n.py:3 in f", "one", "2 <= x.size()[0]"),
        ("0/0: x.size()[0] == 8  # y = x.view(8)  # n.py:3 in f", "unrolled", "x.size()[0] == 8"),
        ("0/0: flag == True", "value", "flag == True"),
        (
            '[\n"0/1: 5 <= x.size()[0]  # if len(x) > 4:  # n.py:3 in f",\n"0/0: other"\n]',
            "shape branch",
            "5 <=",
        ),
    ],
)
def test_given_the_compilers_words_when_explained_then_kind_and_guard_are_right(text, kind, guard):
    (found,) = explain_recompilations([("0/2", 1, text)], lambda compile_id: ("forward", "n.py", 2))
    assert found.kind == kind
    assert found.guard.startswith(guard)
    assert "#" not in found.guard
    assert (found.function, found.file, found.line) == ("forward", "n.py", 2)
    assert found.advice
