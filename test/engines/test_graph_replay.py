import gc
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch

from torchperf_ros.config.build_options import BuildOptions
from torchperf_ros.engines.built_tier import BuiltTier
from torchperf_ros.engines.engine import GraphReplay, make_runner
from torchperf_ros.frame.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval().to(device)


def test_given_the_cpu_when_a_cuda_graph_is_asked_for_then_the_error_names_parameter_and_device():
    with pytest.raises(ConfigError, match="parameter cuda_graphs: true is for CUDA; the device here is cpu"):
        make_runner(BuiltTier(model(CPU), (torch.zeros(1, 8),), {}, CPU), BuildOptions(cuda_graphs=True))


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr("torchperf_ros.engines.engine._capture", record)


def record(call, inputs):
    """A capture as a GPU does it: what is replayed knows where weights lie, and keeps nothing alive."""
    there, outputs = weakref.ref(call), call(*inputs)
    return lambda: outputs.copy_(there()(*inputs)), outputs


def test_given_a_captured_model_that_nobody_else_keeps_when_called_then_its_weights_answer_every_shape(recorded):
    net, inputs, other = model(CPU), torch.randn(2, 8), torch.randn(3, 8)
    with torch.inference_mode():
        expected, of_other = net(inputs), net(other)
        replay = GraphReplay(net, (torch.zeros(2, 8),))
        del net
        gc.collect()
        assert torch.equal(replay(inputs), expected)
        assert torch.equal(replay(other), of_other)  # not captured: the model itself answers


@pytest.mark.gpu
def test_given_a_captured_model_when_replayed_then_each_result_is_that_of_its_own_input():
    net = model(CUDA)
    with torch.inference_mode():
        replay = GraphReplay(net, (torch.zeros(2, 8, device=CUDA),))
        for seed in range(3):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(CUDA)
            assert torch.allclose(replay(inputs), net(inputs), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "aoti"])
def test_given_cuda_graphs_with_an_engine_when_made_then_it_agrees_with_eager(engine):
    """The memory that the captured copy's weights had is written to; the graph still has to read its weights."""
    net, inputs = model(CUDA), torch.randn(2, 8, device=CUDA)
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
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("it cannot be captured as a CUDA graph: "), done.stderr
