import itertools
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchperf_ros.engines.device import Device, choose_device
from torchperf_ros.engines.engine import Runner
from torchperf_ros.engines.package import Package
from torchperf_ros.worker.tier import EarlySums, InvalidOutput, OutputCheck, Tier
from torchperf_ros.workers.calibration import Calibration
from torchperf_ros.workers.control import TierFacts

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    return Device(choose_device(request.param), threads=1)


def test_given_a_model_when_run_then_outputs_and_time_come_back(device):
    outputs, took_ns = eager(Counting(), device).run((torch.tensor([1.0, 2.0]),))
    assert outputs["y"].tolist() == [3.0, 6.0]
    assert outputs["y"].device.type == device.device.type
    assert took_ns > 0


def test_given_known_times_when_calibrated_then_median_and_p99_are_theirs_without_the_warm_up(
    device, monkeypatch
):
    engine = eager(Counting(), device)
    times_ms = iter([900.0, 900.0, 900.0, *range(1, 21)])
    monkeypatch.setattr(engine, "_timed", lambda inputs: (None, next(times_ms) * 1e6))
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


WRONG = (ValueError("one"), RuntimeError("two"), KeyError("three"))
X = (torch.ones(1),)


def engine(*errors, model=None, eager=True):
    """A tier on an engine, and what it says."""
    said, call = [], Engine(*errors)
    model = model or Counting()
    tier = Tier(
        TierFacts("full", "aoti"),
        Runner(call, graphs=1, package=Package(Path("model.pt2"), "key", None)),
        model if eager else None,
        Device(torch.device("cpu"), 1),
        said.append,
    )
    return tier, call, model, said


def test_given_an_engine_that_raises_when_there_is_time_then_eager_answers_that_frame_and_the_engine_the_next():
    tier, call, model, said = engine(WRONG[0])
    assert tier.run(X)[0]["y"].tolist() == [3.0]
    assert (call.runs, model.runs) == (1, 1)
    tier.run(X)
    assert (call.runs, model.runs) == (2, 1)
    counts = {"engine_errors": 1, "eager_answers": 1, "recompiles": 0, "graphs": 1}
    assert {"engine": "aoti", "package": "key", **counts}.items() <= asdict(tier.report()).items()
    assert said == []


class Slow(Counting):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


def test_given_an_engine_that_raises_when_the_time_left_is_known_then_eager_answers_only_if_its_longest_run_fits():
    tier, call, model, _ = engine(model=Slow())
    tier.calibrate(X)
    for left_s, stands_in in ((60.0, True), (0.04, False), (-0.005, False)):
        call.errors, before = [WRONG[0]], model.runs
        leave_ns = time.monotonic_ns() + int(left_s * 1e9)
        if stands_in:
            tier.run(X, leave_ns)
        else:
            with pytest.raises(ValueError, match="one"):
                tier.run(X, leave_ns)
        assert model.runs - before == int(stands_in)
    assert tier.facts.eager_answers == 1


@pytest.mark.parametrize("in_time", [True, False])
def test_given_an_engine_that_raises_three_times_in_a_row_when_run_then_it_is_demoted_and_that_is_said_once(
    in_time,
):
    tier, call, model, said = engine(*WRONG)
    leave_ns = 0 if in_time else 1
    for error in WRONG:
        assert tier.facts.engine == "aoti"
        if in_time:
            tier.run(X, leave_ns)
        else:
            with pytest.raises(type(error)):
                tier.run(X, leave_ns)
    assert said == [
        "tier full runs in eager from now on: aoti raised 3 times in a row, at last KeyError: 'three'"
    ]
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


@torch.inference_mode()
def test_given_a_real_compiled_model_when_a_new_size_comes_then_the_guard_is_named(fresh_compiler):
    model = Counting().eval()
    call = torch.compile(model, backend="eager", dynamic=False)
    tier = Tier(TierFacts("full", "compile"), Runner(call), model, Device(torch.device("cpu"), 1), print)
    tier.run((torch.ones(3),))
    torch.compiler.set_stance("fail_on_recompile")
    for _ in range(5):
        assert tier.run((torch.ones(4),))[0]["y"].tolist() == [3.0] * 4
    facts = tier.facts
    assert (facts.recompiles, facts.engine_errors, facts.eager_answers) == (5, 0, 5)
    assert facts.engine == "compile"  # it is not demoted
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


def test_given_what_another_worker_measured_when_calibrated_then_it_only_warms_up():
    tier, call, _, _ = engine()
    assert tier.calibrate(X, known=Calibration(3.0, 4.0)) == Calibration(3.0, 4.0)
    assert call.runs == 3


@pytest.mark.parametrize("briefly", [True, False])
def test_given_an_engine_when_calibrated_then_it_is_the_engine_that_is_measured_and_eager_beside_it(
    briefly,
):
    tier, call, model, _ = engine()
    calibration = tier.calibrate(X, briefly=briefly)
    assert 0 < calibration.median_ms <= calibration.p99_ms
    assert call.runs == 3 + (5 if briefly else 20)
    assert model.runs == 3


def test_given_an_engine_that_runs_out_of_memory_again_and_again_when_run_then_it_says_so_and_stays(
    monkeypatch,
):
    errors = [RuntimeError("run_func_(...) API call failed")] * 3  # as one arrives inside of a package
    tier, call, model, said = engine(*errors, torch.OutOfMemoryError("API call failed"))
    monkeypatch.setattr(tier.device, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_ooms": call.runs})
    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError, match="API call failed"):
            tier.run(X)
    assert tier.run(X)[0]["y"].tolist() == [3.0]
    assert (tier.report().engine, model.runs, said) == ("aoti", 0, [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("values", "bad"), [([1.0, math.nan, 2.0], 1), ([1.0, -math.inf, 2.0], 1), ([math.inf, -math.inf], 2)]
)
def test_given_values_that_are_no_numbers_then_the_error_counts_them_and_names_the_output(
    values, bad, dtype
):
    check = OutputCheck((torch.zeros(2), torch.zeros(len(values), dtype=dtype)), fixed_sizes=True)
    with pytest.raises(
        InvalidOutput, match=f"output 1 has {bad} of {len(values)} values that are NaN or Inf"
    ):
        check.check((torch.ones(2), torch.tensor(values, dtype=dtype)))


def test_given_large_finite_values_when_their_sum_overflows_then_they_pass():
    for values in (torch.full((4,), 3e38), torch.full((4,), 6e4, dtype=torch.float16)):
        OutputCheck(torch.zeros_like(values), fixed_sizes=True).check(values)


@pytest.mark.parametrize(
    "outputs",
    [
        torch.zeros(3),
        torch.zeros(2, 1),
        torch.zeros(2, dtype=torch.float64),
        (torch.zeros(2), torch.zeros(2)),
        None,
    ],
    ids=["size", "rank", "type", "more", "nothing"],
)
def test_given_another_signature_than_calibrated_when_checked_then_the_error_shows_both(outputs):
    with pytest.raises(InvalidOutput, match=r"on the example inputs float32 \(2,\)"):
        OutputCheck(torch.zeros(2), fixed_sizes=True).check(outputs)


def test_given_dynamic_dimensions_when_sizes_differ_then_only_rank_and_type_count():
    check = OutputCheck(torch.zeros(2, 5), fixed_sizes=False)
    check.check(torch.zeros(7, 5))
    check.check(torch.zeros(0, 5))
    for wrong in (torch.zeros(7), torch.zeros(7, 5, dtype=torch.int32)):
        with pytest.raises(InvalidOutput):
            check.check(wrong)


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(width=16), max_size=9), max_size=4), st.sampled_from(FLOATS))
def test_given_any_values_when_summed_early_then_just_outputs_of_finite_numbers_are_known_to_be(
    rows, dtype
):
    sums, finite = EarlySums(torch.device("cpu")), all(map(math.isfinite, itertools.chain(*rows)))
    sums.begin({"rows": [torch.tensor(row, dtype=dtype) for row in rows], "labels": torch.arange(3)})
    assert sums.are_finite() is (finite and bool(rows))  # of none nothing is known


@pytest.mark.parametrize(
    "outputs",
    [
        np.array([math.nan]),
        torch.tensor([math.nan], dtype=torch.complex64),
        torch.tensor([math.nan]).to(torch.float8_e4m3fn),
        torch.tensor([math.nan]).to_sparse(),
        [torch.tensor([math.nan])] * 33,
        torch.ones(3, device="meta"),
        object(),  # as what a generator gives at its end
    ],
    ids=["numpy", "complex", "float8", "sparse", "many", "elsewhere", "no tensors"],
)
def test_given_outputs_that_are_not_summed_early_when_asked_then_nothing_is_known_also_after_good_ones(
    outputs,
):
    sums = EarlySums(torch.device("cpu"))
    sums.begin(torch.ones(3))
    assert sums.are_finite()
    sums.begin(outputs)
    assert not sums.are_finite()


@pytest.mark.parametrize("anytime", [False, True])
@torch.inference_mode()
def test_given_outputs_of_a_run_when_checked_then_just_the_ones_with_nan_are_refused_on_either_device(
    device, anytime
):
    model = Counting().eval().to(device.device)
    tier = Tier(
        TierFacts("full", "eager"), Runner(model), model, device, print, steps=lambda x: iter([model(*x)])
    )
    check = OutputCheck(model(torch.ones(2, device=device.device)), fixed_sizes=True)
    for values, good in (
        ((1.0, 2.0), True),
        ((1.0, math.nan), False),
        ((3e38, 3e38), False),
        ((0.0, 0.5), True),
    ):
        inputs = (torch.tensor(values),)
        outputs, _ = next(tier.steps(inputs)) if anytime else tier.run(inputs)
        assert tier.is_finite is (good and device.is_cuda)
        if good:
            check.check(outputs, is_finite=tier.is_finite)
        else:
            with pytest.raises(InvalidOutput, match="NaN or Inf"):
                check.check(outputs, is_finite=tier.is_finite)


def test_given_numbers_that_are_known_to_be_finite_when_checked_then_shapes_and_plain_numbers_count_still():
    check = OutputCheck((torch.zeros(2), 1.0), fixed_sizes=True)
    check.check((torch.ones(2), 2.0), is_finite=True)
    for wrong in ((torch.ones(3), 2.0), (torch.ones(2), math.nan)):
        with pytest.raises(InvalidOutput):
            check.check(wrong, is_finite=True)


@settings(deadline=None)
@given(st.lists(st.floats(width=32), max_size=20))
def test_given_any_values_when_checked_then_just_the_finite_ones_pass(values):
    check = OutputCheck(torch.zeros(len(values)), fixed_sizes=True)
    if all(map(math.isfinite, values)):
        check.check(torch.tensor(values))
    else:
        with pytest.raises(InvalidOutput, match="NaN or Inf"):
            check.check(torch.tensor(values))
