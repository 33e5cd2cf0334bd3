"""The layer Engine, mostly without a code generator.

What engines compile for, and when, is the same with backend eager.
"""

import functools

import pytest
import torch
from torch.utils import _pytree as pytree

from torchperf_ros.engines import engine
from torchperf_ros.engines.built_tier import BuiltTier, varying_dims
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.package import make_runner
from torchperf_ros.engines.package_engine import export, nested
from torchperf_ros.engines.parity import check_engine, measure, random_inputs
from torchperf_ros.settings.build_options import BuildOptions

from .test_tier_loader import Loaded

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
X = torch.ones(2)
IMAGE = (torch.zeros(1, 3, 16, 16),)
# height and width have the same range, and size, on purpose
IMAGE_DIMS = {0: {0: (1, 8), 2: (8, 64), 3: (8, 64)}}
COMPILE, AOTI = BuildOptions("compile"), BuildOptions("aoti")


def convolution():
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 2, 3, padding=1).eval()


@pytest.fixture
def no_code(monkeypatch, fresh_compiler):
    monkeypatch.setattr(torch._dynamo.config, "accumulated_recompile_limit", 16)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def compiled(example=IMAGE, dims=None, model=None, options=COMPILE):
    return make_runner(BuiltTier(model or convolution(), example, dims or {}, CPU), options)


def test_given_engine_eager_when_made_then_it_is_the_model_itself_or_a_copy_in_another_precision():
    model = convolution()
    runner = make_runner(BuiltTier(model, IMAGE, IMAGE_DIMS, CPU), BuildOptions())
    assert runner.call is model
    assert (runner.graphs, runner.static) == (0, False)
    runner = make_runner(BuiltTier(model, IMAGE, {}, CPU), BuildOptions(precision="bf16"))
    assert model.weight.dtype is torch.float32
    check_engine(model, runner.call, IMAGE, {}, "bf16")


def usual():
    """The example as a worker makes it: under the mode in which it is run."""
    return tuple(tensor.clone() for tensor in IMAGE)


@torch.inference_mode()
def test_given_dynamic_dims_when_sizes_are_drawn_then_nothing_is_compiled_again(no_code):
    model = convolution()
    runner = compiled(dims=IMAGE_DIMS, model=model)
    assert runner.graphs >= 1
    torch.compiler.set_stance("fail_on_recompile")
    for seed in range(40):
        (image,) = random_inputs(IMAGE, seed, {0: {**IMAGE_DIMS[0], 0: (2, 8)}})
        measure(model(image), runner.call(image))
    runner.call(*usual())  # batch 1, as in the example
    with pytest.raises(RuntimeError, match="recompile"):
        runner.call(torch.zeros(2, 3, 65, 8))


@torch.inference_mode()
def test_given_more_sizes_than_the_compilers_limits_when_run_then_each_is_compiled_and_none_silently_eager(
    no_code,
):
    model, other = torch.nn.ReLU(), torch.nn.ReLU()
    calls = [compiled((torch.zeros(1),), model=each).call for each in (model, other)]
    for call in calls:
        for size in range(2, 25):
            call(torch.zeros(size))
    torch.compiler.set_stance("fail_on_recompile")
    for call in calls:
        for size in range(2, 25):
            call(torch.zeros(size))
        with pytest.raises(RuntimeError, match="recompile"):
            call(torch.zeros(1000))


@torch.inference_mode()
def test_given_dynamic_dims_when_compiled_then_the_adapters_own_example_is_not_marked(no_code):
    example = (torch.zeros(4, 3, 16, 16),)
    compiled(example, IMAGE_DIMS)
    assert not hasattr(example[0], "_dynamo_dynamic_indices")
    runner = compiled(example, options=BuildOptions("compile", dynamic="never"))
    torch.compiler.set_stance("fail_on_recompile")
    with pytest.raises(RuntimeError, match="recompile"):
        runner.call(torch.zeros(5, 3, 16, 16))


def test_given_a_model_that_is_made_for_one_size_when_compiled_for_many_then_that_is_an_error(no_code):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 1)).eval()
    with pytest.raises(Exception, match=r"specialized|size|shape"):
        compiled(dims={0: {2: (8, 64)}}, model=model)


@pytest.mark.parametrize(
    ("options", "declared", "varying"),
    [
        (AOTI, {}, {}),
        (AOTI, {0: {0: (1, 8), 2: (5, 5)}, 1: {0: (3, 3)}}, {0: {0: (1, 8)}}),
        (BuildOptions("aoti", dynamic="never"), {0: {0: (1, 8)}}, {}),
    ],
)
def test_given_declared_ranges_then_it_is_what_the_options_allow_and_has_two_sizes(
    options, declared, varying
):
    assert varying_dims(options, declared) == varying


def test_given_ranges_when_warmed_up_then_middle_smallest_largest_and_the_example_are_run_in_this_order():
    shapes = [tuple(inputs[0].shape) for inputs in BuiltTier(None, IMAGE, IMAGE_DIMS, CPU).inputs_by_size()]
    assert [shape[0] for shape in shapes] == [4, 1, 8, 1]
    assert [shape[2:] for shape in shapes] == [(36, 36), (8, 8), (64, 64), (16, 16)]
    assert BuiltTier(None, IMAGE, {}, CPU).inputs_by_size() == [IMAGE]


@pytest.mark.parametrize("dims", [IMAGE_DIMS, {0: {-1: (8, 64), -4: (1, 8)}}, {0: {2: (16, 64)}}])
def test_given_an_example_of_batch_1_when_exported_then_no_declared_size_is_taken_for_a_constant(dims):
    shape = (
        next(node for node in export(convolution(), IMAGE, dims).graph.nodes if node.name == "input")
        .meta["val"]
        .shape
    )
    declared = {dim % 4 for dim in dims[0]}
    assert {dim for dim, size in enumerate(shape) if not isinstance(size, int)} == declared
    assert len({str(shape[dim]) for dim in declared}) == len(declared)


@pytest.mark.parametrize("outputs", [X, (X,), [X, {"a": (X, X)}], {"b": X, "a": X}])
def test_given_outputs_of_any_structure_when_a_package_is_called_then_they_have_it_again(outputs):
    leaves, tree = pytree.tree_flatten(outputs)
    assert (
        measure(outputs, nested(lambda x: [leaf + x for leaf in leaves], tree)(torch.zeros(1))).max_error
        == 0.0
    )


@pytest.fixture
def captured(monkeypatch, fresh_compiler):
    """Graphs are captured as ever and run op by op.

    Inductor takes seconds, and does the same for a whole model.
    """
    monkeypatch.setattr(engine.torch, "compile", functools.partial(torch.compile, backend="eager"))


def tier_of(adapters, name, model=None):
    adapter = adapters.Compiled({"dynamic": True}, CPU)
    with torch.inference_mode():
        example = tuple(tensor.clone() for tensor in adapter.example_inputs(name))
    return BuiltTier(model or adapter.build(name).eval(), example, adapter.dynamic_dims(), CPU)


def runner_of(tier, parts):
    with torch.inference_mode():
        return make_runner(tier, BuildOptions("compile", parts=parts))


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize("parts", ["body", "body.0, body.2"])
def test_given_parts_when_made_then_they_are_compiled_and_answers_are_the_models_own_at_every_size(
    adapters, parts
):
    tier = tier_of(adapters, "split")
    runner = runner_of(tier, parts)
    assert runner.breaks == 0
    assert runner.graphs >= len(parts.split(","))
    torch.compiler.set_stance("fail_on_recompile")
    with torch.inference_mode():
        for batch in range(1, 9):
            inputs = random_inputs(tier.example, batch, {0: {0: (batch, batch)}, 1: {0: (batch, batch)}})
            torch.testing.assert_close(runner.call(*inputs), tier.model(*inputs))


@pytest.mark.usefixtures("captured")
def test_given_parts_when_run_then_between_calls_the_model_is_as_before_also_after_an_error(adapters):
    tier = tier_of(adapters, "split")
    before, seen = dict(vars(tier.model.body)), []
    call = runner_of(tier, "body").call
    assert vars(tier.model.body) == before
    tier.model.body.register_forward_hook(lambda *_: seen.append("forward" in vars(tier.model.body)))
    with torch.inference_mode():
        call(*tier.example)
        assert seen == [True]  # a hook of the user's runs once, around what is compiled
        with pytest.raises(RuntimeError):
            call(torch.zeros(1, 5), tier.example[1])
        assert vars(tier.model.body) == before
        tier.model(*tier.example)
    assert seen == [True, False]


class Counts(torch.nn.Module):
    """Has a part that it knows by another name, one that it does not run, and a state that is no buffer."""

    def __init__(self):
        super().__init__()
        self.body, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.other, self.calls = torch.nn.Sequential(torch.nn.ReLU()), 0

    def forward(self, x, mask):
        self.calls += 1
        return self.body(x) * mask.sum(1, keepdim=True)


@pytest.mark.usefixtures("captured")
def test_given_a_model_with_a_state_when_run_in_parts_then_the_state_is_the_models_own(adapters):
    tier = tier_of(adapters, "split", Counts().eval())
    runner = runner_of(tier, "body")
    before = tier.model.calls
    with torch.inference_mode():
        runner.call(*tier.example)
    assert (runner.graphs > 0, tier.model.calls) == (True, before + 1)


@pytest.mark.usefixtures("captured")
def test_given_a_part_whose_forward_was_replaced_when_run_then_that_one_is_compiled_and_stays(adapters):
    tier = tier_of(adapters, "split")
    own = tier.model.body.forward = lambda x: x * 3
    call = runner_of(tier, "body").call
    with torch.inference_mode():
        torch.testing.assert_close(call(*tier.example), tier.model(*tier.example))
    assert tier.model.body.forward is own


@pytest.mark.usefixtures("captured")
@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ("blocks", "the model has no module 'blocks'; at its top are body, spare, other"),
        ("body,", "the model has no module ''"),
        ("body, body", "body is named twice, or lies within another part"),
        ("spare", "the model does not run spare on the example inputs"),
        ("other.0, other", "other.0 is named twice, or lies within another part"),
    ],
)
def test_given_parts_that_cannot_be_when_made_then_the_reason_names_them(adapters, parts, says):
    with pytest.raises(EngineUnavailable, match=f"parts: {says}"):
        runner_of(tier_of(adapters, "split", Counts().eval()), parts)


@pytest.mark.usefixtures("captured")
def test_given_parts_when_loaded_then_the_facts_say_which_and_eager_runs_with_the_reason_where_they_cannot_be(
    adapters, tmp_path
):
    adapter = adapters.Compiled({"dynamic": True}, CPU)
    good = Loaded(adapter, tmp_path, BuildOptions("compile", parts="body"), "split")
    assert (good.facts.engine, good.facts.parts, good.facts.why) == ("compile", "body", "")
    outputs, inputs = good.run(3)
    with torch.inference_mode():
        torch.testing.assert_close(outputs, adapter.build("split").eval()(*inputs))
    none = Loaded(adapter, tmp_path, BuildOptions("compile", parts="encoder"), "split")
    assert (none.facts.engine, none.facts.parts) == ("eager", "")
    assert none.facts.why == "parts: the model has no module 'encoder'; at its top are body, head"
    assert none.reported == [f"tier split runs in eager: {none.facts.why}"]
