import pytest
import torch

from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.core.errors import ConfigError
from torchperf_ros.worker.engine import make_runner
from torchperf_ros.worker.graph_replay import GraphReplay

CPU = torch.device("cpu")


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    return torch.device("cuda", 0)


def model(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval().to(device)


def test_given_the_cpu_when_a_cuda_graph_is_asked_for_then_the_error_names_parameter_and_device():
    with pytest.raises(ConfigError, match="parameter cuda_graphs: true is for CUDA; the device here is cpu"):
        make_runner(model(CPU), BuildOptions(cuda_graphs=True), (torch.zeros(1, 8),), {}, CPU)


@pytest.mark.gpu
def test_given_a_captured_model_when_replayed_then_each_result_is_that_of_its_own_input(cuda):
    net = model(cuda)
    with torch.inference_mode():
        replay = GraphReplay(net, (torch.zeros(2, 8, device=cuda),))
        for seed in range(3):
            inputs = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed)).to(cuda)
            assert torch.allclose(replay(inputs), net(inputs), atol=1e-5)


@pytest.mark.gpu
def test_given_a_captured_model_when_called_with_another_shape_or_type_then_it_is_refused(cuda):
    with torch.inference_mode():
        replay = GraphReplay(model(cuda), (torch.zeros(2, 8, device=cuda),))
        for other in (torch.zeros(3, 8, device=cuda), torch.zeros(2, 8, device=cuda, dtype=torch.float16)):
            with pytest.raises(RuntimeError, match="a CUDA graph for torch.float32"):
                replay(other)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "aoti"])
def test_given_cuda_graphs_with_an_engine_when_made_then_it_agrees_with_eager(cuda, engine):
    net, inputs = model(cuda), torch.randn(2, 8, device=cuda)
    runner = make_runner(
        net, BuildOptions(engine=engine, cuda_graphs=True), (torch.zeros(2, 8, device=cuda),), {}, cuda
    )
    with torch.inference_mode():
        assert torch.allclose(runner.call(inputs), net(inputs), atol=1e-4)
