"""What can be inspected, and what is said about what cannot."""

import sys

import pytest
import torch

from torchperf_ros.api.adapter import Adapter
from torchperf_ros.tools.inspect.inspected_model import InspectError, load_model, shapes_text, takes_tensor

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
    model = load(f"{SAMPLES}:two_arguments", ["1x3x4:float16 scalar:int64", "2x3x4 scalar", "2x3 5:bool"])
    assert [shapes_text(inputs) for inputs in model.input_sets] == [
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
