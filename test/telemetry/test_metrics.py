import socket
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from torchperf_ros.core.outcome import Fallback, Outcome
from torchperf_ros.telemetry.metrics import MetricsExporter, StageCollector


@pytest.fixture
def stages(make_stage, make_answer, answered):
    perception, planning = make_stage("perception"), make_stage("planning")
    for seq in range(4):
        answered(perception, make_answer(seq=seq, total_ms=20.0))
    answered(perception, make_answer(Outcome.CRASHED, Fallback.BACKUP, seq=4, total_ms=20.0))
    perception.mailbox.superseded, perception.mailbox.stale = 7, 2
    return [perception, planning]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def registry_of(stages):
    registry = CollectorRegistry()
    registry.register(StageCollector(stages))
    return registry


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("torchperf_frames_total", {}, 5),
        ("torchperf_answers_total", {"outcome": "on_time"}, 4),
        ("torchperf_answers_total", {"outcome": "crashed"}, 1),
        ("torchperf_answers_total", {"outcome": "hung"}, 0),
        ("torchperf_fallbacks_total", {"fallback": "backup"}, 1),
        ("torchperf_fallbacks_total", {"fallback": "stop"}, 0),
        ("torchperf_dropped_total", {"why": "superseded"}, 7),
        ("torchperf_dropped_total", {"why": "stale"}, 2),
        ("torchperf_worker_restarts_total", {}, 3),
        ("torchperf_latency_seconds", {"quantile": "0.50"}, 0.02),
        ("torchperf_health", {}, 3),
    ],
)
def test_given_stages_when_scraped_then_each_metric_is_there_in_base_units(stages, name, labels, value):
    assert registry_of(stages).get_sample_value(name, {"stage": "perception", **labels}) == value


def test_given_stages_when_scraped_then_every_outcome_fallback_and_quantile_is_there_for_each(stages):
    text = generate_latest(registry_of(stages)).decode()
    for stage in ("perception", "planning"):
        for outcome in Outcome:
            assert f'torchperf_answers_total{{outcome="{outcome.word}",stage="{stage}"}}' in text
        for fallback in Fallback:
            assert f'torchperf_fallbacks_total{{fallback="{fallback.word}",stage="{stage}"}}' in text
        assert text.count('torchperf_latency_seconds{quantile="0.') == 6
    assert 'torchperf_latency_seconds{quantile="0.99",stage="planning"} NaN' in text


def test_given_a_later_frame_when_scraped_again_then_the_counter_has_moved(stages, make_answer, answered):
    registry = registry_of(stages)
    answered(stages[1], make_answer())
    assert registry.get_sample_value("torchperf_frames_total", {"stage": "planning"}) == 1
    answered(stages[1], make_answer())
    assert registry.get_sample_value("torchperf_frames_total", {"stage": "planning"}) == 2


def test_given_an_exporter_when_asked_over_http_then_it_answers_until_it_is_closed_and_frees_its_port(stages):
    port = free_port()
    for _ in range(2):
        exporter = MetricsExporter(port, stages)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as reply:
            assert reply.status == 200
            assert 'torchperf_frames_total{stage="perception"} 5.0' in reply.read().decode()
        exporter.close()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


def test_given_an_exporter_when_serving_then_it_listens_on_the_loopback_only(stages):
    port = free_port()
    exporter = MetricsExporter(port, stages)
    try:
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))  # refused if it listened on every address
    finally:
        exporter.close()


def test_given_a_port_that_is_taken_when_exported_then_it_is_an_os_error(stages):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="Address already in use"):
            MetricsExporter(taken.getsockname()[1], stages)


def test_given_workers_with_engines_when_scraped_then_each_tier_has_its_engine_and_counters(make_stage, make_worker):
    full = {
        "name": "full",
        "engine": "aoti",
        "graphs": 1,
        "package": "f00d" * 8,
        "recompiles": 2,
        "hits": 8,
        "waste": 0.5,
    }
    worker = make_worker(facts=[full, {"name": "fast", "engine": "eager"}], out_of_memory=3)
    registry = CollectorRegistry()
    registry.register(StageCollector([make_stage(workers=(worker, None), tiers=["full", "fast"])]))
    tier = {"stage": "perception", "tier": "full"}
    for name, labels, value in (
        ("torchperf_tier_engine", {**tier, "engine": "aoti", "package": "f00df00df00d"}, 1),
        ("torchperf_tier_engine", {"stage": "perception", "tier": "fast", "engine": "eager", "package": ""}, 1),
        ("torchperf_tier_recompiles_total", tier, 2),
        ("torchperf_tier_shape_hits_total", tier, 8),
        ("torchperf_tier_padding_ratio", tier, 0.5),
        ("torchperf_out_of_memory_total", {"stage": "perception"}, 3),
    ):
        assert registry.get_sample_value(name, labels) == value
