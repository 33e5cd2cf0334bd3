from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchperf_ros.analysis import model_checklist
from torchperf_ros.analysis.checklist_row import Advice
from torchperf_ros.analysis.model_checklist import ModelCheck
from torchperf_ros.analysis.model_variants import Measurement, Variant
from torchperf_ros.core.build_options import BuildOptions
from torchperf_ros.worker.model_transforms import applies
from torchperf_ros.worker.parity import Parity
from torchperf_ros.worker.stopwatch import Timing

EAGER = BuildOptions()
GOOD = Parity(0.0, 1.0, 0.0)


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)).eval()


class Variants:
    """Stands in for `ModelVariants`: times come out of a rule, and some ways are refused or cannot be made."""

    def __init__(self, ms, refused=None, broken=None, cuda=False, threads=None, dims=None):
        self.model, self.dims = network(), dims or {}
        self.device = SimpleNamespace(is_cuda=cuda, device=torch.device("cpu"))
        self._ms, self._threads = ms, threads or {}
        self._refused, self._broken = refused or (lambda options: False), broken or (lambda options: False)
        self.asked = []

    def get(self, options):
        self.asked.append(options)
        if self._broken(options):
            return Variant(None, refused="RuntimeError: no")
        if self._refused(options):
            return Variant(self.model, Parity(1.0, 0.0, 1.0), "parity: far")
        return Variant(self.model, GOOD)

    def time(self, wanted, seconds):
        made = [options for options in wanted if self.get(options).call is not None]
        return Measurement({options: Timing((float(self._ms(options)),) * 20) for options in made}, 0.01)

    def time_threads(self, counts, options, seconds):
        return Measurement({n: Timing((float(self._threads.get(n, 10.0)),) * 20) for n in counts}, 0.01)

    def time_copies(self, options, seconds):
        return Measurement({False: Timing((2.0,) * 20), True: Timing((1.0,) * 20)}, 0.01)


def checked(variants, now=EAGER, compiled=True):
    said = []
    found = ModelCheck(variants, now, seconds=0.1, compiled=compiled, say=said.append).run()
    assert said
    return found, {row.name: row for row in found.rows}


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Two cores, one thread, and every precision but tf32."""
    monkeypatch.setattr(model_checklist, "thread_counts", lambda: [1, 2, 4])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    half = {"bf16", "fp16"}
    monkeypatch.setattr(
        model_checklist, "applies",
        lambda model, one, device: "" if one.precision in half else applies(model, one, device),
    )  # fmt: skip


def test_given_nothing_that_gains_when_checked_then_nothing_is_to_change():
    found, rows = checked(Variants(lambda options: 10.0))
    assert found.changes == {}
    assert found.after is found.gain is None
    assert {row.advice for row in rows.values()} == {Advice.NOISE, Advice.NONE}
    assert set(rows) == {
        "compile", "aoti", "channels_last", "fold_batch_norm", "cuda_graphs", "tf32", "bf16", "fp16", "int8_weight",
        "int8_dynamic", "1 CPU thread", "2 CPU threads", "4 CPU threads",
    }  # fmt: skip


def test_given_what_does_not_apply_when_checked_then_it_is_neither_made_nor_timed_and_the_reason_is_said():
    variants = Variants(lambda options: 10.0)
    _, rows = checked(variants)
    assert rows["tf32"].why_not == rows["cuda_graphs"].why_not == "CUDA only"
    assert not any(options.precision == "tf32" or options.cuda_graphs for options in variants.asked)


def test_given_a_quicker_engine_when_checked_then_it_is_taken_and_changes_are_measured_in_it():
    found, rows = checked(Variants(lambda options: {"eager": 10.0, "compile": 5.0, "aoti": 4.0}[options.engine]))
    assert found.changes == {"engine": "aoti"}
    assert rows["compile"].verdict == "leave off: aoti gains more"
    assert found.base.engine == "aoti"
    assert (found.before.median_ms, found.after.median_ms) == (10.0, 4.0)


def test_given_an_engine_that_is_on_and_slower_when_checked_then_eager_is_what_to_change_to():
    found, _ = checked(
        Variants(lambda options: {"eager": 10.0, "compile": 12.0, "aoti": 11.0}[options.engine]), BuildOptions("aoti")
    )
    assert found.changes == {"engine": "eager"}


def test_given_an_engine_that_cannot_be_made_when_checked_then_it_is_refused_and_eager_is_what_runs():
    found, rows = checked(Variants(lambda options: 10.0, broken=lambda o: o.engine == "aoti"), BuildOptions("aoti"))
    assert found.running == EAGER
    assert rows["aoti"].verdict == "turn off: RuntimeError: no"
    assert found.changes == {"engine": "eager"}


def test_given_no_compiling_when_checked_then_no_engine_is_made_and_the_engine_stays():
    variants = Variants(lambda options: 10.0 if options.precision == "fp32" else 5.0)
    found, rows = checked(variants, BuildOptions("aoti"), compiled=False)
    assert {options.engine for options in variants.asked} == {"eager"}
    assert rows["aoti"].on
    assert rows["aoti"].verdict == "not measured (--no-compile)"
    assert "engine" not in found.changes


def test_given_a_precision_beyond_parity_when_checked_then_it_is_refused_however_quick():
    found, rows = checked(
        Variants(lambda o: 1.0 if o.precision == "bf16" else 10.0, refused=lambda o: o.precision == "bf16")
    )
    assert rows["bf16"].verdict == "refused: parity: far"
    assert rows["bf16"].parity == Parity(1.0, 0.0, 1.0)
    assert found.changes == {}


def test_given_a_precision_that_is_on_and_beyond_parity_when_checked_then_plain_eager_is_what_runs_and_it_goes():
    found, rows = checked(
        Variants(lambda options: 10.0, refused=lambda o: o.precision == "bf16"), BuildOptions("aoti", precision="bf16")
    )
    assert found.running == EAGER
    assert rows["bf16"].verdict == "turn off: parity: far"
    assert found.changes == {"precision": "fp32"}


def test_given_several_precisions_that_gain_when_checked_then_the_quickest_is_taken():
    found, rows = checked(Variants(lambda o: {"bf16": 6.0, "fp16": 5.0}.get(o.precision, 10.0)))
    assert found.changes == {"precision": "fp16"}
    assert rows["bf16"].verdict == "leave off: fp16 gains more"


def test_given_another_precision_that_is_on_when_checked_then_the_others_are_compared_with_it():
    found, rows = checked(
        Variants(lambda o: {"bf16": 6.0, "fp16": 3.0}.get(o.precision, 10.0)), BuildOptions(precision="bf16")
    )
    assert (rows["bf16"].without.median_ms, rows["bf16"].with_.median_ms) == (10.0, 6.0)
    assert (rows["fp16"].without.median_ms, rows["fp16"].with_.median_ms) == (6.0, 3.0)
    assert found.changes == {"precision": "fp16"}


def both(options):
    return 10.0 - 3.0 * (options.precision == "bf16") - 2.0 * options.channels_last


def test_given_several_changes_when_checked_then_they_are_measured_together():
    found, rows = checked(Variants(both))
    assert found.changes == {"precision": "bf16", "channels_last": True}
    assert rows["all of these"].verdict == "turn on: better than each alone"
    assert (found.before.median_ms, found.after.median_ms) == (10.0, 5.0)


@pytest.mark.parametrize("why", ["slower", "refused", "broken"])
def test_given_changes_that_do_not_go_together_when_checked_then_the_best_alone_is_taken(why):
    def together(options):
        return options.precision == "bf16" and options.channels_last

    found, rows = checked(
        Variants(
            lambda options: 9.0 if together(options) else both(options),
            refused=together if why == "refused" else None,
            broken=together if why == "broken" else None,
        )
    )
    assert found.changes == {"precision": "bf16"}
    assert rows["channels_last"].verdict == "not with bf16"
    assert found.after.median_ms == 7.0


def test_given_what_is_on_and_slower_when_checked_then_it_is_turned_off():
    found, rows = checked(Variants(lambda o: 12.0 if o.fold_batch_norm else 10.0), BuildOptions(fold_batch_norm=True))
    assert rows["fold_batch_norm"].verdict == "turn off: 20 % slower"
    assert found.changes == {"fold_batch_norm": False}
    assert found.after.median_ms == 10.0


@pytest.mark.parametrize(
    ("threads", "changes", "verdict"),
    [
        ({2: 5.0}, {"worker_threads": 2}, "turn on: `worker_threads: 2`"),
        ({2: 20.0}, {}, "leave off: takes 2.0 times as long"),
        ({4: 3.0, 2: 5.0}, {"worker_threads": 2}, "turn on: `worker_threads: 2`"),
    ],
)
def test_given_cpu_threads_when_checked_then_they_are_ruled_and_one_core_stays_the_nodes(threads, changes, verdict):
    found, rows = checked(Variants(lambda options: 10.0, threads=threads))
    assert found.changes == changes
    assert rows["2 CPU threads"].verdict == verdict
    assert rows["1 CPU thread"].verdict == "now"
    if 4 in threads:
        assert rows["4 CPU threads"].verdict == "leave off: no core is left to the node"


def test_given_cuda_when_checked_then_copies_are_measured_and_threads_are_not():
    _, rows = checked(Variants(lambda options: 10.0, cuda=True))
    assert rows["pinned copies"].verdict == "keep on"
    assert not any("thread" in name for name in rows)


def test_given_sizes_that_vary_when_checked_then_cuda_graphs_do_not_apply():
    _, rows = checked(Variants(lambda options: 10.0, dims={0: {0: (1, 8)}}))
    assert rows["cuda_graphs"].why_not == "the adapter's sizes vary"


def test_given_a_checklist_when_written_as_json_then_all_of_it_is_there():
    found, _ = checked(Variants(both), BuildOptions("aoti"))
    written = found.as_dict()
    assert written["now"]["engine"] == "aoti"
    assert written["changes"] == found.changes
    assert len(written["rows"]) == len(found.rows)
    assert written["gain"]["saved"] == pytest.approx(0.5)
