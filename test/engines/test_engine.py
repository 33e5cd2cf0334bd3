"""The layer Engine, mostly without a code generator.

What engines compile for, and when, is the same with backend eager.
"""

import contextlib
import functools
import gc
import subprocess
import sys
import textwrap
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torchperf_ros.engines import engine
from torchperf_ros.engines.built_tier import BuiltTier, varying_dims
from torchperf_ros.engines.engine import EngineUnavailable
from torchperf_ros.engines.graph import CaptureFailed, GraphReplay
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


class Recorded(TorchDispatchMode):
    """A CUDA graph without CUDA: its kernels, with the addresses of what was there before, which it keeps not alive.

    As on a device, what waits for a value cannot be captured.
    """

    def __init__(self):
        super().__init__()
        self.kernels, self.made = [], []

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        if kernel is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        made = kernel(*args, **(kwargs or {}))
        self.kernels.append(
            (kernel, pytree.tree_map_only(torch.Tensor, self.address, args), kwargs or {}, made)
        )
        self.made.append(made)
        return made

    def pool(self):
        return (0, 1)

    def address(self, tensor):
        return (lambda: tensor) if any(tensor is one for one in self.made) else weakref.ref(tensor)

    def replay(self):
        for kernel, args, kwargs, made in self.kernels:
            made.copy_(kernel(*(arg() if callable(arg) else arg for arg in args), **kwargs))


@pytest.fixture
def streams(monkeypatch):
    """CUDA's streams and graphs without CUDA: the caller's stream, and which streams wait and are set."""
    cuda, waits, current = torch.cuda, [], []
    side, caller = (SimpleNamespace(name=name, wait_stream=waits.append) for name in ("side", "caller"))
    monkeypatch.setattr(cuda, "current_stream", lambda _: caller)
    monkeypatch.setattr(cuda, "Stream", lambda _: side)
    monkeypatch.setattr(cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(cuda, "graph", lambda graph, pool, capture_error_mode: graph)
    monkeypatch.setattr(cuda, "set_stream", current.append)
    return SimpleNamespace(side=side, caller=caller, waits=waits, current=current)


def test_given_a_captured_model_that_is_kept_nowhere_else_when_called_then_its_weights_answer_every_shape(
    streams,
):
    net, calls = layers(CPU), []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    frames = [torch.randn(2, 8) for _ in range(3)]
    others = [torch.randn(3, 8), torch.randn(2, 2, 8)]
    with torch.inference_mode():
        expected = [net(frame) for frame in frames + others]
        calls.clear()
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        del net
        gc.collect()
        assert len(calls) == 4  # three to warm up, on a stream of their own, and one to capture
        assert streams.waits == [streams.caller, streams.side]
        for frame, answer in zip(frames, expected, strict=False):
            torch.testing.assert_close(replay(frame), answer)
        assert len(calls) == 4  # the graph alone answered
        for frame, answer in zip(others, expected[3:], strict=True):
            torch.testing.assert_close(replay(frame), answer)  # not captured: the model itself answers
        assert len(calls) == 6


def test_given_a_model_that_waits_for_a_value_when_captured_then_the_error_says_so_and_the_stream_is_the_callers(
    streams,
):
    with pytest.raises(
        CaptureFailed,
        match=r"it cannot be captured as a CUDA graph: test_engine.py:\d+: .*: RuntimeError: operation not permitted",
    ):
        GraphReplay(lambda x: x * float(x.sum()), (torch.ones(3),))
    assert streams.current == [streams.caller]


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
        from torchperf_ros.engines.graph import CaptureFailed, GraphReplay
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
