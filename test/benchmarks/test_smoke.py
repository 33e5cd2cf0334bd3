"""Every benchmark, for a moment: it ends well and writes what it should. The figures themselves mean nothing here."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.ros

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--size", "64x48", "--model-ms", "0"]
ALONE = ["--backup", "none"]  # one worker to wait for
ARGUMENTS = {
    # the budget and the pace leave each frame its time, whatever else runs: frames that are not on time are left out
    "overhead": ["--sizes", "64x48", "--seconds", "4", "--rate", "5", "--budget-ms", "900", "--model-ms", "0", *ALONE],
    "deadline": ["--seconds", "3", *SMALL],
    "failover": ["--times", "1", "--backups", "standby", "--settle", "0.5", *SMALL],
    "soak": ["--frames", "200", "--rate", "100", "--model-ms", "0", *ALONE],
    "telemetry": ["--seconds", "1.1", "--turns", "1", "--slice", "0.5", *SMALL, *ALONE],
    "scrape": ["--seconds", "2", "--slice", "2", "--every", "0.2", *SMALL, *ALONE],
    "many_logs": ["--logs", "1", "--frames", "3", *SMALL, "--parallel", "1", "--tasks", "3"],
    "startup": ["--times", "1", "--budget-from", "stamp", *SMALL, *ALONE],
    "log_reading": ["--frames", "4", "--size", "64x48", "--turns", "1"],
    "engines": ["--models", "planner", "--engines", "eager,openvino", "--rounds", "2"],
    "guard": ["--times", "20"],
    "emergency": ["--times", "5", "--triggers", "2", "--silences", "2", *SMALL, *ALONE],
    "priority": ["--seconds", "1", "--slice", "1", "--model-ms", "0", "--lower-ms", "0", "--budget-ms", "900"],
    "scenes": ["--seconds", "2", "--engine", "eager", "--model-ms", "0"],
    "ramps": ["--seeds", "1", "--drives", "1"],
    "play": ["--seconds", "1", "--busy", "0", "--size", "64x48"],
    "safety": ["--seeds", "1", "--scenarios", "ccrb", "--arms", "zero,naive", "--jobs", "2"],
}
MACHINE = {"cpu", "cores", "kernel", "python", "torch", "rclpy", "load_average", "date"}
WITHIN_S = 240
AT_ONCE = 4


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A few at once, each in a ROS graph of its own: much of their time is waiting for workers."""
    folder = tmp_path_factory.mktemp("benchmarks")

    def run(number, name):
        domain = {"ROS_DOMAIN_ID": str(1 + (os.getpid() + 13 * number) % 100)}
        command = [sys.executable, "-m", f"benchmarks.{name}", *ARGUMENTS[name], "--json", str(folder / f"{name}.json")]
        return subprocess.run(
            command, cwd=ROOT, env=os.environ | domain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=WITHIN_S, check=False,
        )  # fmt: skip

    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = dict(zip(ARGUMENTS, pool.map(run, range(len(ARGUMENTS)), ARGUMENTS), strict=True))
    return folder, {name: one.stdout for name, one in done.items()}, {n: one.returncode for n, one in done.items()}


@pytest.fixture
def report(finished):
    """Reads the report of a benchmark that ended well."""
    folder, said, status = finished

    def read(name):
        assert status[name] == 0, said[name]
        content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert content["benchmark"] == name
        assert content["machine"].keys() >= MACHINE
        assert content["parameters"]
        return content["figures"]

    return read


def test_overhead_compares_both_nodes(report):
    nodes = report("overhead")["64x48"]
    assert nodes.keys() == {"torchperf_ros", "naive", "bare loop"}
    assert nodes.pop("bare loop")["model_ms"]["count"] > 0
    for node in nodes.values():
        assert min(node["overhead_ms"]["count"], node["overhead_ms"]["p50"], node["age_at_receipt_ms"]["p50"]) > 0


def test_safety_drives_every_scenario_with_every_arm(report):
    figures = report("safety")
    assert figures["arms"].keys() == {"zero", "naive"}
    assert [drive["scenario"] for drive in figures["drives"]] == ["ccrb", "ccrb"]
    assert figures["arms"]["zero"]["collisions"] == 0
    assert figures["less_naive"]["zero"]["mean"] <= 0


def test_deadline_answers_what_was_started_and_counts_the_faults(report):
    ours, naive, realtime = report("deadline").values()
    assert ours["sent"] == naive["sent"] == 90
    assert ours["answered_share_of_started"] == 1.0
    assert ours["lateness_ms"]["count"] == ours["answered"]
    assert ours["faults"]["hang"] == naive["faults"]["hang"] == 1
    assert realtime["scheduling"] == ours["scheduling"]
    assert naive["scheduling"] == "normal"


def test_failover_comes_back(report):
    (failover,) = report("failover")["standby"]["each"]
    assert failover["outage_ms"] > 0


def test_soak_has_series_for_every_process(report):
    figures = report("soak")
    assert figures["processes"].keys() == {"node", "worker 0"}
    assert all(len(process["rss_kib"]) == len(figures["frames"]) > 0 for process in figures["processes"].values())


def test_telemetry_times_the_record_and_its_parts_and_scrape_has_frames_with_and_without(report):
    figures, scrape = report("telemetry"), report("scrape")
    for part in ("record and publish", "encode the record", "publish latency_stages", "publish latency", "report"):
        assert figures[part]["wall_us"]["p50"] > 0
    assert scrape["with scrapes"]["lateness_ms"]["count"] > 0
    assert scrape["without"]["overhead_ms"]["p50"] > 0
    assert scrape["scrape_ms"]["count"] > 3
    assert scrape["page_lines"] > 100


def test_emergency_times_each_stop(report):
    figures = report("emergency")
    assert [figures[name]["count"] for name in ("scan", "trigger", "silence")] == [5, 2, 2]
    assert min(figures[name]["p50"] for name in ("scan", "trigger")) > 0
    assert figures["silence"]["max"] > -1.0


def test_startup_has_its_phases_in_order(report):
    figures = report("startup")
    (start,), (judged,) = figures["starts"], figures["each"]["stamp"]
    # the node and its first worker get ready beside each other; which of them is first is up to the machine
    for beside in (["active"], ["worker 0: hello", "worker 0: ready"]):
        order = ["process started", "configure", *beside, "first fresh answer"]
        assert [start[phase] for phase in order] == sorted(start[phase] for phase in order)
    assert figures["first_seconds"]["stamp"]["late_ms"]["count"] == len(judged["late_ms"]) > 0


def test_many_logs_has_a_cluster_and_what_it_costs(report):
    figures = report("many_logs")
    assert figures["clusters"]["1"]["run_s"] > 0
    costs = {name.strip(): found["p50"] for name, found in figures["costs"].items()}
    parts = costs["of it its frames"], costs["of it the rest, which is fixed"]
    assert min(*parts, costs["a task that does nothing"]) > 0
    assert sum(parts) == pytest.approx(costs["a log alone"])
    assert {"on a cluster: longer by", "on a cluster: processor time more by"} < costs.keys()


def test_play_and_log_reading_count_what_they_played_and_read_of_each_log(report):
    played, read = report("play"), report("log_reading")["ms_per_message"]
    assert played.keys() == {"none, 0 busy processes a core", "zstd, 0 busy processes a core"}
    assert {run["messages"] for run in played.values()} == {230}
    assert [len(readers) for readers in read.values()] == [3, 2, 2]
    assert all(times["count"] == 3 for readers in read.values() for times in readers.values())


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")
def test_priority_has_the_higher_stage_with_and_without_the_other(report):
    arms = report("priority")
    assert [bool(arm["other"]["frames"]) for arm in arms.values()] == [False, True, True]
    assert all(0 < arm["higher"]["frames"] <= 30 for arm in arms.values())


def test_scenes_switches_and_compiles_nothing(report):
    figures = report("scenes")
    assert figures["recompiles"] == 0
    assert figures["switches"] >= figures["overhead of a switch, ms"]["count"] > 0


def test_engines_has_every_engine_with_parity_and_what_auto_takes(report):
    figures = report("engines")["planner"]
    assert figures["auto"] in figures["p50_ms"]
    assert set(figures["p50_ms"]) == {"eager", "openvino", "plain openvino", "auto"}
    assert figures["relative_l2"]["openvino"] < 1e-3
