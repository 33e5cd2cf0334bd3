"""Benchmarks that no other test disturbs, each for a moment: it ends well and writes what it should."""

import importlib.util

import pytest

from .conftest import ALONE, SMALL

pytestmark = pytest.mark.ros

AT_ONCE = 1  # another test runs beside
ARGUMENTS = {
    "startup": f"--times 1 --budget-from stamp {SMALL} {ALONE}",
    "logs": f"--logs 1 --frames 30 {SMALL} --parallel 1 --turns 1 --seconds 1 --busy 0",
    "engines": "--models planner --engines eager,openvino --rounds 2 "
    "--stacks transformer --ways blocks --blocks 4 --seconds 0",
    "guard": "--times 20",
    "ramps": "--seeds 1 --drives 1",
    "training": "--steps 1 --seeds 1 --judged 1 --ways shipped,packages "
    "--models detector --tiers fast --engines onnxruntime --rounds 2",
    "stages": "--seconds 1 --slice 1 --model-ms 0 --lower-ms 0 --budget-ms 900 --size 64x48 --image-rate 5",
    "rollout": "--fleets 2 --rollouts 1 --same 1 --vehicles 300 --candidates crashing,same",
}


def test_startup_has_its_phases_in_order(report):
    figures = report("startup")
    (start,), (judged,) = figures["starts"], figures["each"]["stamp"]
    # the node and its first worker get ready beside each other; which of them is first is up to the machine
    for beside in (["active"], ["worker 0: hello", "worker 0: ready"]):
        order = ["process started", "configure", *beside, "first fresh answer"]
        assert [start[phase] for phase in order] == sorted(start[phase] for phase in order)
    assert figures["first_seconds"]["stamp"]["late_ms"]["count"] == len(judged["late_ms"]) > 0


def test_logs_counts_what_it_read_and_played(report):
    figures = report("logs")
    read, played = figures["reading"], figures["play"]
    assert [len(readers) for readers in read.values()] == [3, 2, 2]
    assert all(times["count"] == 29 for readers in read.values() for times in readers.values())
    assert played.keys() == {"none, 0 busy processes a core", "zstd, 0 busy processes a core"}
    assert {run["messages"] for run in played.values()} == {230}


def test_logs_has_replays_of_which_one_is_twice_as_long_and_a_cluster_and_what_that_costs(report):
    figures = report("logs")
    assert [run["frames"] for run in figures["replay"]["runs"]] == [30, 30, 60]
    assert all(0 < run["model_ms"]["p50"] < run["frame_ms"]["p50"] for run in figures["replay"]["runs"])
    figures = figures["many"]
    assert figures["clusters"]["1"]["run_s"] > 0
    costs = {name.strip(): found["p50"] for name, found in figures["costs"].items()}
    parts = costs["of it its frames"], costs["of it the rest, which is fixed"]
    assert min(*parts, costs["a task that does nothing"]) > 0
    assert sum(parts) == pytest.approx(costs["a log alone"])
    assert {"on a cluster: longer by", "on a cluster: processor time more by"} < costs.keys()


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_engines_has_every_engine_with_parity_and_what_auto_takes(report):
    figures = report("engines")["engines"]["planner"]
    assert figures["auto"] in figures["p50_ms"]
    assert set(figures["p50_ms"]) == {"eager", "openvino", "plain openvino", "auto"}
    assert figures["relative_l2"]["openvino"] < 1e-3


def test_engines_has_what_blocks_cost_and_do(report):
    found = report("engines")["blocks"]["transformer"]["blocks"]
    assert found["parts"].startswith("1 to 4 (4 alike): ")
    assert found["relative_l2"] < 1e-3
    assert min(found["compile_s"], found["cpu_s"], found["p50_ms"]) > 0


def test_guard_and_ramps_have_figures(report):
    assert report("guard")
    assert report("ramps")


def test_training_has_every_way_that_was_asked_for(report):
    figures = report("training")
    runs, packages = figures["runs"], figures["packages"]["detector fast"]
    assert runs.keys() == {"shipped"}
    assert runs["shipped"][0]["p50_ms"] > 0
    assert packages.keys() == {"onnxruntime"}
    assert packages["onnxruntime"]["p50_ms"] > 0


def test_stages_has_the_higher_one_with_and_without_the_other_and_memory_and_times_of_sharing(report):
    arms, figures = (report("stages")[part] for part in ("priority", "shared"))
    assert [bool(arm["other"]["frames"]) for arm in arms.values()] == [False, True, True]
    assert all(0 < arm["higher"]["frames"] <= 30 for arm in arms.values())
    assert [arm["memory_mib"]["processes"] for arm in figures.values()] == [4, 2, 2, 1]
    assert all(stage["p50_ms"] > 0 for arm in figures.values() for stage in arm["stages"].values())


def test_rollout_has_fleets_on_which_nothing_differs_and_a_candidate_that_is_stopped(report):
    figures = report("rollout")
    assert all(0 <= share <= 100 for found in figures["null"].values() for share in found.values())
    assert figures["rollouts"]["crashing"]["stopped"] == 1
    assert figures["rollouts"]["crashing"]["once"]["reached"] > 90
