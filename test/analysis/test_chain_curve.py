import pytest
import torch

from torchperf_ros.analysis import chain_curve, chain_engines
from torchperf_ros.analysis.chain import chain_inputs, make_chain
from torchperf_ros.analysis.chain_curve import measure_curve, steps
from torchperf_ros.analysis.chain_engines import build_chain
from torchperf_ros.analysis.chain_engines import chain_engines as engines_of
from torchperf_ros.worker.parity import ParityError
from torchperf_ros.worker.stopwatch import Timing

CPU = torch.device("cpu")


@pytest.fixture
def timings(monkeypatch):
    """What the stopwatch finds, by round (the calibration, the report) and candidate, and what it was given."""
    given = []

    def fill(*rounds):
        found = iter(rounds)

        def time_interleaved(candidates, device, *, seconds):
            given.append((dict(candidates), seconds))
            times_ms = next(found)
            return {name: Timing((times_ms(name),)) for name in candidates}

        monkeypatch.setattr(chain_curve, "time_interleaved", time_interleaved)
        return given

    return fill


@pytest.fixture
def not_compiled(monkeypatch):
    """Engines that are all eager, so that nothing has to be compiled."""
    makers = dict.fromkeys(chain_engines._MAKERS, chain_engines._eager)
    monkeypatch.setattr(chain_engines, "_MAKERS", makers)
    return makers


@pytest.mark.usefixtures("not_compiled")
def test_given_measurements_when_the_curve_is_made_then_auto_is_chosen_from_the_calibration_and_reported_from_the_rest(
    timings,
):
    calibration = {"eager 1": 1.0, "dynamic 1": 0.99, "eager 30": 9.0, "aoti-dynamic 30": 1.0}
    report = {"eager 1": 2.0, "auto 1": 2.1, "eager 30": 8.0, "aoti-dynamic 30": 4.0, "auto 30": 3.2}
    given = timings(lambda name: calibration.get(name, 50.0), lambda name: report.get(name, 16.0))
    said = []
    curve = measure_curve([1, 30], CPU, seconds=2.0, on_step=said.append)
    assert curve.at(1, "auto").runs == "eager"  # 1 % is a tie
    assert curve.at(30, "auto").runs == "aoti-dynamic"
    assert curve.at(30, "auto").times_eager == 2.5
    assert curve.at(30, "aoti-dynamic").times_eager == 2.0
    assert curve.at(30, "auto").median_us == pytest.approx(320.0)  # a pass is ten calls
    assert curve.at(1, "static").times_eager == 0.125
    assert curve.at(1, "static").reference == 0.35
    assert curve.at(1, "aoti-dynamic").reference is None
    (calibrated, short), (reported, long) = given
    assert (short, long) == (0.8, 2.0)
    assert set(reported) - set(calibrated) == {"auto 1", "auto 30"}
    assert reported["auto 30"] is reported["aoti-dynamic 30"]  # nothing in between that would cost time
    assert curve.lengths == [1, 30]
    assert curve.engines == ["eager", "static", "dynamic", "aoti-dynamic", "auto"]
    assert len(said) == steps([1, 30], CPU) == 10


def test_given_an_engine_that_cannot_be_built_when_measured_then_the_others_are_and_its_error_is_named(
    timings, not_compiled
):
    def fails(chain, inputs, path):
        raise RuntimeError("no C++ compiler\nand much more")

    not_compiled["aoti-dynamic"] = fails
    timings(lambda name: 1.0, lambda name: 1.0)
    curve = measure_curve([5], CPU, seconds=1.0, on_step=lambda what: None)
    assert curve.at(5, "aoti-dynamic").error == "RuntimeError: no C++ compiler"
    assert curve.at(5, "dynamic").error == ""
    assert curve.at(5, "auto").runs == "eager"


def test_given_an_engine_that_computes_something_else_when_built_then_it_is_refused(not_compiled, tmp_path):
    not_compiled["static"] = lambda chain, inputs, path: lambda x: chain.forward(x) * 1.1
    with pytest.raises(ParityError, match="outputs differ from eager's"):
        build_chain("static", 5, CPU, tmp_path)


@pytest.mark.usefixtures("not_compiled")
def test_given_threads_when_measured_then_it_is_one_and_then_as_before(timings, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []
    timings(lambda name: seen.append(torch.get_num_threads()) or 1.0, lambda name: 1.0)
    measure_curve([1], CPU, seconds=1.0, on_step=lambda what: None)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("engine", engines_of(CPU))
def test_given_a_real_engine_when_built_then_it_agrees_with_eager_at_every_size(engine, tmp_path, monkeypatch):
    ends = [chain_inputs(CPU)[0], chain_inputs(CPU)[-1]]  # each further size takes static a second
    monkeypatch.setattr(chain_engines, "chain_inputs", lambda device: ends)
    expected = make_chain(2)
    with torch.inference_mode():
        call = build_chain(engine, 2, CPU, tmp_path)
        for x in ends if engine == "static" else chain_inputs(CPU):
            assert call(x).item() == pytest.approx(expected(x).item(), rel=1e-5)


@pytest.mark.gpu
def test_given_cuda_when_built_as_graphs_then_they_agree_with_eager_at_every_size(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    with torch.inference_mode():
        build_chain("graphs", 5, torch.device("cuda", 0), tmp_path)
