from dataclasses import replace

import pytest

from torchperf_ros.settings.build_options import (
    INT8_PRECISIONS,
    MOST_SHAPES,
    BuildOptions,
    bucket_count,
    bucket_width,
)
from torchperf_ros.tools.tune.space import TuneSpace, planned
from torchperf_ros.tools.tune.trial import Facts, Limits, TrialOutcome, TuneCandidate, TuneTrial

from .conftest import figures

NO_CUDA = {"tf32": "CUDA only", "graph": "runs on cuda"}
CPU = Facts("id", cuda=False, machine="cpu", threads=3, cores=4, left_out=NO_CUDA)
CUDA = replace(CPU, cuda=True, left_out={"int8_static": "CPU only"})
LIMITS = Limits(budget_ms=100.0)
GOOD = {"eager": 10.0, "graph": 6.5, "compile": 6.0, "aoti": 5.0, "onnxruntime": 8.0, "openvino": 7.0}


def walk(facts, ms, *, limits=LIMITS, engines=("eager", "graph", "compile", "aoti"), now=None):
    """Walk with times (or outcomes, as words) out of a rule; gives the space and the candidates."""
    space = TuneSpace(facts, limits, engines, now)
    tried = []
    for candidate in space.search():
        found = ms(candidate)
        tried.append(candidate)
        if isinstance(found, str):
            space.trials.append(TuneTrial("full", candidate, found, "because"))
        else:
            space.trials.append(TuneTrial("full", candidate, TrialOutcome.MEASURED, figures=figures(found)))
    return space, tried


def by_engine(candidate):
    return GOOD[candidate.options.engine]


def compiled(candidates):
    return [one for one in candidates if not one.in_process]


def labels(candidates):
    return [one.options.label for one in candidates]


@pytest.mark.parametrize("facts", [CPU, CUDA, replace(CUDA, ranges=((1, 8), (64, 640)))])
def test_given_any_device_when_walked_then_eager_fp32_and_cheap_ones_come_first_and_each_of_10_to_30_once(
    facts,
):
    _, candidates = walk(facts, by_engine)
    assert candidates[0] == TuneCandidate(BuildOptions(), threads=3)
    assert 10 <= len(set(candidates)) == len(candidates) <= 30
    assert {one.options.precision for one in candidates[: candidates.index(compiled(candidates)[0])]} > {
        "fp32",
        "bf16",
    }


def test_given_cuda_when_walked_then_graphs_come_first_then_reduce_overhead_then_packages_and_autotuning_last():
    def ms(one):
        gain = 0.5 * one.options.channels_last + (one.options.precision == "fp16")
        return (6.0 if one.options.engine == "graph" else 6.5) - gain

    _, candidates = walk(CUDA, ms, engines=("graph", "compile", "aoti", "onnxruntime"))
    assert labels(candidates)[:12] == [
        "eager",
        "graph",
        "graph fp16 channels_last",
        "graph tf32",
        "graph bf16 channels_last",
        "graph tf32 channels_last",
        "graph fp16",
        "compile reduce-overhead fp16 channels_last",
        "compile reduce-overhead",
        "aoti fp16 channels_last",
        "aoti fp16 channels_last cuda_graphs",
        "onnxruntime fp16",
    ]
    assert all("max-autotune" in label for label in labels(candidates)[-2:])


def test_given_a_model_that_cannot_be_captured_when_walked_then_no_other_graph_is_tried_but_eager_in_its_place():
    space, candidates = walk(
        CUDA, lambda one: TrialOutcome.REFUSED if one.options.engine == "graph" else by_engine(one)
    )
    assert labels(candidates)[:3] == ["eager", "graph", "eager channels_last"]
    assert not [one for one in candidates[2:] if one.options.engine == "graph"]
    assert space.skipped == {"graph in other precisions": "graph, 3 threads cannot be used"}
    assert {one.options.precision for one in candidates[: candidates.index(compiled(candidates)[0])]} >= {
        "fp32",
        "tf32",
        "bf16",
        "fp16",
    }


def test_given_a_precision_that_no_graph_takes_when_walked_then_it_is_not_captured_in_another_layout():
    failed = walk(
        CUDA, lambda one: TrialOutcome.REFUSED if one.options.precision == "fp16" else by_engine(one)
    )[1]
    assert [one for one in labels(failed) if "fp16" in one] == ["graph fp16 channels_last"]


def test_given_libraries_on_the_cpu_when_walked_then_they_come_in_fp32_and_then_as_eager_is_fastest_before_compilers():
    facts = replace(CPU, precisions={"onnxruntime": ("fp32", "int8_dynamic"), "openvino": ("fp32", "bf16")})

    def ms(one):
        gain = 2.0 * one.options.channels_last + 3.0 * (one.options.precision == "bf16")
        return GOOD[one.options.engine] - gain * (one.options.engine in {"eager", "openvino"})

    space, found = walk(facts, ms, engines=("compile", "openvino", "onnxruntime", "aoti"))
    first, *others = [label for label in labels(found) if not label.startswith("eager")][2:]
    assert (first, others[:2]) == (
        "openvino bf16",
        ["aoti bf16 channels_last", "aoti int8_static channels_last"],
    )
    assert not [
        label for label in labels(found) if label.startswith(("onnx", "openv")) and "channels" in label
    ]
    assert space.skipped["onnxruntime bf16"] == "onnxruntime does not have it on this device"
    candidates = walk(CPU, by_engine, engines=("compile", "openvino", "onnxruntime", "aoti"))[1]
    assert labels(candidates)[:6] == [
        "eager",
        "onnxruntime",
        "openvino",
        "eager",
        "eager",
        "eager channels_last",
    ]
    assert [one.threads for one in candidates[:6]] == [3, 3, 3, 1, 2, 3]


def test_given_a_walk_that_is_cut_off_when_the_rest_is_planned_then_it_is_what_was_not_tried():
    space = TuneSpace(CUDA, LIMITS, ("graph", "aoti"))
    steps = space.search()
    space.trials.append(TuneTrial("full", next(steps), TrialOutcome.MEASURED, figures=figures(10.0)))
    rest = planned(space, steps)
    assert labels(rest)[:2] == ["graph", "graph fp16 channels_last"]
    assert "aoti" in {one.options.engine for one in rest}
    assert TuneCandidate(BuildOptions(), threads=3) not in rest


def test_given_the_cpu_when_walked_then_nothing_that_needs_cuda_is_tried():
    candidates = walk(CPU, lambda one: 1.0 if one.options.engine == "compile" else 10.0)[1]
    assert not any(one.options.is_captured or one.options.precision == "tf32" for one in candidates)
    assert {one.options.mode for one in candidates} == {"default", "max-autotune-no-cudagraphs"}


def test_given_cuda_when_walked_then_packages_are_captured_and_cpu_threads_are_not_tried():
    candidates = walk(CUDA, by_engine)[1]
    assert {one.options.engine for one in candidates if one.options.cuda_graphs} == {"aoti"}
    assert {one.threads for one in candidates} == {3}


def test_given_what_the_facts_leave_out_or_engines_that_are_not_wanted_when_walked_then_they_are_not_tried():
    candidates = walk(
        replace(CPU, left_out=NO_CUDA | {"channels_last": "none", "bf16": "slow"}), by_engine
    )[1]
    assert not any(one.options.channels_last for one in candidates)
    assert {one.options.precision for one in candidates} == {"fp32", "fp16", *INT8_PRECISIONS}
    for engines in (("eager", "aoti"), ("eager",)):
        assert {one.options.engine for one in walk(CPU, by_engine, engines=engines[-1:])[1]} == set(engines)


def test_given_options_that_gain_when_walked_then_what_comes_later_has_them():
    def ms(one):
        return GOOD[one.options.engine] * 2 - (2.0 * one.options.channels_last + 3.0 * (one.threads == 1))

    space, steps = walk(CPU, ms)
    assert all(one.options.channels_last and one.threads == 1 for one in compiled(steps)[:2])
    assert space.ranking.best.trial.candidate == TuneCandidate(
        BuildOptions("aoti", channels_last=True), threads=1
    )


@pytest.mark.parametrize("outcome", [TrialOutcome.REFUSED, TrialOutcome.HUNG])
def test_given_a_precision_that_fails_in_eager_when_walked_then_no_engine_is_compiled_for_it(outcome):
    _, steps = walk(CPU, lambda one: outcome if one.options.precision == "bf16" else by_engine(one))
    assert [one.options.engine for one in [one for one in steps if one.options.precision == "bf16"]] == [
        "eager"
    ]
    assert "fp16" in {one.options.precision for one in steps if one.options.engine != "eager"}


def test_given_engines_that_are_slow_when_walked_then_no_more_of_them_are_compiled():
    _, steps = walk(CPU, lambda one: 10.0 if one.options.engine == "eager" else 20.0)
    assert labels(compiled(steps)) == ["aoti", "aoti int8_static", "compile"]


def test_given_engines_that_fail_with_the_best_precision_when_walked_then_they_are_tried_in_fp32():
    def ms(one):
        if one.options.engine == "eager":
            return 5.0 if one.options.precision == "bf16" else 10.0
        return 4.0 if one.options.precision == "fp32" else TrialOutcome.CRASHED

    space, steps = walk(CPU, ms)
    assert labels(compiled(steps))[:5] == [
        "aoti bf16",
        "aoti int8_static",
        "compile bf16",
        "aoti",
        "compile",
    ]
    assert space.ranking.best.trial.candidate.options.precision == "fp32"


def test_given_a_reference_that_fails_when_walked_then_it_ends():
    assert len(walk(CUDA, lambda one: TrialOutcome.CRASHED)[1]) == 1


def test_given_a_present_setting_when_walked_then_it_is_measured_too():
    now = TuneCandidate(BuildOptions("aoti", channels_last=True), threads=1)
    _, steps = walk(CPU, by_engine, now=now)
    assert now in steps
    _, steps = walk(CPU, by_engine, now=now, engines=("compile",))
    assert now not in steps


def test_given_all_cores_when_walked_then_only_the_best_of_all_is_tried_on_them():
    _, steps = walk(CPU, by_engine)
    on_all = [one for one in steps if one.threads == 4]
    assert [one.options.engine for one in on_all] == ["aoti"]
    assert on_all[0] in steps[-2:]


def test_given_sizes_that_vary_when_walked_then_buckets_are_tried_and_graphs_are_not():
    facts = replace(CUDA, ranges=((1, 8), (64, 640)))
    candidates = walk(facts, lambda one: 4.0 if one.options.engine == "compile" else 10.0)[1]
    assert not any(one.options.cuda_graphs for one in candidates)
    assert all(one.shapes == "bucket" for one in candidates if one.options.engine == "graph")
    bucketed = [one for one in candidates if one.shapes == "bucket"]
    assert {one.bucket_width for one in bucketed} == {
        bucket_width(facts.ranges, 4),
        bucket_width(facts.ranges, 8),
    }
    assert all(one.options.dynamic == "auto" for one in bucketed)


@pytest.mark.parametrize(
    ("ranges", "most"),
    [(((1, 8),), 4), (((64, 640), (64, 640)), 8), (((1, 1_000_000),), 4), (((5, 5),), 4)],
)
def test_given_ranges_when_a_width_is_chosen_then_it_is_the_smallest_that_keeps_the_number(ranges, most):
    width = bucket_width(ranges, most)
    assert bucket_count(ranges, width) <= min(most, MOST_SHAPES)
    assert width == 1 or bucket_count(ranges, width // 2) > most
