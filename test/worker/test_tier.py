import time

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


class Engine:
    """Raises what it is told to, one after the other, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.runs = 0

    def __call__(self, x):
        self.runs += 1
        if self.errors:
            error = self.errors.pop(0)
            if error is not None:
                raise error
        return {"y": x * 3.0}


RECOMPILE = RuntimeError(
    "Detected recompile when torch.compile stance is 'fail_on_recompile'. filename: 'm.py', function name: 'forward'\n"
    "    triggered by the following guard failure(s):\n"
    "    - 0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4\n"
    "    - 0/1: tensor 'x' dtype mismatch"
)
WRONG = (ValueError("one"), RuntimeError("two"), KeyError("three"))
X = (torch.ones(1),)


def engine(*errors, model=None, eager=True):
    """A tier on an engine, and what it says."""
    said, call = [], Engine(*errors)
    model = model or Counting()
    tier = Tier(TierFacts("full", "aoti"), Runner(call, graphs=1, package="key"), model if eager else None,
                Device(torch.device("cpu"), 1), said.append)  # fmt: skip
    return tier, call, model, said


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_given_an_engine_that_raises_when_there_is_time_then_eager_answers_that_frame_and_the_engine_the_next():
    tier, call, model, said = engine(WRONG[0])
    assert tier.run(X)[0]["y"].tolist() == [3.0]
    assert (call.runs, model.runs) == (1, 1)
    tier.run(X)
    assert (call.runs, model.runs) == (2, 1)
    report = tier.report()
    assert (report["engine"], report["engine_errors"], report["eager_answers"], report["recompiles"]) == (
        "aoti",
        1,
        1,
        0,
    )
    assert (report["graphs"], report["package"]) == (1, "key")
    assert said == []


@pytest.mark.parametrize(("left_ms", "stands_in"), [(1000.0, True), (100.0, False), (-5.0, False)])
def test_given_an_engine_that_raises_when_the_time_left_is_known_then_eager_answers_only_if_it_fits(left_ms, stands_in):
    tier, _, model, _ = engine(WRONG[0])
    tier._eager_ms = 500.0
    leave_ns = time.monotonic_ns() + int(left_ms * 1e6)
    if stands_in:
        tier.run(X, leave_ns)
    else:
        with pytest.raises(ValueError, match="one"):
            tier.run(X, leave_ns)
    assert model.runs == tier.facts.eager_answers == int(stands_in)


def test_given_a_calibration_when_the_engine_raises_then_eagers_longest_run_is_what_has_to_fit(monkeypatch):
    tier, _, model, _ = engine()
    times_ms, real = iter([40.0, 70.0, 50.0]), tier._timed

    def timed(call, inputs):
        return (None, next(times_ms) * 1e6) if call is model else real(call, inputs)

    monkeypatch.setattr(tier, "_timed", timed)
    tier.calibrate(X)
    assert tier._eager_ms == 70.0


@pytest.mark.parametrize("in_time", [True, False])
def test_given_an_engine_that_raises_three_times_in_a_row_when_run_then_it_is_demoted_and_that_is_said_once(in_time):
    tier, call, model, said = engine(*WRONG)
    leave_ns = 0 if in_time else 1
    for error in WRONG:
        assert tier.facts.engine == "aoti"
        if in_time:
            tier.run(X, leave_ns)
        else:
            with pytest.raises(type(error)):
                tier.run(X, leave_ns)
    assert said == ["tier full runs in eager from now on: aoti raised 3 times in a row, at last KeyError: 'three'"]
    assert tier.facts.engine == "eager"
    assert tier.facts.why == "aoti raised 3 times in a row, at last KeyError: 'three'"
    tier.run(X, leave_ns)
    assert call.runs == 3
    assert len(said) == 1
    assert tier.facts.eager_answers == (3 if in_time else 0)


def test_given_an_engine_that_raises_now_and_then_when_run_then_it_is_not_demoted():
    tier, _, _, said = engine(*(WRONG[0], WRONG[1], None) * 4)
    for _ in range(12):
        tier.run(X)
    assert (tier.facts.engine, tier.facts.engine_errors, said) == ("aoti", 8, [])


def test_given_a_call_that_would_compile_when_run_then_it_is_counted_with_its_guards_and_answered_in_eager():
    tier, _, model, said = engine(*[RECOMPILE] * 5)
    for _ in range(5):
        assert tier.run(X)[0]["y"].tolist() == [3.0]
    facts = tier.facts
    assert (facts.recompiles, facts.engine_errors, facts.eager_answers, model.runs) == (5, 0, 5, 5)
    assert facts.engine == "aoti"
    assert (
        facts.guards == "0/0: tensor 'x' size mismatch at index 0. expected 3, actual 4; 0/1: tensor 'x' dtype mismatch"
    )
    assert said == []


@torch.inference_mode()
def test_given_a_real_compiled_model_when_a_new_size_comes_then_the_guard_is_named(fresh_compiler):
    model = Counting().eval()
    call = torch.compile(model, backend="eager", dynamic=False)
    tier = Tier(TierFacts("full", "compile"), Runner(call), model, Device(torch.device("cpu"), 1), print)
    tier.run((torch.ones(3),))
    torch.compiler.set_stance("fail_on_recompile")
    assert tier.run((torch.ones(4),))[0]["y"].tolist() == [3.0] * 4
    assert tier.facts.recompiles == 1
    assert "size mismatch" in tier.facts.guards or "runs" in tier.facts.guards


def test_given_inputs_that_eager_does_not_take_either_when_run_then_the_engine_is_not_demoted_for_them():
    class Refuses(torch.nn.Module):
        def forward(self, x):
            raise ValueError("eager as well")

    tier, _, _, said = engine(*WRONG, model=Refuses())
    for _ in range(3):
        with pytest.raises(ValueError, match="eager as well"):
            tier.run(X)
    assert (tier.facts.engine, tier.facts.eager_answers, said) == ("aoti", 0, [])


def test_given_no_eager_model_when_the_engine_raises_then_the_error_comes_out_and_it_stays():
    tier, call, _, said = engine(*WRONG, eager=False)
    for error in WRONG:
        with pytest.raises(type(error)):
            tier.run(X)
    tier.run(X)
    assert (call.runs, tier.facts.engine, said) == (4, "aoti", [])


def test_given_an_engine_that_is_out_of_memory_when_run_then_eager_is_not_tried():
    tier, _, model, _ = engine(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        tier.run(X)
    assert (model.runs, tier.facts.engine_errors) == (0, 0)


def test_given_an_eager_tier_when_the_model_raises_then_it_is_not_run_twice():
    class Refuses(Counting):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no")

    model = Refuses()
    tier = eager(model, Device(torch.device("cpu"), 1))
    with pytest.raises(ValueError, match="no"):
        tier.run(X)
    assert model.runs == 1


@pytest.mark.parametrize("briefly", [True, False])
def test_given_an_engine_when_calibrated_then_it_is_the_engine_that_is_measured_and_eager_beside_it(briefly):
    tier, call, model, _ = engine()
    tier.calibrate(X, briefly=briefly)
    assert call.runs == 3 + (5 if briefly else 20)
    assert model.runs == 3
