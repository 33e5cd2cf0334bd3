import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from ruamel.yaml import YAML

from benchmarks.rig.scraper import free_port
from torchperf_ros import __version__
from torchperf_ros.api.outcome import Fallback, Health, Outcome
from torchperf_ros.fleet.comparer import Compared, Pair, PairFigures
from torchperf_ros.observe.telemetry.diagnostics import FIELDS, METRICS, NODE_FIELDS, stage_status, typed
from torchperf_ros.observe.telemetry.metrics import MetricsExporter, StageCollector, _ScrapeHandler
from torchperf_ros.observe.telemetry.node_state import StageState
from torchperf_ros.observe.watch.stage_signals import COUNTED
from torchperf_ros.safety.emergency import Emergency
from torchperf_ros.settings.config import node_config

from ...stage.conftest import wait_until

FULL = {
    "name": "full",
    "engine": "aoti",
    "graphs": 1,
    "package": "f00d" * 8,
    "recompiles": 2,
    "hits": 8,
    "waste": 0.5,
}


@pytest.fixture
def stages(make_stage, make_worker, make_answer, answered):
    facts = [FULL, {"name": "fast", "engine": "eager"}]
    memory_bytes = {"history": 4096, "allocated": 1 << 20, "free": 3 << 20, "total": 4 << 20}
    worker = make_worker(os.getpid(), facts=facts, out_of_memory=3, memory_bytes=memory_bytes)
    perception = make_stage("perception", workers=(worker, None), tiers=["full", "fast"])
    planning = make_stage("planning")
    planning.statistics.figures.window_s = 600.0
    for seq in range(4):
        answered(perception, make_answer(seq=seq, total_ms=20.0))
    answered(perception, make_answer(Outcome.CRASHED, Fallback.BACKUP, seq=4, total_ms=60.0, tier=1))
    perception.mailbox.superseded, perception.statistics.counters.stale = 7, 2
    perception.statistics.counters.ignored = 5
    perception.statistics.counters.probes = 6
    perception.shadow = SimpleNamespace(version="b", figures=PairFigures("b"))
    for seq, pair_ms in enumerate((12.0, 100.0)):
        answer = make_answer(seq=seq, total_ms=20.0)
        answer.lateness_ms = -30.0
        perception.shadow.figures.add(
            Pair(answer, Outcome.ON_TIME, pair_ms, b"x", b"x"), candidate_serves=False
        )
    perception.shadow.figures.compared(
        Compared(1, "x is 1, in the base 2", ("", "distance: the plan"), 0.5)
    )
    return [perception, planning]


def config(**values):
    return node_config(values, {})


def registry_of(stages):
    registry = CollectorRegistry()
    registry.register(StageCollector(config(memory_limit_mib=4), stages))
    return registry


TIER = {"tier": "full"}


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
        ("torchperf_stale_total", {}, 2),
        ("torchperf_dropped_total", {"why": "ignored"}, 5),
        ("torchperf_side_runs_total", {"why": "probe"}, 6),
        ("torchperf_odd_stamps_total", {"why": "repeated"}, 4),
        ("torchperf_worker_restarts_total", {}, 3),
        ("torchperf_workers_unended_total", {}, 1),
        ("torchperf_latency_seconds_bucket", {**TIER, "le": "0.02"}, 4),
        ("torchperf_latency_seconds_bucket", {**TIER, "le": "0.015"}, 0),
        ("torchperf_latency_seconds_sum", TIER, pytest.approx(0.08)),
        ("torchperf_latency_seconds_bucket", {"tier": "fast", "le": "0.05"}, 0),
        ("torchperf_latency_seconds_count", {"tier": "fast"}, 1),
        ("torchperf_lateness_seconds_bucket", {"le": "0.0"}, 5),
        ("torchperf_step_seconds_sum", {"step": "inference"}, pytest.approx(0.015)),
        ("torchperf_window_latency_seconds", {"statistic": "p50"}, 0.02),
        ("torchperf_window_latency_seconds", {"statistic": "max"}, 0.06),
        ("torchperf_window_age_seconds", {"statistic": "p99"}, 0.004),
        ("torchperf_window_miss_ratio", {}, pytest.approx(0.2)),
        ("torchperf_latency_jitter_seconds", {}, pytest.approx(0.01)),
        ("torchperf_budget_seconds", {}, 0.05),
        ("torchperf_health", {"state": "degraded"}, 1),
        ("torchperf_health", {"state": "nominal"}, 0),
        ("torchperf_tier_in_use", TIER, 1),
        ("torchperf_workers_ready", {}, 1),
        ("torchperf_device_info", {"device": "cpu"}, 1),
        ("torchperf_version_info", {"version": "base", "role": "serves"}, 1),
        ("torchperf_version_info", {"version": "b", "role": "shadow"}, 1),
        ("torchperf_version_pairs_total", {"version": "b", "result": "pairs"}, 2),
        ("torchperf_version_pairs_total", {"version": "b", "result": "candidate_late"}, 1),
        ("torchperf_version_pairs_total", {"version": "b", "result": "different"}, 1),
        ("torchperf_version_pairs_total", {"version": "b", "result": "candidate_refused"}, 1),
        ("torchperf_version_score", {"version": "b"}, 0.5),
        ("torchperf_version_difference_seconds", {"version": "b", "statistic": "p99"}, 0.09),
        ("torchperf_tier_engine", {**TIER, "engine": "aoti", "package": "f00df00df00d"}, 1),
        ("torchperf_tier_engine", {"tier": "fast", "engine": "eager", "package": ""}, 1),
        ("torchperf_tier_recompiles_total", TIER, 2),
        ("torchperf_tier_shape_hits_total", TIER, 8),
        ("torchperf_tier_padding_ratio", TIER, 0.5),
        ("torchperf_out_of_memory_total", {}, 4),
        ("torchperf_unrecorded_rows_total", {}, 0),
    ],
)
def test_given_stages_when_scraped_then_each_metric_is_there_in_base_units(stages, name, labels, value):
    assert registry_of(stages).get_sample_value(name, {"stage": "perception", **labels}) == value


@pytest.mark.parametrize(
    ("name", "labels", "least", "most"),
    [
        ("torchperf_worker_resident_bytes", {"stage": "perception", "worker": "0"}, 1e7, float("inf")),
        ("torchperf_history_bytes", {}, 4096, 4096),
        ("torchperf_cuda_memory_bytes", {"kind": "free"}, 3 << 20, 3 << 20),
        ("torchperf_shared_memory_bytes", {}, 6 << 20, 6 << 20),
        ("torchperf_memory_used_ratio", {}, 0.25, 0.25),
        ("torchperf_memory_share_ratio", {}, 0.7, 0.7),
    ],
)
def test_given_workers_when_scraped_then_memory_is_in_bytes_and_its_share_is_of_the_limit(
    stages, name, labels, least, most
):
    assert least <= registry_of(stages).get_sample_value(name, labels) <= most


@pytest.fixture
def fusing(make_stage):
    """A stage whose second input was there for the first of two frames, which waited for it."""
    stage = make_stage("fusion", sync=["cloud slop 40 wait 15"])
    stage.sync.bind([("image", "sensor_msgs/msg/Image"), ("cloud", "sensor_msgs/msg/PointCloud2")])
    stage.sync.begin(10**9, 10**9, 0.0, 100.0)
    stage.sync.take(1, 10**9 - 7_000_000, "cloud", 10**9 + 5_000_000)
    stage.sync.settle(10**9, 10**9 + 5_000_000, {})
    stage.sync.begin(2 * 10**9, 2 * 10**9, 15.0, 100.0)
    stage.sync.settle(2 * 10**9, 2 * 10**9, {})
    return stage


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("torchperf_input_frames_total", {"result": "matched"}, 1),
        ("torchperf_input_frames_total", {"result": "missing"}, 1),
        ("torchperf_input_waits_total", {}, 1),
        ("torchperf_input_wait_seconds_total", {}, 0.005),
        ("torchperf_input_skew_seconds", {"statistic": "p50"}, 0.007),
        ("torchperf_input_skew_seconds", {"statistic": "max"}, 0.007),
    ],
)
def test_given_a_synchronised_input_when_scraped_then_its_frames_waits_and_skew_are_there(
    fusing, name, labels, value
):
    labels = {"stage": "fusion", "input": "cloud", **labels}
    assert registry_of([fusing]).get_sample_value(name, labels) == pytest.approx(value)


def test_given_a_synchronised_input_when_reported_then_its_numbers_and_why_it_was_missing_are_there(fusing):
    values = stage_status(fusing, Health.NOMINAL, {}).values
    assert {
        key.removeprefix("input_cloud_"): value for key, value in values.items() if key.startswith("input_")
    } == {
        "matched": "1",
        "missing": "1",
        "waited": "1",
        "unstamped": "0",
        "waited_ms": "5.000",
        "skew_p50_ms": "7.000",
        "skew_max_ms": "7.000",
        "why": "the nearest message was -1007.0 ms off, slop is 40 ms",
    }
    for _ in range(9):
        fusing.sync.begin(2 * 10**9, 2 * 10**9, 15.0, 100.0)
        fusing.sync.settle(2 * 10**9, 2 * 10**9, {})
    assert "without cloud" in stage_status(fusing, Health.NOMINAL, {}).message


def test_given_an_emergency_lane_when_scraped_then_its_latch_and_what_triggered_it_are_there(stages):
    lane = Emergency(config(**{"emergency.sensors": ["button Bool"]}).emergency)
    lane.activate(0)
    registry = CollectorRegistry()
    registry.register(StageCollector(config(), stages, lambda: lane.status(3).values))
    assert registry.get_sample_value("torchperf_emergency_latched") == 0
    lane.saw(0, b"", 1)
    lane.saw(0, b"\0\1\0\0\1", 2)
    assert registry.get_sample_value("torchperf_emergency_latched") == 1
    assert registry.get_sample_value("torchperf_emergency_triggers_total", {"why": "trigger"}) == 1
    assert registry.get_sample_value("torchperf_emergency_triggers_total", {"why": "obstacle"}) == 0
    assert registry.get_sample_value("torchperf_emergency_refused_total") == 1


def test_given_stages_when_scraped_then_no_metric_of_the_table_is_empty_and_versions_are_told(stages):
    registry = registry_of(stages)
    inputs = [f"torchperf_input_{what}" for what in ("frames", "waits", "wait_seconds", "skew_seconds")]
    only_with_a_guard_or_such_inputs = ["torchperf_guard_verdicts", *inputs]
    assert [
        family.name for family in registry.collect() if not family.samples
    ] == only_with_a_guard_or_such_inputs
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    (build,) = [family for family in registry.collect() if family.name == "torchperf_build_info"][0].samples
    assert build.labels["version"] == __version__
    assert re.match(r"\d+\.\d+", build.labels["torch"])
    assert build.labels["ros_distro"]


def test_given_a_stage_whose_lock_is_held_when_scraped_then_nobody_waits(stages):
    class Untouchable:
        def __getattr__(self, name):
            raise AssertionError(f"the stage's lock was asked for {name}")

        __enter__ = __exit__ = __getattr__

    for stage in stages:
        stage.lock = Untouchable()
    assert b"torchperf_frames_total" in generate_latest(registry_of(stages))


def test_given_frames_and_scrapes_at_once_then_every_answer_was_counted_once(
    stages, make_answer, answered, request
):
    registry, labels = registry_of(stages), {"stage": "planning", "tier": "full"}
    answer, over = make_answer(), threading.Event()

    def scrape():
        counts = []
        while not (counts and over.is_set()):
            generate_latest(registry)
            counts.append(registry.get_sample_value("torchperf_latency_seconds_count", labels) or 0.0)
        return counts

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    request.addfinalizer(lambda: sys.setswitchinterval(before_s))
    with ThreadPoolExecutor() as scrapers:
        scraped = [scrapers.submit(scrape) for _ in range(3)]
        for _ in range(2000):
            answered(stages[1], answer)
        over.set()
    for one in scraped:
        assert one.result() == sorted(one.result())
    assert registry.get_sample_value("torchperf_latency_seconds_count", labels) == 2000
    assert registry.get_sample_value("torchperf_unrecorded_rows_total", {"stage": "planning"}) == 0


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian's package prometheus)"
)
def test_given_what_is_exported_when_promtool_checks_it_then_it_has_nothing_to_say(stages):
    text = generate_latest(registry_of(stages))
    done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


@pytest.fixture
def export(stages):
    """Starts exporters on ports of their own, and gives each with its URL."""
    with contextlib.ExitStack() as open_ones:

        def start(**options):
            exporter = MetricsExporter(config(metrics_port=(port := free_port()), **options), stages)
            open_ones.callback(exporter.close)
            return exporter, port

        yield start


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as reply:
        return reply.read().decode()


def test_given_an_exporter_when_asked_over_http_then_it_answers_until_it_is_closed_and_frees_its_port(
    stages,
):
    port = free_port()
    for _ in range(2):
        exporter = MetricsExporter(config(metrics_port=port), stages)
        text = scrape(port)
        assert 'torchperf_frames_total{stage="perception"} 5.0' in text
        assert "process_resident_memory_bytes" in text
        exporter.close()
        with pytest.raises(urllib.error.URLError):
            scrape(port)


@pytest.mark.parametrize(("address", "open_to_others"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_given_an_address_when_serving_then_nothing_else_is_open(export, address, open_to_others):
    _, port = export(metrics_address=address)
    with socket.socket() as other:
        other.settimeout(20)
        assert (other.connect_ex(("127.0.0.2", port)) == 0) is open_to_others


def test_given_a_port_that_is_taken_or_an_address_of_another_machine_when_exported_then_it_is_an_os_error(
    stages,
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="Address already in use"):
            MetricsExporter(config(metrics_port=taken.getsockname()[1]), stages)
    with pytest.raises(OSError, match="assign requested address"):
        MetricsExporter(config(metrics_port=free_port(), metrics_address="192.0.2.1"), stages)


def test_given_clients_that_ask_for_nothing_when_another_one_scrapes_then_it_is_refused_and_counted_until_they_go(
    export, monkeypatch
):
    def answering():
        return [one for one in threading.enumerate() if "process_request_thread" in one.name]

    monkeypatch.setattr(_ScrapeHandler, "timeout", 60.0)
    _, port = export()
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    with pytest.raises(OSError, match=r"503|reset"):  # the connection may be closed before its words come
        scrape(port)
    assert len(answering()) <= 4
    for one in idle:
        one.close()
    wait_until(lambda: not answering(), lambda: "every place is free")
    assert float(re.search(r"^torchperf_refused_scrapes_total (\S+)$", scrape(port), re.M)[1]) >= 1.0


def test_given_a_client_that_is_silent_when_its_time_is_over_then_its_place_is_free_again(
    export, monkeypatch
):
    monkeypatch.setattr(_ScrapeHandler, "timeout", 0.1)
    _, port = export()
    for _ in range(12):
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.settimeout(20)
            assert silent.recv(100) == b""
    monkeypatch.setattr(_ScrapeHandler, "timeout", 60.0)
    assert re.search(r"^torchperf_refused_scrapes_total 0\.0$", scrape(port), re.M)


def test_given_a_process_without_descriptors_when_a_client_comes_then_it_is_answered_later_and_none_spins(
    export, limited
):
    exporter, port = export()
    scrape(port)  # loads what the first answer loads
    asked, calls = exporter.server.get_request, []
    exporter.server.get_request = lambda: (calls.append(1), asked())[1]
    with socket.socket() as client:
        with open(os.devnull, "rb") as file:
            lowest = file.fileno()
        with limited("NOFILE", lowest):
            client.connect(("127.0.0.1", port))
            time.sleep(1.0)
            assert len(calls) < 50
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.0 200")


def test_given_a_machine_that_gives_no_threads_when_scraped_then_no_place_is_lost(
    export, monkeypatch, capfd
):
    _, port = export()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("no new thread")))
        for _ in range(8):
            with contextlib.suppress(OSError, http.client.HTTPException):
                scrape(port)
    assert "torchperf_frames_total" in scrape(port)


# -- the table of the docs, and the rules of the examples


ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "config/prometheus/torchperf_rules.yaml"
EXAMPLES = Path(__file__).with_name("torchperf_rules_test.yaml")
DOC = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")


needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian's package prometheus)"
)


@pytest.fixture(scope="module")
def rules():
    (group,) = YAML(typ="safe").load(RULES)["groups"]
    return group["rules"]


def promtool(*arguments):
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)


def rows(pattern):
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.findall(pattern, DOC, re.MULTILINE)
    ]


def test_given_the_table_of_the_document_when_compared_with_what_is_exported_then_they_agree():
    told = [
        (name.strip("`"), kind, re.findall(r"`(\w+)`", labels), text)
        for name, kind, labels, text in rows(r"^\| `torchperf_.*$")
    ]
    metrics = [(field, ["stage", *field.labels]) for field in FIELDS if field.name]
    metrics += [(field, list(field.labels)) for field in NODE_FIELDS]
    assert sorted(told) == sorted((field.name, field.kind, labels, field.text) for field, labels in metrics)


def test_given_the_alerts_of_the_document_when_compared_with_the_rules_then_they_agree(rules):
    told = [(name.strip("`"), severity) for name, _, severity in rows(r"^\| `Torchperf\w+` .*$")]
    assert told == [(rule["alert"], rule["labels"]["severity"]) for rule in rules]


def test_given_whatever_becomes_of_a_frame_when_the_dashboard_is_read_then_a_panel_counts_it():
    dashboard = (ROOT / "config/grafana/torchperf.json").read_text(encoding="utf-8")
    for what in ("answers", "unanswered", "fallbacks", "dropped", "missed_deadlines"):
        assert f"(torchperf_{what}_total{{" in dashboard, what


@needs_promtool
def test_given_the_examples_when_the_rules_are_run_then_each_alert_fires_where_it_should():
    done = promtool("test", "rules", EXAMPLES)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_given_the_configuration_when_checked_then_it_is_valid_and_finds_the_rules(rules):
    done = promtool("check", "config", ROOT / "config/prometheus/prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_given_the_rules_when_read_then_every_metric_that_they_name_is_exported(rules):
    exported = {field.name for field in (*FIELDS, *NODE_FIELDS)}
    for rule in rules:
        named = set(re.findall(r"torchperf_\w+", f"{rule['expr']} {rule['annotations']['runbook']}"))
        assert {name for name in named if name != "torchperf_rules"} <= exported, rule["alert"]


# -- the table of fields


@pytest.fixture
def status(make_stage, make_worker, make_answer, answered):
    """Of a stage with a worker, whose tiers are called 1 and 2, after a frame."""
    facts = [{"name": name, "engine": "aoti", "package": "1234"} for name in ("1", "2")]
    worker = make_worker(facts=facts)
    stage = make_stage(workers=(worker, None), tiers=["1", "2"])
    answered(stage, make_answer())
    return StageState("perception", typed(stage_status(stage, Health.NOMINAL, {77: 3 << 20}).values))


READ = (
    "frames",
    "answered",
    "unanswered",
    "dropped",
    "stale",
    "restarts",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "max_ms",
)
READ += (
    "budget_ms",
    "tier_1_predicted_ms",
    "worker_0_rss_mib",
    *(f"fallback_{one.word}" for one in Fallback),
)


@pytest.mark.parametrize("key", [*READ, *(one.word for one in Outcome), "superseded"])
def test_given_a_status_when_read_then_its_numbers_are_numbers(status, key):
    assert (
        status.number(key) == status.number(key) or key == "tier_1_predicted_ms"
    )  # nan: before the first run
    assert isinstance(status.values[key], float)


def test_given_words_that_look_like_numbers_when_read_then_they_stay_words(status):
    words = ("tier", "tiers", "worker_0_pid", "worker_0_state", "tier_1_package", "engine", "health")
    assert [status.values[key] for key in words] == ["1", "1,2", "77", "idle", "1234", "aoti", "NOMINAL"]
    assert status.count("answered") == 1
    assert typed({"version": "2", "frames": "many"}) == {"version": "2", "frames": "many"}


def test_given_counters_that_the_watch_follows_when_looked_up_then_the_table_has_each():
    keys = {field.key for field in FIELDS if isinstance(field.key, str)}
    assert {key for key in COUNTED if key not in keys and f"tier_{{}}_{key}" not in keys} == set()


def test_given_the_table_when_read_then_no_name_stands_twice_and_each_metric_has_a_meaning():
    twice = Counter(field.name for field in METRICS)
    assert max(twice.values()) == 1
    assert all(field.text for field in METRICS)
    assert {field.kind for field in METRICS} == {"counter", "gauge", "histogram"}
    assert all(not field.key for field in NODE_FIELDS)
