"""Engines, mostly without a code generator.

What they compile for, and when, is the same with backend eager.
"""

import functools
import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree

from torchperf_ros.engines.built_tier import BuiltTier, varying_dims
from torchperf_ros.engines.engine import GraphReplay
from torchperf_ros.engines.package import make_runner
from torchperf_ros.engines.package_engine import export, nested
from torchperf_ros.engines.parity import check_engine, measure, random_inputs
from torchperf_ros.settings.build_options import BuildOptions

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
        (BuildOptions("aoti", dynamic="always"), {0: {0: (1, 8)}}, {0: {0: (1, 8)}}),
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
    program = export(convolution(), IMAGE, dims)
    shape = next(node for node in program.graph.nodes if node.name == "input").meta["val"].shape
    declared = {dim % 4 for dim in dims[0]}
    assert {dim for dim, size in enumerate(shape) if not isinstance(size, int)} == declared
    assert len({str(shape[dim]) for dim in declared}) == len(declared)


@pytest.mark.parametrize("outputs", [X, (X,), [X, {"a": (X, X)}], {"b": X, "a": X}])
def test_given_outputs_of_any_structure_when_a_package_is_called_then_they_have_it_again(outputs):
    leaves, tree = pytree.tree_flatten(outputs)
    call = nested(lambda x: [leaf + x for leaf in leaves], tree)
    assert measure(outputs, call(torch.zeros(1))).max_error == 0.0


# --- CUDA graphs


def layers(device):
    torch.manual_seed(0)
    return (
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        .eval()
        .to(device)
    )


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("torchperf_ros.engines.engine._capture", record)


def record(call, inputs):
    """A capture as a GPU does it: what is replayed knows where weights lie, and keeps nothing alive."""
    there, outputs = weakref.ref(call), call(*inputs)
    return lambda: outputs.copy_(there()(*inputs)), outputs


def test_given_a_captured_model_that_nobody_else_keeps_when_called_then_its_weights_answer_every_shape(
    recorded,
):
    net, inputs, other = layers(CPU), torch.randn(2, 8), torch.randn(3, 8)
    with torch.inference_mode():
        expected, of_other = net(inputs), net(other)
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        del net
        gc.collect()
        assert torch.equal(replay(inputs), expected)
        assert torch.equal(replay(other), of_other)  # not captured: the model itself answers


@pytest.mark.gpu
def test_given_a_captured_model_when_replayed_then_each_result_is_that_of_its_own_input():
    net = layers(CUDA)
    with torch.inference_mode():
        replay = GraphReplay(net, (torch.zeros(2, 8, device=CUDA),))
        for seed in range(3):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(CUDA)
            assert torch.allclose(replay(inputs), net(inputs), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "aoti"])
def test_given_cuda_graphs_with_an_engine_when_made_then_it_agrees_with_eager(engine):
    """The memory that the captured copy's weights had is written to.

    The graph still has to read its weights.
    """
    net, inputs = layers(CUDA), torch.randn(2, 8, device=CUDA)
    options = BuildOptions(engine=engine, cuda_graphs=True, precision="fp16")  # of a copy of the model
    runner = make_runner(BuiltTier(net, (torch.zeros(2, 8, device=CUDA),), {}, CUDA), options)
    gc.collect()
    torch.cuda.empty_cache()
    filled = [torch.full((1 << 20,), 1e4, device=CUDA) for _ in range(64)]
    with torch.inference_mode():
        assert torch.allclose(runner.call(inputs), net(inputs), atol=1e-2)
    del filled


@pytest.mark.gpu
def test_given_a_model_that_waits_for_the_device_when_captured_then_the_error_says_so():
    """In a process of its own: a failed capture leaves nothing that can be relied on."""
    code = """
        import torch
        from torchperf_ros.engines.engine import CaptureFailed, GraphReplay
        try:
            GraphReplay(lambda x: x * float(x.sum()), (torch.ones(3, device="cuda"),))
        except CaptureFailed as error:
            print(error, flush=True)
        import os
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("it cannot be captured as a CUDA graph: "), done.stderr
