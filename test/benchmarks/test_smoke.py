"""Benchmarks with deadlines of this machine's clock, each for a moment.

It ends well and writes what it should.
"""

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import candidate, soak, telemetry
from benchmarks.rig.bench_stage import ADAPTER
from benchmarks.rig.graph import Streaming
from benchmarks.rig.scraper import free_port

from ..ros_domain import own_domain
from .conftest import ALONE, SMALL

pytestmark = [pytest.mark.ros, pytest.mark.timeout(900)]

ARGUMENTS = {
    # the budget and the pace leave each frame its time beside other processes: frames that are not on time are
    # left out
    "overhead": f"--sizes 64x48 --seconds 2 --rate 10 --budget-ms 900 --model-ms 0 {ALONE}",
    "deadline": f"--seconds 2 --beside naive-fifo {SMALL}",
    "failover": f"--times 1 --backups standby --settle 0.5 --faults segfault --seconds 2 {SMALL}",
    "telemetry": f"--parts frames --seconds 1 {SMALL} {ALONE}",
    "emergency": f"--times 5 --triggers 2 --silences 2 --drives 2 {SMALL} {ALONE}",
}
SIZE, RATE = "64x48", 30.0


@pytest.fixture(scope="module")
def streaming():
    """A node and its camera for every benchmark that needs no other, with what any of them wants of it."""
    wanted = {"adapter": ADAPTER, "metrics_port": free_port(), "max_frame_bytes": 8 * 64 * 48}
    images = SimpleNamespace(model_ms=0.0, rate=RATE, size=SIZE, budget_ms=900.0, backup="none")
    domain = {"ROS_DOMAIN_ID": str(own_domain())}
    with mock.patch.dict(os.environ, domain), Streaming(images, **wanted) as streaming:
        yield streaming, wanted


@pytest.fixture
def run_on(finished, streaming, run_here, monkeypatch):
    """Runs a benchmark in this process with that node, while the others run in theirs."""
    one, there = streaming

    def shared(arguments, *, outputs=True, **wanted):
        assert (arguments.rate, arguments.size) == (RATE, SIZE)
        assert wanted.items() <= there.items()
        one.seen.clear()
        return contextlib.nullcontext(one)

    def run(benchmark, arguments):
        monkeypatch.setattr(benchmark, "Streaming", shared)
        return run_here(benchmark.__name__.rpartition(".")[2], arguments)

    monkeypatch.setattr(telemetry, "free_port", lambda: there["metrics_port"])
    return run


def test_overhead_compares_both_nodes(report):
    nodes = report("overhead")["64x48"]
    assert nodes.keys() == {"torchperf_ros", "naive", "bare loop"}
    assert nodes.pop("bare loop")["model_ms"]["count"] > 0
    for node in nodes.values():
        assert (
            min(node["overhead_ms"]["count"], node["overhead_ms"]["p50"], node["age_at_receipt_ms"]["p50"])
            > 0
        )


def test_deadline_answers_what_was_started_and_counts_the_faults(report):
    ours, naive = report("deadline").values()
    assert ours["sent"] == naive["sent"] == 60
    assert ours["answered_share_of_started"] == 1.0
    assert ours["lateness_ms"]["count"] == ours["answered"]
    assert ours["faults"]["hang"] == naive["faults"]["hang"] == 1
    assert naive["scheduling"] == ours["scheduling"]


def test_failover_comes_back_from_a_kill_and_from_a_poisonous_frame(report):
    figures = report("failover")
    (kill,), poisoned = figures["kills"]["standby"]["each"], figures["frames"]["segfault"]
    assert kill["outage_ms"] > 0
    assert poisoned["not_fresh"][0] > 0
    assert poisoned["back_ms"][0] > 0
    assert 0 < poisoned["lateness_ms"]["count"] <= 60


def test_telemetry_times_the_record_and_its_parts(report):
    frames = report("telemetry")["frames"]
    for part in (
        "record and publish",
        "encode the record",
        "publish latency_stages",
        "publish latency",
        "report",
    ):
        assert frames[part]["wall_us"]["p50"] > 0


def test_emergency_times_each_stop(report):
    figures = report("emergency")["stops"]
    assert [figures[name]["count"] for name in ("scan", "trigger", "silence")] == [5, 2, 2]
    assert min(figures[name]["p50"] for name in ("scan", "trigger")) > 0
    assert figures["silence"]["max"] > -1.0
    assert report("emergency")["traffic"]["drives"] == 2


# In this process, when those of their own have ended: on an idle machine a shadow soon has its frames.


def test_soak_has_series_for_every_process(run_on):
    figures = run_on(soak, "--frames 30 --rate 30 --model-ms 0")
    assert figures["processes"].keys() == {"node", "worker 0"}
    assert all(
        len(process["rss_kib"]) == len(figures["frames"]) > 0 for process in figures["processes"].values()
    )


def test_telemetry_has_frames_with_scrapes_and_without(run_on):
    scrape = run_on(telemetry, f"--parts scrapes --seconds 1 --every 0.2 {SMALL}")["scrapes"]
    assert scrape["with scrapes"]["lateness_ms"]["count"] > 0
    assert scrape["without"]["overhead_ms"]["p50"] > 0
    assert scrape["scrape_ms"]["count"] > 2
    assert scrape["page_lines"] > 100


def test_candidate_has_frames_with_and_without_and_the_way_back(run_on, monkeypatch):
    # A shadow has the lowest priority: beside busy processes each of its 50 frames takes seconds.
    monkeypatch.setattr(candidate, "_SERVES_WITHIN_S", 600.0)
    budget = "--budget-ms 5000"  # on a busy machine a shadow that is over it does not serve
    figures = run_on(candidate, f"--seconds 1 --slice 1 --changes 1 {budget} {SMALL}")
    assert all(figures[kind]["lateness_ms"]["count"] > 0 for kind in ("without", "with a shadow"))
    (back_s,) = figures["candidate"]["back_s"]
    assert back_s > 0
