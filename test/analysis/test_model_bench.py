import csv
import io
import json
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from torchperf_ros.analysis import bench_measure
from torchperf_ros.analysis.bench_case import Case, Result
from torchperf_ros.analysis.bench_report import bench_csv, bench_table, start_table
from torchperf_ros.analysis.model_bench import ModelBench
from torchperf_ros.cli import app
from torchperf_ros.core.errors import AdapterError
from torchperf_ros.worker.engine import Runner
from torchperf_ros.worker.stopwatch import Timing

FOLDER = str(Path(__file__).parent)
ADAPTER = "adapter_under_bench:Bench"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FOLDER)

    def make(tiers, batches=(1,), engines=("eager",), **changes):
        settings = {"adapter": ADAPTER, "options": {}, "seconds": 0.02, "timeout_s": 100.0, **changes}
        return ModelBench(device="cpu", tiers=tiers, batches=batches, engines=engines, **settings)

    return make


@pytest.fixture
def measure(monkeypatch):
    """Measure a case in this process."""
    monkeypatch.syspath_prepend(FOLDER)
    threads = torch.get_num_threads()

    def run(batch=1, engine="eager", tier="full", **options):
        job = {
            "adapter": ADAPTER, "options": options, "device": "cpu", "seconds": 0.0, "started_ns": 0,
            "tier": tier, "batch": batch, "engine": engine,
        }  # fmt: skip
        return bench_measure.measure_case(job, lambda text: None)

    yield run
    torch.set_num_threads(threads)


def test_given_tiers_batches_and_engines_when_combined_then_what_is_compared_comes_together(bench):
    cases = bench(["full", "fast"], [1, 2], ["eager", "aoti"]).cases
    assert len(cases) == 8
    assert cases[:3] == [Case("full", 1, "eager"), Case("full", 1, "aoti"), Case("full", 2, "eager")]


def test_given_real_processes_when_measured_then_there_are_figures_or_the_reason_why_not(bench):
    said = []
    full, five = bench(["full"], [2, 5]).run(lambda case, text: said.append((case.batch, text)))
    assert full.error == ""
    figures = full.figures
    assert 0.3 < figures.cold_start_s < 100  # Python and torch were loaded in it
    assert 0 < figures.p50_ms <= figures.p95_ms <= figures.p99_ms <= figures.max_ms
    assert figures.items_per_s == pytest.approx(2000 / figures.p50_ms, rel=0.9)
    assert 50 < figures.peak_mib < 2000
    assert (figures.relative_l2, figures.cosine, figures.compile_s) == (0.0, 1.0, 0.0)
    assert 3 <= len(figures.warm_up_ms) <= 30
    assert five == Result(Case("full", 5, "eager"), None, "ValueError: no more than 4 at once")
    assert (2, "loading") in said
    assert (5, "the first call") in said


def test_given_a_process_that_dies_when_measured_then_the_signal_is_the_reason_and_the_next_case_is_measured(bench):
    died, full = bench(["dies", "full"]).run(lambda case, text: None)
    assert signal.SIGSEGV.name in died.error
    assert full.figures is not None


def test_given_a_process_that_hangs_when_measured_then_it_is_given_up(bench):
    (hung,) = bench(["hangs"], timeout_s=4.0).run(lambda case, text: None)
    assert hung.error == "not done after 4 s"


def test_given_an_adapter_that_raises_when_measured_then_there_is_nothing_to_go_on_with(bench):
    with pytest.raises(AdapterError, match="tier 'raises': RuntimeError: no weights"):
        list(bench(["raises", "full"]).run(lambda case, text: None))


def test_given_a_tier_that_is_no_module_when_measured_then_it_says_what_it_is(measure):
    with pytest.raises(AdapterError, match=r"build\('none'\) gave a NoneType"):
        measure(tier="none")


def test_given_a_batch_outside_what_the_adapter_allows_when_measured_then_both_are_named(measure):
    with pytest.raises(bench_measure.CaseFailed, match=r"batch 3 is outside 1\.\.2"):
        measure(batch=3, batches=[1, 2])


def test_given_an_engine_with_other_outputs_when_measured_then_it_is_refused(measure, monkeypatch):
    def wrong(model, options, example, dims, device):
        return Runner(lambda *inputs: {"y": model(*inputs)["y"] * 1.5})

    monkeypatch.setattr(bench_measure, "make_runner", wrong)
    with pytest.raises(bench_measure.CaseFailed, match="parity: outputs differ from eager's"):
        measure(engine="aoti")


def test_given_a_case_when_measured_then_only_inputs_with_the_batch_get_it_and_eager_is_timed_beside(
    measure, monkeypatch
):
    seen = {}

    def make_runner(model, options, example, dims, device):
        seen.update(engine=options.engine, shapes=[tuple(tensor.shape) for tensor in example])
        return Runner(model, compile_s=9.0)

    known = {"aoti": (2.0, 4.0), "eager": (6.0, 6.0), "reference": (2.0, 2.0)}

    def time_interleaved(candidates, device, *, seconds):
        return {name: Timing(known[name]) for name in candidates}

    monkeypatch.setattr(bench_measure, "make_runner", make_runner)
    monkeypatch.setattr(bench_measure, "time_interleaved", time_interleaved)
    figures = measure(batch=4, engine="aoti")
    assert seen == {"engine": "aoti", "shapes": [(4, 8), (3,)]}
    assert figures["compile_s"] == 9.0
    assert (figures["p50_ms"], figures["eager_p50_ms"], figures["max_ms"]) == (3.0, 6.0, 4.0)
    assert (figures["reference_p50_ms"], figures["reference_batch"]) == (2.0, 1)
    assert figures["items_per_s"] == pytest.approx(4 / 0.003)
    assert figures["cold_start_s"] > 0


def test_given_results_when_shown_then_tables_fit_100_columns_and_name_every_case(make_figures):
    results = [
        Result(Case("medium", 16, "compile"), make_figures(123.456, warm_up_ms=(900.0, 130.0))),
        Result(Case("medium", 16, "aoti"), None, "why"),
    ]
    console = Console(width=100, file=io.StringIO())
    console.print(bench_table(results))
    console.print(start_table(results))
    text = console.file.getvalue()
    assert "…" not in text
    assert "none" in text
    assert "900" in text
    assert max(map(len, text.splitlines())) <= 100


def test_given_results_when_written_as_csv_then_a_case_without_figures_keeps_its_line(make_figures):
    results = [Result(Case("full", 1, "aoti"), None, "why"), Result(Case("full", 1, "eager"), make_figures())]
    rows = list(csv.DictReader(io.StringIO(bench_csv(results))))
    assert (rows[0]["error"], rows[0]["p50_ms"]) == ("why", "")
    assert rows[1]["p50_ms"] == "10.0"
    assert rows[1]["warm_up_ms"].split()[:2] == ["10.0", "10.0"]


def test_given_the_command_when_run_then_lines_of_json_files_and_exit_status_say_what_came_out(
    monkeypatch, make_figures, tmp_path
):
    results = [Result(Case("full", 1, "eager"), make_figures()), Result(Case("full", 1, "aoti"), None, "why")]
    asked = []
    monkeypatch.setattr(ModelBench, "run", lambda self, on_step: asked.append(self) or iter(results))
    command = ["bench", "model", "--adapter", ADAPTER, "--tier", "full", "--batch", "2,1", "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, "--json", "--engines", "aoti,eager", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1  # one case has no figures
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("engine") for line in lines] == ["eager", "aoti", None]
    assert lines[2]["advice"] == ["full, batch 1: aoti was left out: why"]
    assert (asked[0].batches, asked[0].engines) == ([1, 2], ["eager", "aoti"])
    assert len(json.loads((tmp_path / "out" / "model.json").read_text())["results"]) == 2
    assert (tmp_path / "out" / "model.csv").is_file()
    done = CliRunner().invoke(app, command)
    assert "- full, batch 1: aoti was left out: why" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--adapter'"),
        (["--adapter", "nothing"], "does not have the form module:Class"),
        (["--adapter", ADAPTER, "--batch", "0"], "'0': batch sizes from 1 to 1000"),
        (["--adapter", ADAPTER, "--engines", "onnx"], "engines 'onnx': eager, compile, aoti"),
        (["--adapter", ADAPTER, "--options", "[1]"], "options '[1]': it has to be a JSON object"),
        (["--adapter", ADAPTER, "--options", "{"], "options '{': "),
        (["--adapter", ADAPTER, "--device", "tpu"], "'tpu': auto, cpu, cuda or cuda:N"),
    ],
)
def test_given_input_that_cannot_be_used_when_asked_then_it_says_so_and_exits_with_2(arguments, message, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert done.exit_code == 2
    assert message in done.output
