"""Benchmarks with deadlines of this machine's clock, each for a moment: it ends well and writes what it should."""

import pytest

from .conftest import ALONE, SMALL

pytestmark = pytest.mark.ros

ARGUMENTS = {
    # the budget and the pace leave each frame its time, whatever else runs: frames that are not on time are left out
    "overhead": f"--sizes 64x48 --seconds 2 --rate 10 --budget-ms 900 --model-ms 0 {ALONE}",
    "deadline": f"--seconds 2 --beside naive-fifo {SMALL}",
    "failover": f"--times 1 --backups standby --settle 0.5 --faults segfault --seconds 2 {SMALL}",
    "soak": f"--frames 100 --rate 100 --model-ms 0 {ALONE}",
    "telemetry": f"--parts frames,scrapes --seconds 1 --every 0.2 {SMALL} {ALONE}",
    "candidate": f"--seconds 1 --slice 1 --changes 1 --budget-ms 900 {SMALL} {ALONE}",
    "emergency": f"--times 5 --triggers 2 --silences 2 {SMALL} {ALONE}",
}


def test_overhead_compares_both_nodes(report):
    nodes = report("overhead")["64x48"]
    assert nodes.keys() == {"torchperf_ros", "naive", "bare loop"}
    assert nodes.pop("bare loop")["model_ms"]["count"] > 0
    for node in nodes.values():
        assert min(node["overhead_ms"]["count"], node["overhead_ms"]["p50"], node["age_at_receipt_ms"]["p50"]) > 0


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


def test_soak_has_series_for_every_process(report):
    figures = report("soak")
    assert figures["processes"].keys() == {"node", "worker 0"}
    assert all(len(process["rss_kib"]) == len(figures["frames"]) > 0 for process in figures["processes"].values())


def test_telemetry_times_the_record_and_its_parts_and_has_frames_with_scrapes_and_without(report):
    figures = report("telemetry")
    scrape = figures["scrapes"]
    for part in ("record and publish", "encode the record", "publish latency_stages", "publish latency", "report"):
        assert figures["frames"][part]["wall_us"]["p50"] > 0
    assert scrape["with scrapes"]["lateness_ms"]["count"] > 0
    assert scrape["without"]["overhead_ms"]["p50"] > 0
    assert scrape["scrape_ms"]["count"] > 2
    assert scrape["page_lines"] > 100


def test_candidate_has_frames_with_and_without_and_the_way_back(report):
    figures = report("candidate")
    assert all(figures[kind]["lateness_ms"]["count"] > 0 for kind in ("without", "with a shadow"))
    (back_s,) = figures["candidate"]["back_s"]
    assert back_s > 0


def test_emergency_times_each_stop(report):
    figures = report("emergency")
    assert [figures[name]["count"] for name in ("scan", "trigger", "silence")] == [5, 2, 2]
    assert min(figures[name]["p50"] for name in ("scan", "trigger")) > 0
    assert figures["silence"]["max"] > -1.0
