"""The curve of launch-bound chains: the chains, the choice of auto, the targets, and what is written."""

import csv
import functools
import json
import math
import sys

import pytest
import torch
from PIL import Image

from benchmarks import curve as command
from benchmarks.rig import chains
from benchmarks.rig.chains import (
    REFERENCE,
    CurvePoint,
    build_chain,
    chain_inputs,
    make_chain,
    measure_curve,
)
from torchperf_ros.engines import file_engines
from torchperf_ros.engines.device import Timing
from torchperf_ros.engines.parity import ParityError

CPU = torch.device("cpu")


def test_given_a_chain_of_three_when_run_then_it_is_the_sum_of_half_the_sine_of_one_more():
    x = torch.randn(4, 16)
    assert make_chain(3)(x).item() == pytest.approx((torch.sin(x + 1) * 0.5).sum().item())


@pytest.mark.parametrize("length", [1, 9, 10, 30])
def test_given_a_length_when_written_out_then_it_has_that_many_operations_and_a_finite_sum_at_every_size(
    length,
):
    chain = make_chain(length)
    assert len([node for node in chain.graph.nodes if node.op.startswith("call")]) == length + 1
    assert [tuple(x.shape) for x in chain_inputs(CPU)] == [(size, 16) for size in range(4, 14)]
    assert all(math.isfinite(chain(x).item()) for x in chain_inputs(CPU))
    assert chain.forward.__code__ is not make_chain(length).forward.__code__


@pytest.fixture
def timings(monkeypatch):
    """What the stopwatch finds by round (calibration, report) and candidate, and what it was given."""
    given = []

    def fill(*rounds):
        found = iter(rounds)

        def time_interleaved(candidates, device, *, seconds):
            given.append((dict(candidates), seconds))
            times_ms = next(found)
            return {name: Timing((times_ms(name),)) for name in candidates}

        monkeypatch.setattr(chains, "time_interleaved", time_interleaved)
        return given

    return fill


@pytest.fixture
def makers(monkeypatch):
    """Engines that are all eager, so that nothing has to be compiled."""
    makers = dict.fromkeys(chains.MAKERS, chains.MAKERS[chains.EAGER])
    monkeypatch.setattr(chains, "MAKERS", makers)
    return makers


@pytest.mark.usefixtures("makers")
def test_given_measurements_when_the_curve_is_made_then_auto_is_chosen_from_the_calibration_and_reported_from_the_rest(
    timings,
):
    calibration = {"eager 1": 1.0, "dynamic 1": 0.99, "eager 30": 9.0, "aoti-dynamic 30": 1.0}
    report = {"eager 1": 2.0, "auto 1": 2.1, "eager 30": 8.0, "aoti-dynamic 30": 4.0, "auto 30": 3.2}
    given = timings(lambda name: calibration.get(name, 50.0), lambda name: report.get(name, 16.0))
    curve = measure_curve([1, 30], CPU, seconds=2.0, on_step=lambda text: None)
    at = {(point.length, point.engine): point for point in curve}
    assert list(at) == [
        (n, engine) for n in (1, 30) for engine in ("eager", "static", "dynamic", "aoti-dynamic", "auto")
    ]
    assert at[1, "auto"].runs == "eager"  # 1 % is a tie
    assert at[30, "auto"].runs == "aoti-dynamic"
    assert at[30, "auto"].times_eager == 2.5
    assert at[30, "auto"].median_us == pytest.approx(320.0)  # a pass is ten calls
    assert (at[1, "static"].times_eager, at[1, "static"].reference) == (0.125, 0.35)
    (calibrated, short), (reported, long) = given
    assert (short, long) == (0.8, 2.0)
    assert set(reported) - set(calibrated) == {"auto 1", "auto 30"}
    assert reported["auto 30"] is reported["aoti-dynamic 30"]  # nothing in between that would cost time


def test_given_an_engine_that_cannot_be_built_when_measured_then_the_others_are_and_its_error_is_named(
    timings, makers
):
    def fails(chain, inputs, path):
        raise RuntimeError("no C++ compiler\nand much more")

    makers["aoti-dynamic"] = fails
    timings(lambda name: 1.0, lambda name: 1.0)
    found = {
        point.engine: point for point in measure_curve([5], CPU, seconds=1.0, on_step=lambda what: None)
    }
    assert found["aoti-dynamic"].error == "RuntimeError: no C++ compiler"
    assert (found["dynamic"].error, found["auto"].runs) == ("", "eager")


def test_given_an_engine_that_computes_something_else_when_built_then_it_is_refused(makers, tmp_path):
    makers["static"] = lambda chain, inputs, path: lambda x: chain.forward(x) * 1.1
    with pytest.raises(ParityError, match="outputs differ from eager's"):
        build_chain("static", 5, CPU, tmp_path)


@pytest.mark.parametrize("engine", ["static", "dynamic", "aoti-dynamic"])
def test_given_a_real_engine_when_built_then_it_agrees_with_eager_at_every_size(
    engine, tmp_path, monkeypatch
):
    # not compiled, but exported for every size, kept as a file and loaded again: compiling is the tests of
    # engines' own
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, package_path, inductor_configs: torch.export.save(program, package_path),
    )
    monkeypatch.setattr(file_engines, "check_linked", lambda file: None)
    for module in (file_engines, chains):
        monkeypatch.setattr(module, "load_package", lambda path, device: torch.export.load(path).module())
    with torch.inference_mode():
        build_chain(engine, 2, CPU, tmp_path)  # compares them


@pytest.mark.gpu
def test_given_cuda_when_built_as_graphs_then_they_agree_with_eager_at_every_size(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("torch.cuda is not available")
    with torch.inference_mode():
        build_chain("graphs", 5, torch.device("cuda", 0), tmp_path)


def curve_of(*autos, lengths=(1, 30), failed=""):
    """`auto` runs aoti-dynamic, as many times faster than eager at each length as is given."""
    points = []
    for n, ratio in zip(lengths, autos, strict=True):
        for engine, times in {"eager": 1.0, "static": 0.5, "aoti-dynamic": ratio, "auto": ratio}.items():
            error = "CppCompileError: no compiler" if engine == failed else ""
            us = math.nan if error else 2.0 * n / times
            runs = "aoti-dynamic" if engine == "auto" else engine
            reference = REFERENCE.get(engine, {}).get(n)
            points.append(CurvePoint(n, engine, runs, us, 2 * us, times, reference, 9.5, error))
    return points


@pytest.mark.parametrize(
    ("autos", "met"),
    [
        ((1.0, 5.3), [True, True]),
        ((0.96, 9.0), [True, True]),  # 4 % slower
        ((0.94, 9.0), [False, True]),
        ((1.0, 5.29), [True, False]),
    ],
)
def test_given_a_curve_when_judged_then_each_target_is_met_or_missed_by_its_figures(autos, met):
    assert [target.met for target in command.curve_targets(curve_of(*autos))] == met
    assert len(command.curve_targets(curve_of(2.0, lengths=(10,)))) == 1


@pytest.fixture
def bench(monkeypatch):
    """Runs `bench curve` with figures that are given."""

    def run(curve, *arguments):
        monkeypatch.setattr(sys, "argv", ["curve", "--device", "cpu", *map(str, arguments)])
        monkeypatch.setattr(command, "measure_curve", lambda lengths, device, *, seconds, on_step: curve)
        return command.main()

    return run


def test_given_a_run_when_done_then_tables_csv_json_and_a_picture_are_there(bench, tmp_path, capsys):
    folder, file = tmp_path / "new" / "curve", tmp_path / "curve.json"
    assert bench(curve_of(1.5, 12.0, failed="static"), "--n", "30, 1,1", "-o", folder, "--json", file) == 0
    said = capsys.readouterr().out
    assert "12.00" in said
    assert "n = 30, static: CppCompileError: no compiler" in said
    rows = list(csv.DictReader((folder / "curve.csv").read_text().splitlines()))
    assert len(rows) == 8
    assert (rows[1]["engine"], rows[1]["median_us"], rows[1]["reference"]) == ("static", "", "0.35")
    report = json.loads(file.read_text())
    assert [target["met"] for target in report["targets"]] == [True, True]
    assert len(report["figures"]["points"]) == 8
    assert report["parameters"]["n"] == [1, 30]
    with Image.open(folder / "curve.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50  # lines of several colours
    assert bench(curve_of(0.5, 12.0)) == 1


@pytest.mark.parametrize(
    "arguments", [["--n", "0"], ["--n", "1,two"], ["--device", "tpu"], ["-o", "/dev/null/x"]]
)
def test_given_input_that_cannot_be_used_when_asked_then_the_status_is_2(bench, arguments):
    with pytest.raises(SystemExit, match="2"):
        bench([], *arguments)
