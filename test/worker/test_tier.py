import pytest
import torch

from torchperf_ros.worker.device import Device
from torchperf_ros.worker.engine import Runner
from torchperf_ros.worker.tier import Tier, TierFacts


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return {"y": x * self.weight}


def eager(model, device):
    model = model.eval().to(device.device)
    return Tier(TierFacts("full", "eager"), Runner(model), model, device, print)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    before = torch.get_num_threads()
    yield Device(torch.device(request.param), threads=1)
    torch.set_num_threads(before)


def test_given_a_model_when_run_then_outputs_and_time_come_back(device):
    engine = eager(Counting(), device)
    outputs, took_ns = engine.run((torch.tensor([1.0, 2.0]),))
    assert outputs["y"].tolist() == [3.0, 6.0]
    assert outputs["y"].device.type == device.device.type
    assert took_ns > 0


def test_given_a_model_in_training_mode_when_taken_then_it_is_in_eval_mode(device):
    model = torch.nn.Sequential(torch.nn.Dropout(0.5)).train()
    outputs, _ = eager(model, device).run((torch.ones(100),))
    assert outputs.tolist() == [1.0] * 100


def test_given_a_fast_model_when_calibrated_then_it_was_warmed_up_and_measured_a_bounded_number_of_times(device):
    model = Counting()
    calibration = eager(model, device).calibrate((torch.ones(1),))
    assert model.runs == 3 + 20
    assert 0 < calibration.median_ms <= calibration.p99_ms


def test_given_a_slow_model_when_calibrated_then_five_runs_are_enough(device, monkeypatch):
    monkeypatch.setattr("torchperf_ros.worker.tier._CALIBRATION_SECONDS", 0.0)
    model = Counting()
    eager(model, device).calibrate((torch.ones(1),))
    assert model.runs == 3 + 5


def test_given_known_times_when_calibrated_then_median_and_p99_are_theirs_and_the_warm_up_does_not_count(
    device, monkeypatch
):
    engine = eager(Counting(), device)
    times_ms = iter([900.0, 900.0, 900.0, *range(1, 21)])
    monkeypatch.setattr(engine, "_timed", lambda call, inputs: (None, next(times_ms) * 1e6))
    calibration = engine.calibrate((torch.ones(1),))
    assert calibration.median_ms == 10.5
    assert calibration.p99_ms == pytest.approx(19.81)
