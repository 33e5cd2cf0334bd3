"""Benchmarks that no other test disturbs, each for a moment: it ends well and writes what it should."""

import contextlib
import importlib.util
import inspect
import pickle
import subprocess
import time

import psutil
import pytest

from benchmarks import guard, safety, telemetry, training
from benchmarks.rig.graph import PerfNodeProcess

from .conftest import ALONE, SMALL


@pytest.mark.ros
def test_startup_has_its_phases_in_order(run_here):
    figures = run_here("startup", f"--times 1 --budget-from stamp --rate 10 {SMALL} {ALONE}")
    (start,), (judged,) = figures["starts"], figures["each"]["stamp"]
    # the node and its first worker get ready beside each other; which of them is first is up to the machine
    for beside in (["active"], ["worker 0: description", "worker 0: ready"]):
        order = ["process started", "configure", *beside, "first fresh answer"]
        assert [start[phase] for phase in order] == sorted(start[phase] for phase in order)
    assert figures["first_seconds"]["stamp"]["late_ms"]["count"] == len(judged["late_ms"]) > 0


@pytest.mark.ros
def test_logs_counts_what_it_read_replayed_and_played_and_has_what_a_cluster_costs(run_here):
    figures = run_here(
        "logs",
        "--logs 1 --frames 25 --parallel 1 --idle 0.1 --turns 1 --seconds 1 --busy 0 --compressions zstd"
        f" {SMALL}",
    )
    read, replayed, many = figures["reading"], figures["replay"]["runs"], figures["many"]
    assert [len(readers) for readers in read.values()] == [3, 2, 2]
    assert all(times["count"] == 24 for readers in read.values() for times in readers.values())
    assert [run["frames"] for run in replayed] == [25, 25, 50]
    assert all(0 < run["model_ms"]["p50"] < run["frame_ms"]["p50"] for run in replayed)
    assert min(many["clusters"]["1"].values()) > 0
    costs = {name.strip(): found["p50"] for name, found in many["costs"].items()}
    parts = costs["of it its frames"], costs["of it the rest, which is fixed"]
    assert min(*parts, costs["a task that does nothing"]) > 0
    assert sum(parts) == pytest.approx(costs["a log alone"])
    assert {"on a cluster: longer by", "on a cluster: processor time more by"} < costs.keys()
    assert figures["play"].keys() == {"zstd, 0 busy processes a core"}
    assert {run["messages"] for run in figures["play"].values()} == {230}


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # openvino's own calls
@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_engines_has_parity_and_what_auto_takes(run_here):
    figures = run_here("engines", "--models transformer --engines eager,openvino --rounds 2")
    networks = figures["engines"]["transformer"]
    assert networks["auto"] in networks["p50_ms"]
    assert set(networks["p50_ms"]) == {"eager", "openvino", "plain openvino", "auto"}
    assert networks["relative_l2"]["openvino"] < 1e-3


def test_guard_and_ramps_have_figures(run_here, monkeypatch):
    monkeypatch.setattr(guard, "_NOISE_M", (0.1,))
    monkeypatch.setattr(guard, "_HZ", (10.0, 20.0))
    figures = run_here("guard", "--times 20 --drive-s 0.3 --events 1 --plans 4 --drives 1")
    assert figures["noise"]["0.1 m, 20 Hz"]["drawn"] == 6 * 6
    assert run_here("ramps", "--seeds 1 --drives 1")


def test_training_has_every_way_that_was_asked_for(run_here, monkeypatch):
    def in_process(work, *given):
        return work(*pickle.loads(pickle.dumps(given)))

    # each has a process of its own for the sake of its memory's figures, and imports torch and its compiler
    # for it
    monkeypatch.setattr(training, "_in_process", in_process)
    figures = run_here(
        "training",
        "--steps 1 --seeds 1 --judged 1 --ways shipped,packages --models detector --tiers fast --engines"
        " onnxruntime --rounds 2",
    )
    runs, packages = figures["runs"], figures["packages"]["detector fast"]
    assert runs.keys() == {"shipped"}
    assert runs["shipped"][0]["p50_ms"] > 0
    assert packages.keys() == {"onnxruntime"}
    assert packages["onnxruntime"]["p50_ms"] > 0


def test_stages_has_the_higher_one_with_and_without_the_other(run_here):
    arms = run_here("stages", "--seconds 0.5 --slice 0.5 --model-ms 0 --lower-ms 0 --budget-ms 900")
    assert [bool(arm["other"]["frames"]) for arm in arms.values()] == [False, True, True]
    assert all(0 < arm["higher"]["frames"] <= 15 for arm in arms.values())


def test_rollout_has_fleets_on_which_nothing_differs_and_a_candidate_that_is_stopped(run_here):
    figures = run_here(
        "rollout", "--fleets 1 --rollouts 1 --same 1 --vehicles 300 --candidates crashing,same"
    )
    assert all(0 <= share <= 100 for found in figures["null"].values() for share in found.values())
    assert figures["rollouts"]["crashing"]["stopped"] == 1
    assert figures["rollouts"]["crashing"]["once"]["reached"] > 90


def test_safety_drives_every_scenario_with_every_arm(run_here):
    figures = run_here("safety", "--parts drives --seeds 1 --scenarios ccrb --arms zero,naive --jobs 1")[
        "drives"
    ]
    assert figures["arms"].keys() == {"zero", "naive"}
    assert [drive["scenario"] for drive in figures["drives"]] == ["ccrb", "ccrb"]
    assert figures["arms"]["zero"]["collisions"] == 0
    assert figures["less_naive"]["zero"]["mean"] <= 0


def test_safety_has_the_naive_nodes_restarts_ordinary_drives_and_the_lanes_sequences(run_here, monkeypatch):
    real = {"starts": 1, "elapsed_s": 3.0, "processor_s": 2.5}
    monkeypatch.setattr(safety, "measured_restart", lambda: real)
    monkeypatch.setattr(safety, "_RATES", {"none": "none", "bench": "as bench deadline"})
    monkeypatch.setattr(safety, "_RESTARTS_S", (0.3, 4.0))
    words = "--seeds 1 --scenarios pedestrian --ordinary 1 --sequences 3 --jobs 1 --seed 2"
    figures = run_here("safety", f"--parts restarts,ordinary,lane {words}")
    found = {
        (one["arm"], one["faults"], one["restart_s"]): one["collisions"]
        for one in figures["restarts"]["cells"]
    }
    assert found["naive", "bench", 4.0] == 1
    assert found["naive", "bench", 0.3] == found["full", "bench", None] == 0
    assert ("naive", "none", 4.0) not in found, "without faults nothing restarts"
    assert figures["restarts"]["measured_restart"] == real
    assert figures["ordinary"]["scenarios"]["pedestrian"]["drives"] == 1
    assert figures["lane"]["sequences"] == 3


def test_scenes_switches_and_compiles_nothing(run_here):
    figures = run_here("scenes", "--seconds 1.5 --engine eager --model-ms 0")
    assert figures["recompiles"] == 0
    assert figures["switches"] >= figures["overhead of a switch, ms"]["count"] > 0


def test_telemetry_compares_nodes_with_and_without_recorder_and_exporter(run_here, monkeypatch):
    class Streaming(contextlib.AbstractContextManager):
        """A process that is always busy in place of a node: those of the other parts are real ones."""

        def __init__(self, arguments, **node):
            inspect.signature(PerfNodeProcess.__init__).bind_partial(**node)
            started.append(node)
            self._busy = subprocess.Popen(["sh", "-c", "while :; do :; done"])
            self.node = psutil.Process(self._busy.pid)

        def __exit__(self, *_):
            self._busy.kill()
            self._busy.wait()

        def stream(self, seconds):
            before_s = self.node.cpu_times().user
            while self.node.cpu_times().user == before_s:
                time.sleep(0.01)

    started = []
    monkeypatch.setattr(telemetry, "Streaming", Streaming)
    figures = run_here("telemetry", "--parts beside --turns 1 --slice 0")["beside"]
    assert min(figures[name] for name in ("node on", "node off")) > 0
    assert (
        [node["recorder"] for node in started]
        == [bool(node["metrics_port"]) for node in started]
        == [True, False]
    )
